"""What every test shares: a search path of modules that ends with it, torch's threads as it found them, property tests
that try the same examples each time and are not timed on a busy machine, and no collections of garbage among what is
imported.

No test sees a GPU, but for those that ``-m gpu`` asks for.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.flaky import pytest_sessionfinish as pytest_sessionfinish

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Runs before torch is imported; child processes inherit the setting."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # until `pytest_collection_finish`: imports make a million objects, and hardly any garbage


def pytest_collection_finish() -> None:
    """What is imported stays: collections of garbage, some by megatron in tests, need not look at it each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What awaits async tests; a fixture of one value, and not a parameter that their names would show."""
    return "asyncio"


@pytest.fixture(autouse=True)
def own_module_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that a test adds, or the command line for it, are not searched by later tests, nor by their forks."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A test that leaves torch more threads makes all that follow it in this process several times as slow."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if torch and torch.get_num_threads() != before:
        left = torch.get_num_threads()
        torch.set_num_threads(before)
        pytest.fail(f"the test left torch {left} threads instead of {before}")
