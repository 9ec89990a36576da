"""KL to a reference policy: adds it to rewards or to the loss.

Letters: N positions, S sequences, T positions of a micro-batch; d = log q - log p, in nats, of the estimators of
KL(p‖q) at a token sampled by p. k1, k2, k3: J. Schulman, "Approximating KL divergence" (2020). k3 is unbiased and never
negative, k1 unbiased, k2 biased with little variance (verl calls it mse).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_megatron.algorithms.objectives import LOG_RATIO_BOUND, require_column
from rl_megatron.algorithms.segments import segment_sum, sequence_ids
from rl_megatron.config.sections.algorithm import KLSection
from rl_megatron.types import LossInputs

Estimator = Callable[[Tensor, Tensor], Tensor]
LEAST_REST = 1e-6  # float32 sums of probabilities are as exact
_OF_THE_GRADIENT = ("k2",)  # the mean gradient of these estimators, not their value, is the KL's


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """-d."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d²/2."""
    return (reference - logprobs).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1, with d clamped to ±``LOG_RATIO_BOUND`` (no gradient beyond it)."""
    d = (reference - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return d.expm1() - d


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """|d|."""
    return (reference - logprobs).abs()


ESTIMATORS: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "top_k": k1}
"""The estimators at a sampled token. Under ``top_k`` the loss has the divergence itself, and metrics have k1."""


def kl_per_token(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, estimator: str) -> Tensor:
    """Returns an estimate of KL(pi‖ref) at each position, [N]; 0 outside the mask, even if inputs are not finite."""
    return ESTIMATORS[estimator](logprobs.where(mask, 0.0), ref_logprobs.where(mask, 0.0))


def kl_in_token_rewards(token_rewards: Tensor, kl: Tensor, *, beta: float) -> Tensor:
    """Returns rewards [N] minus beta·kl [N], before GAE or discounted returns."""
    return token_rewards - beta * kl.detach()


def kl_in_sequence_rewards(
    rewards: Tensor, kl: Tensor, cu_seqlens: Tensor, *, beta: float, trajectory_of: Tensor | None = None
) -> Tensor:
    """Returns rewards minus beta times the sum of kl [N] over each sequence, or over those [S] of each trajectory."""
    ids = sequence_ids(cu_seqlens)
    ids = ids if trajectory_of is None else trajectory_of[ids]
    return rewards - beta * segment_sum(kl.detach(), ids, len(rewards))


def kl_term(inputs: LossInputs, section: KLSection) -> Tensor:
    """Returns an estimate of KL(pi‖ref) at each position, [T], of ``masked`` inputs, to aggregate into the loss.

    ``importance_weighted`` multiplies each token by pi / pi_rollout. For any policy that sampled, and any gap between
    engine and learner, the mean over tokens then has the gradient of KL(pi‖ref). k1 and k3 estimate the value, so their
    weight has a gradient (DeepSeek-V3.2); k2 estimates the gradient, so its weight is detached. ``top_k`` is no
    estimate, but the `divergence` at each position.
    """
    if section.estimator == "top_k":
        reference = require_column(inputs.ref_top, "ref_top")[:, 1]
        return divergence(require_column(inputs.top_logprobs, "top_logprobs"), reference, beta=section.beta)
    per_token = ESTIMATORS[section.estimator](inputs.logprobs, require_column(inputs.ref_logprobs, "ref_logprobs"))
    if not section.importance_weighted:
        return per_token
    log_ratio = inputs.logprobs - inputs.rollout_logprobs
    weight = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return per_token * (weight.detach() if section.estimator in _OF_THE_GRADIENT else weight)


def divergence(logprobs: Tensor, reference: Tensor, *, beta: float) -> Tensor:
    """Returns the generalized Jensen-Shannon divergence [T] of two policies' log-probs [T, k] of the same tokens. All
    other tokens are one bucket, of probability ``LEAST_REST`` or more. It is beta KL(ref‖m) + (1 - beta) KL(pi‖m), m =
    beta ref + (1 - beta) pi (arXiv:2306.13649); at 0 it is KL(ref‖pi), at 1 KL(pi‖ref)."""
    pi, ref = (_append_rest(x) for x in (logprobs, reference))
    if beta == 0:
        return _kl(ref, pi)
    if beta == 1:
        return _kl(pi, ref)
    mixed = torch.logaddexp(ref + math.log(beta), pi + math.log1p(-beta))
    return beta * _kl(ref, mixed) + (1 - beta) * _kl(pi, mixed)


def _append_rest(logprobs: Tensor) -> Tensor:
    """[T, k] -> [T, k + 1]"""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    return torch.cat([logprobs, rest.log()], -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
