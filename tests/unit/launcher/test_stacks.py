"""Who is behind: by stacks as the interpreter writes them, and by the seconds of ranks' passes."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.controller.slowest import SlowestRank
from launcher.processes import stacks
from launcher.processes.stacks import Frame, Stack, explain, read
from rl_megatron.observability.timeline.ranks import RankTimed
from tests.e2e.processes import eventually

HUNG = """Timeout (0:00:27)!
Thread 0x00007f01 (most recent call first):
  File "/x/queue.py", line 1 in get

Thread 0x00007f99 (most recent call first):
  File "/x/old.py", line 9 in long_ago

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select

Current thread 0x00007f99 (most recent call first):
  File "/e/site-packages/torch/distributed/distributed_c10d.py", line 3098 in all_reduce
  File "/e/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/e/site-packages/megatron/core/parallel.py", line 7 in reduce
  File "/w/rl_megatron/learner/forward.py", line 160 in reduce_outputs
  File "/w/launcher/worker/process.py", line 120 in _serve
"""
BEHIND = """Current thread 0x00007f99 (most recent call first):
  File "/home/me/my_hooks.py", line 3 in slow
  File "/w/rl_megatron/learner/megatron.py", line 130 in train_step
"""
PROGRAM = """
import sys, time, threading
from pathlib import Path
from launcher.processes import stacks

def stand_still():
    print("up", flush=True)
    {still}

stacks.register(Path(sys.argv[1], "rank-3.txt"), silence={silence})
stacks.living()
{before}
stand_still()
"""


def test_a_rank_in_a_collective_is_told_from_one_that_is_not() -> None:
    waiting, behind = read(HUNG), read(BEHIND)
    assert waiting is not None
    assert behind is not None
    assert waiting.collective == "all_reduce"
    assert waiting.place == "rl_megatron/learner/forward.py:160 in reduce_outputs"
    assert behind.collective is None
    assert behind.place == "/home/me/my_hooks.py:3 in slow, by rl_megatron/learner/megatron.py:130 in train_step"
    assert explain({0: waiting, 1: behind, 2: waiting, 3: None}) == (
        [1, 3],
        "rank 0, 2 waits in all_reduce at rl_megatron/learner/forward.py:160 in reduce_outputs; "
        "rank 1 is at /home/me/my_hooks.py:3 in slow, by rl_megatron/learner/megatron.py:130 in train_step; "
        "rank 3 gave no stack",
    )


def test_nobody_is_behind_where_all_wait_or_none_does() -> None:
    waiting, behind = read(HUNG), read(BEHIND)
    assert explain({0: waiting, 1: waiting})[0] == []
    assert explain({0: behind, 1: behind})[0] == []


def test_a_wait_for_a_collective_under_way_counts_as_one(tmp_path: Path) -> None:
    file = tmp_path / "overlap.py"
    file.write_text("def finish(handle):\n    handle.wait()\n")
    stack = read(f'Current thread 0x01 (most recent call first):\n  File "{file}", line 2 in finish\n')
    assert stack == Stack(frames=(Frame(file=str(file), line=2, name="finish"),), collective="a collective under way")


def test_no_stacks_are_none() -> None:
    assert read("") is None


def write(folder: Path, *, still: str, before: str = "", silence: float = 1000.0) -> subprocess.Popen[str]:
    code = PROGRAM.format(still=still, before=before, silence=silence)
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def until_written(process: subprocess.Popen[str], folder: Path) -> Stack:
    file = folder / "rank-3.txt"
    try:
        eventually(lambda: "<module>" in file.read_text(), "the stacks")
    finally:
        process.kill()
        process.wait(30)
    stack = read(file.read_text())
    assert stack is not None
    return stack


def test_files_with_nothing_in_them_go(tmp_path: Path) -> None:
    for name, text in (("first/rank-0.txt", ""), ("first/rank-1.txt", ""), ("second/rank-0.txt", "Thread")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    stacks.tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["second"]
    (tmp_path / "second" / "rank-0.txt").write_text("")
    stacks.tidy(tmp_path)
    assert not tmp_path.exists()
    stacks.tidy(tmp_path)


# Which learner rank is the slowest of a step, by the seconds of its passes.

CALL: dict[str, str | int | float] = {"call": 1}


def workers(count: int) -> Any:
    return [SimpleNamespace(who=f"rank {n} (pid 7 on node{n})", pass_seconds=0.0, peak=n) for n in range(count)]


def row(ranks: Sequence[Any], slowest: SlowestRank, *seconds: float) -> dict[str, float]:
    for rank, each in zip(ranks, seconds, strict=True):
        rank.pass_seconds = each
    return slowest.row()


def test_it_is_logged_with_its_node_once_and_where_it_is_far_from_the_median(caplog: pytest.LogCaptureFixture) -> None:
    ranks = workers(3)
    slowest = SlowestRank(ranks)
    with caplog.at_level(logging.WARNING):
        assert row(ranks, slowest, 1.0, 1.4, 1.0) == {"ranks/slowest": 1, "memory/peak": 2}
        assert not caplog.messages
        for _ in range(3):
            assert row(ranks, slowest, 1.0, 1.1, 3.0)["ranks/slowest"] == 2
        assert caplog.messages == ["rank 2 (pid 7 on node2) took 3.0 s for its passes, the median rank 1.1 s"]
    assert [rank.pass_seconds for rank in ranks] == [0.0] * 3


def test_one_rank_and_steps_without_passes_have_no_row() -> None:
    alone, ranks = workers(1), workers(2)
    assert row(alone, SlowestRank(alone), 1.0) == {}
    assert row(ranks, SlowestRank(ranks), 1.0, 0.0) == {}


def test_seconds_of_a_call_are_those_in_which_it_ran() -> None:
    spans = [
        ("calls", "step", 0, 9, CALL),
        ("calls", "forward", 12, 14, None),
        ("calls", "score", 10**9, 3 * 10**9, CALL),
        ("other", "score", 0, 10**9, None),
    ]
    assert RankTimed(arrived=0, answered=4 * 10**9, spans=spans, lost=0).seconds_of("score") == 2.0
