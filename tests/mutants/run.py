"""``make mutants``: does a test fail for each of 400 faults that cosmic-ray puts into the arithmetic?

Each mutant is tried in a copy of the tree by a fork of this process, which has torch imported and nothing of ours.
One that no test kills and that equivalents.yaml does not name ends the command with 1 and is printed as a diff.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.draw import Mutant, drawn
from tests.mutants.equivalents import Equivalents, named_equivalents

REPO = Path(__file__).parents[2]
FIRST_LIMIT = 1800.0  # seconds that the tests may take without a mutant: a minute where nothing else runs

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
LOSSES = ["tests/unit/algorithms", *(f"tests/property/test_losses{n}.py" for n in ("", "_corrections", "_terms"))]
LOSSES += ["tests/property/test_losses_metrics.py"]
ADVANTAGES = ["tests/property/test_advantages.py", "tests/property/test_advantages_returns.py"]
CREDIT = ["tests/unit/training/test_credit.py", *ADVANTAGES]
PACKING = ["tests/property/test_packing_properties.py", "tests/property/test_packed_micro_batch.py"]
UPDATE = ["tests/unit/training"]
KEYS = ["tests/unit/test_every_key_acts.py"]

# The tests that can see a fault of a file, those that are likely to before the others, which are tried where they do
# not. The longest prefix of the file's path decides. A test that is missing here can only make more mutants live.
TESTS = {
    "rl_megatron/algorithms/": (LOSSES, UPDATE),
    "rl_megatron/algorithms/advantages.py": (CREDIT, [*LOSSES[:1], *UPDATE]),
    "rl_megatron/algorithms/returns.py": (CREDIT, [*LOSSES[:1], *UPDATE]),
    "rl_megatron/algorithms/segments.py": (ADVANTAGES, [*LOSSES[:1], *UPDATE]),
    "rl_megatron/algorithms/shaping.py": (["tests/unit/algorithms/test_shaping.py"], [*LOSSES[:1], *UPDATE]),
    "rl_megatron/training/": (UPDATE, [*LOSSES[:1], *KEYS]),
    "rl_megatron/training/credit/": (CREDIT, [*LOSSES[:1], *UPDATE, *KEYS]),
    "rl_megatron/data/bins.py": (PACKING, ["tests/unit/data/test_samples.py", *UPDATE]),
    "rl_megatron/data/packing.py": (PACKING, ["tests/unit/data/test_samples.py", *UPDATE]),
}


def tests_of(path: str) -> tuple[list[str], list[str]]:
    """The tests to run first for a file, and those to run after them."""
    return TESTS[max((prefix for prefix in TESTS if path.startswith(prefix)), key=len)]


def copy_tree(folder: Path) -> Path:
    """A copy of what the tests read, compiled, so that a fork compiles only the file that it changes."""
    unread = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")

    def ignored(of: str, names: list[str]) -> set[str]:
        return unread(of, names) | ({"runs", "build"} if Path(of) == REPO else set())

    shutil.copytree(REPO, folder, ignore=ignored)
    compileall.compile_dir(folder / "rl_megatron", quiet=1)
    compileall.compile_dir(folder / "launcher", quiet=1)
    return folder


def run_tests(tree: Path, tests: list[str]) -> None:
    """In a fork: pytest in ``tree``; the exit status is pytest's, its words are in ``tree``/output."""
    os.setsid()
    os.chdir(tree)
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "rl_megatron", "launcher", "tools")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() != REPO)]
    sys.dont_write_bytecode = True  # a fork's .pyc would be the next one's: same size, same second
    status = 70
    try:
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", *tests]))
        import rl_megatron

        if not (rl_megatron.__file__ or "").startswith(str(tree)):
            status = 71  # the tests saw another tree than the changed one
    except BaseException as error:  # noqa: BLE001  a mutant may raise anything while it is imported
        print(repr(error))
        status = 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def outcome(tree: Path, tests: list[str], limit: float) -> int | None:
    """pytest's exit status; None if it took longer than ``limit`` seconds."""
    child = os.fork()
    if child == 0:
        run_tests(tree, tests)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def seconds_without_a_mutant(tree: Path) -> float:
    """How long all tests take. Raises RuntimeError if one fails, or if they take longer than FIRST_LIMIT."""
    start = time.monotonic()
    status = outcome(tree, sorted({test for both in TESTS.values() for tests in both for test in tests}), FIRST_LIMIT)
    if status != 0:
        said = f"took longer than {FIRST_LIMIT:.0f} s" if status is None else f"ended with {status}"
        raise RuntimeError(f"{(tree / 'output').read_text(errors='replace')}\nwithout a mutant the tests {said}")
    return time.monotonic() - start


def killer(tree: Path, mutant: Mutant, limit: float) -> str | None:
    """The test that fails with the mutant in ``tree``, which is restored afterwards; None if all pass."""
    status: int | None = 0
    file = tree / mutant.path
    file.write_text(mutant.mutated, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    for tests in tests_of(mutant.path):
        status = outcome(tree, tests, limit)
        if status != 0:
            break
    file.write_text(mutant.source, encoding="utf-8")
    if status is None:
        return f"the limit of {limit:.0f} s"
    if status == 0:
        return None
    output = (tree / "output").read_text(errors="replace")
    if status > 2:  # neither a failed test nor a file that cannot be collected, or the wrong tree: nothing was tried
        raise RuntimeError(f"pytest ended with {status}:\n{output}")
    failed = (n.split(" ", 1)[1].split(" - ")[0] for n in output.splitlines() if n.startswith(("FAILED ", "ERROR ")))
    return next(failed, f"the end of its process ({status})")


def main() -> int:
    """Tries the mutants two at a time; 1 where one is alive and not named as equivalent."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=400, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--after", type=int, default=0, help="leave out the first ones, which an ended command tried")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at once")
    options = parser.parse_args()
    if not 0 <= options.after < options.sample:
        parser.error(f"--after {options.after}: --sample {options.sample} leaves none; give 0 to {options.sample - 1}")
    for name in PRELOADED:
        importlib.import_module(name)
    paths = [f"rl_megatron/training/{n}.py" for n in ("update", "measures", "schedule", "selection")]
    paths += [f"rl_megatron/data/{n}.py" for n in ("bins", "packing")]
    folders = ("rl_megatron/training/credit", "rl_megatron/algorithms")
    paths += sorted(str(p.relative_to(REPO)) for folder in folders for p in (REPO / folder).glob("*.py"))
    equivalents = named_equivalents()
    mutants = list(itertools.islice(drawn(REPO, paths, options.seed), options.after, options.sample))
    with tempfile.TemporaryDirectory() as folder:
        trees = [copy_tree(Path(folder).resolve() / str(n)) for n in range(options.jobs)]
        limit = 2 * max(seconds_without_a_mutant(tree) for tree in trees)  # more is an endless loop
        return report(mutants, trees, equivalents, limit)


def report(mutants: list[Mutant], trees: list[Path], equivalents: Equivalents, limit: float) -> int:
    """Print each result as it comes, and the totals."""
    free, start, equal, survivors = list(trees), time.monotonic(), 0, 0

    def tried(mutant: Mutant) -> str | None:
        tree = free.pop()
        try:
            return killer(tree, mutant, limit)
        finally:
            free.append(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for n, (mutant, by) in enumerate(zip(mutants, pool.map(tried, mutants), strict=True), 1):
            why = equivalents.get((mutant.path, *mutant.lines())) if by is None else None
            equal, survivors = equal + (why is not None), survivors + (by is None and why is None)
            left = (time.monotonic() - start) / n * (len(mutants) - n) / 60
            said = f"killed by {by}" if by else f"equivalent: {why}" if why else f"ALIVE\n{mutant.diff()}"
            print(f"{n} of {len(mutants)}, {survivors} alive, {left:.0f} min left: {mutant.path} {said}", flush=True)
    print(f"{len(mutants)} mutants: {len(mutants) - equal - survivors} killed, {equal} equivalent, {survivors} alive")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
