"""The ``algorithm`` section: a row of choices (docs/algorithms.md), and the KL, critic and correction beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rl_megatron.options.optimizer import OptimizerSection
from rl_megatron.section import Finite, Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class CorrectionSection(Section):
    """Weights pi_old / pi_rollout against the gap between engine and learner; ``mode=none`` leaves it alone."""

    mode: Literal["none", "truncate", "mask", "band"] = "none"
    """Clamp the weight (TIS), zero it outside the band (IcePop), or keep only what is inside, at weight 1."""
    level: Literal["token", "sequence"] = "token"
    """A weight for each token, or one a sequence, length-normalised."""
    low: NonNegativeFloat = 0.0
    """Least weight, as a ratio."""
    high: PositiveFloat = 2.0
    """Greatest weight, as a ratio."""
    veto: NonNegativeFloat = 0.0
    """Sequences with a token of weight below this are dropped; 0 is off."""
    off_policy_delta: PositiveFloat | None = None
    """Sequences of negative advantage are dropped above this mean(log pi_rollout - log pi), in nats."""

    @property
    def acts(self) -> bool:
        """Whether any weight can differ from 1."""
        return self.mode != "none" or self.veto > 0 or self.off_policy_delta is not None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(
                f"algorithm.correction.low={self.low} is above algorithm.correction.high={self.high}; swap them"
            )
        return self


class KLSection(Section):
    """KL of the policy to a frozen reference; ``coefficient=0`` is off and loads no reference."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL, at the start where ``target`` is given."""
    placement: Literal["loss", "token_reward", "completion_reward"] = "loss"
    """Added to the loss, or taken from the reward of each token, or from that of the completion."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL at a sampled token (docs/algorithms.md)."""
    importance_weighted: bool = True
    """placement=loss: weigh each token by pi / pi_rollout, whoever sampled it, so that the expected gradient of k1, k2
    and k3 is that of the KL (docs/algorithms.md); false: all tokens alike, as DeepSeekMath has it for k3."""
    target: PositiveFloat | None = None
    """KL in nats (mean over completions of their tokens' mean) that an adaptive coefficient aims at; null: fixed."""
    horizon: Positive = 10_000
    """Number of completions over which the adaptive coefficient corrects the error."""
    reference: Path | None = None
    """Hugging Face folder of the reference; null: the policy at the start of reinforcement learning."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _one_name(cls, given: object) -> object:
        if given == "mse":
            raise ValueError("algorithm.kl.estimator=mse has gone: it was k2 under a second name; set k2")
        return given


class CriticSection(Section):
    """The value model of ``credit=gae``, trained by a megatron learner in the layout of the policy's."""

    path: Path | None = None
    """Start of the critic: a Hugging Face folder, or the critic/ folder of a checkpoint; null: as the policy."""
    learning_rate: PositiveFloat | None = None
    """Rate after the warm-up, on the policy's schedule; null: the policy's."""
    lam: Fraction | None = None
    """Lambda of the returns it learns; null: that of the advantages."""
    clip: PositiveFloat | None = 0.2
    """Values that move further than this from the old ones do not lower the loss; null does not clip."""
    only_steps: NonNegative = 0
    """Number of first steps that train only the critic (VAPO's value pretraining)."""
    optimizer: OptimizerSection = OptimizerSection()
    """Of the critic."""


class AlgorithmSection(Section):
    """A policy-gradient algorithm is this row of choices (docs/algorithms.md); conf/algorithm/ names the known rows."""

    advantage_mean: Literal["none", "group", "batch", "greedy", "moving"] = "group"
    """What the baseline of an advantage is the mean over; greedy: the reward of a greedy completion (ReMax); moving:
    the steps so far."""
    advantage_std: Literal["none", "group", "batch"] = "group"
    """What the standard deviation that scales advantages is over."""
    leave_one_out: bool = False
    """Whether the baseline excludes the completion itself (RLOO)."""
    baseline_decay: Fraction = 0.9
    """advantage_mean=moving: weight of earlier steps."""
    credit: Literal["completion", "discounted", "gae"] = "completion"
    """Every token gets its completion's advantage, the discounted return from it on (REINFORCE++), or the generalised
    advantage over a critic's values (PPO)."""
    gamma: Fraction = 1.0
    """credit=discounted, gae: discount of a token."""
    lam: Fraction = 0.95
    """credit=gae: lambda of the policy's advantages."""
    lam_length_factor: PositiveFloat | None = None
    """credit=gae: lambda is 1 - 1 / (this * length) in place of ``lam``, when given (VAPO)."""
    whiten: bool = False
    """Whether advantages of tokens are whitened over the whole batch, completions among them that are left out."""
    ratio_level: Literal["token", "sequence", "sequence_sum"] = "token"
    """Importance ratio of each token, one of the whole sequence (length-normalised), or the product over it."""
    objective: Literal["clip", "cispo", "reinforce", "importance", "sapo", "topr"] = "clip"
    """How ratio and advantage are combined to a loss."""
    clip_low: NonNegativeFloat = 0.2
    """objective=clip: the ratio is clipped below at 1 minus this."""
    clip_high: NonNegativeFloat = 0.2
    """objective=clip: the ratio is clipped above at 1 plus this."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """objective=clip: a bad token's loss is at most this times its |advantage|."""
    cap_low: NonNegativeFloat = 0.0
    """objective=cispo, topr: least weight, as a ratio."""
    cap_high: PositiveFloat = 5.0
    """objective=cispo, topr: greatest weight, as a ratio."""
    tau_positive: PositiveFloat = 1.0
    """objective=sapo: temperature of the gate for positive advantages."""
    tau_negative: PositiveFloat = 1.05
    """objective=sapo: temperature of the gate for other advantages."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """How losses of tokens are aggregated to the loss of the batch."""
    max_length: Positive | None = None
    """aggregation=seq_mean_token_sum_norm: what token sums are divided by; rollout.max_new_tokens when not given."""
    second_moment_limit: PositiveFloat | None = None
    """Leave out the batch's tokens of largest squared log-ratio until the rest's mean is at most this (M2PO)."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy, in nats, that the loss rewards."""
    nll_coefficient: NonNegativeFloat = 0.0
    """Weight of -log pi on the tokens of right completions (VAPO); right is eval.success_reward."""
    preference_beta: PositiveFloat | None = None
    """Train by DPO on the best and the worst completion of each group, with this beta, not by the choices above."""
    correction: CorrectionSection = CorrectionSection()
    kl: KLSection = KLSection()
    critic: CriticSection = CriticSection()
    reward_scale: PositiveFloat = 1.0
    """What rewards are multiplied with, once ``unfinished_reward`` and the overlong penalty are in them."""
    reward_clip: PositiveFloat | None = None
    """Rewards, scaled and whitened, are clipped to plus and minus this, when given."""
    whiten_rewards: bool = False
    """Whether rewards are whitened by the mean and the standard deviation of all steps so far."""
    overlong_buffer: NonNegative = 0
    """Completions are penalised over this many tokens before rollout.max_new_tokens; 0 is off (DAPO)."""
    overlong_factor: NonNegativeFloat = 1.0
    """The penalty of a completion of full length."""
    drop_truncated: bool = False
    """Whether completions truncated at rollout.max_new_tokens are left out of the loss."""
    unfinished_reward: Finite | None = None
    """What a completion cut at rollout.max_new_tokens gets in place of its reward, when given; with credit=gae the cut
    is then an end, else the critic's value of what would have come is added."""
    old_logprobs: Literal["learner", "rollout", "interpolated"] = "learner"
    """Who computes the old policy's log-probs: the learner, or the engine while it samples; interpolated: nobody, they
    lie between the engine's and the current ones by weight version (for decoupled PPO on stale rollouts)."""
    routing_replay: Literal["off", "r2", "r3"] = "off"
    """Whether an update's passes take the experts that the learner's own pass over the old policy took (r2), or those
    that the engine took while it sampled, in the old policy's pass too (r3); docs/algorithms.md."""

    @property
    def needs_critic(self) -> bool:
        """Whether values are needed."""
        return self.credit == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a frozen reference are needed."""
        return self.kl.coefficient > 0 or self.preference_beta is not None

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = [*_credit_problems(self), *_ratio_problems(self), *_kl_problems(self)]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _credit_problems(a: AlgorithmSection) -> list[str]:
    out = []
    if a.credit == "gae" and (a.advantage_mean != "none" or a.advantage_std != "none"):
        out.append(
            f"algorithm.credit=gae with advantage_mean={a.advantage_mean}, advantage_std={a.advantage_std}: the critic "
            "is the baseline already; set both to none"
        )
    if a.advantage_mean == "greedy" and a.advantage_std != "none":
        out.append(
            f"algorithm.advantage_mean=greedy with advantage_std={a.advantage_std}: the difference from the greedy "
            "completion is not divided; set advantage_std=none"
        )
    if a.preference_beta is not None and a.old_logprobs == "interpolated":
        out.append(
            "algorithm.old_logprobs=interpolated with preference_beta: pairs have no ratio to an old policy; set "
            "old_logprobs=rollout"
        )
    if a.preference_beta is not None and a.kl.coefficient > 0:
        out.append("algorithm.preference_beta holds its own KL to the reference; set algorithm.kl.coefficient=0")
    return out


def _ratio_problems(a: AlgorithmSection) -> list[str]:
    """Of rows of choices that cannot be meant."""
    out = []
    given, through_ratio = f"algorithm.objective={a.objective}", a.objective in {"clip", "importance", "sapo"}
    if through_ratio and a.ratio_level == "sequence_sum":
        out.append(
            f"algorithm.ratio_level=sequence_sum gives a detached weight, but {given} needs a ratio with a gradient; "
            "set ratio_level=sequence"
        )
    if through_ratio and a.ratio_level == "sequence" and a.aggregation != "seq_mean_token_mean":
        out.append(
            f"algorithm.aggregation={a.aggregation} lets the ratio of a long sequence weigh more than that of a short "
            f"one under algorithm.ratio_level={a.ratio_level}; set aggregation=seq_mean_token_mean"
        )
    if a.cap_low > a.cap_high:
        out.append(f"algorithm.cap_low={a.cap_low} is above algorithm.cap_high={a.cap_high}; swap them")
    return out


def _kl_problems(a: AlgorithmSection) -> list[str]:
    out, kl = [], a.kl
    if kl.coefficient > 0 and kl.placement == "token_reward" and a.credit == "completion":
        out.append(
            "algorithm.kl.placement=token_reward with credit=completion: an advantage of the whole completion has no "
            "place for a token's reward; set kl.placement=completion_reward, or credit=discounted or gae"
        )
    if kl.coefficient > 0 and kl.placement == "loss" and kl.estimator in {"k1", "abs"} and not kl.importance_weighted:
        out.append(
            f"algorithm.kl.estimator={kl.estimator} in the loss without weights: its gradient, over tokens that the "
            "policy samples, is not the KL's (of k1 it is 0 on average); set kl.importance_weighted=true, or k2 or k3"
        )
    return out
