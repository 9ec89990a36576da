"""Packs whole sequences into micro-batches of equal work that fit a rank's memory: Samples -> Batch [D][M].

A sequence of l positions costs ``l + c * l**2``: the matrix products grow with l, causal attention with its square.
Longest first, each sequence goes to the micro-batch with the least work that has room (LPT, Graham 1969, under a
capacity). Micro-batches of similar work then share an index m, because expert parallelism makes the ranks wait for each
other at each index. The ranks' totals are balanced row by row.

The number of micro-batches is searched for, and one try is a pass over all sequences. So the search begins at the
smallest number that any packing needs, and takes steps in proportion to it.
Letters: D data-parallel ranks, M micro-batches a rank, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.config.sections.learner import (
    LearnerSection,
    PaddingSection,
    max_padded_length,
    padded_tokens,
    sequence_multiple,
)
from rl_megatron.data.samples import (
    MicroBatches,
    computed_lengths,
    split_by_id,
    split_minibatches,
    tokens_per_sequence,
    unit_members,
)
from rl_megatron.errors import DataError
from rl_megatron.types import Batch, ParallelDims, Samples

# Up to an eighth more micro-batches than memory requires are tried until the heaviest is this near the mean.
GOOD_IMBALANCE = 1.01


def fill_bins(
    padded: NDArray[np.int64],
    work: NDArray[np.float64],
    *,
    dp: int,
    budget: int,
    capacity: int | None,
    ranks: NDArray[np.int64] | None,
) -> tuple[NDArray[np.int64], int]:
    """Returns the bin of each sequence, and the number of bins (a multiple of ``dp``). Sequences come longest first; a
    bin has ``limit`` of them. With ``ranks`` a rank's sequences are in its own bins, which are neighbors."""
    capacity = len(padded) if capacity is None else capacity
    groups = [np.arange(len(padded))] if ranks is None else [np.flatnonzero(ranks == d) for d in range(dp)]
    shared = dp // len(groups)  # ranks among which a group's sequences are spread
    sizes = [padded[ids] for ids in groups]
    fewest = max(
        max(-(-int(each.sum()) // (shared * budget)), -(-len(each) // (shared * capacity)), 1) for each in sizes
    )
    needed = max(-(-_needed(each, budget) // shared) for each in sizes)
    columns = [(each.tolist(), work[ids].tolist()) for each, ids in zip(sizes, groups, strict=True)]

    def imbalance(bins: NDArray[np.int64], num_micro: int) -> float:
        return float(np.bincount(bins, work).max() / work.sum()) * dp * num_micro

    def fit(num_micro: int) -> NDArray[np.int64] | None:
        bins = np.empty(len(padded), np.int64)
        for number, (ids, column) in enumerate(zip(groups, columns, strict=True)):
            own = _longest_first(*column, shared * num_micro, budget, capacity)
            if own is None:
                return None
            bins[ids] = number * shared * num_micro + own
        return bins

    heaviest = 0.0 if ranks is None else max(float(work[ids].sum()) for ids in groups)
    num_micro, best = _first_fit(fit, max(fewest, needed))
    best_imbalance, num_bins = imbalance(best, num_micro), dp * num_micro
    for more in range(num_micro + 1, fewest + fewest // 8 + 1):
        mean = float(work.sum()) / (dp * more)
        # balanced enough, or limited by the longest sequence or the heaviest rank from here on
        if best_imbalance <= max(GOOD_IMBALANCE, float(work[0]) / mean, GOOD_IMBALANCE * heaviest / (more * mean)):
            break
        bins = fit(more)
        if bins is not None and imbalance(bins, more) < best_imbalance:
            best, best_imbalance, num_bins = bins, imbalance(bins, more), dp * more
    return best, num_bins


def _needed(sizes: NDArray[np.int64], budget: int) -> int:
    """Returns the number of bins that no packing can do without.

    A sequence counts i if it is longer than i of k + 1 parts of a bin. The sequences of one bin count less than k + 1
    in all, so k at most. With k = 1 these are the sequences that are longer than half of a bin.
    """
    return max(-(-int((((k + 1) * sizes - 1) // budget).sum()) // k) for k in range(1, 9))


def _first_fit(fit: Callable[[int], NDArray[np.int64] | None], minimum: int) -> tuple[int, NDArray[np.int64]]:
    """Returns the lowest number of bins from ``minimum`` on that fits, and how. One more than a fitting number fits,
    too.

    Steps of a 64th, so of one below 128, and then halves of the last.
    """
    below, number = minimum - 1, minimum
    while (bins := fit(number)) is None:
        below, number = number, number + max(1, number // 64)
    while number - below > 1:
        middle = (below + number) // 2
        fitting = fit(middle)
        if fitting is None:
            below = middle
        else:
            number, bins = middle, fitting
    return number, bins


def _longest_first(
    sizes: list[int], costs: list[float], num_bins: int, budget: int, limit: int
) -> NDArray[np.int64] | None:
    """Assigns sequences of falling sizes greedily; None if they do not fit. O((S + bins) log bins).

    A bin without room for this sequence is parked until the sequences are short enough: sizes only fall. One with
    ``limit`` sequences is closed.
    """
    left = [limit] * num_bins
    open_bins = [(0.0, b, budget) for b in range(num_bins)]  # least work on top
    parked: list[tuple[int, float, int]] = []  # most room on top
    heapify(open_bins)
    out = []
    for size, cost in zip(sizes, costs, strict=True):
        while parked and -parked[0][0] >= size:
            room, total, b = heappop(parked)
            heappush(open_bins, (total, b, -room))
        while open_bins and open_bins[0][2] < size:
            total, b, room = heappop(open_bins)
            heappush(parked, (-room, total, b))
        if not open_bins:
            return None
        total, b, room = open_bins[0]
        left[b] -= 1
        if left[b]:
            heapreplace(open_bins, (total + cost, b, room - size))
        else:
            heappop(open_bins)
        out.append(b)
    return np.array(out, np.int64)


def causal_attention_cost(*, linear_parameters: float, attention_width: float) -> float:
    """Returns c in work(l) = l + c * l**2, from floating-point operations of a forward or a backward pass.

    ``linear_parameters`` counts the weights that multiply one token (active experts only, output layer included): two
    operations each. ``attention_width`` is num_layers * num_heads * head_dim. Scores and values cost two operations
    each per width and visible position, and a causal token sees l / 2 positions.
    """
    return attention_width / linear_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Packs sequences into D x M micro-batches of at most ``max_tokens`` positions, for the ranks of one learner.

    ``rows_per_unit`` neighboring sequences (2 for preference pairs) stay together, with ``keeps_groups`` also a group's
    in one minibatch. ``padding`` has the most sequences of a micro-batch, and the sizes that the learner pads it to.
    Otherwise the learner pads to a multiple of ``multiple`` and of what ``dims`` need. The learner pads, but padding
    counts: a padded micro-batch also has at most ``max_tokens`` positions, rounded up to the padding's multiple."""

    dims: ParallelDims
    max_tokens: int
    attention_cost: float = 0.0
    rows_per_unit: int = 1
    padding: PaddingSection = field(default_factory=PaddingSection)
    multiple: int = 1
    keeps_groups: bool = False

    def pack(
        self,
        samples: Samples,
        *,
        part: NDArray[np.int64] | None = None,
        ranks: NDArray[np.int64] | None = None,
        with_room: bool = False,
    ) -> Batch:
        """Packs every sequence, or those in ``part``, once. Deterministic.

        ``ranks`` [S] says which data-parallel rank takes each sequence; ``with_room``: for one more position each. If
        there are fewer sequences than micro-batches, the others get one position with nothing masked in, since every
        rank must join the collectives. Where ``padding`` has sizes, more positions follow to pad with. Raises DataError
        for an empty batch and for a sequence (a unit) longer than ``max_tokens``.
        """
        part = np.arange(samples.num_sequences) if part is None else part
        lengths = samples.cu_seqlens.diff().numpy()[part] + with_room
        plan = self._plan(lengths, None if ranks is None else ranks[part])
        spare = self.padding.sizes[0] if self.padding.sizes else 1
        sequences = tuple(tuple(torch.from_numpy(part[ids]) for ids in row) for row in plan)
        return Batch(
            samples=samples,
            sequences=sequences,
            micro_batches=MicroBatches(samples, sequences, spare),
            num_tokens=int(tokens_per_sequence(samples.mask, samples.cu_seqlens)[part].sum()),
            num_sequences=len(part),
            spare=spare,
        )

    def repack(self, batch: Batch) -> Batch:
        """Packs the sequences of a batch that was packed for ranks in another layout."""
        return self.pack(batch.samples, part=minibatch_sequences(batch))

    def _plan(
        self, lengths: NDArray[np.int64], ranks: NDArray[np.int64] | None = None
    ) -> list[list[NDArray[np.int64]]]:
        return plan_packing(
            lengths,
            dims=self.dims,
            max_tokens=self.max_tokens,
            attention_cost=self.attention_cost,
            unit=self.rows_per_unit,
            limit=self.padding.sequences,
            ranks=ranks,
        )

    def minibatches(self, samples: Samples, *, limit: int, seeds: Iterable[int]) -> Iterator[Batch]:
        """Splits and packs the samples once for each seed, each time in a new order.

        There are ``limit`` parts, or as many as there are units or whole groups; a trajectory's sequences stay
        together. All share the columns of the samples: `finish_minibatch`."""
        for seed in seeds:
            for part in self._parts(samples, limit, seed):
                yield self.pack(samples, part=part)

    def ranks(self, samples: Samples, *, limit: int, seed: int) -> NDArray[np.int64]:
        """Returns the data-parallel rank [S] that trains on each sequence in the `minibatches` of the seed.

        A pass over all sequences that are there already moves none of them between ranks.
        """
        lengths = samples.cu_seqlens.diff().numpy()
        _check(lengths, self.dims, self.max_tokens, self.rows_per_unit)
        out = np.empty(samples.num_sequences, np.int64)
        for part in self._parts(samples, limit, seed):
            for d, row in enumerate(self._plan(lengths[part])):
                out[part[np.concatenate(row)]] = d
        return out

    def _parts(self, samples: Samples, limit: int, seed: int) -> list[NDArray[np.int64]]:
        together = samples.group_of if self.keeps_groups else samples.trajectory_of
        if together is not None:
            return split_by_id(together, limit, seed)
        num = min(limit, samples.num_sequences // self.rows_per_unit)
        return split_minibatches(samples.num_sequences, num, seed, unit=self.rows_per_unit)

    def metrics(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Returns positions trained on, padding's share of computed positions, and the imbalance of the ranks' work.

        Imbalance is the work of the slowest rank, summed over micro-batches, over the mean rank's work; 1 is even.
        Ranks wait for each other at each micro-batch.
        """
        slowest = mean = 0.0
        real = computed = 0
        multiple = math.lcm(sequence_multiple(self.dims) * self.dims.tp, self.multiple)
        for batch in batches:
            work = np.zeros((len(batch.sequences), len(batch.sequences[0])))
            for d, row in enumerate(computed_lengths(batch)):
                for m, lengths in enumerate(row):
                    work[d, m] = sequence_work(lengths, self.attention_cost).sum()
                    real += int(lengths.sum())
                    padded = int(padded_lengths(lengths, self.dims).sum())
                    computed += padded_tokens(padded, multiple, self.padding.sizes)
            slowest += float(work.max(0).sum())
            mean += float(work.mean(0).sum())
        return {
            "tokens/train": real,
            "packing/imbalance": slowest / mean,
            "packing/padding_fraction": 1 - real / computed,
        }


def make_packer(learner: LearnerSection, *, attention_cost: float, unit: int = 1, whole_groups: bool = False) -> Packer:
    """Returns the packer for the layout of ``learner`` and its most tokens per micro-batch."""
    most = learner.max_tokens_per_micro_batch
    return Packer(
        dims=learner.dims,
        max_tokens=most,
        attention_cost=attention_cost,
        rows_per_unit=unit,
        padding=learner.padding,
        multiple=learner.token_multiple,
        keeps_groups=whole_groups,
    )


def plan_packing(
    lengths: NDArray[np.int64],
    *,
    dims: ParallelDims,
    max_tokens: int,
    attention_cost: float = 0.0,
    unit: int = 1,
    limit: int | None = None,
    ranks: NDArray[np.int64] | None = None,
) -> list[list[NDArray[np.int64]]]:
    """Returns the sequence numbers of each micro-batch [D][M], for sequences of ``lengths`` [S] positions.

    ``ranks`` [S] says which data-parallel rank takes each; a unit's are equal.
    """
    _check(lengths, dims, max_tokens, unit)
    units = (len(lengths) // unit, unit)
    sizes = padded_lengths(lengths, dims).reshape(units).sum(1)
    order = np.argsort(-sizes, kind="stable")
    work = sequence_work(lengths, attention_cost).reshape(units).sum(1)[order]
    budget = max_padded_length(max_tokens, dims)
    seats = None if ranks is None else ranks.reshape(units)[:, 0][order]
    most_units = None if limit is None else limit // unit
    bins, num_bins = fill_bins(sizes[order], work, dp=dims.dp, budget=budget, capacity=most_units, ranks=seats)
    totals = np.bincount(bins, work, num_bins).astype(np.float64)
    place = np.empty(num_bins, np.int64)  # a bin's place, rank by rank
    dealt = _assign_round_robin(totals, dims.dp) if seats is None else _sorted(totals, dims.dp)
    place[dealt.ravel()] = np.arange(num_bins)
    places = place[bins]
    cuts = np.cumsum(np.bincount(places, minlength=num_bins))[:-1]
    parts = [unit_members(ids, unit) for ids in np.split(order[np.lexsort((order, places))], cuts)]
    num_micro = num_bins // dims.dp
    return [parts[rank * num_micro : (rank + 1) * num_micro] for rank in range(dims.dp)]


def _check(lengths: NDArray[np.int64], dims: ParallelDims, max_tokens: int, unit: int) -> None:
    """Raises DataError for an empty batch and for a unit that is longer than a micro-batch, by itself or padded."""
    if not len(lengths):
        raise DataError("nothing to pack: the batch has no sequences")
    for each, most, how in (
        (lengths, max_tokens, ""),
        (padded_lengths(lengths, dims), max_padded_length(max_tokens, dims), f", each padded for learner.cp={dims.cp}"),
    ):
        whole = each.reshape(-1, unit).sum(1)
        if whole.max() > most:
            number = int(whole.argmax()) * unit
            name = f"sequence {number} has" if unit == 1 else f"sequences {number} to {number + unit - 1} together have"
            raise DataError(
                f"{name} {int(whole.max())} positions{how}, but a micro-batch holds at most {most}; "
                "raise learner.max_tokens_per_micro_batch or lower rollout.max_new_tokens (of written data, "
                "<job>.max_tokens)"
            )


def padded_lengths(lengths: NDArray[np.int64], dims: ParallelDims) -> NDArray[np.int64]:
    """Returns the number of positions of each sequence after the learner has padded it to 2 * cp equal chunks."""
    multiple = sequence_multiple(dims)
    return -(-lengths // multiple) * multiple


def sequence_work(lengths: NDArray[np.int64], attention_cost: float) -> NDArray[np.float64]:
    """Returns the work l + c * l**2 [S] of each sequence, in positions of a matrix product."""
    wide = lengths.astype(np.float64)
    return wide + attention_cost * wide * wide


def _assign_round_robin(totals: NDArray[np.float64], dp: int) -> NDArray[np.int64]:
    """Bins [D, M]: column m holds D bins of similar work; its heaviest goes to the rank with the least total so far."""
    rows = np.argsort(-totals, kind="stable").reshape(len(totals) // dp, dp)
    ranks = np.empty_like(rows)
    sums = np.zeros(dp)
    for m, row in enumerate(rows):
        by_need = np.argsort(sums, kind="stable")
        ranks[m, by_need] = row
        sums[by_need] += totals[row]
    return ranks.T


def _sorted(totals: NDArray[np.float64], dp: int) -> NDArray[np.int64]:
    """Bins [D, M] of each rank's own, heaviest first: column m holds D bins of similar work."""
    own = totals.reshape(dp, -1)
    return np.argsort(-own, axis=1, kind="stable") + np.arange(dp)[:, None] * own.shape[1]


def finish_minibatch(
    batch: Batch, weighted: Callable[[Samples, NDArray[np.int64]], Samples] = lambda samples, part: samples
) -> Batch:
    """Returns a minibatch with its ``nll_weights`` divided by how many of its tokens have one. It has the columns that
    ``weighted`` gives it for its part. They are as long as those of all samples."""
    part = minibatch_sequences(batch)
    samples = weighted(_divide_nll_weights(batch.samples, part), part)
    return replace(batch, samples=samples, micro_batches=MicroBatches(samples, batch.sequences, batch.spare))


def minibatch_sequences(batch: Batch) -> NDArray[np.int64]:
    """Returns the sequences of ``batch.samples`` that are in the minibatch, ascending."""
    return np.sort(np.concatenate([ids.numpy() for row in batch.sequences for ids in row]))


def minibatch_token_mask(samples: Samples, part: NDArray[np.int64]) -> Tensor:
    """Returns a mask [N] of the sampled tokens of the sequences ``part``, bool."""
    inside = torch.zeros(samples.num_sequences, dtype=torch.bool)
    inside[torch.from_numpy(part)] = True
    return samples.mask & inside.repeat_interleave(samples.cu_seqlens.diff())


def _divide_nll_weights(samples: Samples, part: NDArray[np.int64]) -> Samples:
    """Divides the NLL marks by the number of the part's tokens that belong to right completions."""
    if samples.nll_weights is None:
        return samples
    count = int(tokens_per_sequence(samples.nll_weights > 0, samples.cu_seqlens)[part].sum())
    return replace(samples, nll_weights=samples.nll_weights / max(count, 1))


def unpack(batch: Batch, scores: Sequence[Sequence[Tensor]], samples: Samples) -> Tensor:
    """Scores [D][M] of the positions of ``batch`` -> [N, ...] at the positions of the ``samples`` it was packed from.

    A score may be several numbers: dimensions after N are kept.
    """
    like, bounds = scores[0][0], samples.cu_seqlens.tolist()
    out = like.new_zeros((len(samples.input_ids), *like.shape[1:]))
    into = out.numpy()
    for numbers, row in zip(batch.sequences, scores, strict=True):
        for sequences, values in zip(numbers, row, strict=True):
            came, place = values.numpy(), 0
            for number in sequences.tolist():  # one copy each: an index of every position costs more than these
                first, stop = bounds[number], bounds[number + 1]
                into[first:stop] = came[place : place + stop - first]
                place += stop - first
            if place > len(came):
                raise ValueError(f"{len(came)} scores of {place} positions")
    return out
