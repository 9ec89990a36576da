"""Optimizer steps whose gradient is not finite: who is named as the cause, and when a run ends."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from rl_megatron.config.run import TrainSection
from rl_megatron.data.packing import pack
from rl_megatron.data.samples import select
from rl_megatron.errors import RLMegatronError
from rl_megatron.training.bad_steps import BadSteps
from rl_megatron.types import Batch, Culprit, ParallelDims, Prompt, Samples, SkippedStep, StepResult

PROMPTS = [
    Prompt(id=name, text=name, token_ids=tokens, answer="")
    for name, tokens in (("short", (1, 2)), ("long", (1, 2, 3)), ("other", (9,)))
]
MADE = StepResult(loss=1.0, grad_norm=1.0, metrics={})


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
    return Batch(micro_batches=(parts,), sequences=batch.sequences, num_tokens=1, num_sequences=len(sequences))


def bad(*micro_batches: int, rank: int = 0) -> SkippedStep:
    culprits = tuple(Culprit(data_rank=0, micro_batch=m, rank=rank, node="n1") for m in micro_batches)
    return SkippedStep(grad_norm=math.nan, culprits=culprits)


BATCH = packed((1, 2, 3, 4), (9, 9), (1, 2, 7))


def test_the_micro_batch_its_ranks_and_its_prompts_are_named(caplog: pytest.LogCaptureFixture) -> None:
    steps = BadSteps(name="policy", most=3)
    both = SkippedStep(grad_norm=math.inf, culprits=bad(0, 2).culprits + bad(0, rank=1).culprits)
    with caplog.at_level(logging.WARNING):
        assert steps.made(both, BATCH, PROMPTS) is None
        assert steps.made(bad(), BATCH, PROMPTS) is None
    assert caplog.messages == [
        "the policy's gradient norm is inf: by micro-batch 1 of data-parallel rank 0 (rank 0 on n1, 1 on n1; prompt "
        "'long'), micro-batch 3 of data-parallel rank 0 (rank 0 on n1; prompt 'short'). This optimizer step is left "
        "out, 1 of 3 in a row",
        "the policy's gradient norm is nan: no micro-batch by itself gives it again: finite parts whose norm is beyond "
        "float32, or a fault of memory or processor. This optimizer step is left out, 2 of 3 in a row",
    ]


@pytest.mark.parametrize(("key", "left_out"), [("fail", 0), ("skip:1", 1), ("skip:3", 3)])
def test_too_many_in_a_row_end_the_run(key: str, left_out: int) -> None:
    steps = BadSteps(name="critic", most=TrainSection(on_nonfinite=key).most_skipped)
    for _ in range(2):  # a step that is made ends the row
        for _ in range(left_out):
            assert steps.made(bad(1), BATCH, PROMPTS) is None
        assert steps.made(MADE, BATCH, PROMPTS) is MADE
    for _ in range(left_out):
        steps.made(bad(1), BATCH, PROMPTS)
    with pytest.raises(RLMegatronError, match=rf"'other'\).*{left_out + 1} optimizer .*on_nonfinite={key}:"):
        steps.made(bad(1), BATCH, PROMPTS)
