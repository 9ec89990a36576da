"""A study of three cells on this machine: one is killed, the rest are stopped, and all of them go on to their end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from rl_megatron.errors import ConfigError
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.metrics import deterministic
from tests.e2e.processes import LIMIT, TINY, Fork, Place
from tests.unit.launcher.commands import status_of
from tools.lab.run import run_cells, start_process
from tools.lab.states import CellStanding, find_states, read_record
from tools.lab.study import Cell, Study, read_study, study_cells

REWARD = '''
import time
from pathlib import Path

calls = 0

def held(prompt, completions, texts):
    """While there is a file "hold", wait in the second step, after 16 calls of an evaluation and 4 of a step."""
    global calls
    calls += prompt.id != "made-up"
    while calls > 20 and Path("hold").exists():
        Path(f"holds-{prompt.id}").touch()
        time.sleep(0.01)
    return [float(sum(c.token_ids) % 2 == 0) for c in completions]
'''
KEYS = (*TINY, "learner.ep=1", "data.num_eval=16", "reward.function=held_rewards:held", "log.samples_per_step=0")
OWN = ("warm_start.steps=0", "train.steps=3", "checkpoint.every=1", "eval.every=0")


class Forked(Fork):
    """A child of a study that is a fork of a process with its imports."""

    async def wait(self) -> int:  # type: ignore[override]
        return await asyncio.to_thread(super().wait, LIMIT)


def started_as_forks(folder: Path) -> Callable[[Sequence[str], Path], Awaitable[Forked]]:
    async def start(arguments: Sequence[str], output: Path) -> Forked:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return Forked(arguments, folder=folder, output=folder / output, environment=environment)

    return start


@pytest.fixture(scope="module")
def study(place: Place) -> Study:
    (place.folder / "held_rewards.py").write_text(REWARD)
    path, folder = place.folder / "three.yaml", place.folder / "studies" / "three"
    keys = [*KEYS, *OWN, f"model.cache_dir={place.cache}"]
    axes = {"algorithm": ["algorithm=grpo", "algorithm=gspo", "algorithm=cispo"]}
    budget = {"cells_at_once": 2}
    path.write_text(
        yaml.safe_dump({"overrides": keys, "axes": axes, "seeds": [0], "budget": budget, "folder": str(folder)})
    )
    return read_study(path)


def states(found: Sequence[CellStanding]) -> list[str]:
    return [each.state.value for each in found]


def steps_of(cell: Cell) -> list[object]:
    return [row["step"] for row in read_jsonl(cell.folder / "metrics.jsonl")]


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT):
        while not true():
            await asyncio.sleep(0.01)


async def _interrupted(place: Place, study: Study, cells: list[Cell], console: Console) -> list[CellStanding]:
    """Both first cells wait in their second step; one is killed, and when a third has started, Ctrl-C is pressed."""
    hold = place.folder / "hold"
    hold.touch()
    series = asyncio.create_task(
        run_cells(study, cells, retry=False, start=started_as_forks(place.folder), console=console)
    )
    first = cells[:2]
    checkpoints = [cell.folder / "checkpoints" / "step_000001" for cell in first]
    await until(lambda: all(path.is_dir() for path in checkpoints) or series.done())
    assert not series.done(), [path.read_text() for path in study.folder.glob("cells/*.txt")]  # type: ignore[union-attr]
    assert states(find_states(study, cells)) == ["running", "running", "waiting"]
    with pytest.raises(ConfigError, match="another process runs this study"):
        await run_cells(study, cells, retry=False)
    record = read_record(cells[0])
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    await until(lambda: read_record(cells[2]))
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: "SIGINT: cells finish and save their step" in (place.folder / "said.txt").read_text())
    hold.unlink()
    return await series


def test_a_study_that_was_killed_and_stopped_goes_on_to_its_end(
    place: Place, study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells, said = study_cells(study), (place.folder / "said.txt").open("w+")
    monkeypatch.chdir(place.folder)
    console = Console(file=said)
    found = asyncio.run(_interrupted(place, study, cells, console))
    assert states(found)[:2] == ["failed", "stopped"]
    assert states(found)[2] in {"stopped", "waiting"}
    assert found[0].reason.startswith("ended by SIGKILL; ")
    assert found[1].step < 3
    assert (steps_of(cells[0]), len(steps_of(cells[1]))) == ([0, 1], found[1].step + 1)

    assert states(asyncio.run(run_cells(study, cells[:1], retry=False, console=console))) == ["failed"]
    ended = asyncio.run(run_cells(study, cells, retry=True, start=started_as_forks(place.folder), console=console))
    assert states(ended) == ["done"] * 3
    assert [steps_of(cell) for cell in cells] == [[0, 1, 2, 3]] * 3
    assert [record.starts for cell in cells if (record := read_record(cell))][:2] == [2, 2]
    assert "resuming from" in (place.folder / "studies" / "three" / "cells" / f"{cells[0].name}.txt").read_text()
    said.seek(0)
    text = said.read()
    assert "cells that failed are left as they are; --retry starts them again" in text
    assert f"{cells[0].name}: resumes" in text

    assert status_of("experiment", "status", str(place.folder / "three.yaml")) == 0
    assert "3 cells: 3 done" in capsys.readouterr().out


def test_a_cell_that_fails_is_named_with_its_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as users' are."""
    path, folder = place.folder / "bad.yaml", place.folder / "studies" / "bad"
    keys = [f"model.cache_dir={place.cache}", "reward.function=nowhere:reward"]
    path.write_text(yaml.safe_dump({"overrides": keys, "seeds": [0], "folder": str(folder)}))
    monkeypatch.chdir(place.folder)
    bad = read_study(path)
    (found,) = asyncio.run(run_cells(bad, study_cells(bad), retry=False, start=start_process))
    assert found.state.value == "failed"
    assert found.reason.startswith("status 1: error: reward.function='nowhere:reward'")


def test_cells_under_ray_have_each_a_cluster_and_the_numbers_of_those_without(
    place: Place, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two side by side; runs of one configuration have one name wherever their ranks are."""
    pytest.importorskip("ray")
    monkeypatch.chdir(place.folder)
    (place.folder / "hold").unlink(missing_ok=True)
    path, folder = place.folder / "ray.yaml", place.folder / "studies" / "ray"
    text = yaml.safe_load((place.folder / "three.yaml").read_text())
    levels, keys = text["axes"]["algorithm"][1:], [*text["overrides"], "run.launcher=ray"]
    path.write_text(yaml.safe_dump({**text, "overrides": keys, "axes": {"algorithm": levels}, "folder": str(folder)}))
    under_ray = read_study(path)
    cells, local = study_cells(under_ray), study_cells(study)[1:]
    assert [cell.name for cell in cells] == [cell.name for cell in local]
    start = started_as_forks(place.folder)
    found = asyncio.run(run_cells(under_ray, cells, retry=False, start=start))
    assert states(found) == ["done", "done"], [each.reason for each in found]
    asyncio.run(run_cells(study, local, retry=True, start=start))
    assert [records(cell) for cell in cells] == [records(cell) for cell in local]
    assert all("Ray 2" in (cell.folder / "log.txt").read_text() for cell in cells)


def records(cell: Cell) -> list[object]:
    return [deterministic(row) for row in read_jsonl(cell.folder / "metrics.jsonl")]
