"""Keys of the ``algorithm`` section: how rewards of completions and turns become advantages of tokens."""

from __future__ import annotations

from typing import Literal

from rl_megatron.section import Fraction, OwnCode, Positive, PositiveFloat, Section


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
    least variance of the gradient (optimal: OTB), or the generalised advantage estimate from a critic's values (PPO).
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
    """Whether to whiten advantages over the whole batch, including completions that the loss leaves out."""
    whiten_of: Literal["tokens", "completions"] = "tokens"
    """whiten: the mean and the standard deviation count each token, or each completion once, whatever its length."""
