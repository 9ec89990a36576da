"""A rank's memory does not grow with its steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import torch

from launcher.controller.roles import LearnerGroup
from launcher.hosts.local import LocalLauncher
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.io import load_config
from rl_megatron.data.packing import pack
from rl_megatron.interfaces import Roles
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import GenerationRequest, ParallelDims, SamplingParams
from tests.distributed.ranks import ragged_samples

pytestmark = pytest.mark.usefixtures("forked_node")
CYCLE = 25  # steps after which a rank gives back what it has freed
WARM, STEPS = 100 + 3 * CYCLE, 500  # with AVX-512 kernels for new shapes take 10 MB up to step 75
MOST = 0.02e6  # bytes a step


async def step(roles: Roles, number: int, g: torch.Generator) -> None:
    """Sample, train and push, on other lengths each time."""
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=4, stop_token_ids=(257,), seed=number)
    prompts = [tuple(torch.randint(0, 256, (length,), generator=g).tolist()) for length in (3, 5, 4 + number % 9)]
    requests = [
        GenerationRequest(id=f"{number}-{i}", token_ids=ids, num_completions=8, params=params)
        for i, ids in enumerate(prompts)
    ]
    await asyncio.gather(*map(roles.engine.generate, requests))
    samples = ragged_samples(16 + number % 8, g)
    batch = pack(samples, dims=ParallelDims(), max_tokens=4096)
    await roles.policy.backward(batch, CrossEntropy())
    await roles.policy.step(1e-4)
    await roles.weights.push(number)


async def test_it_stays_flat(tmp_path: Path) -> None:
    """20 seconds."""
    config = load_config("tiny_cpu", ["learner.threads=1", "learner.ep=1", "learner.dp=1"])
    model = make_tiny_model(TinySizes(num_layers=1, hidden_size=32, num_experts=4), tmp_path / "cache", seed=3)
    g = torch.Generator().manual_seed(5)
    held: list[int] = []
    async with LocalLauncher(model, tmp_path).start(config) as roles:
        assert isinstance(roles.policy, LearnerGroup)
        (worker,) = roles.policy._group.workers
        rank = psutil.Process(worker.process.pid)
        for number in range(1, STEPS + 1):
            await step(roles, number, g)
            held.append(rank.memory_info().rss)
    before, after = (min(held[last - 3 * CYCLE : last]) for last in (WARM, STEPS))
    assert (after - before) / (STEPS - WARM) <= MOST
