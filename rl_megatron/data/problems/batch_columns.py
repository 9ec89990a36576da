"""Columns of a record batch that was read of a parquet file, by the names of fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rl_megatron.data.problems.records import bytes_field, has_bytes, null_field, shortened, values_of


def column_at(batch: Any, name: str) -> Any:
    """The column of a field; ``a.b``: field b of the struct in a, unless a column has that whole name."""
    import pyarrow.compute as pc

    first, *inner = [name] if name in batch.schema.names else name.split(".")
    column = batch.column(first)
    return pc.struct_field(column, inner) if inner else column


def unread_rows(batch: Any, names: Sequence[str], key: str) -> Iterator[tuple[int, str]]:
    """The rows of a batch, by their numbers in it, of which a field is null or no UTF-8, and what is wrong; ``key``:
    the config key that has a teacher read the fields."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for name in names:
        column = column_at(batch, name)
        is_null = pc.is_null(column)
        if pa.types.is_floating(column.type):
            is_null = pc.invert(pc.fill_null(pc.is_finite(column), False))
        yield from ((row, null_field(name, key)) for row in np.flatnonzero(is_null).tolist())
        if "binary" in str(column.type):
            bad = [row for row, value in enumerate(values_of(column)) if has_bytes(value)]
            yield from ((row, f"{bytes_field(name)}, for {key}") for row in bad)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            for row in range(len(column)):
                try:
                    column.slice(row, 1).validate(full=True)
                except pa.ArrowInvalid as error:
                    yield row, f"field {name!r} cannot be read: {shortened(str(error))}, for {key}"


def is_text(kind: Any) -> bool:
    """True if an Arrow type, or the types of a struct's fields (`kinds_of`), is of text or bytes."""
    import pyarrow as pa

    if isinstance(kind, dict):  # a struct's fields
        return False
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    of = pa.types
    is_bytes = (
        of.is_binary(kind) or of.is_large_binary(kind) or of.is_fixed_size_binary(kind) or of.is_binary_view(kind)
    )
    return bool(is_bytes or of.is_string(kind) or of.is_large_string(kind) or of.is_string_view(kind))
