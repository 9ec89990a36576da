"""The plugin of ``make test``: property tests try 20 examples, and a unit test that starts a process fails.

Starting processes is a quarter of the time of all tests. What starts one is in tests/processes, or in a folder of runs.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import Phase, settings

MAX_EXAMPLES = 20
WITHOUT_PROCESSES = ("tests/unit/", "tests/tools/", "tests/property/")
SHARED = ("rl_megatron.chat_templates", "rl_megatron.rewards.format_worker")  # one a session, of what needs no torch
EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")

_process = os.getpid()
_starts: list[str] = []


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    shared = event == "subprocess.Popen" and arguments[1][-1] in SHARED  # type: ignore[index]
    if event in EVENTS and os.getpid() == _process and not shared:
        _starts.append(f"{event} {arguments[0] if arguments else ''}")


def limit_examples(items: list[pytest.Item], limit: int, phases: Sequence[Phase]) -> None:
    """Limits the examples of each property test to ``limit``, found in ``phases``."""
    for item in items:
        test = getattr(item, "function", None)
        if (given := getattr(test, "_hypothesis_internal_use_settings", None)) is not None:
            few = settings(given, max_examples=min(limit, given.max_examples), phases=phases)
            test._hypothesis_internal_use_settings = few  # type: ignore[union-attr]


def pytest_configure() -> None:
    """Watches what tests start from here on."""
    platform.processor()  # the one call of platform that starts a process, once: clients of HTTP name the machine by it
    sys.addaudithook(_watch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limits the examples of each property test."""
    limit_examples(items, MAX_EXAMPLES, tuple(Phase))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forgets what was started before the test."""
    _starts.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fails a unit test that has started a process."""
    yield
    if _starts and item.nodeid.startswith(WITHOUT_PROCESSES):
        pytest.fail(f"a unit test started a process ({_starts[0]}); move it to tests/processes", pytrace=False)
