"""Losses other than the policy gradient: a critic's value loss, those of pairs, DPO and a reward model's, and of
single answers, KTO. T positions, S sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_megatron.algorithms.objectives import masked, require_column
from rl_megatron.config.sections.algorithm import PreferenceSection
from rl_megatron.types import LossInputs, LossOutput, Metric
from rl_megatron.user_code import load_named

PairLoss = Callable[[Tensor, Tensor, float], Tensor]
"""The losses of pairs [P], from log pi/ref (without a reference, log pi) of their better answers [P], of their worse
ones [P], and beta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """½·max((V - R)², (V_clip - R)²), mean over tokens; V_clip is V within ``clip`` of V_old (None: no clipping).

    Means over tokens: ``critic/value_mean``, and ``critic/clip_fraction``, the share whose clipped term is larger.
    """

    clip: float | None = None

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns this rank's share of the loss; its gradient goes through ``inputs.values``."""
        inputs = masked(inputs)
        values, returns = require_column(inputs.values, "values"), require_column(inputs.returns, "returns")
        old = require_column(inputs.old_values, "old_values")
        free = (values - returns).square()
        bound = math.inf if self.clip is None else self.clip
        clipped = (torch.clamp(values, old - bound, old + bound) - returns).square()
        num_tokens = max(inputs.num_tokens, 1)
        sums = {
            "critic/value_mean": values.detach().sum(),
            "critic/clip_fraction": (clipped > free).to(values.dtype).sum(),
        }
        return LossOutput(
            loss=torch.maximum(free, clipped).sum() / 2 / num_tokens,
            metrics={name: Metric(value=of_all / num_tokens, weight=num_tokens) for name, of_all in sums.items()},
        )


def dpo(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    """-log σ(beta·(better - worse)) (arXiv:2305.18290, eq. 7; without a reference, SimPO's, arXiv:2405.14734)."""
    return -logsigmoid(beta * (better - worse))


def ipo(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    """(better - worse - 1/(2·beta))² (arXiv:2310.12036, eq. 17): the margin has a target, and is not pulled beyond."""
    return (better - worse - 1 / (2 * beta)).square()


def hinge(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    """max(0, 1 - beta·(better - worse)) (SLiC, arXiv:2305.10425; with a reference, arXiv:2309.06657)."""
    return torch.relu(1 - beta * (better - worse))


def orpo(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    """-beta·log σ(log odds(better) - log odds(worse)), odds = p/(1 - p) of mean log-probs (arXiv:2403.07691, eq. 7)."""
    log_odds = [x - torch.log(-torch.expm1(x)) for x in (side.clamp(max=_MOST_CERTAIN) for side in (better, worse))]
    return -beta * logsigmoid(log_odds[0] - log_odds[1])


_MOST_CERTAIN = -1e-7  # a mean log-prob above it would have odds that are not finite
PAIR_LOSSES: Mapping[str, PairLoss] = {"dpo": dpo, "ipo": ipo, "hinge": hinge, "orpo": orpo}
"""Name of ``loss`` in the sections of pairs -> loss."""


@functools.cache
def resolve_pair_loss(name: str, key: str) -> PairLoss:
    """Returns a loss of the table, or the one at ``package.module:name``. Raises as `load_named`, of ``key``.loss."""
    if name in PAIR_LOSSES:
        return PAIR_LOSSES[name]
    own: PairLoss = load_named(name, f"{key}.loss", "function", callable)
    return own


def losses_with_gradients(loss: PairLoss, better: Tensor, worse: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Returns losses of pairs, [P], and derivatives to the log pi/ref of the better and the worse answer, [P, 2]."""
    sides = better.detach().clone().requires_grad_(), worse.detach().clone().requires_grad_()
    with torch.enable_grad():
        losses = loss(*sides, beta)
        slopes = torch.autograd.grad(losses.sum(), sides, allow_unused=True, materialize_grads=True)
    return losses.detach(), torch.stack(slopes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """Mean over pairs of ``row``'s loss of a pair, and of ``row.nll`` times the mean over its tokens of the better
    answer's -log pi (docs/sft.md).

    Sequences 2i and 2i + 1 of a micro-batch are the chosen and the rejected one of a pair; a last one without a
    partner, or one without a trained token, is padding. Means over pairs: ``preference/accuracy`` (margin above 0) and
    ``preference/margin``, in nats times ``beta``, and with ``row.nll`` the term's part of the loss, ``loss/nll``; over
    tokens ``entropy``.
    """

    row: PreferenceSection
    beta: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns this rank's share of the loss. Every rank that shares a sequence calls it.

        Each token carries its pair's loss, spread over the pair's tokens, and the gradient of its own log-prob, so
        shares of context-parallel ranks add up without autograd between them.
        """
        inputs, row = masked(inputs), self.row
        logprobs = inputs.logprobs
        compared = logprobs.detach()
        if not row.reference_free:
            compared = compared - require_column(inputs.ref_logprobs, "ref_logprobs")
        sums, lengths = inputs.segment_sum(compared), inputs.segment_sum(inputs.mask.to(logprobs.dtype))
        scale = 1 / lengths.clamp(min=1) if row.per_token else torch.ones_like(lengths)
        sums, count = sums * scale, len(sums) // 2 * 2
        of_pairs = lengths[:count].reshape(-1, 2)
        real = of_pairs.all(1)
        losses, slopes = losses_with_gradients(self._pair_losses, sums[:count:2], sums[1:count:2], self.beta)
        losses, slopes = torch.where(real, losses, 0.0), torch.where(real[:, None], slopes, 0.0)
        margin = self.beta * (sums[:count:2] - sums[1:count:2])
        per_pair = real.to(logprobs.dtype) / (inputs.num_sequences // 2)
        tokens = of_pairs.sum(1)

        def spread(of_pair: Tensor) -> Tensor:
            """[pairs] -> [T], 0 for the odd sequence"""
            return torch.cat([of_pair, of_pair.new_zeros(1)])[inputs.segment_ids // 2]

        weight = torch.where(inputs.mask, spread(per_pair / tokens), 0.0)
        of_answers = torch.cat([(slopes * per_pair[:, None]).flatten(), slopes.new_zeros(1)])
        slope = (of_answers[: len(scale)] * scale)[inputs.segment_ids]
        loss = (spread(losses) * weight + slope * (logprobs - logprobs.detach())).sum()
        right, num_tokens = (margin > 0).to(logprobs.dtype), max(inputs.num_tokens, 1)
        metrics = {
            "preference/accuracy": Metric(value=(spread(right) * weight).sum(), weight=inputs.num_sequences),
            "preference/margin": Metric(value=(spread(margin) * weight).sum(), weight=inputs.num_sequences),
            "entropy": Metric(value=inputs.entropy.detach().sum() / num_tokens, weight=num_tokens),
        }
        if row.nll:
            better = torch.where(inputs.segment_ids % 2 == 0, spread(per_pair / of_pairs[:, 0].clamp(min=1)), 0.0)
            term = -row.nll * (logprobs * better).sum()
            loss = loss + term
            metrics["loss/nll"] = Metric(value=term.detach(), weight=inputs.num_sequences)
        return LossOutput(loss=loss, metrics=metrics)

    def _pair_losses(self, better: Tensor, worse: Tensor, beta: float) -> Tensor:
        """Returns losses of pairs, [P], as `PairLoss`, with ``row``'s target, over both orders if one may be wrong."""
        loss, target = resolve_pair_loss(self.row.loss, self.row.key), self.row.target_margin / beta
        losses = loss(better - target, worse, beta)
        if wrong := self.row.label_smoothing:
            losses = (1 - wrong) * losses + wrong * loss(worse - target, better, beta)
        return losses


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoLoss:
    """Kahneman-Tversky optimization (arXiv:2402.01306, eq. 8): mean over sequences of w·(1 - σ(±beta·(r - z₀))), r the
    sequence's log pi/ref and z₀ the ``reference_point``, a constant of the step; + where it is desirable.

    A sequence's ``returns`` add up to its weight w, negative where it is undesirable. Means over sequences:
    ``preference/margin``, the σ's argument, and ``preference/accuracy`` (that above 0); ``kl/reference``, which is z₀;
    over tokens ``entropy``.
    """

    beta: float
    reference_point: float = 0.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns this rank's share of the loss, spread over tokens as by `PreferenceLoss`. Every rank that shares a
        sequence calls it."""
        inputs = masked(inputs)
        detached = inputs.logprobs.detach()
        ratios = inputs.segment_sum(detached - require_column(inputs.ref_logprobs, "ref_logprobs"))
        weights = inputs.segment_sum(require_column(inputs.returns, "returns").detach())
        lengths = inputs.segment_sum(inputs.mask.to(ratios.dtype))
        margins = weights.sign() * self.beta * (ratios - self.reference_point)
        wrong = torch.sigmoid(-margins)
        slopes = -self.beta * weights * wrong * (1 - wrong) / inputs.num_sequences
        share = inputs.mask / (lengths.clamp(min=1) * inputs.num_sequences)[inputs.segment_ids]

        def mean(of_sequence: Tensor) -> Tensor:
            return (of_sequence[inputs.segment_ids] * share).sum()

        loss = mean(weights.abs() * wrong) + (slopes[inputs.segment_ids] * (inputs.logprobs - detached)).sum()
        num_tokens, count = max(inputs.num_tokens, 1), inputs.num_sequences
        metrics = {
            "preference/accuracy": Metric(value=mean((margins > 0).to(ratios.dtype)), weight=count),
            "preference/margin": Metric(value=mean(margins), weight=count),
            "kl/reference": Metric(value=mean(torch.full_like(ratios, self.reference_point)), weight=count),
            "entropy": Metric(value=inputs.entropy.detach().sum() / num_tokens, weight=num_tokens),
        }
        return LossOutput(loss=loss, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLoss:
    """A reward model's: mean over pairs of -log σ(s₁ - s₂ - margin) + ``centering``·(s₁ + s₂)², s₁ and s₂ the scores of
    the better and the worse one (Bradley-Terry, arXiv:2203.02155, eq. 1; arXiv:2312.09244 for the second term).

    Sequences are pairs as `PreferenceLoss` has them. A sequence's score is the value at its only masked-in position,
    and the ``returns`` of the better one's is the pair's margin. Means over pairs: ``preference/accuracy`` (s₁ above
    s₂), ``preference/margin`` (s₁ - s₂) and ``reward_model/score_mean`` of both.
    """

    centering: float = 0.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns this rank's share of the loss; its gradient goes through ``inputs.values``. Every rank that shares a
        sequence calls it."""
        inputs = masked(inputs)
        values = require_column(inputs.values, "values")
        detached = values.detach()
        scores, margins = (
            inputs.segment_sum(column) for column in (detached, require_column(inputs.returns, "returns").detach())
        )
        count = len(scores) // 2 * 2
        better, worse = scores[:count:2], scores[1:count:2]
        real = inputs.segment_sum(inputs.mask.to(values.dtype))[:count].reshape(-1, 2).all(1)
        per_pair = real.to(values.dtype) / (inputs.num_sequences // 2)
        apart, summed = better - worse - margins[:count:2], better + worse

        def spread(of_pair: Tensor) -> Tensor:
            """[pairs] -> [T], where masked in; half of it on each of the pair's two positions"""
            padded = torch.cat([of_pair * per_pair / 2, of_pair.new_zeros(1)])[inputs.segment_ids // 2]
            return torch.where(inputs.mask, padded, 0.0)

        sign = 1 - inputs.segment_ids % 2 * 2
        slope = 2 * (spread(2 * self.centering * summed) - sign * spread(torch.sigmoid(-apart)))
        value = spread(-logsigmoid(apart) + self.centering * summed.square())
        metrics = {
            "preference/accuracy": Metric(value=spread((better > worse).to(values.dtype)).sum()),
            "preference/margin": Metric(value=spread(better - worse).sum()),
            "reward_model/score_mean": Metric(value=spread(summed / 2).sum()),
        }
        return LossOutput(loss=(value + slope * (values - detached)).sum(), metrics=metrics)
