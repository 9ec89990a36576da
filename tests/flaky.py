"""Runs failed tests of processes, engines and the cluster once more, alone, after the session.

A test that passes then does not fail the session. It is printed as ``flaky: NAME`` with its first failure, and
CONTRIBUTING.md says that it is repaired first.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FOLDERS = ("cluster", "distributed", "e2e", "engines", "environments", "pretended_gpu", "processes")
"""Folders of tests/ whose tests start processes."""
MAX_TESTS = 40  # that are run again; more than that is no accident
MAX_SECONDS = 1200.0
MAX_LINES = 60  # of a failure
AGAIN = "PYTEST_AGAIN"  # in the environment of the second run


def is_rerun(nodeid: str) -> bool:
    """True if the test with this id starts processes, by its folder."""
    return nodeid.startswith(tuple(f"tests/{folder}/" for folder in FOLDERS))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Sets the session's exit status to 0 if all failed tests may run again, and pass."""
    config = session.config
    if exitstatus != pytest.ExitCode.TESTS_FAILED or hasattr(config, "workerinput") or AGAIN in os.environ:
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    first = {report.nodeid: report for kind in ("error", "failed") for report in reporter.stats.get(kind, [])}
    if not first or len(first) > MAX_TESTS or not all(map(is_rerun, first)):
        return
    print(f"\nrunning {len(first)} failed tests of processes again, alone", flush=True)
    plugins = [part for name in config.option.plugins if name.startswith("tests.") for part in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *plugins, "-m", config.option.markexpr, *first]
    try:
        again = subprocess.run(command, cwd=config.rootpath, env={**os.environ, AGAIN: "1"}, timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"they did not end in {MAX_SECONDS:.0f} s")
        return
    if again.returncode != pytest.ExitCode.OK:
        return
    for nodeid, report in first.items():
        print(f"flaky: {nodeid}\n" + "\n".join(report.longreprtext.splitlines()[-MAX_LINES:]), flush=True)
    session.exitstatus = pytest.ExitCode.OK
