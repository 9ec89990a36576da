"""Rules of the ``reward`` section and the algorithm: rewards that are KL alone, or compared by their parts or by the
best of subsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.sections.data import rewards_of
from rl_megatron.config.sections.reward import reward_key

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def problems_of_rewards(c: RunConfig) -> Iterator[str]:
    """A line for each reward that is none, or has no parts where these are compared, and for groups too small."""
    yield from _of_no_reward(c)
    if c.kind.samples and c.algorithm.advantage_of == "parts":
        yield from _of_parts(c)
    a, size = c.algorithm, c.rollout.group_size
    least = a.best_of + (not a.leave_one_out) - (a.demonstration_gamma is not None)
    if c.kind.samples and a.best_of > 1 and size < least:
        yield (
            f"algorithm.best_of={a.best_of} with rollout.group_size={size} and leave_one_out="
            f"{str(a.leave_one_out).lower()}: a group has no two bests to compare, so nothing would be trained; set "
            f"rollout.group_size={least} or more, or lower algorithm.best_of"
        )


def _of_no_reward(c: RunConfig) -> Iterator[str]:
    """Rewards without a weight, where no other model judges either."""
    kl = c.algorithm.kl
    compared = c.algorithm.needs_top or (kl.coefficient > 0 and kl.placement != "loss")
    if compared and kl.has_teacher:
        return
    why, instead = "no KL is part of the reward", "algorithm.kl (algorithm=distill and gkd do)"
    if compared:
        why = "the policy is compared with itself as training begins, so nothing would be trained"
        instead = "algorithm.kl.reference to a teacher's folder, or algorithm.kl.teachers"
    keys = {"reward": c.reward} | {reward_key(name): one for name, one in c.source_rewards.items()}
    for key, section in keys.items():
        if section.only_records:
            yield (
                f"{key}.parts: the weights of {', '.join(section.parts)} are all 0, and {why}; give one a weight, or "
                f"set {instead}"
            )


def _of_parts(c: RunConfig) -> Iterator[str]:
    """Rewards of what is trained on that have no parts, or not always."""
    given = "algorithm.advantage_of=parts"
    for key, one in c.training_environments.items():
        yield f"{given} with {key}.function={one.function}: an environment gives one reward; set advantage_of=sum"
    for key, section in rewards_of(c.data, c.reward, c.environment).items():
        if not section.parts:
            yield (
                f"{given} with {key}.function={section.function}: this reward has no parts to compare; name "
                f"several in {key}.parts, or set advantage_of=sum"
            )
        if isinstance(section.on_error, float):
            yield (
                f"{given} with {key}.on_error={section.on_error:g}: that number is of the sum, and a completion whose "
                f"reward failed has no parts; set {key}.on_error=drop or fail"
            )
