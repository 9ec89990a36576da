"""Shares a node's CPUs among its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise


def shares_of_cores(cpus: Mapping[int, tuple[int, int]], ranks: int) -> list[list[int]]:
    """Each rank's CPUs, given each CPU's package and core. Nothing for every rank if there are fewer cores than ranks.

    Shares are equal to one core. They are neighbours in the order of packages, as GPUs are in the order of ranks, and
    both threads of a core belong to one rank.
    """
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu, where in cpus.items():
        cores.setdefault(where, []).append(cpu)
    ordered = [sorted(cores[where]) for where in sorted(cores)]
    if len(ordered) < ranks:
        return [[] for _ in range(ranks)]
    cuts = [len(ordered) * i // ranks for i in range(ranks + 1)]
    return [[cpu for core in ordered[a:b] for cpu in core] for a, b in pairwise(cuts)]
