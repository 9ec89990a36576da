"""A reference that follows the policy in two layouts: what it says is transformers', with numpy's moving average of the
exported weights, and a checkpoint of one layout goes on in the other."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from launcher.hosts.local import LocalLauncher
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.io import load_config
from rl_megatron.data.packing import packer_of
from rl_megatron.interfaces import Roles
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.scores.requests import Packers, measured
from rl_megatron.types import Samples
from tests.distributed.test_plane import TINY, by_transformers, sampled

pytestmark = pytest.mark.usefixtures("forked_nursery")
RATE, SAVED, STEPS = 0.3, 2, 3
LENGTHS = [7, 12, 30, 19, 12, 23, 12, 8]
GIVEN = (
    *("learner.threads=1", "learner.max_tokens_per_micro_batch=64", "rollout.temperature=1.0"),
    *("rollout.max_new_tokens=16", "rollout.max_prompt_tokens=16"),
    *("algorithm=grpo", "algorithm.kl.coefficient=0.1", f"algorithm.kl.follow_rate={RATE}"),
)
LAYOUTS = {"apart": ("learner.ep=1", "learner.dp=2"), "cut": ("learner.tp=2", "learner.ep=2", "learner.etp=1")}


def followed(folder: Path, model: Path, samples: Samples, shards: Path, *keys: str, goes_on: bool) -> Tensor:
    """The reference's log-probs after all steps, whose weights are exported; or after those behind the checkpoint."""
    config = load_config("tiny_cpu", [*GIVEN, *keys])

    async def steps(roles: Roles) -> Tensor:
        if goes_on:
            await roles.policy.load(shards, {})
        else:
            await roles.models["reference"].start_from(model)
        for number in range(SAVED + 1 if goes_on else 1, STEPS + 1):
            batch = packer_of(config.learner, attention_cost=0.0).pack(samples)
            await roles.policy.backward(batch, CrossEntropy())
            await roles.policy.step(0.02)
            await roles.policy.lead(RATE)
            await roles.weights.push(number)
            await roles.weights.export(folder / f"of_step_{number}")
            if number == SAVED and not goes_on:
                await roles.policy.reset_moments()
                await (await roles.policy.save(shards)).durable()
        packers = Packers(config=config, attention_cost=0.0)
        found = await measured(config, roles, packers, samples, 1, Stopwatch(), groups=())
        assert found.samples.ref_logprobs is not None
        return found.samples.ref_logprobs

    folder.mkdir()

    async def run() -> Tensor:
        async with LocalLauncher(model, folder).start(config) as roles:
            return await steps(roles)

    return asyncio.run(run())


def test_it_is_the_average_of_what_was_exported_in_every_layout(tmp_path: Path) -> None:
    model, samples, shards = make_tiny_model(TINY, tmp_path / "cache", seed=3), sampled(LENGTHS), tmp_path / "shards"
    shards.mkdir()
    whole = followed(tmp_path / "apart", model, samples, shards, *LAYOUTS["apart"], goes_on=False)
    resumed = followed(tmp_path / "cut", model, samples, shards, *LAYOUTS["cut"], goes_on=True)
    mean = shutil.copytree(model, tmp_path / "mean") / "model.safetensors"
    for number in range(1, STEPS + 1):
        now = load_file(tmp_path / "apart" / f"of_step_{number}" / "model.safetensors")
        held = load_file(mean)
        assert held.keys() == now.keys()
        moved = {name: np.float32(1 - RATE) * held[name] + np.float32(RATE) * now[name] for name in held}
        save_file(moved, mean, metadata={"format": "pt"})
    for row in range(len(LENGTHS)):
        first, stop = samples.cu_seqlens[row : row + 2].tolist()
        said = by_transformers(mean.parent, samples, row)
        for found in (whole, resumed):
            torch.testing.assert_close(found[first:stop], said, atol=1e-4, rtol=0)
        far = by_transformers(tmp_path / "apart" / f"of_step_{STEPS}", samples, row)
        assert (said - far).abs().max() > 0.01  # the policy itself says something else
