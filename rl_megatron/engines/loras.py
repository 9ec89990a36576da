"""Has replicas hold versions of adapters beside their model, of which each request names one. Nothing is paused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rl_megatron.engines.adapter import Adapter
from rl_megatron.engines.requests import Attempts
from rl_megatron.engines.weights import ReplicaWeights
from rl_megatron.types import Completion, GenerationRequest, LoadedAdapters


class Loras:
    """Every replica that serves holds the same versions, ``count`` at most; what begins is sampled with the newest.

    A request ends on the version that it began with; what goes on from tokens, on that of the last, if it is held.
    """

    def __init__(self, adapter: Adapter, weights: ReplicaWeights, attempts: Attempts, *, run: str, count: int) -> None:
        """``run`` is the first part of all names."""
        self._adapter, self._weights, self._attempts = adapter, weights, attempts
        self._run, self._count = run, count
        self._names = Counter[int]()  # by version
        self._folders: dict[LoadedAdapters, Path] = {}  # of what is loaded and served, older first
        self._loaded: LoadedAdapters | None = None  # last, on some server; probes name it
        attempts.adapters_of = self._of

    @property
    def held(self) -> tuple[LoadedAdapters, ...]:
        """What every serving replica holds, older first."""
        return tuple(self._folders)

    def name(self, version: int) -> LoadedAdapters:
        """A name that nothing had before: engines keep prefixes by it. A warm start pushes one version often."""
        again, self._names[version] = self._names[version], self._names[version] + 1
        return LoadedAdapters(f"{self._run}-v{version}" + (f".{again}" if again else ""), version)

    def _of(self, begun: Completion | None) -> LoadedAdapters:
        newest_first = self.held[::-1]
        if begun is not None:
            return next((one for one in newest_first if one.version == begun.spans[-1].version), newest_first[0])
        return newest_first[0]

    def stale(self, name: str) -> bool:
        """Whether the server at that URL answers but does not serve."""
        return self._weights.stale(name)

    def serving(self) -> list[str]:
        """URLs of the servers that hold the model."""
        return [server.url for server in self._weights.loaded(None).values()]

    async def wait(self) -> None:
        """Wait until a server serves again. Raises EngineError if none will."""
        await self._weights.served_somewhere()

    async def make_room(self) -> None:
        """Begin a push: have servers forget the oldest, so that one more can be loaded; but none that a running request
        names."""
        self._weights.paused_seconds = 0.0
        for one in self.held[: max(0, len(self._folders) + 1 - self._count)]:
            if self._attempts.sampling_with(one):
                return
            del self._folders[one]
            await self._unload(one)

    async def _unload(self, adapters: LoadedAdapters) -> None:
        await self._weights.on_each(
            self._weights.loaded(None),
            f"unloading {adapters.name}",
            lambda r: self._adapter.unload_adapters(r.server, adapters),
        )

    async def load(self, adapters: LoadedAdapters, folder: Path, *, only: str | None = None) -> None:
        """Have every server that holds the model, or ``only`` one, load adapters beside it.

        Raises SyncError; ReplicasLost if all died.
        """
        await self._weights.on_each(
            self._weights.loaded(only),
            f"loading {adapters.name}",
            lambda r: self._adapter.load_adapters(r.server, adapters, folder),
        )
        self._loaded = adapters

    async def sample_everywhere(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> Mapping[str, list[list[Completion]]]:
        """As the weights', with the adapters that were loaded last."""
        asked = [replace(request, adapters=self._loaded) for request in requests]
        return await self._weights.sample_everywhere(asked, only=only)

    async def score_everywhere(
        self, texts: Sequence[Sequence[int]], *, only: str | None = None
    ) -> Mapping[str, list[list[float]]]:
        """As the weights', with the adapters that were loaded last."""
        return await self._weights.score_everywhere(texts, only=only, adapters=self._loaded)

    async def label(self, version: int, *, only: str | None = None) -> None:
        """Have servers label their model as ``version``, without serving it."""
        await self._weights.label(version, only=only)

    def serve(self, adapters: LoadedAdapters, folder: Path, *, only: str | None = None) -> None:
        """Sample what begins from now on with adapters that are loaded; with ``only``, also on that server."""
        self._folders[adapters] = folder
        self._weights.serve(adapters.version, only=only)

    def refuse(self) -> None:
        """Serve nothing if nothing was served before; requests that wait fail."""
        self._weights.refuse()
