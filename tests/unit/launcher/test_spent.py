"""Hours and tokens of a run against hand-made rows."""

from __future__ import annotations

import re

import pytest

from launcher.rehearsal.spent import lines_of_spent, planned, spent
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.models.named import NAMED
from rl_megatron.scaling.estimates import estimate

ROWS = [
    {"phase": "warm_start", "step": 0, "seconds/step": 360.0},
    {"phase": "rl", "step": 0, "eval/accuracy": 0.5},
    *(
        {
            "phase": "rl",
            "step": n,
            "seconds/step": 90.0,
            "seconds/rollout": 60.0,
            "tokens/train": 5000,
            "tokens/rollout": 4000,
        }
        for n in (1, 2)
    ),
]


def job(name: str, *keys: str) -> RunConfig:
    return load_config(name, ["model.path=/given", "run.launcher=slurm", *keys])


def test_servers_on_the_learners_gpus_have_the_hours_in_which_they_sample() -> None:
    """540 s of 8 GPUs are 1.2 GPU-hours, of which they sample for 120 s."""
    found = spent(job("qwen3_30b_a3b"), ROWS)
    assert found.hours == pytest.approx({"learner": 8 * 420 / 3600, "engines": 8 * 120 / 3600})
    assert (found.total, found.trained, found.sampled, found.steps) == (pytest.approx(1.2), 10000, 8000, 2)
    assert found.unit == "GPU"


def test_roles_with_nodes_of_their_own_hold_them_all_the_time() -> None:
    found = spent(job("qwen3_235b_a22b"), ROWS)
    assert found.hours == pytest.approx({"learner": 96 * 0.15, "engines": 32 * 0.15})


def test_cores_are_counted_on_cpus() -> None:
    config = load_config("tiny_cpu", ["learner.threads=3", "learner.dp=2", "algorithm=ppo", "roles.critic=separate"])
    ranks = config.learner.dims.world_size
    found = spent(config, ROWS)
    assert found.unit == "core"
    assert found.hours["critic"] == pytest.approx(3 * ranks * 0.15)
    assert found.hours["learner"] + found.hours["engines"] == pytest.approx(3 * ranks * 0.15)
    text = "\n".join(lines_of_spent(config, ROWS, estimate(job("qwen3_30b_a3b", "slurm.speeds.gpu=null"), SHAPE)))
    assert text.startswith("spent in 2 steps: ")
    assert "10,000 tokens trained, 8,000 sampled" in text
    assert "beside no plan: set slurm.speeds.gpu" in text


SHAPE = NAMED["qwen3-30b-a3b"]


def test_the_plan_of_as_many_steps_is_beside_it() -> None:
    """64 x 16 completions of 3,584 tokens in the mean after prompts of 512, on 8 GPUs."""
    config = job("qwen3_30b_a3b")
    guess = estimate(config, SHAPE)
    assert guess.step is not None
    assert guess.step.predicted is not None
    plan = planned(config, guess.step.predicted, 2)
    assert plan.sampled == 2 * 1024 * 3584
    assert plan.trained == pytest.approx(2 * 1024 * (3584 + 512))
    assert plan.total == pytest.approx(8 * 2 * guess.step.seconds / 3600)
    assert plan.hours["engines"] == pytest.approx(16 * guess.step.predicted.step.parts["rollout"] / 3600)
    _, beside, ratio = lines_of_spent(config, ROWS, guess)
    assert beside.startswith(f"  planned: {plan.total:,.3g} GPU-hours (learner {plan.hours['learner']:,.3g}, engines")
    found = re.fullmatch(r"  a trained token took ([\d.]+) times the planned GPU-hours", ratio)
    assert found
    assert float(found[1]) == pytest.approx(1.2 / 10000 / (plan.total / plan.trained), abs=0.006)
    assert not list(lines_of_spent(config, ROWS[:2], guess))
