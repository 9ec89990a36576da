"""``make mutants``: does a test fail for each fault that cosmic-ray puts into the rooms of rooms.py?

Each mutant is tried in a copy of the tree by a fork of this process (trees.py).
One that no test kills and that equivalents.yaml does not name ends the command with 1 and is printed as a diff. One
that killed.jsonl records is tried with the test that killed it before, and then with the others.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.draw import Mutant, drawn, found_again, mutants_at
from tests.mutants.equivalents import Equivalents, named_equivalents
from tests.mutants.killed import FILE, Killed, changed_tests, file_of, killed_mutants, write_killed
from tests.mutants.rooms import REPO, ROOMS, Room, files_of
from tests.mutants.trees import copy_tree, failed_test, outcome, preload, write_source

FIRST_LIMIT = 1800.0  # seconds that a room's tests may take without a mutant: a minute where nothing else runs
NOT_FOUND = (4, 5)  # pytest's exit status for a test that there is no more


def seconds_without_a_mutant(tree: Path, room: Room) -> float:
    """How long the room's tests take. Raises RuntimeError if they fail twice, or take longer than FIRST_LIMIT."""
    for _ in range(2):
        start = time.monotonic()
        status = outcome(tree, (*room.first, *room.after), FIRST_LIMIT)
        if status == 0:
            return time.monotonic() - start
    said = f"took longer than {FIRST_LIMIT:.0f} s" if status is None else f"ended with {status}"
    output = (tree / "output").read_text(errors="replace")
    raise RuntimeError(f"{output}\nwithout a mutant the tests of {room.name} {said}")


def named(test: str) -> bool:
    """Whether a record can name it: how else a process ended is no test."""
    return test.startswith("tests/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A mutant, the test that is recorded to kill it, and its room, whose tests may take ``limit`` seconds.

    ``confirm``: a test kills it only if it also fails when it runs alone, so that a record names no flaky one.
    """

    mutant: Mutant
    last: str
    room: Room
    limit: float
    confirm: bool

    def killer(self, tree: Path) -> str | None:
        """The test that fails with the mutant in ``tree``, which is restored afterwards; None if all pass."""
        file = tree / self.mutant.path
        write_source(file, self.mutant.mutated)
        try:
            for tests in ((self.last,) if self.last else (), self.room.first, self.room.after):
                status = outcome(tree, tests, self.limit) if tests else 0
                if status == 0 or (tests == (self.last,) and status in NOT_FOUND):
                    continue
                test = failed_test(tree, status)
                alone = self.confirm and named(test) and tests != (self.last,)
                if not alone or outcome(tree, (test,), self.limit) != 0:
                    return test
            return None
        finally:
            write_source(file, self.mutant.source)


@dataclass(kw_only=True)
class Report:
    """Prints each result as it comes, and counts."""

    total: int
    equivalents: Equivalents
    results: Killed = field(default_factory=dict)
    tried: int = 0
    equal: int = 0
    alive: int = 0

    def add(self, trial: Trial, by: str | None, left: float) -> None:
        """Adds one result; ``left`` are the seconds that the rest of its room takes."""
        mutant = trial.mutant
        why = self.equivalents.get((mutant.path, *mutant.lines())) if by is None else None
        self.tried, self.equal, self.alive = self.tried + 1, self.equal + bool(why), self.alive + (not by and not why)
        if by is not None:
            self.results[mutant.path, mutant.place] = by
        again = ", which was recorded as killed" if trial.last else ""
        said = f"killed by {by}" if by else f"equivalent: {why}" if why else f"ALIVE{again}\n{mutant.diff()}"
        print(
            f"{self.tried} of {self.total}, {self.alive} alive, {left / 60:.0f} min left of {trial.room.name}: "
            f"{mutant.path} {said}",
            flush=True,
        )


def run_trials(trials: Sequence[Trial], trees: Sequence[Path], report: Report) -> None:
    """Tries the mutants, as many at once as there are trees."""
    free, start = list(trees), time.monotonic()

    def tried(trial: Trial) -> str | None:
        tree = free.pop()
        try:
            return trial.killer(tree)
        finally:
            free.append(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for n, (trial, by) in enumerate(zip(trials, pool.map(tried, trials), strict=True), 1):
            report.add(trial, by, (time.monotonic() - start) / n * (len(trials) - n))


def cpu_seconds() -> float:
    """What the tests that have ended have had of all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def chosen_mutants(room: Room, killed: Killed, options: argparse.Namespace) -> list[Mutant]:
    """The room's mutants to try: drawn ones, and with the whole draw those that are recorded besides."""
    paths = files_of(room)
    recorded = [one for one in killed if one[0] in paths]
    if options.changed:
        files = changed_tests(options.changed)
        return list(mutants_at(REPO, [one for one in recorded if file_of(killed[one]) in files]))
    mutants = list(itertools.islice(drawn(REPO, paths, options.seed), options.after, options.sample or room.mutants))
    if options.sample or options.after:
        return mutants
    known = {(mutant.path, mutant.place) for mutant in mutants}
    return mutants + list(mutants_at(REPO, [one for one in recorded if one not in known]))


def options_of_command() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    rooms, of_sample = [room.name for room in ROOMS], "mutants to draw in each room, and no recorded ones besides"
    parser.add_argument("--room", action="append", choices=rooms, help="only this one; repeatable")
    parser.add_argument("--sample", type=int, default=0, help=of_sample)
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--after", type=int, default=0, help="leave out each room's first ones")
    parser.add_argument("--changed", default="", metavar="REVISION", help="only recorded ones of tests changed since")
    parser.add_argument("--record", action="store_true", help=f"write what is killed, and by which test, to {FILE}")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at once")
    return parser.parse_args()


def main() -> int:
    """Tries the mutants room by room; 1 where one is alive and not named as equivalent."""
    options = options_of_command()
    preload()
    recorded, equivalents = killed_mutants(), named_equivalents()
    files = sorted({file for room in ROOMS for file in files_of(room)})
    now = {one: found_again(REPO, files, *one) for one in recorded}
    killed = {(path, one[1]): recorded[one] for one, path in now.items() if path is not None}
    gone = [one for one, path in now.items() if path is None]
    for path, place in gone:
        print(f"gone: {path} {place}")
    rooms = [room for room in ROOMS if not options.room or room.name in options.room]
    chosen = [(room, chosen_mutants(room, killed, options)) for room in rooms]
    report = Report(total=sum(len(mutants) for _, mutants in chosen), equivalents=equivalents)
    with tempfile.TemporaryDirectory() as folder:
        trees = [copy_tree(Path(folder).resolve() / str(n)) for n in range(options.jobs)]
        for room, mutants in ((room, mutants) for room, mutants in chosen if mutants):
            seconds, start, cpu = seconds_without_a_mutant(trees[0], room), time.monotonic(), cpu_seconds()
            limit = 2 * seconds + 30  # more is an endless loop
            last = {one: test for one, test in killed.items() if named(test)}
            run_trials(
                [
                    Trial(
                        mutant=mutant,
                        last=last.get((mutant.path, mutant.place), ""),
                        room=room,
                        limit=limit,
                        confirm=options.record,
                    )
                    for mutant in mutants
                ],
                trees,
                report,
            )
            each, work = (time.monotonic() - start) / len(mutants), (cpu_seconds() - cpu) / len(mutants)
            print(f"{room.name}: {seconds:.0f} s without a mutant; each {each:.0f} s, {work:.0f} of a core", flush=True)
            if options.record:
                write_killed(killed | report.results)
    print(
        f"{report.total} mutants: {report.total - report.equal - report.alive} killed, {report.equal} equivalent, "
        f"{report.alive} alive; {len(gone)} recorded ones are gone"
    )
    return int(report.alive > 0)


if __name__ == "__main__":
    sys.exit(main())
