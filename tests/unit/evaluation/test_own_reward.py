"""A set of problems with a reward of its own: what judges which prompt, by the composition root's own functions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from launcher.build.data import Data, load_data
from launcher.build.sampler import sampler_of
from launcher.preflight.reward import check
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.evaluation.sets import measure
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.rollout.sampler import RolloutSampler
from tests.unit.evaluation.test_sets import Written

SETS = (
    "run.name=x",
    "reward.function=length",
    "reward.length.min_tokens=1000",  # of training: nothing is that long
    "eval.sets.plain.limit=4",
    "eval.sets.exact.limit=4",
    "eval.sets.exact.reward.function=exact_match",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(TinySizes(), tmp_path_factory.mktemp("models"), 0)


def built(config: RunConfig, model: Path) -> tuple[RolloutSampler, Data]:
    """The sampler of a run whose engine answers every problem rightly, and the run's data."""
    data = load_data(config, model)
    answers = {prompt.id: (prompt.answer,) for one in data.sets for prompt in one.prompts}
    reward = resolve_rewards(config.reward, config.own_rewards)
    sampler = sampler_of(config, None, Written(answers), reward, data, vocab_size=259)
    assert isinstance(sampler, RolloutSampler)
    return sampler, data


def test_each_set_is_judged_by_its_own_reward_and_the_others_by_the_runs(model: Path) -> None:
    config = load_config("tiny_cpu", list(SETS))
    sampler, data = built(config, model)
    plain, exact = (asyncio.run(measure(sampler, one, config.eval)) for one in data.sets)
    assert plain.right == (0, 0, 0, 0)
    assert exact.right == (1, 1, 1, 1)
    assert {prompt.source for prompt in data.train[:4]} == {""}  # training keeps the run's reward


def fails(prompt: object, completions: object, texts: object) -> list[float]:
    raise KeyError("price")


def test_what_follows_an_error_is_what_the_sets_own_reward_says(model: Path) -> None:
    """A sample that failed is wrong, also where the number in its place is a success."""
    own = [f"eval.sets.exact.reward.{key}" for key in (f"function={__name__}:fails", "on_error=1.0")]
    config = load_config("tiny_cpu", [*SETS, *own])
    sampler, data = built(config, model)
    measured = asyncio.run(measure(sampler, data.sets[1], config.eval))
    assert (measured.errors, measured.right) == (4, (0, 0, 0, 0))
    sampler, data = built(load_config("tiny_cpu", [*SETS, own[0]]), model)
    with pytest.raises(RewardError, match=r"fails.*price"):
        asyncio.run(measure(sampler, data.sets[1], config.eval))


def test_the_preflight_asks_the_reward_of_each_set(model: Path) -> None:
    found = check(Subject(load_config("tiny_cpu", [*SETS, f"model.path={model}"]), for_job=False))
    facts = [each.text for each in found if each.kind == "fact"]
    assert facts[0].startswith("reward 'length' gives 0 for the answer itself")
    assert facts[1].startswith("reward 'exact_match' gives 1 for the answer itself, 0 for")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("eval.sets.exact.reward.length.max_tokens=5", r"eval\.sets\.exact\.reward\.length\.max_tokens=5 does nothing"),
        ("environment.function=calculator", "the environment gives the reward"),
        (
            "eval.sets.plain.reward.parts.exact_match=0",
            "eval.sets.plain.reward.parts: the weights of exact_match are all 0",
        ),
    ],
)
def test_what_says_nothing_is_refused_with_its_key(more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("tiny_cpu", [*SETS, more])


def test_an_unknown_reward_is_named_by_the_sets_key() -> None:
    config = load_config("tiny_cpu", [*SETS, "eval.sets.plain.reward.function=exact"])
    with pytest.raises(ConfigError, match=r"eval\.sets\.plain\.reward\.function='exact' is unknown"):
        resolve_rewards(config.reward, config.own_rewards)
