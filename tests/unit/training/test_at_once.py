"""Concurrent calls to models: all start before the first is awaited, and one that fails ends the others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer
from rl_megatron.errors import DataError, WorkerDied
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.tasks import AtOnce
from rl_megatron.training.update import Update
from rl_megatron.types import Batch, Counts, Loss, Metric
from tests.unit.training.test_engine_logprobs import LENGTHS, Learner, groups

LIMIT = 300.0


async def test_they_work_at_the_same_time_and_are_asked_in_order() -> None:
    watch, asked = Stopwatch(), list[str]()
    reference_done = asyncio.Event()

    async def policy() -> str:
        asked.append("policy")
        await reference_done.wait()  # for ever, if it came after
        return "log-probs"

    async def reference() -> str:
        asked.append("reference")
        reference_done.set()
        return "reference log-probs"

    async with asyncio.timeout(LIMIT), AtOnce(watch) as at_once:
        first, second = at_once.begin("logprobs", policy()), at_once.begin("reference", reference())
        assert [await at_once.end(first), await at_once.end(second)] == ["log-probs", "reference log-probs"]
    assert asked == ["policy", "reference"]
    row = watch.row()
    assert row["seconds/logprobs"] + row["seconds/reference"] <= row["seconds/step"]


async def test_the_first_that_fails_is_raised_and_the_others_are_left() -> None:
    left = list[str]()

    async def dies() -> None:
        raise WorkerDied("critic rank 1")

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.append("policy")
            raise

    async def ask() -> None:
        async with asyncio.timeout(LIMIT), AtOnce(Stopwatch()) as at_once:
            critic, _ = at_once.begin("critic", dies()), at_once.begin("train", hangs())
            await at_once.end(critic)

    with pytest.raises(WorkerDied, match="critic rank 1"):
        await ask()
    assert left == ["policy"]


async def test_an_error_of_the_one_who_asks_is_raised_and_all_are_left() -> None:
    left = list[str]()

    async def ask() -> None:
        async def hangs(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)  # its end takes a while, and is waited for
                left.append(name)

        async with asyncio.timeout(LIMIT), AtOnce(Stopwatch()) as at_once:
            at_once.begin("critic", hangs("critic"))
            at_once.begin("train", hangs("policy"))
            await asyncio.sleep(0)
            raise DataError("these completions have no routes")

    with pytest.raises(DataError, match="have no routes"):
        await ask()
    assert left == ["critic", "policy"]


def test_ranks_do_not_wait_for_the_metrics_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, metrics = threading.Event(), Packer.metrics

    class Trains(Learner):
        async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float | Counts]]:
            asked.set()
            return await super().backward(batch, loss)

    def late(packer: Packer, batches: list[Batch]) -> dict[str, Any]:
        assert asked.wait(LIMIT)
        return dict(metrics(packer, batches))

    monkeypatch.setattr(Packer, "metrics", late)
    learner: Any = Trains()
    roles = Roles(learners={"policy": learner}, frozen={}, engine=learner, weights=learner)
    config = RunConfig.model_validate({"train": {"minibatches": 1}})
    row = asyncio.run(Update(config=config, roles=roles, attention_cost=0.0)(groups(), 1, Stopwatch()))
    assert row["tokens/train"] == sum(LENGTHS) + len(LENGTHS)  # of a prompt of two tokens, one is a position
