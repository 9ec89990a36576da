"""Pushes of adapters to servers that get their model once, by ``weights.push=adapters``.

Each version's adapters are in a folder of peft, in each node's memory or a shared one, that servers load while they
sample. A learner rank writes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.errors import AllReplicasLost, SyncError
from rl_megatron.features.lora.engines import HeldAdapters
from rl_megatron.features.lora.feature import lora_section, make_adapter_slots
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.files import add_path_to_errors, publish_folder, remove_folder
from rl_megatron.observability import timeline
from rl_megatron.types import Completion, GenerationRequest, NamedVersion, WeightUpdate
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.checks.reports import ChecksumReport
from rl_megatron.weights.formats.hf_folder import PREFIX
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.plan import plan_into_copies
from rl_megatron.weights.push.sync import ServedSync
from rl_megatron.weights.push.trust import Probed, PushVerifier, VerifiedProbe
from rl_megatron.weights.routes.delivery import Delivery, FileDelivery
from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging

logger = logging.getLogger(__name__)

ADAPTERS = "adapter_model.safetensors"


def adapters_folder(mirror: Path, name: str) -> Path:
    """Returns the folder of the adapters of that name, on each node that has a mirror file at ``mirror``."""
    return mirror.parent / "adapters" / name


class AdapterRanks(Protocol):
    """The learner's ranks, which write folders of adapters; their other calls are about the model itself."""

    async def push_extra(self, version: int, *given: object) -> WeightUpdate:
        """Writes the adapters, after `AdapterFolders.announce` is called with ``given``. Raises as a push."""
        ...

    async def merge(self, *, merged: bool) -> None:
        """Sets whether pushes of the model from now on have the adapters merged into it."""
        ...

    async def export(self, folder: Path) -> None:
        """Writes the model that was pushed last as a Hugging Face folder."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pushed:
    """The delivered model: its label, and the learner's checksums by tensor."""

    version: int
    checksums: Mapping[str, int]


class AdapterSync(ServedSync):
    """Serves versions of adapters. A request ends on the version that it began with, and none is paused.

    ``delivery`` moves the model before the first, ``file`` fills the mirror file at its path; ``trust`` probes every
    version, by the adapters that servers loaded last, and so the model with the first.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: ServerEngine,
        learner: AdapterRanks,
        delivery: Delivery,
        file: FileDelivery,
        trust_of: Callable[[Probed], PushVerifier],
        *,
        run: str,
        nodes: int = 1,
    ) -> None:
        """``run`` is the first part of all names. ``nodes``: number of a server's nodes; each reads the folder."""
        places = make_adapter_slots(config)
        assert places is not None
        self.servers, self._weights = AdapterVersions(engine, run=run, count=places.max_versions), engine.weights
        self._learner, self._delivery, self._file = learner, delivery, file
        self._trust, self._nodes = trust_of(self.servers), nodes
        self._lock = asyncio.Lock()
        self._model: _Pushed | None = None
        self._verified: dict[NamedVersion, VerifiedProbe | None] = {}

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Raises SyncError if a server's scores differ from the learner's."""
        started, adapters = time.perf_counter(), self.servers.name(version)
        try:
            with timeline.during(timeline.PUSHES, "push", version=version):
                async with self._lock:
                    with timeline.during(timeline.PUSHES, "write"):
                        keep = tuple(one.name for one in self.servers.held)
                        written = await self._learner.push_extra(version, adapters.name, keep)
                update = await self._served(adapters, written)
        except BaseException:
            self._weights.refuse()
            raise
        finally:
            await self._trust.end()
        return replace(update, seconds=time.perf_counter() - started)

    async def _served(self, adapters: NamedVersion, written: WeightUpdate) -> WeightUpdate:
        """Delivers and serves. If all servers died, repeats it once a restarted server serves the version before."""
        while True:
            try:
                async with self._lock:
                    return await self._attempt(adapters, written)
            except AllReplicasLost as error:
                logger.warning("%s\nit is loaded again as soon as a server is back", error)
            if self._model is not None:
                await self._weights.is_served_anywhere()

    async def _attempt(self, adapters: NamedVersion, written: WeightUpdate) -> WeightUpdate:
        model, num_bytes, version = self._model, written.num_bytes, adapters.version
        reports: Mapping[str, Sequence[ChecksumReport]] = {}
        with timeline.during(timeline.PUSHES, "deliver"):
            await self.servers.make_room()
            if model is None:
                async with self._delivery.sending(version) as deliver:
                    delivered = await deliver(private=self._trust.private, meanwhile=lambda: None)
                reports = delivered.reports
                model = _Pushed(version=version, checksums=delivered.seal.checksums)
                num_bytes += delivered.update.num_bytes
            self._trust.begin(version)
            folder = adapters_folder(self._file.path, adapters.name)
            await self._load(adapters, folder)
        serving, size = (
            [server.url for server in self._weights.loaded(None).values()],
            (folder / ADAPTERS).stat().st_size,
        )
        started = time.perf_counter()
        with timeline.during(timeline.PUSHES, "verify"):
            checksums = model.checksums if self._model is None else {}
            verified = await self._trust.verify(version, reports or dict.fromkeys(serving, ()), checksums)
        seconds = written.verify_seconds + time.perf_counter() - started
        with timeline.during(timeline.PUSHES, "commit"):
            if self._model is None:
                await self._weights.label(model.version)
            self.servers.serve(adapters, folder)
        self._model = model  # restarted servers get it from here on
        self._verified = {one: self._verified.get(one, verified) for one in self.servers.held}
        num_bytes += len(serving) * self._nodes * size
        return replace(written, num_bytes=num_bytes, verify_seconds=seconds)

    async def _load(self, adapters: NamedVersion, folder: Path) -> None:
        try:
            await self.servers.load(adapters, folder)
        except AllReplicasLost:
            raise
        except SyncError as error:
            raise SyncError(
                f"{error}\n  if the engine has no kernels for these adapters, set weights.push=merged, or leave out of "
                "learner.lora.targets what it cannot compute"
            ) from error

    @override
    async def refit(self, name: str) -> None:
        """Makes a stale server load the model and all versions that the others hold, and serve the newest.

        Every version must have the scores of a server that was compared with the learner, the model its checksums too.
        Raises SyncError. Does nothing if no version is served, or the server already serves.
        """
        async with self._lock:
            model, held = self._model, self.servers.held
            if model is None or not self._weights.stale(name):
                return
            checksums = (await self._delivery.filled(model.version)).checksums
            wrong = [tensor for tensor, before in model.checksums.items() if checksums.get(tensor) != before]
            if wrong:
                raise SyncError(f"the learner's frozen weights have changed since they were pushed: {min(wrong)}")
            reports = await self._delivery.load(model.version, name)
            for one in held:
                folder = adapters_folder(self._file.path, one.name)
                await self.servers.load(one, folder, only=name)
                verify = partial(self._trust.verify_one, one.version, name)
                if one == held[0]:
                    await verify(reports, checksums, self._verified[one])
                else:
                    await verify((), {}, self._verified[one])
            await self._weights.label(model.version, only=name)
            self.servers.serve(one, folder, only=name)

    @override
    async def export(self, folder: Path) -> None:
        """Writes the model with the adapters merged. Raises CorruptionError if the file on the way differs from it."""
        async with self._lock:
            await self._learner.merge(merged=True)
            try:
                if self._model is not None:
                    newest = self.servers.held[-1].version
                    await self._file.fill(newest)
                    await self._trust.verify_file(newest)
                await self._learner.export(folder)
            finally:
                await self._learner.merge(merged=False)
            if self._model is not None:
                await self._file.fill(self._model.version)  # restarted servers read it


class AdapterVersions:
    """The versions that every serving replica holds, ``count`` at most. New requests are sampled with the newest.

    A request ends on the version that it began with. A continuation uses its last token's version, if that is held.
    """

    def __init__(self, engine: ServerEngine, *, run: str, count: int) -> None:
        """``run`` is the first part of all names."""
        self._weights, self._attempts, self._run, self._count = engine.weights, engine.attempts, run, count
        (self._hooks,) = (one for one in engine.adapter.hooks if isinstance(one, HeldAdapters))
        self._names = Counter[int]()  # number of names that each version has had
        self._folders: dict[NamedVersion, Path] = {}  # loaded and served adapters, older first
        self._loaded: NamedVersion | None = None  # adapters loaded last, on some server; probes name them
        self._attempts.names = self._of

    @property
    def held(self) -> tuple[NamedVersion, ...]:
        """The adapters that every serving replica holds, older first."""
        return tuple(self._folders)

    def name(self, version: int) -> NamedVersion:
        """Returns a new name: engines keep prefixes by it. A warm start pushes one version often."""
        again, self._names[version] = self._names[version], self._names[version] + 1
        name = f"{self._run}-v{version}" + (f".{again}" if again else "")
        return NamedVersion(name, version, self._hooks.field)

    def _of(self, partial: Completion | None) -> NamedVersion:
        newest_first = self.held[::-1]
        if partial is not None:
            return next((one for one in newest_first if one.version == partial.spans[-1].version), newest_first[0])
        return newest_first[0]

    async def make_room(self) -> None:
        """Begins a push: servers unload the oldest adapters, so that one more can be loaded, but none that a running
        request names."""
        self._weights.paused_seconds = 0.0
        for one in self.held[: max(0, len(self._folders) + 1 - self._count)]:
            if self._attempts.is_sampling_on(one):
                return
            del self._folders[one]
            await self._unload(one)

    async def _unload(self, adapters: NamedVersion) -> None:
        servers, unload = self._weights.loaded(None), self._hooks.unload
        await self._weights.call_each(servers, f"unloading {adapters.name}", lambda r: unload(r.server, adapters))

    async def load(self, adapters: NamedVersion, folder: Path, *, only: str | None = None) -> None:
        """Makes every server that holds the model, or ``only`` one, load adapters as well.

        Raises SyncError; AllReplicasLost if all died.
        """
        await self._weights.call_each(
            self._weights.loaded(only),
            f"loading {adapters.name}",
            lambda r: self._hooks.load(r.server, adapters, folder),
        )
        self._loaded = adapters

    async def sample_on_all(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> Mapping[str, list[list[Completion]]]:
        """Samples as `ReplicaWeights.sample_everywhere`, with the adapters that were loaded last."""
        asked = [replace(request, named=self._loaded) for request in requests]
        return await self._weights.sample_on_all(asked, only=only)

    async def score_on_all(
        self, texts: Sequence[Sequence[int]], *, only: str | None = None
    ) -> Mapping[str, list[list[float]]]:
        """Scores as `ReplicaWeights.score_everywhere`, with the adapters that were loaded last."""
        return await self._weights.score_on_all(texts, only=only, named=self._loaded)

    def serve(self, adapters: NamedVersion, folder: Path, *, only: str | None = None) -> None:
        """Makes new requests use these loaded adapters; with ``only``, also on that server."""
        self._folders[adapters] = folder
        self._weights.serve(adapters.version, only=only)


class AdapterFolders:
    """Writes ``tensors``, by peft's names without its prefix, for servers that find their model at ``mirror``.

    They are in host memory on any learner device.
    """

    def __init__(
        self, mirror: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, config: Mapping[str, object]
    ) -> None:
        self._mirror, self._config = mirror, json.dumps(config, indent=2) + "\n"
        self.tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self._name = ""  # name of the next folder

    def withdraw(self) -> None:
        """Does nothing: an existing folder stays as it is."""

    def serve(self, version: int) -> None:
        """Writes the next folder, whole or not at all."""
        final = adapters_folder(self._mirror, self._name)
        work = final.with_name(f".{final.name}.partial")
        for left in (work, final):  # leftovers of a failed push
            remove_folder(left)
        work.parent.mkdir(exist_ok=True)
        work.mkdir()
        with add_path_to_errors(final):
            save_file({PREFIX + name: tensor for name, tensor in self.tensors.items()}, work / ADAPTERS)
        (work / "adapter_config.json").write_text(self._config)
        publish_folder(work, final)

    def announce(self, name: str, keep: Collection[str]) -> None:
        """Names the next folder, and removes earlier ones except ``keep``."""
        self._name, beside = name, adapters_folder(self._mirror, name).parent
        for folder in beside.iterdir() if beside.is_dir() else ():
            if folder.name not in keep:
                remove_folder(folder)


def adapter_ends(
    config: RunConfig,
    learner: Layout,
    hf: Layout,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    writers: Sequence[Sequence[int]],
    mirror: Path,
    model: Path,
) -> tuple[Staging, Callable[[str, Collection[str]], None]]:
    """Returns the moves of the adapters ``tensors`` of this learner ``rank``, and `announce`. Collective.

    One of ``writers`` writes the folder next to each file at ``mirror``. ``model`` is the folder of the model.
    """
    layouts = LoraLayouts(lora_section(config.learner))
    src, dst = layouts.on_ranks(learner), layouts.file_layout(learner, hf)
    folders = None
    if any(rank in group for group in writers):
        dtype = getattr(torch, config.learner.dtype)
        folders = AdapterFolders(mirror, dst.local_shapes(0), dtype, layouts.described(learner.shape, model))
    transport = ProcessGroupTransport(
        plan_into_copies(src, dst, writers),
        src=dict(tensors),
        dst={} if folders is None else folders.tensors,
        bucket_bytes=config.weights.bucket_mb * 2**20,
    )
    return Staging(transport, folders), (lambda *_: None) if folders is None else folders.announce
