"""In the controller: the columns of a step's rows that each data-parallel rank does not hold yet, as bytes.

How a column is sent (`held.Form`) is found once for all its rows, in parts that stay in the processor's cache; a share
is then copied row by row into the memory that is sent. Letters as in `held`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.data.held import TO_SCORE, Form
from rl_megatron.data.samples import tokens_of
from rl_megatron.data.shares import Pieces, Share, share_of
from rl_megatron.types import Batch, Samples

_PART = 2**18  # positions


class Sent:
    """Which rows of which columns each data-parallel rank of a group of processes holds.

    A column is known by its tensor, so that must not change after it was sent. Steps are numbered on from ``after``.
    """

    def __init__(self, dp: int, *, after: int = 0) -> None:
        self.step = after
        self._tokens: Tensor | None = None
        self._rows: list[dict[str, NDArray[np.bool_]]] = [{} for _ in range(dp)]
        self._columns: dict[str, _Column] = {}
        self._alike: set[frozenset[str]] = set()  # pairs of columns that are equal

    @property
    def anything(self) -> bool:
        """Whether ranks hold a step's rows."""
        return self._tokens is not None

    def forget(self) -> None:
        """Count on nothing that ranks hold."""
        self._tokens, self._columns, self._alike, self._rows = None, {}, set(), [{} for _ in self._rows]

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
        self._look_at(samples, columns)
        return [self._share(batch, d, columns) for d in range(len(self._rows))]

    def _look_at(self, samples: Samples, columns: dict[str, Tensor]) -> None:
        """Find how columns are sent that are not those of the pass before; ranks hold no row of one that differs."""
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

    def _share(self, batch: Batch, d: int, columns: dict[str, Tensor]) -> Share:
        plan = batch.sequences[d]
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
        spare = [n for n in columns if empty and n != "mask" and (n in TO_SCORE or columns[n].dim() > 1)]
        pieces += [_whole(_spare(columns[name], name, batch.spare)) for name in spare]
        blocks = []
        for new, names in sorted(missing.values(), key=lambda block: "mask" not in block[1]):  # others are cut by it
            forms, more = self._block(new, names)
            blocks.append(forms)
            pieces += more
        return share_of({"step": self.step, "columns": list(columns), "spare": spare, "blocks": blocks}, pieces)

    def _block(self, new: NDArray[np.int64], names: Sequence[str]) -> tuple[dict[str, tuple[Form, str]], list[Pieces]]:
        """The form of each column of the ``new`` rows, and what is sent: their numbers, lengths and columns."""
        forms: dict[str, tuple[Form, str]] = {}
        pieces = [_as_int32(new), _as_int32(self._columns[names[0]].rows.lengths[new])]
        for name in names:
            alike = next((other for other in forms if frozenset((name, other)) in self._alike), None)
            if alike is not None:
                forms[name] = ("copy", alike)
                continue
            form, of_rows = self._columns[name].sent(new, with_ids="input_ids" in forms)
            forms[name] = (form, "")
            pieces.append(of_rows)
        return forms, pieces


class _Rows:
    """Where the rows of a step's samples are, and their masked-in positions."""

    def __init__(self, samples: Samples) -> None:
        self.mask = samples.mask.numpy()
        self.bounds = samples.cu_seqlens.numpy()
        self.lengths = np.diff(self.bounds)
        self.tokens = tokens_of(samples.mask, samples.cu_seqlens)
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

    def __init__(self, name: str, tensor: Tensor, rows: _Rows, samples: Samples) -> None:
        self.tensor, self.rows, self._numbers = tensor, rows, tensor.contiguous().numpy()
        self.form: Form = "whole"
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

    def sent(self, rows: NDArray[np.int64], *, with_ids: bool) -> tuple[Form, Pieces]:
        """Of the ``rows``; ``with_ids``: their inputs are sent beside it."""
        if self.form in ("trained", "spread"):
            return self.form, _whole(self._numbers[self.rows.some[rows]])
        if self.form == "last" and with_ids:
            return self.form, _whole(self._numbers[self.rows.bounds[rows + 1] - 1])
        array, dtype = self._runs
        runs = [array[self._bounds[row] : self._bounds[row + 1]] for row in rows.tolist()]
        if self.form == "bits":
            return self.form, _whole(np.packbits(np.concatenate(runs)))
        shape = (sum(map(len, runs)), *array.shape[1:])
        return "whole" if self.form == "last" else self.form, (runs, dtype, shape)


def _shifted(ids: NDArray[np.int64], targets: NDArray[np.int64], rows: _Rows) -> bool:
    """Whether all targets but the last of each row are the next inputs."""
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


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal to the bit: -0.0 is not 0.0."""
    return one is other or (one.dtype == other.dtype and one.shape == other.shape and _equal(one, other.numpy()))


def _equal(one: Tensor, other: NDArray[Any]) -> bool:
    """To the bit, of one dtype and shape."""
    theirs = torch.from_numpy(other)
    return (
        torch.equal(one.view(torch.int32), theirs.view(torch.int32))
        if one.dtype == torch.float32
        else torch.equal(one, theirs)
    )


def _narrowed(numbers: NDArray[Any]) -> tuple[NDArray[Any], np.dtype[Any]]:
    """The dtype in which they are sent: tokens as int32 if they fit, anything else as it is."""
    if numbers.dtype != np.int64 or (len(numbers) and (numbers.min() < -(2**31) or numbers.max() >= 2**31)):
        return numbers, numbers.dtype
    return numbers, np.dtype(np.int32)


def _spare(column: Tensor, name: str, count: int) -> NDArray[Any]:
    """As `gathered` has it after no sequence."""
    first = column[:count]
    return (first if name in TO_SCORE else torch.zeros_like(first)).numpy()


def _whole(array: NDArray[Any]) -> Pieces:
    numbers, dtype = _narrowed(array)
    return [numbers], dtype, numbers.shape


def _as_int32(array: NDArray[np.int64]) -> Pieces:
    return [array], np.dtype(np.int32), array.shape
