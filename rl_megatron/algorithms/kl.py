"""KL to a reference policy: where it goes (reward or loss), the coefficient's controller, and the full KL.

Letters: N positions, S sequences, V vocabulary. The estimators a token are in divergence.py.
"""

from __future__ import annotations

from torch import Tensor

from rl_megatron.algorithms.divergence import ESTIMATORS
from rl_megatron.algorithms.ratios import LOG_RATIO_BOUND, required
from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.config_algorithm import KLSection
from rl_megatron.types import LossInputs


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, estimator: str) -> Tensor:
    """Estimate of KL(pi‖ref) at each position, [N]; 0 outside the mask, whatever it holds there."""
    return ESTIMATORS[estimator](logprobs.where(mask, 0.0), ref_logprobs.where(mask, 0.0))


def kl_in_token_rewards(token_rewards: Tensor, kl: Tensor, *, beta: float) -> Tensor:
    """Rewards [N] less beta·kl [N], before GAE or discounted returns."""
    return token_rewards - beta * kl.detach()


def kl_in_sequence_rewards(rewards: Tensor, kl: Tensor, cu_seqlens: Tensor, *, beta: float) -> Tensor:
    """Rewards [S] less beta times each sequence's summed kl [N]."""
    return rewards - beta * segment_sum(kl.detach(), sequence_ids(cu_seqlens), len(rewards))


def kl_term(inputs: LossInputs, section: KLSection) -> Tensor:
    """Estimate of KL(pi‖ref) at each position, [T], of inputs already ``masked``; aggregated, a term of the loss.

    ``importance_weighted`` multiplies each token by pi / pi_old with its gradient, which makes the estimate and its
    gradient unbiased for tokens that pi_old sampled (DeepSeek-V3.2).
    """
    per_token = ESTIMATORS[section.estimator](inputs.logprobs, required(inputs.ref_logprobs, "ref_logprobs"))
    if section.importance_weighted:
        log_ratio = inputs.logprobs - inputs.old_logprobs
        per_token = per_token * log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return per_token


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(pi‖ref) of each position, [...], from logits [..., V]."""
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp() * (logprobs - ref_logits.log_softmax(-1))).sum(-1)


def adaptive_beta(beta: float, kl: float, *, target: float, num_samples: int, horizon: int = 10_000) -> float:
    """The next coefficient: beta·(1 + clip(kl/target - 1, ±0.2)·num_samples/horizon) (arXiv:1909.08593)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * num_samples / horizon)
