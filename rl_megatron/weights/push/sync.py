"""WeightSyncs into engine servers: deliver a version to all, verify it on all, and only then commit it.

Servers of a model with adapters may hold these beside it: the model is delivered once, each version's adapters in a
folder of peft, in each node's memory or a shared one, that servers load while they sample. A learner rank writes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ReplicasLost, SyncError
from rl_megatron.feature import adapter_layouts
from rl_megatron.files import naming, publish_folder, remove_folder
from rl_megatron.interfaces import WeightSync
from rl_megatron.observability import timeline
from rl_megatron.types import LoadedAdapters, WeightUpdate
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.formats.hf_folder import PREFIX
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.plan import plan_into_copies
from rl_megatron.weights.push.trust import Trust, Verified
from rl_megatron.weights.routes.delivery import Deliver, Delivery, FileDelivery
from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging

logger = logging.getLogger(__name__)

ADAPTERS = "adapter_model.safetensors"


class Committers(Protocol):
    """The engine servers, which all serve the same version or none."""

    def stale(self, name: str) -> bool:
        """Whether it answers but does not serve."""
        ...

    async def commit(self, version: int, *, only: str | None = None) -> None:
        """Serve the loaded weights, on all or on ``only``. Raises SyncError; ReplicasLost if all servers died."""
        ...

    def refuse(self) -> None:
        """Serve nothing until other weights are loaded and committed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """The served version, and what another server with it is compared with."""

    version: int
    checksums: Mapping[str, int]  # the learner's, by tensor
    verified: Verified | None


class ServedWeights(WeightSync):
    """Serves versions that ``delivery`` moved and ``trust`` verified; neither knows the other.

    ``learner`` writes exports. It pushes one version at a time.
    """

    def __init__(self, *, learner: WeightSync, delivery: Delivery, trust: Trust, servers: Committers) -> None:
        self._learner, self._delivery, self._trust, self._servers = learner, delivery, trust, servers
        self._lock = asyncio.Lock()  # the mirror file holds one version
        self._served: ServedVersion | None = None

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Raises SyncError if a server does not hold the learner's weights."""
        started = time.perf_counter()
        async with self._lock:
            self._served = None
            try:
                with timeline.during(timeline.PUSHES, "push", version=version):
                    update, self._served = await self._serve(version)
            except BaseException:
                self._servers.refuse()
                raise
        return replace(update, seconds=time.perf_counter() - started)

    async def _serve(self, version: int) -> tuple[WeightUpdate, ServedVersion]:
        """Deliver, verify and commit; try again if all servers died meanwhile."""
        try:
            async with self._delivery.sending(version) as deliver:
                while True:
                    try:
                        return await self._attempt(version, deliver)
                    except ReplicasLost as error:
                        logger.warning("%s\nit is loaded again as soon as a server is back", error)
        finally:
            await self._trust.end()

    async def _attempt(self, version: int, deliver: Deliver) -> tuple[WeightUpdate, ServedVersion]:
        with timeline.during(timeline.PUSHES, "deliver"):
            delivered = await deliver(private=self._trust.private, meanwhile=partial(self._trust.begin, version))
        update, checksums = delivered.update, delivered.seal.checksums
        started = time.perf_counter()
        with timeline.during(timeline.PUSHES, "verify"):
            verified = await self._trust.verify(version, delivered.reports, checksums)
        update = replace(update, verify_seconds=update.verify_seconds + time.perf_counter() - started)
        with timeline.during(timeline.PUSHES, "commit"):
            await self._servers.commit(version)
        return update, ServedVersion(version=version, checksums=checksums, verified=verified)

    async def refit(self, name: str) -> None:
        """Have a stale server serve the version that the others serve or last served. Raises SyncError if it is wrong.

        Besides its checksums, its scores must equal those of a server that was compared with the learner, which may
        have trained on. Does nothing if no version is served, or a push came first.
        """
        async with self._lock:
            if not self._servers.stale(name) or (served := await self._filled(name)) is None:
                return
            reports = await self._delivery.load(served.version, name)
            await self._trust.verify_one(served.version, name, reports, served.checksums, served.verified)
            await self._servers.commit(served.version, only=name)

    async def _filled(self, name: str) -> ServedVersion | None:
        """The served version, once the mirror file has it, with checksums of all of the file's tensors."""
        served = self._served
        if served is None:
            return None
        checksums = (await self._delivery.filled(served.version)).checksums
        if any(checksums.get(tensor) != before for tensor, before in served.checksums.items()):
            logger.info("%s waits for the next push: the learner no longer has version %d", name, served.version)
            return None
        return replace(served, checksums=checksums)

    @override
    async def export(self, folder: Path) -> None:
        """Raises CorruptionError if the mirror file does not hold the learner's weights."""
        async with self._lock:  # a server that comes back has the file filled too
            if self._served is not None:
                await self._delivery.filled(self._served.version)
                await self._trust.verify_file(self._served.version)
            await self._learner.export(folder)


def adapters_folder(mirror: Path, name: str) -> Path:
    """The folder of the adapters of that name, on each node that has a mirror file at ``mirror``."""
    return mirror.parent / "adapters" / name


@runtime_checkable
class AdapterRanks(Protocol):
    """The learner's ranks, which write folders of adapters; their other calls are about the model beside these."""

    async def write_adapters(self, adapters: LoadedAdapters, keep: Collection[LoadedAdapters]) -> WeightUpdate:
        """Write `adapters_folder` on each node, and remove those of others than ``keep``. Raises as a push."""
        ...

    async def merge(self, *, adapters: bool) -> None:
        """Set whether the model that is pushed has the adapters merged into it, from now on."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the model that was pushed last as a Hugging Face folder."""
        ...


class AdapterServers(Protocol):
    """The engine servers. ``only`` names a restarted one."""

    @property
    def held(self) -> Sequence[LoadedAdapters]:
        """What every serving server holds, older first."""
        ...

    def name(self, version: int) -> LoadedAdapters:
        """A name that nothing had before."""
        ...

    def serving(self) -> Sequence[str]:
        """The servers that hold the model."""
        ...

    def stale(self, name: str) -> bool:
        """Whether it answers but does not serve."""
        ...

    async def make_room(self) -> None:
        """Begin a push: forget the oldest adapters, so that a server has a place for one more."""
        ...

    async def load(self, adapters: LoadedAdapters, folder: Path, *, only: str | None = None) -> None:
        """Have all load adapters while they sample, which the next probes name.

        Raises SyncError; ReplicasLost if all died.
        """
        ...

    async def label(self, version: int, *, only: str | None = None) -> None:
        """Label the model that was loaded."""
        ...

    def serve(self, adapters: LoadedAdapters, folder: Path, *, only: str | None = None) -> None:
        """Sample what begins from now on with these adapters, which are loaded."""
        ...

    async def wait(self) -> None:
        """Wait until a server serves again."""
        ...

    def refuse(self) -> None:
        """Have requests fail that wait for the first version."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pushed:
    """The model that was delivered: its label, and the learner's checksums by tensor."""

    version: int
    checksums: Mapping[str, int]


class AdapterWeights(WeightSync):
    """Serves versions of adapters. A request ends on the version that it began with, and none is paused.

    ``delivery`` moves the model before the first, ``file`` fills the mirror file at its path; ``trust`` probes every
    version, by the adapters that servers loaded last, and so the model with the first.
    """

    def __init__(
        self,
        *,
        learner: AdapterRanks,
        delivery: Delivery,
        file: FileDelivery,
        trust: Trust,
        servers: AdapterServers,
        section: str,
        nodes: int = 1,
    ) -> None:
        """``section``: of the keys that say whose matrices have adapters. ``nodes``: of a server, each of which reads
        the folder."""
        self._learner, self._delivery, self._file = learner, delivery, file
        self._trust, self._servers, self._section, self._nodes = trust, servers, section, nodes
        self._lock = asyncio.Lock()
        self._model: _Pushed | None = None
        self._verified: dict[LoadedAdapters, Verified | None] = {}

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Raises SyncError if a server does not compute what the learner does."""
        started, adapters = time.perf_counter(), self._servers.name(version)
        try:
            with timeline.during(timeline.PUSHES, "push", version=version):
                async with self._lock:
                    with timeline.during(timeline.PUSHES, "write"):
                        written = await self._learner.write_adapters(adapters, self._servers.held)
                update = await self._served(adapters, written)
        except BaseException:
            self._servers.refuse()
            raise
        finally:
            await self._trust.end()
        return replace(update, seconds=time.perf_counter() - started)

    async def _served(self, adapters: LoadedAdapters, written: WeightUpdate) -> WeightUpdate:
        """Deliver and serve; again once a restarted server serves the version before, if all servers died."""
        while True:
            try:
                async with self._lock:
                    return await self._attempt(adapters, written)
            except ReplicasLost as error:
                logger.warning("%s\nit is loaded again as soon as a server is back", error)
            if self._model is not None:
                await self._servers.wait()

    async def _attempt(self, adapters: LoadedAdapters, written: WeightUpdate) -> WeightUpdate:
        model, num_bytes, version = self._model, written.num_bytes, adapters.version
        reports: Mapping[str, Sequence[Report]] = {}
        with timeline.during(timeline.PUSHES, "deliver"):
            await self._servers.make_room()
            if model is None:
                async with self._delivery.sending(version) as deliver:
                    delivered = await deliver(private=self._trust.private, meanwhile=lambda: None)
                reports = delivered.reports
                model = _Pushed(version=version, checksums=delivered.seal.checksums)
                num_bytes += delivered.update.num_bytes
            self._trust.begin(version)
            folder = adapters_folder(self._file.path, adapters.name)
            await self._load(adapters, folder)
        serving, size = self._servers.serving(), (folder / ADAPTERS).stat().st_size
        started = time.perf_counter()
        with timeline.during(timeline.PUSHES, "verify"):
            checksums = model.checksums if self._model is None else {}
            verified = await self._trust.verify(version, reports or dict.fromkeys(serving, ()), checksums)
        seconds = written.verify_seconds + time.perf_counter() - started
        with timeline.during(timeline.PUSHES, "commit"):
            if self._model is None:
                await self._servers.label(model.version)
            self._servers.serve(adapters, folder)
        self._model = model  # from here on restarted servers get it
        self._verified = {one: self._verified.get(one, verified) for one in self._servers.held}
        num_bytes += len(serving) * self._nodes * size
        return replace(written, num_bytes=num_bytes, verify_seconds=seconds)

    async def _load(self, adapters: LoadedAdapters, folder: Path) -> None:
        try:
            await self._servers.load(adapters, folder)
        except ReplicasLost:
            raise
        except SyncError as error:
            raise SyncError(
                f"{error}\n  if the engine has no kernels for these adapters, set weights.push=merged, or leave out of "
                f"{self._section}.targets what it cannot compute"
            ) from error

    async def refit(self, name: str) -> None:
        """Have a stale server load the model and all versions that the others hold, and serve the newest.

        Every version must have the scores of a server that was compared with the learner, the model its checksums too.
        Raises SyncError. Does nothing if no version is served, or the server serves already.
        """
        async with self._lock:
            model, held = self._model, self._servers.held
            if model is None or not self._servers.stale(name):
                return
            checksums = (await self._delivery.filled(model.version)).checksums
            wrong = [tensor for tensor, before in model.checksums.items() if checksums.get(tensor) != before]
            if wrong:
                raise SyncError(f"the learner's frozen weights have changed since they were pushed: {min(wrong)}")
            reports = await self._delivery.load(model.version, name)
            for one in held:
                folder = adapters_folder(self._file.path, one.name)
                await self._servers.load(one, folder, only=name)
                verify = partial(self._trust.verify_one, one.version, name)
                if one == held[0]:
                    await verify(reports, checksums, self._verified[one])
                else:
                    await verify((), {}, self._verified[one])
            await self._servers.label(model.version, only=name)
            self._servers.serve(one, folder, only=name)

    @override
    async def export(self, folder: Path) -> None:
        """Write the model with the adapters merged. Raises CorruptionError if the file on the way is not that."""
        async with self._lock:
            await self._learner.merge(adapters=True)
            try:
                if self._model is not None:
                    newest = self._servers.held[-1].version
                    await self._file.fill(newest)
                    await self._trust.verify_file(newest)
                await self._learner.export(folder)
            finally:
                await self._learner.merge(adapters=False)
            if self._model is not None:
                await self._file.fill(self._model.version)  # for servers that are restarted


class AdapterFolders:
    """Writes ``tensors``, by peft's names without its prefix, for servers that find their model at ``mirror``.

    They are in host memory, whatever the learner runs on.
    """

    def __init__(
        self, mirror: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, config: Mapping[str, object]
    ) -> None:
        self._mirror, self._config = mirror, json.dumps(config, indent=2) + "\n"
        self.tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self.name = ""
        """Of the next folder."""

    def withdraw(self) -> None:
        """Does nothing: a folder that is there stays as it is."""

    def serve(self, version: int) -> None:
        """Write the folder of ``name``, whole or not at all."""
        final = adapters_folder(self._mirror, self.name)
        work = final.with_name(f".{final.name}.partial")
        for left in (work, final):  # of a push that failed
            remove_folder(left)
        work.parent.mkdir(exist_ok=True)
        work.mkdir()
        with naming(final):
            save_file({PREFIX + name: tensor for name, tensor in self.tensors.items()}, work / ADAPTERS)
        (work / "adapter_config.json").write_text(self._config)
        publish_folder(work, final)

    def keep(self, names: Collection[str]) -> None:
        """Remove all other folders."""
        beside = adapters_folder(self._mirror, "any").parent
        for folder in beside.iterdir() if beside.is_dir() else ():
            if folder.name not in names:
                remove_folder(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEnds:
    """A rank's ends of the moves of adapters; ``folders`` on the ranks that write them."""

    staging: Staging
    folders: AdapterFolders | None


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
) -> AdapterEnds:
    """The ends of this ``rank`` of the ``learner``, whose adapters are ``tensors``. Collective.

    One of ``writers`` writes the folder beside each file at ``mirror``. ``model`` is the folder of the model.
    """
    layouts = adapter_layouts(config.learner)
    assert layouts is not None
    src, dst = layouts.on_ranks(learner), layouts.in_files(learner, hf)
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
    return AdapterEnds(staging=Staging(transport, folders), folders=folders)
