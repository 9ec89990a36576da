"""Copies of the tree, and forks of this process that run tests in them, with torch imported and nothing of ours."""

from __future__ import annotations

import compileall
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import Phase

from tests.flaky import AGAIN
from tests.mutants.rooms import REPO
from tests.quick import MAX_EXAMPLES, limit_examples

QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
PRELOADED = [
    "torch",
    "numpy",
    "hypothesis",
    "pydantic",
    "yaml",
    "rich.console",
    "httpx2",
    "transformers",
    "safetensors",
]


def copy_tree(folder: Path) -> Path:
    """A copy of what the tests read, compiled, so that a fork compiles only the file that it changes."""
    unread = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")

    def ignored(of: str, names: list[str]) -> set[str]:
        return unread(of, names) | ({"runs", "build"} if Path(of) == REPO else set())

    shutil.copytree(REPO, folder, ignore=ignored)
    compileall.compile_dir(folder / "rl_megatron", quiet=1)
    compileall.compile_dir(folder / "launcher", quiet=1)
    return folder


def enter(tree: Path) -> None:
    """In a fork: what is imported and started from here on is of ``tree``; what is said is in ``tree``/output."""
    os.setsid()
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), AGAIN: "1"}  # for processes that tests start; and no test runs again
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "rl_megatron", "launcher", "tools")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() != REPO)]
    sys.dont_write_bytecode = True  # a fork's .pyc would be the next one's: same size, same second


class Short:
    """The plugin by which property tests try few examples, and do not look for shorter ones that fail."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item], limit: int = MAX_EXAMPLES) -> None:
        """Gives each property test such settings."""
        limit_examples(items, limit, (Phase.explicit, Phase.generate))


def run_tests(tree: Path, tests: Sequence[str], quick: bool) -> None:
    """In a fork: pytest in ``tree``; the exit status is pytest's."""
    enter(tree)
    status = 70
    try:
        plugins = [Short()] if quick else []
        status = int(pytest.main([*QUIET, "-x", "--tb=short", *tests], plugins=plugins))
        import rl_megatron

        if not (rl_megatron.__file__ or "").startswith(str(tree)):
            status = 71  # the tests saw another tree than the changed one
    except BaseException as error:  # noqa: BLE001  a mutant may raise anything while it is imported
        print(repr(error))
        status = 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(child: int, limit: float) -> int | None:
    """The exit status of a fork that leads a group, of which nothing is left; None if it took longer than ``limit``
    seconds."""
    end, out = time.monotonic() + limit, None
    while time.monotonic() < end and out is None:
        done, status = os.waitpid(child, os.WNOHANG)
        out = os.waitstatus_to_exitcode(status) if done else None
        time.sleep(0 if done else 0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if out is None:
        os.waitpid(child, 0)
    return out


def outcome(tree: Path, tests: Sequence[str], limit: float, quick: bool = False) -> int | None:
    """pytest's exit status; None if it took longer than ``limit`` seconds."""
    child = os.fork()
    if child == 0:
        run_tests(tree, tests, quick)
    return wait(child, limit)


def preload() -> None:
    """Imports what most tests import."""
    for name in PRELOADED:
        importlib.import_module(name)


def write_source(file: Path, text: str) -> None:
    """Writes a source file, whose compiled form goes."""
    file.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def failed_test(tree: Path, status: int | None) -> str:
    """The first test that pytest's output in ``tree`` says failed; else how pytest ended."""
    output = (tree / "output").read_text(errors="replace")
    if status is None:
        return "the limit of time"
    if status > 2:  # neither a failed test nor a file that cannot be collected, or the wrong tree: nothing was tried
        raise RuntimeError(f"pytest ended with {status}:\n{output}")
    failed = (n.split(" ", 1)[1].split(" - ")[0] for n in output.splitlines() if n.startswith(("FAILED ", "ERROR ")))
    return next(failed, f"the end of its process ({status})")
