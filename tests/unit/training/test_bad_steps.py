"""Optimizer steps whose gradient is not finite: what is named as the cause, and when a run ends."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.run import RunConfig, TrainSection
from rl_megatron.data.packing import Packer, pack
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.samples import WrittenRow, select
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import Learner, Roles
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.checkpoints import TrainerState
from rl_megatron.training.jobs.rl import Reinforcement
from rl_megatron.training.jobs.warm_start import WarmStart
from rl_megatron.training.jobs.written import FineTuning, SupervisedSteps, Unit, WrittenJob
from rl_megatron.training.measures import Made
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import Batch, Counts, Culprit, Loss, Metric, ParallelDims, Prompt, SkippedStep, StepResult
from tests.samples import sequences_of
from tests.unit.training.test_little_to_train_on import Steps, job

PROMPTS = [
    Prompt(id=name, text=name, token_ids=tokens, answer="")
    for name, tokens in (("short", (1, 2)), ("long", (1, 2, 3)), ("other", (9,)))
]
MADE = StepResult(grad_norm=1.0)


def packed(*sequences: tuple[int, ...]) -> Batch:
    """A micro-batch a sequence, on one rank."""
    tokens = torch.tensor([t for s in sequences for t in s])
    samples = sequences_of([len(s) for s in sequences], input_ids=tokens, targets=tokens)
    batch = pack(samples, dims=ParallelDims(), max_tokens=100)
    parts = tuple(select(samples, torch.tensor([i])) for i in range(len(sequences)))
    return replace(batch, micro_batches=(parts,), num_tokens=1)


def bad(*micro_batches: int, rank: int = 0) -> SkippedStep:
    culprits = tuple(Culprit(data_rank=0, micro_batch=m, rank=rank, node="n1") for m in micro_batches)
    return SkippedStep(grad_norm=math.nan, culprits=culprits)


class Answers(Learner):
    """A learner whose next optimizer step ends with a given answer."""

    def __init__(self, answer: StepResult | SkippedStep) -> None:
        self._answer = answer

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float | Counts]]:
        return {"loss": Metric(value=1.0)}

    async def step(self, learning_rate: float) -> StepResult | SkippedStep:
        return self._answer


class Kept(Answers):
    """One that keeps its batch."""

    batch: Batch

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float | Counts]]:
        self.batch = batch
        return await super().backward(batch, loss)

    async def forget(self) -> None:
        """It has no scores."""


def made(steps: OptimizerSteps, answer: StepResult | SkippedStep) -> Made | None:
    return asyncio.run(steps.step(Answers(answer), BATCH, CrossEntropy(), 1.0, PROMPTS))


BATCH = packed((1, 2, 3, 4), (9, 9), (1, 2, 7))


def test_the_micro_batch_its_ranks_and_its_prompts_are_named(caplog: pytest.LogCaptureFixture) -> None:
    steps = OptimizerSteps(name="policy", most=3)
    both = SkippedStep(grad_norm=math.inf, culprits=bad(0, 2).culprits + bad(0, rank=1).culprits)
    with caplog.at_level(logging.WARNING):
        assert made(steps, both) is None
        assert made(steps, bad()) is None
    assert caplog.messages == [
        "the policy's gradient norm is inf: by micro-batch 1 of data-parallel rank 0 (rank 0 on n1, 1 on n1; prompt "
        "'long'), micro-batch 3 of data-parallel rank 0 (rank 0 on n1; prompt 'short'). This optimizer step is "
        "skipped, 1 of at most 3 in a row",
        "the policy's gradient norm is nan: no micro-batch reproduces it alone: either finite gradients have a norm "
        "beyond float32, or memory or processor failed. This optimizer step is skipped, 2 of at most 3 in a row",
    ]


@pytest.mark.parametrize(("key", "left_out"), [("fail", 0), ("skip:1", 1), ("skip:3", 3)])
def test_too_many_in_a_row_end_the_run(key: str, left_out: int) -> None:
    steps = OptimizerSteps(name="critic", most=TrainSection(on_nonfinite=key).most_skipped)
    for _ in range(2):  # a step that is made ends the row
        for _ in range(left_out):
            assert made(steps, bad(1)) is None
        assert made(steps, MADE) is not None
    for _ in range(left_out):
        made(steps, bad(1))
    with pytest.raises(RLMegatronError, match=rf"'other'\).*{left_out + 1} optimizer .*on_nonfinite={key}:"):
        made(steps, bad(1))


NONE = cast(Any, None)


def test_rows_of_written_text_are_named_by_their_own_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """Prompts of conversations have none, and texts that a reward model scores need not begin with a problem's."""
    prompts = [Prompt(id=f"t:{n}", text="", token_ids=(5,) if n == 3 else (), answer="") for n in range(1, 5)]

    def units_of(some: Sequence[Prompt]) -> list[Unit]:
        tokens = [np.full(3, int(one.id[-1]), np.int32) for one in some]
        return [(WrittenRow(id=one.id, token_ids=ids, turns=((1, 3),)),) for one, ids in zip(some, tokens, strict=True)]

    learner, steps = Kept(bad(0, 1)), OptimizerSteps(name="policy", most=1)
    packer = Packer(dims=ParallelDims(), max_tokens=2, attention_cost=0.0)
    its = WrittenJob(
        config=RunConfig.model_validate({"job": "sft", "sft": {"batch_size": 4}, "train": {"steps": 1}}),
        roles=Roles(learners={"policy": learner}, frozen={}, engine=NONE, weights=NONE),
        prompts=PromptStream(prompts, seed=0),
        size=4,
        units_of=units_of,
        objective=FineTuning(
            supervised=SupervisedSteps(learner=learner, packer=packer, optimizer_steps=steps), loss=NONE
        ),
        optimizer_steps=steps,
        name="",
    )
    with caplog.at_level(logging.WARNING):
        row = asyncio.run(its.step(1, Stopwatch()))
    assert (row["steps/skipped"], "loss" in row) == (1, False)
    guilty = [f"t:{int(part.input_ids[0])}" for part in learner.batch.micro_batches[0][:2]]
    assert re.findall(r"prompt ([^)]*)\)", caplog.text) == [repr(name) for name in guilty]


Started = tuple[WrittenJob | WarmStart | Reinforcement, OptimizerSteps]


def written(folder: Path) -> Started:
    prompts, steps = PromptStream(PROMPTS, seed=0), OptimizerSteps(name="policy", most=3)
    fields: dict[str, Any] = {"config": RunConfig(), "roles": NONE, "units_of": NONE, "objective": NONE}
    return WrittenJob(prompts=prompts, size=3, optimizer_steps=steps, name="", **fields), steps


def warm(folder: Path) -> Started:
    prompts, steps, learner = PromptStream(PROMPTS, seed=0), OptimizerSteps(name="policy", most=3), cast(Any, Steps())
    roles = Roles(learners={"policy": learner}, frozen={}, engine=learner, weights=learner)
    supervised = SupervisedSteps(learner=learner, packer=NONE, optimizer_steps=steps)
    fields: dict[str, Any] = {"config": RunConfig(), "tokenizer": NONE, "targets": NONE, "evaluation": NONE}
    fields |= {"end_token_ids": {"": 1}, "stop_token_ids": (1,), "vocab_size": 9}
    return WarmStart(roles=roles, prompts=prompts, supervised=supervised, **fields), steps


def of_policy(folder: Path) -> Started:
    its = job(folder, [], Steps())
    return its, its.update.policy_steps


def of_critic(folder: Path) -> Started:
    its = job(folder, [], Steps())
    return its, its.update.critic_steps


@pytest.mark.parametrize("start", [written, warm, of_policy, of_critic])
def test_a_resume_goes_on_counting(start: Callable[[Path], Started], tmp_path: Path) -> None:
    """A run that is resumed after each optimizer step skips no more of them in a row than one that is not."""
    checkpoint = TypeAdapter(TrainerState)

    async def after(state: TrainerState | None) -> tuple[TrainerState, OptimizerSteps]:
        its, steps = start(tmp_path)
        if state is not None:
            await its.restore(checkpoint.validate_json(checkpoint.dump_json(replace(state, stream=None))))
        if steps.in_a_row < 3:
            assert await steps.step(Answers(bad(1)), BATCH, CrossEntropy(), 1.0, PROMPTS) is None
        return its.state(), steps

    state = None
    for count in (1, 2, 3):
        state, steps = asyncio.run(after(state))
        assert steps.in_a_row == count
    _, steps = asyncio.run(after(state))
    with pytest.raises(RLMegatronError, match=rf"the {steps.name}'s .* 4 optimizer steps in a row"):
        made(steps, bad(1))
