"""Rules of the ``services`` section and others: who asks a service, and where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.sections.services import SERVICE

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


def problems_of_services(c: RunConfig) -> Iterator[str]:
    """A line for each rule that the configuration breaks."""
    rewards = [name for one in (c.reward, *c.own_rewards.values()) for name in one.functions.values()]
    asked = {name.removeprefix(SERVICE).partition("/")[0] for name in rewards if name.startswith(SERVICE)}
    for name in sorted(asked - set(c.services)):
        known = ", ".join(c.services) or "none"
        yield f"reward.function={SERVICE}{name}: services has {known}; give services.{name}.command, or another name"
    nodes, replicas = c.slurm.services.nodes, sum(one.replicas for one in c.services.values())
    if nodes > replicas:
        yield (
            f"slurm.services.nodes={nodes}, but services have {replicas} replicas in all, so some nodes would be idle; "
            "lower it"
        )
    if c.slurm.services.shaped and not c.slurm.heterogeneous:
        yield "slurm.services requests nodes unlike the learner's; set slurm.heterogeneous=true, or only its nodes"
    if not c.services:
        return
    if not c.environments and (unasked := sorted(set(c.services) - asked)):
        yield (
            f"services.{unasked[0]}: nothing asks it; set reward.function={SERVICE}{unasked[0]}/path, or an "
            "environment.function that takes services, or leave it out"
        )
