"""Rules between ``eval.sets`` and the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def problems_of_evaluating(c: RunConfig) -> Iterator[str]:
    """A line for each reason why nothing goes on beside evaluations."""
    if c.eval.mode != "blocking":
        yield from _beside(c)
    elif c.eval.at_once is not None:
        yield f"eval.at_once={c.eval.at_once} is for eval.mode=beside, but this is blocking; set that, or leave it out"


def _beside(c: RunConfig) -> Iterator[str]:
    given = f"eval.mode={c.eval.mode}"
    if not c.rollout.served:
        yield (
            f"{given}: rollout.engine={c.rollout.engine} samples in the learner's processes, which train meanwhile; "
            "set rollout.server.replicas, or rollout=vllm or sglang, or eval.mode=blocking"
        )
    elif c.rollout.server.colocated:
        yield (
            f"{given} with rollout.server.colocated=true: servers leave their GPUs while the learner trains; set "
            "eval.mode=blocking"
        )
    for key, one in c.environments.items() if c.eval.at_once is not None else ():
        yield (
            f"eval.at_once={c.eval.at_once} with {key}.function={one.function}: a turn that waits for "
            "its place would use up its trajectory's environment.seconds; leave it out"
        )
    own = any(one.every for one in c.eval.sets.values())
    if not c.eval.every and not own:
        yield f"{given} with eval.every=0: nothing is evaluated between the first and the last step; set eval.every"
