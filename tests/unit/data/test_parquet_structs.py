"""Question and answer within objects of parquet files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rl_megatron.data.problems.parquet import ParquetRows
from rl_megatron.errors import DataError
from tests.unit.data.test_parquet import made, written


def test_columns_of_a_struct_are_read_and_compared_as_others(tmp_path: Path) -> None:
    """Question and answer within an object; null where the whole object is."""
    rows = [{**row, "answer": str(row["answer"])} for row in made(60)]
    within = [{"of": row, "level": row["level"]} for row in rows]
    plain, nested = written(tmp_path / "p" / "t.parquet", rows), written(tmp_path / "n" / "t.parquet", within)
    fields = {"plain": ("question", "answer"), "nested": ("of.question", "of.answer")}
    ours, theirs = (
        ParquetRows([path], fields[name], "data.train") for name, path in (("plain", plain), ("nested", nested))
    )
    assert theirs.are_texts()
    for texts in (1, 2):
        assert np.array_equal(ours.hashes(texts), theirs.hashes(texts))
        assert np.array_equal(ours.digests(np.arange(60), texts), theirs.digests(np.arange(60), texts))
    lacking = written(tmp_path / "l" / "t.parquet", [within[0], {"of": None, "level": 0.5}])
    with pytest.raises(DataError, match=r"t.parquet:2: field 'of.question' is None .* \(row group 1\)"):
        ParquetRows([lacking], fields["nested"], "data.train").hashes()
    assert not ParquetRows([nested], ("of.question", "level"), "data.train").are_texts()
    with pytest.raises(DataError, match=r"no field 'of.answr'; it has level, of.answer, .* did you mean 'of.answer'"):
        ParquetRows([nested], ("of.question", "of.answr"), "data.train")
