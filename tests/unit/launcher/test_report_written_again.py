"""While a run trains its report is written again, in a thread that ends with it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.programs import train
from launcher.programs.train import report_written_again
from rl_megatron.config.io import load_config
from tests.unit.observability.report_pages import a_run

LIMIT = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.01)


async def test_it_is_written_with_the_steps_of_now_and_says_when_it_is_again(tmp_path: Path) -> None:
    folder, config = a_run(tmp_path / "a"), load_config("tiny_cpu", [])
    page, rows = folder / "report.html", (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("")  # no row yet, which is no fault
    async with report_written_again(config, folder, 0.05):
        await asyncio.sleep(0.2)
        assert not page.exists()
        (folder / "metrics.jsonl").write_text(rows)
        await until(page.exists)
        assert 'data-again="' in page.read_text()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"phase": "rl", "step": 7, "reward/mean": 0.5}) + "\n")
        await until(lambda: "7 of 6" in page.read_text())
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


async def test_the_loop_goes_on_meanwhile_and_no_thread_writes_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), list[str]()

    def slow(folders: list[Path], out: Path, left_out: Any, *, costs: Any, again: float) -> None:
        begun.set()
        try:
            while True:
                costs.add({})
                time.sleep(0.01)
        finally:
            ended.append("thread")

    monkeypatch.setattr(train, "write_report", slow)
    async with report_written_again(load_config("tiny_cpu", []), tmp_path, 0.0):
        await until(begun.is_set)
        assert not ended
    ended.append("context")
    assert ended == ["thread", "context"]
