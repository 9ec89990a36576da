"""Assigns nodes to the roles of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_megatron.config.beside import nodes_of_role, separate
from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import LEARNER


def beside(config: RunConfig) -> dict[str, int]:
    """The number of nodes of each role that has nodes of its own besides the learner's, in the order of the job."""
    slurm, counts = config.slurm, {role: nodes_of_role(config, role) for role in separate(config)}
    counts |= {"services": slurm.services.nodes} if slurm.services.nodes else {}
    return counts | ({"engines": slurm.engines.nodes} if slurm.engines.nodes else {})


def cut(nodes: Sequence[str], others: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The nodes of each role, cut from a list of like nodes: first the learner's, which are all that others leave."""
    first = max(1, len(nodes) - sum(others.values()))
    found = {LEARNER: tuple(nodes[:first])}
    for role, count in others.items():
        found[role] = tuple(nodes[first : first + count])
        first += count
    return found


def made_up_nodes(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Invented names for the nodes of a job that does not exist yet, by role."""
    others = beside(config)
    return cut([f"node {i}" for i in range(config.slurm.nodes + sum(others.values()))], others)


def service_nodes(config: RunConfig, nodes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The node of each replica of each service, by its name: the services' nodes in turn, else the first."""
    own = nodes.get("services") or nodes[LEARNER][:1]
    numbers = iter(range(sum(one.replicas for one in config.services.values())))
    return {name: [own[next(numbers) % len(own)] for _ in range(one.replicas)] for name, one in config.services.items()}
