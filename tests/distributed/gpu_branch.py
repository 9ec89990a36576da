"""What ranks compute in the learner's branch for GPUs, and what they make the host wait for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.models.tiny import TinySizes
from rl_megatron.training.optimizer_steps import CompletedStep
from rl_megatron.types import Samples
from rl_megatron.weights.checks.reports import box_checksums, checksum
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import fill, ragged_samples
from tests.rows import policy_loss
from tests.samples import train_step

TINY = TinySizes(num_layers=2)
STEPS = 2
GRPO = policy_loss(objective="cispo", aggregation="token_mean")


def make_samples() -> Samples:
    """8 ragged sequences with an advantage each."""
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(8, g)
    advantages = torch.repeat_interleave(torch.randn(8, generator=g), samples.cu_seqlens.diff())
    return replace(samples, advantages=advantages)


def batch_of(learner: LearnerSection, rank: int) -> tuple[Sequence[Samples], dict[str, int]]:
    """The micro-batches of a rank, and the counts of the whole batch."""
    batch = Packer(dims=learner.dims, max_tokens=96).pack(make_samples())
    row = batch.micro_batches[learner.dims.dp_rank(rank)]
    return row, {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}


def rank_main(rank: int, learner: LearnerSection, folder: Path, model: Path) -> None:
    """One rank: score with routes, save, train, and write what it saw to ``folder``."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from tests.distributed.pretended.collectives import CALLS
    from tests.distributed.pretended.waits import WAITS

    shape = read_shape(model)
    device = world.init_process_groups(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=1)
    seen: dict[str, Any] = {"first": CALLS[:1], "device": str(device), "steps": []}
    policy = make_policy(shape, learner, device, temperature=0.7)
    seen["deterministic"] = [torch.are_deterministic_algorithms_enabled(), policy._models[0].config.deterministic_mode]
    fill(policy, learner, rank, model)
    row, counts = batch_of(learner, rank)
    said = policy.score(row, frozenset({"logprobs", "routes"}))
    if said is not None:
        seen |= {name: [x.tolist() for x in found] for name, found in said.items()}
    (folder / "saved").mkdir(exist_ok=True)
    policy.save(folder / "saved")  # makes the optimizer's state, which a first step would make
    for _ in range(STEPS):
        if learner.offload.while_sampling:
            policy.offload(pushed=True)
        before = Counter(WAITS)  # by line
        made = train_step(policy, row, GRPO, 1e-3, **counts)
        seen["waits"] = dict(Counter(WAITS) - before)
        if isinstance(made, CompletedStep):
            seen["steps"].append((made.loss, made.result.grad_norm))
    before = Counter(WAITS)
    seen["sums"] = box_checksums((tensor, tuple(tensor.shape), ()) for tensor in policy.tensors.values())
    seen["waits for sums"] = (Counter(WAITS) - before).total()
    seen["sums on the host"] = [checksum(tensor.cpu(), tuple(tensor.shape)) for tensor in policy.tensors.values()]
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    world.destroy_process_groups()
