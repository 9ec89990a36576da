"""How cells are started, stopped and judged, with short processes of the system in place of training."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from rich.console import Console

from rl_megatron.config.io import load_config, save_resolved
from tools.lab.run import Start, run_cells
from tools.lab.states import (
    CellRecord,
    CellStanding,
    find_states,
    is_running,
    output_path,
    process_birth,
    read_record,
    write_record,
)
from tools.lab.study import Cell, Study, read_study, study_cells

LIMIT = 300.0  # seconds


def study_of(folder: Path, **keys: object) -> tuple[Study, list[Cell]]:
    path = folder / "mine.yaml"
    text = {"folder": str(folder / "runs"), "seeds": [0], "overrides": ["train.steps=2"], **keys}
    path.write_text(yaml.safe_dump(text))
    study = read_study(path)
    return study, study_cells(study)


def shell(script: str) -> Start:
    """Starts the script in place of each cell, in its run folder and with the cell's name as $0."""

    async def start(arguments: Sequence[str], output: Path) -> asyncio.subprocess.Process:
        folder = output.parents[1] / output.stem
        folder.mkdir(exist_ok=True)
        with output.open("ab") as file:
            return await asyncio.create_subprocess_exec(
                *("sh", "-c", script, folder.name), stdout=file, stderr=file, cwd=folder
            )

    return start


def ran(study: Study, cells: Sequence[Cell], start: Start, said: io.StringIO | None = None) -> list[CellStanding]:
    async def run() -> list[CellStanding]:
        async with asyncio.timeout(LIMIT):
            return await run_cells(study, cells, retry=True, start=start, console=Console(file=said or io.StringIO()))

    return asyncio.run(run())


def test_a_stop_reaches_a_cell_whose_process_is_just_being_made(tmp_path: Path) -> None:
    study, cells = study_of(tmp_path, budget={"cells_at_once": 1})
    said = io.StringIO()

    async def start(arguments: Sequence[str], output: Path) -> asyncio.subprocess.Process:
        os.kill(os.getpid(), signal.SIGINT)
        while "SIGINT" not in said.getvalue():
            await asyncio.sleep(0)
        return await shell("exec sleep 100")(arguments, output)

    (found,) = ran(study, cells, start, said)
    record = read_record(cells[0])
    assert (found.state.value, record and record.status) == ("stopped", 0)


def test_all_cells_train_what_was_checked_though_the_base_is_edited_meanwhile(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    save_resolved(load_config("tiny_cpu", ["train.learning_rate=3e-3"]), base)
    study, cells = study_of(tmp_path, base="base.yaml", seeds=[0, 1], budget={"cells_at_once": 1})
    trained = []

    async def start(arguments: Sequence[str], output: Path) -> asyncio.subprocess.Process:
        command, option, config, *overrides = arguments
        assert (command, option) == ("train", "--config")
        trained.append(load_config(config, overrides))
        save_resolved(load_config("tiny_cpu", ["train.learning_rate=1e-3"]), base)
        return await shell(row(2))(arguments, output)

    found = ran(study, cells, start)
    assert [each.state.value for each in found] == ["done", "done"]
    plain = [cell.config.log.model_copy(update={"progress": "plain"}) for cell in cells]
    assert trained == [cell.config.model_copy(update={"log": log}) for cell, log in zip(cells, plain, strict=True)]
    assert {config.train.learning_rate for config in trained} == {3e-3}


def test_the_reason_of_a_failure_is_of_the_last_start(tmp_path: Path) -> None:
    study, cells = study_of(tmp_path)
    (found,) = ran(study, cells, shell("echo 'error: the first'; exit 1"))
    assert found.reason == "status 1: error: the first"
    (found,) = ran(study, cells, shell("echo Traceback; echo 'KeyError: 3'; exit 2"))
    assert found.reason == "status 2: KeyError: 3"
    (found,) = ran(study, cells, shell("exit 3"))
    assert found.reason == "status 3: it printed nothing"
    assert "the first" in output_path(cells[0]).read_text()


def test_a_process_that_cannot_be_made_is_one_plain_error(tmp_path: Path) -> None:
    study, cells = study_of(tmp_path, axes={"a": ["algorithm=grpo", "algorithm=gspo"]}, budget={"cells_at_once": 2})

    async def start(arguments: Sequence[str], output: Path) -> asyncio.subprocess.Process:
        raise OSError(28, "No space left on device", str(output))

    with pytest.raises(OSError, match="No space left"):
        ran(study, cells, start)


def row(step: int) -> str:
    return f"""echo '{{"step": {step}, "phase": "rl", "eval/accuracy": 0.{step}}}' >> metrics.jsonl"""


def test_a_failed_run_that_was_resumed_by_hand_is_as_far_as_it_came(tmp_path: Path) -> None:
    study, cells = study_of(tmp_path)
    (found,) = ran(study, cells, shell(f"{row(0)}; {row(1)}; exit 1"))
    assert (found.state.value, found.step, found.value) == ("failed", 1, 0.1)
    with (cells[0].folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "phase": "rl"}\n{"step": 3')
    (found,) = find_states(study, cells)
    assert (found.state.value, found.step, found.value, found.reason) == ("done", 2, 0.1, "")


def test_a_run_that_fails_after_its_last_step_has_failed(tmp_path: Path) -> None:
    study, cells = study_of(tmp_path)
    (found,) = ran(study, cells, shell(f"{row(2)}; echo 'error: no space'; exit 1"))
    assert (found.state.value, found.step, found.reason) == ("failed", 2, "status 1: error: no space")


def test_a_broken_file_of_one_cell_is_its_failure_and_the_others_go_on(tmp_path: Path) -> None:
    study, cells = study_of(tmp_path, axes={"a": ["algorithm=grpo", "algorithm=gspo"]}, budget={"cells_at_once": 1})
    found = ran(study, cells, shell(f"case $0 in grpo*) echo half >> metrics.jsonl;; *) {row(2)};; esac"))
    assert [each.state.value for each in found] == ["failed", "done"]
    assert re.search(r"metrics\.jsonl:1: not JSON", found[0].reason)


def test_a_cell_that_does_not_stop_when_its_minutes_are_over_is_ended(tmp_path: Path) -> None:
    """It ignores SIGTERM; its own time limit of a call is what it has to save."""
    keys = ["train.steps=2", "learner.timeout_seconds=0.3"]
    study, cells = study_of(tmp_path, overrides=keys, budget={"cell_minutes": 1e-2})
    said = io.StringIO()
    (found,) = ran(study, cells, shell(f"trap '' TERM; {row(1)}; while :; do sleep 0.1; done"), said)
    late = "it did not stop within learner.timeout_seconds=0.3 and was ended"
    assert (found.state.value, found.reason) == ("spent", f"budget.cell_minutes=0.01 are over; {late}")
    record = read_record(cells[0])
    assert record is not None
    assert f"{late} (pid {record.pid})" in said.getvalue()
    with pytest.raises(ProcessLookupError):
        os.kill(record.pid, 0)


def test_a_cell_whose_folder_was_removed_has_its_whole_time_again(tmp_path: Path) -> None:
    study, cells = study_of(tmp_path, budget={"cell_minutes": 1})
    cells[0].folder.mkdir(parents=True)
    write_record(cells[0], CellRecord(pid=1, began="", starts=1, seconds=60.0, status=0, step=1))
    assert find_states(study, cells)[0].state.value == "spent"
    shutil.rmtree(cells[0].folder)
    (found,) = ran(study, cells, shell(row(2)))
    assert (found.state.value, found.step) == ("done", 2)
    assert found.seconds < 60


def test_a_budget_of_time_holds_while_a_file_is_broken(tmp_path: Path) -> None:
    study, cells = study_of(tmp_path, budget={"minutes": 1e-3})
    (found,) = ran(study, cells, shell("echo half >> metrics.jsonl; exec sleep 100"))
    assert (found.state.value, found.cell) == ("failed", cells[0])


def test_a_process_of_this_boot_runs_whatever_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the clock moves the kernel's time of boot, as /proc/stat has it, by which psutil dates processes."""
    me = os.getpid()
    record = CellRecord(pid=me, began=process_birth(me), starts=1, seconds=0.0)
    before = psutil.Process().create_time()
    (tmp_path / str(me)).symlink_to(f"/proc/{me}")
    (tmp_path / "stat").write_text(f"btime {int(psutil.boot_time()) + 7200}\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert 7190 < psutil.Process().create_time() - before < 7210
    assert is_running(record)
    another = process_birth(me).replace(process_birth(me).split()[0], "0a1b2c3d-0000-0000-0000-000000000000")
    assert not any(is_running(replace(record, began=began)) for began in (another, ""))
