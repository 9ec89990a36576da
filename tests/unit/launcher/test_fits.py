from __future__ import annotations

import re
from dataclasses import replace

import pytest

from launcher.preflight.sizes import size_problems
from rl_megatron.config.run import RunConfig
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape, Rope

SHAPE = NAMED["qwen3-30b-a3b"]


def told(config: RunConfig, shape: ModelShape) -> str:
    return "\n".join(found.text for found in size_problems(config, shape))


def test_only_what_the_engine_runs_starts() -> None:
    config = RunConfig()
    assert told(config, SHAPE) == ""
    assert told(config, replace(SHAPE, rope=Rope(kind="yarn"))) == ""
    assert told(config, replace(SHAPE, family="mixtral", qk_norm=None)) == ""


def test_what_the_learner_cannot_build_is_told_before_a_process_starts() -> None:
    biased = replace(SHAPE, expert_bias=True)
    cut = RunConfig.model_validate({"learner": {"tp": 2, "etp": 2}, "rollout": {"engine": "vllm"}})
    assert told(cut, SHAPE) == ""
    assert "learner.etp=2: experts with biases cannot be sharded" in told(cut, biased)
    few = replace(SHAPE, router=replace(SHAPE.router, score="sigmoid"), normalize_top_k=False)
    assert "a sigmoid router with num_experts_per_tok=8 and norm_topk_prob=False" in told(RunConfig(), few)


def test_one_of_several_experts_with_a_weight_of_1_is_refused_and_one_of_one_is_not() -> None:
    one = replace(SHAPE, experts_per_token=1)
    assert "num_experts_per_tok=1 of 128 experts with norm_topk_prob=True" in told(RunConfig(), one)
    assert told(RunConfig(), replace(one, normalize_top_k=False)) == ""
    assert told(RunConfig(), replace(one, num_experts=1)) == ""


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_routes_of_a_model_without_experts_are_refused(replay: str) -> None:
    config = RunConfig.model_validate({"algorithm": {"routing_replay": replay}})
    assert told(config, SHAPE) == ""
    dense = replace(SHAPE, family="qwen3", num_experts=0, experts_per_token=0, expert_width=0, dense_width=4096)
    assert re.search(rf"routing_replay={replay}: model_type='qwen3' has no experts.*=off", told(config, dense))


def test_flips_and_noise_of_routes_that_a_model_has_not_are_refused() -> None:
    dense = replace(SHAPE, family="qwen3", num_experts=0, experts_per_token=0, expert_width=0, dense_width=4096)
    one = replace(SHAPE, num_experts=1, experts_per_token=1)
    flips = RunConfig.model_validate({"train": {"route_flips": True}})
    assert "train.route_flips=true: model_type='qwen3' has no experts" in told(flips, dense)
    noise = RunConfig.model_validate({"rollout": {"router_noise": 0.25}})
    assert "rollout.router_noise=0.25 changes nothing in a model of 1 experts; leave it out" in told(noise, one)
    assert told(noise, SHAPE) == told(flips, SHAPE) == told(flips, one) == ""


def test_longer_sequences_than_an_indexer_chooses_whole_are_refused_with_both_numbers() -> None:
    shape = NAMED["deepseek-v3.2"]
    few = {"learner": {"pp": 61}, "rollout": {"max_prompt_tokens": 48, "max_new_tokens": 2000}}
    assert told(RunConfig.model_validate(few), shape) == ""
    more = RunConfig.model_validate({**few, "rollout": {"max_prompt_tokens": 49, "max_new_tokens": 2000}})
    said = "rollout.max_prompt_tokens=49 + rollout.max_new_tokens=2000 = 2049 is more than index_topk=2048"
    assert said in told(more, shape)
    assert "= 2049" not in told(more, NAMED["deepseek-v3"])
    sets = {"eval": {"sets": {"long": {"max_new_tokens": 9000}}}}
    assert "eval.sets.long.max_new_tokens=9000 = 9048 is more than index_topk=2048" in told(
        RunConfig.model_validate(few | sets), shape
    )
    served = RunConfig.model_validate({**few, **sets, "rollout": {**few["rollout"], "engine": "vllm"}})
    assert "eval.sets.long" not in told(served, shape)
