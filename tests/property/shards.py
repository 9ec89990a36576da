"""Random models and meshes, the shards that other systems' own rules cut, and a plan executed with numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.plan import Plan, Transfer
from tests.small_models import SMALL_MOE

Tensors = dict[str, npt.NDArray[np.int64]]
SMALL = st.sampled_from([1, 2])
UNWRITTEN = -1


@st.composite
def uneven(draw: st.DrawFn, num_layers: int, d: ParallelDims) -> tuple[int, ...] | None:
    """Layers of each stage, or with vpp of each chunk; or None."""
    chunks = d.pp * d.vpp
    rest = num_layers - chunks
    if rest < 0 or draw(st.booleans()):
        return None
    cuts = sorted(draw(st.lists(st.integers(0, rest), min_size=chunks - 1, max_size=chunks - 1)))
    return tuple(1 + b - a for a, b in itertools.pairwise([0, *cuts, rest]))


def mesh() -> st.SearchStrategy[ParallelDims]:
    def build(tp: int, cp: int, dp: int, pp: int, vpp: int, ep: int, etp: int) -> ParallelDims:
        inner = tp * cp * dp
        etp = etp if inner % etp == 0 else 1
        ep = ep if inner % (ep * etp) == 0 else 1
        return ParallelDims(tp=tp, cp=cp, dp=dp, pp=pp, vpp=vpp if pp > 1 else 1, ep=ep, etp=etp)

    return st.builds(build, SMALL, SMALL, st.integers(1, 4), SMALL, SMALL, st.sampled_from([1, 2, 4]), SMALL)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    num_kv_heads = draw(st.sampled_from([2, 4]))
    return replace(
        SMALL_MOE,
        num_layers=4,
        hidden_size=draw(st.sampled_from([3, 8])),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        expert_width=draw(st.sampled_from([2, 6])),
        vocab_size=draw(st.integers(1, 70)),
        tie_embeddings=draw(st.booleans()),
    )


def full_hf(m: ModelShape) -> Tensors:
    """The checkpoint, every element a number of its own. Names and shapes as transformers writes them."""
    h, d = m.hidden_size, m.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (m.vocab_size, h), "model.norm.weight": (h,)}
    if not m.tie_embeddings:
        sizes["lm_head.weight"] = (m.vocab_size, h)
    for layer in range(m.num_layers):
        p = f"model.layers.{layer}."
        sizes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        sizes |= {p + "self_attn.q_norm.weight": (d,), p + "self_attn.k_norm.weight": (d,)}
        sizes |= {
            p + "self_attn.q_proj.weight": (m.num_heads * d, h),
            p + "self_attn.o_proj.weight": (h, m.num_heads * d),
        }
        sizes |= {p + f"self_attn.{x}_proj.weight": (m.num_kv_heads * d, h) for x in "kv"}
        sizes[p + "mlp.gate.weight"] = (m.num_experts, h)
        for e in range(m.num_experts):
            sizes |= {p + f"mlp.experts.{e}.{x}_proj.weight": (m.expert_width, h) for x in ("gate", "up")}
            sizes[p + f"mlp.experts.{e}.down_proj.weight"] = (h, m.expert_width)
    out, first = {}, 0
    for name, size in sizes.items():
        out[name] = np.arange(first, first + int(np.prod(size))).reshape(size)
        first += int(np.prod(size))
    return out


def places(d: ParallelDims) -> Iterator[tuple[int, int, int, int]]:
    """(pp, tp, etp, ep) of rank 0, 1, ...: nested loops, slowest axis first."""
    for pp in range(d.pp):
        dense = [tp for _dp in range(d.dp) for _cp in range(d.cp) for tp in range(d.tp)]
        rest = d.tp * d.cp * d.dp // (d.ep * d.etp)
        expert = [(etp, ep) for _ in range(rest) for ep in range(d.ep) for etp in range(d.etp)]
        for tp, (etp, ep) in zip(dense, expert, strict=True):
            yield pp, tp, etp, ep


def stage_layers(num_layers: int, d: ParallelDims, pp: int, stages: tuple[int, ...] | None = None) -> list[int]:
    """Interleaved stages: the layers in order are dealt out in blocks, one to a stage, round and round."""
    counts = iter(stages or [num_layers // (d.pp * d.vpp)] * (d.pp * d.vpp))
    layers, mine = iter(range(num_layers)), []
    for _ in range(d.vpp):
        for stage in range(d.pp):
            block = list(itertools.islice(layers, next(counts)))
            mine += block if stage == pp else []
    return mine


def pad_rows(x: npt.NDArray[np.int64], multiple: int) -> npt.NDArray[np.int64]:
    return np.pad(x, ((0, -len(x) % multiple), (0, 0)), constant_values=UNWRITTEN)


def megatron_shards(
    hf: Tensors, m: ModelShape, d: ParallelDims, stages: tuple[int, ...] | None = None
) -> list[Tensors]:
    """What megatron-core's ranks hold: written from its rules (ColumnParallel, RowParallel, GQA groups, GLU halves)."""
    ranks = []
    for pp, tp, etp, ep in places(d):
        out: Tensors = {}
        vocab = lambda name, tp=tp: np.split(pad_rows(hf[name], 8 * d.tp), d.tp)[tp]  # noqa: E731
        if pp == 0:
            out["embedding.word_embeddings.weight"] = vocab("model.embed_tokens.weight")
        for layer in stage_layers(m.num_layers, d, pp, stages):
            p, q = f"model.layers.{layer}.", f"decoder.layers.{layer}."
            heads = [hf[p + f"self_attn.{x}_proj.weight"].reshape(m.num_kv_heads, -1, m.hidden_size) for x in "qkv"]
            fused = np.concatenate(heads, axis=1).reshape(-1, m.hidden_size)
            out[q + "self_attention.linear_qkv.weight"] = np.split(fused, d.tp)[tp]
            out[q + "self_attention.linear_qkv.layer_norm_weight"] = hf[p + "input_layernorm.weight"]
            out[q + "self_attention.q_layernorm.weight"] = hf[p + "self_attn.q_norm.weight"]
            out[q + "self_attention.k_layernorm.weight"] = hf[p + "self_attn.k_norm.weight"]
            out[q + "self_attention.linear_proj.weight"] = np.split(hf[p + "self_attn.o_proj.weight"], d.tp, axis=1)[tp]
            out[q + "pre_mlp_layernorm.weight"] = hf[p + "post_attention_layernorm.weight"]
            out[q + "mlp.router.weight"] = hf[p + "mlp.gate.weight"]
            for e in np.split(np.arange(m.num_experts), d.ep)[ep]:
                halves = [np.split(hf[p + f"mlp.experts.{e}.{x}_proj.weight"], d.etp)[etp] for x in ("gate", "up")]
                out[q + f"mlp.experts.linear_fc1.weight{e}"] = np.concatenate(halves)
                down = hf[p + f"mlp.experts.{e}.down_proj.weight"]
                out[q + f"mlp.experts.linear_fc2.weight{e}"] = np.split(down, d.etp, axis=1)[etp]
        if pp == d.pp - 1:
            out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if not m.tie_embeddings:
                out["output_layer.weight"] = vocab("lm_head.weight")
            elif d.pp > 1:
                out["output_layer.weight"] = vocab("model.embed_tokens.weight")
        ranks.append(out)
    return ranks


def engine_shards(hf: Tensors, m: ModelShape, d: ParallelDims) -> list[Tensors]:
    """What vLLM's ranks hold: written from its rules (QKVParallelLinear, RowParallelLinear, w13 over w2)."""
    ranks = []
    for pp, tp, etp, ep in places(d):
        out: Tensors = {}
        vocab = lambda name, tp=tp: np.split(pad_rows(hf[name], 8 * d.tp), d.tp)[tp]  # noqa: E731
        if pp == 0:
            out["model.embed_tokens.weight"] = vocab("model.embed_tokens.weight")
        for layer in stage_layers(m.num_layers, d, pp):
            p = f"model.layers.{layer}."
            heads = {
                x: hf[p + f"self_attn.{x}_proj.weight"].reshape(-1, m.head_dim, m.hidden_size) for x in ("q", "k", "v")
            }
            mine = {"q": np.split(heads["q"], d.tp)[tp]}
            for x in "kv":  # heads are repeated until there is one a rank
                mine[x] = np.split(heads[x].repeat(max(1, d.tp // m.num_kv_heads), axis=0), d.tp)[tp]
            stacked = np.concatenate([mine[x].reshape(-1, m.hidden_size) for x in ("q", "k", "v")])
            out[p + "self_attn.qkv_proj.weight"] = stacked
            out[p + "self_attn.o_proj.weight"] = np.split(hf[p + "self_attn.o_proj.weight"], d.tp, axis=1)[tp]
            names = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate")
            out |= {p + f"{name}.weight": hf[p + f"{name}.weight"] for name in names}
            for e in np.split(np.arange(m.num_experts), d.ep)[ep]:
                halves = [np.split(hf[p + f"mlp.experts.{e}.{x}_proj.weight"], d.etp)[etp] for x in ("gate", "up")]
                out[p + f"mlp.experts.w13_weight.{e}"] = np.concatenate(halves)
                down = hf[p + f"mlp.experts.{e}.down_proj.weight"]
                out[p + f"mlp.experts.w2_weight.{e}"] = np.split(down, d.etp, axis=1)[etp]
        if pp == d.pp - 1:
            out["model.norm.weight"] = hf["model.norm.weight"]
            if not m.tie_embeddings or d.pp > 1:
                out["lm_head.weight"] = vocab("model.embed_tokens.weight" if m.tie_embeddings else "lm_head.weight")
        ranks.append(out)
    return ranks


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def size(box: Box) -> int:
    return int(np.prod([stop - start for start, stop in box]))


def everything(plan: Plan, placement: Mapping[int, int]) -> list[Transfer]:
    return [t for process in placement.values() for t in plan.receives(process)]


def run(transfers: Sequence[Transfer], src: Sequence[Tensors], dst: Mapping[int, Tensors]) -> None:
    for t in transfers:
        source, target = src[t.src_rank][t.src_param], dst[t.dst_rank][t.dst_param]
        assert (source.shape, target.shape) == (t.src_shape, t.dst_shape)
        assert (target[at(t.dst_box)] == UNWRITTEN).all(), f"written twice: {t}"
        target[at(t.dst_box)] = source[at(t.src_box)]


def empty(layout: Layout, placement: Mapping[int, int]) -> dict[int, Tensors]:
    return {
        process: {name: np.full(shape, UNWRITTEN) for name, shape in layout.local_shapes(rank).items()}
        for rank, process in placement.items()
    }


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, x in got.items():
        np.testing.assert_array_equal(x, wanted[name], err_msg=name)
