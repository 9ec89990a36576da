"""A process of the kit that multiplies by many experts, in one call and one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu import branch
from tests.gpu.sizes import timed

NAMES = ("one by one", "in one call")


def experts_main(rank: int, folder: Path, keys: Mapping[str, Any], small: bool) -> None:
    """Seconds forward and backward in bfloat16, and how far results are from float32's; some experts have no rows."""
    _, device = branch.begin(rank, folder, keys)
    from rl_megatron.learner.model import kernels

    experts, hidden, width, rows = (8, 64, 32, 96) if small else (128, 2048, 768, 65536)
    torch.manual_seed(1)
    counts = torch.bincount(torch.randint(1, experts - 1, (rows,)).square() // experts, minlength=experts).tolist()
    given = [torch.randn(rows, hidden, device=device), torch.rand(rows, device=device)]
    given += [torch.randn(2 * width, hidden, device=device) / hidden**0.5 for _ in range(experts)]
    given += [torch.randn(hidden, width, device=device) / width**0.5 for _ in range(experts)]
    toward = torch.randn(rows, hidden, device=device)

    def one_by_one(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        out: Tensor = kernels._ExpertMLP.apply(x, probs, counts, False, *weights)  # type: ignore[no-untyped-call]
        return out

    def in_one_call(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        return kernels.grouped_mlp(x, probs, counts, weights[:experts], weights[experts:], recompute=False)

    def computed(call: Callable[..., Tensor], dtype: torch.dtype) -> Callable[[], Sequence[Tensor]]:
        leaves = [x.to(torch.float32 if x.ndim == 1 else dtype).requires_grad_() for x in given]

        def compute() -> Sequence[Tensor]:
            out = call(*leaves)
            return out, *torch.autograd.grad(out, leaves, toward.to(dtype))

        return compute

    wanted = computed(one_by_one, torch.float32)()
    seen: dict[str, Any] = {"without rows": counts.count(0)}
    for name, call in zip(NAMES, (one_by_one, in_one_call), strict=True):
        compute = computed(call, torch.bfloat16)
        pairs = zip(compute(), wanted, strict=True)
        seen[name] = {"seconds": timed(compute), "far": max(_distance(found, exact) for found, exact in pairs)}
    branch.end(folder, seen)


def _distance(found: Tensor, exact: Tensor) -> float:
    """Of the norm of what is exact; of what is 0, infinitely far but for 0."""
    norm, off = float(exact.norm()), float((found.float() - exact).norm())
    return off / norm if norm else 0.0 if off == 0.0 else float("inf")
