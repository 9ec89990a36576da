"""What ``attach`` shows of a job; a stand-in for Slurm's scontrol gives the job's states."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.hosts.slurm.attach import Follower, Tail, follow
from rl_megatron.errors import ConfigError

SCONTROL = """#!/bin/sh
# The next line of the file beside it, the last one for ever; with that the job's script says its last word.
file=$(dirname "$0")/states
line=$(head -n 1 "$file")
if [ "$(wc -l <"$file")" -gt 1 ]; then sed -i 1d "$file"; else echo "job 7 ends" >>"$(dirname "$0")/run/jobs/7.txt"; fi
case $line in *=SILENT*) echo "Unable to contact slurm controller" >&2; exit 1 ;; esac
echo "$line"
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the states that Slurm tells, one after the other."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def states(*names: str) -> None:
        lines = (f"JobId=7 JobState={name} Reason=None NodeList=n1 Restarts=0" for name in names)
        (tmp_path / "states").write_text("".join(f"{line}\n" for line in lines))

    return states


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two attempts of job 7."""
    folder = tmp_path / "run"
    for attempt, text in (("7-0", "step 1\n"), ("7-1", "step 2\nst")):
        (folder / "jobs" / attempt).mkdir(parents=True)
        (folder / "jobs" / attempt / "controller.txt").write_text(text)
    (folder / "jobs" / "id").write_text("7\n")
    (folder / "jobs" / "7.txt").write_text("job 7 starts\n")
    return folder


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.new() == []
    (tmp_path / "log").write_bytes(b"one\ntw")
    assert tail.new() == ["one"]
    with (tmp_path / "log").open("ab") as file:
        file.write("o\nthré".encode()[:-1])
    assert tail.new() == ["two"]
    assert tail.new() == []
    (tmp_path / "log").write_bytes(b"four\n")  # its log was rotated, and what it had copied
    assert tail.new() == ["four"]


def test_lines_of_all_attempts_come_once(run: Path) -> None:
    follower = Follower(run, "7")
    assert follower.new() == ["job 7 starts", "step 1", "step 2"]
    with (run / "jobs" / "7-1" / "controller.txt").open("a") as file:
        file.write("ep 3\n")
    assert follower.new() == ["step 3"]


@pytest.mark.parametrize(("last", "well"), [("COMPLETED", True), ("FAILED", False)])
def test_it_follows_to_the_end_and_says_how_that_was(
    run: Path, slurm: Callable[..., None], last: str, well: bool
) -> None:
    slurm("RUNNING", "PENDING", last)
    shown: list[str] = []
    assert follow(run, shown.append, seconds=0.001) == well
    assert shown[0] == f"{run}: job 7, RUNNING on n1, restart 0; Ctrl-C leaves it running"
    assert shown[1:] == [
        "job 7 starts",
        "step 1",
        "step 2",
        "job 7: PENDING on n1, restart 0",
        f"job 7: {last} on n1, restart 0",
        "job 7 ends",
    ]


def test_a_run_without_a_job_and_one_that_is_over_are_refused(
    tmp_path: Path, run: Path, slurm: Callable[..., None]
) -> None:
    with pytest.raises(ConfigError, match="no job was submitted for it; submit one with rl-megatron submit"):
        follow(tmp_path, print)
    slurm("FAILED")
    with pytest.raises(ConfigError, match=r"job 7 has ended: FAILED on n1.*; rl-megatron logs .*/run shows"):
        follow(run, print)


def test_a_job_is_followed_on_while_slurm_does_not_answer(run: Path, slurm: Callable[..., None]) -> None:
    slurm("RUNNING", "SILENT", "SILENT", "RUNNING", "COMPLETED")
    shown: list[str] = []
    assert follow(run, shown.append, seconds=0.001)
    said = [line for line in shown if line.startswith("job 7: ")]
    assert said == [
        "job 7: scontrol show job -o 7: status 1: Unable to contact slurm controller",
        "job 7: RUNNING on n1, restart 0",
        "job 7: COMPLETED on n1, restart 0",
    ]
    assert shown[-1] == "job 7 ends"
