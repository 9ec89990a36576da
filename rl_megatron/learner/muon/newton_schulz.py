"""Muon's step of float32 matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum, orthogonalised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from rl_megatron.learner.keywords import NEWTON_SCHULZ_STEPS
from rl_megatron.learner.muon.matrices import WHOLE, Matrices

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at 0: all but the smallest singular values end at 0.68 to 1.14
_MOMENTUM = 0.95  # decay of the moving mean of gradients, Nesterov's
_EPS = 1e-7  # of the norm, as torch.optim.Muon
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
"""By what the update of a matrix with so many rows (outputs) and columns is multiplied: `MuonSection.scale`."""


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """``U V'`` of the singular value decomposition ``U S V'`` of [m, n], roughly: five steps of the quintic
    Newton-Schulz iteration, computed in ``dtype``, which is the result's. In bfloat16 it is torch.optim.Muon's."""
    a, b, c = _QUINTIC
    tall = matrix.size(0) > matrix.size(1)
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=_EPS)  # now no singular value exceeds 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for parameters that are several matrices, each stepped by itself, or shards of matrices.

    ``matrices`` has an entry for each parameter that is not one whole matrix. Ranks that hold shards of a parameter
    have it at the same place in their lists, and step together. ``dtype`` is that of the iteration; the state, one
    ``momentum_buffer``, has the parameters' own.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        scale: str,
        weight_decay: float,
        dtype: torch.dtype,
        lr: float = 0.0,
    ) -> None:
        self.matrices: MutableMapping[Tensor, Matrices] = {}
        self.dtype = dtype
        super().__init__([{"params": list(params)}], {"lr": lr, "scale": scale, "weight_decay": weight_decay})

    def create_state(self) -> None:
        """Give parameters that were never stepped their zero momentum."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter by its ``grad``. Weight decay is decoupled from it."""
        self.create_state()
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum, grad = self.state[parameter]["momentum_buffer"], parameter.grad
                momentum.lerp_(grad, 1 - _MOMENTUM)
                update = grad.lerp(momentum, _MOMENTUM)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                self._add(parameter, update, group)

    def _add(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        matrices = self.matrices.get(parameter, WHOLE)
        for part, own in zip(matrices.parts(parameter), matrices.parts(update), strict=True):
            whole = matrices.gather(own.flatten(0, -2))
            scale = SCALES[group["scale"]](*whole.shape)
            change = matrices.shard(orthogonalised(whole, self.dtype))
            part.add_(change.reshape(part.shape), alpha=-(group["lr"] * scale))
