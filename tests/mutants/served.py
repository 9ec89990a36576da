"""A room's tests, collected once by a fork; a mutant is tried in forks of that one, where functions get its code.

What a mutant changes in a function is in a code object, which is exchanged where no module is imported again. What it
changes elsewhere (a constant, a default, a decorator) is tried by trees.outcome, which imports all again.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import json
import os
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.flaky import is_rerun
from tests.mutants.selected import Seen, exchanges
from tests.mutants.trees import QUIET, Short, enter, wait
from tests.quick import MAX_EXAMPLES

IMPORT = "import"
TOOL = 70  # the exit status of a fork in which these files fail, and no test
MORE = 15.0  # seconds that a test may take besides five times what it takes without a mutant


class Server:
    """The plugin of pytest that answers requests where pytest would run the tests."""

    def __init__(
        self, tree: Path, files: Sequence[str], pipes: tuple[int, int], seen: coverage.Coverage, processes: bool
    ) -> None:
        self.tree, self.files, self.coverage, self.processes = tree, files, seen, processes
        self.requests, self.answers = os.fdopen(pipes[0]), os.fdopen(pipes[1], "w")
        self.old = {file: compile((tree / file).read_text("utf-8"), str(tree / file), "exec") for file in files}
        self.seconds: dict[str, float] = {}
        self.setup: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a part of a test; what a file's tests share is set up for whichever is first, so it counts for all."""
        part, name = (self.setup, report.location[0]) if report.when == "setup" else (self.seconds, report.nodeid)
        part[name] = max(part.get(name, 0.0), report.duration)
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answers the first request under coverage, and the others without."""
        for file in self.files:
            importlib.import_module(file.removesuffix(".py").replace("/", "."))
        gc.unfreeze()
        live: dict[types.CodeType, list[types.FunctionType]] = {}
        for one in gc.get_objects():
            if isinstance(one, types.FunctionType) and one.__code__.co_filename.startswith(str(self.tree)):
                live.setdefault(one.__code__, []).append(one)
        gc.freeze()
        items = {item.nodeid: item for item in session.items if self.processes or not is_rerun(item.nodeid)}
        for n, line in enumerate(self.requests):
            request = json.loads(line)
            swaps = []
            if request["path"]:
                file = self.tree / request["path"]
                new = compile(file.read_text("utf-8"), str(file), "exec")
                swaps = list(exchanges(self.old[request["path"]], new))
            if any(b is None or (outer and a not in live) for a, b, outer in swaps):
                answer: dict[str, Any] = {"status": 0, "by": IMPORT}
            else:
                limits = {
                    test: limit for test, limit in (request["tests"] or dict.fromkeys(items)).items() if test in items
                }
                child = os.fork()
                if child == 0:
                    for a, b, _ in swaps:
                        for function in live.get(a, []):
                            function.__code__ = b
                    self.run(session, [items[test] for test in limits], [*limits.values()], request["quick"], n == 0)
                status = wait(child, request["limit"])
                answer = {"status": status, "by": (self.tree / "at").read_text("utf-8")}
            if n == 0:
                self.coverage.stop()
            print(json.dumps(answer), file=self.answers, flush=True)
        os._exit(0)

    def run(
        self, session: pytest.Session, items: list[pytest.Item], limits: list[float], quick: bool, measure: bool
    ) -> None:
        """In a fork: the tests in their order, until one fails; with ``measure`` all, and what each executes."""
        status = TOOL
        os.setsid()
        (self.tree / "at").write_text("", "utf-8")
        Short().pytest_collection_modifyitems(items, MAX_EXAMPLES if quick else 1000)
        try:
            for (item, after), limit in zip(itertools.pairwise([*items, None]), limits, strict=True):
                assert item
                (self.tree / "at").write_text(item.nodeid, "utf-8")
                if measure:
                    self.coverage.switch_context(item.nodeid)
                if limit is not None:
                    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if self.failed and not measure:
                    break
            if measure:
                self.coverage.stop()
                data, root = self.coverage.get_data(), len(str(self.tree)) + 1
                lines = {file[root:]: data.contexts_by_lineno(file) for file in data.measured_files()}
                whole = {test: each + self.setup[test.split("::")[0]] for test, each in self.seconds.items()}
                passed = {test: seconds for test, seconds in whole.items() if test not in self.failed}
                seen = {"seconds": passed, "failed": self.failed, "lines": lines}
                (self.tree / "seen").write_text(json.dumps(seen), "utf-8")
            status = int(bool(self.failed) and not measure)
            session._setupstate.teardown_exact(None)
        except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
            status = 1  # a test's, which the mutant changed
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            os._exit(status)


class Served:
    """A room's tests in ``tree``, ready to run; ``seen`` is what another found, or found here at once. Without
    ``processes`` none that starts them."""

    def __init__(
        self,
        tree: Path,
        files: Sequence[str],
        tests: Sequence[str],
        limit: float,
        seen: Seen | None,
        processes: bool = True,
    ) -> None:
        self.tree, self.processes = tree, processes
        (there, requests), (answers, back) = os.pipe(), os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(requests), os.close(answers)
            enter(tree)
            covered = coverage.Coverage(None, config_file=False, include=[str(tree / file) for file in files])
            covered.start()
            server = Server(tree, files, (there, back), covered, processes)
            pytest.main([*QUIET, *tests], plugins=[server])
            os._exit(TOOL)
        os.close(there), os.close(back)
        self.requests, self.answers = os.fdopen(requests, "w"), os.fdopen(answers)
        if self._ask("", {"": 0} if seen else {}, False, limit)[0] != 0:
            raise RuntimeError(f"{(tree / 'output').read_text(errors='replace')}\nwithout a mutant the tests end early")
        self.seen = seen or Seen(**json.loads((tree / "seen").read_text("utf-8")))

    def _ask(self, path: str, tests: dict[str, float], quick: bool, limit: float) -> tuple[int | None, str]:
        print(
            json.dumps({"path": path, "tests": tests, "quick": quick, "limit": limit}), file=self.requests, flush=True
        )
        answer = self.answers.readline()
        if not answer:
            raise RuntimeError((self.tree / "output").read_text(errors="replace"))
        return tuple(json.loads(answer).values())

    def killer(self, path: str, tests: Sequence[str], quick: bool) -> str | None:
        """The first of ``tests`` that fails, hangs or ends its process with the mutant in the file ``path``; IMPORT
        if that must be imported again; None if all pass."""
        if not tests:
            return None
        limits = {test: MORE + 5 * self.seen.seconds.get(test, 1.0) for test in tests}
        status, by = self._ask(path, limits, quick, sum(limits.values()))
        if status == TOOL:
            raise RuntimeError((self.tree / "output").read_text(errors="replace"))
        return None if status == 0 and by != IMPORT else by

    def close(self) -> None:
        """Ends the process of the collected tests."""
        self.requests.close()
        os.waitpid(self.child, 0)
