"""Weights that follow others: their moving average, in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_HALF = 1 << 15  # half a unit in a bfloat16 number's last place, in a float32 number's bits


class MovingAverage:
    """A moving average of a model's weights, in 4 bytes a parameter.

    Where the model has bfloat16, the average is a bfloat16 tensor, which passes use, and an int16 tensor. That is
    added to its bits as the lower half of a float32 number's.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        """Values are undefined until `tensors` are written and `restart` is called. ``like``: of float32 or
        bfloat16."""
        self.tensors = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        """The average in the model's dtypes."""
        self.rest = {
            name: torch.zeros_like(tensor, dtype=torch.int16)
            for name, tensor in like.items()
            if tensor.dtype == torch.bfloat16
        }
        """The lower halves, of tensors in bfloat16."""

    def restart(self) -> None:
        """Begins the average with what was written into `tensors`."""
        for rest in self.rest.values():
            rest.zero_()

    @torch.no_grad()
    def move(self, leaders: Mapping[str, Tensor], rate: float) -> None:
        """Makes the average (1 - ``rate``) of itself and ``rate`` of the ``leaders``, in float32."""
        for name, held in self.tensors.items():
            rest = self.rest.get(name)
            if rest is None:
                held.lerp_(leaders[name], rate)
                continue
            upper = held.view(torch.int16)
            bits = (upper.to(torch.int32) << 16) + rest
            bits = bits.view(torch.float32).lerp_(leaders[name].float(), rate).view(torch.int32)
            upper.copy_((bits + _HALF) >> 16)
            rest.copy_(bits - (upper.to(torch.int32) << 16))
