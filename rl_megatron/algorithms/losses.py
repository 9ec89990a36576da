"""The learner's losses: pure, picklable functions of one micro-batch (``rl_megatron.types.Loss``).

A policy-gradient algorithm is a row of choices (docs/algorithms.md), the ``algorithm`` section of the configuration;
the functions of each choice are in objectives.py, and those of its aggregation here. T positions, S sequences, N
positions of all of them.

An aggregation makes one number of the losses of tokens: each choice gives the weights [T] of the tokens in the global
sum. They already contain the global denominators of the whole (mini)batch, so the shares of micro-batches,
data-parallel and context-parallel ranks add up to the loss for any cut. ``lengths`` [S] count each sequence's tokens;
``max_length`` is the fixed length that one of the choices divides by. Averages are over trajectories or prompts. Where
one is several sequences, the controller computes the weights (``token_weight``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_megatron.algorithms.auxiliary import PreferenceLoss, ValueLoss
from rl_megatron.algorithms.corrections import correction_weights, interpolate_old_logprobs
from rl_megatron.algorithms.kl import absolute, k3, kl_term
from rl_megatron.algorithms.objectives import (
    LOG_RATIO_BOUND,
    RATIO_LEVELS,
    demonstrated_losses,
    masked,
    require_column,
    resolve_objective,
)
from rl_megatron.algorithms.segments import dense, segment_sum, sequence_ids
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.types import Loss, LossInputs, LossOutput, Metric, Samples

Aggregation = Callable[[LossInputs, Tensor, int], Tensor]

_RATIO_MEANS = dict.fromkeys(("sequence", "turn", "sequence_sum"), "seq_mean_token_mean") | {"token": "token_mean"}
MEANS_OF_RATIOS = (
    *("clip_fraction", "clip_fraction/low", "clip_fraction/high"),
    *("ratio/mean", "ratio/second_moment", "ratio/share"),
)
"""Means over tokens, or with ratios of sequences or turns, over all sequences, even without a trained token."""


def policy_loss(row: AlgorithmSection, *, kl_coefficient: float, max_new_tokens: int) -> Loss:
    """Returns the policy's loss: that of pairs if the row has ``preference.beta``, otherwise a policy gradient. The
    value loss is added where the policy is its own critic."""
    if row.preference.beta is not None:
        return PreferenceLoss(row=row.preference, beta=row.preference.beta)
    policy = PolicyLoss(row=row, kl_coefficient=kl_coefficient, max_new_tokens=max_new_tokens)
    if not row.is_own_critic:
        return policy
    return PolicyAndValueLoss(policy=policy, value=ValueLoss(clip=row.critic.clip), coefficient=row.critic.coefficient)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """The policy-gradient loss of the choices in ``row``.

    The loss adds to the objective, under the same aggregation: ``kl_coefficient`` times KL(pi‖ref), if the row places
    it in the loss, without corrections; minus ``entropy_coefficient`` times the entropy; the samples'
    ``old_kl_weights`` times |log pi - log pi_old|; and their ``nll_weights`` times -log pi. If they have a
    ``proximal_share``, the old log-probs are interpolated by it. seq_mean_token_sum_norm divides by
    ``max_new_tokens``. Demonstrated tokens have `demonstrated_losses` in place of the objective.

    Means: ``entropy`` and ``kl/old_policy`` (k3 of KL(old‖current), from tokens the old policy sampled) over tokens;
    ``ratio/mean``, ``ratio/second_moment`` (of log-ratios within ±``LOG_RATIO_BOUND``),
    ``clip_fraction`` and its two sides over tokens at token level, else over sequences, each the mean of its tokens, 0
    without any; ``ratio/share`` is the share with any, which `policy_row` divides them by. With a correction,
    ``correction/weight_mean`` and ``correction/dropped_fraction`` over tokens; with a KL or an NLL term, ``loss/kl``
    and ``loss/nll``, their parts of the loss.
    The maximum ``ratio/max`` is -inf where a micro-batch is empty.
    With demonstrations these means are of the other tokens, and there are three more over all tokens. They are
    ``demonstration/share``, of those demonstrated, ``demonstration/probability``, pi of these, and ``sampled/share``,
    of the others. `policy_row` divides the means of the others by the last.
    """

    row: AlgorithmSection
    kl_coefficient: float
    max_new_tokens: int

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns this rank's share of the loss. Every rank that shares a sequence calls it (``segment_sum`` waits)."""
        row, inputs = self.row, masked(inputs)
        if inputs.proximal_share is not None:
            inputs = interpolate_old_logprobs(inputs, inputs.proximal_share)
        lengths = inputs.segment_sum(inputs.mask.to(inputs.logprobs.dtype))
        raw = RATIO_LEVELS[row.ratio_level](inputs, lengths)
        log_ratio = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        per_token, limited = resolve_objective(row.objective)(log_ratio, inputs, lengths, row)
        correction = correction_weights(row.correction, inputs, lengths) if row.correction.acts else None
        if correction is not None:
            per_token = per_token * correction
        if inputs.demonstrated is not None:
            per_token = demonstrated_losses(per_token, inputs, row)
        if row.entropy_coefficient:
            per_token = per_token - row.entropy_coefficient * inputs.entropy
        if inputs.old_kl_weights is not None:
            old_kl = absolute(inputs.old_logprobs, inputs.logprobs)
            per_token = per_token + inputs.old_kl_weights * old_kl
        weights = loss_weights(row.aggregation, inputs, lengths, self.max_new_tokens)
        parts = self._extra_terms(inputs, weights)
        sampled = inputs if inputs.demonstrated is None else _mask_demonstrated(inputs)
        output = self._describe(sampled, lengths, raw, limited, correction)
        metrics = {**output.metrics, **{f"loss/{name}": Metric(value=part.detach()) for name, part in parts.items()}}
        if inputs.demonstrated is not None:
            metrics |= _demonstration_means(inputs)
        return replace(output, loss=(per_token * weights).sum() + sum(parts.values()), metrics=metrics)

    def _extra_terms(self, inputs: LossInputs, weights: Tensor) -> dict[str, Tensor]:
        """Returns the terms of the loss, [] each, that it adds to the objective."""
        out = {}
        if self.kl_coefficient and self.row.kl.placement == "loss":
            out["kl"] = self.kl_coefficient * (kl_term(inputs, self.row.kl) * weights).sum()
        if inputs.nll_weights is not None:
            out["nll"] = -(inputs.logprobs * inputs.nll_weights).sum()
        return out

    @torch.no_grad()
    def _describe(
        self, inputs: LossInputs, lengths: Tensor, raw: Tensor, limited: Tensor, correction: Tensor | None
    ) -> LossOutput:
        """Returns the metrics, with a loss of 0."""
        log_ratio = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = log_ratio.exp()
        over_tokens, over_ratios = (
            AGGREGATIONS[name](inputs, lengths, 0) for name in ("token_mean", _RATIO_MEANS[self.row.ratio_level])
        )
        means = {
            "entropy": (inputs.entropy * over_tokens).sum(),
            "kl/old_policy": (k3(inputs.old_logprobs, inputs.logprobs) * over_tokens).sum(),
            "clip_fraction": (limited * over_ratios).sum(),
            "clip_fraction/low": ((limited & (ratio < 1)) * over_ratios).sum(),
            "clip_fraction/high": ((limited & (ratio >= 1)) * over_ratios).sum(),
            "ratio/mean": (ratio * over_ratios).sum(),
            "ratio/second_moment": (ratio.square() * over_ratios).sum(),
            "ratio/share": over_ratios.sum(),
        }
        if correction is not None:
            means["correction/weight_mean"] = (correction * over_tokens).sum()
            means["correction/dropped_fraction"] = ((correction == 0) * over_tokens).sum()
        num_ratios = inputs.num_tokens if self.row.ratio_level == "token" else inputs.num_sequences
        weights = {name: num_ratios if name in MEANS_OF_RATIOS else inputs.num_tokens for name in means}
        return LossOutput(
            loss=ratio.new_zeros(()),
            metrics={
                **{name: Metric(value=value, weight=weights[name]) for name, value in means.items()},
                "ratio/max": Metric(value=_masked_max(ratio, inputs.mask), reduction="max"),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAndValueLoss:
    """The policy's loss plus ``coefficient`` times the value loss, of a policy that is its own critic.

    The metrics of both, and ``critic/loss``, the value loss without its coefficient.
    """

    policy: PolicyLoss
    value: ValueLoss
    coefficient: float

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns this rank's share of the sum. Every rank that shares a sequence calls it."""
        policy, value = self.policy(inputs), self.value(inputs)
        said = {**policy.metrics, **value.metrics, "critic/loss": Metric(value=value.loss.detach())}
        return LossOutput(loss=policy.loss + self.coefficient * value.loss, metrics=said)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Supervised loss: mean over the batch's tokens of -log pi(target). Means: ``entropy``."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns this rank's share of the mean."""
        inputs = masked(inputs)
        num_tokens = max(inputs.num_tokens, 1)
        return LossOutput(
            loss=-inputs.logprobs.sum() / num_tokens,
            metrics={"entropy": Metric(value=inputs.entropy.detach().sum() / num_tokens)},
        )


def token_mean(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Every token of the batch weighs the same."""
    return inputs.mask.to(inputs.logprobs.dtype) / max(inputs.num_tokens, 1)


def seq_mean_token_mean(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Every sequence weighs the same, and its tokens share that weight."""
    return seq_mean_token_sum(inputs, lengths) / lengths.clamp(min=1)[inputs.segment_ids]


def seq_mean_token_sum(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Mean over sequences of the sum over their tokens."""
    return inputs.mask.to(inputs.logprobs.dtype) / inputs.num_sequences


def seq_mean_token_sum_norm(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Mean over sequences of the sum over their tokens, over a fixed length (Dr. GRPO, arXiv:2503.20783)."""
    return seq_mean_token_sum(inputs, lengths) / max_length


def prompt_mean(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Every prompt weighs the same, and the tokens of all its trajectories share that weight (arXiv:2510.13786)."""
    return require_column(inputs.token_weight, "token_weight")


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "prompt_mean": prompt_mean,
}


def loss_weights(name: str, inputs: LossInputs, lengths: Tensor, max_length: int) -> Tensor:
    """Returns weights [T] of the tokens in the global sum, of ``masked`` inputs: the controller's, if it gave some."""
    return AGGREGATIONS[name](inputs, lengths, max_length) if inputs.token_weight is None else inputs.token_weight


def unit_ids(samples: Samples, name: str) -> Tensor | None:
    """Returns each sequence's trajectory or prompt to average over, [S]; None to average over sequences or tokens."""
    return {"token_mean": None, "prompt_mean": samples.group_of}.get(name, samples.trajectory_of)


def token_weight(samples: Samples, name: str, *, max_length: int, part: Tensor | None = None) -> Tensor | None:
    """The column ``token_weight`` [N] of a batch of the sequences ``part``, all by default; 0 at those of others.

    None where the learner's own counts give the weights.
    """
    units = unit_ids(samples, name)
    if units is None:
        return None
    part = torch.arange(len(units)) if part is None else part
    ids = dense(units[part])
    of_positions = sequence_ids(samples.cu_seqlens)
    tokens = segment_sum(samples.mask.double(), of_positions, samples.num_sequences)[part]
    each = {
        "seq_mean_token_sum": torch.ones_like(tokens),
        "seq_mean_token_sum_norm": torch.full_like(tokens, 1 / max_length),
    }.get(name, 1 / segment_sum(tokens, ids).clamp(min=1)[ids])
    of_sequences = torch.zeros(samples.num_sequences, dtype=torch.float64)
    of_sequences[part] = each / (int(ids.max()) + 1)
    return of_sequences.float()[of_positions] * samples.mask


def _mask_demonstrated(inputs: LossInputs) -> LossInputs:
    """Returns the inputs with no demonstrated token masked in; a whole sequence is a demonstration, or was sampled."""
    return replace(inputs, mask=inputs.mask & ~require_column(inputs.demonstrated, "demonstrated"))


@torch.no_grad()
def _demonstration_means(inputs: LossInputs) -> dict[str, Metric[Tensor]]:
    shown = inputs.mask & require_column(inputs.demonstrated, "demonstrated")
    count = max(inputs.num_tokens, 1)
    sums = {
        "demonstration/share": shown.sum(),
        "demonstration/probability": (shown * inputs.logprobs.exp()).sum(),
        "sampled/share": (inputs.mask & ~shown).sum(),
    }
    return {name: Metric(value=x / count, weight=inputs.num_tokens) for name, x in sums.items()}


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the greatest value inside the mask, []; -inf if the mask is empty (also with T = 0)."""
    lowest = values.new_full((1,), -torch.inf)
    return torch.cat([torch.where(mask, values, lowest), lowest]).amax()
