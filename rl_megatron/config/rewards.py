"""Rules of the ``reward`` section and the algorithm: rewards that are KL alone, or compared by their parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.sections.data import rewards_of
from rl_megatron.config.sections.reward import reward_key

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def problems_of_rewards(c: RunConfig) -> Iterator[str]:
    """A line for each reward that is none, or has no parts where these are compared."""
    if not (c.algorithm.needs_top or (c.algorithm.kl.coefficient > 0 and c.algorithm.kl.placement != "loss")):
        yield from _of_no_reward(c)
    if c.kind.samples and c.algorithm.advantage_of == "parts":
        yield from _of_parts(c)


def _of_no_reward(c: RunConfig) -> Iterator[str]:
    keys = {"reward": c.reward} | {reward_key(name): one for name, one in c.source_rewards.items()}
    for key, section in keys.items():
        if section.only_records:
            yield (
                f"{key}.parts: the weights of {', '.join(section.parts)} are all 0, and no KL is part of the reward; "
                "give one a weight, or set algorithm.kl (algorithm=distill and gkd do)"
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
