"""Columns of a step's rows on the ranks: the controller sends each data-parallel rank what that does not hold yet.

A share is one array of bytes, without a pickle: a header, the numbers of the rows that the pass takes, and columns of
rows. Each column goes to a data-parallel rank once a step, in the shortest of the forms below that gives its numbers
back to the bit. Letters: S sequences (rows), T positions of those of one block, D data-parallel ranks, M micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.data.samples import rows_of, with_last_tokens
from rl_megatron.errors import RLMegatronError
from rl_megatron.types import Batch, Samples

TO_SCORE = ("input_ids", "targets", "mask", "routes")  # columns that a pass without a loss reads
Share: TypeAlias = NDArray[np.uint8]
"""What one data-parallel rank is sent for one pass."""

Form = Literal["whole", "bits", "last", "copy", "masked", "trained", "spread"]
"""How a column is sent: all its numbers; as bits; the last of each row, if the others are the next input; nothing, if
it is equal to another column; those at masked-in positions, if the others are 0; a number a row, times the mask; a
number a row."""

_ALIGNMENT = 8
_SHOWN = 8  # rows in a message


class Sent:
    """In the controller: which rows of which columns each data-parallel rank of a group of processes holds.

    A column is known by its tensor, so that must not change after it was sent. Steps are numbered on from ``after``.
    """

    def __init__(self, dp: int, *, after: int = 0) -> None:
        self.step = after
        self._tokens: Tensor | None = None
        self._columns: dict[str, Tensor] = {}
        self._rows: list[dict[str, NDArray[np.bool_]]] = [{} for _ in range(dp)]

    @property
    def anything(self) -> bool:
        """Whether ranks hold a step's rows."""
        return self._tokens is not None

    def forget(self) -> None:
        """Count on nothing that ranks hold."""
        self._tokens, self._columns, self._rows = None, {}, [{} for _ in self._rows]

    def shares(self, batch: Batch, *, to_score: bool) -> list[Share]:
        """What each data-parallel rank [D] needs for a pass over its micro-batches; it holds that from now on.

        Another step begins with other ``batch.samples.input_ids``. A pass that is ``to_score`` has zeros for what a
        loss alone reads.
        """
        samples = batch.samples
        if samples.input_ids is not self._tokens:
            self.forget()
            self.step, self._tokens = self.step + 1, samples.input_ids
        columns = {n: c for n, c in samples.columns.items() if n in TO_SCORE or not to_score}
        for name, column in columns.items():
            known = self._columns.get(name)
            if known is not column and (known is None or not _same(known, column)):
                for held in self._rows:
                    held[name] = np.zeros(samples.num_sequences, np.bool_)
            self._columns[name] = column
        return [self._share(batch, d, columns) for d in range(len(self._rows))]

    def _share(self, batch: Batch, d: int, columns: dict[str, Tensor]) -> Share:
        samples, plan = batch.samples, batch.sequences[d]
        rows = torch.cat(plan).numpy()
        missing: dict[bytes, tuple[NDArray[np.int64], list[str]]] = {}
        for name in columns:
            held = self._rows[d][name]
            new = rows[~held[rows]]
            held[new] = True
            if len(new):
                missing.setdefault(new.tobytes(), (new, []))[1].append(name)
        arrays: list[NDArray[Any]] = [rows.astype(np.int32), np.array([len(ids) for ids in plan], np.int32)]
        empty = any(not len(ids) for ids in plan)
        spare = [name for name in TO_SCORE if empty and name in columns and name != "mask"]
        arrays += [_narrowed(columns[name][: batch.spare]).numpy() for name in spare]
        blocks = []
        for new, names in sorted(missing.values(), key=lambda block: "mask" not in block[1]):  # others are cut by it
            lengths = samples.cu_seqlens.diff()[torch.from_numpy(new)].numpy()
            forms, more = _encoded(samples, torch.from_numpy(new), {name: columns[name] for name in names})
            blocks.append(forms)
            arrays += [new.astype(np.int32), lengths.astype(np.int32), *more]
        head = {"step": self.step, "columns": list(columns), "spare": spare, "blocks": blocks}
        return _joined({**head, "last_tokens": batch.last_tokens}, arrays)


class HeldRows:
    """On a rank: the rows of a step that its data-parallel rank was sent."""

    def __init__(self) -> None:
        self._step = 0
        self._rows: dict[str, dict[int, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Of all columns of all rows."""
        return sum(row.nbytes for rows in self._rows.values() for row in rows.values())

    def forget(self) -> None:
        """Free the step's rows."""
        self._rows = {}

    def take(self, share: Share, layers: Sequence[int] = ()) -> tuple[Samples, ...]:
        """Keep what is new, and build the pass's micro-batches [M]; of routes those of this rank's MoE ``layers``.

        Raises RLMegatronError for rows that it was not sent.
        """
        head, arrays = _opened(share)
        if head["step"] != self._step:
            self.forget()
            self._step = head["step"]
        rows, counts, *arrays = arrays
        spare = {name: torch.from_numpy(arrays.pop(0)) for name in head["spare"]}
        if "routes" in spare:
            spare["routes"] = _of_layers(spare["routes"], layers)
        for forms in head["blocks"]:
            new, lengths, *arrays = arrays
            found = self._decoded(forms, arrays, new, torch.from_numpy(lengths).long())
            for name, column in found.items():
                column = _of_layers(column, layers) if name == "routes" else column
                if column.untyped_storage().nbytes() > 2 * column.nbytes:  # else it would keep others' in memory
                    column = column.clone()
                self._rows.setdefault(name, {}).update(zip(new.tolist(), column.split(lengths.tolist()), strict=True))
        cut = np.split(rows, np.cumsum(counts)[:-1])
        made = [self._micro_batch(ids.tolist(), head["columns"]) if len(ids) else _empty(spare, head) for ids in cut]
        if head["last_tokens"]:
            made = [with_last_tokens(m)[0] if len(ids) else m for m, ids in zip(made, cut, strict=True)]
        return tuple(made)

    def _decoded(
        self, forms: dict[str, tuple[Form, str]], arrays: list[NDArray[Any]], new: NDArray[np.int32], lengths: Tensor
    ) -> dict[str, Tensor]:
        """The columns of a block; takes its arrays off the list."""
        found: dict[str, Tensor] = {}
        for name, (form, other) in forms.items():
            if form == "copy":
                found[name] = found[other]
                continue
            sent = torch.from_numpy(arrays.pop(0))
            mask = found.get("mask")
            if mask is None and form in ("masked", "trained"):
                mask = torch.cat(self._pieces("mask", new.tolist()))
            found[name] = _decoded(form, sent, lengths, mask, found.get("input_ids"))
        return found

    def _micro_batch(self, rows: list[int], names: Sequence[str]) -> Samples:
        columns = {name: torch.cat(self._pieces(name, rows)) for name in names}
        bounds = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor([len(piece) for piece in self._pieces("input_ids", rows)]), 0, out=bounds[1:])
        return _samples(columns, bounds)

    def _pieces(self, name: str, rows: list[int]) -> list[Tensor]:
        held = self._rows.get(name, {})
        if lost := [row for row in rows if row not in held]:
            shown = f"{', '.join(map(str, lost[:_SHOWN]))}{', …' if len(lost) > _SHOWN else ''}"
            raise RLMegatronError(
                f"this rank is asked for {name!r} of rows {shown} of batch {self._step}, {len(lost)} in all, which it "
                f"was not sent; it holds those of {len(held)} rows. The controller counts on rows that are not here: "
                "resume from the last checkpoint"
            )
        return [held[row] for row in rows]


def _samples(columns: dict[str, Tensor], cu_seqlens: Tensor) -> Samples:
    """Samples with zeros for the columns that a loss needs and the pass has not."""
    ids, targets = columns["input_ids"].long(), columns["targets"].long()
    zeros = torch.zeros(len(ids))
    rest = {name: columns.get(name, zeros) for name in ("advantages", "rollout_logprobs", "old_logprobs")}
    return Samples(**{**columns, **rest, "input_ids": ids, "targets": targets}, cu_seqlens=cu_seqlens)


def _empty(spare: dict[str, Tensor], head: dict[str, Any]) -> Samples:
    """As `gathered` has it of the same samples."""
    length = len(spare["input_ids"])
    columns = {name: torch.zeros(length) for name in head["columns"]} | spare
    columns["mask"] = torch.zeros(length, dtype=torch.bool)
    if head["last_tokens"]:
        columns["targets"] = torch.zeros_like(columns["targets"])
    return _samples(columns, torch.tensor([0, 1]))


def _of_layers(routes: Tensor, layers: Sequence[int]) -> Tensor:
    return routes if len(layers) == routes.shape[1] else routes[:, list(layers)]


def _encoded(
    samples: Samples, rows: Tensor, columns: dict[str, Tensor]
) -> tuple[dict[str, tuple[Form, str]], list[NDArray[Any]]]:
    """The form of each column of the ``rows``, and the arrays that are sent."""
    positions, bounds = rows_of(samples.cu_seqlens, rows)
    lengths, mask = bounds.diff(), samples.mask.index_select(0, positions)
    some = torch.zeros(len(rows), dtype=torch.int64)  # a masked-in position of each row, if it has one
    places = mask.nonzero().squeeze(1)
    row = torch.repeat_interleave(torch.arange(len(rows)), lengths, output_size=len(positions))
    some[row[places]] = places
    first = torch.where(some > 0, some, bounds[:-1])
    taken: dict[str, Tensor] = {}
    forms: dict[str, tuple[Form, str]] = {}
    arrays = []
    for name, column in columns.items():
        part = taken[name] = column.index_select(0, positions)
        alike = next((other for other, its in taken.items() if other != name and _same(its, part)), None)
        if alike is not None:
            forms[name] = ("copy", alike)
            continue
        ids = taken.get("input_ids")
        tries: list[tuple[Form, Tensor]] = []
        if name == "targets" and ids is not None:
            tries = [("last", _narrowed(part[bounds[1:] - 1]))]
        elif part.dtype == torch.bool:
            tries = [("bits", torch.from_numpy(np.packbits(part.numpy())))]
        elif part.dtype == torch.float32:
            tries = [("trained", part[first]), ("spread", part[first]), ("masked", part[mask])]
        exact = ((form, sent) for form, sent in tries if _same(_decoded(form, sent, lengths, mask, ids), part))
        form, sent = next(exact, ("whole", _narrowed(part)))
        forms[name] = (form, "")
        arrays.append(sent.numpy())
    return forms, arrays


def _decoded(form: Form, sent: Tensor, lengths: Tensor, mask: Tensor | None, ids: Tensor | None) -> Tensor:
    """The column [T, …] of rows of ``lengths``; ``ids`` are their inputs, ``mask`` is theirs."""
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
        out = torch.zeros(total)
        out[mask] = sent
        return out
    if form in ("trained", "spread"):
        everywhere = torch.repeat_interleave(sent, lengths, output_size=total)
        return everywhere if form == "spread" or mask is None else everywhere * mask
    return sent


def _narrowed(column: Tensor) -> Tensor:
    """Tokens as int32 if they fit, anything else as it is."""
    if column.dtype != torch.int64 or (len(column) and int(column.abs().max()) >= 2**31):
        return column
    return column.int()


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal to the bit: -0.0 is not 0.0."""
    if one.dtype != other.dtype:
        return False
    bits = (x.view(torch.int32) if x.dtype == torch.float32 else x for x in (one, other))
    return torch.equal(*bits)


def _joined(head: dict[str, Any], arrays: list[NDArray[Any]]) -> Share:
    """Header and arrays in one array of bytes, each at a multiple of 8."""
    head = {**head, "arrays": [(array.dtype.str, array.shape) for array in arrays]}
    text = json.dumps(head).encode()
    parts = [np.array([len(text)], np.int64).view(np.uint8), np.frombuffer(text, np.uint8)]
    parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    out = np.zeros(sum(_aligned(len(part)) for part in parts), np.uint8)
    place = 0
    for part in parts:
        out[place : place + len(part)] = part
        place += _aligned(len(part))
    return out


def _opened(share: Share) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Header and arrays, which use the share's memory."""
    length = int(share[:_ALIGNMENT].view(np.int64)[0])
    head = json.loads(share[_ALIGNMENT : _ALIGNMENT + length].tobytes())
    place, arrays = _ALIGNMENT + _aligned(length), []
    for dtype, shape in head["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(share[place : place + size].view(dtype).reshape(shape))
        place += _aligned(size)
    return head, arrays


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
