"""Noise on the engine's routers: flips as often as the closed form says, repeatably, and only where it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_megatron.data.routes import decode_routes
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.rollout.local.noise import normal_of
from rl_megatron.types import Completion, GenerationRequest, SamplingParams
from rl_megatron.weights.layouts.families import read_shape

MakeEngine = Callable[[int], LocalEngine]
SIGMA = 0.5


def request(seed: int, prompt: tuple[int, ...], num: int, noise: float, new: int = 12) -> GenerationRequest:
    params = SamplingParams(
        temperature=1.0, top_p=1.0, max_new_tokens=new, stop_token_ids=(), seed=seed, router_noise=noise
    )
    return GenerationRequest(id=f"r{seed}", token_ids=prompt, num_completions=num, params=params, routes=True)


def said(completion: Completion) -> tuple[list[int], bytes]:
    assert completion.routes is not None
    return completion.token_ids.tolist(), completion.routes.data


def test_the_ends_of_the_uniform_numbers_are_finite_and_of_one_size() -> None:
    """2**-24 of them are the largest: some thousand tokens of a large model meet it."""
    low, middle, high = normal_of(torch.tensor([0.0, 0.5, 1 - 2.0**-24])).tolist()
    assert low == -high
    assert high == pytest.approx(NormalDist().inv_cdf(1 - 2.0**-25), rel=1e-3)
    assert 0 < middle < 1e-6


def test_routes_flip_as_often_as_two_normal_numbers_change_order(tmp_path: Path) -> None:
    """One layer of two experts, one a token: a gap g of the clean logits changes its sign with P = Phi(-g/(s sqrt 2)).

    The gaps are transformers'; a first layer's router sees nothing of the noise before it.
    """
    config = Qwen3MoeConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        vocab_size=41,
        max_position_embeddings=64,
        norm_topk_prob=True,
        output_router_logits=True,
    )
    torch.manual_seed(3)
    theirs = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    theirs.save_pretrained(tmp_path)
    engine = LocalEngine(read_shape(tmp_path), slots=64, dtype=torch.float32, device="cpu", max_length=64)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        engine.tensors[name].copy_(tensor)

    prompts = [
        tuple(torch.randint(0, 41, (12,), generator=torch.Generator().manual_seed(i)).tolist()) for i in range(24)
    ]
    requests = [request(i, prompt, 16, SIGMA, new=24) for i, prompt in enumerate(prompts)]
    expected, variance, flips = 0.0, 0.0, 0
    for asked, group in zip(requests, engine.generate(requests), strict=True):
        for number, got in enumerate(group):
            ids = torch.tensor([[*asked.token_ids, *got.token_ids[:-1].tolist()]])
            with torch.no_grad():
                logits = theirs(ids).router_logits[0].view(-1, 2).double()
            first = 0 if number == 0 else len(asked.token_ids) - 1  # completions share the prompt's others
            gap = (logits[:, 0] - logits[:, 1])[first:]
            routes = torch.from_numpy(decode_routes(got.routes).astype("int64"))[first:, 0, 0]
            flips += int((routes != logits.argmax(-1)[first:]).sum())
            chance = 0.5 * torch.erfc(gap.abs() / (SIGMA * math.sqrt(2)) / math.sqrt(2))
            expected += float(chance.sum())
            variance += float((chance * (1 - chance)).sum())
    assert expected > 1000
    assert abs(flips - expected) < 3.5 * math.sqrt(variance), (flips, expected)


def test_a_noisy_completion_is_a_function_of_its_request_alone(make_engine: MakeEngine) -> None:
    """The same beside others, in few rows and again; unlike in each completion, and with another seed."""
    asked, other = request(5, (3, 1, 4, 1, 5), 3, 0.8), request(9, (2, 7, 1), 4, 0.3)
    alone = [said(one) for one in make_engine(64).generate([asked])[0]]
    for slots in (64, 3):
        beside = make_engine(slots).generate([other, asked, replace(other, id="again")])
        assert [said(one) for one in beside[1]] == alone
    routes = {routes for _, routes in alone}
    assert len(routes) == 3
    ((again, *_),) = make_engine(64).generate([request(6, (3, 1, 4, 1, 5), 1, 0.8)])
    assert said(again)[1][: 4 * 2 * 2] != alone[0][1][: 4 * 2 * 2]  # of the prompt, by another seed


def test_a_request_without_noise_has_none_beside_one_that_has(make_engine: MakeEngine) -> None:
    clean, noisy = request(5, (3, 1, 4, 1, 5), 2, 0.0), request(5, (3, 1, 4, 1, 5), 2, 0.8)
    alone = [said(one) for one in make_engine(64).generate([clean])[0]]
    together = make_engine(64).generate([noisy, clean])
    assert [said(one) for one in together[1]] == alone
    assert [said(one)[1] for one in together[0]] != [routes for _, routes in alone]
