"""Where the services of a run are, and its reward models on ranks: filled in as they start, asked by rewards and
environments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rl_megatron.config.sections.reward import RankedModelSection
from rl_megatron.config.sections.services import SERVICE, ServiceSection
from rl_megatron.errors import ServiceError

_LOOK_SECONDS = 0.1


class TextScores(Protocol):
    """A reward model's scores of texts."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text."""

    async def __call__(self, texts: Sequence[Sequence[int]], /) -> Sequence[float]:
        """Of each text, given its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddress:
    """One replica that serves, or a server of the user's."""

    url: str  # http://host:port
    key: str  # requests carry it as Authorization: Bearer; empty: they carry none

    @property
    def headers(self) -> Mapping[str, str]:
        """What every request to it carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class Services:
    """The services of one run by their names. Replicas take turns."""

    def __init__(
        self,
        sections: Mapping[str, ServiceSection] | None = None,
        reward_models: Mapping[str, RankedModelSection] | None = None,
    ) -> None:
        # None: it is being restarted. Without an entry it has not been started, or was given up.
        self._replicas: dict[str, dict[int, ServiceAddress | None]] = {name: {} for name in sections or {}}
        self._turns = dict.fromkeys(self._replicas, 0)
        self._scores: dict[str, TextScores] = {}
        self.reward_models: Mapping[str, Path] = {name: one.path for name, one in (reward_models or {}).items()}
        """The folders of the reward models that ranks will hold, by their names."""

    @property
    def names(self) -> Iterable[str]:
        """All of them, also those that do not serve now."""
        return self._replicas

    def address(self, name: str) -> ServiceAddress:
        """The replica whose turn it is. Raises ServiceError if none serves now, or none has that name."""
        if name not in self._replicas:
            known = ", ".join(self._replicas) or "none"
            raise ServiceError(f"no service is called {name!r:.80}; services has {known}")
        replicas = list(self._replicas[name].values())
        serving = [one for one in replicas if one is not None]
        if not serving:
            why = (
                "it is being restarted; wait for it with `await services.serving(name)`"
                if replicas
                else "it was given up, or not started: rl-megatron train and eval start services, other commands do not"
            )
            raise ServiceError(f"service {name}: no replica of it serves now; {why}")
        self._turns[name] += 1
        return serving[self._turns[name] % len(serving)]

    async def serving(self, name: str) -> ServiceAddress:
        """As `address`, but it waits while none serves and the launcher restarts one: at most ``start_seconds`` for
        each restart that is left. Event loops of several threads may wait."""
        while (replicas := list(self._replicas.get(name, {}).values())) and not any(replicas):
            await asyncio.sleep(_LOOK_SECONDS)
        return self.address(name)

    async def located(self, url: str) -> ServiceAddress:
        """``url`` itself, or for ``service:<name>/<path>`` that path of the replica whose turn it is, as `serving`."""
        if not url.startswith(SERVICE):
            return ServiceAddress(url=url, key="")
        name, slash, path = url.removeprefix(SERVICE).partition("/")
        address = await self.serving(name)
        return replace(address, url=f"{address.url}{slash}{path}")

    def serves(self, name: str, replica: int, address: ServiceAddress) -> None:
        """A replica has started."""
        self._replicas[name][replica] = address

    def stopped(self, name: str, replica: int) -> None:
        """A replica has ended, and will be restarted unless it is given up."""
        self._replicas[name][replica] = None

    def given_up(self, name: str, replica: int) -> None:
        """A replica that has ended is not restarted."""
        del self._replicas[name][replica]

    def scores(self, name: str) -> TextScores:
        """How to ask the reward model on ranks of that name. Raises ServiceError if they have not loaded it."""
        if name not in self._scores:
            raise ServiceError(f"no ranks have loaded the reward model {name!r:.80} yet")
        return self._scores[name]

    def holds(self, name: str, scores: TextScores) -> None:
        """Ranks have loaded a reward model."""
        self._scores[name] = scores
