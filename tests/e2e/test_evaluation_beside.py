"""A run with servers that evaluates while it trains, and its resume from a checkpoint of a step that was evaluated."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.e2e.processes import PORTABLE, Place, Run

KEYS = (
    *("learner.ep=1", "reward.function=my_rewards:even", "rollout.server.replicas=1", "warm_start.steps=0"),
    *("eval.mode=beside", "eval.at_once=8", "eval.every=2"),
    *("data.num_eval=24", "checkpoint.every=2", "checkpoint.keep=9"),
)


def evaluated(run: Run) -> dict[int, dict[str, Any]]:
    found = [row for row in run.rows() if row["phase"] == "eval"]
    assert len({row["step"] for row in found}) == len(found)
    return {row["step"]: row for row in found}


def test_evaluations_are_those_of_their_steps_weights_and_a_resume_has_each_once(place: Place) -> None:
    place.environment = PORTABLE
    run = place.fork("beside", *KEYS, "train.steps=5")
    run.finish()
    first, last = evaluated(run), run.rows()[-1]
    assert set(first) <= {2, 4}
    assert len(first) + sum(row["eval/skipped"] for row in first.values()) == 2
    assert (last["step"], last["phase"]) == (5, "rl")
    assert 0 < last["eval/accuracy"] < 1  # of the last step training has nothing to do meanwhile
    for step in (4, 5):
        shutil.rmtree(run.folder / "checkpoints" / f"step_{step:06d}")
    run = place.fork("beside", *KEYS, "train.steps=5", resume=True)
    run.finish()
    again = evaluated(run)
    assert 2 in again
    assert [row["step"] for row in run.rows() if row["phase"] == "rl"] == [0, 1, 2, 3, 4, 5]
    for step, row in again.items():
        whole = [one["eval/own_version_fraction"] == 1 for one in (row, first.get(step, {})) if one]
        if whole == [True, True]:  # no push met it, so that nothing of it depends on the clock
            assert row["eval/accuracy"] == pytest.approx(first[step]["eval/accuracy"])
