"""Runs that cannot continue end quickly, say why and at which rank, and leave nothing running but the stacks of all
processes of those that hang. tests/e2e/test_ranks.py has dead ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import psutil
import pytest

import rl_megatron.learner.megatron  # noqa: F401  as in a rank, before anything of megatron-core: it then compiles nothing
from rl_megatron.learner import trained
from tests.e2e.processes import Place, Run, alive
from tests.unit.launcher.commands import status_of

ONE = "learner.ep=1"
TWO = ("learner.ep=2", "warm_start.steps=0", "train.steps=100000")
NAN = ("reward.function=my_rewards:sometimes_nan", "rollout.prompts_per_step=16")


def stuck_hook(*_: object, **__: object) -> None:
    time.sleep(10000)


def plant() -> None:
    """In critic rank 1, what computes a loss hangs once the test says so."""
    while multiprocessing.current_process().name != "critic rank 1" or not os.path.exists("go"):
        time.sleep(0.05)
    setattr(trained, "run_loss", stuck_hook)  # noqa: B010  an assignment is none of mypy's


def plant_in_ranks() -> None:
    os.register_at_fork(after_in_child=threading.Thread(target=plant, daemon=True).start)


def stacks(run: Run) -> dict[str, str]:
    """What the processes wrote, by the name of the file."""
    return {path.name: path.read_text() for path in (run.folder / "stacks").rglob("*.txt")}


def said_at_its_end(run: Run) -> str:
    """What a run that failed printed, which is no traceback."""
    assert run.end() == 1, run.text()
    assert "Traceback" not in run.text()
    return run.text()


@pytest.fixture(scope="module")
def still(place: Place) -> tuple[Run, list[psutil.Process]]:
    """A run and its ranks, of which rank 1 stands still; it waits for that for half a minute, beside other runs."""
    run = place.fork("still", *TWO, *NAN, "reward.on_error=-1", "learner.timeout_seconds=60")
    run.until_row(step=1)
    workers = run.workers()
    workers[1].send_signal(signal.SIGSTOP)
    return run, workers


@pytest.mark.usefixtures("still")
def test_a_rank_that_does_not_come_to_a_collective_is_named(place: Place) -> None:
    """Its rank 0 waits for it in the collective, and would be the one whose error comes first; the learner's ranks, in
    no collective of theirs, have nothing to do."""
    critic = ("algorithm=ppo", "algorithm.unfinished_reward=null", "roles.critic=separate", "run.watchdog_seconds=10")
    run = place.fork("behind", *TWO, *NAN, "reward.on_error=drop", *critic, in_node=plant_in_ranks)
    run.until_row(step=1)
    workers = run.workers()
    (place.folder / "go").touch()
    text = said_at_its_end(run)
    assert f"error: critic rank 1 (pid {workers[3].pid}) makes no progress for 10 s (run.watchdog_seconds)" in text
    assert "it was in backward, call " in text
    assert "; of the critic, rank 0 waits in " in text
    assert "rank 1 is at " in text
    assert "in stuck_hook, by rl_megatron/learner/" in text
    written = stacks(run)
    assert "in stuck_hook" in written["critic-1.txt"]
    assert "torch/distributed/distributed_c10d.py" in written["critic-0.txt"]
    assert all("_serve" in written[f"rank-{rank}.txt"] for rank in (0, 1))
    assert "in backward" in written["controller.txt"]
    assert not any(map(alive, workers))
    errors, dropped = counts(run)
    assert 4 * dropped == errors > 0
    assert "is not finite" in (run.folder / "log.txt").read_text()


@pytest.mark.usefixtures("still")
def test_an_update_that_is_not_finite_and_a_reward_that_raises_end_the_run_with_what_to_do(place: Place) -> None:
    """The second resumes the first, and makes steps before."""
    keys = (ONE, "reward.function=my_rewards:raising", "train.steps=20")
    text = said_at_its_end(place.fork("failing", *keys, "train.learning_rate=1e30"))
    assert "log-probs by weight version" in text
    assert "resume from the last checkpoint with a lower learning rate" in text

    run = place.fork("failing", *keys, "train.learning_rate=1e-3", resume=True)
    run.until_row(step=3)
    (place.folder / "raise").touch()
    text = said_at_its_end(run)
    assert "error: reward 'my_rewards:raising' of prompt '" in text
    assert "raised KeyError: 'price list'" in text
    assert "set reward.on_error to drop or to a number" in text
    steps = [row["step"] for row in run.rows() if row["phase"] == "rl"]
    assert steps == [*range(len(steps))]


def counts(run: Run) -> tuple[int, int]:
    """Rewards that were none, and groups that were left out for that."""
    rows = [row for row in run.rows() if row["step"]]
    return sum(row["reward/errors"] for row in rows), sum(row["groups/dropped"] for row in rows)


def test_a_learner_process_that_stands_still_ends_the_run_at_the_limit(still: tuple[Run, list[psutil.Process]]) -> None:
    run, workers = still
    text = said_at_its_end(run)
    assert f"error: rank 1 (pid {workers[1].pid}) has sent no heartbeat for 30 s" in text
    assert "; it was in " in text
    assert not any(map(alive, workers))
    written = stacks(run)
    assert written.keys() == {"rank-0.txt", "rank-1.txt", "controller.txt"}
    assert all("_serve" in written[f"rank-{rank}.txt"] for rank in (0, 1))


def test_rewards_that_are_nan_are_replaced_and_counted(still: tuple[Run, list[psutil.Process]]) -> None:
    errors, dropped = counts(still[0])
    assert errors > 0 == dropped
    assert all(-1 <= row["reward/mean"] <= 1 for row in still[0].rows() if row["step"])


GOOD = '{"question": "1+1=", "answer": "#### 2"}\n'


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        (
            "bad",
            GOOD + '{oops\n{"question": "2", "answr": "3"}\n',
            ["bad.jsonl:2: not JSON", "bad.jsonl:3: no field 'answer'; it has answr, question; did you mean 'answr'?"],
        ),
        ("empty", "", ["data.train=empty.jsonl: the file is empty"]),
        (
            "long",
            GOOD + '{"question": "' + "1+" * 50 + '1=", "answer": "51"}\n',
            ["long.jsonl:2: the prompt has 102 tokens, rollout.max_prompt_tokens=16", "rollout.on_long_prompt=drop"],
        ),
        ("gone", None, ["data.train=gone.jsonl: no such file"]),
    ],
    ids=["bad", "empty", "long", "gone"],
)
def test_what_the_data_has_wrong_is_told_before_anything_is_trained(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    rows: str | None,
    expected: list[str],
) -> None:
    monkeypatch.chdir(place.folder)
    (place.folder / "good.jsonl").write_text(GOOD)
    if rows is not None:
        (place.folder / f"{name}.jsonl").write_text(rows)
    keys = ("data=gsm8k", f"data.train={name}.jsonl", "data.eval=good.jsonl", "data.on_leak=keep")
    named = (f"model.cache_dir={place.cache}", f"run.name=data-{name}")
    assert status_of("train", ONE, *keys, *named, "reward.function=final_number") == 1
    said = capsys.readouterr().err
    assert all(text in said for text in expected), said
