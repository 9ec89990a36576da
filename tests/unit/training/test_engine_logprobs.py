"""Corrections and mismatch metrics of an update come from the log-probs that the engine reported."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.config.run import RunConfig
from rl_megatron.data.trajectories import single_turns
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Row, Stopwatch
from rl_megatron.training.update import Update
from rl_megatron.types import (
    Batch,
    Completion,
    Counts,
    Loss,
    LossInputs,
    Metric,
    Prompt,
    RolloutGroup,
    Samples,
    Scores,
    StepResult,
    Want,
)
from tests.completions import completion
from tests.reduction import values

LENGTHS, GROUP = (3, 5, 2, 6), 4


def learner_says(samples: Samples) -> Tensor:
    """A learner's log-probs: some function of the tokens."""
    return -((samples.targets * 7 % 13).float() / 5 + 0.1)


@dataclass
class Learner:
    """Scores by the function above; a step is the loss alone, on a policy that has not moved."""

    rows: list[dict[str, float]] = field(default_factory=list)

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        return {"logprobs": [[learner_says(m) for m in row] for row in batch.micro_batches]}

    async def step(self, learning_rate: float) -> StepResult:
        return StepResult(grad_norm=0.0)

    async def forget(self) -> None:
        """It keeps nothing of a batch."""

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float | Counts]]:
        (samples,) = batch.micro_batches[0]
        ids, columns = sequence_ids(samples.cu_seqlens), samples.columns
        inputs = {k: v for k, v in columns.items() if k not in ("input_ids", "targets", "routes")}
        output = loss(
            LossInputs(
                **inputs,
                logprobs=learner_says(samples).requires_grad_(),
                entropy=torch.zeros(len(ids)),
                segment_ids=ids,
                segment_sum=partial(segment_sum, ids=ids, num_segments=samples.num_sequences),
                num_tokens=batch.num_tokens,
                num_sequences=batch.num_sequences,
            )
        )
        means: dict[str, Metric[float | Counts]] = {
            name: Metric(value=value.item()) for name, value in values(output, "mean").items()
        }
        return {"loss": Metric(value=float(output.loss.detach())), **means}


def sampled() -> list[Completion]:
    return [
        completion([11 * s + t for t in range(length)], [-0.3 - 0.37 * ((s + 2 * t) % 5) for t in range(length)])
        for s, length in enumerate(LENGTHS)
    ]


def groups() -> list[RolloutGroup]:
    prompt = Prompt(id="p", text="p", token_ids=(1, 2), answer="")
    return [single_turns(prompt, sampled(), rewards=[float(s % 2) for s in range(GROUP)])]


def update(**algorithm: Any) -> Row:
    config = RunConfig.model_validate({"algorithm": algorithm, "train": {"minibatches": 1}})
    learner: Any = Learner()
    roles = Roles(learners={"policy": learner}, frozen={}, engine=learner, weights=learner)
    work = Update(config=config, roles=roles, attention_cost=0.0)
    return asyncio.run(work(groups(), 1, Stopwatch()))


def gaps() -> list[list[float]]:
    """Learner less engine of each token of each completion, in plain Python."""
    return [
        [-(t * 7 % 13) / 5 - 0.1 - engine for t, engine in zip(c.token_ids.tolist(), c.logprobs.tolist(), strict=True)]
        for c in sampled()
    ]


def expected(correction: dict[str, Any]) -> list[float]:
    out = []
    for of_sequence in gaps():
        mean = sum(of_sequence) / len(of_sequence)
        vetoed = any(math.exp(gap) < correction.get("veto", 0.0) for gap in of_sequence)
        for gap in of_sequence:
            weight = math.exp(mean if correction.get("level") == "sequence" else gap)
            low, high = correction.get("low", 0.0), correction.get("high", 2.0)
            inside = low <= weight <= high
            weight = {
                "truncate": min(max(weight, low), high),
                "mask": weight if inside else 0.0,
                "band": float(inside),
                "none": 1.0,
            }[correction["mode"]]
            out.append(0.0 if vetoed else weight)
    return out


@pytest.mark.parametrize(
    "correction",
    [
        {"mode": "truncate"},
        {"mode": "truncate", "level": "sequence", "high": 1.1},
        {"mode": "mask", "low": 0.5, "high": 1.5},
        {"mode": "band", "level": "sequence", "low": 0.8, "high": 1.2},
        {"mode": "none", "veto": 0.2},
    ],
    ids=["TIS", "sequence", "mask", "band", "veto"],
)
def test_weights_are_learner_over_engine(correction: dict[str, Any]) -> None:
    row, weights = update(correction=correction), expected(correction)
    assert len(set(weights)) > 1
    assert row["correction/weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert row["correction/dropped_fraction"] == pytest.approx(weights.count(0.0) / len(weights))


def test_the_row_tells_how_many_tokens_m2po_leaves_out() -> None:
    """The largest squares, until the mean of the rest is at most the limit."""
    squares = sorted(gap**2 for of_sequence in gaps() for gap in of_sequence)
    row = update(objective="importance", tokens={"choose": "second_moment", "limit": 0.5})
    kept = max(n for n in range(len(squares) + 1) if sum(squares[:n]) <= 0.5 * n)
    assert 1 < kept < len(squares) - 1
    assert row["tokens/chosen_fraction"] == pytest.approx(kept / len(squares))


def test_the_row_tells_the_mismatch_of_the_batch() -> None:
    row, every = update(), [gap for of_sequence in gaps() for gap in of_sequence]
    assert row["mismatch/k1"] == pytest.approx(-sum(every) / len(every), rel=1e-5)
    assert of_gaps(row) == pytest.approx(of_gaps_expected(), rel=1e-5)
    firsts = [abs(of_sequence[0]) for of_sequence in gaps()]
    assert row["mismatch/position/t0"] == pytest.approx(sum(firsts) / len(firsts), rel=1e-5)


OF_GAPS = ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "kl/rollout")


def of_gaps(row: Row) -> list[Any]:
    return [row[name] for name in OF_GAPS]


def of_gaps_expected() -> list[float]:
    every = [gap for of_sequence in gaps() for gap in of_sequence]
    sizes = [abs(gap) for gap in every]
    return [sum(sizes) / len(every), max(sizes), sum(math.expm1(gap) - gap for gap in every) / len(every)]


def test_old_logprobs_of_the_engine_have_the_learners_gap_where_it_scores_and_else_none() -> None:
    """0 would say that both agree, though nobody compared them."""
    keys = {"objective": "importance", "old_logprobs": "rollout"}
    assert not update(**keys).keys() & OF_GAPS
    row = update(**keys, tokens={"choose": "second_moment", "limit": 0.5})
    assert of_gaps(row) == pytest.approx(of_gaps_expected(), rel=1e-5)
