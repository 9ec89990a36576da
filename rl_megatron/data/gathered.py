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

from rl_megatron.data.samples import select
from rl_megatron.types import Batch, Samples


class MicroBatches(Sequence[Sequence[Samples]]):
    """Micro-batches [D][M], each gathered from the samples when it is read; ``spare`` is as in `Batch`."""

    def __init__(self, samples: Samples, sequences: Sequence[Sequence[Tensor]], spare: int) -> None:
        self._rows = [_Row(samples, row, spare) for row in sequences]

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, d: Any) -> Any:
        return self._rows[d]


def without_routes(batch: Batch) -> Batch:
    """The batch without routes, for models that have routers of their own."""
    if batch.samples.routes is None:
        return batch
    samples = replace(batch.samples, routes=None)
    return replace(batch, samples=samples, micro_batches=MicroBatches(samples, batch.sequences, batch.spare))


def computed_lengths(batch: Batch) -> list[list[NDArray[np.int64]]]:
    """Positions of every sequence of each micro-batch [D][M] that ranks compute, those without sequences included."""
    lengths = batch.samples.cu_seqlens.diff().numpy() + batch.last_tokens
    return [[lengths[ids.numpy()] if len(ids) else np.ones(1, np.int64) for ids in row] for row in batch.sequences]


class _Row(Sequence[Samples]):
    """The micro-batches [M] of one data-parallel rank."""

    def __init__(self, samples: Samples, sequences: Sequence[Tensor], spare: int) -> None:
        self._samples, self._sequences, self._spare = samples, sequences, spare

    @override
    def __len__(self) -> int:
        return len(self._sequences)

    @override
    def __getitem__(self, m: Any) -> Any:
        if isinstance(m, slice):
            return _Row(self._samples, self._sequences[m], self._spare)
        ids = self._sequences[m]
        return select(self._samples, ids) if len(ids) else _placeholder(self._samples, self._spare)


def _placeholder(samples: Samples, spare: int) -> Samples:
    """A sequence of one position with nothing masked in, for a rank without work to join the collectives.

    Behind it are up to ``spare`` - 1 positions that no sequence has, so that padding is not one token many times, which
    would all go to the same experts.
    """
    columns = {name: torch.zeros_like(column[:spare]) for name, column in samples.columns.items()}
    kept = {n: c[:spare].clone() for n, c in samples.columns.items() if n in ("input_ids", "targets", "routes")}
    return Samples(**(columns | kept), cu_seqlens=torch.tensor([0, 1]))
