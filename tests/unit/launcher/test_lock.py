"""A run's lock, also on file systems that have none."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sys
import types
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from launcher.controller.watchdog import Watchdog
from launcher.processes import stacks
from launcher.processes.loop_watch import LoopWatch
from launcher.runs.folder import claim, lock
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.jobs import LogSection
from rl_megatron.durable import append_private
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.log import run_log
from rl_megatron.observability.metrics.writer import MetricsWriter
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.observability.samples import SampleRow, SamplesWriter
from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.trace import TraceFile
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from rl_megatron.training.loop import Loop, Pace
from tests.savings import Shards


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As the kernel does for files of some file systems."""

    def flock(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    """Also once its log was moved, as logrotate does."""
    with claim(tmp_path / "run", resume=False):
        for log in tmp_path.glob("run/*.txt"):
            log.unlink()
        with pytest.raises(ConfigError, match="another process runs in it"), claim(tmp_path / "run", resume=True):
            pass
    with claim(tmp_path / "run", resume=True):
        pass


@pytest.mark.parametrize("fails", ["open", "flock"])
def test_a_claim_that_fails_keeps_nothing_open(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error, which a caller may keep, has kept the lock: a second try in the process was refused by the first."""

    def no_descriptor(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    patched = (os, "open") if fails == "open" else (fcntl, "flock")
    with monkeypatch.context() as now:
        now.setattr(*patched, no_descriptor)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as raised:
            claim(tmp_path / "run", resume=False).__enter__()
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []
    with claim(tmp_path / "run", resume=True):
        assert raised.value.errno == errno.EMFILE


@pytest.mark.parametrize("of_nfs", [False, True])
def test_a_lock_that_was_removed_is_taken_again_at_the_next_checkpoint(
    of_nfs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clusters remove files that are old, which each checkpoint keeps it from being: a second start was let in."""
    utime = os.utime

    def stale(file: int | Path, *times: tuple[int, int]) -> None:
        """What NFS says of an open file that another node has removed."""
        if isinstance(file, int) and not os.fstat(file).st_nlink:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        utime(file, *times)

    if of_nfs:
        monkeypatch.setattr(os, "utime", stale)
    with claim(run := tmp_path / "run", resume=False) as claimed:
        os.utime(run / "lock", (0, 0))
        claimed()
        assert (run / "lock").stat().st_mtime > 0
        assert not caplog.messages
        (run / "lock").unlink()
        claimed()
        assert "lock was removed, and is made and locked again" in caplog.text
        with pytest.raises(ConfigError, match="another process runs in it"), claim(run, resume=True):
            pass
        (run / "lock").unlink()
        with claim(run, resume=True) as other:
            with pytest.raises(CheckpointError, match="lock was removed, and another process runs in the folder since"):
                claimed()
            other()
        claimed()


async def test_a_lock_that_was_removed_is_taken_again_at_the_next_row(tmp_path: Path) -> None:
    """There may be hours to the next checkpoint. A folder that is away for a while is none of a row's business."""
    with claim(run := tmp_path / "run", resume=False) as claimed:
        os.utime(run / "lock", (0, 0))
        recorder = Recorder(run, LogSection(tensorboard=False), Progress(1), before_row=claimed.hold)
        await recorder.write({"phase": "rl", "step": 1})
        assert (run / "lock").stat().st_mtime == 0  # it is looked at, no more
        (run / "lock").unlink()
        await recorder.write({"phase": "rl", "step": 2})
        with pytest.raises(ConfigError, match="another process runs in it"), claim(run, resume=True):
            pass
        run.rename(tmp_path / "moved")
        await recorder.write({"phase": "rl", "step": 3})
        (tmp_path / "moved").rename(run)
        (run / "lock").unlink()
        with claim(run, resume=True), pytest.raises(CheckpointError, match="and another process runs in the folder"):
            await recorder.write({"phase": "rl", "step": 4})
        recorder.close()
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]


class Training:
    """A job, and a weight sync, of which only what writes the model is asked for."""

    name, first_step_is_saved = "training", False

    async def start(self, *, fresh: bool) -> None:
        raise AssertionError("it writes hf_start")

    async def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    async def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("other", [False, True])
async def test_nothing_is_written_where_the_runs_folder_was(tmp_path: Path, other: bool) -> None:
    """It is moved; ``other``: and another is there, as below the mount point of a file system that is unmounted."""
    run, moved, training = tmp_path / "runs/a", tmp_path / "moved", cast(Any, Training())
    pace, state = Pace(steps=2, rows=1, evaluations=0, checkpoints=1), TrainerState(step=1, prompts={}, stream=None)

    async def saved() -> None:
        await (await loop.checkpoints.save(state, {"learner": cast(Any, Shards())})).finish()

    def exported() -> Coroutine[Any, Any, None]:
        return loop.export(training, run / "hf_step_000001")

    with claim(run, resume=False) as claimed:
        store = CheckpointStore(run / "checkpoints", keep=1, config={}, claimed=claimed)
        loop = Loop(job=training, pace=pace, checkpoints=store, recorder=training, stop=asyncio.Event())
        run.rename(moved)
        if other:
            run.mkdir()
        for write in (saved, exported, loop.run):
            with pytest.raises(CheckpointError, match="is no longer the folder that this run began in"):
                await write()
        assert [path.name for path in run.parent.rglob("*")] == (["a"] if other else [])
        if other:
            run.rmdir()
        moved.rename(run)
        await saved()
        await exported()
        assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "hf_step_000001", "lock"]


def test_no_writer_begins_the_folder_anew_that_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first row, or the first stack, began a run's folder again at its old path, and the run went on there."""
    pytest.importorskip("tensorboard")
    run, row = tmp_path / "runs/a", {"phase": "rl", "step": 1}
    run.mkdir(parents=True)
    mirrored = MetricsWriter(run, tensorboard=True)
    mirrored.write({"phase": "warm_start", "step": 0, "warm_start/step": 1})
    run.rename(tmp_path / "moved")
    mirrored.write(row)  # into the file that is open, and TensorBoard's of its phase, which is not
    mirrored.close()
    assert "TensorBoard gets no more rows until a resume" in caplog.text
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    sample = SampleRow(step=1, prompt="", completion="", answer="", reward=0.0)
    watchdog = Watchdog([], cast(Any, None), load_config("tiny_cpu", []), run / "stacks" / "now")
    writers: Mapping[str, Callable[[], object]] = {
        "metrics": lambda: MetricsWriter(run).write(row),
        "W&B's id": lambda: MetricsWriter(run, wandb="offline"),
        "samples": lambda: SamplesWriter(run).write([sample]),
        "timeline": lambda: TraceFile(run).append([(spans.STEPS, "step 1", 0, 1, None)]),
        "log": lambda: run_log(run, role="rank", rank=1).__enter__(),
        "stacks of a rank": lambda: stacks.register(run / "stacks" / "now" / "rank-1.txt", silence=1.0),
        "stacks of the loop": lambda: LoopWatch(load_config("tiny_cpu", []), run / "stacks"),
        "stacks of tasks": watchdog._write_tasks,
    }
    for name, write in writers.items():
        with pytest.raises(FileNotFoundError, match=f"{run}"):
            write()
        assert not run.exists(), name


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    refuse(monkeypatch, code)
    with claim(tmp_path / "run", resume=False):
        pass
    assert f"{tmp_path}/run/lock cannot be locked ({os.strerror(code)}): nothing keeps" in caplog.text


def test_another_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EIO)
    with append_private(tmp_path / "key") as file, pytest.raises(OSError, match=f"error: '{tmp_path}/key'") as raised:
        lock(file)
    assert raised.value.errno == errno.EIO
