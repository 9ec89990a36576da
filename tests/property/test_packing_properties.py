"""The guarantees of packing, for any lengths, degrees and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data import bins
from rl_megatron.data.packing import Packer, causal_attention_cost, pack, packer_of, plan_packing, unpack
from rl_megatron.errors import DataError
from rl_megatron.learner.packed import pack_micro_batch
from rl_megatron.options.fp8 import rows
from rl_megatron.options.padding import PaddingSection
from rl_megatron.types import ParallelDims, Samples
from tests.samples import sequences_of

COLUMNS = ("input_ids", "targets", "mask", "advantages", "rollout_logprobs", "old_logprobs", "routes")
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
        routes=torch.stack([number % 200, number % 200 + 1], 1).to(torch.uint8)[:, None].expand(n, 3, 2),
    )


def pieces(samples: Samples, name: str) -> list[torch.Tensor]:
    return list(getattr(samples, name).split(samples.cu_seqlens.diff().tolist()))


@settings(deadline=None, max_examples=150)
@given(LENGTHS, DIMS, st.integers(60, 300), st.sampled_from([0.0, 0.01, 1.0]))
def test_every_sequence_is_packed_once_with_all_its_columns(
    lengths: list[int], dims: ParallelDims, max_tokens: int, cost: float
) -> None:
    samples = ragged(lengths)
    batch = pack(samples, dims=dims, max_tokens=max_tokens, attention_cost=cost)
    micro_batches = [micro for row in batch.micro_batches for micro in row]
    real = [micro for micro in micro_batches if micro.mask.any() or len(micro.mask) > 1 or micro.old_logprobs.any()]
    for name in COLUMNS:
        packed = [piece.tolist() for micro in real for piece in pieces(micro, name)]
        assert sorted(packed) == sorted(piece.tolist() for piece in pieces(samples, name)), name
    for placeholder in (micro for micro in micro_batches if all(micro is not other for other in real)):
        assert placeholder.input_ids.tolist() == samples.input_ids[:1].tolist()
        assert placeholder.routes.tolist() == [[[0, 1]] * 3]  # of the first position: a token's experts all differ
        assert placeholder.cu_seqlens.tolist() == [0, 1]
    assert batch.num_sequences == len(lengths)
    assert batch.num_tokens == int(samples.mask.sum())


@settings(deadline=None, max_examples=150)
@given(LENGTHS, DIMS, st.integers(60, 300), st.sampled_from([0.0, 0.01, 1.0]))
def test_limits_equal_counts_and_a_bounded_number_of_micro_batches(
    lengths: list[int], dims: ParallelDims, max_tokens: int, cost: float
) -> None:
    plan = plan_packing(np.array(lengths), dims=dims, max_tokens=max_tokens, attention_cost=cost)
    assert len(plan) == dims.dp
    assert len({len(row) for row in plan}) == 1
    assert sorted(i for row in plan for ids in row for i in ids.tolist()) == list(range(len(lengths)))
    unit = 2 * dims.cp if dims.cp > 1 else 1
    for ids in (ids for row in plan for ids in row):
        chunked = sum(-(-lengths[i] // unit) * unit for i in ids)
        padded = -(-chunked // (unit * dims.tp)) * unit * dims.tp
        assert padded < max_tokens + unit * dims.tp
        assert padded <= max_tokens or dims.tp * unit > 1
    # any greedy packing leaves at most one bin less than half full; an eighth more is allowed for balance
    total = sum(-(-length // unit) * unit for length in lengths)
    assert len(plan[0]) <= (2 * total / (max_tokens * dims.dp) + 1) * 9 / 8 + 1


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(1, 5), st.integers(60, 150), st.sampled_from([0.0, 0.01, 1.0]), st.booleans())
def test_there_are_as_few_micro_batches_as_fit_or_an_eighth_more_than_memory_requires(
    lengths: list[int], dp: int, max_tokens: int, cost: float, seated: bool
) -> None:
    """The fewest that fit, of all tried one by one."""
    sizes = np.sort(lengths)[::-1].copy()
    work = (sizes + cost * sizes**2).astype(np.float64)
    ranks = np.arange(len(sizes)) % dp if seated else None
    parts = [sizes[d::dp] for d in range(dp)] if seated else [sizes]
    shared = 1 if seated else dp

    def fits(num_micro: int) -> bool:
        of_parts = [(part.tolist(), (part + cost * part**2).tolist()) for part in parts]
        return all(bins._longest_first(*one, shared * num_micro, max_tokens, 80) is not None for one in of_parts)

    fewest = next(filter(fits, range(1, 81)))
    _, num_bins = bins.fill_bins(sizes, work, dp=dp, budget=max_tokens, most=None, ranks=ranks)
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


def test_no_more_micro_batches_are_tried_where_the_longest_sequence_is_the_heaviest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its attention is more work than any other micro-batch has; an eighth of 16 might be tried."""
    tries = counted_tries(monkeypatch)
    plan = plan_packing(np.array([1000] + [30] * 495), dims=ParallelDims(), max_tokens=1000, attention_cost=1.0)
    assert (len(tries), len(plan[0])) == (1, 16)


def counted_tries(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    tries, real = list[object](), bins._longest_first
    monkeypatch.setattr(bins, "_longest_first", lambda *given: (tries.append(given), real(*given))[1])
    return tries


@settings(deadline=None, max_examples=60)
@given(LENGTHS, DIMS, st.integers(1, 4), st.sampled_from([1, 2]))
def test_a_micro_batch_has_at_most_so_many_sequences(
    lengths: list[int], dims: ParallelDims, units: int, unit: int
) -> None:
    lengths = lengths * unit
    plan = plan_packing(np.array(lengths), dims=dims, max_tokens=300, unit=unit, most=units * unit + unit - 1)
    assert sorted(i for row in plan for ids in row for i in ids.tolist()) == list(range(len(lengths)))
    assert max(len(ids) for row in plan for ids in row) <= units * unit


def test_the_most_sequences_alone_decide_how_many_micro_batches_short_ones_make() -> None:
    plan = plan_packing(np.array([2] * 30), dims=ParallelDims(dp=2), max_tokens=1000, most=4)
    assert [[len(ids) for ids in row] for row in plan] == [[4, 4, 4, 3], [4, 4, 4, 3]]


@settings(deadline=None, max_examples=50)
@given(LENGTHS, DIMS)
def test_packing_is_deterministic(lengths: list[int], dims: ParallelDims) -> None:
    plans = [plan_packing(np.array(lengths), dims=dims, max_tokens=120, attention_cost=0.01) for _ in range(2)]
    flat = [[ids.tolist() for row in plan for ids in row] for plan in plans]
    assert flat[0] == flat[1]


def test_the_issue_sized_mix_is_balanced() -> None:
    drawn = np.random.default_rng(3).lognormal(np.log(6000), 0.7, 4096)
    lengths = np.clip(drawn, 64, 32768).astype(np.int64)
    dims = ParallelDims(dp=8, cp=2, tp=2)
    plan = plan_packing(lengths, dims=dims, max_tokens=65536, attention_cost=6.5e-5)
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
def test_pairs_are_packed_where_each_fits_with_its_padding_and_else_refused(
    halves: list[int], dims: ParallelDims, max_tokens: int
) -> None:
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
    said = (
        r"sequences 2 to 3 together have 12 positions, each padded for learner.cp=2, but a micro-batch holds at most 8"
    )
    with pytest.raises(DataError, match=said):
        plan_packing(np.array([4, 4, 5, 3]), dims=ParallelDims(cp=2), max_tokens=8, unit=2)


def test_a_micro_batch_more_that_is_no_more_even_is_not_taken() -> None:
    """64 positions: the heaviest of 8 has 9, the heaviest of 9 has 8, both 9/8 of the mean."""
    plan = plan_packing(np.array([3, 5, 6, 3, 7, 5, 4, 4, 7, 7, 7, 6]), dims=ParallelDims(), max_tokens=9)
    assert len(plan[0]) == 8


def test_a_micro_batch_more_is_taken_where_the_most_sequences_say_how_few_there_are() -> None:
    """73 positions: the heaviest of 8, two sequences each, would have 11; of 9 it has 9."""
    lengths = np.array([6, 1, 8, 8, 5, 1, 4, 2, 6, 8, 8, 7, 1, 7, 1])
    plan = plan_packing(lengths, dims=ParallelDims(), max_tokens=1000, most=2)
    assert [int(lengths[ids].sum()) for ids in plan[0]] == [9, 9, 8, 8, 8, 8, 8, 8, 7]


def test_a_micro_batch_more_is_taken_where_ranks_are_given() -> None:
    """Of 9 for each rank the heaviest would have 9 positions; of 10 it has 8."""
    lengths = np.array([8, 7, 5, 1, 6, 5, 8, 3, 7, 8, 7, 3, 4, 1, 3, 1, 5, 7, 4, 6, 8, 1, 8])
    plan = plan_packing(lengths, dims=ParallelDims(dp=2), max_tokens=9, ranks=np.arange(len(lengths)) % 2)
    assert [max(int(lengths[ids].sum()) for ids in row) for row in plan] == [8, 8]
    assert [len(row) for row in plan] == [10, 10]


def test_work_is_compared_to_the_last_position() -> None:
    """The third goes to the micro-batch with one position less, though 2^53 in float64 has no neighbour above."""
    plan = plan_packing(np.array([2**53, 2**53 - 1, 1]), dims=ParallelDims(), max_tokens=2**53 + 1)
    assert [ids.tolist() for ids in plan[0]] == [[0], [1, 2]]


def test_an_empty_batch_is_an_error() -> None:
    with pytest.raises(DataError, match="no sequences"):
        plan_packing(np.array([], dtype=np.int64), dims=ParallelDims(), max_tokens=100)


def test_micro_batches_own_their_memory() -> None:
    """A view would send the whole batch to every rank when pickled."""
    batch = pack(ragged([10] * 40), dims=ParallelDims(dp=2), max_tokens=50)
    for micro in (micro for row in batch.micro_batches for micro in row):
        assert micro.input_ids.untyped_storage().nbytes() == micro.input_ids.nbytes


def test_attention_cost_equals_operations_counted_by_hand() -> None:
    """One layer, width 8, 100 parameters: a sequence of 10 spends 2*100*10 on products, 2*2*8 per visible pair."""
    cost = causal_attention_cost(linear_parameters=100, attention_width=8)
    pairs = 10 * 10 / 2
    assert cost * 10 * 10 == pytest.approx(2 * 2 * 8 * pairs / (2 * 100))


@settings(deadline=None, max_examples=60)
@given(LENGTHS, DIMS, st.integers(60, 300))
def test_scores_find_their_way_back(lengths: list[int], dims: ParallelDims, max_tokens: int) -> None:
    samples = ragged(lengths)
    batch = pack(samples, dims=dims, max_tokens=max_tokens)
    scores = [[micro.old_logprobs for micro in row] for row in batch.micro_batches]
    assert torch.equal(unpack(batch, scores, samples), samples.old_logprobs)


def test_scores_of_too_few_micro_batches_are_refused() -> None:
    samples = ragged([10] * 12)
    batch = pack(samples, dims=ParallelDims(dp=2), max_tokens=30)
    scores = [[micro.old_logprobs for micro in row] for row in batch.micro_batches]
    with pytest.raises(ValueError, match="shorter"):
        unpack(batch, [scores[0], scores[1][:-1]], samples)
    with pytest.raises(ValueError, match="shorter"):
        unpack(batch, scores[:1], samples)
    with pytest.raises(ValueError, match="could not broadcast"):
        unpack(batch, [scores[0], [*scores[1][:-1], scores[1][-1][:-1]]], samples)


@settings(deadline=None, max_examples=60)
@given(st.lists(LENGTHS, min_size=1, max_size=3), DIMS, st.sampled_from([0.0, 0.01, 1.0]))
def test_metrics_are_those_of_a_loop_over_micro_batches(
    several: list[list[int]], dims: ParallelDims, cost: float
) -> None:
    batches = [pack(ragged(lengths), dims=dims, max_tokens=90, attention_cost=cost) for lengths in several]
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
    packer = packer_of(learner, attention_cost=0.0)
    batch = packer.pack(ragged(lengths))
    computed = 0
    for micro_batch in (one for row in batch.micro_batches for one in row):
        share = pack_micro_batch(micro_batch, tp=tp, cp=cp, cp_rank=0, device=torch.device("cpu"), rows=rows(learner))
        computed += cp * len(share.input_ids)
    assert packer.metrics([batch])["packing/padding_fraction"] == pytest.approx(1 - sum(lengths) / computed)


def test_a_placeholder_has_others_tokens_for_padding_and_a_sequence_of_one() -> None:
    """Padding of one token many times would send all to the same experts."""
    samples = ragged([9, 4])
    batch = pack(samples, dims=ParallelDims(dp=4), max_tokens=16, padding=PaddingSection(tokens="8,16"))
    ranks = zip(batch.micro_batches, batch.sequences, strict=True)
    placeholders = [row[0] for row, numbers in ranks if not len(numbers[0])]
    assert len(placeholders) == 2
    for placeholder in placeholders:
        assert placeholder.input_ids.tolist() == samples.input_ids[:8].tolist()
        assert placeholder.cu_seqlens.tolist() == [0, 1]
        assert not placeholder.mask.any()
