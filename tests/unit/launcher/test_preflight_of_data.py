"""The preflight's look at the first rows of files of problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.preflight.checks import preflight
from tests.unit.launcher.sites import data_file, site
from tests.unit.launcher.test_memory import QWEN3
from tests.unit.launcher.test_preflight import job


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, ...]:
    return site(tmp_path / "site", QWEN3)


def test_only_the_first_rows_are_read(tmp_path: Path, keys: tuple[str, ...]) -> None:
    from launcher.preflight.problems_of_data import ROWS

    good = {"question": "q", "answer": "1"}
    path = data_file(tmp_path / "long.jsonl", *[good] * ROWS, "bad")
    found = preflight(job(keys, f"data.train={path}"), for_job=True)
    assert found.texts("problem") == []
    assert f"rows of {path} after the first {ROWS}" in found.texts("unchecked")


def test_what_is_trained_on_and_held_out_is_told_before_a_process_starts(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """By the lines of the load, which does it again with all rows; what evaluations do not read is not held out."""
    train = data_file(tmp_path / "train.jsonl", *({"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(9)))
    held = data_file(
        tmp_path / "eval.jsonl", {"question": "of nobody", "answer": "1"}, {"question": " 3  + 1?", "answer": "4"}
    )
    given = (f"data.train={train}", f"data.eval={held}")
    (text,) = preflight(job(keys, *given), for_job=True).texts("problem")
    assert text.splitlines()[0] == f"{train}:4: trained on, but held out in {held}:2 (data)"
    assert text.splitlines()[1].startswith("1 of 9 training problems are held out too")
    for key in ("data.on_leak=drop", "data.on_leak=keep", "data.max_eval=1"):
        assert preflight(job(keys, *given, key), for_job=True).texts("problem") == []
