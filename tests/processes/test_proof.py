"""docs/proof.md: every kind of complaint has threads, command, output and test; quick ones of both pages hold."""

from __future__ import annotations

import csv
import ctypes
import re
import shlex
from collections import defaultdict

import pytest

from launcher.processes.parent import adopt_orphans
from rl_megatron.observability.intervals import mean_interval
from tests.proof import run
from tests.proof.run import PAGE, REPO, Claim, claims, printed, stale

KINDS = 12
EVERY = list(claims())
OTHERS = list(claims(REPO / "docs" / "weights.md"))
QUICK = [claim for claim in [*EVERY, *OTHERS] if claim.runner == "tests/processes/test_proof.py"]


def test_every_kind_of_complaint_has_threads_a_command_its_output_and_a_test() -> None:
    _, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert len(sections) == KINDS
    for section in sections:
        title = section.splitlines()[0]
        threads = re.findall(
            r"\[([\w.-]+/[\w.-]+#\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\)", section
        )
        assert len(threads) >= 2, title
        assert [name for name, repository, number in threads if name != f"{repository}#{number}"] == []
        assert re.search(r"`[\w/]+\.py::\w+`", section), title
        assert "<!-- run by " in section, title
    assert len(EVERY) == KINDS


def test_a_command_of_hours_shows_its_stored_run_by_date_and_commit() -> None:
    """The page's figures are those of the stored table."""
    text = PAGE.read_text(encoding="utf-8")
    (at,) = re.finditer(r"<!-- not run: hours; the stored run is of \d{4}-\d\d-\d\d, commit [0-9a-f]{7} -->", text)
    named, shown = re.search(r"`(docs/[\w/-]+\.csv)`.*?```\n(.*?)```", text[at.end() :], re.S).groups()  # type: ignore[union-attr]
    arms = defaultdict[str, list[float]](list)
    for row in csv.DictReader((REPO / named).read_text().splitlines()):
        arms[row["arm"]].append(float(row["result"]))
    found = {arm: mean_interval(values) for arm, values in arms.items()}
    assert shown.splitlines() == [f"{arm:<12} {f.value:.4f}  {f.low:.4f} to {f.high:.4f}" for arm, f in found.items()]


def test_a_command_that_does_not_end_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LIMIT_SECONDS", 0.01)
    assert printed("rl-megatron doctor") == "it did not end within 0.01 s"


def test_a_long_command_and_a_stale_one_fail_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = "rl-megatron 9.9.9\n"
    monkeypatch.setattr(run, "claims", lambda: iter([Claim("rl-megatron --version", shown, "x.py")]))
    monkeypatch.setattr(run, "SHOWN_BY_RUNNING", 0.001)
    with pytest.raises(SystemExit) as ended:
        run.main()
    said = capsys.readouterr().out
    assert ended.value.code == 1
    assert re.match(
        r"STALE +\d+ s of CPU  rl-megatron --version\n  not there: rl-megatron 9\.9\.9\nrl-megatron 0", said
    )
    assert "over 0.001 s: mark it as not run, and show a stored run with date and commit" in said
    monkeypatch.setattr(run, "printed", lambda command: shown)
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert not ended.value.code


LEAVES = """
import os, time
if os.fork() == 0:
    while time.process_time() < 0.2: pass
    os.closerange(0, 3)
    time.sleep(60)
"""


def test_the_seconds_of_what_a_command_leaves_count_and_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of a fork server, for which no parent waits."""
    monkeypatch.setattr(run, "claims", lambda: iter([Claim(shlex.join(["python", "-c", LEAVES]), "", "x.py")]))
    monkeypatch.setattr(run, "SHOWN_BY_RUNNING", 0.19)
    monkeypatch.setattr(run, "LEFT_SECONDS", 0.1)
    adopt_orphans()
    try:
        with pytest.raises(SystemExit):
            run.main()
    finally:
        ctypes.CDLL(None).prctl(36, 0)  # PR_SET_CHILD_SUBREAPER
    assert "over 0.19 s" in capsys.readouterr().out


@pytest.mark.parametrize("claim", QUICK, ids=lambda claim: claim.command[:60])
def test_a_quick_command_prints_what_its_page_shows(claim: Claim) -> None:
    text = printed(claim.command)
    assert stale(claim.shown, text) is None, text


@pytest.mark.parametrize(
    ("shown", "text", "missing"),
    [
        ("a 1.00 GB\n", "a 1.04  GB\n", None),
        ("a 1.00 GB\n", "a 1.06 GB\n", "a 1.00 GB"),
        ("a 1,000\n", "a 940\n", "a 1,000"),
        ("one\n...\nfour\n", "one\ntwo\nthree\nfour\n", None),
        ("one\nthree\n...\n", "one\ntwo\nthree\n", "three"),
        ("...\ntwo\none\n...\n", "one\ntwo\n", "one"),
        ("one\n", "one\ntwo\n", "nothing behind line 1"),
        ("3 passed in 1.2s\n", "3 passed in 90s (0:01:30)\n", None),
        ("3 passed in 1.2s\n", "2 passed in 1.2s\n", "3 passed in 1.2s"),
        ("t.py::test PASSED\n", "t.py::test PASSED [ 33%]\n", None),
        ("t.py::test PASSED\n", "t.py::test FAILED [ 33%]\n", "t.py::test PASSED"),
    ],
)
def test_an_output_is_stale_where_words_differ_or_figures_by_more_than_the_tolerance(
    shown: str, text: str, missing: str | None
) -> None:
    assert stale(shown, text) == missing
