"""Problems of a function of one's own, written as both files or as none."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_megatron.errors import ConfigError
from tools.write_tasks import run

HALF = "price: 3 € and \ud83d"  # a lone surrogate, as a reply that was cut has it
Rows = list[dict[str, Any]]


def problems(question: str = HALF, held_out: int = 1) -> tuple[Rows, Rows]:
    row = {"question": question, "answer": "3"}
    return [row], [row] * held_out


def odd(what: str) -> Any:
    rows = [{"question": "2 + 1", "answer": 3}]
    others: dict[str, Any] = {
        "numpy": (rows, [*rows, {"answer": np.int64(3)}]),
        "nan": ([*rows, {"answer": float("nan")}], rows),
        "three": (rows, rows, rows),
        "none": None,
        "texts": [rows[0], rows[0]],
        "empty": (rows, []),
    }
    return others[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("numpy", r"row 2 of eval\.jsonl: .*int64"),
        ("nan", r"row 2 of train\.jsonl: "),
        ("three", "it must give a pair"),
        ("texts", "row 1 of train\\.jsonl: 'question' is no mapping"),
        ("none", "it must give a pair"),
        ("empty", r"no row for eval\.jsonl"),
    ],
)
def test_what_is_no_data_is_refused_by_its_row_and_nothing_is_written(tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "out", f"{__name__}:odd", [f"what={what}"])
    assert not (tmp_path / "out").exists()


def given(folder: Path, *keys: str) -> None:
    run(folder, f"{__name__}:problems", keys)


def test_half_of_a_surrogate_pair_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    given(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert json.loads(path.read_text(encoding="utf-8"))["question"] == HALF
        assert "3 € and \\ud83d" in path.read_text(encoding="utf-8")


def test_a_disk_that_is_full_leaves_nothing_that_keeps_from_repeating_it(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # bytes of a file: enough for one problem
    try:
        with pytest.raises(OSError, match="File too large"):
            given(tmp_path, "question=2 + 1", "held_out=500")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    given(tmp_path, "question=2 + 1", "held_out=500")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval.jsonl", "train.jsonl"]
