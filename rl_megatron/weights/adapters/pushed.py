"""A WeightSync into servers that hold adapters beside their model, and its writer on the learner's ranks.

The model is delivered once, each version's adapters in a folder of peft, in each node's memory or a shared one, that
servers load while they sample.
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
from rl_megatron.files import naming, publish_folder, remove_folder
from rl_megatron.interfaces import WeightSync
from rl_megatron.observability import timeline
from rl_megatron.types import LoadedAdapters, WeightUpdate
from rl_megatron.weights.adapters.files import PREFIX, peft_config
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.lora import hf_adapters, learner_adapters, ranks_of_parts
from rl_megatron.weights.plans.plan import plan_into_copies
from rl_megatron.weights.push.trust import Trust, Verified
from rl_megatron.weights.routes.delivery import Delivery, FileDelivery
from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging

logger = logging.getLogger(__name__)

ADAPTERS = "adapter_model.safetensors"


def adapters_folder(mirror: Path, name: str) -> Path:
    """Where adapters of that name are, on each node that has a mirror file at ``mirror``."""
    return mirror.parent / "adapters" / name


@runtime_checkable
class AdapterRanks(Protocol):
    """The learner's ranks, which write folders of adapters; their other calls are about the model beside these."""

    async def write_adapters(self, adapters: LoadedAdapters, keep: Collection[LoadedAdapters]) -> WeightUpdate:
        """Write `adapters_folder` on each node, and remove those of others than ``keep``. Raises as a push."""
        ...

    async def merge(self, *, adapters: bool) -> None:
        """Whether the model that is pushed has the adapters merged into it, from now on."""
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
class _Model:
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
        nodes: int = 1,
    ) -> None:
        """``nodes``: of a server, each of which reads the folder."""
        self._learner, self._delivery, self._file = learner, delivery, file
        self._trust, self._servers, self._nodes = trust, servers, nodes
        self._lock = asyncio.Lock()
        self._model: _Model | None = None
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
                model = _Model(version=version, checksums=delivered.seal.checksums)
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
                "learner.lora.targets what it cannot compute"
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
        """Nothing: a folder that is there stays as it is."""

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
    lora, shape = config.learner.lora, learner.shape
    src, dst = learner_adapters(learner, lora), hf_adapters(hf, ranks_of_parts(learner, lora))
    folders = None
    if any(rank in group for group in writers):
        dtype = getattr(torch, config.learner.dtype)
        folders = AdapterFolders(mirror, dst.local_shapes(0), dtype, peft_config(lora, shape, model))
    transport = ProcessGroupTransport(
        plan_into_copies(src, dst, writers),
        src=dict(tensors),
        dst={} if folders is None else folders.tensors,
        bucket_bytes=config.weights.bucket_mb * 2**20,
    )
    return AdapterEnds(staging=Staging(transport, folders), folders=folders)
