"""Chooses the replica for a request: one that has its prefix in the cache, unless another is less busy; and says when
completions that run should move."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.servers.replicas import Replica
from rl_megatron.types import GenerationRequest

_LEAD = 2  # completions that a replica may run beyond the least busy one, at least
_SHARE = 16  # and this part of what that one runs
_MOST_LEAD, _MOST_SHARE = 2, 4  # the same, before completions move
_REMEMBERED = 16384  # prompts and requests


class Places:
    """Remembers where prompts were sent last.

    A request goes where its own tokens are cached (it was interrupted), else where its prompt is (requests of one
    ``group``), unless that replica runs 2 completions, or a 16th, more than the least busy one; else to the least busy.
    With 4 replicas of 128 slots and 16 completions of a prompt, a prompt is so computed by 2.0 replicas, and by 4.0 if
    each goes to the least busy one.
    """

    def __init__(self) -> None:
        self._servers: dict[str, list[Server]] = {}  # that have had a request or group, oldest use first

    def choose(self, request: GenerationRequest, healthy: Sequence[Replica], failed: Replica | None) -> Replica:
        """One of ``healthy``; not ``failed`` if there is another."""
        chosen = least = min(healthy, key=lambda replica: (replica is failed, replica.server.in_flight))
        keys = [request.id, *([request.group] if request.group is not None else [])]
        for key in keys:
            servers = self._servers.get(key, [])
            near = [one for one in healthy if one is not failed and one.server in servers]
            if near:
                nearest = min(near, key=lambda replica: replica.server.in_flight)
                busy = least.server.in_flight
                if nearest.server.in_flight - busy < max(_LEAD, busy // _SHARE):
                    chosen = nearest
                break
        for key in keys:
            servers = self._servers.pop(key, [])
            self._servers[key] = [*(one for one in servers if one is not chosen.server), chosen.server]
        while len(self._servers) > _REMEMBERED:
            del self._servers[next(iter(self._servers))]
        return chosen


def surplus(running: Sequence[int]) -> list[int]:
    """How many of the completions that each server is ``running`` should move to the least busy ones.

    As many as are needed for none to run more than 2, or a quarter, beyond the least busy one. A server's token takes
    longer the more rows it has, because it reads more experts and more of the cache; so uneven servers make long
    completions wait for rows that an idler one would take. To gather what is left on few servers would slow it down
    (`python -m bench.moved`).
    """
    have = list(running)
    moved = [0] * len(have)
    while have and max(have) - (least := min(have)) > max(_MOST_LEAD, least // _MOST_SHARE):
        busiest = have.index(max(have))
        moved[busiest] += 1
        have[busiest] -= 1
        have[have.index(least)] += 1
    return moved
