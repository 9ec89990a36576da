"""A teacher behind servers as a frozen model: what it is asked, and what its answers make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.data.packing import Packer, unpack
from rl_megatron.data.samples import to_samples
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.rollout.servers.decoding import Judged
from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.teachers import Teacher
from rl_megatron.types import Batch, ParallelDims, Prompt, RolloutGroup, Samples, Want
from tests.turns import trajectory
from tests.unit.rollout.test_engine_servers import Fake, Words, running

VOCABULARY, TOP = 12, 3


def told(text: Sequence[int], scale: float) -> list[float]:
    """Log-probs of the tokens behind the first, which say both tokens and the place."""
    return [-scale * (1 + 0.1 * place + text[place - 1] + 0.01 * text[place]) for place in range(1, len(text))]


class Told(Words):
    async def judge(self, server: Server, text: Sequence[int], top: int) -> Judged:
        said = await server.sampled("/judge", {"text": list(text), "top": top}, json.loads)
        ids = np.array(said["ids"], np.int32).reshape(len(text) - 1, top)
        return Judged(
            logprobs=np.array(said["logprobs"], np.float32), top_ids=ids, top_logprobs=-0.5 * ids.astype(np.float32) - 1
        )


def answers(fake: Fake, scale: float, *, first: int = 0) -> list[list[int]]:
    """Have the server answer, with probable tokens from ``first`` on; the texts that it was asked for."""
    texts = list[list[int]]()

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        texts.append(body["text"])
        ids = [[first + k for k in range(body["top"])] for _ in body["text"][1:]]
        return 200, {"logprobs": told(body["text"], scale), "ids": ids}

    fake.answer = answer
    return texts


def teacher(fake: Fake, top: int = TOP, **keys: Any) -> Teacher:
    section = TeacherSection.model_validate({"server": fake.url, "engine": "vllm", "path": "t", **keys})
    return Teacher(name="t", section=section, adapter=Told(), top=top, vocab_size=VOCABULARY)


def groups() -> list[RolloutGroup]:
    """Four completions of two prompts, of different lengths."""
    lengths = {"a": (3, 5), "b": (2, 7)}
    return [
        RolloutGroup(
            prompt=Prompt(id=source, text="", token_ids=(1, 2), answer=""),
            trajectories=tuple(trajectory([length], seed=length) for length in of),
        )
        for source, of in lengths.items()
    ]


def packed() -> tuple[Samples, Batch]:
    samples = to_samples(groups())
    packer = Packer(dims=ParallelDims(dp=2), max_tokens=8, attention_cost=0.0, unit=1)
    return samples, packer.pack(samples)


def scored(model: Teacher, want: frozenset[Want]) -> dict[Want, torch.Tensor]:
    samples, batch = packed()

    async def ask() -> dict[Want, torch.Tensor]:
        await model.try_out()
        said = await model.score(batch, want)
        return {name: unpack(batch, rows, samples) for name, rows in said.items()}

    return asyncio.run(ask())


def texts() -> list[list[int]]:
    return [list(one.chains[0].token_ids) for group in groups() for one in group.trajectories]


def test_each_sequence_has_the_log_probs_and_tokens_of_its_teacher() -> None:
    with running(1) as (fake,):
        asked = answers(fake, 1.0)
        said = scored(teacher(fake), frozenset({"logprobs", "top"}))
    np.testing.assert_allclose(said["logprobs"], np.concatenate([told(one, 1.0) for one in texts()]), rtol=1e-6)
    assert sorted(asked[1:]) == sorted(texts())  # each once, behind the trial
    assert said["top"].shape == (len(said["logprobs"]), 2, TOP)
    np.testing.assert_array_equal(said["top"][:, 0], np.tile([0.0, 1.0, 2.0], (len(said["logprobs"]), 1)))
    np.testing.assert_array_equal(said["top"][:, 1], -0.5 * said["top"][:, 0] - 1)


def test_all_tokens_are_named_where_the_vocabulary_has_no_more() -> None:
    with running(1) as (fake,):
        answers(fake, 1.0)
        assert scored(teacher(fake, top=64), frozenset({"top"}))["top"].shape[2] == VOCABULARY


def test_a_failed_attempt_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        answers(fake, 1.0)

    with running(1) as (fake,):
        monkeypatch.setattr(asyncio, "sleep", sleep)
        fake.answer = lambda path, body, number: (500, {})
        said = asyncio.run(teacher(fake).judge([1, 2, 3], 0))
    np.testing.assert_allclose(said.logprobs, told([1, 2, 3], 1.0), rtol=1e-6)
    assert waits == [1.0]


@pytest.mark.parametrize("refusal", [401, 403])
async def test_a_token_that_rotates_is_read_for_each_attempt_and_no_connection_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    steps, right = ["", "new"], "new"  # who rotates it truncates the file, then writes

    async def sleep(seconds: float) -> None:
        file.write_text(steps.pop(0))

    with running(1) as (fake,):
        answers(fake, 1.0)
        answer = fake.answer
        fake.answer = lambda path, body, number: (
            answer(path, body, number) if fake.tokens[number] == right else (refusal, {})
        )
        model = teacher(fake, token_file=file)

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            said = await model.judge([1, 2, 3], 0)
        np.testing.assert_allclose(said.logprobs, told([1, 2, 3], 1.0), rtol=1e-6)
        for right in map(str, range(4)):
            file.write_text(right)
            await model.judge([1, 2, 3], 0)
        ports = [one.raddr.port for one in psutil.Process().net_connections("tcp") if one.raddr]
        assert fake.server_port not in ports
        assert (steps, len(fake.asked)) == ([], 6)  # old, new, and four more


def test_a_token_that_is_not_there_is_refused_and_one_that_stays_wrong_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_megatron.rollout.teachers._RETRIES", 0)
    file = tmp_path / "token"
    with running(1) as (fake,):
        with pytest.raises(ConfigError, match=r"algorithm\.kl\.teachers\.t\.token_file=.*No such file"):
            teacher(fake, token_file=file)
        file.write_text("wrong")
        fake.answer = lambda path, body, number: (401, {"why": "unknown"})
        named = (
            rf"teachers\.t: {fake.url}/judge: status 401.*unknown.*refuses the token of .*token_file={file}: .*made: 1"
        )
        with pytest.raises(EngineError, match=named):
            asyncio.run(teacher(fake, token_file=file).judge([1, 2], 0))
        with pytest.raises(EngineError, match=r"status 401.*unknown"):
            asyncio.run(teacher(fake).judge([1, 2], 0))  # it has none to read again
        assert len(fake.asked) == 2


def test_what_goes_on_failing_or_is_refused_ends_with_the_teachers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_megatron.rollout.teachers._RETRIES", 0)
    with running(1) as (fake,):
        fake.answer = lambda path, body, number: (500, {"why": "tired"})
        with pytest.raises(EngineError, match=r"algorithm\.kl\.teachers\.t: .*tired.*; attempts made: 1$"):
            asyncio.run(teacher(fake).judge([1, 2], 0))
        fake.answer = lambda path, body, number: (400, {"why": "too long"})
        with pytest.raises(EngineError, match=r"algorithm\.kl\.teachers\.t: .*too long"):
            asyncio.run(teacher(fake).judge([1, 2], 0))
        assert len(fake.asked) == 2


def test_a_token_that_the_policy_lacks_and_scores_that_no_server_tells_are_refused() -> None:
    with running(1) as (fake,):
        answers(fake, 1.0, first=10)
        with pytest.raises(EngineError, match=r"it names token 12, and the policy's last is 11"):
            scored(teacher(fake), frozenset({"top"}))
        with pytest.raises(EngineError, match="tells log-probs, and no values"):
            scored(teacher(fake), frozenset({"values"}))
