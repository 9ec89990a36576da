"""Reads JSON of files and answers that anybody may have written, finds the fields of its objects, and writes texts that
anybody may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any


def parse(text: str | bytes | bytearray) -> Any:
    """The value. Raises ValueError for what is no JSON, or is nested too deeply, for which json has RecursionError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Of a row's field; ``a.b`` is field b of the object in a, unless the row has a field of that whole name. A field
    of null is null. Raises KeyError."""
    if name in row:
        return row[name]
    inner: Any = row
    for part in name.split("."):
        if inner is None:
            return None
        if not isinstance(inner, Mapping):
            raise KeyError(name)
        inner = inner[part]
    return inner


@dataclass(frozen=True, slots=True)
class _Escaped:
    """The pydantic schema of a text whose halves of surrogate pairs, which no UTF-8 has, are written as ``\\ud83d``."""

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.str_schema(
            serialization=core_schema.plain_serializer_function_ser_schema(_escaped, when_used="json")
        )


ForeignText = Annotated[str, _Escaped()]
"""What a user's code, an engine or a model said, as it is: an error's text may quote half of an emoji."""


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
