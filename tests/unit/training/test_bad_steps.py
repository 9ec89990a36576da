"""Optimizer steps whose gradient is not finite: what is named as the cause, and when a run ends."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace

import pytest
import torch

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.run import TrainSection
from rl_megatron.data.packing import pack
from rl_megatron.data.samples import select
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import Learner
from rl_megatron.training.measures import Made
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import (
    Batch,
    Counts,
    Culprit,
    Loss,
    Metric,
    ParallelDims,
    Prompt,
    Samples,
    SkippedStep,
    StepResult,
)

PROMPTS = [
    Prompt(id=name, text=name, token_ids=tokens, answer="")
    for name, tokens in (("short", (1, 2)), ("long", (1, 2, 3)), ("other", (9,)))
]
MADE = StepResult(grad_norm=1.0)


def packed(*sequences: tuple[int, ...]) -> Batch:
    """A micro-batch a sequence, on one rank."""
    tokens = torch.tensor([t for s in sequences for t in s])
    zeros = torch.zeros(len(tokens))
    samples = Samples(
        input_ids=tokens,
        targets=tokens,
        mask=zeros == 0,
        advantages=zeros,
        rollout_logprobs=zeros,
        old_logprobs=zeros,
        cu_seqlens=torch.tensor([0, *torch.tensor([len(s) for s in sequences]).cumsum(0).tolist()]),
    )
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
