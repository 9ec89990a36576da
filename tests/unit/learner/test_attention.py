"""Attention, delta rule and rotary frequencies beside torch's and transformers' own, and which layers are used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.config.activations import torch_only, uses_transformer_engine
from rl_megatron.config.learner_checks import refuse
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.learner.model import kernels, sparse
from rl_megatron.learner.model.attention import LatentDecoderConfig
from rl_megatron.learner.model.build import make_config
from rl_megatron.learner.model.delta import convolve, cut_into_chunks, gated_delta_rule
from rl_megatron.learner.model.kernels import AttentionKernel, batched_attention, faster_attention, long_attention
from rl_megatron.learner.model.latent import megatron_latent_keywords
from rl_megatron.learner.model.sparse import attend_chosen
from rl_megatron.models import operations
from rl_megatron.models.families.common import read_rope
from rl_megatron.models.named import NAMED
from rl_megatron.models.rotary import inverse_frequencies, softmax_scale
from rl_megatron.models.shape import Rope, Router

SCALE = 0.3


def of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("attention", [batched_attention, long_attention])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("length", [1, 16, 37])
def test_it_is_torchs_in_blocks_of_queries(
    attention: AttentionKernel, heads: int, width: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MIN_ONEDNN_FLOPS", 1)  # its products, though they are small
    monkeypatch.setattr(kernels, "BATCHED_ROWS", 8)
    monkeypatch.setattr(kernels, "ROWS", 24)  # of 8 or 24 positions: sequences of several blocks, whole and cut
    monkeypatch.setattr(kernels, "SCORES", 600)  # of 37 positions a block has one or two of the four groups
    draw = torch.Generator().manual_seed(0)
    shapes = (2, length, heads, 8), (2, length, 2, 8), (2, length, 2, width)
    given = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    before = [x.detach().clone() for x in given]
    grad = torch.randn(2, length, heads, width, generator=draw)
    found, wanted = attention(*given, SCALE), of_torch(*given)
    torch.testing.assert_close(found, wanted)
    for own, theirs in zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
    ):
        torch.testing.assert_close(own, theirs)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


@pytest.mark.parametrize("room", [1, 2**21], ids=["queries alone", "whole"])
def test_attention_to_chosen_keys_is_torchs_with_a_mask(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows in any order, of which the second sequence has fewer; and it keeps no square of a length."""
    monkeypatch.setitem(sparse._SCORES, "cpu", room)
    draw, length, top_k = torch.Generator().manual_seed(0), 37, 5
    given = [torch.randn(2, length, 3, width, generator=draw).requires_grad_() for width in (8, 8, 12)]
    rows = torch.randperm(2 * length, generator=draw).view(2, length)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    chosen, mask = torch.full((2 * length, top_k), -1, dtype=torch.int32), torch.zeros(2, length, length).bool()
    for row, at in itertools.product(range(2), range(length)):
        places = torch.randperm(at + 1, generator=draw)[:top_k]
        chosen[rows[row, at], : len(places)], mask[row, at, places] = places.int(), True
    chosen[rows[0, 9]], mask[0, 9] = -1, visible[9]  # none: all
    mask[1, 20, int(chosen[rows[1, 20], 0])] = False
    chosen[rows[1, 20], 0] = 30  # a later key
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        found = attend_chosen(*given, chosen, rows, SCALE)
    assert sum(kept) == sum(x.nbytes for x in given)
    q, k, v = (x.transpose(1, 2) for x in given)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=SCALE).transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn(wanted.shape, generator=draw)
    for own, theirs in zip(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
    ):
        torch.testing.assert_close(own, theirs)


def test_it_is_for_sequences_in_float32_where_a_library_has_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, threads = torch.zeros(1), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        monkeypatch.setattr(operations, "ONEDNN_LEADS", False)
        monkeypatch.setattr(operations, "MKL_IS_WIDE", False)
        assert faster_attention(queries, kernels.LONG) is None
        monkeypatch.setattr(operations, "MKL_IS_WIDE", True)
        assert {faster_attention(queries, length) for length in kernels.BY_MKL} == {batched_attention}
        assert faster_attention(queries, kernels.BY_MKL.start - 1) is None
        assert faster_attention(queries, kernels.BY_MKL.stop) is None
        assert faster_attention(queries.bfloat16(), kernels.LONG) is None
        monkeypatch.setattr(operations, "MKL_IS_WIDE", False)
        monkeypatch.setattr(operations, "ONEDNN_LEADS", True)
        assert faster_attention(queries, kernels.LEAST - 1) is None
        assert (
            faster_attention(queries, kernels.LEAST) is faster_attention(queries, kernels.LONG - 1) is batched_attention
        )
        assert faster_attention(queries, kernels.LONG) is long_attention
        assert faster_attention(queries.bfloat16(), kernels.LONG) is None
        torch.set_num_threads(2)
        assert faster_attention(queries, kernels.LONG) is None
    finally:
        torch.set_num_threads(threads)


# The gated delta rule over packed sequences: each is transformers' alone, and gradients are finite differences.
HEADS, RATIO, DK, DV = 2, 3, 5, 4


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def inputs(lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g, n = torch.Generator().manual_seed(3), sum(lengths)
    q, k = (torch.randn(n, HEADS, DK, generator=g, dtype=dtype) for _ in range(2))
    v = torch.randn(n, HEADS, RATIO, DV, generator=g, dtype=dtype)
    decay = -F.softplus(torch.randn(n, HEADS, RATIO, generator=g, dtype=dtype))
    return [q, k, v, decay, torch.rand(n, HEADS, RATIO, generator=g, dtype=dtype)]


@pytest.mark.parametrize("rule", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("lengths", [(9, 1, 17, 0, 8, 4), (130, 64, 65, 1)])
def test_each_packed_sequence_is_transformers_alone(rule: object, size: int, lengths: Sequence[int]) -> None:
    given = inputs(lengths)
    found = gated_delta_rule(*given, cut_into_chunks(starts(lengths), gap=3, size=size))
    for q, k, v, g, b, out in zip(*(x.split(list(lengths)) for x in (*given, found)), strict=True):
        if len(q):
            heads = [x.repeat_interleave(RATIO, 1)[None] for x in (q, k)]
            flat = [x.flatten(1, 2)[None] for x in (v, g, b)]
            wanted, _ = rule(*heads, flat[0], g=flat[1], beta=flat[2], use_qk_l2norm_in_kernel=True)  # type: ignore[operator]
            torch.testing.assert_close(out.flatten(1, 2), wanted[0], atol=2e-6, rtol=1e-4)


def test_gradients_are_finite_differences() -> None:
    lengths = (5, 3)
    chunks = cut_into_chunks(starts(lengths), gap=3, size=2)
    given = [x.requires_grad_() for x in inputs(lengths, torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, chunks), given)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weight = torch.randn(6, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: convolve(a, b, chunks), [x, weight])


def test_the_delta_rule_sees_its_own_sequence_alone_and_stays_finite() -> None:
    lengths = [9, 1, 0, 2, 17]
    x = torch.randn(sum(lengths), 6, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(2))
    found = convolve(x, weight, cut_into_chunks(starts(lengths), gap=3))
    for part, out in zip(x.split(lengths), found.split(lengths), strict=True):
        if len(part):
            wanted = causal_conv1d_fn(part.t()[None], weight.squeeze(1), None, activation="silu")
            torch.testing.assert_close(out, wanted[0].t())
    q, k, v, _, b = (x.requires_grad_() for x in inputs((700, 300)))
    decay = torch.full_like(b, -40.0).requires_grad_()
    gated_delta_rule(q, k, v, decay, b, cut_into_chunks(starts((700, 300)), gap=3)).square().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, decay, b) if x.grad is not None)
    assert q.grad is not None


# Rotary frequencies against transformers' own, and what the learner refuses to build.
LLAMA31 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GPT_OSS = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
DEEPSEEK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    "parameters",
    [
        {**LLAMA31, "original_max_position_embeddings": 8192},
        {**GPT_OSS, "original_max_position_embeddings": 4096, "truncate": False},
        {**DEEPSEEK, "original_max_position_embeddings": 4096},
        {**DEEPSEEK, "original_max_position_embeddings": 4096, "mscale": 0.707},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ],
)
def test_frequencies_are_transformers_own(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        head_dim=64, hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    raw = {"rope_parameters": parameters, "max_position_embeddings": 131072}
    theta, rope = read_rope(raw, Path("config.json"), head_dim=64)
    torch.testing.assert_close(inverse_frequencies(theta, 64, rope, torch.device("cpu")), wanted, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


SHAPE = NAMED["qwen3-30b-a3b"]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (replace(SHAPE, router=Router(score="sigmoid"), normalize_top_k=False), {}, "norm_topk_prob=False: megatron"),
        (replace(SHAPE, router=Router(groups=8, top_groups=2)), {}, "num_experts_per_tok / topk_group = 8 / 2 = 4"),
        (replace(SHAPE, expert_bias=True), {"tp": 2}, "learner.etp=2: experts with biases cannot be sharded"),
    ],
)
def test_what_megatron_would_get_wrong_is_refused(shape: Any, options: dict[str, int], message: str) -> None:
    refuse(SHAPE, LearnerSection())
    with pytest.raises(ConfigError, match=message):
        refuse(shape, LearnerSection.model_validate(options))


def test_parts_that_transformer_engine_lacks_are_named() -> None:
    assert torch_only(SHAPE) is None
    assert torch_only(replace(SHAPE, windows=(0, 128))) == "sliding windows"
    assert torch_only(replace(SHAPE, qk_norm="all")) == "norms over all heads"


# Configurations of latent attention: what megatron's own gets, and what is refused.
V3 = NAMED["deepseek-v3"]


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_megatrons_own_rotary_embedding_turns_as_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding, _yarn_get_mscale

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where it puts its frequencies
    shape = NAMED[name]
    options = megatron_latent_keywords(shape)
    theirs = YarnRotaryEmbedding(
        options["qk_pos_emb_head_dim"],
        rotary_base=options["rotary_base"],
        use_cpu_initialization=True,
        scaling_factor=options["rotary_scaling_factor"],
        original_max_position_embeddings=options["original_max_position_embeddings"],
        beta_fast=options["beta_fast"],
        beta_slow=options["beta_slow"],
        mscale=options["mscale"],
        mscale_all_dim=options["mscale_all_dim"],
    )
    angles, factor = theirs.get_emb(100)
    ours = torch.outer(torch.arange(100.0), inverse_frequencies(shape.rope_theta, 64, shape.rope, torch.device("cpu")))
    assert torch.allclose(angles[:, 0, 0, :32], ours, atol=1e-5)
    assert factor == pytest.approx(shape.rope.attention_factor)
    grown = _yarn_get_mscale(options["rotary_scaling_factor"], options["mscale_all_dim"])
    assert softmax_scale(shape.head_dim, shape.rope) == pytest.approx(grown * grown / math.sqrt(192))


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_megatrons_configuration_takes_the_options(name: str) -> None:
    shape = NAMED[name]
    config = LatentDecoderConfig(
        shape=shape,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        **megatron_latent_keywords(shape),
    )
    assert config.multi_latent_attention
    assert (config.rope_type, config.kv_lora_rank, config.v_head_dim) == ("yarn", 512, 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": Rope(kind="linear", factor=2.0)},
        {"rope": replace(V3.rope, truncate=False)},
        {"rope": replace(V3.rope, attention_factor=1.3)},
        {"norm_eps": 1e-5},
    ],
)
def test_what_megatrons_own_cannot_do_is_for_torch_layers(changes: dict[str, object]) -> None:
    assert torch_only(V3) is None
    assert "latent attention" in (torch_only(replace(V3, **changes)) or "")  # type: ignore[arg-type]


def test_groups_that_megatron_rates_otherwise_are_refused() -> None:
    make_config(V3, LearnerSection())
    best = Router(groups=8, top_groups=3, group_score="max", scaling=16.0)
    v2 = replace(V3, family="deepseek_v2", experts_per_token=6, router=best, normalize_top_k=False)
    with pytest.raises(ConfigError, match=r"a group of experts by its best 1, but megatron by its best .* = 2"):
        make_config(v2, LearnerSection())
    make_config(replace(v2, experts_per_token=3), LearnerSection())
    # torch says so only in the first pass: "selected index k out of range".
    single = replace(V3, router=replace(V3.router, groups=V3.num_experts, top_groups=V3.experts_per_token // 2))
    with pytest.raises(ConfigError, match=rf"{V3.num_experts} groups of 1 of .* best 2 score each; set n_group"):
        make_config(single, LearnerSection())


# Which layers a learner uses.
@pytest.mark.parametrize(
    ("given", "fused"), [({"cp": 2}, False), ({"cp": 1}, True), ({"cp": 2, "dtype": "bfloat16"}, True)]
)
def test_auto_takes_transformer_engines_where_they_have_an_attention_kernel(
    given: dict[str, object], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # it is installed
    learner = LearnerSection.model_validate({"device": "cuda", **given})
    assert uses_transformer_engine(learner, NAMED["qwen3-30b-a3b"]) is fused
