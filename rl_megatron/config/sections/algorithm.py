"""The ``algorithm`` section: a row of choices (docs/algorithms.md).

Keys of the ``algorithm`` section: how rewards of completions and turns become advantages of tokens.

The ``algorithm.correction`` section: weights of tokens for the gap between engine and learner.

The ``algorithm.critic`` section: the model or the layer that values states, and its training.

The ``algorithm.kl`` section: the KL of the policy to its reference, or to its teachers.

Keys of the ``algorithm`` section: the loss of a token, and the limits that it has.

How the two answers of a pair are compared: keys of ``algorithm.preference``, and of ``dpo``.

The ``algorithm.tokens`` section: which tokens of a minibatch the policy trains on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.feature import with_features
from rl_megatron.section import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    NUMBER,
    EntryName,
    Finite,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    OwnCode,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
)


class TokensSection(Section):
    """Chooses tokens of a minibatch, by the policy at the start of the step; denominators count all its tokens. Further
    numbers of a choice are in ``algorithm.parameters``."""

    choose: Literal["all", "top_entropy", "clip_cov", "kl_cov", "second_moment"] = "all"
    """Train on all tokens, or only on those of most entropy; leave out some of great covariance of log-prob and
    advantage (Clip-Cov), or hold those of the greatest to the old policy by a KL (KL-Cov); leave out those
    furthest from the engine's policy until the second moment of the rest is small (M2PO)."""
    share: PositiveFraction = 0.2
    """Share of the minibatch's tokens that top_entropy trains on, clip_cov leaves out or kl_cov holds; one at least."""


PairLossName = Literal["dpo", "ipo", "hinge", "orpo", "kto"]
PAIR_LOSS_NAMES: tuple[str, ...] = get_args(PairLossName)
UNPAIRED = ("kto",)
"""Losses of single answers with a label, in place of pairs; of ``dpo`` alone."""


class PreferenceSection(Section):
    """Training on pairs of the group's completions in place of the policy gradient; ``beta=null`` is off."""

    key: ClassVar[str] = "algorithm.preference"
    """The section's name in messages."""
    loss: PairLossName | OwnCode = "dpo"
    """The loss of a pair as a function of its answers' log pi/ref (docs/sft.md), or with kto, for job=dpo, the
    loss of single answers with a label; ``package.module:name`` is a function of your own (docs/algorithms.md)."""
    beta: PositiveFloat | None = None
    """Train on the best and the worst completion of each group, by a loss with this beta, in place of the policy
    gradient; null: the policy gradient."""
    per_token: bool = False
    """Whether an answer's log pi/ref is the mean over its tokens, not their sum (length-normalized DPO,
    arXiv:2411.15124, section 5.1); beta is larger then, 5 in that work."""
    reference_free: bool = False
    """Whether an answer's log pi stands in place of its log pi/ref (SimPO, ORPO), and no frozen model is loaded."""
    target_margin: NonNegativeFloat = 0.0
    """loss=dpo: subtracted from beta times the margin (SimPO's gamma)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False), NUMBER] = 0.0
    """Probability that a pair's order is wrong: the loss is its mean over both orders (conservative DPO)."""
    nll: NonNegativeFloat = 0.0
    """Weight of -log pi of the better answer, the mean over its tokens, in addition to the loss of the pair."""


ParameterName = Literal[
    "tau_positive",
    "tau_negative",
    "shape_positive",
    "shape_negative",
    "rate_positive",
    "rate_negative",
    "covariance_low",
    "covariance_high",
    "kl_cov",
    "second_moment",
]
PARAMETERS: Mapping[ParameterName, float] = dict(
    zip(get_args(ParameterName), (1.0, 1.05, 2.0, 3.0, 3.0, 2.0, 1.0, 5.0, 1.0, 0.04), strict=True)
)
"""The defaults of ``algorithm.parameters``."""


def _whole(given: Mapping[ParameterName, float]) -> Mapping[ParameterName, float]:
    """Returns all parameters, with the defaults of missing ones."""
    values, least, most = {**PARAMETERS, **given}, MIN_TEMPERATURE, MAX_TEMPERATURE
    problems = list[str]()
    for name, value in values.items():
        if name.startswith("tau") and not least <= value <= most:
            problems.append(f"algorithm.parameters.{name}={value:g}: must be from {least:g} to {most:g}")
        elif not (name.startswith("covariance") or value > 0):
            problems.append(f"algorithm.parameters.{name}={value:g}: must be above 0")
    if problems:
        raise ValueError("\n".join(problems))
    return values


class ObjectiveKeys(Section):
    """Part of `AlgorithmSection`."""

    ratio_level: Literal["token", "sequence", "turn", "sequence_sum"] = "token"
    """The importance ratio is each token's, the sequence's or its turn's (length-normalized), or the product over the
    sequence."""
    objective: (
        Literal["clip", "cispo", "reinforce", "importance", "sapo", "vespo", "topr", "gmpo", "dppo_tv", "dppo_kl"]
        | OwnCode
    ) = "clip"
    """The loss of a token as a function of its ratio, with gmpo of all of its sequence, and advantage
    (docs/algorithms.md). ``package.module:name`` is a function of your own, which the limits below reach if it reads
    them."""
    clip_low: NonNegativeFloat = 0.2
    """objective=clip, gmpo: the ratio is clipped from below at 1 minus this; dppo_tv, dppo_kl: the greatest distance to
    the old policy at which a token of negative advantage keeps falling, a difference of probabilities or nats."""
    clip_high: NonNegativeFloat = 0.2
    """objective=clip, gmpo: the ratio is clipped from above at 1 plus this; dppo_tv, dppo_kl: the greatest distance at
    which a token of positive advantage keeps rising."""
    keep_low: NonNegativeFloat = 0.0
    """objective=clip: a token that the lower limit clips keeps this times the gradient that it has at the limit
    (beta_1 of CE-GPPO); 0: none."""
    keep_high: NonNegativeFloat = 0.0
    """objective=clip: the same of a token that the upper limit clips (beta_2)."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False), NUMBER] | None = None
    """objective=clip: the loss of a token of negative advantage is at most this times its |advantage|; null: no bound.
    """
    cap_low: NonNegativeFloat = 0.0
    """objective=cispo, topr: least weight, as a ratio."""
    cap_high: PositiveFloat = 5.0
    """objective=cispo, topr, dppo_tv, dppo_kl: greatest weight, as a ratio."""
    parameters: Annotated[Mapping[ParameterName, Finite], AfterValidator(_whole)] = PARAMETERS
    """Numbers of one objective or choice of tokens.
    tau_positive, tau_negative: objective=sapo: temperature of the gate for positive advantages, and for others; from
    1e-6 to 1e6.
    shape_positive, shape_negative: objective=vespo: k of the weight rho^k exp(lambda (1 - rho)) for positive
    advantages, and for others; above 0.
    rate_positive, rate_negative: objective=vespo: lambda of the weight for positive advantages, and for others; above
    0.
    covariance_low, covariance_high: tokens.choose=clip_cov: least and greatest covariance of a token that may be left
    out, in nats times advantage.
    kl_cov: tokens.choose=kl_cov: weight of the KL of the old policy to the current one, by abs(log pi_old - log pi), at
    the tokens that are held; above 0.
    second_moment: tokens.choose=second_moment: greatest mean square of log pi - log pi_rollout of the tokens that are
    trained on; above 0."""
    demonstration_gamma: PositiveFloat | None = None
    """Each group compares the demonstration of its prompt (``data.fields.demonstration``) with its completions, and
    trains on it by p / (p + this), p the probability of a token, in place of the objective (LUFFY); null: there is
    no demonstration."""


@with_features("algorithm.kl")
class KLSection(Section):
    """KL of the policy to a reference; ``coefficient=0`` is off and loads no reference."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL."""
    placement: Literal["loss", "token_reward", "completion_reward"] = "loss"
    """Add the KL to the loss, or subtract it from each token's reward, or from the completion's."""
    estimator: Literal["k1", "k2", "k3", "abs", "top_k"] = "k3"
    """Estimator of the KL at a sampled token (docs/algorithms.md); top_k: no estimate but a divergence over the
    reference's most probable tokens and one bucket of all others (docs/sft.md)."""
    top_k: Positive = 64
    """estimator=top_k: number of tokens that the reference names at each position; all if it has fewer."""
    beta: Fraction = 0.5
    """estimator=top_k: 0 is KL(reference‖policy), 1 is KL(policy‖reference); between them, the generalized
    Jensen-Shannon divergence."""
    importance_weighted: bool = True
    """placement=loss: weight each token by pi / pi_rollout, so that the expected gradient of k1, k2 and k3 is that of
    the KL (docs/algorithms.md); false: all tokens weigh the same, as in DeepSeekMath's k3."""
    reference: Path | None = None
    """Hugging Face folder of the reference, also of job=dpo; null: the model that training starts from."""
    teachers: Mapping[EntryName, TeacherSection] = Field(default_factory=dict)

    @property
    def has_teacher(self) -> bool:
        """True if a model other than the initial policy scores; from the initial policy alone nothing is learned."""
        return bool(self.teachers) or self.reference is not None

    @field_validator("estimator", mode="before")
    @classmethod
    def _one_name(cls, given: object) -> object:
        if given == "mse":
            raise ValueError("algorithm.kl.estimator=mse has gone: it was k2 under a second name; set k2")
        return given


class CriticSection(Section):
    """The values of ``credit=gae``: a second model that is trained, or a layer of the policy."""

    backbone: Literal["own", "policy"] = "own"
    """own: a second model, trained by itself; policy: a value layer on the policy's hidden states, trained with it."""
    coefficient: PositiveFloat = 0.5
    """backbone=policy: weight of the value loss in the policy's loss."""
    path: Path | None = None
    """Initial weights: a Hugging Face folder, of a policy or, with its scores for values, of a reward model; or the
    critic/ folder of a checkpoint, without its optimizer's state; null: those of the policy."""
    learning_rate: PositiveFloat | None = None
    """Learning rate after the warm-up, on the policy's schedule from the first step on; null: train.learning_rate."""
    lam: Fraction | None = None
    """Lambda of the returns that the critic learns; null: algorithm.lam, the advantages' own."""
    clip: PositiveFloat | None = 0.2
    """The value loss clips values to within this of the old values; null does not clip."""
    only_steps: NonNegative = 0
    """Number of first steps that train only the critic (VAPO's value pretraining); warm-up and decay of the policy's
    learning rate begin after them."""


class CorrectionSection(Section):
    """Weights each loss by pi_old / pi_rollout to correct the gap between engine and learner; ``mode=none`` is off."""

    mode: Literal["none", "truncate", "mask", "band", "reject"] = "none"
    """Clamp the weight (TIS), zero it outside the band (IcePop), keep only what is inside, at weight 1, or drop what
    has a divergence above ``high`` (reject)."""
    level: Literal["token", "sequence", "product", "worst"] = "token"
    """One weight per token, or one per sequence: length-normalized (sequence), or the product over its tokens. Of
    mode=reject a sequence's divergence is the mean over its tokens (sequence), their sum (product) or the greatest of
    them (worst)."""
    low: NonNegativeFloat = 0.0
    """Least weight, as a ratio."""
    high: PositiveFloat = 2.0
    """Greatest weight, as a ratio; mode=reject: greatest divergence, in nats."""
    veto: NonNegativeFloat = 0.0
    """Drop sequences in which a token has a ratio pi_old / pi_rollout below this; 0 is off."""
    off_policy_delta: PositiveFloat | None = None
    """Drop sequences of negative advantage whose mean(log pi_rollout - log pi), in nats, is above this; null is off."""

    @property
    def acts(self) -> bool:
        """True if any weight can differ from 1."""
        return self.mode != "none" or self.veto > 0 or self.off_policy_delta is not None


class AdvantageKeys(Section):
    """Part of `AlgorithmSection`."""

    advantage_mean: Literal["none", "group", "batch", "greedy", "moving", "tracked"] | OwnCode = "group"
    """The baseline of an advantage is the mean reward of the group or the batch, the reward of a greedy completion
    (greedy: ReMax), a moving mean over steps, or what the prompt's earlier completions have shown, and then the batch's
    mean (tracked: SPO); none: no baseline. ``package.module:name`` is a function of your own, from the rewards of a
    group to its advantages."""
    advantage_of: Literal["sum", "parts"] = "sum"
    """Compare the weighted sums of ``reward.parts``, or each part by itself, and add advantages by weight (GDPO)."""
    advantage_std: Literal["none", "group", "batch", "advantages"] = "group"
    """Divide advantages by the standard deviation of the rewards of the group or the batch, or of the batch's rewards
    less their groups' means (advantages: ScaleRL), and 1e-6; none: do not divide."""
    std_unbiased: bool = True
    """Whether its variance is over n - 1 values, not n."""
    leave_one_out: bool = False
    """Whether the baseline excludes the completion itself (RLOO)."""
    best_of: Positive = 1
    """Compare the best reward of this many completions, over all such subsets of the group: the best of those that have
    the completion less that of all (Pass@k training), or with ``leave_one_out`` of the same ones without it. 1: compare
    rewards."""
    baseline_decay: Fraction = 0.9
    """advantage_mean=moving: decay of the moving mean, the weight of earlier steps; tracked: of earlier completions."""
    credit: Literal["completion", "turn", "discounted", "optimal", "gae"] = "completion"
    """The advantage of a token is that of its completion, or of its turn (of the rewards from that turn on), its
    discounted return (REINFORCE++), that less the mean return of the group's tokens at the same place, weighted for
    least variance of the gradient (optimal: OTB), or the generalized advantage estimate from a critic's values (PPO).
    """
    gamma_turn: Fraction = 1.0
    """credit=turn: discount factor per turn; 0: a turn has its own reward alone."""
    turn_baseline: Literal["all", "index", "state"] = "all"
    """credit=turn: the mean and the standard deviation are of all turns of the group, of its turns of the same number
    (index), or of its turns that began from the same state (state: GiGPO; docs/algorithms.md)."""
    turn_compared: Literal["rewards", "returns"] = "rewards"
    """credit=turn: compare rewards of turns, and sum over a turn and those after it what is left of each (process
    supervision), or compare the returns from each turn on (GiGPO)."""
    turn_weight: PositiveFloat | None = None
    """credit=turn: the advantage is that of the whole completion plus this times the turn's (GiGPO's omega); null: the
    turn's alone."""
    gamma: Fraction = 1.0
    """credit=discounted, optimal, gae: discount factor per token."""
    lam: Fraction = 0.95
    """credit=gae: lambda of the policy's advantages."""
    lam_length_factor: PositiveFloat | None = None
    """credit=gae: the policy's lambda is 1 - 1 / (this * length) (VAPO); null: ``lam``."""
    whiten: bool = False
    """Whiten advantages over the whole batch, including completions that the loss leaves out."""
    whiten_of: Literal["tokens", "completions"] = "tokens"
    """whiten: the mean and the standard deviation count each token, or each completion once, whatever its length."""


@with_features("algorithm")
class AlgorithmSection(ObjectiveKeys, AdvantageKeys):
    """An algorithm is this row of choices (docs/algorithms.md); conf/algorithm/ has a file for each known one."""

    old_kl_limit: PositiveFloat | None = None
    """Greatest KL of the old policy to the current one (``kl/old_policy`` of a minibatch, in nats) at which a step
    continues: a minibatch above it and all later ones, of all epochs, are not trained on. null: all are."""
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"
    ] = "token_mean"
    """How token losses are aggregated into the batch's loss; a sequence is a trajectory, whatever rows it has.
    seq_mean_token_sum_norm divides token sums by the most that is sampled of a completion, rollout.max_new_tokens, or
    with an environment its max_tokens; of a mixture, by the greatest of its sources."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, in nats."""
    nll_coefficient: NonNegativeFloat = 0.0
    """Weight of -log pi on the tokens of right completions (VAPO), whose reward is at least eval.success_reward and is
    not replaced by ``unfinished_reward``."""
    preference: PreferenceSection = PreferenceSection()
    tokens: TokensSection = TokensSection()
    correction: CorrectionSection = CorrectionSection()
    kl: KLSection = KLSection()
    critic: CriticSection = CriticSection()
    overlong_buffer: NonNegativeFloat = 0.0
    """Penalize completions that reach into the last this many tokens of the most that is sampled (see ``aggregation``;
    DAPO), fewer than that, or below 1, into the last this share of them; 0 is off."""
    overlong_factor: NonNegativeFloat = 1.0
    """Penalty of a completion of that length; it grows linearly over ``overlong_buffer``, with the length alone: one
    that rollout.completion_timeout_seconds ended has none if it is short."""
    drop_truncated: bool = False
    """Drop completions from the loss that rollout.max_new_tokens or rollout.completion_timeout_seconds truncated; with
    an environment, also trajectories that did not end as done but by its limits, a bad call or a fault."""
    unfinished_reward: Finite | None = None
    """Reward of a completion that ``drop_truncated`` would leave out, in place of its own; with credit=gae the
    truncation then counts as an end. null: its own reward, to which credit=gae adds the critic's value of the last
    state."""
    old_logprobs: Literal["learner", "rollout", "interpolated"] = "learner"
    """Who computes the old policy's log-probs: the learner, or the engine while it samples; interpolated: neither, they
    are interpolated between the engine's and the current ones by weight version (decoupled PPO on stale rollouts)."""

    @property
    def pairs(self) -> bool:
        """True if it trains on pairs of completions, in place of the policy gradient."""
        return self.preference.beta is not None

    @property
    def needs_critic(self) -> bool:
        """True if the advantages need the values of a model besides the policy."""
        return self.credit == "gae" and self.critic.backbone == "own"

    @property
    def is_own_critic(self) -> bool:
        """True if the advantages need values of the policy itself."""
        return self.credit == "gae" and self.critic.backbone == "policy"

    @property
    def track_decay(self) -> float | None:
        """The decay of a baseline of each prompt; None without one."""
        return self.baseline_decay if self.advantage_mean == "tracked" else None

    @property
    def compares_states(self) -> bool:
        """True if turns that began from the same state are compared."""
        return self.credit == "turn" and self.turn_baseline == "state"

    @property
    def needs_reference(self) -> bool:
        """True if the loss or the rewards need log-probs of a reference."""
        return self.kl.coefficient > 0 or (self.pairs and not self.preference.reference_free)

    @property
    def scores_policy(self) -> bool:
        """True if it needs scores of the policy at the start of a step, by a pass over its rows."""
        return self.old_logprobs == "learner" or self.tokens.choose != "all" or self.credit == "optimal"

    @property
    def needs_top(self) -> bool:
        """True if the loss needs the reference's most probable tokens."""
        return self.kl.coefficient > 0 and self.kl.estimator == "top_k"

    @property
    def taught_by_equal(self) -> list[str]:
        """The keys, with their values, that make groups of equal rewards worth keeping: they give a gradient too."""
        keys = {
            "algorithm.credit=gae": self.credit == "gae",
            f"algorithm.advantage_mean={self.advantage_mean}": self.advantage_mean
            in {"greedy", "batch", "moving", "tracked"},
            "algorithm.whiten=true": self.whiten and self.advantage_mean == "none" and self.credit != "gae",
            f"algorithm.gamma={self.gamma:g}": self.credit == "optimal" and self.gamma < 1,
            f"algorithm.kl.placement={self.kl.placement}": self.kl.coefficient > 0 and self.kl.placement != "loss",
            f"algorithm.kl.estimator={self.kl.estimator}": self.needs_top,
            f"algorithm.nll_coefficient={self.nll_coefficient:g}": self.nll_coefficient > 0,
        }
        return [key for key, teaches in keys.items() if teaches]

    @property
    def needs_differences(self) -> bool:
        """True if only groups with different rewards give a gradient; without a baseline every reward gives one."""
        compares = self.advantage_mean != "none" or self.credit == "optimal" or self.levels_equal
        return compares and not self.taught_by_equal

    @property
    def own_decides(self) -> bool:
        """True if the user's function of advantages decides which groups give a gradient."""
        return ":" in self.advantage_mean

    @property
    def levels_equal(self) -> bool:
        """True if the group's std makes the advantages of equal rewards 0."""
        return self.advantage_std == "group"

    @model_validator(mode="after")
    def _has_a_logarithm(self) -> Self:
        if self.objective == "gmpo" and self.clip_low >= 1:
            raise ValueError(
                f"algorithm.clip_low={self.clip_low:g} with algorithm.objective=gmpo: 1 minus it has no logarithm; set "
                "it below 1"
            )
        return self
