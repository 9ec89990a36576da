"""Per-token estimators of KL(p‖q) from tokens sampled by p. Letters: d = log q - log p, in nats.

k1, k2, k3: J. Schulman, "Approximating KL divergence" (2020). k3 is unbiased and never negative, k1 unbiased, k2 biased
with little variance (verl calls it mse).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rl_megatron.algorithms.ratios import LOG_RATIO_BOUND

Estimator = Callable[[Tensor, Tensor], Tensor]


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


ESTIMATORS: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
