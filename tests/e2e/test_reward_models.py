"""Reward models on ranks of their own: what ``job=reward_model`` exports scores as it does in the controller's process,
and a run that was stopped and resumed is equal to the bit to one that was not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.processes import Place, Run

STEPS = 3
GIVEN = (
    *("warm_start.steps=0", f"train.steps={STEPS}", "eval.every=1", "checkpoint.every=1", "learner.ep=1"),
    *("reward.parts.even.function=my_rewards:even", "reward.parts.even.weight=0.5"),
)
ON_RANKS = (
    *("reward.parts.judge.function=ranks:judge", "reward_models.judge.path={judge}"),
    "roles.layouts.reward_judge.tp=2",
)


@pytest.fixture(scope="module")
def judge(place: Place) -> Path:
    """What a reward model's job exports."""
    run = place.fork_alone(
        "judge", "--config", "reward_tiny", "train.steps=3", "learner.threads=1", "eval.every=0"
    ).finish()
    return run.folder / "hf_step_000003"


def learn(place: Place, judge: Path, name: str, *keys: str, resume: bool = False) -> Run:
    return place.fork(name, *GIVEN, *(key.format(judge=judge) for key in keys), resume=resume)


@pytest.fixture(scope="module")
def whole(place: Place, judge: Path) -> Run:
    """A run that nobody stops."""
    return learn(place, judge, "whole", *ON_RANKS).finish()


def test_its_rewards_are_those_of_the_same_model_in_this_process(place: Place, judge: Path, whole: Run) -> None:
    here = learn(place, judge, "here", "reward.parts.judge.function=hf:{judge}").finish()
    of_ranks, of_process = ([row for row in run.rows() if row["step"]] for run in (whole, here))
    for one, other in zip(of_ranks, of_process, strict=True):
        for name in ("reward/part/judge", "reward/part/even", "reward/mean", "reward/std"):
            np.testing.assert_allclose(one[name], other[name], atol=1e-4, rtol=0)
    assert np.ptp([row["reward/part/judge"] for row in of_ranks]) > 1e-3


def test_a_run_that_is_killed_and_resumed_is_equal_to_the_bit(place: Place, judge: Path, whole: Run) -> None:
    place.copy(whole, "killed", until=2)
    again = learn(place, judge, "killed", *ON_RANKS, resume=True).finish()
    assert "resuming from" in again.text()
    assert again.record() == whole.record()
    last = f"hf_step_{STEPS:06d}/model.safetensors"
    assert (again.folder / last).read_bytes() == (whole.folder / last).read_bytes()
