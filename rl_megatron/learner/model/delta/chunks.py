"""Cuts packed sequences into chunks for the gated delta rule, and makes room before each for a convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.learner.packed import Slots
from rl_megatron.models.shape import DeltaNet


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of all sequences: their first ones, then their second ones, and so on, longest sequences first.

    So the n-th chunks follow the first ``counts[n]`` of the (n - 1)-th, and no chunk has two sequences. ``slots`` maps
    the T positions to the chunks' positions; the last chunk of a sequence repeats its last position. ``place`` [T] is
    each position's place among all where ``gap`` empty ones stand before each sequence, in ``places``.
    """

    counts: tuple[int, ...]
    size: int
    slots: Slots
    place: Tensor
    places: int
    gap: int


def cut_into_chunks(starts: Tensor, *, gap: int, size: int = DeltaNet.chunk) -> Chunks:
    """``starts`` [S + 1] are cumulative lengths, on any device; the answer is on theirs."""
    device, starts = starts.device, starts.to("cpu", torch.int64)
    lengths = starts.diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    of_sequence = (lengths[order] + size - 1) // size
    step = torch.repeat_interleave(torch.ones_like(of_sequence).cumsum(0) - 1, of_sequence)  # rank of its sequence
    first = torch.repeat_interleave(of_sequence.cumsum(0) - of_sequence, of_sequence)
    number = torch.arange(len(step)) - first
    by_number = torch.argsort(number, stable=True)
    sequence, number = order[step[by_number]], number[by_number]
    inside = number[:, None] * size + torch.arange(size)
    length = lengths[sequence, None]
    row = (starts[sequence, None] + torch.minimum(inside, length - 1)).flatten()
    real = (inside < length).flatten()
    slot = torch.empty(int(starts[-1]), dtype=torch.int64)
    slot[row[real]] = torch.nonzero(real).squeeze(1)
    slots = Slots(row=row.to(device), slot=slot.to(device), padding=torch.nonzero(~real).squeeze(1).to(device))
    own = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
    place = torch.arange(len(own)) + gap * own
    counts = tuple(torch.bincount(number).tolist())
    places = len(own) + gap * len(lengths)
    return Chunks(counts=counts, size=size, slots=slots, place=place.to(device), places=places, gap=gap)
