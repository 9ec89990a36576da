"""Checkpoint folders: digests, manifests, the stream's columns, and ones that are written while training continues."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import numpy as np
import pytest
import xxhash
from pydantic import TypeAdapter, ValidationError

from launcher.controller.group import WorkerGroup
from launcher.controller.roles import BatchCalls, LearnerGroup
from launcher.processes.stacks import LoopWatch
from launcher.worker.models import RankModels
from rl_megatron.config.io import load_config
from rl_megatron.config.resume import fixed
from rl_megatron.config.run import RunConfig
from rl_megatron.digests import Digest, SaveDigests, digest_bytes
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces import Learner
from rl_megatron.observability.metrics import deterministic
from rl_megatron.rollout.stream import GroupResult, Ledger, StreamState
from rl_megatron.training import checkpoints
from rl_megatron.training.checkpoints import CheckpointStore, SavedShards, TrainerState
from rl_megatron.training.jobs.rl import RLJob, make_stream
from rl_megatron.training.loop import Intervals, Loop
from rl_megatron.types import ParallelDims, RewardResult, RolloutGroup, Span, TokenSequence, Trajectory, Turn
from tests.savings import FILES, Ended, Failing, Shards
from tests.unit.rollout.test_asynchronous import killed

STATE = TrainerState(step=3, prompts={"epoch": 0, "next": 8}, stream=None)


class Ranks:
    """Two ranks as `LearnerGroup` asks them, of which only the calls that read files are real."""

    workers = tuple(SimpleNamespace(rank=rank) for rank in range(2))

    def __init__(self) -> None:
        self.read: dict[int, tuple[str, ...]] = {}
        self.loaded = False

    async def call(self, name: str, arguments: Mapping[int, Any]) -> list[Any]:
        assert name == "verify"
        self.read = {rank: tuple(files) for rank, (_, files) in arguments.items()}
        return [RankModels.verify(cast(RankModels, self), *given) for given in arguments.values()]

    async def call_all(self, name: str, *_: Any) -> None:
        assert name == "load"
        self.loaded = True


def saved(folder: Path, learner: Any = None) -> Path:
    store = CheckpointStore(folder, keep=2, config=fixed(RunConfig()))
    return asyncio.run(write(store, learner or Shards())).folder


async def write(store: CheckpointStore, learner: Any) -> SavedShards:
    return await (await store.save(STATE, {"learner": learner})).finish()


def loaded(folder: Path) -> Ranks:
    ranks = Ranks()
    group, dims = cast(WorkerGroup, ranks), ParallelDims(dp=2)
    learner = LearnerGroup(group, "policy", BatchCalls(group, dims))
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

    async def save() -> SavedShards:
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
def test_a_first_step_waits_for_no_checkpoint_of_the_start(tmp_path: Path, warm_start_steps: int, saves: int) -> None:
    learner, rows = Shards(), list[Any]()

    async def row(*_: Any) -> dict[str, float]:
        return {"eval/accuracy": 0.25}

    async def closed() -> None:
        """Nothing is released."""

    sampler = cast(Any, SimpleNamespace())
    recorder = cast(Any, SimpleNamespace(write=AsyncMock(side_effect=rows.append)))
    config = load_config("tiny_cpu", ["train.steps=0", f"warm_start.steps={warm_start_steps}"])
    prompts = cast(Any, SimpleNamespace(state=dict, left_out=(), table=None, read_ahead=lambda: None))
    job = RLJob(
        config=config,
        roles=cast(Any, SimpleNamespace(learners={"policy": learner}, frozen_models={})),
        stream=make_stream(config, prompts, sampler, Ledger()),
        prompts=prompts,
        evaluation=cast(Any, SimpleNamespace(row=row, wait_closed=closed)),
        update=cast(Any, SimpleNamespace(state=None, model_steps=())),
        start_folder=tmp_path / "hf_start",
        recorder=recorder,
        push_route="file",
    )
    loop = Loop(
        job=job,
        pace=Intervals(steps=0, metrics=1, evaluations=1, checkpoints=1),
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
        pace=Intervals(steps=3, metrics=1, evaluations=0, checkpoints=2),
        checkpoints=CheckpointStore(tmp_path, keep=2, config={}),
        recorder=cast(Any, SimpleNamespace(write=AsyncMock(side_effect=rows.append))),
        stop=asyncio.Event(),
    )
    job.until[3] = lambda: not loop.pending_save or loop.pending_save.saved
    assert asyncio.run(loop.run())
    after = {name: value for name, value in rows[2].items() if "checkpoint/" in name}
    assert after == {
        "checkpoint/bytes": sum(map(len, FILES.values())),
        "checkpoint/write_seconds": 0.5,
        "checkpoint/step": 2,
    }
    assert not any("checkpoint" in name for row in rows[:2] for name in row)
    assert deterministic({"step": 3, "checkpoint/bytes": 5}) == {"step": 3}  # a resumed run saves at other steps


# What waits in the stream is in a checkpoint's files of columns, with checksums as all its files.
AS_JSON = TypeAdapter(StreamState)


@pytest.fixture(scope="module")
def stream() -> StreamState:
    """Four groups of three completions, of which 2, 4 and 4 tokens were sampled: the numbers 0, 1, 2, 3."""
    return asyncio.run(killed())[1]


@pytest.fixture
def folder(tmp_path: Path, stream: StreamState) -> Path:
    return saved_stream(tmp_path, stream)


def saved_stream(path: Path, stream: StreamState) -> Path:
    store = CheckpointStore(path, keep=2, config={})
    state = TrainerState(step=3, prompts={"epoch": 0, "next": 8}, stream=stream)

    async def save() -> Path:
        saving = await store.save(state, {"learner": Shards()})
        await saving.finish()
        return saving.folder

    return asyncio.run(save())


def test_tokens_are_in_numpys_files_and_the_manifest_has_their_checksums(folder: Path) -> None:
    tokens, logprobs = (np.load(folder / "stream" / f"{kind}.npy") for kind in ("tokens", "logprobs"))
    assert tokens.tolist() == [0, 1, *range(4), *range(4)] * 4
    assert (logprobs.dtype, logprobs.tolist()) == (np.float32, [-0.5] * 40)
    assert sorted(path.name for path in (folder / "stream").iterdir()) == ["logprobs.npy", "tokens.npy"]
    files = json.loads((folder / "manifest.json").read_text())["files"]
    for name in ("stream/tokens.npy", "stream/logprobs.npy", "trainer.json"):
        data = (folder / name).read_bytes()
        assert files[name] == {"bytes": len(data), "xxh3_128": digest_bytes(data).xxh3_128}


def test_a_resume_reads_what_was_saved(folder: Path, stream: StreamState) -> None:
    found = checkpoints.read(folder).state.stream
    assert found is not None
    assert AS_JSON.dump_json(found) == AS_JSON.dump_json(stream)


def test_a_checkpoint_with_base64_in_trainer_json_is_still_read(folder: Path, stream: StreamState) -> None:
    older = {"step": 3, "prompts": {"epoch": 0, "next": 8}, "stream": json.loads(AS_JSON.dump_json(stream))}
    put(folder, "trainer.json", json.dumps(older).encode(), without=("stream/tokens.npy", "stream/logprobs.npy"))
    found = checkpoints.read(folder).state.stream
    assert found is not None
    assert AS_JSON.dump_json(found) == AS_JSON.dump_json(stream)


def test_texts_of_groups_that_wait_are_in_a_file_and_not_in_trainer_json(tmp_path: Path, stream: StreamState) -> None:
    """A checkpoint that has them there, as older ones do, is still read."""
    logprobs, tokens = np.zeros(2, np.float32), np.arange(3, dtype=np.int32)
    turn = Turn(start=1, logprobs=logprobs, finish_reason="stop", spans=(Span(0, 0),), text="it is 8 €")
    one = Trajectory(chains=(TokenSequence(token_ids=tokens, turns=(turn,)),), reward=1.0, parts={"right": (1.0, 0.5)})
    shown = replace(one, chains=(replace(one.chains[0], turns=(replace(turn, spans=()),)),))
    demonstration = RolloutGroup(prompt=stream.places[0].drawn.prompt, trajectories=(shown,))
    answered = GroupResult(group=replace(demonstration, trajectories=(one, one), demonstration=demonstration))
    state = replace(stream, places=(replace(stream.places[0], answered=answered), *stream.places[1:]))
    folder, whole = saved_stream(tmp_path, state), AS_JSON.dump_json(state)
    assert np.load(folder / "stream/texts.npy").tobytes().decode() == "it is 8 €" * 3
    assert "it is" not in (folder / "trainer.json").read_text()
    older = json.dumps({"step": 3, "prompts": {"epoch": 0}, "stream": json.loads(whole)}, ensure_ascii=False)
    assert older.count("it is 8 €") == 3
    for written in (None, older.encode()):
        if written is not None:
            put(folder, "trainer.json", written, without=[f"stream/{k}.npy" for k in ("tokens", "logprobs", "texts")])
        found = checkpoints.read(folder).state.stream
        assert found is not None
        assert AS_JSON.dump_json(found) == whole


def test_waiting_groups_without_finite_rewards_are_read_as_saved(tmp_path: Path, stream: StreamState) -> None:
    """JSON has no word for such numbers; a null could not be read, in none of the run's checkpoints."""
    failed = RewardResult(total=math.nan, error="no answer within 30 s", late=True)
    endless = RewardResult(
        total=math.inf, parts={"a": -math.inf, "b": math.nan}, steps=((3, math.nan),), error="not finite"
    )
    answered = GroupResult(group=None, reason="reward_error", scored=(failed, endless))
    state = replace(stream, places=(replace(stream.places[0], answered=answered), *stream.places[1:]))
    read = checkpoints.read(saved_stream(tmp_path, state)).state.stream.places[0].answered
    assert read.reason == "reward_error"
    assert repr(read.scored) == repr(answered.scored)  # NaN is not equal to NaN


def test_half_of_a_surrogate_pair_in_what_failed_is_saved_by_its_number(tmp_path: Path, stream: StreamState) -> None:
    """A model that cut an emoji in JSON, and a reward or tool that quotes it; UTF-8 has no such character."""
    quoted = RewardResult(total=math.nan, error="no tool \ud83d", answer="\udc00€")
    answered = GroupResult(group=None, reason="environment_error", problem="no tool \ud83d", scored=(quoted,))
    state = replace(stream, places=(replace(stream.places[0], answered=answered), *stream.places[1:]))
    read = checkpoints.read(saved_stream(tmp_path, state)).state.stream.places[0].answered
    assert (read.problem, read.scored[0].error) == ("no tool \\ud83d", "no tool \\ud83d")
    assert read.scored[0].answer == "\\udc00€"


def test_a_checkpoint_that_counts_no_left_out_tokens_is_still_read(stream: StreamState) -> None:
    left_out = replace(stream.places[0], answered=GroupResult(group=None, reason="equal_rewards", left_out_tokens=5))
    older = json.loads(AS_JSON.dump_json(replace(stream, left_out=(left_out,))))
    assert older["left_out"][0]["answered"].pop("left_out_tokens") == 5
    (read,) = AS_JSON.validate_python(older).left_out
    assert read.answered == GroupResult(group=None, reason="equal_rewards")


def put(folder: Path, name: str, data: bytes, without: Sequence[str] = ()) -> None:
    """Replace a file, and say so in the manifest, which then lists no file of ``without``."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = digest_bytes(data)
    manifest["files"][name] = {"bytes": digest.bytes, "xxh3_128": digest.xxh3_128}
    manifest["files"] = {file: said for file, said in manifest["files"].items() if file not in without}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_files_that_are_gone_torn_or_changed_are_named(folder: Path) -> None:
    tokens, logprobs = folder / "stream/tokens.npy", folder / "stream/logprobs.npy"
    data = bytearray(tokens.read_bytes())
    data[-1] ^= 1
    tokens.write_bytes(data)
    logprobs.write_bytes(logprobs.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"tokens\.npy changed since it was written(.|\n)*remove .*step_000003"):
        checkpoints.read(folder)
    with pytest.raises(CheckpointError, match=r"logprobs\.npy is torn: 284 bytes of 288"):
        checkpoints.read(folder)
    tokens.unlink()
    with pytest.raises(CheckpointError, match=r"tokens\.npy is missing \(288 bytes when it was written\)"):
        checkpoints.read(folder)


def test_files_of_another_checkpoint_are_refused(folder: Path) -> None:
    np.save(folder / "longer.npy", np.zeros(41, np.int32))
    put(folder, "stream/tokens.npy", (folder / "longer.npy").read_bytes())
    with pytest.raises(CheckpointError, match=r"tokens\.npy has 41 numbers, of which 40 are .*\nremove .*step_000003"):
        checkpoints.read(folder)
    put(folder, "stream/tokens.npy", b"no numbers")
    with pytest.raises(CheckpointError, match=r"tokens\.npy is no column of int32: .*\nremove .*step_000003"):
        checkpoints.read(folder)
    put(folder, "stream/tokens.npy", b"", without=("stream/tokens.npy",))
    with pytest.raises(CheckpointError, match=r"tokens\.npy is not among the checkpoint's files"):
        checkpoints.read(folder)


# A checkpoint that is written while training goes on: its moment, kills during it, and which ones are kept.
async def write_steps(folder: Path, accuracies: Mapping[int, float | None], **rules: Any) -> list[str]:
    store = CheckpointStore(folder, config={}, **rules)
    for step, accuracy in accuracies.items():
        begun = await store.save(replace(STATE, step=step), {"learner": cast(Learner, Shards({"a": b"a"}))}, accuracy)
        await begun.finish()
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep": 2}, (50, 60)),
        ({"keep": 1, "keep_best": 1}, (40, 60)),  # of equal ones the later
        ({"keep": 1, "keep_best": 2}, (20, 40, 60)),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, rules: Any, kept: tuple[int, ...]) -> None:
    accuracies = {0: 0.1, 10: 0.2, 20: 0.7, 30: 0.3, 40: 0.7, 50: None, 60: 0.5}
    assert asyncio.run(write_steps(tmp_path, accuracies, **rules)) == [f"step_{step:06d}" for step in kept]


def test_the_best_is_known_after_a_resume_too(tmp_path: Path) -> None:
    rules = {"keep": 1, "keep_best": 1}
    asyncio.run(write_steps(tmp_path, {1: 0.9, 2: 0.1}, **rules))
    assert asyncio.run(write_steps(tmp_path, {3: 0.2}, **rules)) == ["step_000001", "step_000003"]


def test_each_manifest_is_read_once_and_again_where_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each names all files of a checkpoint, and a run may keep hundreds of checkpoints."""
    rules, read, manifest = {"keep": 9, "keep_best": 1}, list[str](), checkpoints._manifest

    def counted(folder: Path) -> Any:
        read.append(folder.name)
        return manifest(folder)

    monkeypatch.setattr(checkpoints, "_manifest", counted)
    steps = asyncio.run(write_steps(tmp_path, {1: 0.9, 2: 0.1, 3: 0.2, 4: 0.3}, **rules))
    assert sorted(read) == steps
    store = CheckpointStore(tmp_path, config={}, keep=1, keep_best=1)
    store.note_accuracy(tmp_path / "step_000002", 0.95)
    assert asyncio.run(write_steps(tmp_path, {5: 0.1}, keep=1, keep_best=1)) == ["step_000002", "step_000005"]


def test_accuracies_that_were_measured_otherwise_are_not_compared(tmp_path: Path) -> None:
    rules = {"keep": 1, "keep_best": 1}
    asyncio.run(write_steps(tmp_path, {1: 0.9, 2: 0.1}, **rules, measured_by="easy"))
    found = asyncio.run(write_steps(tmp_path, {3: 0.2, 4: 0.1, 5: None}, **rules, measured_by="hard"))
    assert found == ["step_000001", "step_000003", "step_000005"]


def test_accuracies_of_an_older_version_are_compared(tmp_path: Path) -> None:
    """Its manifests do not say how they were measured."""
    rules = {"keep": 1, "keep_best": 1}
    asyncio.run(write_steps(tmp_path, {1: 0.9, 2: 0.1}, **rules))
    found = asyncio.run(write_steps(tmp_path, {3: 0.95, 4: 0.1}, **rules, measured_by="as before"))
    assert found == ["step_000003", "step_000004"]


@pytest.mark.parametrize("damaged", ["{", None])
def test_an_unread_accuracy_ends_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str | None) -> None:
    rules = {"keep": 1, "keep_best": 1}
    asyncio.run(write_steps(tmp_path, {1: 0.1}, **rules))
    manifest = tmp_path / "step_000001/manifest.json"
    manifest.unlink()
    if damaged is not None:
        manifest.write_text(damaged)
    found = asyncio.run(write_steps(tmp_path, {2: 0.9, 3: 0.5, 4: 0.4}, **rules))
    assert found == ["step_000001", "step_000002", "step_000004"]
    assert f"keeps a checkpoint of unknown accuracy: {manifest}" in caplog.text
    gone = tmp_path / "step_000000"  # which somebody removes meanwhile
    store = CheckpointStore(tmp_path, config={}, **rules)
    assert store._superseded([gone, tmp_path / found[-1]]) == []
    store.note_accuracy(gone, 0.95)  # which an evaluation has measured that a stop put off
    assert f"does not learn the accuracy of {gone}: " in caplog.text
    assert not gone.exists()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (("keep_best=1", "every=0"), r"keep_best=1 with checkpoint\.every=0: only the last step's"),
        (("keep_best=1",), r"keep_best=1 compares eval/accuracy, .*eval\.every=10 steps, .*checkpoint\.every=25"),
    ],
)
def test_rules_by_which_nothing_would_be_kept_are_refused(keys: tuple[str, ...], reason: str) -> None:
    RunConfig.model_validate({"checkpoint": {"every": 20, "keep_best": 3}})
    given = dict(key.split("=") for key in keys)
    with pytest.raises(ValidationError, match=reason):
        RunConfig.model_validate({"checkpoint": {"every": 25, **{key: int(value) for key, value in given.items()}}})


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        ({"steps": [3, 101]}, r"profile\.steps has 101, but train\.steps=100; leave out the later steps"),
        ({"memory": True}, r"profile\.memory=true with learner\.device=cpu: it records only GPU memory"),
    ],
)
def test_profiles_that_no_run_could_have_are_refused(profile: dict[str, object], reason: str) -> None:
    RunConfig.model_validate({"learner": {"ep": 2}, "profile": {"steps": "3,100"}})
    with pytest.raises(ValidationError, match=reason):
        RunConfig.model_validate({"learner": {"ep": 2}, "profile": profile})


class Slow(Shards):
    """A learner whose shards are written when the test says so; ``asked``: somebody looked."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.asked = False, asyncio.Event()

    async def save(self, folder: Path) -> Any:
        done, outer = await super().save(folder), self

        class Later(Ended):
            async def is_written(self, *, wait: bool = False) -> bool:
                outer.asked.set()
                return outer.go

        return Later(done.files)


async def test_what_a_checkpoint_holds_is_of_the_moment_when_it_was_begun(tmp_path: Path) -> None:
    prompts, learner = {"epoch": 0, "next": 8}, Slow()
    store = CheckpointStore(tmp_path, keep=2, config={})
    begun = await store.save(replace(STATE, prompts=prompts), {"learner": cast(Learner, learner)})
    prompts["next"] = 16  # training goes on
    await learner.asked.wait()
    assert (begun.saved, checkpoints.latest(tmp_path)) == (None, None)
    learner.go = True
    assert begun.saved is not await begun.finish()
    assert checkpoints.read(tmp_path / "step_000003").state == STATE


async def test_a_checkpoint_gets_its_name_though_nobody_asks_for_it(tmp_path: Path) -> None:
    learner = Slow()
    begun = await CheckpointStore(tmp_path, keep=2, config={}).save(STATE, {"learner": cast(Learner, learner)})
    await learner.asked.wait()
    learner.go = True
    async with asyncio.timeout(30):
        while begun.saved is None:
            await asyncio.sleep(0.001)
    assert checkpoints.latest(tmp_path) == begun.folder == begun.saved.folder


async def test_no_rank_is_asked_for_a_collective_while_another_writes(tmp_path: Path) -> None:
    """Two models, of which the second is written later; ``finalize`` is the call with collectives."""
    events = list[str]()

    class Timed(Shards):
        def __init__(self, name: str, turns: int) -> None:
            super().__init__({"a": b"a"})
            self.name, self.turns = name, turns

        async def save(self, folder: Path) -> Any:
            done, outer = await super().save(folder), self

            class Later(Ended):
                async def is_written(self, *, wait: bool = False) -> bool:
                    while wait and outer.turns:
                        outer.turns -= 1
                        await asyncio.sleep(0)
                    if wait:
                        events.append(f"{outer.name} is written")
                    return not outer.turns

                async def finalize(self) -> SaveDigests:
                    events.append(f"{outer.name}'s ranks meet")
                    return await super().finalize()

            return Later(done.files)

    learners = {"learner": cast(Learner, Timed("policy", 2)), "critic": cast(Learner, Timed("critic", 9))}
    await (await CheckpointStore(tmp_path, keep=2, config={}).save(STATE, learners)).finish()
    assert sorted(events[:2]) == ["critic is written", "policy is written"]
    assert sorted(events[2:]) == ["critic's ranks meet", "policy's ranks meet"]


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")


def killed_at(folder: Path, moment: int) -> bool:
    """Write a checkpoint of step 4 in a process that ends as by kill -9 at its ``moment``-th event with files; whether
    it came to that."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hear(event: str, given: tuple[Any, ...]) -> None:
            nonlocal count
            if event in EVENTS and str(folder) in str(given[0]):
                count += 1
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hear)
        asyncio.run(write_steps(folder, {4: None}, keep=1))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
