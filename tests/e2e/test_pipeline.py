"""Fine-tuning, pairs, a reward model, reinforcement by that, and an evaluation: each from the folder of the one before.
The reward model, and a teacher, on ranks of their own say what they do in the run's own processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rl_megatron.evaluation.results import read_results
from tests.e2e.processes import Place, Run

COMMON = ("learner.threads=1", "log.sinks=[]", "checkpoint.every=0")
PAIRS = """
def ipo(better, worse, beta):
    return (better - worse - 1 / (2 * beta)) ** 2

def flat(better, worse, beta):
    return (better - worse).sum()
"""
LEARNS = (
    *("warm_start.steps=0", "train.learning_rate=1e-3", "train.lr_decay=none", "learner.ep=1", "learner.threads=1"),
    *("rollout.temperature=0.8", "algorithm.kl.coefficient=0.001", "eval.every=6", "log.sinks=[]"),
    *("reward.parts.even.function=my_rewards:even", "reward.parts.even.weight=0.1"),
    "eval.sets.sums.reward.function=my_rewards:even",
)


@pytest.fixture(scope="module")
def tuned(place: Place) -> Run:
    return place.fork_alone("tuned", "--config", "sft_tiny", "train.steps=20", "eval.every=20", *COMMON).finish()


@pytest.fixture(scope="module")
def start(tuned: Run) -> Path:
    return tuned.folder / "hf_step_000020"


@pytest.fixture(scope="module")
def judge(place: Place, start: Path) -> Run:
    keys = ("--config", "reward_tiny", f"model.path={start}", "train.steps=40", "eval.every=40", *COMMON)
    return place.fork_alone("judge", *keys).finish()


def given(start: Path, judge: Run, *keys: str) -> tuple[str, ...]:
    known = {"start": start, "judge": judge.folder / "hf_step_000040"}
    return (*LEARNS, f"model.path={start}", *(key.format(**known) for key in keys))


@pytest.fixture(scope="module")
def learned(place: Place, start: Path, judge: Run) -> Run:
    keys = given(start, judge, "reward.parts.judge.function=hf:{judge}", "train.steps=6", "checkpoint.every=0")
    return place.fork_alone("learned", *keys).finish()


@pytest.fixture(scope="module")
def apart(start: Path, judge: Run) -> tuple[str, ...]:
    """Keys of the first steps of that run, with reward model and teacher on ranks of their own."""
    return given(
        start,
        judge,
        *("reward.parts.judge.function=ranks:judge", "reward_models.judge.path={judge}"),
        *("roles.layouts.reward_judge.tp=2", "algorithm.kl.teachers.first.path={start}"),
        *("roles.layouts.teacher_first.tp=2", "train.steps=3", "checkpoint.every=1"),
    )


@pytest.fixture(scope="module")
def on_ranks(place: Place, apart: tuple[str, ...]) -> Run:
    return place.fork_alone("on-ranks", *apart).finish()


def steps(run: Run) -> list[dict[str, float]]:
    return [row for row in run.rows() if row["step"]]


def test_each_job_goes_on_from_the_folder_of_the_one_before(tuned: Run, judge: Run, learned: Run) -> None:
    losses = [row["eval/loss"] for row in tuned.rows() if "eval/loss" in row]
    assert losses[-1] < losses[0] / 2  # of held-out sums: 1.87 nats a token for 5.61
    assert judge.rows()[-1]["eval/preference_accuracy"] > 0.65
    rewards = [row["reward/part/judge"] for row in steps(learned)]
    assert sum(rewards[-2:]) > sum(rewards[:2])  # of the reward model's scores
    assert [row["phase"] for row in learned.rows()] == ["rl"] * 7


@pytest.mark.parametrize("name", ["tuned", "learned"])
def test_an_evaluation_measures_what_the_run_did(name: str, place: Place, request: pytest.FixtureRequest) -> None:
    """Also of a run that samples nothing itself."""
    run: Run = request.getfixturevalue(name)
    measured = place.call_in_fork("eval", f"runs/{name}")
    assert measured.end() == 0, measured.text()
    (results,) = (run.folder / "eval").glob("*.json")
    if name == "learned":
        mean = read_results(results).sets["sums"].figures["mean@1"].value
        assert 0 < mean < 1
        assert mean == run.rows()[-1]["eval/sums/mean_at_1"]


def test_a_pair_loss_of_ones_own_is_trained_on(place: Place, start: Path) -> None:
    """IPO before the first step, where policy and reference are one: (1/(2 beta))^2, held out and in training. A step
    is profiled. The run goes on where it ended before its first checkpoint, when it had kept its first model."""
    (place.folder / "my_pairs.py").write_text(PAIRS)
    keys = ("--config", "dpo_tiny", f"model.path={start}", "dpo.beta=0.25", "dpo.batch_size=16", *COMMON)
    keys = (*keys, "train.steps=1", "eval.every=1", "profile.steps=1")
    refused = place.fork_alone("ipo", *keys, "dpo.loss=my_pairs:flat")
    assert refused.end() == 1
    assert "dpo.loss=my_pairs:flat must return one finite loss for each" in refused.text().replace("\n", " ")
    assert "Traceback" not in refused.text()
    (left := refused.folder / "hf_start" / "left").parent.mkdir()
    left.touch()
    run = place.fork_alone("ipo", *keys, "dpo.loss=my_pairs:ipo", resume=True).finish()
    assert not left.exists()
    rows = run.rows()
    assert rows[0]["eval/loss"] == pytest.approx(4.0, rel=1e-4)
    assert rows[-1]["loss"] == pytest.approx(4.0, rel=1e-4)
    assert rows[-1]["eval/loss"] < 3.999
    assert (run.folder / "profile/step_000001/rank-0.json.gz").is_file()


def test_rewards_and_divergences_of_models_on_ranks_are_those_of_models_in_the_run(learned: Run, on_ranks: Run) -> None:
    of_ranks, of_process = steps(on_ranks), steps(learned)
    names = ("reward/part/judge", "reward/part/even", "reward/mean", "reward/std", "kl/reference")
    errors = [max(abs(a[n] - b[n]) for n in names) for a, b in zip(of_ranks, of_process[:3], strict=True)]
    assert errors[0] < 1e-4, errors
    assert max(errors[: 2 if errors[1] > 1e-4 else 3]) < 5e-3, errors  # rounding may decide one token otherwise
    assert of_ranks[1]["kl/reference"] == pytest.approx(of_process[1]["kl/reference"], rel=1e-2)
    assert np.ptp([row["reward/part/judge"] for row in of_ranks]) > 1e-3
    divergences = [row["kl/reference"] for row in of_ranks]
    assert divergences[0] == pytest.approx(0, abs=1e-4)  # both are the start, at the temperature
    assert abs(divergences[-1]) > 1e-3


def test_a_run_that_is_killed_and_resumed_is_equal_to_the_bit(
    place: Place, apart: tuple[str, ...], on_ranks: Run
) -> None:
    place.copy(on_ranks, "killed", until=2)
    again = place.fork_alone("killed", *apart, resume=True).finish()
    assert "resuming from" in again.text()
    assert again.record() == on_ranks.record()
    last = "hf_step_000003/model.safetensors"
    assert (again.folder / last).read_bytes() == (on_ranks.folder / last).read_bytes()
