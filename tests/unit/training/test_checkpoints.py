"""Checkpoint folders: who takes digests and who compares them, what a manifest lists, and when one is written."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import xxhash

from launcher.controller.group import WorkerGroup
from launcher.controller.roles import LearnerGroup, Plane
from launcher.processes.loop_watch import LoopWatch
from launcher.worker.models import RankModels
from rl_megatron.config.io import load_config
from rl_megatron.config.resume import fixed
from rl_megatron.config.run import RunConfig
from rl_megatron.digests import Digest
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces import Learner
from rl_megatron.observability.metrics.table import deterministic
from rl_megatron.rollout.batch import Ledger
from rl_megatron.training import checkpoints
from rl_megatron.training.checkpoints import CheckpointStore, Saved, TrainerState
from rl_megatron.training.jobs.rl import Reinforcement, stream_of
from rl_megatron.training.loop import Loop, Pace
from rl_megatron.types import ParallelDims
from tests.savings import FILES, Ended, Failing, Shards

STATE = TrainerState(step=3, prompts={"epoch": 0, "next": 8}, stream=None)


class Ranks:
    """Two ranks as `LearnerGroup` asks them, of which only the calls that read files are real."""

    workers = tuple(SimpleNamespace(rank=rank) for rank in range(2))

    def __init__(self) -> None:
        self.read: dict[int, tuple[str, ...]] = {}
        self.loaded = False

    async def ask(self, name: str, arguments: Mapping[int, Any]) -> list[Any]:
        assert name == "verify"
        self.read = {rank: tuple(files) for rank, (_, files) in arguments.items()}
        return [RankModels.verify(cast(RankModels, self), *given) for given in arguments.values()]

    async def each(self, name: str, *_: Any) -> None:
        assert name == "load"
        self.loaded = True


def saved(folder: Path, learner: Any = None) -> Path:
    store = CheckpointStore(folder, keep=2, config=fixed(RunConfig()))
    return asyncio.run(write(store, learner or Shards())).folder


async def write(store: CheckpointStore, learner: Any) -> Saved:
    return await (await store.save(STATE, {"learner": learner})).finish()


def loaded(folder: Path) -> Ranks:
    ranks = Ranks()
    group, dims = cast(WorkerGroup, ranks), ParallelDims(dp=2)
    learner = LearnerGroup(group, "policy", Plane(group, dims))
    asyncio.run(checkpoints.read(folder).load({"learner": learner}))
    assert ranks.loaded
    return ranks


def test_a_manifest_says_what_the_ranks_say(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    everything = {f"learner/{name}": data for name, data in FILES.items()}
    everything["trainer.json"] = (folder / "trainer.json").read_bytes()
    assert manifest["checksum"] == "xxh3_128"
    assert manifest["files"] == {
        name: {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)} for name, data in everything.items()
    }
    assert checkpoints.read(folder).state == STATE


def test_the_readers_share_the_files(tmp_path: Path) -> None:
    ranks = loaded(saved(tmp_path))
    assert sorted(name for names in ranks.read.values() for name in names) == sorted(FILES)
    assert {len(names) for names in ranks.read.values()} == {2, 3}


def test_a_save_of_any_size_leaves_the_event_loop_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(LoopWatch, "_end", lambda self, file: ended.append(file))
    config = load_config("tiny_cpu", ["run.watchdog_seconds=1.5"])

    class Large:
        """8 GB that take no room on the disk; its ranks would have read them, the controller must not."""

        async def save(self, folder: Path) -> Ended:
            with (folder / "__0_0.distcp").open("wb") as file:
                file.truncate(8 * 2**30)
            return Ended({"__0_0.distcp": Digest(bytes=8 * 2**30, xxh3_128="0" * 32)})

    async def save() -> Saved:
        watch = LoopWatch(config, tmp_path / "stacks")
        try:
            return await write(CheckpointStore(tmp_path, keep=2, config={}), Large())
        finally:
            watch.stop()

    written = asyncio.run(save())
    assert not ended
    assert checkpoints.read(written.folder).files["learner/__0_0.distcp"].bytes == written.num_bytes == 8 * 2**30


def test_every_missing_or_torn_file_is_named_before_a_rank_is_asked(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "learner/__1_0.distcp").unlink()
    for torn in ("learner/__2_0.distcp", "trainer.json"):
        (folder / torn).write_bytes((folder / torn).read_bytes()[:-7])
    with pytest.raises(CheckpointError) as caught:
        checkpoints.read(folder)
    for line in ("__1_0.distcp is missing (80000 bytes", "__2_0.distcp is torn: 79993 bytes of 80000", "json is torn"):
        assert line in str(caught.value)
    assert f"remove {folder} to resume from the checkpoint before it" in str(caught.value)


def test_every_changed_file_is_named_by_the_rank_that_reads_it(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for name in ("__0_0.distcp", "__3_0.distcp"):
        data = bytearray(FILES[name])
        data[len(data) // 2] ^= 1
        (folder / "learner" / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp changed[^_]*(.|\n)*__3_0\.distcp changed"):
        loaded(folder)
    trainer = folder / "trainer.json"
    trainer.write_bytes(trainer.read_bytes().replace(b'"step":3', b'"step":4'))
    with pytest.raises(CheckpointError, match=r"trainer\.json changed since it was written"):
        checkpoints.read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {}, "is torn or was written by another version of rl_megatron: checksum: Field required"),
        (lambda m: {**m, "files": {}}, "lists no trainer.json or no file of learner/"),
        (lambda m: {**m, "files": {k: v for k, v in m["files"].items() if k == "trainer.json"}}, "no file of learner/"),
        (lambda m: {**m, "files": {k: v for k, v in m["files"].items() if k != "trainer.json"}}, "no trainer.json"),
        (lambda m: {**m, "checksum": "sha256"}, "another version of rl_megatron: checksum: Input should be 'xxh3_128'"),
        (lambda m: m["files"], "another version of rl_megatron"),
        (lambda m: [], "another version of rl_megatron"),
        (lambda m: {**m, "files": {"../x": m["files"]["trainer.json"], **m["files"]}}, "outside of the checkpoint"),
        (lambda m: {**m, "files": {"/etc/x": m["files"]["trainer.json"], **m["files"]}}, "outside of the checkpoint"),
        (lambda m: {**m, "files": dict.fromkeys("x" * 9_000, "no digest")}, "another version of rl_megatron"),
    ],
)
def test_a_manifest_that_lists_nothing_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = saved(tmp_path)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.read(folder)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


async def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where a file that is open elsewhere stays as ``.nfs…`` until it is closed."""
    unlink, held = os.unlink, True

    def refused(path: Any, *, dir_fd: int | None = None) -> None:
        if held and os.fspath(path).endswith(".nfs01"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        unlink(path, dir_fd=dir_fd)

    async def save(step: int) -> None:
        store = CheckpointStore(tmp_path, keep=1, config={})
        await (await store.save(replace(STATE, step=step), {"learner": cast(Learner, Shards())})).finish()

    monkeypatch.setattr(os, "unlink", refused)
    await save(1)
    (tmp_path / "step_000001/.nfs01").touch()
    (tmp_path / ".nfs02").touch()  # no folder, and nobody's of the run
    for step in (2, 3):
        caplog.clear()
        await save(step)
        assert checkpoints.latest(tmp_path) == tmp_path / f"step_{step:06d}"
        (said,) = [record.getMessage() for record in caplog.records]
        assert "step_000001 cannot be removed: [Errno 16] Device or resource busy" in said
    held = False
    await save(4)
    assert sorted(os.listdir(tmp_path)) == [".nfs02", "step_000004"]


def test_what_no_rank_wrote_or_nobody_sees_here_is_no_checkpoint(tmp_path: Path) -> None:
    class Elsewhere(Shards):
        async def save(self, folder: Path) -> Ended:
            said = await super().save(folder)
            (folder / "__1_0.distcp").unlink()
            return Ended({name: digest for name, digest in said.files.items() if name != "__2_0.distcp"})

    with pytest.raises(CheckpointError) as caught:
        saved(tmp_path, Elsewhere())
    assert "run.dir must be one shared folder on all nodes" in str(caught.value)
    assert "__1_0.distcp is missing" in str(caught.value)
    assert "__2_0.distcp: no rank reported that it wrote this file" in str(caught.value)
    assert checkpoints.latest(tmp_path) is None


@pytest.mark.parametrize(("warm_start_steps", "saves"), [(0, 0), (1, 1)])
def test_the_first_step_waits_for_no_checkpoint_where_a_resume_makes_the_start_again(
    tmp_path: Path, warm_start_steps: int, saves: int
) -> None:
    learner, rows = Shards(), list[Any]()

    async def row(*_: Any) -> dict[str, float]:
        return {"eval/accuracy": 0.25}

    async def closed() -> None:
        """Nothing is released."""

    sampler, recorder = (
        cast(Any, SimpleNamespace()),
        cast(Any, SimpleNamespace(write=AsyncMock(side_effect=rows.append))),
    )
    config = load_config("tiny_cpu", ["train.steps=0", f"warm_start.steps={warm_start_steps}"])
    prompts = cast(Any, SimpleNamespace(state=dict, left_out=(), table=None, read_ahead=lambda: None))
    job = Reinforcement(
        config=config,
        roles=cast(Any, SimpleNamespace(learners={"policy": learner}, frozen={})),
        stream=stream_of(config, prompts, sampler, Ledger()),
        prompts=prompts,
        evaluation=cast(Any, SimpleNamespace(row=row, closed=closed)),
        update=cast(Any, SimpleNamespace(state=None, of_models=())),
        start_folder=tmp_path / "hf_start",
        recorder=recorder,
        route="file",
    )
    loop = Loop(
        job=job,
        pace=Pace(steps=0, rows=1, evaluations=1, checkpoints=1),
        checkpoints=CheckpointStore(tmp_path, keep=2, config={}),
        recorder=recorder,
        stop=asyncio.Event(),
    )
    assert asyncio.run(loop.run())
    assert rows == [{"step": 0, "phase": "rl", "eval/accuracy": 0.25}]
    assert learner.saves == saves


def test_the_row_after_a_checkpoint_has_its_bytes_and_seconds(tmp_path: Path) -> None:
    rows, job = list[dict[str, Any]](), Failing({})
    loop = Loop(
        job=cast(Any, job),
        pace=Pace(steps=3, rows=1, evaluations=0, checkpoints=2),
        checkpoints=CheckpointStore(tmp_path, keep=2, config={}),
        recorder=cast(Any, SimpleNamespace(write=AsyncMock(side_effect=rows.append))),
        stop=asyncio.Event(),
    )
    job.until[3] = lambda: not loop.in_hand or loop.in_hand.saved
    assert asyncio.run(loop.run())
    after = {name: value for name, value in rows[2].items() if "checkpoint/" in name}
    assert after == {
        "checkpoint/bytes": sum(map(len, FILES.values())),
        "checkpoint/stage_seconds": pytest.approx(0, abs=30),
        "checkpoint/write_seconds": 0.5,
        "checkpoint/step": 2,
    }
    assert not any("checkpoint" in name for row in rows[:2] for name in row)
    assert deterministic({"step": 3, "checkpoint/bytes": 5}) == {"step": 3}  # a resumed run saves at other steps
