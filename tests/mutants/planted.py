"""``make mutants PLANTED=1``: does each planted fault's test fail?

Mutants of ranks, engines and servers would take days. planted.yaml has faults of them that were thought out. Each is
put into a copy of the tree, where its test must fail. The command ends with 1 where one lives, or its old text is not
in its file exactly once. It imports nothing that draws mutants.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.mutants.rooms import REPO
from tests.mutants.trees import copy_tree, failed_test, outcome, preload, write_source

FILE = "tests/mutants/planted.yaml"
LIMIT = 1200.0  # seconds that a test may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A fault: ``new`` in place of ``old`` in the file ``path``. ``test`` must fail with it."""

    name: str
    path: str
    old: str
    new: str
    test: str

    def problem(self, repository: Path = REPO) -> str | None:
        """The reason why it cannot be planted, if there is one."""
        file, test = repository / self.path, self.test.split("::")
        if not file.exists():
            return f"{self.path} does not exist"
        if (count := file.read_text("utf-8").count(self.old)) != 1:
            return f"{self.path} has its old text {count} times, and not once"
        tests = repository / test[0]
        if not tests.exists() or f"def {test[1].split('[')[0]}(" not in tests.read_text("utf-8"):
            return f"there is no test {self.test}"
        return None

    def killer(self, tree: Path) -> str | None:
        """The test that fails with the fault in ``tree``, which is restored afterwards; None if all pass."""
        file = tree / self.path
        source = file.read_text("utf-8")
        write_source(file, source.replace(self.old, self.new))
        try:
            status = outcome(tree, [self.test], LIMIT)
            return None if status == 0 else failed_test(tree, status)
        finally:
            write_source(file, source)


def planted_faults() -> list[Planted]:
    """What the file says."""
    return [Planted(**one) for one in yaml.safe_load((REPO / FILE).read_text("utf-8"))]


def main() -> int:
    """Tries the faults one after another; 1 where one lives or cannot be planted, or a test fails without one."""
    parser = argparse.ArgumentParser(prog="make mutants PLANTED=1", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this fault; repeatable")
    only, faults = parser.parse_args().only, planted_faults()
    if unknown := {*only} - {fault.name for fault in faults}:
        parser.error(f"{FILE} has no fault {min(unknown)}")
    chosen = [fault for fault in faults if not only or fault.name in only]
    problems = {fault.name: problem for fault in chosen if (problem := fault.problem())}
    for name, problem in problems.items():
        print(f"{name}: {problem}; name the text that it has become")
    preload()
    alive = len(problems)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder).resolve() / "tree")
        status = outcome(tree, sorted({fault.test for fault in chosen if fault.name not in problems}), 3 * LIMIT)
        if status != 0:
            print((tree / "output").read_text(errors="replace"))
            print(f"without a fault {failed_test(tree, status)} fails")
            return 1
        for fault in chosen:
            if fault.name not in problems:
                began = time.monotonic()
                by = fault.killer(tree)
                alive += by is None
                said = f"ALIVE: {fault.test} passes" if by is None else f"killed by {by}"
                print(f"{fault.name}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen)} planted faults: {alive} alive")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
