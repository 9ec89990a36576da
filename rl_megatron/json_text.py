"""Reads JSON of files and answers that anybody may have written."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes | bytearray) -> Any:
    """The value. Raises ValueError for what is no JSON, or is nested too deeply, for which json has RecursionError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
