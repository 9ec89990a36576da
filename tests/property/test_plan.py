"""Boxes, and plans over random models and meshes, executed with numpy and compared with separately cut shards."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.errors import WeightError
from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box, intersect, shift, volume, whole_box
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.deepseek_v3 import ENGINE_DEEPSEEK_V3, HF_DEEPSEEK_V3, MEGATRON_DEEPSEEK_V3
from rl_megatron.weights.layouts.tables.grouped_query import ENGINE_QWEN3_MOE, HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import LayerOrder, Plan, Transfer, from_json, plan, to_json
from rl_megatron.weights.routes.ends import BucketPart, cut_into_buckets
from tests.property.shards import (
    SMALL,
    UNWRITTEN,
    Tensors,
    assert_same,
    empty,
    engine_shards,
    everything,
    full_hf,
    megatron_shards,
    mesh,
    pad_rows,
    places,
    run,
    shapes,
    size,
    stage_layers,
    uneven,
)
from tests.small_models import SMALL_MOE


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(low, high) for low, high in box)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    spans = st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda span: (span[0], span[0] + span[1]))
    dims = draw(st.integers(1, 3))
    return tuple(draw(spans) for _ in range(dims)), tuple(draw(spans) for _ in range(dims))


@given(pairs())
def test_boxes_meet_where_they_share_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    cut = intersect(a, b)
    assert (elements(cut) if cut is not None else set()) == elements(a) & elements(b)
    assert volume(a) == len(elements(a))


@given(pairs(), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_a_part_holds_the_same_elements_in_the_other_tensor(pair: tuple[Box, Box], start: list[int]) -> None:
    source, other = pair
    cut = intersect(source, other) or source
    target = tuple((at, at + high - low) for at, (low, high) in zip(start, source, strict=False))
    values = np.arange(volume(source)).reshape([high - low for low, high in source])
    here, there = np.full((8,) * len(source), -1), np.full((8,) * len(source), -1)
    here[_slices(source)] = there[_slices(target)] = values
    assert np.array_equal(here[_slices(cut)], there[_slices(shift(cut, source, target))])
    assert here[_slices(whole_box(here.shape))].shape == here.shape


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)


# Plans over random models and meshes, executed with numpy and compared with shards cut by separately written rules.
@settings(max_examples=60, deadline=None)
@given(st.data(), shapes(), mesh())
def test_import_gives_megatrons_own_shards(data: st.DataObject, m: ModelShape, d: ParallelDims) -> None:
    stages = data.draw(uneven(m.num_layers, d))
    hf, layout = full_hf(m), Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d, stages=stages)
    ranks = {rank: rank for rank in range(d.world_size)}
    got = empty(layout, ranks)
    run(everything(plan(Layout(table=HF_QWEN3_MOE, shape=m), layout), ranks), [hf], got)
    for rank, wanted in enumerate(megatron_shards(hf, m, d, stages)):
        assert_same(got[rank], wanted)


@settings(max_examples=40, deadline=None)
@given(st.data(), shapes(), mesh(), mesh())
def test_resharding_gives_the_other_meshs_shards(
    data: st.DataObject, m: ModelShape, a: ParallelDims, b: ParallelDims
) -> None:
    stages = data.draw(uneven(m.num_layers, a))
    source = Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=a, stages=stages)
    hf, target = full_hf(m), Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=b)
    placement = {rank: rank + 1 for rank in range(b.world_size)}
    got, moves = empty(target, placement), plan(source, target, placement=placement)
    assert from_json(json.loads(json.dumps(to_json(moves)))) == moves
    run(everything(moves, placement), megatron_shards(hf, m, a, stages), got)
    for rank, wanted in enumerate(megatron_shards(hf, m, b)):
        assert_same(got[rank + 1], wanted)


@settings(max_examples=60, deadline=None)
@given(shapes(), mesh(), st.integers(1, 3), st.booleans())
def test_engines_get_all_with_the_fewest_bytes(m: ModelShape, d: ParallelDims, engines: int, colocated: bool) -> None:
    hf, src = full_hf(m), megatron_shards(full_hf(m), m, d)
    target = Layout(table=HF_QWEN3_MOE, shape=m, dims=ParallelDims(dp=engines))
    placement = {r: (r if colocated else r + d.world_size) for r in range(engines)}
    moves = plan(Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d), target, placement=placement)
    transfers, got = everything(moves, placement), empty(target, placement)
    run(transfers, src, got)
    moved = dict.fromkeys(placement.values(), 0)
    for t in transfers:
        if t.src_rank != t.dst_rank:
            moved[t.dst_rank] += size(t.dst_box)
    elements = np.concatenate([x.ravel() for x in hf.values()])
    for process, tensors in got.items():
        assert_same(tensors, hf)
        here = [x.ravel() for x in src[process].values()] if process < len(src) else []
        held = np.intersect1d(elements, np.concatenate(here)) if here else []
        assert moved[process] == elements.size - len(held)


@settings(max_examples=30, deadline=None)
@given(shapes(), mesh())
def test_no_replica_sends_much_more_than_another(m: ModelShape, d: ParallelDims) -> None:
    """Ranks that hold the same weights are alike: their loads differ by at most the largest single transfer."""
    target = Layout(table=HF_QWEN3_MOE, shape=m, dims=ParallelDims(dp=4))
    placement = {r: r + d.world_size for r in range(4)}
    moves = plan(Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d), target, placement=placement)
    transfers, load = everything(moves, placement), [0] * d.world_size
    for t in transfers:
        load[t.src_rank] += size(t.src_box)
    alike: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, place in enumerate(places(d)):
        alike.setdefault(place, []).append(load[rank])
    largest = max(size(t.src_box) for t in transfers)
    assert all(max(loads) - min(loads) <= largest for loads in alike.values())


@settings(max_examples=30, deadline=None)
@given(shapes(), mesh(), st.integers(0, 14))
def test_a_row_missing_from_the_source_is_named(m: ModelShape, d: ParallelDims, row: int) -> None:
    rows = [spec for spec in HF_QWEN3_MOE if spec.condition(m, d)]
    gone = rows[row % len(rows)]
    source = Layout(table=[spec for spec in rows if spec is not gone], shape=m)
    name = gone.name.format(layer=0, expert=0)
    with pytest.raises(WeightError, match=rf"{name}: the source has 0 of the \d+ elements"):
        plan(source, Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=ParallelDims()))


@st.composite
def engine_meshes(draw: st.DrawFn, m: ModelShape) -> ParallelDims:
    """Replicas of tp ranks, more than key/value heads at times; experts spread over ranks or cut."""
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if m.num_heads % n == 0 and max(n, 4) % m.num_kv_heads == 0]))
    experts = draw(st.sampled_from(["spread", "cut", "whole"]))
    return ParallelDims(
        tp=tp,
        dp=draw(st.sampled_from([1, 2, 3])),
        pp=draw(SMALL),
        ep=min(tp, 4) if experts == "spread" else 1,
        etp=2 if experts == "cut" and tp > 1 else 1,
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes(), mesh(), st.booleans())
def test_sharded_engines_get_their_shards(data: st.DataObject, m: ModelShape, d: ParallelDims, colocated: bool) -> None:
    e, stages = data.draw(engine_meshes(m)), data.draw(uneven(m.num_layers, d))
    hf = full_hf(m)
    src = megatron_shards(hf, m, d, stages)
    learner = Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d, stages=stages)
    target = Layout(table=ENGINE_QWEN3_MOE, shape=m, dims=e)
    placement = {r: (r if colocated else r + d.world_size) for r in range(e.world_size)}
    moves, got = plan(learner, target, placement=placement), empty(target, placement)
    run(everything(moves, placement), src, got)
    into = dict.fromkeys(placement.values(), 0)
    for (_, receiver), elements in moves.traffic().items():
        into[receiver] += elements
    for rank, wanted in enumerate(engine_shards(hf, m, e)):
        process = placement[rank]
        assert_same(got[process], wanted)
        needed = np.concatenate([x.ravel() for x in wanted.values()])
        held = np.concatenate([x.ravel() for x in src[process].values()]) if process < len(src) else []
        assert into[process] == np.count_nonzero(~np.isin(needed, [UNWRITTEN, *held]))


@settings(max_examples=30, deadline=None)
@given(st.data(), shapes(), mesh())
def test_engines_that_repeat_heads_can_be_read(data: st.DataObject, m: ModelShape, d: ParallelDims) -> None:
    hf, e = full_hf(m), data.draw(engine_meshes(m))
    target = Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d)
    placement = {r: r + e.world_size for r in range(d.world_size)}
    moves = plan(Layout(table=ENGINE_QWEN3_MOE, shape=m, dims=e), target, placement=placement)
    got = empty(target, placement)
    run(everything(moves, placement), engine_shards(hf, m, e), got)
    for rank, wanted in enumerate(megatron_shards(hf, m, d)):
        assert_same(got[placement[rank]], wanted)


@settings(max_examples=30, deadline=None)
@given(st.data(), shapes(), mesh())
def test_both_ends_of_a_pair_list_the_same_transfers(data: st.DataObject, m: ModelShape, d: ParallelDims) -> None:
    e = data.draw(engine_meshes(m))
    learner, engine = (
        Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d),
        Layout(table=ENGINE_QWEN3_MOE, shape=m, dims=e),
    )
    moves, traffic = plan(learner, engine), {}
    for process in range(d.world_size):
        sent: dict[int, list[Transfer]] = {}
        for t in moves.sends(process):
            sent.setdefault(t.dst_rank, []).append(t)
        for other, transfers in sent.items():
            assert transfers == [t for t in moves.receives(other) if t.src_rank == process]
            traffic[process, other] = sum(size(t.dst_box) for t in transfers)
    assert traffic == moves.traffic()
    rounds = moves.rounds()
    met = [(rounds.pair_round(a, b), a, b) for a, b in traffic]
    assert len({(k, a) for k, a, _ in met}) == len({(k, b) for k, _, b in met}) == len(met)  # one partner in a round
    assert all(k < len(rounds) for k, _, _ in met)
    check_turns(moves, e.world_size)
    assert moves.num_transfers() == sum(len(list(moves.receives(process))) for process in range(e.world_size))


def check_turns(moves: Plan, engines: int) -> None:
    """Every engine rank gets a layer in a turn, in a circle; those with the same layers begin all over it."""
    turns, firsts = LayerOrder(moves), Counter[tuple[int, ...]]()
    first_layers: dict[tuple[int, ...], set[int]] = {}
    for process in range(engines):
        moved = [t for t in moves.receives(process) if t.src_rank != process]
        assert {turns.position(t) for t in moved if t.layer is None} <= {0}
        found = {t.layer: turns.position(t) for t in moved if t.layer is not None}
        assert all(
            found[t.layer] == turns.position(t) and f".{t.layer}." in t.dst_param for t in moved if t.layer is not None
        )
        assert sorted(found.values()) == list(range(1, len(found) + 1))
        order, layers = sorted(found, key=lambda layer: found[layer]), tuple(sorted(found))
        assert order == [*layers[layers.index(order[0]) :], *layers[: layers.index(order[0])]] if layers else True
        firsts[layers] += 1
        first_layers.setdefault(layers, set()).update(order[:1])
    assert all(len(found) == min(firsts[layers], len(layers)) for layers, found in first_layers.items())


@settings(max_examples=30, deadline=None)
@given(shapes(), mesh(), st.integers(1, 300))
def test_buckets_are_bounded_and_tile_what_a_pair_moves(m: ModelShape, d: ParallelDims, bucket_bytes: int) -> None:
    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if "norm" in name else torch.bfloat16

    moves = plan(Layout(table=HF_QWEN3_MOE, shape=m), Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d))
    transfers = list(moves.receives(d.world_size - 1))
    buckets = cut_into_buckets(transfers, dtype_of, bucket_bytes, turn_of=lambda t: 0 if t.layer is None else -t.layer)
    places = [(bucket.layer_position, str(bucket.dtype), bucket.number) for bucket in buckets]
    assert places == sorted(places)
    assert {(turn, number) for turn, _, number in places} == {
        (turn, i) for turn, count in Counter(turn for turn, _, _ in places).items() for i in range(count)
    }
    assert all(
        bucket.layer_position in (0, -int(layer_of(p))) for bucket in buckets for p in bucket.parts if layer_of(p)
    )
    assert all(bucket.num_bytes <= max(bucket_bytes, bucket.dtype.itemsize) for bucket in buckets)
    parts = [part for bucket in buckets for part in bucket.parts]
    expected = {part.dst_param: bucket.dtype for bucket in buckets for part in bucket.parts}
    assert {part.dst_param: dtype_of(part.dst_param) for part in parts} == expected

    def elements(moved: Iterable[Transfer | BucketPart]) -> Counter[tuple[str, tuple[int, ...], str, tuple[int, ...]]]:
        """Each element's way: where from, where to."""
        return Counter(
            (t.src_param, src, t.dst_param, dst)
            for t in moved
            for src, dst in zip(places_in(t.src_box), places_in(t.dst_box), strict=True)
        )

    assert elements(parts) == elements(transfers)


def layer_of(part: BucketPart) -> str:
    found = re.search(r"layers\.(\d+)", part.dst_param)
    return found[1] if found else ""


def places_in(box: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(start, stop) for start, stop in box))


@settings(max_examples=20, deadline=None)
@given(shapes(), mesh())
def test_a_plan_is_the_same_every_time_and_its_parts_are_plans(m: ModelShape, d: ParallelDims) -> None:
    source, target = Layout(table=HF_QWEN3_MOE, shape=m), Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d)
    whole = plan(source, target)
    assert plan(source, replace(target)) == whole
    for rank in range(d.world_size):
        assert list(plan(source, target, placement={rank: rank}).receives(rank)) == list(whole.receives(rank))


# DeepSeek-V3's plans, executed with numpy and compared with shards cut by separately written rules.
@st.composite
def deepseek_shapes(draw: st.DrawFn) -> ModelShape:
    rope_dim, nope_dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from([2, 3]))
    return replace(
        SMALL_MOE,
        num_layers=4,
        hidden_size=draw(st.sampled_from([3, 8])),
        num_heads=draw(st.sampled_from([2, 4])),
        num_kv_heads=4,
        head_dim=rope_dim + nope_dim,
        expert_width=draw(st.sampled_from([2, 6])),
        vocab_size=draw(st.integers(1, 40)),
        latent=LatentAttention(query_rank=5, kv_rank=4, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=3),
        dense_layers=draw(st.integers(0, 4)),
        dense_width=draw(st.sampled_from([4, 10])),
        shared_width=draw(st.sampled_from([2, 8])),
    )


def deepseek_hf(m: ModelShape) -> Tensors:
    """The checkpoint, every element a number of its own. Names and shapes as transformers writes them."""
    h, a, heads = m.hidden_size, m.latent, m.num_heads
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
    for name, dims in sizes.items():
        out[name] = np.arange(first, first + int(np.prod(dims))).reshape(dims)
        first += int(np.prod(dims))
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
@given(st.data(), deepseek_shapes(), mesh())
def test_an_import_of_deepseek_gives_megatrons_own_shards(data: st.DataObject, m: ModelShape, d: ParallelDims) -> None:
    stages = data.draw(uneven(m.num_layers, d))
    hf, layout = deepseek_hf(m), Layout(table=MEGATRON_DEEPSEEK_V3, shape=m, dims=d, stages=stages)
    ranks = {rank: rank for rank in range(d.world_size)}
    got = empty(layout, ranks)
    run(everything(plan(Layout(table=HF_DEEPSEEK_V3, shape=m), layout), ranks), [hf], got)
    for rank, wanted in enumerate(shards(hf, m, d, stages, engine=False)):
        assert_same(got[rank], wanted)


@settings(max_examples=60, deadline=None)
@given(st.data(), deepseek_shapes(), mesh(), mesh())
def test_engines_get_their_own_shards(data: st.DataObject, m: ModelShape, d: ParallelDims, e: ParallelDims) -> None:
    stages, hf = data.draw(uneven(m.num_layers, d)), deepseek_hf(m)
    learner = Layout(table=MEGATRON_DEEPSEEK_V3, shape=m, dims=d, stages=stages)
    engine = Layout(table=ENGINE_DEEPSEEK_V3, shape=m, dims=e)
    placement = {rank: rank + 1 for rank in range(e.world_size)}
    got, moves = empty(engine, placement), plan(learner, engine, placement=placement)
    run(everything(moves, placement), shards(hf, m, d, stages, engine=False), got)
    for rank, wanted in enumerate(shards(hf, m, e, None, engine=True)):
        assert_same(got[placement[rank]], wanted)
