"""What a rank of the kit computes: scores, optimizer steps, values, resumed steps, and a family's logits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.processes.environment import missing_order_variables
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Samples
from tests.distributed.ranks import ragged_samples
from tests.rows import policy_loss
from tests.samples import train_step
from tests.small_models import TINY_MOE

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronScorer

SHAPE = replace(TINY_MOE, expert_width=48, max_positions=256)
STEPS, RATE = 5, 1e-3
TRAINED = ("deepseek_v3",)
"""Families of which a step is made: selection biases and latent attention, which megatron compiles on GPUs."""
LOSS = policy_loss(objective="cispo", aggregation="token_mean")
FLOAT32 = {"device": "cuda", "layers": "torch"}
BFLOAT16 = {**FLOAT32, "dtype": "bfloat16"}


def make_samples() -> Samples:
    """12 ragged sequences with an advantage and a return each; equal on every machine."""
    g = torch.Generator().manual_seed(5)
    samples = ragged_samples(12, g)
    lengths = samples.cu_seqlens.diff()
    advantages, returns = (torch.repeat_interleave(torch.randn(12, generator=g), lengths) for _ in range(2))
    return replace(samples, advantages=advantages, returns=returns, old_values=torch.zeros(len(returns)))


def fill(scorer: MegatronScorer) -> None:
    """Weights that are equal on every machine, whichever layers compute."""
    for number, (name, tensor) in enumerate(sorted(scorer.tensors.items())):
        g = torch.Generator().manual_seed(number)
        scale = 0.5 if "router" in name else 0.05
        made = torch.ones(tensor.shape) if "norm" in name else torch.randn(tensor.shape, generator=g) * scale
        tensor.copy_(made)
    for number, (name, tensor) in enumerate(sorted(scorer.adapters.items())):  # a fresh one changes nothing
        g = torch.Generator().manual_seed(number)
        tensor.copy_(torch.zeros(tensor.shape) if "lora_B" in name else torch.randn(tensor.shape, generator=g) * 0.05)
    scorer.adopt()


def micro_batches(learner: LearnerSection) -> tuple[Sequence[Samples], dict[str, int]]:
    """Those of one rank, and the counts of the batch."""
    batch = Packer(dims=learner.dims, max_tokens=128).pack(make_samples())
    return batch.micro_batches[0], {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}


def begin(rank: int, folder: Path, keys: Mapping[str, Any]) -> tuple[LearnerSection, torch.device]:
    """Join a world of one process, without TF32, with the variables that a run's rank has."""
    os.environ.update(missing_order_variables(os.environ) if keys.get("deterministic") else {})
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    from rl_megatron.learner import world

    learner = LearnerSection.model_validate(keys)
    return learner, world.init_process_groups(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=1)


def end(folder: Path, seen: Mapping[str, Any]) -> None:
    """Write what was seen, and leave."""
    from rl_megatron.learner import world

    (folder / "seen.json").write_text(json.dumps(seen))
    world.destroy_process_groups()


def policy_main(
    rank: int, folder: Path, keys: Mapping[str, Any], steps: int = STEPS, shape: ModelShape = SHAPE
) -> None:
    """Score, then train. Leaves the GPU before each step, where ``learner.offload.while_sampling`` says so."""
    learner, device = begin(rank, folder, keys)
    from rl_megatron.learner.megatron import make_policy

    policy = make_policy(shape, learner, device, temperature=0.7)
    fill(policy)
    row, counts = micro_batches(learner)
    said = policy.score(row, frozenset({"logprobs", "routes"}))
    assert said is not None
    logits = policy.score(row[:1], frozenset({"logits"}))
    assert logits is not None
    seen: dict[str, Any] = {name: [x.tolist() for x in found] for name, found in said.items()}
    seen |= {"logits": logits["logits"][0][::16, ::16].tolist(), "device": str(device)}
    seen["inputs"] = sum(float(tensor.double().abs().sum()) for tensor in policy.tensors.values())
    seen["steps"] = []
    for _ in range(steps):
        policy.offload(pushed=True)
        made = train_step(policy, row, LOSS, RATE, **counts)
        seen["steps"].append((made.loss, made.result.grad_norm))
    end(folder, seen)


def critic_main(rank: int, folder: Path, keys: Mapping[str, Any]) -> None:
    """Values, then steps of a critic."""
    learner, device = begin(rank, folder, keys)
    from rl_megatron.algorithms.auxiliary import ValueLoss
    from rl_megatron.learner.megatron import make_critic

    critic = make_critic(SHAPE, learner, device)
    fill(critic)
    row, counts = micro_batches(learner)
    said = critic.score(row, frozenset({"values"}))
    assert said is not None
    seen: dict[str, Any] = {"values": [x.tolist() for x in said["values"]]}
    made = [train_step(critic, row, ValueLoss(), RATE, **counts) for _ in range(2)]
    end(folder, {**seen, "steps": [(one.loss, one.result.grad_norm) for one in made]})


def resumed_main(rank: int, folder: Path, keys: Mapping[str, Any], saved: Path, again: bool) -> None:
    """Train and save, or load what such a one saved; then two steps."""
    learner, device = begin(rank, folder, keys)
    from rl_megatron.learner.megatron import make_policy

    policy = make_policy(SHAPE, learner, device, temperature=0.7)
    row, counts = micro_batches(learner)
    if again:
        policy.load(saved)
    else:
        fill(policy)
        train_step(policy, row, LOSS, RATE, **counts)
        saved.mkdir()
        policy.save(saved)
    made = [train_step(policy, row, LOSS, RATE, **counts) for _ in range(2)]
    end(folder, {"steps": [(one.loss, one.result.grad_norm) for one in made]})


def usual(found: Tensor, wanted: Tensor) -> float:
    """The median over tokens of the mean difference of logits [n, v], in mean logits. A token that goes to another
    expert for a rounding is far off, and those behind it see it."""
    return float((found.float() - wanted).abs().mean(-1).median() / wanted.abs().mean())


def family_main(rank: int, folder: Path, keys: Mapping[str, Any], names: Sequence[str]) -> None:
    """Differences of logits from transformers' own, largest and `usual`, by family, and losses of a step of `TRAINED`.
    Folders of families are beside this one."""
    learner, device = begin(rank, folder, keys)
    from rl_megatron.algorithms.losses import CrossEntropy
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.weights.layouts.families import read_shape
    from tests.distributed import ranks
    from tests.samples import TWO, two_sequences

    logits, usually, losses = {}, {}, {}
    for name in names:
        model = folder.parent / name
        policy = make_policy(read_shape(model), learner, device, temperature=1.0)
        ranks.fill(policy, learner, rank, model)
        said = policy.score([two_sequences()], frozenset({"logits"}))
        assert said is not None
        wanted: Tensor = torch.load(model / "logits.pt")
        found = said["logits"][0].cpu()
        logits[name], usually[name] = float((found - wanted).abs().max()), usual(found, wanted)
        if name in TRAINED:
            counts = {"num_tokens": sum(TWO), "num_sequences": len(TWO)}
            losses[name] = train_step(policy, [two_sequences()], CrossEntropy(), RATE, **counts).loss
    end(folder, {"logits": logits, "usual": usually, "losses": losses})
