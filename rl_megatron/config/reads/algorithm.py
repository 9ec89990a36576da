"""Finds set keys of the ``algorithm`` section that no choice of the configuration reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

from rl_megatron.config.reads.choices import OF_OBJECTIVES, OFF, ON, OWN, PREFERENCE_READS, READS
from rl_megatron.config.reads.leaves import as_given, does_nothing, is_in, set_leaves
from rl_megatron.config.sections.data import rewards_of

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.algorithm import AlgorithmSection


def unread_of_algorithm(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys and sections of ``algorithm`` that nothing reads, and why; the first reason of a key is the one to give."""
    yield from _unread_by_preference(config.algorithm)
    yield from _unread_by_choices(config.algorithm)
    yield from _without_effect(config)


def problems_of_own_objective(row: AlgorithmSection, read: Collection[str]) -> list[str]:
    """A line for each set key that ``objective=package.module:name`` could have read, but is not among ``read``."""
    leaves, reason = dict(set_leaves("algorithm", row)), f"algorithm.objective={row.objective} does not read it"
    unread = [f"algorithm.{key}" for key in OF_OBJECTIVES if key not in read]
    return [does_nothing(name, leaves[name], reason) for name in unread if name in leaves]


def _unread_by_preference(a: AlgorithmSection) -> Iterator[tuple[str, str]]:
    if not a.pairs:
        return
    for name, _ in set_leaves("algorithm", a):
        if not any(is_in(name, f"algorithm.{key}") for key in PREFERENCE_READS):
            yield name, f"algorithm.preference.beta={a.preference.beta} trains on pairs without it"


def _unread_by_choices(a: AlgorithmSection) -> Iterator[tuple[str, str]]:
    for choice, reads in READS.items():
        value = attrgetter(choice)(a)
        chosen = str(value) if value in reads else OWN if OWN in reads else (ON if value else OFF)
        for key in {key for keys in reads.values() for key in keys} - set(reads[chosen]):
            readers = _named(choice, [name for name, keys in reads.items() if key in keys], value)
            yield f"algorithm.{key}", f"algorithm.{choice}={as_given(value)} does not read it, {readers} does"


def _named(choice: str, values: list[str], instead_of: object) -> str:
    """``algorithm.objective=cispo or topr``."""
    if values == [ON]:
        return f"algorithm.{choice}=true" if instead_of is False else f"algorithm.{choice} above 0"
    return f"algorithm.{choice}={' or '.join(values)}"


def _without_effect(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys of the algorithm that several choices together make useless, and why."""
    a, train = config.algorithm, config.train
    if train.epochs * train.minibatches == 1 and a.old_logprobs == "learner":
        reason = "with train.epochs=1 and train.minibatches=1 the only optimizer step begins at the old policy"
        yield "algorithm.old_kl_limit", reason
        if a.tokens.choose == "kl_cov":
            yield "algorithm.tokens", f"{reason}, where abs has no gradient (raise train.minibatches)"
    if not a.pairs:
        yield "algorithm.preference", "without algorithm.preference.beta no pairs are trained on"
    if not a.needs_reference:
        reason = "without algorithm.kl.coefficient or preference.beta no reference is loaded"
        if a.pairs:
            reason = "with algorithm.preference.reference_free=true no reference is loaded"
        of_reference = ("reference", "follow_rate", "follow_every", "reset_moments")
        yield from ((f"algorithm.kl.{key}", reason) for key in of_reference)
    if a.advantage_mean == a.advantage_std == "none":
        for key in ("turn_baseline", "turn_compared"):
            yield f"algorithm.{key}", "without a mean and a std of advantages turns are not compared"
    if a.gamma_turn == 0:
        yield "algorithm.turn_compared", "with algorithm.gamma_turn=0 the return from a turn on is its own reward"
    rewards = rewards_of(config.data, config.reward, config.environment).values()
    parts = {frozenset(name for name, part in one.parts.items() if part.weight) for one in rewards}
    apart = a.advantage_mean == "batch" and len(parts) > 1  # the mean of a part is over those of its sources alone
    if a.advantage_std == "none" and ":" not in a.advantage_mean and not apart:
        yield (
            "algorithm.advantage_of",
            "with advantage_std=none the sum of parts less their means is the sum less its mean (advantage_std=group "
            "tells parts apart)",
        )
    if a.lam_length_factor is not None and a.critic.lam is not None:
        yield "algorithm.lam", "algorithm.lam_length_factor and algorithm.critic.lam replace it for policy and critic"
    alone = a.pairs or (a.credit != "gae" and not (a.kl.coefficient > 0 and a.kl.placement != "loss"))
    levelled = a.credit == "optimal" and a.gamma == 1  # by a mean over each place of a group
    divided = a.advantage_std != "none" or a.whiten
    centred = levelled or a.advantage_mean in {"group", "batch"}
    if a.normalise_rewards != "none" or (alone and (a.pairs or divided)):
        yield "algorithm.reward_scale", "a later comparison of rewards, or division by their std or range, undoes it"
    of_group = a.advantage_mean == "group" and a.advantage_std == "group"
    if alone and (a.pairs or of_group or (a.normalise_rewards == "batch" and divided and centred)):
        yield "algorithm.normalise_rewards", "a later comparison of rewards, or centring and division, undoes it"
