"""A critic and a reference in layouts of their own beside a learner of two data-parallel ranks: what they say, and what
the critic learns, is what they do on the learner's ranks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.hosts.local import LocalLauncher
from rl_megatron.config.io import load_config
from rl_megatron.interfaces import Roles
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.observability.timeline.kernels import folder_of, read_kernels
from rl_megatron.training.measures import Measured
from rl_megatron.training.scores.requests import measured
from rl_megatron.training.update import Update
from rl_megatron.types import Samples
from tests.distributed.test_plane import TINY, by_transformers, sampled

pytestmark = pytest.mark.usefixtures("forked_nursery")
LENGTHS = [7, 12, 30, 19, 12, 23, 12, 8]
GIVEN = (
    *("learner.threads=1", "learner.ep=1", "learner.dp=2", "learner.max_tokens_per_micro_batch=64"),
    *(
        "rollout.max_new_tokens=16",
        "rollout.max_prompt_tokens=16",
        "rollout.temperature=1.0",
        "train.learning_rate=0.01",
    ),
    *("algorithm=ppo", "algorithm.kl.coefficient=0.1"),
)
APART = (
    *("roles.critic=separate", "roles.layouts.critic.pp=2", "roles.layouts.critic.cp=2"),
    *("roles.reference=separate", "roles.layouts.reference.tp=2", "roles.layouts.reference.ep=2"),
)


def learnt(folder: Path, model: Path, samples: Samples, *keys: str) -> tuple[Measured, Measured, list[float]]:
    """What all models say of the samples before and after two minibatches of real ranks, and the critic's gradient
    norms."""
    config = load_config("tiny_cpu", [*GIVEN, *keys])

    async def step(roles: Roles) -> tuple[Measured, Measured, list[float]]:
        for role in ("critic", "reference"):
            await roles.models[role].start_from(model)
        update = Update(config=config, roles=roles, attention_cost=0.0)
        before = await measured(config, roles, update.packers, samples, 1, Stopwatch(), groups=())
        trained = replace(samples, old_values=before.samples.old_values, ref_logprobs=before.samples.ref_logprobs)
        batches, own_columns = update._minibatches(trained, None, 1)
        _, of_critic = await update._steps(batches, own_columns, 1, Stopwatch(), [], {}, None)
        norms = [made.step.grad_norm for made in of_critic if made is not None]
        return before, await measured(config, roles, update.packers, samples, 2, Stopwatch(), groups=()), norms

    folder.mkdir()

    async def run() -> tuple[Measured, Measured, list[float]]:
        async with LocalLauncher(model, folder).start(config) as roles:
            async with roles.record_kernels([0], folder_of(folder, 1)):
                found = await step(roles)
            assert len({event.process for event in read_kernels(folder)}) == (3 if keys else 1)
            return found

    return asyncio.run(run())


def test_scores_and_steps_are_those_of_the_learners_layout(tmp_path: Path) -> None:
    model, samples = make_tiny_model(TINY, tmp_path / "cache", seed=3), sampled(LENGTHS)
    returns = torch.rand(len(samples.mask), generator=torch.Generator().manual_seed(1)) * samples.mask
    samples = replace(samples, returns=returns, advantages=returns)
    there, after, norms = learnt(tmp_path / "there", model, samples)
    apart, after_apart, norms_apart = learnt(tmp_path / "apart", model, samples, *APART)
    for row in range(len(LENGTHS)):
        first, stop = samples.cu_seqlens[row : row + 2].tolist()
        said = by_transformers(model, samples, row)
        torch.testing.assert_close(apart.samples.ref_logprobs[first:stop], said, atol=1e-4, rtol=0)
    assert len(norms) == 2
    assert after.samples.old_values.abs().max() > 0.01
    torch.testing.assert_close(norms_apart, norms, atol=0, rtol=1e-5)
    for one, other in ((apart, there), (after_apart, after)):
        for name in ("ref_logprobs", "old_values"):
            torch.testing.assert_close(getattr(one.samples, name), getattr(other.samples, name), atol=1e-5, rtol=0)
        torch.testing.assert_close(one.next_values, other.next_values, atol=1e-5, rtol=0)
