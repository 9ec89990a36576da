"""The guarantees of packing, for any lengths, degrees and limits, and of a rank's share of a micro-batch."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.config.sections.learner import LearnerSection, PaddingSection
from rl_megatron.data import packing
from rl_megatron.data.packing import Packer, causal_attention_cost, make_packer, plan_packing, unpack
from rl_megatron.errors import DataError
from rl_megatron.learner.packed import Slots, pack_micro_batch
from rl_megatron.types import ParallelDims, Samples
from tests.samples import sequences_of

COLUMNS = ("input_ids", "targets", "mask", "advantages", "rollout_logprobs", "old_logprobs")
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80)
DIMS = st.builds(ParallelDims, dp=st.integers(1, 5), cp=st.integers(1, 3), tp=st.integers(1, 4))


def ragged(lengths: list[int]) -> Samples:
    """Every position of every column has a value of its own."""
    n = sum(lengths)
    number = torch.arange(n)
    return sequences_of(
        lengths,
        input_ids=number,
        targets=number + n,
        mask=number % 3 != 0,
        advantages=number + 0.25,
        rollout_logprobs=number + 0.5,
        old_logprobs=number + 0.75,
        extra={"routes": torch.stack([number % 200, number % 200 + 1], 1).to(torch.uint8)[:, None].expand(n, 3, 2)},
    )


def pieces(samples: Samples, name: str) -> list[torch.Tensor]:
    return list(getattr(samples, name).split(samples.cu_seqlens.diff().tolist()))


@settings(deadline=None, max_examples=150)
@given(LENGTHS, DIMS, st.integers(60, 300), st.sampled_from([0.0, 0.01, 1.0]))
def test_every_sequence_is_packed_once(lengths: list[int], dims: ParallelDims, max_tokens: int, cost: float) -> None:
    samples = ragged(lengths)
    batch = Packer(dims=dims, max_tokens=max_tokens, attention_cost=cost).pack(samples)
    micro_batches = [micro for row in batch.micro_batches for micro in row]
    real = [micro for micro in micro_batches if micro.mask.any() or len(micro.mask) > 1 or micro.old_logprobs.any()]
    for name in COLUMNS:
        packed = [piece.tolist() for micro in real for piece in pieces(micro, name)]
        assert sorted(packed) == sorted(piece.tolist() for piece in pieces(samples, name)), name
    for placeholder in (micro for micro in micro_batches if all(micro is not other for other in real)):
        assert placeholder.input_ids.tolist() == samples.input_ids[:1].tolist()
        assert placeholder.extra["routes"].tolist() == [[[0, 1]] * 3]
        assert placeholder.cu_seqlens.tolist() == [0, 1]
    assert (batch.num_sequences, batch.num_tokens) == (len(lengths), int(samples.mask.sum()))


@settings(deadline=None, max_examples=150)
@given(LENGTHS, DIMS, st.integers(60, 300), st.sampled_from([0.0, 0.01, 1.0]))
def test_limits_of_micro_batches(lengths: list[int], dims: ParallelDims, max_tokens: int, cost: float) -> None:
    plan = plan_packing(np.array(lengths), dims=dims, max_tokens=max_tokens, attention_cost=cost)
    assert len(plan) == dims.dp
    assert len({len(row) for row in plan}) == 1
    assert sorted(i for row in plan for ids in row for i in ids.tolist()) == list(range(len(lengths)))
    unit = 2 * dims.cp if dims.cp > 1 else 1
    for ids in (ids for row in plan for ids in row):
        padded = -(-sum(-(-lengths[i] // unit) * unit for i in ids) // (unit * dims.tp)) * unit * dims.tp
        assert padded < max_tokens + unit * dims.tp
        assert padded <= max_tokens or dims.tp * unit > 1
    # any greedy packing leaves at most one bin less than half full; an eighth more is allowed for balance
    total = sum(-(-length // unit) * unit for length in lengths)
    assert len(plan[0]) <= (2 * total / (max_tokens * dims.dp) + 1) * 9 / 8 + 1


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(1, 5), st.integers(60, 150), st.sampled_from([0.0, 0.01, 1.0]), st.booleans())
def test_micro_batches_are_few(lengths: list[int], dp: int, max_tokens: int, cost: float, seated: bool) -> None:
    """The fewest that fit, of all tried one by one."""
    sizes = np.sort(lengths)[::-1].copy()
    work = (sizes + cost * sizes**2).astype(np.float64)
    ranks = np.arange(len(sizes)) % dp if seated else None
    parts = [sizes[d::dp] for d in range(dp)] if seated else [sizes]
    shared = 1 if seated else dp

    def fits(num_micro: int) -> bool:
        of_parts = [(part.tolist(), (part + cost * part**2).tolist()) for part in parts]
        return all(packing._longest_first(*one, shared * num_micro, max_tokens, 80) is not None for one in of_parts)

    fewest = next(filter(fits, range(1, 81)))
    _, num_bins = packing.fill_bins(sizes, work, dp=dp, budget=max_tokens, capacity=None, ranks=ranks)
    memory = max(-(-int(part.sum()) // (shared * max_tokens)) for part in parts)
    assert fewest <= num_bins // dp <= max(fewest, memory + memory // 8)


@pytest.mark.parametrize(
    ("shortest", "longest", "micro_batches", "most_tries"),
    [(501, 620, 4000, 1), (334, 400, 2000, 1), (126, 135, 572, 1), (260, 470, 1932, 30)],
)
def test_how_many_micro_batches_there_are_is_found_in_a_few_tries(
    monkeypatch: pytest.MonkeyPatch, shortest: int, longest: int, micro_batches: int, most_tries: int
) -> None:
    """Just over a half, a third or an eighth of one: one, two or seven fit. Trying one by one finds 1,932, too."""
    tries = counted_tries(monkeypatch)
    lengths = np.random.default_rng(0).integers(shortest, longest, 4000)
    plan = plan_packing(lengths, dims=ParallelDims(), max_tokens=1000, attention_cost=1e-2)
    assert len(tries) <= most_tries
    assert len(plan[0]) == micro_batches


def test_no_more_are_tried_where_the_longest_sequence_is_the_heaviest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention is more work than any other micro-batch has; an eighth of 16 might be tried."""
    tries = counted_tries(monkeypatch)
    plan = plan_packing(np.array([1000] + [30] * 495), dims=ParallelDims(), max_tokens=1000, attention_cost=1.0)
    assert (len(tries), len(plan[0])) == (1, 16)


def counted_tries(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    tries, real = list[object](), packing._longest_first
    monkeypatch.setattr(packing, "_longest_first", lambda *given: (tries.append(given), real(*given))[1])
    return tries


@settings(deadline=None, max_examples=60)
@given(LENGTHS, DIMS, st.integers(1, 4), st.sampled_from([1, 2]))
def test_a_micro_batch_has_bounded_sequences(lengths: list[int], dims: ParallelDims, units: int, unit: int) -> None:
    lengths = lengths * unit
    plan = plan_packing(np.array(lengths), dims=dims, max_tokens=300, unit=unit, limit=units * unit + unit - 1)
    assert sorted(i for row in plan for ids in row for i in ids.tolist()) == list(range(len(lengths)))
    assert max(len(ids) for row in plan for ids in row) <= units * unit


def test_the_most_sequences_alone_decide_how_many_micro_batches_short_ones_make() -> None:
    plan = plan_packing(np.array([2] * 30), dims=ParallelDims(dp=2), max_tokens=1000, limit=4)
    assert [[len(ids) for ids in row] for row in plan] == [[4, 4, 4, 3], [4, 4, 4, 3]]
    pairs = plan_packing(np.array([2] * 30), dims=ParallelDims(dp=2), max_tokens=1000, unit=2, limit=5)
    assert [[len(ids) for ids in row] for row in pairs] == [[4, 4, 4, 4], [4, 4, 4, 2]]


@settings(deadline=None, max_examples=50)
@given(LENGTHS, DIMS)
def test_packing_is_deterministic(lengths: list[int], dims: ParallelDims) -> None:
    plans = [plan_packing(np.array(lengths), dims=dims, max_tokens=120, attention_cost=0.01) for _ in range(2)]
    flat = [[ids.tolist() for row in plan for ids in row] for plan in plans]
    assert flat[0] == flat[1]


def test_the_issue_sized_mix_is_balanced() -> None:
    lengths = np.clip(np.random.default_rng(3).lognormal(np.log(6000), 0.7, 4096), 64, 32768).astype(np.int64)
    plan = plan_packing(lengths, dims=ParallelDims(dp=8, cp=2, tp=2), max_tokens=65536, attention_cost=6.5e-5)
    totals = np.array([[sum(n + 6.5e-5 * n * n for n in lengths[ids].tolist()) for ids in row] for row in plan])
    assert totals.max() / totals.mean() <= 1.02
    assert totals.sum(1).max() / totals.sum(1).mean() <= 1.001
    assert len(plan[0]) <= np.ceil(lengths.sum() / 8 / 65536) * 9 / 8


def test_ranks_of_one_index_hold_neighbours_in_work() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 300)
    plan = plan_packing(lengths, dims=ParallelDims(dp=4), max_tokens=1000, attention_cost=1.0)
    totals = np.array([[sum(n + n * n for n in lengths[ids].tolist()) for ids in row] for row in plan])
    assert totals.shape[1] > 10
    assert np.all(totals.min(0)[:-1] >= totals.max(0)[1:])


def test_the_heavier_of_a_row_goes_to_the_rank_with_less_so_far() -> None:
    plan = plan_packing(np.array([10, 9, 8, 7]), dims=ParallelDims(dp=2), max_tokens=10)
    assert [[ids.tolist() for ids in row] for row in plan] == [[[0], [3]], [[1], [2]]]


def test_room_that_was_too_small_for_longer_sequences_is_used_by_shorter_ones() -> None:
    """60 + 4 * 10 + 3 and 10 * 10 + 3 fill both micro-batches to the last position."""
    lengths = np.array([60] + [10] * 14 + [1] * 6)
    plan = plan_packing(lengths, dims=ParallelDims(dp=2), max_tokens=103, attention_cost=1.0)
    assert [[int(lengths[ids].sum()) for ids in row] for row in plan] == [[103], [103]]


def test_a_longer_sequence_than_a_micro_batch_is_an_error_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"sequence 1 has 101 positions, but a micro-batch holds at most 100"):
        plan_packing(np.array([5, 101]), dims=ParallelDims(), max_tokens=100)


def test_a_pair_that_is_longer_is_named_by_both_its_sequences() -> None:
    with pytest.raises(DataError, match=r"sequences 2 to 3 together have 105 positions"):
        plan_packing(np.array([5, 5, 55, 50]), dims=ParallelDims(), max_tokens=100, unit=2)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), DIMS, st.integers(60, 130))
def test_pairs_are_packed_where_each_fits_with_padding(halves: list[int], dims: ParallelDims, max_tokens: int) -> None:
    lengths = np.repeat(halves, 2)
    chunk = 2 * dims.cp if dims.cp > 1 else 1
    budget = math.ceil(max_tokens / (chunk * dims.tp)) * chunk * dims.tp
    longest = max(halves)
    if 2 * longest > max_tokens or 2 * math.ceil(longest / chunk) * chunk > budget:
        with pytest.raises(DataError, match=r"together have \d+ positions.*max_tokens_per_micro_batch"):
            plan_packing(lengths, dims=dims, max_tokens=max_tokens, unit=2)
    else:
        plan = plan_packing(lengths, dims=dims, max_tokens=max_tokens, unit=2)
        pairs = sorted(pair for row in plan for ids in row for pair in ids.reshape(-1, 2).tolist())
        assert pairs == [[i, i + 1] for i in range(0, len(lengths), 2)]


def test_a_pair_that_only_its_padding_makes_too_long_is_refused() -> None:
    said = r"sequences 2 to 3 together have 12 positions, each padded for learner.cp=2, .* holds at most 8"
    with pytest.raises(DataError, match=said):
        plan_packing(np.array([4, 4, 5, 3]), dims=ParallelDims(cp=2), max_tokens=8, unit=2)


def test_a_sequence_may_fill_a_micro_batch_unless_it_needs_room() -> None:
    packer = Packer(dims=ParallelDims(), max_tokens=8, attention_cost=0.0)
    assert packer.pack(ragged([8])).num_sequences == 1
    with pytest.raises(DataError, match="sequence 0 has 9 "):
        packer.pack(ragged([8]), with_room=True)


def test_a_micro_batch_more_that_is_no_more_even_is_not_taken() -> None:
    """64 positions: the heaviest of 8 has 9, the heaviest of 9 has 8, both 9/8 of the mean."""
    plan = plan_packing(np.array([3, 5, 6, 3, 7, 5, 4, 4, 7, 7, 7, 6]), dims=ParallelDims(), max_tokens=9)
    assert len(plan[0]) == 8


def test_a_micro_batch_more_is_taken_where_the_most_sequences_say_how_few_there_are() -> None:
    """73 positions: the heaviest of 8, two sequences each, would have 11; of 9 it has 9."""
    lengths = np.array([6, 1, 8, 8, 5, 1, 4, 2, 6, 8, 8, 7, 1, 7, 1])
    plan = plan_packing(lengths, dims=ParallelDims(), max_tokens=1000, limit=2)
    assert [int(lengths[ids].sum()) for ids in plan[0]] == [9, 9, 8, 8, 8, 8, 8, 8, 7]


def test_a_micro_batch_more_is_taken_where_ranks_are_given() -> None:
    """Of 9 for each rank the heaviest would have 9 positions; of 10 it has 8."""
    lengths = np.array([8, 7, 5, 1, 6, 5, 8, 3, 7, 8, 7, 3, 4, 1, 3, 1, 5, 7, 4, 6, 8, 1, 8])
    plan = plan_packing(lengths, dims=ParallelDims(dp=2), max_tokens=9, ranks=np.arange(len(lengths)) % 2)
    assert [max(int(lengths[ids].sum()) for ids in row) for row in plan] == [8, 8]
    assert [len(row) for row in plan] == [10, 10]


def test_work_is_compared_to_the_last_position() -> None:
    """The third goes to the micro-batch with one position less, though 2^53 in float64 has no neighbor above."""
    plan = plan_packing(np.array([2**53, 2**53 - 1, 1]), dims=ParallelDims(), max_tokens=2**53 + 1)
    assert [ids.tolist() for ids in plan[0]] == [[0], [1, 2]]


def test_an_empty_batch_is_an_error() -> None:
    with pytest.raises(DataError, match="no sequences"):
        plan_packing(np.array([], dtype=np.int64), dims=ParallelDims(), max_tokens=100)


def test_micro_batches_own_their_memory() -> None:
    """A view would send the whole batch to every rank when pickled."""
    batch = Packer(dims=ParallelDims(dp=2), max_tokens=50).pack(ragged([10] * 40))
    for micro in (micro for row in batch.micro_batches for micro in row):
        assert micro.input_ids.untyped_storage().nbytes() == micro.input_ids.nbytes


def test_attention_cost_equals_operations_counted_by_hand() -> None:
    """One layer, width 8, 100 parameters: a sequence of 10 spends 2*100*10 on products, 2*2*8 per visible pair."""
    cost = causal_attention_cost(linear_parameters=100, attention_width=8)
    assert cost * 10 * 10 == pytest.approx(2 * 2 * 8 * (10 * 10 / 2) / (2 * 100))


@settings(deadline=None, max_examples=60)
@given(LENGTHS, DIMS, st.integers(60, 300))
def test_scores_find_their_way_back(lengths: list[int], dims: ParallelDims, max_tokens: int) -> None:
    samples = ragged(lengths)
    batch = Packer(dims=dims, max_tokens=max_tokens).pack(samples)
    scores = [[micro.old_logprobs for micro in row] for row in batch.micro_batches]
    assert torch.equal(unpack(batch, scores, samples), samples.old_logprobs)


def test_scores_of_too_few_micro_batches_are_refused() -> None:
    samples = ragged([10] * 12)
    batch = Packer(dims=ParallelDims(dp=2), max_tokens=30).pack(samples)
    scores = [[micro.old_logprobs for micro in row] for row in batch.micro_batches]
    with pytest.raises(ValueError, match="shorter"):
        unpack(batch, [scores[0], scores[1][:-1]], samples)
    with pytest.raises(ValueError, match="shorter"):
        unpack(batch, scores[:1], samples)
    with pytest.raises(ValueError, match="could not broadcast"):
        unpack(batch, [scores[0], [*scores[1][:-1], scores[1][-1][:-1]]], samples)


@settings(deadline=None, max_examples=60)
@given(st.lists(LENGTHS, min_size=1, max_size=3), DIMS, st.sampled_from([0.0, 0.01, 1.0]))
def test_metrics_are_a_loops_over_micro_batches(several: list[list[int]], dims: ParallelDims, cost: float) -> None:
    batches = [Packer(dims=dims, max_tokens=90, attention_cost=cost).pack(ragged(lengths)) for lengths in several]
    multiple = 2 * dims.cp if dims.cp > 1 else 1
    waited = worked = 0.0
    positions = computed = 0
    for batch in batches:
        for micro_batches in zip(*batch.micro_batches, strict=True):  # those that the ranks have at one time
            lengths = [micro.cu_seqlens.diff().tolist() for micro in micro_batches]
            work = [sum(n + cost * n**2 for n in of_rank) for of_rank in lengths]
            waited, worked = waited + max(work), worked + sum(work) / dims.dp
            positions += sum(map(sum, lengths))
            chunked = [sum(math.ceil(n / multiple) * multiple for n in of_rank) for of_rank in lengths]
            computed += sum(math.ceil(n / (multiple * dims.tp)) * multiple * dims.tp for n in chunked)
    row = Packer(dims=dims, max_tokens=90, attention_cost=cost).metrics(batches)
    assert row == {
        "tokens/train": positions,
        "packing/imbalance": pytest.approx(waited / worked),
        "packing/padding_fraction": pytest.approx(1 - positions / computed),
    }
    padded = Packer(dims=dims, max_tokens=90, attention_cost=cost, padding=PaddingSection(tokens="960"))
    micro_batches = sum(len(row) for batch in batches for row in batch.micro_batches)
    assert padded.metrics(batches)["packing/padding_fraction"] == pytest.approx(1 - positions / (960 * micro_batches))


@pytest.mark.parametrize("fp8", [None, "tensorwise", "blockwise", "mxfp8"])
@settings(deadline=None, max_examples=20)
@given(LENGTHS, st.integers(1, 2), st.integers(1, 3))
def test_the_padding_is_what_ranks_compute(fp8: str | None, lengths: list[int], tp: int, cp: int) -> None:
    learner = LearnerSection.model_validate({"fp8": fp8, "tp": tp, "cp": cp, "max_tokens_per_micro_batch": 90})
    packer = make_packer(learner, attention_cost=0.0)
    batch, computed = packer.pack(ragged(lengths)), 0
    for micro_batch in (one for row in batch.micro_batches for one in row):
        device = torch.device("cpu")
        share = pack_micro_batch(micro_batch, tp=tp, cp=cp, cp_rank=0, device=device, rows=learner.float8_rows)
        computed += cp * len(share.input_ids)
    assert packer.metrics([batch])["packing/padding_fraction"] == pytest.approx(1 - sum(lengths) / computed)


def test_a_placeholder_has_others_tokens_for_padding_and_a_sequence_of_one() -> None:
    """Padding of one token many times would send all to the same experts."""
    samples = ragged([9, 4])
    batch = Packer(dims=ParallelDims(dp=4), max_tokens=16, padding=PaddingSection(tokens="8,16")).pack(samples)
    ranks = zip(batch.micro_batches, batch.sequences, strict=True)
    placeholders = [row[0] for row, numbers in ranks if not len(numbers[0])]
    assert len(placeholders) == 2
    for placeholder in placeholders:
        assert placeholder.input_ids.tolist() == samples.input_ids[:8].tolist()
        assert placeholder.cu_seqlens.tolist() == [0, 1]
        assert not placeholder.mask.any()


# A rank's share of a micro-batch: every position once over the CP ranks, megatron's zig-zag, padded for TP.
CPU = torch.device("cpu")


def make_samples(lengths: list[int]) -> Samples:
    total = sum(lengths)
    return sequences_of(
        lengths,
        input_ids=torch.arange(total),
        targets=torch.arange(total) + 1,
        advantages=torch.arange(total).float(),
        rollout_logprobs=-torch.arange(total).float(),
        extra={"routes": torch.randint(0, 300, (total, 2, 3), generator=torch.Generator().manual_seed(0)).short()},
    )


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 3]),
    rows=st.sampled_from([1, 16, 128]),
)
def test_every_position_lies_on_one_rank_where_zigzag_puts_it(lengths: list[int], tp: int, cp: int, rows: int) -> None:
    samples = make_samples(lengths)
    shares = [pack_micro_batch(samples, tp=tp, cp=cp, cp_rank=r, device=CPU, rows=rows) for r in range(cp)]
    assert len({len(s.input_ids) for s in shares}) == 1
    assert len(shares[0].input_ids) % (tp * rows) == 0
    assert len(shares[0].input_ids) * cp < sum(lengths) + (2 * len(lengths) + rows * tp + 2) * cp
    sources = torch.cat([s.source for s in shares])
    assert sorted(sources[sources >= 0].tolist()) == list(range(sum(lengths)))
    for rank, share in enumerate(shares):
        real = share.source >= 0
        assert torch.equal(share.input_ids[real], samples.input_ids[share.source[real]])
        assert torch.equal(share.columns["rollout_logprobs"][real], samples.rollout_logprobs[share.source[real]])
        assert not share.columns["mask"][~real].any()
        assert "routes" not in share.columns  # losses do not take them
        assert torch.equal(share.extra["routes"][real], samples.extra["routes"][share.source[real]])
        assert share.extra["routes"][~real].tolist() == [[[0, 1, 2]] * 2] * int((~real).sum())
        cu = share.attention.cu_seqlens_q.tolist()
        for i, length in enumerate(lengths):
            chunk = (cu[i + 1] - cu[i]) // (2 * cp)
            wanted = [*range(rank * chunk, (rank + 1) * chunk)] if cp > 1 else [*range(cu[i + 1] - cu[i])]
            if cp > 1:
                wanted += range((2 * cp - 1 - rank) * chunk, (2 * cp - rank) * chunk)
            assert share.attention.positions[share.segment_ids == i].tolist() == wanted
            assert cu[i + 1] - cu[i] - length < 2 * cp


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    more=st.integers(0, 3),
)
def test_padding_repeats_tokens_and_adds_empty_sequences(lengths: list[int], tp: int, cp: int, more: int) -> None:
    samples, most = make_samples(lengths), len(lengths) + more
    unit = 2 * cp if cp > 1 else 1
    needed = sum(-(-length // unit) * unit for length in lengths)
    sizes = [64, 128, needed if needed % (unit * tp) == 0 and needed > 128 else 400]  # none, little or much padding
    shares = [
        pack_micro_batch(samples, tp=tp, cp=cp, cp_rank=r, device=CPU, sizes=sizes, sequences=most) for r in range(cp)
    ]
    total = min(size for size in sizes if size >= needed)
    assert {len(share.input_ids) for share in shares} == {total // cp}
    sources = torch.cat([share.source for share in shares])
    assert sorted(sources[sources >= 0].tolist()) == list(range(sum(lengths)))
    for share in shares:
        cu, real = share.attention.cu_seqlens_q.tolist(), share.source >= 0
        assert cu[len(lengths)] == needed
        assert cu[len(lengths) + 1 :] == [total] * (most + 1 - len(lengths))
        assert share.num_segments == most + 1
        assert torch.equal(share.attention.is_real, real)
        filled = ~real & (share.segment_ids >= len(lengths))
        assert share.input_ids[filled].tolist() == [
            n % sum(lengths) for n in share.attention.positions[filled].tolist()
        ]
        assert torch.equal(share.extra["routes"][filled], samples.extra["routes"][share.input_ids[filled]])
        assert not share.columns["mask"][~real].any()


@pytest.mark.parametrize(("most", "pieces"), [(None, 5), (4, 2), (9, 5)])
def test_much_padding_is_several_sequences(most: int | None, pieces: int) -> None:
    """Of at most 1,024 positions or the longest's where there is room: attention of padding costs squares."""
    share = pack_micro_batch(
        make_samples([1500, 20, 3]), tp=2, cp=2, cp_rank=1, device=CPU, sizes=(8192,), sequences=most
    )
    ends = share.attention.cu_seqlens_q
    padding = ends.diff()[3:]
    assert (padding > 0).sum() == pieces
    assert int(ends[-1]) == 8192
    assert not (padding % 4).any()
    assert padding.max() - padding[:pieces].min() <= 4
    assert most is None or len(ends) == most + 2
    assert torch.equal(
        share.extra["routes"][share.source < 0],
        make_samples([1500, 20, 3]).extra["routes"][share.input_ids[share.source < 0]],
    )


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_length_classes_waste_little_and_return_every_position(lengths: list[int]) -> None:
    share = pack_micro_batch(make_samples(lengths), tp=1, cp=1, cp_rank=0, device=CPU)
    attention, rows = share.attention, torch.arange(sum(lengths))
    slots = attention.queries or Slots(row=rows, slot=rows, padding=rows[:0])
    assert torch.equal(slots.row[slots.slot], rows)
    assert sorted([*slots.slot.tolist(), *slots.padding.tolist()]) == list(range(len(slots.row)))
    sizes = [part.count * part.query_length for part in attention.classes]
    for part, inside in zip(attention.classes, slots.row.split(sizes), strict=True):
        members = torch.bincount(share.segment_ids)[share.segment_ids[inside.view(part.count, -1)[:, 0]]]
        assert part.query_length == part.key_length == members.max() <= max(1.2 * members.min(), members.min() + 1)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_nothing_that_a_pass_keeps_of_a_micro_batch_grows_with_the_square_of_a_length(cp: int) -> None:
    lengths = [2000, 1900, 30]
    share = pack_micro_batch(make_samples(lengths), tp=1, cp=cp, cp_rank=0, device=CPU)
    kept = [value for part in (share.attention, *share.attention.classes) for value in vars_of(part)]
    kept += [value for slots in (share.attention.queries, share.attention.keys) if slots for value in vars_of(slots)]
    assert max(tensor.numel() for tensor in kept if isinstance(tensor, torch.Tensor)) < 1.2 * sum(lengths)


def vars_of(part: Any) -> list[object]:
    return [getattr(part, field.name) for field in fields(part)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    cp=st.sampled_from([1, 2, 3]),
    window=st.integers(0, 50),
)
def test_a_query_sees_keys_up_to_its_own_and_as_many_as_a_window_has(lengths: list[int], cp: int, window: int) -> None:
    for rank in range(cp):
        for part in pack_micro_batch(make_samples(lengths), tp=1, cp=cp, cp_rank=rank, device=CPU).attention.classes:
            seen, last = part.visible(window)[:, 0], part.positions
            assert torch.equal(seen.sum(-1), (last + 1).clamp(max=window or part.key_length))
            assert seen.gather(-1, last[..., None]).all()
            assert not seen[torch.arange(part.key_length) > last[..., None]].any()


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), cp=st.sampled_from([1, 2, 3]))
def test_keys_that_ranks_gather_are_in_the_order_of_their_sequences(lengths: list[int], cp: int) -> None:
    samples = make_samples(lengths)
    shares = [pack_micro_batch(samples, tp=1, cp=cp, cp_rank=rank, device=CPU) for rank in range(cp)]
    sources = torch.cat([share.source for share in shares])  # as an all-gather lays them out
    lasts = torch.repeat_interleave(samples.cu_seqlens[1:], torch.tensor(lengths)) - 1  # of each position's sequence
    for share in shares:
        keys, sizes = share.attention.keys, [part.count * part.key_length for part in share.attention.classes]
        for part, slots in zip(share.attention.classes, sources[keys.row if keys else ...].split(sizes), strict=True):
            found = slots.view(part.count, -1)
            found = found[found[:, 0] >= 0]  # no sequence of padding
            wanted = torch.minimum(found[:, :1] + torch.arange(part.key_length), lasts[found[:, :1]])
            assert torch.equal(found, wanted.where(found >= 0, -1))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), cp=st.sampled_from([1, 2, 3]), turn=st.integers(1, 9)
)
def test_ranks_that_share_a_turn_have_one_number_for_it(lengths: list[int], cp: int, turn: int) -> None:
    """Turns of ``turn`` positions; padding is of no turn of another sequence."""
    samples = make_samples(lengths)
    place = torch.cat([torch.arange(length) for length in lengths])
    samples = replace(samples, turn_of=(place // turn).int())
    numbers: dict[int, set[tuple[int, int]]] = {}
    for rank in range(cp):
        share = pack_micro_batch(samples, tp=1, cp=cp, cp_rank=rank, device=CPU)
        assert "turn_of" not in share.columns
        assert 0 <= int(share.turn_ids.min()) <= int(share.turn_ids.max()) < share.num_turns
        for number, source, of in zip(
            share.turn_ids.tolist(), share.source.tolist(), share.segment_ids.tolist(), strict=True
        ):
            numbers.setdefault(number, set()).add((of, int(place[source]) // turn if source >= 0 else 0))
    assert all(len(turns) == 1 for turns in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers)
