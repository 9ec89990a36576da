"""DeepSeek-V3's plans, executed with numpy and compared with shards cut by separately written rules."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.deepseek_v3 import ENGINE_DEEPSEEK_V3, HF_DEEPSEEK_V3, MEGATRON_DEEPSEEK_V3
from rl_megatron.weights.plans.plan import plan
from tests.property.shards import (
    Tensors,
    assert_same,
    empty,
    everything,
    mesh,
    pad_rows,
    places,
    run,
    stage_layers,
    uneven,
)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    rope_dim, nope_dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from([2, 3]))
    return ModelShape(
        num_layers=4,
        hidden_size=draw(st.sampled_from([3, 8])),
        num_heads=draw(st.sampled_from([2, 4])),
        num_kv_heads=4,
        head_dim=rope_dim + nope_dim,
        num_experts=4,
        experts_per_token=2,
        expert_width=draw(st.sampled_from([2, 6])),
        vocab_size=draw(st.integers(1, 40)),
        rope_theta=1e4,
        norm_eps=1e-6,
        normalize_top_k=True,
        tie_embeddings=False,
        max_positions=64,
        latent=LatentAttention(query_rank=5, kv_rank=4, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=3),
        dense_layers=draw(st.integers(0, 4)),
        dense_width=draw(st.sampled_from([4, 10])),
        shared_width=draw(st.sampled_from([2, 8])),
    )


def full_hf(m: ModelShape) -> Tensors:
    """The checkpoint, every element a number of its own. Names and shapes as transformers writes them."""
    h, a, heads = m.hidden_size, m.latent, m.num_heads
    assert a is not None
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (m.vocab_size, h), "model.norm.weight": (h,)}
    sizes["lm_head.weight"] = (m.vocab_size, h)
    for layer in range(m.num_layers):
        p, s = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        sizes |= {p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,)}
        sizes |= {s + "q_a_proj.weight": (a.query_rank, h), s + "q_a_layernorm.weight": (a.query_rank,)}
        sizes[s + "q_b_proj.weight"] = (heads * (a.nope_dim + a.rope_dim), a.query_rank)
        sizes |= {
            s + "kv_a_proj_with_mqa.weight": (a.kv_rank + a.rope_dim, h),
            s + "kv_a_layernorm.weight": (a.kv_rank,),
        }
        sizes[s + "kv_b_proj.weight"] = (heads * (a.nope_dim + a.value_dim), a.kv_rank)
        sizes[s + "o_proj.weight"] = (h, heads * a.value_dim)
        mlps = {"mlp.": m.dense_width}
        if layer >= m.dense_layers:
            mlps = {f"mlp.experts.{e}.": m.expert_width for e in range(m.num_experts)}
            mlps["mlp.shared_experts."] = m.shared_width
            sizes |= {
                p + "mlp.gate.weight": (m.num_experts, h),
                p + "mlp.gate.e_score_correction_bias": (m.num_experts,),
            }
        for mlp, width in mlps.items():
            sizes |= {f"{p}{mlp}{x}_proj.weight": (width, h) for x in ("gate", "up")}
            sizes[f"{p}{mlp}down_proj.weight"] = (h, width)
    out, first = {}, 0
    for name, size in sizes.items():
        out[name] = np.arange(first, first + int(np.prod(size))).reshape(size)
        first += int(np.prod(size))
    return out


def attention(hf: Tensors, p: str, q: str, n: int, tp: int, engine: bool) -> Tensors:
    """Rank ``tp`` of ``n``: heads are cut, down projections and the latents' norms are whole."""
    s = p + "self_attn."
    up, out = {x: np.split(hf[s + f"{x}_b_proj.weight"], n)[tp] for x in ("q", "kv")}, {}
    o_proj = np.split(hf[s + "o_proj.weight"], n, axis=1)[tp]
    if engine:
        out["fused_qkv_a_proj.weight"] = np.concatenate(
            [hf[s + "q_a_proj.weight"], hf[s + "kv_a_proj_with_mqa.weight"]]
        )
        out |= {f"{x}_a_layernorm.weight": hf[s + f"{x}_a_layernorm.weight"] for x in up}
        out |= {f"{x}_b_proj.weight": weight for x, weight in up.items()} | {"o_proj.weight": o_proj}
        return {q + "self_attn." + name: x for name, x in out.items()}
    out = {f"linear_{x}_up_proj.weight": weight for x, weight in up.items()}
    out |= {f"linear_{x}_up_proj.layer_norm_weight": hf[s + f"{x}_a_layernorm.weight"] for x in up}
    out["linear_q_down_proj.weight"] = hf[s + "q_a_proj.weight"]
    out["linear_kv_down_proj.weight"] = hf[s + "kv_a_proj_with_mqa.weight"]
    out["linear_proj.weight"] = o_proj
    return {q + "self_attention." + name: x for name, x in out.items()}


def shards(hf: Tensors, m: ModelShape, d: ParallelDims, stages: tuple[int, ...] | None, engine: bool) -> list[Tensors]:
    """What megatron-core's or vLLM's ranks hold: column and row parallel layers, whole down projections, GLU halves."""
    ranks = []
    for pp, tp, etp, ep in places(d):
        out: Tensors = {}

        def column(names: list[str], n: int = d.tp, i: int = tp) -> np.ndarray:
            return np.concatenate([np.split(hf[name], n)[i] for name in names])

        def row(name: str, n: int = d.tp, i: int = tp) -> np.ndarray:
            return np.split(hf[name], n, axis=1)[i]

        def vocab(name: str, i: int = tp) -> np.ndarray:
            return np.split(pad_rows(hf[name], 8 * d.tp), d.tp)[i]

        if pp == 0:
            out["model.embed_tokens.weight" if engine else "embedding.word_embeddings.weight"] = vocab(
                "model.embed_tokens.weight"
            )
        for layer in stage_layers(m.num_layers, d, pp, stages):
            p = f"model.layers.{layer}."
            q = p if engine else f"decoder.layers.{layer}."
            out |= attention(hf, p, q, d.tp, tp, engine)
            out[q + "input_layernorm.weight"] = hf[p + "input_layernorm.weight"]
            dense = layer < m.dense_layers
            fused = "mlp.linear_fc1.layer_norm_weight" if dense else "pre_mlp_layernorm.weight"
            out[q + ("post_attention_layernorm.weight" if engine else fused)] = hf[
                p + "post_attention_layernorm.weight"
            ]
            fc1, fc2 = ("gate_up_proj", "down_proj") if engine else ("linear_fc1", "linear_fc2")
            mlp = "mlp." if dense else "mlp.shared_experts."
            out[f"{q}{mlp}{fc1}.weight"] = column([f"{p}{mlp}{x}_proj.weight" for x in ("gate", "up")])
            out[f"{q}{mlp}{fc2}.weight"] = row(f"{p}{mlp}down_proj.weight")
            if dense:
                continue
            router, bias = ("gate", "gate.e_score_correction_bias") if engine else ("router", "router.expert_bias")
            out[q + f"mlp.{router}.weight"] = hf[p + "mlp.gate.weight"]
            out[q + f"mlp.{bias}"] = hf[p + "mlp.gate.e_score_correction_bias"]
            w1, w2 = ("w13_weight.", "w2_weight.") if engine else ("linear_fc1.weight", "linear_fc2.weight")
            for e in np.split(np.arange(m.num_experts), d.ep)[ep]:
                x = p + f"mlp.experts.{e}."
                out[q + f"mlp.experts.{w1}{e}"] = column([x + "gate_proj.weight", x + "up_proj.weight"], d.etp, etp)
                out[q + f"mlp.experts.{w2}{e}"] = row(x + "down_proj.weight", d.etp, etp)
        if pp == d.pp - 1:
            out["model.norm.weight" if engine else "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            out["lm_head.weight" if engine else "output_layer.weight"] = vocab("lm_head.weight")
        ranks.append(out)
    return ranks


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes(), mesh())
def test_import_gives_megatrons_own_shards(data: st.DataObject, m: ModelShape, d: ParallelDims) -> None:
    stages = data.draw(uneven(m.num_layers, d))
    hf, layout = full_hf(m), Layout(table=MEGATRON_DEEPSEEK_V3, shape=m, dims=d, stages=stages)
    ranks = {rank: rank for rank in range(d.world_size)}
    got = empty(layout, ranks)
    run(everything(plan(Layout(table=HF_DEEPSEEK_V3, shape=m), layout), ranks), [hf], got)
    for rank, wanted in enumerate(shards(hf, m, d, stages, engine=False)):
        assert_same(got[rank], wanted)


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes(), mesh(), mesh())
def test_engines_get_their_own_shards(data: st.DataObject, m: ModelShape, d: ParallelDims, e: ParallelDims) -> None:
    stages, hf = data.draw(uneven(m.num_layers, d)), full_hf(m)
    learner = Layout(table=MEGATRON_DEEPSEEK_V3, shape=m, dims=d, stages=stages)
    engine = Layout(table=ENGINE_DEEPSEEK_V3, shape=m, dims=e)
    placement = {rank: rank + 1 for rank in range(e.world_size)}
    got = empty(engine, placement)
    moves = plan(learner, engine, placement=placement)
    run(everything(moves, placement), shards(hf, m, d, stages, engine=False), got)
    for rank, wanted in enumerate(shards(hf, m, e, None, engine=True)):
        assert_same(got[placement[rank]], wanted)
