"""Element types of stored tensors, without torch: elements are moved as unsigned integers of the same width."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger]
"""A stored tensor's elements, as unsigned integers of their width."""


class DType(StrEnum):
    """The name is safetensors'; the value is torch's, as in config.json and on command lines."""

    F64 = "float64"
    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"
    F8_E4M3 = "float8_e4m3fn"
    F8_E5M2 = "float8_e5m2"
    F8_E8M0 = "float8_e8m0fnu"
    I64 = "int64"
    I32 = "int32"
    I16 = "int16"
    I8 = "int8"
    U8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZES.get(self.name[-2:], 1)

    @property
    def bits(self) -> np.dtype[np.unsignedinteger]:
        """The unsigned integer type of that width."""
        return np.dtype(f"u{self.itemsize}")

    def all_numbers(self, values: Bits) -> bool:
        """True if none of ``values`` is NaN or infinite; several times faster than `not_numbers`.

        Read as signed integers, and with the sign bit as unsigned ones, NaN and infinity are above all numbers.
        """
        mask = _EXPONENTS.get(self)
        if mask is None or not values.size:
            return True
        sign = 1 << (8 * values.itemsize - 1)
        positive = int(values.view(f"i{values.itemsize}").max()) >= (mask & ~sign) if not mask & sign else False
        return not positive and int(values.max()) < mask | sign

    def not_numbers(self, values: Bits) -> int:
        """Returns how many of ``values`` are NaN or infinite; integers never are."""
        mask = _EXPONENTS.get(self)
        return 0 if mask is None else int(np.count_nonzero((values & values.dtype.type(mask)) == mask))


def widest(dtypes: Collection[DType]) -> DType:
    """The dtype that holds the numbers of all these float dtypes exactly: of float16 and bfloat16, float32."""
    if set(dtypes) == {DType.F16, DType.BF16}:
        return DType.F32
    return max(dtypes, key=lambda dtype: dtype.itemsize)


_ITEMSIZES: Mapping[str, int] = {"64": 8, "32": 4, "16": 2}
_EXPONENTS: Mapping[DType, int] = {
    DType.F64: 0x7FF0_0000_0000_0000,
    DType.F32: 0x7F80_0000,
    DType.F16: 0x7C00,
    DType.BF16: 0x7F80,
    DType.F8_E4M3: 0x7F,  # no infinity, one NaN of either sign
    DType.F8_E5M2: 0x7C,
    DType.F8_E8M0: 0xFF,
}
"""The bits that are all set in NaN and infinity."""
