"""``job=dpo`` with ``dpo.reference_free=true``: steps and held-out pairs without a frozen model or its memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from torch.nn.functional import logsigmoid

from rl_megatron.config.io import load_config
from rl_megatron.data.packing import Packer
from rl_megatron.data.samples import WrittenRow
from rl_megatron.interfaces import Roles
from rl_megatron.models.named import NAMED
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.scaling.memory import footprints
from rl_megatron.training.jobs.written import Preferences
from rl_megatron.training.optimizer_steps import OptimizerSteps
from rl_megatron.types import ParallelDims
from tests.rows import pair_loss
from tests.toy_roles import VOCABULARY, Toy, table

NONE = cast(Any, None)
RATE = 0.5
PAIRS = (((1, 2, 3), (1, 4, 5, 6)), ((2, 7), (2, 5, 1)))


def rows() -> list[WrittenRow]:
    """Prompts of one token, each with a better and a worse answer."""
    return [
        WrittenRow(id=str(p), token_ids=np.array(side, np.int32), turns=((1, len(side)),))
        for p, pair in enumerate(PAIRS)
        for side in pair
    ]


async def test_a_step_and_held_out_pairs_are_those_of_plain_means_and_no_model_starts() -> None:
    weights = table(VOCABULARY, VOCABULARY, seed=1)
    policy = Toy(weights)
    samples = Preferences.samples_of(rows())
    job = Preferences(
        loss=pair_loss(2.0, per_token=True, reference_free=True, target_margin=1.0),
        roles=Roles(learners={"policy": policy}, frozen={}, engine=NONE, weights=NONE),
        packer=Packer(dims=ParallelDims(), max_tokens=30, attention_cost=0.0, unit=2),
        optimizer_steps=OptimizerSteps(name="policy", most=0),
        parts=[samples],
        reference=None,
    )
    watch = Stopwatch()
    await job.begin(fresh=True)
    held_out, made = await job.held_out(), await job.step(samples, RATE, [], watch)
    plain = weights.double().requires_grad_()
    logprobs = plain.log_softmax(-1)
    means = [[sum(logprobs[x, y] for x, y in pairwise(s)) / (len(s) - 1) for s in pair] for pair in PAIRS]
    loss = sum(-logsigmoid(2.0 * (better - worse) - 1.0) for better, worse in means) / 2
    loss.backward()
    assert held_out["eval/loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert made is not None
    assert made.loss == pytest.approx(loss.item(), rel=1e-6)
    assert plain.grad is not None
    assert (policy.weights - (weights - RATE * plain.grad)).abs().max() < 1e-6
    assert "seconds/reference" not in watch.row()


def test_a_plan_has_no_memory_of_a_reference() -> None:
    for recipe, keys, without in (
        ("dpo_tiny", (), "dpo.reference_free=true"),
        ("tiny_cpu", ("algorithm=dpo",), "algorithm.preference.reference_free=true"),
    ):
        shape = NAMED["qwen3-30b-a3b"]
        beside, alone = (
            footprints(load_config(recipe, ["model.path=/given", *given]), shape) for given in (keys, (*keys, without))
        )
        assert all(one.terms["reference"] > 0 for one in beside)
        assert [one.terms | {"reference": 0.0} for one in beside] == [one.terms for one in alone]
        assert not load_config(recipe, [*keys, without]).needs_reference
