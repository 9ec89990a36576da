"""The tiny model is a true Hugging Face folder, made once, whole.

These tests start processes.
"""

from __future__ import annotations

from pathlib import Path

from tests.forks import FORKS
from tests.unit.models.test_reference_model import make_at_once, weights


def test_processes_that_make_it_at_once_get_the_same_whole_folder(tmp_path: Path) -> None:
    (cache := tmp_path / "cache").mkdir()
    start = FORKS.Barrier(2)
    processes = [FORKS.Process(target=make_at_once, args=(start, cache, tmp_path / str(n))) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, 0]
    said = {(tmp_path / str(n)).read_text() for n in range(2)}
    assert [str(path) for path in cache.iterdir()] == list(said)
    assert weights(Path(said.pop()))
