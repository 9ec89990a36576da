"""Columns of a step's rows on their way from the controller to ranks: both ends.

The controller sends a data-parallel rank a *share*: the data that the rank lacks for one pass, as one array of bytes
without a pickle. A share has a header in JSON, the numbers of the rows that the pass takes, and columns of rows. Each
array is at a multiple of 8 bytes. Each column goes to a data-parallel rank once a step, in the shortest of the forms
below that gives its numbers back to the bit. The form of a column (`Form`) is found once for all its rows, in parts
that stay in the processor's cache. A share is then copied row by row into the memory that is sent. Letters: S sequences
(rows), T positions of those of one block, D data-parallel ranks, M micro-batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.columns import Ragged
from rl_megatron.data.samples import KEPT, concatenated, make_samples, split, tokens_per_sequence
from rl_megatron.errors import RLMegatronError
from rl_megatron.feature import declared_columns
from rl_megatron.types import Batch, Samples

Share: TypeAlias = NDArray[np.uint8]
"""The columns that one data-parallel rank is sent for one pass."""

Pieces: TypeAlias = tuple[Sequence[NDArray[Any]], np.dtype[Any], tuple[int, ...]]
"""Arrays that are sent as one, its dtype and its shape."""

_ALIGNMENT = 8


def encode_rows(head: dict[str, Any], every: Sequence[Pieces]) -> Share:
    """Writes header and arrays into one array of bytes."""
    text = json.dumps({**head, "arrays": [(dtype.str, shape) for _, dtype, shape in every]}).encode()
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in every]
    place = 8 + _room_for(len(text))
    out = np.zeros(place + sum(map(_room_for, sizes)), np.uint8)
    out[:8].view(np.int64)[0] = len(text)
    out[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    for (arrays, dtype, shape), size in zip(every, sizes, strict=True):
        np.concatenate(arrays, out=out[place : place + size].view(dtype).reshape(shape), casting="unsafe")
        place += _room_for(size)
    return out


def opened(share: Share) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Returns header and arrays, which use the share's memory."""
    length = int(share[:_ALIGNMENT].view(np.int64)[0])
    head = json.loads(share[_ALIGNMENT : _ALIGNMENT + length].tobytes())
    place, arrays = _ALIGNMENT + _room_for(length), []
    for dtype, shape in head["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(share[place : place + size].view(dtype).reshape(shape))
        place += _room_for(size)
    return head, arrays


OwnLayers = Mapping[str, tuple[int, ...]]
"""Column with entries of layers -> the layers of one rank, as indices into its second dimension."""


def has_layers(share: Share) -> bool:
    """True if it brings columns with entries of layers."""
    head, _ = opened(share)
    return any(name in declared_columns() and declared_columns()[name].layers is not None for name in _names(head))


def select_layers(share: Share, layers: OwnLayers) -> Share:
    """Returns the share with the entries of these layers alone, of all that it has."""
    head, arrays = opened(share)
    cut = [a[:, list(layers[name])] if name in layers else a for name, a in zip(_names(head), arrays, strict=True)]
    return encode_rows({**head, "is_cut": True}, [([array], array.dtype, array.shape) for array in cut])


def _names(head: dict[str, Any]) -> list[str]:
    """Returns the name of each array."""

    def block_names() -> Iterator[str]:
        for forms in head["blocks"]:
            yield from ("#rows", "#lengths")
            for name, (form, _) in forms.items():
                yield from () if form == "copy" else ("#counts", name) if form == "ragged" else (name,)

    spare = [part for name in head["spare"] for part in (("#counts", name) if name in head["ragged"] else (name,))]
    return ["#rows", "#counts", *spare, *block_names()]


def _room_for(size: int) -> int:
    """Returns the number of bytes that an array of ``size`` bytes takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


SCORING_COLUMNS = (*KEPT, "mask")  # columns that a pass without a loss reads, and all extra ones
Form = Literal["whole", "bits", "last", "copy", "masked", "trained", "spread", "ragged"]
"""The forms in which a column is sent. ``whole``: all its numbers. ``bits``: as bits. ``last``: each row's last, if the
others are the next input. ``copy``: nothing, as it equals another column. ``masked``: at masked-in positions, if the
others are 0. ``trained``: a number a row, times the mask. ``spread``: a number a row. ``ragged``: counts and values."""

_SHOWN = 8  # rows in a message


class RankRows:
    """The rows of a step that a rank's data-parallel rank was sent; every rank has one."""

    def __init__(self) -> None:
        self._step = 0
        self._rows: dict[str, dict[int, Tensor | Ragged]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns of all rows."""
        return sum(row.nbytes for rows in self._rows.values() for row in rows.values())

    def forget(self) -> None:
        """Frees the step's rows."""
        self._rows = {}

    def micro_batches(self, share: Share, layers: OwnLayers | None = None) -> tuple[Samples, ...]:
        """Keeps what is new, and builds the pass's micro-batches [M], with the entries of this rank's ``layers``.

        Raises RLMegatronError for rows that it was not sent.
        """
        head, arrays = opened(share)
        cuts = {} if "is_cut" in head else layers or {}
        if head["step"] != self._step:
            self.forget()
            self._step = head["step"]
        rows, counts, *arrays = arrays
        spare = {name: _cut(_received(arrays, name in head["ragged"]), cuts.get(name)) for name in head["spare"]}
        for forms in head["blocks"]:
            new, lengths, *arrays = arrays
            found = self._decoded(forms, arrays, new, torch.from_numpy(lengths).long())
            for name, column in found.items():
                its_rows = split(_cut(column, cuts.get(name)), lengths.tolist())
                self._rows.setdefault(name, {}).update(zip(new.tolist(), its_rows, strict=True))
        cut = np.split(rows, np.cumsum(counts)[:-1])
        return tuple(
            self._micro_batch(ids.tolist(), head["columns"]) if len(ids) else _empty(spare, head) for ids in cut
        )

    def _decoded(
        self, forms: dict[str, tuple[Form, str]], arrays: list[NDArray[Any]], new: NDArray[np.int32], lengths: Tensor
    ) -> dict[str, Any]:
        """Returns the columns of a block; takes its arrays off the list."""
        found: dict[str, Any] = {}
        for name, (form, other) in forms.items():
            if form == "copy":
                found[name] = found[other]
                continue
            sent = _received(arrays, form == "ragged")
            mask = found.get("mask")
            if mask is None and form in ("masked", "trained"):
                mask = concatenated(self._pieces("mask", new.tolist()))
            found[name] = _decoded(form, sent, lengths, mask, found.get("input_ids"))
        return found

    def _micro_batch(self, rows: list[int], names: Sequence[str]) -> Samples:
        columns = {name: concatenated(self._pieces(name, rows)) for name in names}
        bounds = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor([len(piece) for piece in self._pieces("input_ids", rows)]), 0, out=bounds[1:])
        return _samples(columns, bounds)

    def _pieces(self, name: str, rows: list[int]) -> list[Tensor | Ragged]:
        held = self._rows.get(name, {})
        if lost := [row for row in rows if row not in held]:
            shown = f"{', '.join(map(str, lost[:_SHOWN]))}{', …' if len(lost) > _SHOWN else ''}"
            raise RLMegatronError(
                f"this rank is asked for {name!r} of rows {shown} of batch {self._step}, {len(lost)} in all, which it "
                f"was not sent; it holds those of {len(held)} rows. The controller counts on rows that are not here: "
                "resume from the last checkpoint"
            )
        return [held[row] for row in rows]


def _samples(columns: dict[str, Any], cu_seqlens: Tensor) -> Samples:
    """Returns samples with zeros for the columns that a loss needs and the pass lacks."""
    ids, targets = columns["input_ids"].long(), columns["targets"].long()
    zeros = torch.zeros(len(ids))
    rest = {name: columns.get(name, zeros) for name in ("advantages", "rollout_logprobs", "old_logprobs")}
    if "turn_of" in columns:
        rest["turn_of"] = columns["turn_of"].int()
    return make_samples({**columns, **rest, "input_ids": ids, "targets": targets}, cu_seqlens)


def _empty(spare: dict[str, Any], head: dict[str, Any]) -> Samples:
    """Returns the micro-batch without sequences that `MicroBatches` makes of the same samples."""
    length = len(spare["input_ids"])
    columns = {name: torch.zeros(length) for name in head["columns"]} | spare
    columns["mask"] = torch.zeros(length, dtype=torch.bool)
    return _samples(columns, torch.tensor([0, 1]))


def _received(arrays: list[NDArray[Any]], ragged: bool) -> Any:
    """Returns the next column of the arrays, which it takes off the list."""
    first = torch.from_numpy(arrays.pop(0))
    return Ragged(torch.from_numpy(arrays.pop(0)), first) if ragged else first


def _cut(column: Tensor | Ragged, layers: Sequence[int] | None) -> Tensor | Ragged:
    """Returns the column with the entries of these layers alone."""
    if layers is None or isinstance(column, Ragged) or len(layers) == column.shape[1]:
        return column
    return column[:, list(layers)]


def _decoded(form: Form, sent: Tensor, lengths: Tensor, mask: Tensor | None, ids: Tensor | None) -> Tensor:
    """Returns the column [T, …] of rows of ``lengths``; ``ids`` are their inputs, ``mask`` is theirs."""
    total = int(lengths.sum())
    if form == "bits":
        return torch.from_numpy(np.unpackbits(sent.numpy(), count=total).view(np.bool_))
    if form == "last":
        assert ids is not None
        targets = torch.empty_like(ids)
        targets[:-1] = ids[1:]
        targets[lengths.cumsum(0) - 1] = sent.to(ids.dtype)
        return targets
    if form == "masked":
        assert mask is not None
        out = torch.zeros(total, *sent.shape[1:])
        out[mask] = sent
        return out
    if form in ("trained", "spread"):
        everywhere = torch.repeat_interleave(sent, lengths, output_size=total)
        return everywhere if form == "spread" or mask is None else everywhere * mask
    return sent


_PART = 2**18  # positions


class SentRows:
    """The rows of each column that each data-parallel rank of a group of processes holds.

    A column is known by its tensor, so that must not change after it was sent. Steps are numbered on from ``after``.
    """

    def __init__(self, dp: int, *, after: int = 0) -> None:
        self.step = after
        self._tokens: Tensor | None = None
        self._rows: list[dict[str, NDArray[np.bool_]]] = [{} for _ in range(dp)]
        self._columns: dict[str, _Column] = {}
        self._alike: set[frozenset[str]] = set()  # pairs of columns that are equal

    def forget(self) -> None:
        """Assumes that ranks hold nothing."""
        self._tokens, self._columns, self._alike, self._rows = None, {}, set(), [{} for _ in self._rows]

    def shares(self, batch: Batch, *, to_score: bool) -> list[Share]:
        """Returns what each data-parallel rank [D] needs for a pass over its micro-batches; it holds that from now on.

        Another step begins with other ``batch.samples.input_ids``. A pass that is ``to_score`` has zeros for what a
        loss alone reads.
        """
        samples = batch.samples
        if samples.input_ids is not self._tokens:
            self.forget()
            self.step, self._tokens = self.step + 1, samples.input_ids
        every = samples.every_column
        columns = {n: c for n, c in every.items() if n in SCORING_COLUMNS or n in samples.extra or not to_score}
        self._look_at(samples, columns)
        return [self._share(batch, d, columns) for d in range(len(self._rows))]

    def _look_at(self, samples: Samples, columns: Mapping[str, Tensor | Ragged]) -> None:
        """Finds how columns are sent that are not those of the pass before; ranks hold no row of one that differs."""
        mask = self._columns.get("mask")
        rows = mask.rows if mask is not None and mask.tensor is samples.mask else _Rows(samples)
        for name, column in columns.items():
            known = self._columns.get(name)
            if known is not None and known.tensor is column and known.rows is rows:
                continue
            if known is None or not _same(known.tensor, column):
                for held in self._rows:
                    held[name] = np.zeros(samples.num_sequences, np.bool_)
            self._columns[name] = _Column(name, column, rows, samples)
            self._alike = {pair for pair in self._alike if name not in pair}
            others = [other for other in self._columns if other != name and _same(self._columns[other].tensor, column)]
            self._alike |= {frozenset((name, other)) for other in others}

    def _share(self, batch: Batch, d: int, columns: Mapping[str, Tensor | Ragged]) -> Share:
        plan, extra = batch.sequences[d], batch.samples.extra
        rows = torch.cat(plan).numpy()
        missing: dict[bytes, tuple[NDArray[np.int64], list[str]]] = {}
        for name in columns:
            held = self._rows[d][name]
            new = rows[~held[rows]]
            held[new] = True
            if len(new):
                missing.setdefault(new.tobytes(), (new, []))[1].append(name)
        pieces = [_as_int32(rows), _as_int32(np.array([len(ids) for ids in plan]))]
        empty = any(not len(ids) for ids in plan)
        own, kept = batch.samples.columns, {*KEPT, *extra}
        spare = [n for n in columns if empty and (n in kept or own[n].dim() > 1)]
        pieces += [part for name in spare for part in _spare(columns[name], kept=name in kept, count=batch.spare)]
        blocks = []
        for new, names in sorted(missing.values(), key=lambda block: "mask" not in block[1]):  # others are cut by it
            forms, more = self._block(new, names)
            blocks.append(forms)
            pieces += more
        ragged = [name for name, column in extra.items() if isinstance(column, Ragged)]
        head = {"step": self.step, "columns": list(columns), "spare": spare, "ragged": ragged, "blocks": blocks}
        return encode_rows(head, pieces)

    def _block(self, new: NDArray[np.int64], names: Sequence[str]) -> tuple[dict[str, tuple[Form, str]], list[Pieces]]:
        """Returns the form of each column of the ``new`` rows, and what is sent: their numbers, lengths and columns."""
        forms: dict[str, tuple[Form, str]] = {}
        pieces = [_as_int32(new), _as_int32(self._columns[names[0]].rows.lengths[new])]
        for name in names:
            alike = next((other for other in forms if frozenset((name, other)) in self._alike), None)
            if alike is not None:
                forms[name] = ("copy", alike)
                continue
            form, of_rows = self._columns[name].sent(new, with_ids="input_ids" in forms)
            forms[name] = (form, "")
            pieces += of_rows
        return forms, pieces


class _Rows:
    """The places of a step's rows among its positions, and their masked-in positions."""

    def __init__(self, samples: Samples) -> None:
        self.mask = samples.mask.numpy()
        self.bounds = samples.cu_seqlens.numpy()
        self.lengths = np.diff(self.bounds)
        self.tokens = tokens_per_sequence(samples.mask, samples.cu_seqlens)
        last = self.bounds[1:] - 1
        self.some = np.where(self.mask[last] & (self.lengths > 0), last, self.bounds[:-1])
        """A masked-in position of each row, if it has one, else its first, [S]."""
        for row in np.flatnonzero((self.tokens > 0) & ~self.mask[self.some]).tolist():
            self.some[row] += int(self.mask[self.bounds[row] : self.bounds[row + 1]].argmax())
        marks = np.arange(_PART, max(self.bounds[-1], _PART), _PART)
        cuts = sorted({0, len(self.lengths), *np.searchsorted(self.bounds, marks).tolist()})
        self.parts = [(slice(a, b), slice(self.bounds[a], self.bounds[b])) for a, b in pairwise(cuts)]
        """Runs of rows, and their positions."""


class _Column:
    """A column of all rows, and the shortest form that gives it back to the bit."""

    def __init__(self, name: str, tensor: Tensor | Ragged, rows: _Rows, samples: Samples) -> None:
        self.tensor, self.rows = tensor, rows
        self.form: Form = "whole"
        if isinstance(tensor, Ragged):
            self._numbers, self.form = tensor.counts.numpy(), "ragged"
            before = np.concatenate(([0], self._numbers.cumsum(dtype=np.int64)))[rows.bounds]
            self._runs, self._bounds = _narrowed(tensor.values.contiguous().numpy()), before.tolist()
            return
        self._numbers = tensor.contiguous().numpy()
        if name == "targets" and _shifted(samples.input_ids.numpy(), self._numbers, rows):
            self.form = "last"
        elif self._numbers.dtype == np.bool_:
            self.form = "bits"
        elif self._numbers.dtype == np.float32:
            self.form = _form(self._numbers, rows)
        bounds, of_runs = rows.bounds, self._numbers
        if self.form == "masked":
            of_runs, bounds = of_runs[rows.mask], np.concatenate(([0], rows.tokens.cumsum()))
        self._runs, self._bounds = _narrowed(of_runs), bounds.tolist()

    def sent(self, rows: NDArray[np.int64], *, with_ids: bool) -> tuple[Form, list[Pieces]]:
        """Returns the form, and what is sent of the ``rows``; ``with_ids``: their inputs are sent, too."""
        if self.form in ("trained", "spread"):
            return self.form, [_whole(self._numbers[self.rows.some[rows]])]
        if self.form == "last" and with_ids:
            return self.form, [_whole(self._numbers[self.rows.bounds[rows + 1] - 1])]
        array, dtype = self._runs
        runs = [array[self._bounds[row] : self._bounds[row + 1]] for row in rows.tolist()]
        if self.form == "bits":
            return self.form, [_whole(np.packbits(np.concatenate(runs)))]
        sent: Pieces = (runs, dtype, (sum(map(len, runs)), *array.shape[1:]))
        if self.form == "ragged":
            bounds = self.rows.bounds
            counts = [self._numbers[bounds[row] : bounds[row + 1]] for row in rows.tolist()]
            return self.form, [(counts, self._numbers.dtype, (sum(map(len, counts)),)), sent]
        return "whole" if self.form == "last" else self.form, [sent]


def _shifted(ids: NDArray[np.int64], targets: NDArray[np.int64], rows: _Rows) -> bool:
    """True if all targets but the last of each row are the next inputs."""
    for of_part, places in rows.parts:
        alike = ids[places][1:] == targets[places][:-1]
        alike[rows.bounds[of_part][1:] - 1 - places.start] = True
        if not alike.all():
            return False
    return True


def _form(column: NDArray[np.float32], rows: _Rows) -> Form:
    bits, of_rows = column.view(np.int32), column[rows.some]
    left: list[Form] = ["trained", "spread", "masked"] if column.ndim == 1 else ["masked"]
    for of_part, places in rows.parts:
        part, mask = bits[places], rows.mask[places]
        everywhere = torch.from_numpy(np.repeat(of_rows[of_part], rows.lengths[of_part], axis=0))
        holds = {
            "trained": lambda: _equal(everywhere * torch.from_numpy(mask), part),  # noqa: B023  called at once
            "spread": lambda: _equal(everywhere, part),  # noqa: B023
            "masked": lambda: not part[~mask].any(),  # noqa: B023
        }
        left = [form for form in left if holds[form]()]
        if not left:
            return "whole"
    return left[0]


def _same(one: Tensor | Ragged, other: Tensor | Ragged) -> bool:
    """True if they are equal to the bit: -0.0 is not 0.0."""
    if isinstance(one, Ragged) or isinstance(other, Ragged):
        if not (isinstance(one, Ragged) and isinstance(other, Ragged)):
            return False
        return _same(one.counts, other.counts) and _same(one.values, other.values)
    return one is other or (one.dtype == other.dtype and one.shape == other.shape and _equal(one, other.numpy()))


def _equal(one: Tensor, other: NDArray[Any]) -> bool:
    """True if two columns of one dtype and shape are equal to the bit."""
    theirs = torch.from_numpy(other)
    return (
        torch.equal(one.view(torch.int32), theirs.view(torch.int32))
        if one.dtype == torch.float32
        else torch.equal(one, theirs)
    )


def _narrowed(numbers: NDArray[Any]) -> tuple[NDArray[Any], np.dtype[Any]]:
    """Returns the numbers, and the dtype in which they are sent: tokens as int32 if they fit, else their own."""
    if numbers.dtype != np.int64 or (len(numbers) and (numbers.min() < -(2**31) or numbers.max() >= 2**31)):
        return numbers, numbers.dtype
    return numbers, np.dtype(np.int32)


def _spare(column: Tensor | Ragged, *, kept: bool, count: int) -> list[Pieces]:
    """Returns what `MicroBatches` has for a column after no sequence: the first positions, ``kept``, or zeros."""
    first = column[:count]
    if isinstance(first, Ragged):
        return [_whole(first.counts.numpy()), _whole(first.values.numpy())]
    return [_whole((first if kept else torch.zeros_like(first)).numpy())]


def _whole(array: NDArray[Any]) -> Pieces:
    numbers, dtype = _narrowed(array)
    return [numbers], dtype, numbers.shape


def _as_int32(array: NDArray[np.int64]) -> Pieces:
    return [array], np.dtype(np.int32), array.shape
