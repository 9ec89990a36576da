"""Files of rows, as tests of data write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def written(path: Path, rows: Iterable[Mapping[str, Any]], group: int = 7) -> Path:
    """The .jsonl or .parquet file with these rows, in row groups of ``group``."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=group)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
