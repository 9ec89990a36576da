"""``make mutants``: does a test fail for each fault that cosmic-ray puts into the rooms of rooms.py?

Each mutant is tried in a copy of the tree (trees.py) with the tests that execute what it changes (served.py).
One that no test kills and that equivalents.yaml does not name ends the command with 1 and is printed as a diff. One
that killed.jsonl records is tried with the test that killed it before, and then with the others.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.flaky import is_rerun
from tests.mutants.draw import drawn, found_again, mutants_at
from tests.mutants.killed import (
    FILE,
    Equivalents,
    Killed,
    changed_tests,
    file_of,
    killed_mutants,
    named_equivalents,
    write_killed,
)
from tests.mutants.rooms import REPO, ROOMS, Room, files_of
from tests.mutants.selected import Mutant
from tests.mutants.served import IMPORT, Served
from tests.mutants.trees import copy_tree, failed_test, outcome, preload, write_source

FIRST_LIMIT = 1800.0  # seconds that a room's tests may take without a mutant
NOT_FOUND = (4, 5)  # pytest's exit status for a test that there is no more


def named(test: str) -> bool:
    """Whether a record can name it: how else a process ended is no test."""
    return test.startswith("tests/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A mutant, the test recorded to kill it, and its room. ``thorough``: all is imported again, for all its tests.

    ``confirm``: a test kills it only if it also fails when it runs alone, so that a record names no flaky one.
    """

    mutant: Mutant
    last: str
    room: Room
    confirm: bool
    thorough: bool = False

    def killer(self, served: Served) -> str | None:
        """The test that fails with the mutant in the tree of ``served``, which is restored; None if all pass."""
        mutant, seen, again = self.mutant, served.seen, self.thorough
        write_source(served.tree / mutant.path, mutant.mutated)
        try:
            seeing, processes = seen.groups(mutant)
            property_tests = [test for test in seeing if test.startswith("tests/property/")]
            last = [self.last] if self.last in seen.seconds else []
            for tests, quick in ((last, False), (seeing, True), (processes, True), (property_tests, False)):
                by = None if again else served.killer(mutant.path, tests, quick)
                again |= by == IMPORT
                if by is not None and not again:
                    alone = self.confirm and named(by) and tests != last
                    if not alone or served.killer(mutant.path, [by], quick):
                        return by
            return self._whole(served) if again or "" in seen.at(mutant) else None
        finally:
            write_source(served.tree / mutant.path, mutant.source)

    def _whole(self, served: Served) -> str | None:
        limit, quick = 60 + 3 * sum(served.seen.seconds.values()), not self.thorough
        left_out = [word for test in served.seen.failed for word in ("--deselect", test)]
        for every in ((self.last,) if self.last else (), self.room.first, self.room.after):
            tests = tuple(test for test in every if served.processes or not is_rerun(test))
            status = outcome(served.tree, (*left_out, *tests), limit, quick) if tests else 0
            if status != 0 and not (tests == (self.last,) and status in NOT_FOUND):
                test = failed_test(served.tree, status)
                alone = self.confirm and named(test) and tests != (self.last,)
                if not alone or outcome(served.tree, (test,), limit, quick) != 0:
                    return test
        return None


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


def run_trials(
    trials: Sequence[Trial], trees: Sequence[Path], paths: Sequence[str], report: Report | None, processes: bool = True
) -> Killed:
    """Tries the mutants of a room's files, as many at once as there are trees. Without a report those that are killed
    are its answer alone."""
    start, room, seen, free = time.monotonic(), trials[0].room, None, []
    for tree in trees[: len(trials)]:
        free.append(Served(tree, paths, (*room.first, *room.after), FIRST_LIMIT, seen, processes))
        seen = free[0].seen
    for test in free[0].seen.failed:
        print(f"left out, for it fails without a mutant: {test}")
    before, out = time.monotonic() - start, {}

    def tried(trial: Trial) -> str | None:
        served = free.pop()
        try:
            return trial.killer(served)
        finally:
            free.append(served)

    with ThreadPoolExecutor(len(free)) as pool:
        for n, (trial, by) in enumerate(zip(trials, pool.map(tried, trials), strict=True), 1):
            if by is not None:
                out[trial.mutant.path, trial.mutant.place] = by
            if report:
                report.add(trial, by, (time.monotonic() - start - before) / n * (len(trials) - n))
    for served in free:
        served.close()
    each = (time.monotonic() - start - before) / len(trials)
    print(f"{room.name}: {before:.0f} s without a mutant; {len(trials)} mutants, each {each:.1f} s", flush=True)
    return out


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
    parser.add_argument("--thorough", action="store_true", help="try all tests, each time imported again: days")
    parser.add_argument("--in-process", action="store_true", help="leave out tests that start processes")
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
    by_name = {room.name: room for room in ROOMS}
    rooms = [by_name[name] for name in options.room or by_name]
    chosen = [(room, chosen_mutants(room, killed, options)) for room in rooms]
    report = Report(total=sum(len(mutants) for _, mutants in chosen), equivalents=equivalents)
    with tempfile.TemporaryDirectory() as folder:
        trees = [copy_tree(Path(folder).resolve() / str(n)) for n in range(options.jobs)]
        for room, mutants in ((room, mutants) for room, mutants in chosen if mutants):
            tests = [killed.get((mutant.path, mutant.place), "") for mutant in mutants]
            trials = [
                Trial(
                    mutant=mutant,
                    last=test if named(test) else "",
                    room=room,
                    confirm=options.record,
                    thorough=options.thorough,
                )
                for mutant, test in zip(mutants, tests, strict=True)
            ]
            if options.changed and (there := {file_of(test) for test in tests if (REPO / file_of(test)).exists()}):
                few = replace(room, first=tuple(sorted(there)), after=())
                done = run_trials([replace(trial, room=few) for trial in trials], trees, files_of(room), None)
                report.tried += len(done)
                trials = [trial for trial in trials if (trial.mutant.path, trial.mutant.place) not in done]
            if trials:
                run_trials(trials, trees, files_of(room), report, not options.in_process)
            if options.record:
                write_killed(killed | report.results)
    print(
        f"{report.total} mutants: {report.total - report.equal - report.alive} killed, {report.equal} equivalent, "
        f"{report.alive} alive; {len(gone)} recorded ones are gone"
    )
    return int(report.alive > 0)


if __name__ == "__main__":
    sys.exit(main())
