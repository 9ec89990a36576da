"""Skips the kit where there is no GPU, and prints what it measured."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.machine import MACHINE, NOTES, Machine, figures, table, versions


@pytest.fixture(scope="session")
def machine() -> Machine:
    """Where ranks run. Skips without a GPU, or where it is hidden, as from tests without ``-m gpu``."""
    if not (MACHINE.pretended or torch.cuda.is_available()):
        pytest.skip("no GPU is seen; `make test-gpu` runs this on a machine that has one")
    return MACHINE


@pytest.fixture
def on_gpu(machine: Machine) -> Machine:
    """As ``machine``, but only with a real GPU."""
    if machine.pretended:
        pytest.skip("needs a real GPU")
    return machine


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say where figures are, should the run be ended before its table."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"figures are in {figures()} as soon as they are measured")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table, also if tests failed, and then what it was measured on, which a GPU that hangs may not say."""
    if NOTES:
        terminalreporter.write(f"\n{table()}\n", flush=True)
        terminalreporter.write(f"Measured on {', '.join(versions())}.\n")
