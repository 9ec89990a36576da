"""Seconds of evaluations, for which training waits: by hand, of each set at its steps, and where there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.models.named import NAMED
from rl_megatron.scaling.estimates import estimate
from rl_megatron.scaling.evaluations import Evaluations, evaluation_cost
from rl_megatron.scaling.hardware import GPUS
from rl_megatron.scaling.memory import weights_served
from rl_megatron.scaling.rl_step import server_shape
from rl_megatron.scaling.rollouts import lengths_of, token_seconds

SHAPE, H200 = NAMED["qwen3-30b-a3b"], GPUS["h200"]


def job(*keys: str, name: str = "qwen3_30b_a3b") -> RunConfig:
    return load_config(name, ["model.path=/given", "run.launcher=slurm", *keys])


def cost(*keys: str) -> Evaluations:
    return evaluation_cost(job(*keys), SHAPE, H200)


def test_the_seconds_are_those_of_decoding_token_by_token_at_the_steps_that_are_due() -> None:
    """64 problems before the first of 20 steps and after each fifth, on a server of 8 GPUs."""
    config = job("data.max_eval=64", "eval.every=5", "train.steps=20", "slurm.speeds.mean_tokens=1000")
    server = server_shape(config, config.rollout.server, weights_served(config, SHAPE), SHAPE, H200)
    lengths = [round(length) for length in lengths_of(1000, 7168)]
    once = 64 * 512 * 2 * SHAPE.active_parameters / (8 * 989.5e12 * 0.5)  # prompts, at half of the peak
    for done in range(max(lengths)):
        decoding = 64 * sum(length > done for length in lengths) / len(lengths)
        once += token_seconds(SHAPE, server, H200, max(1.0, decoding), 512 + done)
    found = evaluation_cost(config, SHAPE, H200)
    assert found.completions == 5 * 64
    assert found.seconds_a_step == pytest.approx(5 * once / 20, rel=1e-3)
    said = f"  evaluations take {found.seconds_a_step:,.1f} s a step more in the mean: 320 completions in 20 steps,"
    assert any(line.startswith(said) for line in estimate(config, SHAPE).lines())


def test_each_set_counts_at_its_own_steps_with_its_own_problems_samples_and_length() -> None:
    keys = ("data.max_eval=64", "eval.every=5", "train.steps=20", "eval.temperature=1", "eval.sets.own.limit=16")
    own = cost(*keys)
    assert own.completions == 5 * 16
    hard = ("eval.sets.hard.data.type=arithmetic", "eval.sets.hard.data.num_eval=2", "eval.sets.hard.at_steps=0,20")
    both = cost(*keys, *hard, "eval.sets.hard.samples=4")
    assert both.completions == own.completions + 2 * 2 * 4
    # So few rows read little beside the weights.
    longer = cost(*keys, *hard, "eval.sets.hard.samples=4", "eval.sets.hard.max_new_tokens=14336")
    assert longer.seconds - own.seconds == pytest.approx(2 * (both.seconds - own.seconds), rel=0.1)


def test_problems_of_a_file_that_is_here_are_counted_and_of_another_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text('{"question": "1+1", "answer": "2"}\n' * 7)
    keys = ("train.steps=10", "eval.every=0", f"data.eval={file}")
    assert cost(*keys, "data.max_eval=null").completions == cost(*keys).completions == 2 * 7
    missing = cost("data.eval=/elsewhere/test.parquet", "data.max_eval=null")
    assert (missing.seconds, missing.completions) == (0.0, 0)
    (line,) = missing.lines()
    assert line.endswith("of eval, whose problems are not counted: set max_eval of its data, or a set's limit")


def test_evaluations_for_which_training_does_not_wait_cost_no_seconds() -> None:
    blocking = job(name="qwen3_30b_a3b_disaggregated")
    assert evaluation_cost(blocking, SHAPE, GPUS["h100"]).seconds > 0
    section = blocking.eval.model_copy(update={"mode": "beside"})
    found = evaluation_cost(blocking.model_copy(update={"eval": section}), SHAPE, GPUS["h100"])
    assert found == replace(found, seconds=0.0, completions=0, unknown=())
    assert list(found.lines()) == []


def test_turns_of_an_environment_are_not_predicted() -> None:
    found = cost(
        *("eval.sets.own.limit=8", "data.chat_template=false", "reward.function=exact_match"),
        "eval.sets.tool.environment.function=calculator",
    )
    assert [why.partition(":")[0] for why in found.unknown] == ["eval.sets.tool.environment.function=calculator"]
