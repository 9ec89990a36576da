"""TransformerEngine's Adam (2.11) with its moving mean of gradients in float8 e4m3, one scale a tensor.

Three things are other than there. A scale is a power of two, so that what a checkpoint holds rounds to itself, and a
tensor of zeros has one: its own is 1 / 0 there, and the mean NaN. Subnormal numbers are written as 0: rounded to the
nearest, they would never decay. And there is no transposed copy, which nothing reads, but takes as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_LARGEST = 448.0  # of e4m3
_LEAST_SCALE = 2.0**-126  # whose reciprocal is a float32
_MANTISSA, _EXPONENT = 0x7FFFFF, 0x7F800000  # bits of a float32
_EXPONENT_OF_FLOAT8 = 0x78


def keep_float8(adam: Any) -> None:
    """Have a FusedAdam keep and round state in float8 as above."""
    initialize, apply = adam._initialize_state, adam._apply_scale

    def initialize_state(parameter: Tensor, name: str, *arguments: Any, **named: Any) -> None:
        initialize(parameter, name, *arguments, **named)
        held = adam.state[parameter][name]
        if _is_float8(held):
            held._quantizer.set_usage(columnwise=False)
            held.update_usage(columnwise_usage=False)

    def apply_scale(name: str, values: Tensor, held: Any, scale: Tensor) -> None:
        if not _is_float8(held):
            apply(name, values, held, scale)
            return
        scale.copy_(scale_of(values))
        held._quantizer.scale.copy_(1 / scale)
        held.quantize_(values)
        held._data.masked_fill_(held._data & _EXPONENT_OF_FLOAT8 == 0, 0)

    adam._initialize_state, adam._apply_scale = initialize_state, apply_scale


def scale_of(values: Tensor) -> Tensor:
    """The least power of two [1] by which float32 ``values`` are divided to be at most 448, and at least 2^-126."""
    least, most = torch.aminmax(values)
    exact = (torch.maximum(-least, most) / _LARGEST).reshape(1)
    above = (exact.view(torch.int32) + _MANTISSA) & _EXPONENT
    return above.view(torch.float32).clamp(min=_LEAST_SCALE)


def tensors_in(held: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of a state: itself, or the numbers and the scale of one in float8."""
    yield from (held._data, held._scale_inv) if _is_float8(held) else (held,)  # type: ignore[attr-defined]


def as_float32(held: Any, values: Callable[[Tensor], Tensor]) -> Tensor:
    """A state's numbers in float32. ``values`` gives the tensor with the values of one that holds none now."""
    if not _is_float8(held):
        return values(held).float()
    numbers = values(held._data).view(torch.float8_e4m3fn).float()
    return numbers * values(held._scale_inv).to(numbers.device)


def _is_float8(held: Tensor) -> bool:
    return hasattr(held, "_fp8_dtype")
