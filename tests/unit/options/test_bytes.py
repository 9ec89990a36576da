"""What options of the learner hold on a GPU or the host: by hand, counted, and by the plan's formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from launcher.preflight import model_files
from launcher.preflight.subject import Finding, PreflightContext
from rl_megatron.config.activations import activation_bytes, delta_bytes, freed, halves, uses_grouped_gemm
from rl_megatron.config.io import load_config
from rl_megatron.config.learner_checks import problems
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.learner.model import kernels
from rl_megatron.learner.model.delta import convolve, cut_into_chunks, gated_delta_rule
from rl_megatron.learner.model.experts import FusedExperts
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import DeltaNet, ModelShape
from rl_megatron.weights.layouts.families import megatron_layout
from rl_megatron.weights.layouts.learner import Elements, Rank, elements
from tests.draft_models import save_with_drafts, save_with_qwens_draft
from tests.family_models import save_model
from tests.recipes.meter import Meter
from tests.small_models import TINY_MOE
from tests.unit.launcher.test_memory import QWEN_30B, QWEN_80GB
from tools.planner.layers import _experts
from tools.planner.memory import footprints, host_bytes
from tools.planner.terms import memory, num_in_flight

_MOE = "learner.offload.activations=moe"


def recipe(name: str, *keys: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(name, ["model.path=/models/given", *keys])
    return config, NAMED[str(config.model.name)]


def test_halves_of_layers_wait_in_the_hosts_memory() -> None:
    """By hand, of TransformerEngine's layers: rows of 8 experts with gate, up and product, a norm, and a router."""
    keys = ("learner.recompute.uniform=null", "slurm.gpu_memory_gb=null", "rollout.server.memory_fraction=null")
    (before, shape), (config, _) = (
        recipe(QWEN_30B, *keys),
        recipe(QWEN_30B, *keys, _MOE),
    )
    each = 2 * (8 * (2048 + 3 * 768) + 2 * 2048) + 12 * 128  # bytes of a token of a layer, over tp 4
    layer = 16384 * each / 4
    assert host_bytes(before, shape) == 0
    assert host_bytes(config, shape) == 8 * math.ceil(48 * layer / 2**30) * 2**30
    stays, all_of_it = (footprints(one, shape)[0].terms["activations"] for one in (config, before))
    assert all_of_it - stays == pytest.approx(46 * layer, rel=0.01)  # of the last two the copies may run on


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("learner.recompute.uniform=1", "learner.recompute.uniform=1: .* set one of the two"),
        ("learner.recompute.parts=moe_act", "learner.recompute.parts=moe_act: .* a part of what would be offloaded"),
        ("learner.cuda_graphs=true", "graphs keep activations in their own memory, .* set one of the two"),
        ("learner.fp8=tensorwise", "keep float8 copies of weights with activations"),
        ("learner.dispatcher=deepep", "dispatcher=deepep: it would offload tensors of other CUDA streams"),
        ("learner.layers=a.package:layers", "the run does not know what custom layers keep; leave it out"),
        ("learner.device=cpu", "there is no GPU memory to free; leave it out"),
        ("learner.offload.activations=mlp", "activations=mlp with .*: the model has no dense layers; leave it out"),
    ],
)
def test_activations_stay_on_gpus_where_moving_them_would_be_wrong(keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _refused(QWEN_30B, "learner.recompute.uniform=null", _MOE, keys)


def _refused(name: str, *keys: str) -> None:
    config, shape = recipe(name, *keys)
    raise ConfigError(" ".join(problems(config.learner, shape)))  # those that need the model's sizes


def test_attention_without_a_fused_kernel_keeps_probabilities_of_its_longest_sequences() -> None:
    """By hand: torch's layers with keys of two ranks; 32 heads' probabilities in float32 over tp 4."""
    keys = ("learner.layers=torch", "learner.recompute.uniform=null", "slurm.gpu_memory_gb=null")
    keys = (*keys, "rollout.server.memory_fraction=null", "learner.cp=2", "learner.dp=1")
    (short, shape), (long, _) = (recipe(QWEN_30B, *keys, f"rollout.max_new_tokens={n}") for n in (1024, 9216))
    more = 8192 * 48 * 32 / 4 * 8192 * 4  # tokens of a rank, layers, heads, keys, bytes
    held = [footprints(config, shape)[0].terms["activations"] for config in (short, long)]
    assert held[1] - held[0] == pytest.approx(more, rel=0.05)  # and the working set of the layer that computes


# What a delta net holds while it computes, counted, and by the plan's formula.
TOKENS = 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "ratio", "dk", "dv"), [(4, 2, 32, 48), (2, 2, 128, 128), (2, 1, 16, 16)])
def test_it_holds_what_the_plan_says(dtype: str, heads: int, ratio: int, dk: int, dv: int) -> None:
    m = DeltaNet(key_heads=heads, value_heads=heads * ratio, key_dim=dk, value_dim=dv, kernel=4)
    shape = replace(NAMED["qwen3-30b-a3b"], delta=m, delta_layers=(0,))
    chunks, kind = cut_into_chunks(torch.tensor([0, TOKENS]), gap=3), getattr(torch, dtype)
    x = torch.randn(TOKENS, m.mixed, dtype=kind, requires_grad=True)
    taps = torch.randn(m.mixed, 1, 4, dtype=kind, requires_grad=True)
    g, b = (torch.rand(TOKENS, heads, ratio, requires_grad=True) for _ in range(2))
    with Meter() as meter:
        before = meter.live
        meter.restart()
        q, k, v = convolve(x, taps, chunks).view(TOKENS, heads, -1).split([dk, dk, ratio * dv], -1)
        out = gated_delta_rule(q, k, v.unflatten(-1, (ratio, dv)), -g, b, chunks)
        del q, k, v
        out.backward(torch.ones_like(out))
        held = meter.peak - before
    planned = delta_bytes(LearnerSection.model_validate({"dtype": dtype}), shape, 0)
    assert held / TOKENS == pytest.approx(planned, rel=0.12)
    assert delta_bytes(LearnerSection(), shape, 1) == 0


# What experts that are multiplied by in one call hold, counted, and by the plan's formulas.
GPU = LearnerSection.model_validate({"device": "cuda", "dtype": "bfloat16", "layers": "torch"})
CPU = GPU.model_copy(update={"device": "cpu"})
SHAPES = {
    "apart": TINY_MOE,
    "stacked": replace(TINY_MOE, stacked_experts=True),
    "with biases": replace(TINY_MOE, expert_bias=True, clamped_swiglu=7.0),
}
Compute = Callable[[list[int], Tensor, Tensor], Tensor]


def computing(shape: ModelShape) -> Compute:
    """An expert layer of random weights."""
    n, h, f = shape.num_experts, shape.hidden_size, shape.expert_width
    if shape.expert_bias:
        layer: Any = FusedExperts.__new__(FusedExperts)
        torch.nn.Module.__init__(layer)
        layer.limit = shape.clamped_swiglu
        sizes = {"gate_up_proj": (n, h, 2 * f), "gate_up_proj_bias": (n, 2 * f), "down_proj": (n, f, h)}
        for name, size in {**sizes, "down_proj_bias": (n, h)}.items():
            layer.register_parameter(name, torch.nn.Parameter(torch.randn(size, dtype=torch.bfloat16)))
        return lambda counts, x, probs: layer._compute_grouped(counts, x, probs)
    fc1, fc2 = (torch.randn(n, *size, dtype=torch.bfloat16) for size in ((2 * f, h), (h, f)))
    if shape.stacked_experts:
        given: Any = fc1.requires_grad_(), fc2.requires_grad_()
    else:
        given = [[one.clone().requires_grad_() for one in some] for some in (fc1, fc2)]
    return lambda counts, x, probs: kernels.grouped_mlp(x, probs, counts, *given, recompute=False)


@pytest.mark.parametrize(("width", "etp"), [(32, 1), (12, 1), (20, 1), (24, 1), (24, 2), (88, 2), (96, 2)])
@pytest.mark.parametrize("generation", [8, 9, 10, 12])
def test_the_learner_does_as_planned(width: int, etp: int, generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Hopper and Blackwell; torch has no kernel for others."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    rows: Any = MagicMock(is_cuda=True, dtype=torch.bfloat16, __len__=lambda self: 5)
    fc1 = torch.empty(2 * width // etp, TINY_MOE.hidden_size), torch.empty(TINY_MOE.hidden_size, width // etp)
    planned = uses_grouped_gemm(GPU.model_copy(update={"etp": etp}), replace(TINY_MOE, expert_width=width))
    assert kernels.takes(rows, *fc1) == (planned and generation in (9, 10))


@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_they_hold_what_the_plan_says(name: str, width: int) -> None:
    shape = replace(SHAPES[name], expert_width=width)
    compute, rows = computing(shape), TOKENS * shape.experts_per_token
    x = torch.randn(rows, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(rows, requires_grad=True)
    with Meter() as meter:
        before = meter.live
        out = compute([rows // shape.num_experts] * shape.num_experts, x, probs)
        kept, toward = meter.live - before, torch.ones_like(out)
        before = meter.live
        meter.restart()
        out.backward(toward)
        held = meter.peak - before
    each = x.nbytes
    planned = _experts(GPU, shape, SimpleNamespace(tokens=TOKENS), 0)  # type: ignore[arg-type]
    assert held == pytest.approx(planned - each, rel=0.15)  # the output's gradient was there
    if shape.expert_bias:  # one after the other keeps other things
        known = 2 * each + 7 * rows * width * x.itemsize
        more = TOKENS * (halves(GPU, shape, 0)["moe"] - halves(CPU, shape, 0)["moe"])
        assert kept == pytest.approx(known + more, rel=0.05)


# What float8 keeps of a token, by TransformerEngine's source, and the copies of weights.
QWEN, DEEPSEEK = NAMED["qwen3-30b-a3b"], NAMED["deepseek-v3"]


def learner(fp8: str | None, **keys: Any) -> LearnerSection:
    return LearnerSection.model_validate({"device": "cuda", "dtype": "bfloat16", "fp8": fp8, **keys})


def test_linears_keep_their_inputs_in_a_byte_but_for_what_others_keep_too() -> None:
    """Qwen3-30B-A3B: h 2048, 8 of 128 experts of 768. A byte less of the norm's output and of each chosen expert's row
    and product. Attention keeps its output in bfloat16, so megatron-core has its projection keep no other."""
    fewer = activation_bytes(learner(None), QWEN, 0) - activation_bytes(learner("tensorwise"), QWEN, 0)
    assert fewer == 2048 + 8 * (2048 + 768)
    assert (freed(learner(None), QWEN, 0)["moe_act"] - freed(learner("tensorwise"), QWEN, 0)["moe_act"]) == 8 * 768
    # DeepSeek-V3, a layer of experts: 8 of 2048 and one shared, h 7168, latents of 1536 and 512. Two linears
    # read what the first norm gives, each with a copy of a byte; routers keep what the second gives, for shared
    # experts too.
    fewer = activation_bytes(learner(None), DEEPSEEK, 60) - activation_bytes(learner("blockwise"), DEEPSEEK, 60)
    assert fewer == 8 * (7168 + 2048) + 2048 + 1536 + 512


@pytest.mark.parametrize(("stage", "tables"), [(0, 1), (1, 0), (2, 1)])
def test_weights_have_two_copies_of_a_byte_but_for_tables_of_the_vocabulary(stage: int, tables: int) -> None:
    held = Elements(dense=10**9, experts=10**9)
    rank = Rank(
        stage=stage,
        parameters=held,
        trained_parameters=held,
        matrices=held,
        tokens=1.0,
        layers=(0,),
        inputs=(1.0,),
        longest=1,
        largest=1,
    )
    terms = memory(learner("mxfp8", pp=3, tp=2), QWEN, rank)
    assert terms["fp8 weights"] == 2 * (2 * 10**9 - tables * 151936 * 2048 / 2)
    assert "fp8 weights" not in memory(learner(None, pp=3, tp=2), QWEN, rank)


def test_blocks_of_128_are_gathered_whole() -> None:
    """Float8BlockQuantizer.is_quantizable of TransformerEngine 2.11, which asserts it of what it gathers."""
    shape = replace(QWEN, hidden_size=2048 + 16, latent=None)
    said = [list(problems(learner(fp8, tp=tp), shape)) for fp8, tp in (("blockwise", 2), ("blockwise", 1))]
    assert said[1] == []
    assert "learner.tp=2: ranks gather the 2064 hidden columns in float8, and this is not a multiple of" in said[0][0]
    assert list(problems(learner("blockwise", tp=2), DEEPSEEK)) == []
    narrow = replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, kv_rank=520, rope_dim=56))
    (problem,) = problems(learner("tensorwise"), narrow)
    assert "520 columns of a latent are not a multiple of 16" in problem
    assert [learner(fp8).float8_rows for fp8 in (None, "tensorwise", "blockwise", "mxfp8")] == [1, 16, 128, 32]


# Moments in bfloat16: their bytes by hand, and where they are refused.
LOW = "learner.optimizer.moments_dtype=bfloat16"


def test_moments_in_bfloat16_have_fewer_bytes_and_a_step_copies_some() -> None:
    """By hand: 8 bytes of state a parameter where 12 were; 2 ** 26 parameters at once have both moments in float32, or
    the embedding, if that is larger."""
    few = ("learner.max_tokens_per_micro_batch=8192", "learner.head_dtype=float32")
    each = 4 + 2 + 2
    whole, half = (
        max(footprints(*recipe(QWEN_80GB, *keys)), key=lambda found: found.terms["optimizer"]).terms
        for keys in (few, (LOW,))
    )
    assert half["optimizer"] == pytest.approx(whole["optimizer"] * each / 12)
    copied = min(half["optimizer"] / each, max(2**26, 151936 // recipe(QWEN_80GB)[0].learner.tp * 2048))
    assert half["activations"] + half["logits"] + half["step"] == pytest.approx(
        max(half["activations"] + half["logits"], 8 * copied)
    )
    config, shape = recipe(QWEN_30B, LOW, "learner.gradient_dtype=bfloat16")
    assert all(found.terms["step"] == 0 for found in footprints(config, shape))  # gradients are read as they are


@pytest.mark.parametrize("key", ["beta1", "beta2"])
def test_moments_in_bfloat16_that_would_not_decay_are_refused(key: str) -> None:
    """Torch's rounding to the nearest decides, for every number of a binade, as the refusal says."""
    every, slow, quick = 1 + torch.arange(2**7) / 2**7, 0.997, 0.996
    for decay, all_fall in ((slow, False), (quick, True)):
        assert bool(((every * decay).to(torch.bfloat16).float() < every).all()) is all_fall
    recipe(QWEN_30B, LOW, f"learner.optimizer.{key}={quick}")
    message = "bfloat16 has 8 bits, .* set it below 0.9961, or leave"
    with pytest.raises(ConfigError, match=f"{LOW} with learner.optimizer.{key}={slow}: {message}"):
        recipe(QWEN_30B, LOW, f"learner.optimizer.{key}={slow}")


# How many micro-batches are in flight, beside megatron-core's own schedule.
LAYERS = ((3,), (1, 1), (2, 1), (1, 2), (1, 4, 2), (5, 1, 1, 2))


@pytest.mark.parametrize("sizes", LAYERS)
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_as_many_are_in_flight_as_megatrons(pp: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    vpp, count = len(sizes), 6 * pp
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: pp)
    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: vpp if vpp > 1 else None
    )
    chunks = [chunk for _, chunk in get_schedule_table(count, vpp, pp)]
    for stage in range(pp):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        total, _, warmup, _ = get_pp_rank_microbatches(count, vpp, pp)
        held = [sum(sizes[chunk] for chunk in chunks[:warmup])]
        for n in range(total - warmup):  # one forward, one backward
            held.append(held[-1] + sizes[chunks[warmup + n]])
            held.append(held[-1] - sizes[vpp - 1 - chunks[n]])
        assert num_in_flight(pp, stage, sizes) == max(held) / sum(sizes)


# ``learner.draft``: what is refused, and the bytes that the plan counts.
DRAFTED = NAMED["deepseek-v3"]


def told(**keys: Any) -> str:
    return "\n".join(problems(LearnerSection.model_validate({"draft": {"train": True}, **keys}), DRAFTED))


def test_models_without_one_layer_are_refused() -> None:
    assert told() == ""
    learner = LearnerSection.model_validate({"draft": {"train": True}})
    for count in (0, 2):
        found = "\n".join(problems(learner, replace(DRAFTED, draft_layers=count)))
        assert f"shape.draft_layers={count}: the learner trains exactly one draft layer" in found
    (said,) = problems(learner, NAMED["deepseek-v3.2"])
    assert "shape.family=deepseek_v32: its draft layer has its own indexer" in said


def test_the_plan_counts_the_parameters_of_the_published_layer() -> None:
    """DeepSeek-V3's README: 685 billion on the hub, of which 671 are the model's; the others are 11.5 of the layer's
    own and its copies of embedding and output matrix."""
    with_layer = elements(megatron_layout(replace(DRAFTED, num_draft_layers=True)), 0).both
    own = with_layer - elements(megatron_layout(DRAFTED), 0).both
    copies = 2 * DRAFTED.vocab_size * DRAFTED.hidden_size
    assert own == pytest.approx(11.5e9, rel=0.01)
    assert with_layer + copies == pytest.approx(685e9, rel=1e-3)


def test_a_matrix_of_a_draft_layers_own_is_told_before_a_run(tmp_path: Path) -> None:
    """As conversions tell it."""
    tensors = save_with_drafts("glm4_moe", folder := tmp_path / "hf")
    config = load_config("tiny_cpu", ["learner.draft.train=true", f"model.path={folder}"])

    def notes() -> list[Finding]:
        return [
            one for one in model_files.check(PreflightContext(config, for_job=False)) if "is no copy of" in one.text
        ]

    assert not notes()
    (own,) = [name for name in tensors if name.endswith("shared_head.head.weight")]
    save_file({**tensors, own: tensors[own] + 1}, folder / "model.safetensors", {"format": "pt"})
    (said,) = notes()
    assert said.kind == "note"
    assert f"{own} is no copy of lm_head.weight, which the draft layer reads in its place" in said.text


def test_a_draft_layer_that_the_files_lack_is_told_before_a_run(tmp_path: Path) -> None:
    """config.json may say nothing of it, as Qwen3-Next's does not."""
    save_model("qwen3_next", tmp_path / "without")
    save_with_qwens_draft("qwen3_next", tmp_path / "with")
    for name, lacks in (("without", True), ("with", False)):
        config = load_config("tiny_cpu", ["learner.draft.train=true", f"model.path={tmp_path / name}"])
        said = [one.text for one in model_files.check(PreflightContext(config, for_job=False))]
        told = f"learner.draft.train=true, but no tensor in model.path={tmp_path / name} is of a draft layer"
        assert any(text.startswith(told) for text in said) == lacks
