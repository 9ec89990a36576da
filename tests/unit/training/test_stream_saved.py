"""What waits in the stream is in a checkpoint's files of columns, with checksums as all its files."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from rl_megatron.digests import digest_of
from rl_megatron.errors import CheckpointError
from rl_megatron.rollout.batch import Answered
from rl_megatron.rollout.stream import StreamState
from rl_megatron.training import checkpoints
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from rl_megatron.types import Chain, RolloutGroup, Scored, Span, Trajectory, Turn
from tests.savings import Shards
from tests.unit.rollout.test_work_under_way import killed

AS_JSON = TypeAdapter(StreamState)


@pytest.fixture(scope="module")
def stream() -> StreamState:
    """Four groups of three completions, of which 2, 4 and 4 tokens were sampled: the numbers 0, 1, 2, 3."""
    return asyncio.run(killed())[1]


@pytest.fixture
def folder(tmp_path: Path, stream: StreamState) -> Path:
    return saved(tmp_path, stream)


def saved(path: Path, stream: StreamState) -> Path:
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
        assert files[name] == {"bytes": len(data), "xxh3_128": digest_of(data).xxh3_128}


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
    one = Trajectory(chains=(Chain(token_ids=tokens, turns=(turn,)),), reward=1.0, parts={"right": (1.0, 0.5)})
    shown = replace(one, chains=(replace(one.chains[0], turns=(replace(turn, spans=()),)),))
    demonstration = RolloutGroup(prompt=stream.places[0].drawn.prompt, trajectories=(shown,))
    answered = Answered(group=replace(demonstration, trajectories=(one, one), demonstration=demonstration))
    state = replace(stream, places=(replace(stream.places[0], answered=answered), *stream.places[1:]))
    folder, whole = saved(tmp_path, state), AS_JSON.dump_json(state)
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


def test_groups_that_wait_without_a_finite_reward_are_read_as_they_were_saved(
    tmp_path: Path, stream: StreamState
) -> None:
    """JSON has no word for such numbers; a null could not be read, in none of the run's checkpoints."""
    failed = Scored(total=math.nan, error="no answer within 30 s", late=True)
    endless = Scored(total=math.inf, parts={"a": -math.inf, "b": math.nan}, steps=((3, math.nan),), error="not finite")
    answered = Answered(group=None, reason="reward_error", scored=(failed, endless))
    state = replace(stream, places=(replace(stream.places[0], answered=answered), *stream.places[1:]))
    found = checkpoints.read(saved(tmp_path, state)).state.stream
    assert found is not None
    read = found.places[0].answered
    assert read is not None
    assert read.reason == "reward_error"
    assert repr(read.scored) == repr(answered.scored)  # NaN is not equal to NaN


def test_half_of_a_surrogate_pair_in_what_failed_is_saved_by_its_number(tmp_path: Path, stream: StreamState) -> None:
    """A model that cut an emoji in JSON, and a reward or tool that quotes it; UTF-8 has no such character."""
    quoted = Scored(total=math.nan, error="no tool \ud83d", answer="\udc00€")
    answered = Answered(group=None, reason="environment_error", problem="no tool \ud83d", scored=(quoted,))
    state = replace(stream, places=(replace(stream.places[0], answered=answered), *stream.places[1:]))
    found = checkpoints.read(saved(tmp_path, state)).state.stream
    assert found is not None
    read = found.places[0].answered
    assert read is not None
    assert (read.problem, read.scored[0].error) == ("no tool \\ud83d", "no tool \\ud83d")
    assert read.scored[0].answer == "\\udc00€"


def test_a_checkpoint_that_counts_no_left_out_tokens_is_still_read(stream: StreamState) -> None:
    left_out = replace(stream.places[0], answered=Answered(group=None, reason="equal_rewards", left_out_tokens=5))
    older = json.loads(AS_JSON.dump_json(replace(stream, left_out=(left_out,))))
    assert older["left_out"][0]["answered"].pop("left_out_tokens") == 5
    (read,) = AS_JSON.validate_python(older).left_out
    assert read.answered == Answered(group=None, reason="equal_rewards")


def put(folder: Path, name: str, data: bytes, without: Sequence[str] = ()) -> None:
    """Replace a file, and say so in the manifest, which then lists no file of ``without``."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = digest_of(data)
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
    longer = np.zeros(41, np.int32)
    np.save(folder / "longer.npy", longer)
    put(folder, "stream/tokens.npy", (folder / "longer.npy").read_bytes())
    with pytest.raises(CheckpointError, match=r"tokens\.npy has 41 numbers, of which 40 are .*\nremove .*step_000003"):
        checkpoints.read(folder)
    put(folder, "stream/tokens.npy", b"no numbers")
    with pytest.raises(CheckpointError, match=r"tokens\.npy is no column of int32: .*\nremove .*step_000003"):
        checkpoints.read(folder)
    put(folder, "stream/tokens.npy", b"", without=("stream/tokens.npy",))
    with pytest.raises(CheckpointError, match=r"tokens\.npy is not among the checkpoint's files"):
        checkpoints.read(folder)
