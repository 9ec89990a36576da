"""Plans over random models and meshes, executed with numpy and compared with shards cut by separately written rules."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.errors import WeightError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.qwen3_moe import ENGINE_QWEN3_MOE, HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import Plan, Turns, from_json, plan, to_json
from rl_megatron.weights.plans.transfers import Transfer
from rl_megatron.weights.transports.buckets import BucketPart, cut_into_buckets
from tests.property.shards import (
    SMALL,
    UNWRITTEN,
    assert_same,
    empty,
    engine_shards,
    everything,
    full_hf,
    megatron_shards,
    mesh,
    places,
    run,
    shapes,
    size,
    uneven,
)


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
    got = empty(target, placement)
    moves = plan(source, target, placement=placement)
    assert from_json(json.loads(json.dumps(to_json(moves)))) == moves
    run(everything(moves, placement), megatron_shards(hf, m, a, stages), got)
    for rank, wanted in enumerate(megatron_shards(hf, m, b)):
        assert_same(got[rank + 1], wanted)


@settings(max_examples=60, deadline=None)
@given(shapes(), mesh(), st.integers(1, 3), st.booleans())
def test_engines_get_every_tensor_with_the_fewest_bytes(
    m: ModelShape, d: ParallelDims, engines: int, colocated: bool
) -> None:
    hf, src = full_hf(m), megatron_shards(full_hf(m), m, d)
    target = Layout(table=HF_QWEN3_MOE, shape=m, dims=ParallelDims(dp=engines))
    placement = {r: (r if colocated else r + d.world_size) for r in range(engines)}
    moves = plan(Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d), target, placement=placement)
    transfers = everything(moves, placement)
    got = empty(target, placement)
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
    transfers = everything(moves, placement)
    load = [0] * d.world_size
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
    rows = [spec for spec in HF_QWEN3_MOE if spec.exists(m, d)]
    gone = rows[row % len(rows)]
    source = Layout(table=[spec for spec in rows if spec is not gone], shape=m)
    name = gone.name.format(layer=0, expert=0)
    with pytest.raises(WeightError, match=rf"{name}: the source has 0 of the \d+ elements"):
        plan(source, Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=ParallelDims()))


@st.composite
def engine_meshes(draw: st.DrawFn, m: ModelShape) -> ParallelDims:
    """Replicas of tp ranks, more than key/value heads at times; experts spread over ranks or cut."""
    tp = draw(
        st.sampled_from([tp for tp in (1, 2, 4, 8) if m.num_heads % tp == 0 and max(tp, 4) % m.num_kv_heads == 0])
    )
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
def test_sharded_engines_get_their_own_shards_with_the_fewest_bytes(
    data: st.DataObject, m: ModelShape, d: ParallelDims, colocated: bool
) -> None:
    e, stages = data.draw(engine_meshes(m)), data.draw(uneven(m.num_layers, d))
    hf = full_hf(m)
    src = megatron_shards(hf, m, d, stages)
    learner = Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=d, stages=stages)
    target = Layout(table=ENGINE_QWEN3_MOE, shape=m, dims=e)
    placement = {r: (r if colocated else r + d.world_size) for r in range(e.world_size)}
    moves = plan(learner, target, placement=placement)
    got = empty(target, placement)
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
    met = [(rounds.of_pair(a, b), a, b) for a, b in traffic]
    assert len({(k, a) for k, a, _ in met}) == len({(k, b) for k, _, b in met}) == len(met)  # one partner in a round
    assert all(k < len(rounds) for k, _, _ in met)
    check_turns(moves, e.world_size)
    assert moves.num_transfers() == sum(len(list(moves.receives(process))) for process in range(e.world_size))


def check_turns(moves: Plan, engines: int) -> None:
    """Every engine rank gets a layer in a turn, in a circle; those with the same layers begin all over it."""
    turns, firsts = Turns(moves), Counter[tuple[int, ...]]()
    first_layers: dict[tuple[int, ...], set[int]] = {}
    for process in range(engines):
        moved = [t for t in moves.receives(process) if t.src_rank != process]
        assert {turns.of(t) for t in moved if t.layer is None} <= {0}
        found = {t.layer: turns.of(t) for t in moved if t.layer is not None}
        assert all(
            found[t.layer] == turns.of(t) and f".{t.layer}." in t.dst_param for t in moved if t.layer is not None
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
    places = [(bucket.turn, str(bucket.dtype), bucket.number) for bucket in buckets]
    assert places == sorted(places)
    assert {(turn, number) for turn, _, number in places} == {
        (turn, i) for turn, count in Counter(turn for turn, _, _ in places).items() for i in range(count)
    }
    assert all(bucket.turn in (0, -int(layer_of(p))) for bucket in buckets for p in bucket.parts if layer_of(p))
    assert all(bucket.num_bytes <= max(bucket_bytes, bucket.dtype.itemsize) for bucket in buckets)
    parts = [part for bucket in buckets for part in bucket.parts]
    assert {part.dst_param: dtype_of(part.dst_param) for part in parts} == {
        part.dst_param: bucket.dtype for bucket in buckets for part in bucket.parts
    }

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
        part = plan(source, target, placement={rank: rank})
        assert list(part.receives(rank)) == list(whole.receives(rank))
