"""What a rank computes and holds on each device with a share of the optimizer's state in the host's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.sections.learner import LearnerSection
from tests.distributed.test_kept import LENGTHS, MOE, TOKENS, samples

SHARES = (0.0, 0.5, 1.0)
RESUMED = ((0.0, 0.5), (0.5, 0.5), (1.0, 0.0))  # from a share, with a share
BEFORE = 2  # steps, then a checkpoint and another step


def learner(share: float) -> LearnerSection:
    return LearnerSection.model_validate({"device": "cuda", "dtype": "bfloat16", "offload": {"optimizer": share}})


def rank_main(rank: int, folder: Path) -> None:
    """One policy for each share, one after the other, and some that continue."""
    torch.set_num_threads(1)
    from rl_megatron.learner import checkpoint, world
    from rl_megatron.learner.megatron import make_policy

    device = world.join(learner(0), rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=0)
    seen: dict[str, Any] = {}
    for share in SHARES:
        policy = make_policy(MOE, learner(share), device, temperature=1.0)
        g = torch.Generator().manual_seed(0)
        for name, tensor in policy.tensors.items():
            whole = torch.randn(tensor.shape, generator=g) * 0.02
            tensor.copy_(torch.ones(tensor.shape) if "norm" in name else whole)
        policy.adopt()
        before = steps(policy, BEFORE)
        written = folder / f"{share}"
        written.mkdir()
        checkpoint.save(written, policy._trained, policy._optimizer)
        seen[str(share)] = {"steps": before + steps(policy, 1), "bytes": held(policy)}
    resumed = []
    for was, share in RESUMED:
        policy = make_policy(MOE, learner(share), device, temperature=1.0)
        checkpoint.load(folder / f"{was}", policy._trained, policy._optimizer)
        resumed += steps(policy, 1)
    (folder / "rank0.json").write_text(json.dumps({"shares": seen, "resumed": resumed}))
    world.leave()


def steps(policy: Any, count: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each, on the same batch."""
    made = []
    for _ in range(count):
        said = policy.backward([samples(0)], CrossEntropy(), num_tokens=TOKENS, num_sequences=len(LENGTHS))
        made.append((said["loss"].value, policy.step(1e-2).grad_norm))
    return made


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
