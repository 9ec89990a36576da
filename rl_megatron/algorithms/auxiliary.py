"""Losses other than the policy gradient: a critic's value loss, and those of pairs, DPO and a reward model's. T
positions, S sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_megatron.algorithms.ratios import masked, required
from rl_megatron.types import LossInputs, LossOutput, Metric
from rl_megatron.user_code import load_named

PairLoss = Callable[[Tensor, Tensor, float], Tensor]
"""The losses of pairs [P], from log pi/ref of their better answers [P], of their worse ones [P], and beta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """½·max((V - R)², (V_clip - R)²), mean over tokens; V_clip is V within ``clip`` of V_old (None: no clipping).

    Means over tokens: ``critic/value_mean``, and ``critic/clip_fraction``, the share whose clipped term is larger.
    """

    clip: float | None = None

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This rank's share of the loss; its gradient goes through ``inputs.values``."""
        inputs = masked(inputs)
        values, returns = required(inputs.values, "values"), required(inputs.returns, "returns")
        old = required(inputs.old_values, "old_values")
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
    """-log σ(beta·(Δlog pi - Δlog ref)) (arXiv:2305.18290)."""
    return -logsigmoid(beta * (better - worse))


@functools.cache
def pair_loss_of(name: str) -> PairLoss:
    """``dpo``, or the user's own at ``package.module:name``. Raises as `load_named`."""
    if name == "dpo":
        return dpo
    own: PairLoss = load_named(name, "dpo.loss", "function", callable)
    return own


def with_slopes(loss: PairLoss, better: Tensor, worse: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Losses of pairs, [P], and their derivatives to the log pi/ref of the better and the worse answer, [P, 2]."""
    sides = better.detach().clone().requires_grad_(), worse.detach().clone().requires_grad_()
    with torch.enable_grad():
        losses = loss(*sides, beta)
        slopes = torch.autograd.grad(losses.sum(), sides, allow_unused=True, materialize_grads=True)
    return losses.detach(), torch.stack(slopes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """Mean over pairs of `pair_loss_of` ``form``.

    Sequences 2i and 2i + 1 of a micro-batch are the chosen and the rejected one of a pair; a last one without a
    partner, or one without a trained token, is padding. Log-probs are sums over the trained tokens, or with
    ``per_token`` their means (length-normalised DPO, arXiv:2411.15124, section 5.1). Means over pairs:
    ``preference/accuracy`` (margin above 0) and ``preference/margin``, in nats times beta; over tokens ``entropy``.
    """

    form: str = "dpo"
    beta: float = 0.1
    per_token: bool = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This rank's share of the loss. Every rank that shares a sequence calls it.

        Each token carries its pair's loss, spread over the pair's tokens, and the gradient of its own log-prob, so
        shares of context-parallel ranks add up without autograd between them.
        """
        inputs = masked(inputs)
        logprobs = inputs.logprobs
        difference = logprobs.detach() - required(inputs.ref_logprobs, "ref_logprobs")
        sums, lengths = inputs.segment_sum(difference), inputs.segment_sum(inputs.mask.to(logprobs.dtype))
        scale = 1 / lengths.clamp(min=1) if self.per_token else torch.ones_like(lengths)
        sums, count = sums * scale, len(sums) // 2 * 2
        losses, slopes = with_slopes(pair_loss_of(self.form), sums[:count:2], sums[1:count:2], self.beta)
        of_pairs = lengths[:count].reshape(-1, 2)
        margin = self.beta * (sums[:count:2] - sums[1:count:2])
        per_pair = of_pairs.all(1).to(logprobs.dtype) / (inputs.num_sequences // 2)
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
        return LossOutput(loss=loss, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLoss:
    """A reward model's: mean over pairs of -log σ(s₁ - s₂ - margin) + centring·(s₁ + s₂)², s₁ and s₂ the scores of the
    better and the worse one (Bradley-Terry, arXiv:2203.02155, eq. 1; arXiv:2312.09244 for the second term).

    Sequences are pairs as `PreferenceLoss` has them. A sequence's score is the value at its only masked-in position,
    and the ``returns`` of the better one's is the pair's margin. Means over pairs: ``preference/accuracy`` (s₁ above
    s₂), ``preference/margin`` (s₁ - s₂) and ``reward_model/score_mean`` of both.
    """

    centring: float = 0.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This rank's share of the loss; its gradient goes through ``inputs.values``. Every rank that shares a sequence
        calls it."""
        inputs = masked(inputs)
        values = required(inputs.values, "values")
        detached = values.detach()
        scores, margins = (
            inputs.segment_sum(column) for column in (detached, required(inputs.returns, "returns").detach())
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
        slope = 2 * (spread(2 * self.centring * summed) - sign * spread(torch.sigmoid(-apart)))
        value = spread(-logsigmoid(apart) + self.centring * summed.square())
        metrics = {
            "preference/accuracy": Metric(value=spread((better > worse).to(values.dtype)).sum()),
            "preference/margin": Metric(value=spread(better - worse).sum()),
            "reward_model/score_mean": Metric(value=spread(summed / 2).sum()),
        }
        return LossOutput(loss=(value + slope * (values - detached)).sum(), metrics=metrics)
