"""Inputs of a loss, from plain columns, and parts of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from rl_megatron.types import LossInputs


def local_sum(ids: Tensor, num: int) -> Callable[[Tensor], Tensor]:
    """The ``segment_sum`` of one process, which refuses what has a gradient."""

    def segment_sum(values: Tensor) -> Tensor:
        assert not values.requires_grad, "segment_sum is given detached tensors only"
        return values.new_zeros(num).index_add_(0, ids, values)

    return segment_sum


def loss_inputs(
    lengths: Sequence[int],
    mask: Tensor | Sequence[bool] | None = None,
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    **columns: Tensor,
) -> LossInputs:
    """Sequences of ``lengths``, one after the other, and if not said otherwise all that there are.

    Without ``mask`` [T] all tokens are trained on; of the columns that a loss always has, those not given are zeros.
    """
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    zeros = torch.zeros_like(next(iter(columns.values()), torch.zeros(len(ids))))
    always = ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "advantages")
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask, dtype=torch.bool)
    return LossInputs(
        **dict.fromkeys(always, zeros) | columns,
        mask=kept,
        segment_ids=ids,
        segment_sum=local_sum(ids, len(lengths)),
        num_tokens=int(kept.sum()) if num_tokens is None else num_tokens,
        num_sequences=len(lengths) if num_sequences is None else num_sequences,
    )


def part_of(x: LossInputs, first: int, stop: int) -> LossInputs:
    """The sequences from ``first`` to before ``stop``, under the denominators of all."""
    inside = (x.segment_ids >= first) & (x.segment_ids < stop)
    tensors = {one.name: getattr(x, one.name) for one in fields(x) if isinstance(getattr(x, one.name), Tensor)}
    columns = {name: column[inside] for name, column in tensors.items()}
    ids = columns.pop("segment_ids") - first
    return replace(x, **columns, segment_ids=ids, segment_sum=local_sum(ids, stop - first))
