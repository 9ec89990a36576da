"""A rank's share of a micro-batch: every position once over the CP ranks, megatron's zig-zag, padded for TP."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.learner.packed import Slots, pack_micro_batch
from rl_megatron.types import Samples
from tests.samples import sequences_of

CPU = torch.device("cpu")


def make_samples(lengths: list[int]) -> Samples:
    total = sum(lengths)
    return sequences_of(
        lengths,
        input_ids=torch.arange(total),
        targets=torch.arange(total) + 1,
        advantages=torch.arange(total).float(),
        rollout_logprobs=-torch.arange(total).float(),
        routes=torch.randint(0, 300, (total, 2, 3), generator=torch.Generator().manual_seed(0)).to(torch.int16),
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
        assert torch.equal(share.routes[real], samples.routes[share.source[real]])
        assert share.routes[~real].tolist() == [[[0, 1, 2]] * 2] * int((~real).sum())
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
def test_padding_to_sizes_repeats_tokens_and_adds_empty_sequences(
    lengths: list[int], tp: int, cp: int, more: int
) -> None:
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
        assert torch.equal(share.attention.real, real)
        filled = ~real & (share.segment_ids >= len(lengths))
        assert share.input_ids[filled].tolist() == [
            n % sum(lengths) for n in share.attention.positions[filled].tolist()
        ]
        assert torch.equal(share.routes[filled], samples.routes[share.input_ids[filled]])
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
        share.routes[share.source < 0], make_samples([1500, 20, 3]).routes[share.input_ids[share.source < 0]]
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
        share = pack_micro_batch(make_samples(lengths), tp=1, cp=cp, cp_rank=rank, device=CPU)
        for part in share.attention.classes:
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
        assert share.turn_ids is not None
        assert "turn_of" not in share.columns
        assert 0 <= int(share.turn_ids.min()) <= int(share.turn_ids.max()) < share.num_turns
        for number, source, of in zip(
            share.turn_ids.tolist(), share.source.tolist(), share.segment_ids.tolist(), strict=True
        ):
            numbers.setdefault(number, set()).add((of, int(place[source]) // turn if source >= 0 else 0))
    assert all(len(turns) == 1 for turns in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers)
