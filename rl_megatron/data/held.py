"""On a rank: columns of a step's rows, of which the controller sends what this does not hold yet (`sent`).

A share (`shares`) has the numbers of the rows that the pass takes, and columns of rows. Each column goes to a
data-parallel rank once a step, in the shortest of the forms below that gives its numbers back to the bit. Letters: S
sequences (rows), T positions of those of one block, D data-parallel ranks, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.data.shares import Share, opened
from rl_megatron.errors import RLMegatronError
from rl_megatron.types import Samples

TO_SCORE = ("input_ids", "targets", "mask", "routes")  # columns that a pass without a loss reads
Form = Literal["whole", "bits", "last", "copy", "masked", "trained", "spread"]
"""How a column is sent: all its numbers; as bits; the last of each row, if the others are the next input; nothing, if
it is equal to another column; those at masked-in positions, if the others are 0; a number a row, times the mask; a
number a row."""

_SHOWN = 8  # rows in a message


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
        head, arrays = opened(share)
        whole = "is_cut" not in head
        if head["step"] != self._step:
            self.forget()
            self._step = head["step"]
        rows, counts, *arrays = arrays
        spare = {name: torch.from_numpy(arrays.pop(0)) for name in head["spare"]}
        if whole and "routes" in spare:
            spare["routes"] = _of_layers(spare["routes"], layers)
        for forms in head["blocks"]:
            new, lengths, *arrays = arrays
            found = self._decoded(forms, arrays, new, torch.from_numpy(lengths).long())
            for name, column in found.items():
                column = _of_layers(column, layers) if whole and name == "routes" else column
                if column.untyped_storage().nbytes() > 2 * column.nbytes:  # else it would keep others' in memory
                    column = column.clone()
                self._rows.setdefault(name, {}).update(zip(new.tolist(), column.split(lengths.tolist()), strict=True))
        cut = np.split(rows, np.cumsum(counts)[:-1])
        return tuple(
            self._micro_batch(ids.tolist(), head["columns"]) if len(ids) else _empty(spare, head) for ids in cut
        )

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
    if "turn_of" in columns:
        rest["turn_of"] = columns["turn_of"].int()
    return Samples(**{**columns, **rest, "input_ids": ids, "targets": targets}, cu_seqlens=cu_seqlens)


def _empty(spare: dict[str, Tensor], head: dict[str, Any]) -> Samples:
    """As `gathered` has it of the same samples."""
    length = len(spare["input_ids"])
    columns = {name: torch.zeros(length) for name in head["columns"]} | spare
    columns["mask"] = torch.zeros(length, dtype=torch.bool)
    return _samples(columns, torch.tensor([0, 1]))


def _of_layers(routes: Tensor, layers: Sequence[int]) -> Tensor:
    return routes if len(layers) == routes.shape[1] else routes[:, list(layers)]


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
        out = torch.zeros(total, *sent.shape[1:])
        out[mask] = sent
        return out
    if form in ("trained", "spread"):
        everywhere = torch.repeat_interleave(sent, lengths, output_size=total)
        return everywhere if form == "spread" or mask is None else everywhere * mask
    return sent
