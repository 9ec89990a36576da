"""Importance ratios, and policy objectives: the loss of one token before aggregation, which may depend on the token's
whole sequence.

Computes the log of the importance ratio pi / pi_old of each token [T], at token, turn or sequence level. ``inputs``
come from ``masked``, so they are finite outside the mask. Letters: T positions, S sequences.

Each objective takes the clamped log-ratio [T], the micro-batch after ``masked``, the trained tokens of each sequence
[S] and the row with its limits. It returns each token's loss [T], and whether a limit changed it, [T] bool
(``clip_fraction``).
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.types import LossInputs, Metric
from rl_megatron.user_code import load_named

TokenLosses = tuple[Tensor, Tensor]
_LEAST_REST = 1e-8  # probability of all tokens but one: below it a float32 1 - p is 0
_RAISED_BY = 0.05  # the paper's delta_1
Objective = Callable[[Tensor, LossInputs, Tensor, AlgorithmSection], TokenLosses]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before ``exp`` (e^20 is 4.9e8): values stay finite in float32, and a token beyond
it has no gradient through its ratio."""

LogRatio = Callable[[LossInputs, Tensor], Tensor]


_VALUES = (
    "logprobs",
    "entropy",
    "old_logprobs",
    "rollout_logprobs",
    "advantages",
    "values",
    "ref_logprobs",
    "ref_top",
    "top_logprobs",
    "old_values",
    "returns",
    "proximal_share",
    "nll_weights",
    "old_kl_weights",
    "token_weight",
)


def masked(inputs: LossInputs) -> LossInputs:
    """Returns the micro-batch with zeros at every position outside the mask, so that inf or NaN there change nothing.

    ``torch.where`` selects before any arithmetic: a product with 0 would keep NaN, in value and in gradient. Converts
    lower precision to float32, because sums over many tokens follow.
    """
    given = {name: x for name in _VALUES if (x := getattr(inputs, name)) is not None}
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in given.items()}
    cut: dict[str, Any] = {
        name: torch.where(inputs.mask.view(-1, *[1] * (x.dim() - 1)), x, 0.0) for name, x in wide.items()
    }
    return replace(inputs, **cut)


def require_column(column: Tensor | None, name: str) -> Tensor:
    """Returns the column. Raises ValueError if the batch has none."""
    if column is None:
        raise ValueError(f"this loss needs the samples' {name}, and the batch was made without them")
    return column


def mean_per_sequence(values: Tensor, inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Returns the mean of ``values`` [T] over the masked-in tokens of each token's sequence, [T], detached."""
    return (inputs.segment_sum(values.detach()) / lengths.clamp(min=1))[inputs.segment_ids]


def token_log_ratio(inputs: LossInputs, lengths: Tensor) -> Tensor:
    """log pi - log pi_old of each token, [T]."""
    return inputs.logprobs - inputs.old_logprobs


def sequence_log_ratio(inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Returns the mean log-ratio of the token's sequence, [T]; its gradient is that of this token's own log-prob.

    The token form of GSPO (arXiv:2507.18071, eq. 14): the mean is detached, so no autograd crosses context-parallel
    ranks. With one advantage per sequence, the mean over tokens has the value and the gradient of the sequence form.
    """
    mean = mean_per_sequence(inputs.logprobs - inputs.old_logprobs, inputs, lengths)
    return mean + (inputs.logprobs - inputs.logprobs.detach())


def turn_log_ratio(inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Mean log-ratio of the token's turn, [T]; else as ``sequence_log_ratio`` (arXiv:2511.20718, arXiv:2605.13217)."""
    if inputs.turn_sum is None:
        raise ValueError("this loss needs the samples' turn_of, and the batch was made without it")
    tokens = inputs.turn_sum(inputs.mask.to(inputs.logprobs.dtype))
    mean = inputs.turn_sum((inputs.logprobs - inputs.old_logprobs).detach()) / tokens.clamp(min=1)
    return mean + (inputs.logprobs - inputs.logprobs.detach())


def sequence_sum_log_ratio(inputs: LossInputs, lengths: Tensor) -> Tensor:
    """Returns the whole sequence's log-ratio, not length-normalized, [T], detached: TOPR's weight of a trajectory."""
    return inputs.segment_sum((inputs.logprobs - inputs.old_logprobs).detach())[inputs.segment_ids]


RATIO_LEVELS: Mapping[str, LogRatio] = {
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
    "turn": turn_log_ratio,
    "sequence_sum": sequence_sum_log_ratio,
}


def _untouched(values: Tensor) -> Tensor:
    return torch.zeros_like(values, dtype=torch.bool)


def _weights_by_sign(advantages: Tensor, positive: float, other: float) -> Tensor:
    return torch.full_like(advantages, other).masked_fill(advantages > 0, positive)


def reinforce(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-A log pi: without a ratio it is right only for samples of the current policy."""
    return -inputs.advantages * inputs.logprobs, _untouched(log_ratio)


def importance(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-rho A, without a limit: M2PO, whose choice of tokens (tokens.choose=second_moment) replaces the clip."""
    return -log_ratio.exp() * inputs.advantages, _untouched(log_ratio)


def clip(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A): PPO (arXiv:1707.06347), GRPO, DAPO, GSPO.

    Beyond a limit the gradient is ``keep_low`` or ``keep_high`` times limit * A * grad log rho: beta_1 and beta_2 of
    CE-GPPO (arXiv:2509.20712). Both are 1 in GPPO (arXiv:2508.07629). The value stays the clip's.
    """
    ratio, advantages = log_ratio.exp(), inputs.advantages
    free = ratio * advantages
    clipped = ratio.clamp(1 - row.clip_low, 1 + row.clip_high) * advantages
    loss, limited = -torch.minimum(free, clipped), clipped < free
    if row.keep_low or row.keep_high:
        kept = _weights_by_sign(advantages, row.keep_high * (1 + row.clip_high), row.keep_low * (1 - row.clip_low))
        loss = loss - (limited * kept * advantages) * (log_ratio - log_ratio.detach())
    if row.dual_clip is None:
        return loss, limited
    bound = torch.where(advantages < 0, -row.dual_clip * advantages, torch.inf)
    return torch.minimum(loss, bound), limited | (loss > bound)


def cispo(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-sg(clip(rho, cap_low, cap_high)) A log pi (arXiv:2506.13585): no token loses its gradient."""
    ratio = log_ratio.detach().exp()
    capped = ratio.clamp(row.cap_low, row.cap_high)
    return -capped * inputs.advantages * inputs.logprobs, (capped != ratio) & (inputs.advantages != 0)


def topr(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-A log pi, times cispo's capped ratio if A < 0 (arXiv:2503.14286)."""
    ratio = log_ratio.detach().exp()
    capped = ratio.clamp(row.cap_low, row.cap_high)
    bad = inputs.advantages < 0
    return -torch.where(bad, capped, 1.0) * inputs.advantages * inputs.logprobs, bad & (capped != ratio)


def sapo(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-(4/tau) sigmoid(tau (rho - 1)) A, tau by the sign of A (arXiv:2511.20347): a soft gate in place of a clip."""
    advantages = inputs.advantages
    tau = _weights_by_sign(advantages, row.parameters["tau_positive"], row.parameters["tau_negative"])
    return -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantages, _untouched(log_ratio)


def vespo(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-sg(rho^k exp(lambda (1 - rho))) A log pi, k and lambda by the sign of A (VESPO, arXiv:2602.10693).

    The weight is 1 at rho = 1, greatest at k / lambda, and falls to 0 on both sides: a soft gate on samples that the
    policy has left. In the paper rho is the product over the sequence (``ratio_level=sequence_sum``). It is at most
    e^``LOG_RATIO_BOUND``, as ratios are: with a large k and a small lambda it overflows float32.
    """
    log_ratio, advantages = log_ratio.detach(), inputs.advantages
    shape = _weights_by_sign(advantages, row.parameters["shape_positive"], row.parameters["shape_negative"])
    rate = _weights_by_sign(advantages, row.parameters["rate_positive"], row.parameters["rate_negative"])
    weight = (shape * log_ratio - rate * torch.expm1(log_ratio)).clamp(max=LOG_RATIO_BOUND).exp()
    return -weight * advantages * inputs.logprobs, _untouched(log_ratio)


def gmpo(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-A times the geometric mean over the sequence of min(rho, 1 + clip_high) if A > 0, else max(rho, 1 - clip_low).

    GMPO (arXiv:2507.20673). The value is the sequence's and the gradient that of this token's own log-prob, as in
    `sequence_log_ratio`. With one advantage per sequence, as in the paper, the mean over tokens has the value
    and the gradient of the sequence form. Otherwise each token's advantage decides its limit and weighs its gradient.
    """
    advantages = inputs.advantages
    lowest, highest = math.log1p(-row.clip_low), math.log1p(row.clip_high)
    kept = torch.where(advantages > 0, log_ratio.clamp(max=highest), log_ratio.clamp(min=lowest))
    log_mean = mean_per_sequence(kept, inputs, lengths) + (kept - kept.detach())
    return -log_mean.exp() * advantages, (kept != log_ratio) & (advantages != 0)


def dppo_tv(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """-sg(min(rho, cap_high)) A log pi, but 0 where pi has left pi_old in the direction of A by more than a limit.

    DPPO-Binary-TV (arXiv:2602.04879): the distance is that of the token's two probabilities, |pi - pi_old|, at most
    ``clip_high`` if A > 0, else ``clip_low``.
    """
    return _near_old((inputs.logprobs.exp() - inputs.old_logprobs.exp()).abs(), log_ratio, inputs, row)


def dppo_kl(log_ratio: Tensor, inputs: LossInputs, lengths: Tensor, row: AlgorithmSection) -> TokenLosses:
    """``dppo_tv`` with KL(pi_old‖pi), in nats, of this token against all others: DPPO-Binary-KL."""
    old = inputs.old_logprobs.exp()
    rest, old_rest = (-torch.expm1(x).clamp(max=-_LEAST_REST) for x in (inputs.logprobs, inputs.old_logprobs))
    return _near_old(old_rest * (old_rest / rest).log() - old * log_ratio, log_ratio, inputs, row)


def _near_old(distance: Tensor, log_ratio: Tensor, inputs: LossInputs, row: AlgorithmSection) -> TokenLosses:
    ratio, advantages = log_ratio.detach().exp(), inputs.advantages
    good = advantages > 0
    left = torch.where(good, (ratio > 1) & (distance > row.clip_high), (ratio < 1) & (distance > row.clip_low))
    capped = ratio.clamp(max=row.cap_high)
    loss = -torch.where(left, 0.0, capped) * advantages * inputs.logprobs
    return loss, (left | (capped != ratio)) & (advantages != 0)


def demonstrated_losses(per_token: Tensor, inputs: LossInputs, row: AlgorithmSection) -> Tensor:
    """Returns the losses [T], of demonstrated tokens -A f(p), f(p) = p / (p + gamma), p = pi, without a clip: LUFFY
    (arXiv:2504.14945).

    Who wrote a demonstration is taken to have been certain of each token, so that its ratio is pi itself. In log p, f
    is sigmoid(log p - log gamma): its slope f (1 - f) is greatest at p = gamma, where that of p is small.
    """
    assert row.demonstration_gamma is not None
    shaped = torch.sigmoid(inputs.logprobs - math.log(row.demonstration_gamma))
    return torch.where(require_column(inputs.demonstrated, "demonstrated"), -inputs.advantages * shaped, per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipLimits:
    """The limits of a minibatch's clip, and the sums of tokens of ``positive`` advantage and of ``all`` with them."""

    low: float
    high: float
    positive: float
    all: float

    @property
    def metrics(self) -> dict[str, Metric[float]]:
        """The means of both limits over optimizer steps, and the share of positive tokens in all of them."""
        return {
            "balance/clip_low": Metric(value=self.low),
            "balance/clip_high": Metric(value=self.high),
            "balance/positive_share": Metric(value=self.positive / (self.all or 1.0), weight=self.all),
        }


def balanced_limits(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    row: AlgorithmSection,
    share: float,
    *,
    max_high: float,
    min_low: float,
) -> ClipLimits:
    """Returns the limits at which positive tokens have the ``share`` of one minibatch's: BAPO (arXiv:2510.18927).

    The sums are over pi_old |A| min(rho, 1 + high) where A > 0 and pi_old |A| max(rho, 1 - low) where A < 0 (its eq. 8,
    in absolute values), the latter at most ``dual_clip`` times pi_old |A|, as in the loss. As in its algorithm 1, high
    rises first. A higher lower limit makes the second sum larger. So a share that is too small at the greatest high
    stays so, and low then goes all its way. Columns are [n].
    """
    log_ratio = (logprobs.double() - old_logprobs.double()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio, worth = log_ratio.exp(), old_logprobs.double().exp() * advantages.double()
    good, bad = advantages > 0, advantages < 0

    def limits(steps: int, low: float) -> ClipLimits:
        high = row.clip_high + steps * _RAISED_BY
        positive = float((worth * ratio.clamp(max=1 + high))[good].sum())
        negative = float((worth * ratio.clamp(min=1 - low, max=row.dual_clip))[bad].sum())
        return ClipLimits(low=low, high=high, positive=positive, all=positive - negative)

    def enough(steps: int) -> bool:
        found = limits(steps, row.clip_low)
        return found.positive >= share * found.all

    most = math.floor((max_high - row.clip_high) / _RAISED_BY + 1e-9)
    steps = bisect_left(range(most + 1), True, key=enough)
    return limits(steps, row.clip_low) if steps <= most else limits(most, min_low)


OBJECTIVES: Mapping[str, Objective] = {
    "reinforce": reinforce,
    "importance": importance,
    "clip": clip,
    "cispo": cispo,
    "topr": topr,
    "sapo": sapo,
    "vespo": vespo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


@functools.cache
def resolve_objective(name: str) -> Objective:
    """Returns the objective of the table, or a custom one at ``package.module:name``. Raises as `load_named`."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    own: Objective = load_named(name, "algorithm.objective", "function", callable)
    return own
