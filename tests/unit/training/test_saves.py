"""A checkpoint that is written while training goes on: its moment, kills during it, and which ones are kept."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from rl_megatron.config.run import RunConfig
from rl_megatron.digests import Written
from rl_megatron.interfaces import Learner
from rl_megatron.training import checkpoints
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from tests.savings import Ended, Shards

STATE = TrainerState(step=3, prompts={"epoch": 0, "next": 8}, stream=None)


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
def test_a_checkpoint_whose_accuracy_cannot_be_read_stays_and_ends_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str | None
) -> None:
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
        ({"steps": [3, 101]}, r"profile\.steps has 101, but train\.steps=100; leave out later ones"),
        ({"ranks": [0, 2]}, r"profile\.ranks has 2, but learner\.tp, cp, dp and pp make 2 ranks, from 0 on"),
        ({"ranks": []}, r"profile\.ranks\s+Value should have at least 1 item"),
        ({"memory": True}, r"profile\.memory=true with learner\.device=cpu: it is for GPUs"),
    ],
)
def test_profiles_that_no_run_could_have_are_refused(profile: dict[str, object], reason: str) -> None:
    RunConfig.model_validate({"learner": {"ep": 2}, "profile": {"steps": "3,100", "ranks": [1]}})
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
            async def written(self, *, wait: bool = False) -> bool:
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
    """Two models, of which the second is written later; ``durable`` is the call with collectives."""
    events = list[str]()

    class Timed(Shards):
        def __init__(self, name: str, turns: int) -> None:
            super().__init__({"a": b"a"})
            self.name, self.turns = name, turns

        async def save(self, folder: Path) -> Any:
            done, outer = await super().save(folder), self

            class Later(Ended):
                async def written(self, *, wait: bool = False) -> bool:
                    while wait and outer.turns:
                        outer.turns -= 1
                        await asyncio.sleep(0)
                    if wait:
                        events.append(f"{outer.name} is written")
                    return not outer.turns

                async def durable(self) -> Written:
                    events.append(f"{outer.name}'s ranks meet")
                    return await super().durable()

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
