"""Columns: numpy arrays with one number for each token of a completion, and their form in a checkpoint's JSON.

They are read-only: rewards of the user's own see the arrays that are trained on.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class _Base64:
    """In JSON, a column is base64 of its little-endian numbers: exact, whatever they are."""

    dtype: str

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            self.decoded,
            serialization=core_schema.plain_serializer_function_ser_schema(self.encoded, when_used="json"),
        )

    def encoded(self, column: NDArray[Any]) -> str:
        return base64.b64encode(column.astype(self.dtype, copy=False).tobytes()).decode()

    def decoded(self, text: object) -> NDArray[Any]:
        """Raises ValueError, of which pydantic makes its own error, for what is no base64 of whole numbers."""
        if not isinstance(text, str):
            raise ValueError(f"it must be base64 of {self.dtype} numbers, not a {type(text).__name__}")
        import numpy as np

        return np.frombuffer(base64.b64decode(text, validate=True), self.dtype)


if TYPE_CHECKING:
    TokenIds = NDArray[np.int32]
    LogProbs = NDArray[np.float32]
else:  # a configuration imports this, and no numpy
    TokenIds = Annotated[Any, _Base64("<i4")]
    LogProbs = Annotated[Any, _Base64("<f4")]


def freeze(*columns: NDArray[Any]) -> None:
    """Make each of them read-only."""
    for column in columns:
        column.flags.writeable = False
