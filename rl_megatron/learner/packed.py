"""Packs a micro-batch for one learner rank: pads it for TP and CP, takes its CP share, and groups it for attention.

Letters: S sequences, N positions of the samples, T padded positions of all CP ranks, t = T / cp of this rank,
B length classes. A sequence is padded to a multiple of 2*cp, the whole to a multiple of tp*2*cp (megatron's zig-zag:
rank r holds chunks r and 2*cp-1-r of each sequence); the last padding is one or more sequences of its own, masked out.
`learner.padding` makes it longer, and adds sequences without positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_megatron.columns import Ragged
from rl_megatron.config.sections.learner import padded_tokens
from rl_megatron.data.samples import picked
from rl_megatron.feature import declared_columns
from rl_megatron.types import Samples

_PIECE = 1024  # positions of padding that are one sequence even where all others are shorter
LENGTH_CLASS_RATIO = 1.2  # sequences within this ratio share one padded attention call


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthClass:
    """Sequences attended in one call: ``count`` of them, padded to the longest. Its slots follow the last class's."""

    count: int
    query_length: int  # positions of a sequence on this rank
    key_length: int
    positions: Tensor  # [count or 1, query_length], of the queries in their sequences

    def visible(self, window: int) -> Tensor:
        """Returns the keys a query sees, [count or 1, 1, query_length, key_length] bool; ``window`` 0 means no limit.

        For one layer's call: its size is a square, and all micro-batches of a pass are packed together.
        """
        query, key = self.positions[:, None, :, None], torch.arange(self.key_length, device=self.positions.device)
        return (query >= key) & (query < key + window) if window else query >= key


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Maps the rows of a flat tensor to slots of the padded classes. A sequence's padding repeats its last row."""

    row: Tensor  # [slots] the row in each slot
    slot: Tensor  # [rows] each row's own slot
    padding: Tensor  # [p] the slots of padding


@dataclass(kw_only=True)
class PackedAttentionParams(PackedSeqParams):
    """Megatron's packed-sequence parameters, and what our torch attention needs in addition."""

    classes: tuple[LengthClass, ...] = ()
    queries: Slots | None = None  # slots of this rank's t positions; None where every row is its own slot
    keys: Slots | None = None  # slots of the cp-gathered T positions
    positions: Tensor = field(default_factory=lambda: torch.empty(0))  # [t] int64, position inside its sequence
    is_real: Tensor = field(default_factory=lambda: torch.empty(0))  # [t] bool, neither padding nor of a copy
    gathered: Tensor = field(default_factory=lambda: torch.empty(0))  # [T] rows, as ranks' ones follow each other
    chunks: object | None = None  # chunks of all T positions; cached by the first delta net
    rotary: tuple[Tensor, Tensor] | None = None  # cosine and sine [t, 1, d / 2]; cached by the first layer
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Keys of sparse attention by layer: [t, top_k] int32, places in the position's own sequence, -1 for none.

    A layer attends by its entry if there is one before its forward pass. Otherwise a layer with an indexer puts its own
    choice here, which layers without one and recomputation take. A layer's backward pass removes its entry.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch:
    """One rank's tensors [t] of a micro-batch. ``source`` is each one's position in the samples, -1 for padding."""

    input_ids: Tensor
    targets: Tensor
    columns: dict[str, Tensor]  # the samples' other columns, which LossInputs takes under the same names
    extra: Mapping[str, Tensor | Ragged]  # [t, …], what engines returned; padding is as `Column.padding` says
    segment_ids: Tensor
    turn_ids: Tensor | None  # values in [0, num_turns); None if the samples have no ``turn_of``
    source: Tensor
    num_segments: int
    num_turns: int
    attention: PackedAttentionParams
    extras: Mapping[str, object] = field(default_factory=dict)  # features' readings of it, by the feature's name


def pack_micro_batch(
    samples: Samples,
    *,
    tp: int,
    cp: int,
    cp_rank: int,
    device: torch.device,
    copy: bool = False,
    rows: int = 1,
    sizes: Sequence[int] = (),
    sequences: int | None = None,
) -> PackedMicroBatch:
    """Returns this rank's share of ``samples``, equal on all TP and PP ranks that share a CP rank. Not a collective.

    Its tokens are padded to a multiple of tp times ``rows``, or to one of ``sizes`` (T, rising). Padding is the
    samples' own tokens from the first on. Its sequences are padded to ``sequences`` and one more.

    Observers count nothing of a ``copy``, which fills up a pipeline.
    """
    unit = 2 * cp if cp > 1 else 1
    lengths = samples.cu_seqlens.diff()
    padded = (lengths + unit - 1) // unit * unit
    total = int(padded.sum())
    rest = padded_tokens(total, math.lcm(unit * tp, rows * tp * cp), sizes) - total
    if rest or sequences is not None:
        free = None if sequences is None else max(1, sequences + 1 - len(lengths))
        more = _pieces(rest, unit, max(_PIECE, int(padded.max())), free)
        lengths, padded = torch.cat([lengths, torch.zeros_like(more)]), torch.cat([padded, more])
    starts = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    segment = torch.repeat_interleave(torch.arange(len(padded)), padded)
    position = torch.arange(int(starts[-1])) - starts[segment]
    sample_starts = torch.cat([samples.cu_seqlens[:-1], torch.zeros_like(padded[samples.num_sequences :])])
    source = torch.where(position < lengths[segment], sample_starts[segment] + position, -1)
    owner = _zigzag_owner(position, padded[segment], cp)
    mine = torch.nonzero(owner == cp_rank).squeeze(1)
    source, segment_ids = source[mine], segment[mine]
    real = source >= 0
    take = source.where(real, (mine - total if sizes else 0) % len(samples.input_ids))
    ids = samples.input_ids[take] if sizes else samples.input_ids[take].where(real, 0)
    columns = {
        name: column[take].masked_fill_(~real.view(-1, *[1] * (column.dim() - 1)), 0).to(device)
        for name, column in samples.columns.items()
        if name != "input_ids"
    }
    turns, turn_of = 1 if samples.turn_of is None else int(samples.turn_of.max()) + 1, columns.pop("turn_of", None)
    return PackedMicroBatch(
        input_ids=ids.to(device),
        targets=columns.pop("targets"),
        columns=columns,
        extra={
            name: _packed_extra(name, column, take, real | bool(sizes), device)
            for name, column in samples.extra.items()
        },
        segment_ids=segment_ids.to(device),
        turn_ids=None if turn_of is None else segment_ids.to(device) * turns + turn_of,
        source=source,
        num_segments=len(padded),
        num_turns=len(padded) * turns,
        attention=replace(
            _attention_params(starts, padded, position, owner, cp_rank, cp, device),
            is_real=(torch.zeros_like(real) if copy else real).to(device),
        ),
    )


def _pieces(rest: int, unit: int, longest: int, free: int | None) -> Tensor:
    """Returns lengths [pieces] of sequences for ``rest`` positions of padding, since attention costs squares. They are
    multiples of ``unit``, at most ``longest`` where ``free`` sequences are enough. With ``free`` there are as many."""
    count = max(1, -(-rest // longest))
    count = count if free is None else min(count, free)
    ends = torch.arange(count + 1) * (rest // unit) // count * unit
    return torch.cat([ends.diff(), ends.new_zeros(0 if free is None else free - count)])


def local_tokens(length: int) -> slice:
    """Returns the tokens of a packed micro-batch that this TP rank routes, under sequence parallelism."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank, size = parallel_state.get_tensor_model_parallel_rank(), length // tp
    return slice(rank * size, (rank + 1) * size)


def _packed_extra(
    name: str, column: Tensor | Ragged, take: Tensor, given: Tensor, device: torch.device
) -> Tensor | Ragged:
    """Returns the entries ``take`` [t] of the column; those not ``given`` [t] bool are padding."""
    if isinstance(column, Ragged):
        own, counts = picked(column, take[given]), torch.zeros(len(take), dtype=column.counts.dtype)
        assert isinstance(own, Ragged)
        counts[given] = own.counts
        return Ragged(own.values.to(device), counts.to(device))
    packed = column[take]
    distinct = declared_columns()[name].padding == "distinct"  # megatron requires it of a token's experts
    packed[~given] = torch.arange(column.shape[-1], dtype=column.dtype) if distinct else 0
    return packed.to(device)


def _zigzag_owner(position: Tensor, length: Tensor, cp: int) -> Tensor:
    """Returns the CP rank that holds each position: chunk c of 2*cp belongs to rank min(c, 2*cp - 1 - c)."""
    if cp == 1:
        return torch.zeros_like(position)
    chunk = position * (2 * cp) // length
    return torch.minimum(chunk, 2 * cp - 1 - chunk)


def _attention_params(
    starts: Tensor, lengths: Tensor, position: Tensor, owner: Tensor, rank: int, cp: int, device: torch.device
) -> PackedAttentionParams:
    mine = torch.nonzero(owner == rank).squeeze(1)
    order = torch.argsort(owner, stable=True)  # the T positions as an all-gather over CP lays them out
    gathered = torch.empty_like(order)
    gathered[order] = torch.arange(len(order))
    local = torch.full_like(order, -1)
    local[mine] = torch.arange(len(mine))
    label = torch.ceil(torch.log(lengths.clamp(min=1).double()) / torch.log(torch.tensor(LENGTH_CLASS_RATIO))).long()
    classes, query_rows, key_rows, query_real, key_real = [], [], [], [], []
    for value in torch.unique(label[lengths > 0]).tolist():  # a handful of classes, not sequences
        members = torch.nonzero((label == value) & (lengths > 0)).squeeze(1)
        start, length = starts[members, None], lengths[members, None]
        step = torch.arange(int(length.max()))
        keys = start + torch.minimum(step, length - 1)
        queries, count = (keys, length) if cp == 1 else _local_queries(start, length, cp, rank)
        own = step[None] if cp == 1 else position[queries]
        query_rows.append(local[queries].flatten())
        query_real.append((torch.arange(queries.shape[1]) < count).flatten())
        key_rows.append(gathered[keys].flatten())
        key_real.append((step < length).flatten())
        classes.append(
            LengthClass(
                count=len(members),
                query_length=queries.shape[1],
                key_length=keys.shape[1],
                positions=own.to(device),
            )
        )
    cu = starts.to(device=device, dtype=torch.int32)
    longest = int(lengths.max())
    return PackedAttentionParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        classes=tuple(classes),
        queries=_slots(torch.cat(query_rows), torch.cat(query_real), device),
        keys=_slots(torch.cat(key_rows), torch.cat(key_real), device),
        positions=position[mine].to(device),
        gathered=gathered.to(device),
    )


def _slots(row: Tensor, real: Tensor, device: torch.device) -> Slots | None:
    if bool(real.all()) and torch.equal(row, torch.arange(len(row))):
        return None
    slot = torch.empty(int(real.sum()), dtype=torch.int64)
    slot[row[real]] = torch.nonzero(real).squeeze(1)
    padding = torch.nonzero(~real).squeeze(1)
    return Slots(row=row.to(device), slot=slot.to(device), padding=padding.to(device))


def _local_queries(start: Tensor, length: Tensor, cp: int, rank: int) -> tuple[Tensor, Tensor]:
    """[b, lq] whole-batch positions of this CP rank's two chunks of each sequence, and how many are real [b, 1]."""
    chunk = length // (2 * cp)
    step = torch.minimum(torch.arange(2 * int(chunk.max()))[None], 2 * chunk - 1)
    position = torch.where(step < chunk, rank * chunk + step, (2 * cp - 1 - rank) * chunk + step - chunk)
    return start + position, 2 * chunk
