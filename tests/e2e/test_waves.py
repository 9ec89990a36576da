"""A run whose gradients are computed in waves beside servers, and the same run on whole batches."""

from __future__ import annotations

import pytest

from tests.e2e.processes import PORTABLE, Place, Run

SERVED = (
    *("learner.ep=1", "reward.function=my_rewards:even", "rollout.server.replicas=1"),
    *("algorithm=grpo", "algorithm.aggregation=token_mean", "algorithm.clip_high=0.28"),
    *("train.minibatches=1", "train.steps=2", "warm_start.steps=0", "eval.every=0", "checkpoint.every=0"),
    *("learner.max_tokens_per_micro_batch=128", "rollout.max_new_tokens=64"),  # so that some end by themselves
)
OF_TIME = ("seconds/", "tokens_per_second/", "memory/", "ranks/", "loop/")
OF_THE_CUT = ("packing/imbalance", "packing/padding_fraction", "waves/", "plane/", "devices/layout")


@pytest.fixture(scope="module")
def runs(place: Place) -> tuple[Run, Run]:
    place.environment = PORTABLE
    both = place.fork("whole", *SERVED), place.fork("waves", *SERVED, "train.stream_micro_batches=1")
    for run in both:
        run.finish()
    return both


def test_steps_are_those_on_whole_batches(runs: tuple[Run, Run]) -> None:
    wanted, found = ([row for row in run.rows() if row["step"] and row["phase"] == "rl"] for run in runs)
    assert len(wanted) == len(found) == 2
    for row, other in zip(wanted, found, strict=True):
        assert other["grad_norm"] > 0
        assert 0 < other["response/truncated_fraction"] < 1  # so the batch has fewer tokens than planned
        names = {name for name in row if not name.startswith((*OF_TIME, *OF_THE_CUT))}
        assert names == {name for name in other if not name.startswith((*OF_TIME, *OF_THE_CUT))}
        for name in names:
            close = row[name] if isinstance(row[name], str) else pytest.approx(row[name], rel=1e-6, abs=1e-6)
            assert other[name] == close, (row["step"], name)


def test_every_group_is_a_wave_and_all_but_the_last_are_early(runs: tuple[Run, Run]) -> None:
    for row in runs[1].rows():
        if row["step"] and row["phase"] == "rl":
            assert row["waves/count"] == 4
            assert 0.6 < row["waves/early_fraction"] < 0.9
