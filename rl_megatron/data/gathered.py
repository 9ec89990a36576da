"""Gathers a batch's micro-batches from its samples, in this process, and what may be known of them without that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from rl_megatron.data.samples import select, with_last_tokens
from rl_megatron.types import Batch, Samples


class MicroBatches(Sequence[Sequence[Samples]]):
    """Micro-batches [D][M], each gathered from the samples when it is read; the rest is as in `Batch`."""

    def __init__(
        self, samples: Samples, sequences: Sequence[Sequence[Tensor]], spare: int, *, last_tokens: bool = False
    ) -> None:
        self._rows = [_Row(samples, row, spare, last_tokens) for row in sequences]

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, d: Any) -> Any:
        return self._rows[d]


def without_routes(batch: Batch) -> Batch:
    """The batch without routes, for models that have routers of their own."""
    return batch if batch.samples.routes is None else seen_by(batch, replays=False, last_tokens=batch.last_tokens)


def seen_by(batch: Batch, *, replays: bool, last_tokens: bool) -> Batch:
    """The batch as a pass takes it; the arguments are those of `interfaces.Pass`."""
    samples = batch.samples if replays else replace(batch.samples, routes=None)
    rows = MicroBatches(samples, batch.sequences, batch.spare, last_tokens=last_tokens)
    return replace(batch, samples=samples, micro_batches=rows, last_tokens=last_tokens)


def as_seen(micro_batch: Samples, *, replays: bool, last_tokens: bool) -> Samples:
    """`seen_by` for one micro-batch; one with positions to pad with stays as it is."""
    seen = micro_batch if replays else replace(micro_batch, routes=None)
    padded = int(seen.cu_seqlens[-1]) < len(seen.input_ids)
    return with_last_tokens(seen)[0] if last_tokens and not padded else seen


def computed_lengths(batch: Batch) -> list[list[NDArray[np.int64]]]:
    """Positions of every sequence of each micro-batch [D][M] that ranks compute, those without sequences included."""
    lengths = batch.samples.cu_seqlens.diff().numpy() + batch.last_tokens
    return [[lengths[ids.numpy()] if len(ids) else np.ones(1, np.int64) for ids in row] for row in batch.sequences]


class _Row(Sequence[Samples]):
    """The micro-batches [M] of one data-parallel rank."""

    def __init__(self, samples: Samples, sequences: Sequence[Tensor], spare: int, last_tokens: bool) -> None:
        self._samples, self._sequences, self._spare, self._last_tokens = samples, sequences, spare, last_tokens

    @override
    def __len__(self) -> int:
        return len(self._sequences)

    @override
    def __getitem__(self, m: Any) -> Any:
        if isinstance(m, slice):
            return _Row(self._samples, self._sequences[m], self._spare, self._last_tokens)
        ids = self._sequences[m]
        found = select(self._samples, ids) if len(ids) else _placeholder(self._samples, self._spare)
        return as_seen(found, replays=True, last_tokens=self._last_tokens)


def _placeholder(samples: Samples, spare: int) -> Samples:
    """A sequence of one position with nothing masked in, for a rank without work to join the collectives.

    After it are up to ``spare`` - 1 positions that no sequence has, so that padding is not one token many times, which
    would all go to the same experts.
    """
    columns = {name: torch.zeros_like(column[:spare]) for name, column in samples.columns.items()}
    kept = {n: c[:spare].clone() for n, c in samples.columns.items() if n in ("input_ids", "targets", "routes")}
    return Samples(**(columns | kept), cu_seqlens=torch.tensor([0, 1]))
