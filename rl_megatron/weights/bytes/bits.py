"""Views stored elements as torch tensors, and tensors as stored elements, without a copy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_megatron.errors import WeightError
from rl_megatron.weights.bytes.dtypes import Bits, DType


def stored_dtype(dtype: torch.dtype) -> DType:
    """The stored type of a torch dtype. Raises ValueError if there is none."""
    return DType(str(dtype).removeprefix("torch."))


def to_tensor(bits: Bits, dtype: DType) -> Tensor:
    """A tensor view of stored elements; shares their memory."""
    signed = torch.from_numpy(bits.view(f"i{dtype.itemsize}"))
    return signed.view(getattr(torch, dtype))


def to_bits(tensor: Tensor) -> Bits:
    """The stored elements of a tensor; shares the memory of a contiguous one."""
    contiguous = tensor.contiguous()
    width = contiguous.element_size()
    bits: Bits = contiguous.view(getattr(torch, f"int{8 * width}")).numpy().view(f"u{width}")
    return bits


def all_numbers(tensor: Tensor) -> bool:
    """True if no element is NaN or infinite, in one pass over them."""
    return not tensor.numel() or all(math.isfinite(end.item()) for end in tensor.aminmax())


def cast_checked(name: str, values: Tensor, dtype: DType) -> Bits:
    """The values of the tensor ``name`` in ``dtype``. Raises like `raise_overflow`."""
    bits = to_bits(values.to(getattr(torch, dtype)))
    if not dtype.all_numbers(bits):
        raise_overflow(name, values, getattr(torch, dtype))
    return bits


def raise_overflow(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Raises WeightError where ``values``, which are not finite in ``dtype``, are finite themselves."""
    if all_numbers(values):
        raise WeightError(
            f"{name} holds a number of size {values.abs().max().item():g}, and {dtype} none above "
            f"{torch.finfo(dtype).max:g}; choose another dtype: bfloat16 and float32 hold numbers up to 3e38"
        )
