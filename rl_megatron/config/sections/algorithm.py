"""The ``algorithm`` section: a row of choices (docs/algorithms.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import model_validator

from rl_megatron.config.sections.advantages import AdvantageKeys
from rl_megatron.config.sections.balance import BalanceSection
from rl_megatron.config.sections.correction import CorrectionSection
from rl_megatron.config.sections.critic import CriticSection
from rl_megatron.config.sections.kl import KLSection
from rl_megatron.config.sections.objective import ObjectiveKeys
from rl_megatron.config.sections.preference import PreferenceSection
from rl_megatron.config.sections.tokens import TokensSection
from rl_megatron.section import Finite, NonNegativeFloat, PositiveFloat


class AlgorithmSection(ObjectiveKeys, AdvantageKeys):
    """An algorithm is this row of choices (docs/algorithms.md); conf/algorithm/ has a file for each known one."""

    old_kl_limit: PositiveFloat | None = None
    """Greatest KL of the old policy to the current one (``kl/old_policy`` of a minibatch, in nats) at which a step goes
    on: the minibatch that is found above it and those after it, of all epochs, are not trained on. null: all are."""
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
    balance: BalanceSection = BalanceSection()
    correction: CorrectionSection = CorrectionSection()
    kl: KLSection = KLSection()
    critic: CriticSection = CriticSection()
    reward_scale: PositiveFloat = 1.0
    """Factor on rewards, after ``unfinished_reward`` and the overlong penalty."""
    normalise_rewards: Literal["none", "group", "batch"] = "none"
    """Map the rewards of each group, or of the batch, to 0 .. 1: less their least, over their greatest less that."""
    overlong_buffer: NonNegativeFloat = 0.0
    """Penalise completions that reach into the last this many tokens of the most that is sampled (see ``aggregation``;
    DAPO), fewer than that, or below 1, into the last this share of them; 0 is off."""
    overlong_factor: NonNegativeFloat = 1.0
    """Penalty of a completion of that length; it grows linearly over ``overlong_buffer``, with the length alone: one
    that rollout.max_seconds ended has none if it is short."""
    drop_truncated: bool = False
    """Whether to leave completions truncated at rollout.max_new_tokens or by rollout.max_seconds out of the loss; with
    an environment, trajectories that did not end as done: by its limits, a bad call or a fault, too."""
    unfinished_reward: Finite | None = None
    """Reward of a completion that ``drop_truncated`` would leave out, in place of its own; with credit=gae the
    truncation then counts as an end. null: its own reward, to which credit=gae adds the critic's value of the last
    state."""
    old_logprobs: Literal["learner", "rollout", "interpolated"] = "learner"
    """Who computes the old policy's log-probs: the learner, or the engine while it samples; interpolated: neither, they
    are interpolated between the engine's and the current ones by weight version (decoupled PPO on stale rollouts)."""
    routing_replay: Literal["off", "r2", "r3"] = "off"
    """Which experts the passes of an update use: the router's choice (off), those of the learner's pass over the old
    policy (r2), or those of the engine while it sampled, also in the pass over the old policy (r3);
    docs/algorithms.md."""

    @property
    def pairs(self) -> bool:
        """Whether it trains on pairs of completions, in place of the policy gradient."""
        return self.preference.beta is not None

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages need the values of a model beside the policy."""
        return self.credit == "gae" and self.critic.backbone == "own"

    @property
    def is_own_critic(self) -> bool:
        """Whether the advantages need values of the policy itself."""
        return self.credit == "gae" and self.critic.backbone == "policy"

    @property
    def track_decay(self) -> float | None:
        """The decay of a baseline of each prompt; None without one."""
        return self.baseline_decay if self.advantage_mean == "tracked" else None

    @property
    def compares_states(self) -> bool:
        """Whether turns that began from the same state are compared."""
        return self.credit == "turn" and self.turn_baseline == "state"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the rewards need log-probs of a reference."""
        return self.kl.coefficient > 0 or (self.pairs and not self.preference.reference_free)

    @property
    def taught_by_average(self) -> bool:
        """Whether a teacher is the policy's moving average, the reference, which reads another prompt."""
        return self.kl.follow_rate is not None and any(one.path is None for one in self.kl.teachers.values())

    @property
    def scores_policy(self) -> bool:
        """Whether the policy's log-probs or routes at the start of a step are computed, by a pass over its rows."""
        looks = self.tokens.choose != "all" or self.balance.share is not None or self.credit == "optimal"
        return self.old_logprobs == "learner" or looks or self.routing_replay == "r2"

    @property
    def needs_top(self) -> bool:
        """Whether the loss needs the reference's most probable tokens."""
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
        """Whether only groups with different rewards give a gradient; without a baseline every reward gives one."""
        compares = self.advantage_mean != "none" or self.credit == "optimal" or self.levels_equal
        return compares and not self.taught_by_equal

    @property
    def own_decides(self) -> bool:
        """Whether the user's function of advantages says which groups give a gradient: of a group alone, it has the
        rewards that it has in the step."""
        return ":" in self.advantage_mean and self.normalise_rewards != "batch"

    @property
    def levels_equal(self) -> bool:
        """Whether the group's std makes the advantages of equal rewards 0."""
        return self.advantage_std == "group"

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = [*_credit_problems(self), *_ratio_problems(self), *_kl_problems(self)]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _credit_problems(a: AlgorithmSection) -> list[str]:
    out = []
    if a.credit in {"gae", "optimal"} and (a.advantage_mean != "none" or a.advantage_std != "none"):
        out.append(
            f"algorithm.credit={a.credit} with advantage_mean={a.advantage_mean}, advantage_std={a.advantage_std}: it "
            "has a baseline of its own; set both to none"
        )
    if a.credit == "optimal" and a.correction.acts:
        out.append(
            "algorithm.credit=optimal with algorithm.correction: the baseline is the best without its weights; leave "
            "the correction out"
        )
    if a.advantage_std == "advantages" and a.advantage_mean != "group":
        out.append(
            f"algorithm.advantage_std=advantages with advantage_mean={a.advantage_mean}: one baseline for the batch "
            "leaves the std of its rewards as it is; set advantage_std=batch, or advantage_mean=group"
        )
    if a.credit == "turn":
        out += _turn_problems(a)
    if a.advantage_of == "parts":
        out += _parts_problems(a)
    if a.best_of > 1:
        out += _best_problems(a)
    if a.whiten and a.whiten_of == "completions" and a.credit != "completion":
        out.append(
            f"algorithm.whiten_of=completions with credit={a.credit}: a completion has no one advantage there; set "
            "whiten_of=tokens, or credit=completion"
        )
    if a.advantage_mean == "greedy" and a.advantage_std != "none":
        out.append(
            f"algorithm.advantage_mean=greedy with advantage_std={a.advantage_std}: the difference from the greedy "
            "completion is not divided; set advantage_std=none"
        )
    if a.advantage_mean == "tracked":
        out += [
            f"algorithm.advantage_mean=tracked with algorithm.{key}: the baseline is of rewards as they are given, and "
            "would be subtracted from rewards of another range; leave it out, or set another advantage_mean"
            for key, acts in {**_mapped(a), f"reward_scale={a.reward_scale:g}": a.reward_scale != 1}.items()
            if acts
        ]
    if a.pairs and a.old_logprobs == "interpolated":
        out.append(
            "algorithm.old_logprobs=interpolated with preference.beta: pairs have no ratio to an old policy; set "
            "old_logprobs=rollout"
        )
    if a.pairs and a.kl.coefficient > 0:
        out.append(
            f"algorithm.kl.coefficient={a.kl.coefficient:g} with preference.beta={a.preference.beta}: the loss of "
            "pairs holds its own pull to a reference, or has none; set algorithm.kl.coefficient=0"
        )
    return out


def _turn_problems(a: AlgorithmSection) -> list[str]:
    """What shapes or compares rewards of whole completions, beside credit=turn."""
    out, given = [], "algorithm.credit=turn"
    if a.advantage_mean in {"greedy", "moving", "tracked"}:
        out.append(
            f"{given} with algorithm.advantage_mean={a.advantage_mean}: that baseline is the reward of a whole "
            "completion, and turns' rewards are compared here; set advantage_mean=group, batch or none"
        )
    alike = {"index": "turns of one number", "state": "turns that began from one state"}.get(a.turn_baseline)
    if alike and {"batch", "advantages"} & {a.advantage_mean, a.advantage_std}:
        out.append(
            f"algorithm.turn_baseline={a.turn_baseline} with advantage_mean={a.advantage_mean}, advantage_std="
            f"{a.advantage_std}: {alike} are compared within their group; set these to group or none, or "
            "turn_baseline=all"
        )
    if a.turn_baseline == "state" and a.turn_compared == "rewards" and a.gamma_turn:
        out.append(
            f"algorithm.turn_baseline=state with turn_compared=rewards, gamma_turn={a.gamma_turn:g}: a reward after "
            "which no other turn began from the same state would be lost to the turns before it; set "
            "turn_compared=returns, or gamma_turn=0"
        )
    out += [
        f"{given} with algorithm.{key}: it changes the sum of a completion's rewards, and its last turn would have the "
        "whole change; leave it out, or set credit=completion"
        for key, acts in _mapped(a).items()
        if acts
    ]
    if a.kl.coefficient > 0 and a.kl.placement != "loss":
        out.append(
            f"{given} with algorithm.kl.placement={a.kl.placement}: the KL of all turns would be in the reward of the "
            "last; set kl.placement=loss"
        )
    return out


def _parts_problems(a: AlgorithmSection) -> Iterator[str]:
    """What is of the sum of a completion's rewards, beside advantage_of=parts."""
    given = "algorithm.advantage_of=parts"
    if a.advantage_mean in {"greedy", "moving", "tracked"}:
        yield (
            f"{given} with algorithm.advantage_mean={a.advantage_mean}: that baseline is of the sum, and parts are "
            "compared with their own; set advantage_mean=group, batch or none"
        )
    if a.credit in {"turn", "gae"}:
        yield (
            f"{given} with algorithm.credit={a.credit}: parts are compared with those of whole completions, which "
            "leaves nothing for turns or a critic to be; set credit=completion or discounted, or advantage_of=sum"
        )
    changes = {
        **_mapped(a),
        f"reward_scale={a.reward_scale:g}": a.reward_scale != 1,
        f"unfinished_reward={a.unfinished_reward}": a.unfinished_reward is not None,
        f"overlong_buffer={a.overlong_buffer:g}": a.overlong_buffer > 0,
    }
    for key in (key for key, acts in changes.items() if acts):
        yield f"{given} with algorithm.{key}: it changes the sum; leave it out, and make it a part or a weight"
    if a.kl.coefficient > 0 and a.kl.placement == "completion_reward":
        yield f"{given} with algorithm.kl.placement=completion_reward: the KL is no part; set kl.placement=loss"


def _best_problems(a: AlgorithmSection) -> Iterator[str]:
    """What is not of whole completions of one group, beside best_of."""
    given = f"algorithm.best_of={a.best_of}"
    if a.credit == "turn":
        yield f"{given} with algorithm.credit=turn: it is a group's completions that are compared; set best_of=1"
    if a.advantage_of == "parts":
        yield f"{given} with algorithm.advantage_of=parts: a part has bests of its own; set best_of=1"
    if a.advantage_std in {"batch", "advantages"}:
        yield (
            f"{given} with algorithm.advantage_std={a.advantage_std}: the std is that of the group's bests; set "
            "advantage_std=group or none"
        )


def _mapped(a: AlgorithmSection) -> dict[str, bool]:
    """Whether each key that maps rewards to another range acts."""
    return {f"normalise_rewards={a.normalise_rewards}": a.normalise_rewards != "none"}


def _ratio_problems(a: AlgorithmSection) -> list[str]:
    """Choices of ratio, objective and aggregation that contradict each other."""
    out = []
    given, through_ratio = f"algorithm.objective={a.objective}", a.objective in {"clip", "importance", "sapo"}
    if through_ratio and a.ratio_level == "sequence_sum":
        out.append(
            f"algorithm.ratio_level=sequence_sum gives a detached weight, but {given} needs a ratio with a gradient; "
            "set ratio_level=sequence"
        )
    sound = {"sequence": ("seq_mean_token_mean", "seq_mean_token_sum"), "turn": ("seq_mean_token_mean",)}  # LUSPO sums
    if through_ratio and a.aggregation not in sound.get(a.ratio_level, (a.aggregation,)):
        out.append(
            f"algorithm.aggregation={a.aggregation} lets the ratio of a long sequence weigh more than that of a short "
            f"one under algorithm.ratio_level={a.ratio_level}; set aggregation=seq_mean_token_mean"
        )
    if a.objective == "gmpo" and a.aggregation != "seq_mean_token_mean":
        out.append(
            f"{given} has one loss a sequence, the same for each of its tokens, and algorithm.aggregation="
            f"{a.aggregation} would weigh it by the sequence's length; set aggregation=seq_mean_token_mean"
        )
    if a.objective == "gmpo" and a.clip_low >= 1:
        out.append(f"algorithm.clip_low={a.clip_low:g} with {given}: 1 minus it has no logarithm; set it below 1")
    if a.balance.share is not None:
        out += _balance_problems(a)
    if a.cap_low > a.cap_high:
        out.append(f"algorithm.cap_low={a.cap_low} is above algorithm.cap_high={a.cap_high}; swap them")
    return out


def _balance_problems(a: AlgorithmSection) -> Iterator[str]:
    """What the share of positive tokens is not known with."""
    given = f"algorithm.balance.share={a.balance.share:g}"
    if a.ratio_level != "token":
        yield f"{given} with algorithm.ratio_level={a.ratio_level}: it is of ratios of tokens; set ratio_level=token"
    if a.old_logprobs == "interpolated":
        yield f"{given} with algorithm.old_logprobs=interpolated: these follow the policy; set learner or rollout"
    if a.correction.acts:
        yield (
            f"{given} with algorithm.correction: the share is of the loss without its weights; leave the correction "
            "out, and set old_logprobs=rollout"
        )
    if a.balance.high < a.clip_high or a.balance.low > a.clip_low:
        yield (
            f"algorithm.balance.low={a.balance.low:g} and high={a.balance.high:g} with clip_low={a.clip_low:g} and "
            f"clip_high={a.clip_high:g}: clip_low falls to the former and clip_high rises to the latter; set low to "
            "clip_low or less and high to clip_high or more"
        )


def _kl_problems(a: AlgorithmSection) -> list[str]:
    out, kl = [], a.kl
    if kl.reset_moments and kl.follow_rate is not None and kl.follow_rate < 1:
        out.append(
            f"algorithm.kl.reset_moments=true with follow_rate={kl.follow_rate:g}: the reference is a moving average, "
            "which no step resets; set follow_rate=1, or leave reset_moments out"
        )
    if kl.coefficient > 0 and kl.placement == "token_reward" and a.credit == "completion":
        out.append(
            "algorithm.kl.placement=token_reward with credit=completion: an advantage of the whole completion has no "
            "place for a token's reward; set kl.placement=completion_reward, or credit=discounted, optimal or gae"
        )
    if kl.coefficient > 0 and kl.placement != "loss" and kl.estimator == "top_k":
        out.append(
            f"algorithm.kl.estimator=top_k with placement={kl.placement}: a divergence over tokens that were not "
            "sampled has a gradient of its own, and is no reward of the one that was; set kl.placement=loss or "
            "estimator=k1"
        )
    if kl.coefficient > 0 and kl.placement == "loss" and kl.estimator in {"k1", "abs"} and not kl.importance_weighted:
        out.append(
            f"algorithm.kl.estimator={kl.estimator} in the loss without weights: its gradient, over tokens that the "
            "policy samples, is not the KL's (of k1 it is 0 on average); set kl.importance_weighted=true, or k2 or k3"
        )
    return out
