"""Texts over which math-verify computes for minutes end their own process, and cost nobody else a score."""

from __future__ import annotations

import asyncio
import math
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from rl_megatron.errors import RewardError
from rl_megatron.rewards import math_verify
from rl_megatron.rewards.scoring import score
from rl_megatron.types import Prompt, Scored
from tests.completions import completion

POWER = r"The answer is $\boxed{9^{9^{9}}}$."
LOOP = "So we get\n\\[ x = \\boxed{42}\n" * 200  # brackets that stay open, as where a text is cut
STARTER = """
import asyncio, sys
from rl_megatron.rewards import math_verify
from rl_megatron.types import Prompt
start = math_verify.new_process
def noted(log):
    process = start(log)
    print(process.pid, flush=True)
    return process
math_verify.new_process = noted
asyncio.run(math_verify.math_verify(Prompt(id="a", text="", token_ids=(1,), answer="8"), [None], [sys.argv[1]]))
"""


def scored(answer: str, *texts: str) -> tuple[Scored, ...]:
    prompt, completions = Prompt(id="train:7", text="", token_ids=(1,), answer=answer), [completion((1,))] * len(texts)
    return asyncio.run(score(math_verify.math_verify, prompt, completions, texts, limit=60.0))


@pytest.mark.parametrize("text", [POWER, LOOP])
def test_a_completion_that_runs_out_of_time_counts_0_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify, "LIMIT_SECONDS", 0.5)
    assert [one.total for one in scored("8", "$8$", text, "$7+1$", "$9$")] == [1, 0, 1, 0]


def test_an_answer_that_runs_out_of_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify, "LIMIT_SECONDS", 0.5)
    (one,) = scored(LOOP, "$42$")
    assert math.isnan(one.total)
    assert "'train:7'" in str(one.error)


def test_a_process_that_was_killed_is_replaced() -> None:
    worker = math_verify._Worker()
    for text, total in (("$8$", 1.0), ("$9$", 0.0)):
        assert worker.ask("8", text) == {"total": total, "answer": text.strip("$")}
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait()


def test_a_process_that_was_stopped_is_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify, "WAIT_SECONDS", 0.5)
    worker = math_verify._Worker()
    processes = []

    def stopped(log: IO[bytes]) -> subprocess.Popen[bytes]:
        processes.append(process := start(log))
        process.send_signal(signal.SIGSTOP)
        return process

    start = math_verify.new_process
    monkeypatch.setattr(math_verify, "new_process", stopped)
    assert worker.ask("8", "$8$") == {}
    assert [one.returncode for one in processes] == [-signal.SIGKILL] * 2


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify, "_COMMAND", (sys.executable, "-c", "raise SystemExit('no room here')"))
    with pytest.raises(RewardError, match="ended with status 1: no room here"):
        math_verify._Worker().ask("8", "$8$")


def test_processes_end_with_the_one_that_started_them() -> None:
    command = [sys.executable, "-c", STARTER, POWER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as starter:
        assert starter.stdout is not None
        watched = os.pidfd_open(int(starter.stdout.readline()))
        starter.kill()
        assert select.select([watched], [], [], 30.0)[0]
        os.close(watched)
