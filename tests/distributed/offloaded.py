"""What a rank computes and holds on each device with a share of the optimizer's state in the host's memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.shape import ModelShape
from tests.distributed.low_moments import fill
from tests.distributed.test_kept import LENGTHS, MOE, SHAPES, TOKENS, samples

BEFORE = 2  # steps, then a checkpoint and another step


@dataclass(frozen=True, kw_only=True)
class Run:
    """Policies with a share of the state on the host, and some that go on: from a share, with a share."""

    shape: ModelShape
    pp: int
    shares: tuple[float, ...]
    resumed: tuple[tuple[float, float], ...]


RUNS = {
    "offloaded": Run(shape=MOE, pp=1, shares=(0.0, 0.5, 1.0), resumed=((0.0, 0.5), (0.5, 0.5), (1.0, 0.0))),
    "offloaded, a stage without experts": Run(
        shape=SHAPES["a dense layer, shared experts"], pp=2, shares=(0.0, 0.5), resumed=((0.5, 0.5),)
    ),
}


def learner(share: float, pp: int = 1, **optimizer: float) -> LearnerSection:
    keys = {"device": "cuda", "dtype": "bfloat16", "pp": pp, "offload": {"optimizer": share}, "optimizer": optimizer}
    return LearnerSection.model_validate(keys)


def rank_main(rank: int, folder: Path, name: str) -> None:
    """One policy for each share, one after the other, and some that continue."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy

    run = RUNS[name]
    device = world.join(learner(0, run.pp), rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
    seen: dict[str, Any] = {}
    for share in run.shares:
        policy = make_policy(run.shape, learner(share, run.pp), device, temperature=1.0)
        fill(policy, 0)
        policy.adopt()
        before = steps(policy, BEFORE)
        written = folder / f"{share}"
        written.mkdir(exist_ok=True)
        saving = policy.start_save(written)
        seen[str(share)] = {"steps": before + steps(policy, 1), "bytes": held(policy)}
        saving.durable()
    resumed = []
    for was, share in run.resumed:
        policy = make_policy(run.shape, learner(share, run.pp), device, temperature=1.0)
        policy.load(folder / f"{was}")
        resumed += steps(policy, 1)
    policy = make_policy(run.shape, learner(0.5, run.pp, weight_decay=0.5, beta1=0.7), device, temperature=1.0)
    policy.load(folder / "0.5")
    steps(policy, 1)
    said = {"shares": seen, "resumed": resumed, "settings": settings(policy)}
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    world.leave()


def steps(policy: Any, count: int) -> list[tuple[float | None, float]]:
    """Loss, on the last stage, and gradient norm of each, on the same batch."""
    made = []
    for _ in range(count):
        said = policy.backward([samples(0)], CrossEntropy(), num_tokens=TOKENS, num_sequences=len(LENGTHS))
        made.append((said and said["loss"].value, policy.step(1e-2).grad_norm))
    return made


def settings(policy: Any) -> list[tuple[float, float]]:
    """The different decays of weights and of means by which parameters were stepped."""
    from rl_megatron.learner.optimizer import inner_optimizers

    inside = [one for part in inner_optimizers(policy._optimizer) for one in part.optimizer.sub_optimizers]
    return sorted({(group["weight_decay"], group["betas"][0]) for one in inside for group in one.param_groups})


def held(policy: Any) -> dict[str, int]:
    """Bytes of float32 weights, moments and the host's gradients, by device."""
    from rl_megatron.learner.optimizer import inner_optimizers

    adams = [part.optimizer for part in inner_optimizers(policy._optimizer)]
    tensors = [p for adam in adams for group in adam.param_groups for p in group["params"]]
    tensors += [t for adam in adams for state in adam.state.values() for name, t in state.items() if name != "step"]
    for adam in adams:
        if hasattr(adam, "sub_optimizers"):
            tensors += [*adam.gpu_params_map_cpu_copy.values(), *adam.cpu_copy_map_grad.values()]
    return {device: sum(t.nbytes for t in tensors if t.device.type == device) for device in ("cpu", "cuda")}
