"""What an observer of a rank's model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel

from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Metric


class Observer(Protocol):
    """Sees one model of a rank at work. All ranks make it, and call its methods together."""

    def __init__(self, models: Sequence[GPTModel], shape: ModelShape, device: torch.device) -> None:
        """``models`` are this rank's pipeline chunks; hooks may be put on them."""
        ...

    def unseen(self) -> AbstractContextManager[None]:
        """Passes within are no part of a step: they score, or look for what broke a gradient."""
        ...

    def read(self) -> Mapping[str, Metric[float]]:
        """What was seen since the last call, over all ranks. An installed package's names begin with ``observer/``."""
        ...
