"""A run with servers that evaluates while it trains, its resume from a checkpoint of a step that was evaluated, and a
set with an environment of its own."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from rl_megatron.observability.metrics.table import deterministic
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
    run = place.fork("beside", *KEYS, "train.steps=5").finish()
    first, last = evaluated(run), run.rows()[-1]
    assert set(first) <= {2, 4}
    assert len(first) + sum(row["eval/skipped"] for row in first.values()) == 2
    assert (last["step"], last["phase"]) == (5, "rl")
    assert 0 < last["eval/accuracy"] < 1  # of the last step training has nothing to do meanwhile
    for step in (4, 5):
        shutil.rmtree(run.folder / "checkpoints" / f"step_{step:06d}")
    run = place.fork("beside", *KEYS, "train.steps=5", resume=True).finish()
    again = evaluated(run)
    assert 2 in again
    assert [row["step"] for row in run.rows() if row["phase"] == "rl"] == [0, 1, 2, 3, 4, 5]
    for step, row in again.items():
        whole = [one["eval/own_version_fraction"] == 1 for one in (row, first.get(step, {})) if one]
        if whole == [True, True]:  # no push met it, so that nothing of it depends on the clock
            assert row["eval/accuracy"] == pytest.approx(first[step]["eval/accuracy"])


ENVIRONMENT = '''
from rl_megatron.environments.protocol import EnvironmentStep, Observed


class Odd:
    """Two turns, right where the bytes of the first are odd in sum."""

    async def start(self, task, seed):
        return Observed(said=task.text)

    async def step(self, reply):
        return EnvironmentStep(observation=Observed(said="?"), metrics={"asked": 1.0})

    async def score(self, transcript):
        return float(sum(transcript.replies[0].text.encode()) % 2)

    async def close(self):
        pass
'''
OWN = ("function=my_game:Odd", "template=plain", "max_turns=2", "max_tokens=24", "min_turn_tokens=2")


def test_a_set_with_an_environment_of_its_own_has_the_figures_that_it_has_where_training_waits(place: Place) -> None:
    """With a rate at which no weight changes, so that figures do not depend on which pushes meet a request."""
    place.environment = PORTABLE
    (place.folder / "my_game.py").write_text(ENVIRONMENT)
    keys = [key for key in KEYS if not key.startswith(("eval.", "checkpoint.", "data.", "warm_"))]
    odd = ("limit=6", "samples=3", "temperature=1.0", "max_new_tokens=9", *(f"environment.{key}" for key in OWN))
    keys += ["eval.every=1", "train.learning_rate=1e-30", "train.steps=3", "checkpoint.every=0", "warm_start.steps=20"]
    keys += ["eval.sets.plain.limit=4", *(f"eval.sets.odd.{key}" for key in odd)]
    found = {}
    for mode in ("blocking", "beside"):
        run = place.fork(f"odd-{mode}", *keys, f"eval.mode={mode}").finish()
        rows = [row for row in run.rows() if row["phase"] == ("eval" if mode == "beside" else "rl")]
        of_set = [{name: one for name, one in row.items() if name.startswith("eval/odd/")} for row in rows]
        found[mode] = {row["step"]: deterministic(one) for row, one in zip(rows, of_set, strict=True)}
    steps = set(found["beside"]) & {1, 2}
    assert steps
    for step in steps:
        assert found["beside"][step] == found["blocking"][step]
        assert 0 < found["beside"][step]["eval/odd/mean_at_3"] < 1
        assert found["beside"][step]["eval/odd/length"] > 9  # some have two turns
