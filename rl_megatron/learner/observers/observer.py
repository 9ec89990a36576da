"""The protocol of an observer: it watches a rank's model and returns metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Metric


class Observer(Protocol):
    """Watches one model of a rank. Every rank makes one and calls its methods at the same points."""

    def __init__(self, models: Sequence[GPTModel], shape: ModelShape, device: torch.device) -> None:
        """``models`` are this rank's pipeline chunks; the observer may hook them."""
        ...

    def unseen(self) -> AbstractContextManager[None]:
        """Ignores the passes within, which are not part of a step: they score, or search for a bad micro-batch."""
        ...

    def read(self) -> Mapping[str, Metric[float]]:
        """Metrics since the last call, over all ranks. Names from an installed package begin with ``observer/``."""
        ...
