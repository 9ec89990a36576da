"""What the programs that try engines' own loaders say of a model. Imports torch alone, which each engine has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def changed(model: nn.Module, before: Mapping[str, Tensor]) -> set[str]:
    """The names of the parameters that a loader wrote since ``before``. Where none ever has there is a NaN, as under
    ``torch.use_deterministic_algorithms``."""
    now = dict(model.named_parameters())
    return {name for name in now if not torch.allclose(now[name], before[name], rtol=0, atol=0, equal_nan=True)}


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Of all numbers, in order of size."""
    numbers = torch.cat([tensor.detach().float().flatten() for tensor in tensors]).sort().values
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
