"""Rules between ``eval.sets`` and the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def problems_of_evaluating(c: RunConfig) -> Iterator[str]:
    """A line for each step of a set that never comes."""
    for name, one in c.eval.sets.items():
        if late := [step for step in one.at_steps if step > c.train.steps]:
            yield (
                f"eval.sets.{name}.at_steps={late[0]} is after the last step, train.steps={c.train.steps}; leave it "
                "out, or raise train.steps"
            )
