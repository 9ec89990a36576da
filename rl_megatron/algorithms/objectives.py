"""Per-token policy objectives: what one token adds to the loss, before aggregation.

Each takes the clamped log-ratio [T], the log-probs [T], the advantages [T] and the limits, and gives the loss of each
token [T] and which tokens the limits changed [T] bool (``clip_fraction``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on ratios. ``clip_*`` are distances from 1 (objective clip), ``cap_*`` absolute ratios (cispo)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    cap_low: float = 0.0
    cap_high: float = 5.0


TokenLosses = tuple[Tensor, Tensor]
Objective = Callable[[Tensor, Tensor, Tensor, Limits], TokenLosses]


def reinforce(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, limits: Limits) -> TokenLosses:
    """-A log pi: no ratio, so right only for samples of the current policy."""
    return -advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool)


def clip(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, limits: Limits) -> TokenLosses:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A): PPO (arXiv:1707.06347), GRPO, DAPO, GSPO."""
    ratio = log_ratio.exp()
    free = ratio * advantages
    clipped = ratio.clamp(1 - limits.clip_low, 1 + limits.clip_high) * advantages
    return -torch.minimum(free, clipped), clipped < free


def cispo(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, limits: Limits) -> TokenLosses:
    """-sg(clip(rho, cap_low, cap_high)) A log pi (arXiv:2506.13585): no token loses its gradient."""
    ratio = log_ratio.detach().exp()
    capped = ratio.clamp(limits.cap_low, limits.cap_high)
    return -capped * advantages * logprobs, capped != ratio


OBJECTIVES: Mapping[str, Objective] = {"reinforce": reinforce, "clip": clip, "cispo": cispo}
