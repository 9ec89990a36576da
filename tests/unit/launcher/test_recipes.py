"""The large recipes take no time that a key of theirs could spare, by the plan."""

from __future__ import annotations

import functools
import re

import pytest

from rl_megatron.config.sections.data import FileKeys
from rl_megatron.scaling.estimates import estimate
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.memory import fullest
from tests.unit.launcher.test_memory import CONF, RECIPES, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_computes_logits_again_only_where_gpus_do_not_hold_them(name: str) -> None:
    config, _ = recipe(name)
    if config.learner.head_dtype is not None:
        assert fullest(*recipe(name, "learner.head_dtype=null")).total > config.slurm.gpu_memory_gb * GB  # type: ignore[operator]


@functools.cache
def seconds_of(name: str, *keys: str) -> float:
    found = estimate(*recipe(name, "run.launcher=slurm", *keys)).step
    assert found is not None
    return found.seconds


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_holds_its_servers_back_by_slots_and_its_comment_says_its_seconds(name: str) -> None:
    assert seconds_of(name) == pytest.approx(seconds_of(name, "rollout.slots=4096"))
    said = r"a step's seconds: ([\d,]+),\n# or ([\d,]+) with train.max_staleness=1 \((\d+) % less\)"
    for found in re.finditer(said, (CONF / f"{name}.yaml").read_text(encoding="utf-8")):
        one, two = seconds_of(name), seconds_of(name, "train.max_staleness=1")
        assert found.groups() == (f"{one:,.0f}", f"{two:,.0f}", f"{100 * (1 - two / one):.0f}")


@pytest.mark.parametrize("name", RECIPES)
def test_an_evaluation_is_shorter_than_a_step_and_greedy_only_where_the_model_does_not_think(name: str) -> None:
    config, _ = recipe(name)
    assert (config.eval.temperature > 0) == name.startswith("qwen3_")
    assert isinstance(config.data, FileKeys)
    assert config.eval.mode == "blocking"
    assert config.data.max_eval is not None
    assert config.data.max_eval < config.completions_per_step
