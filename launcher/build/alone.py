"""Starts a configuration's engine on this machine with the weights of a Hugging Face folder, without a learner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import torch
from typing_extensions import override

from launcher.hosts.sites import sites_alone
from launcher.processes.scratch import removed
from launcher.runs.folder import drawn_mirror_path
from launcher.servers.engines import adapter_of
from launcher.servers.pool import ServedEngines
from launcher.worker.learner_rank import make_mirror
from rl_megatron.config.run import RunConfig
from rl_megatron.engines.engine import ServedEngine
from rl_megatron.engines.local.engine import InThisProcess, LocalEngine, decoder_of
from rl_megatron.feature import encoding_of
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.boxes import whole_box
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, checksums, read_boxes
from rl_megatron.weights.checks.compare import ServerComparisons
from rl_megatron.weights.checks.reports import NO_KINDS, Report
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import float32_in_files
from rl_megatron.weights.routes import mirror
from rl_megatron.weights.routes.delivery import FileDelivery, LearnerWeights

_VERSION = 0


@contextlib.asynccontextmanager
async def engine_alone(
    config: RunConfig, model_folder: Path, shape: ModelShape, folder: Path
) -> AsyncIterator[RolloutEngine]:
    """The engine of ``rollout``, with the weights of ``model_folder`` in learner.dtype. Logs go to ``folder``.

    Raises ConfigError, EngineError or WeightError if it cannot start, CorruptionError if servers hold other weights.
    """
    section = config.rollout
    if not section.served:
        longest = section.max_prompt_tokens + config.longest_completion
        dtype = getattr(torch, config.learner.dtype)
        engine = LocalEngine(shape, slots=section.slots, dtype=dtype, device=config.learner.device, max_length=longest)
        engine.decode = decoder_of(model_folder) if section.stop else None
        hf = hf_layout(shape)
        await asyncio.to_thread(read_boxes, HFFolder(model_folder), hf, hf, 0, engine.tensors)
        yield InThisProcess(engine)
        return
    path = drawn_mirror_path(config, folder)
    sites = sites_alone(config)
    servers = ServedEngines(config, adapter_of(section.engine, shape), model_folder, folder, shape, sites)
    with contextlib.ExitStack() as ends:
        ends.enter_context(removed(path.parent))
        async with servers.running(path) as served:
            loading = _Loading(_FolderWeights(config, model_folder, shape, path, ends), path, served)
            servers.refit = loading.refit
            await loading.all()
            yield served


class _FolderWeights(LearnerWeights):
    """The learner's end of a delivery, whose weights are those of a folder."""

    def __init__(
        self, config: RunConfig, model_folder: Path, shape: ModelShape, path: Path, ends: contextlib.ExitStack
    ) -> None:
        """``ends`` is closed when the file is no longer used."""
        self._folder, self._path, self._ends = model_folder, path, ends
        self._hf, self._dtype = hf_layout(shape), getattr(torch, config.learner.dtype)
        self._encoding = encoding_of(config)
        self._mirror: mirror.Mirror | None = None

    @override
    async def push(self, version: int) -> WeightUpdate:
        """Write the mirror file."""
        await asyncio.to_thread(self._write, version)
        return WeightUpdate(version=version, num_bytes=0, seconds=0.0)

    @override
    async def sums(self) -> Sequence[Report]:
        """Checksums of the folder's tensors as they are cast, not of what arrived; of quantised ones the file's."""
        return [await asyncio.to_thread(self._sums)]

    def _write(self, version: int) -> None:
        shapes, float32 = self._hf.local_shapes(0), float32_in_files(self._hf)
        make_mirror(self._path, shapes, self._dtype, self._folder, self._encoding, self._ends, float32=float32)
        self._mirror = mirror.Mirror(self._path, shapes, self._dtype, self._encoding, float32=float32)
        self._mirror.withdraw()
        read_boxes(HFFolder(self._folder), self._hf, self._hf, 0, self._mirror.tensors)
        self._mirror.serve(version)

    def _sums(self) -> Report:
        assert self._mirror is not None
        if self._encoding is not None:
            return self._mirror.sums()
        shapes = self._hf.local_shapes(0)
        found = checksums(HFFolder(self._folder), shapes, mirror.dtypes(self._path))
        return Report(rows=[("", name, whole_box(shapes[name]), found[name]) for name in shapes], seconds=0.0)


class _Loading:
    """Has servers load the mirror file at ``path``, and compares what their ranks hold with its seal."""

    def __init__(self, weights: _FolderWeights, path: Path, engine: ServedEngine) -> None:
        self._delivery = FileDelivery(learner=weights, path=path, servers=engine.weights)
        self._path, self._engine = path, engine
        self._lock, self._served, self._checks = asyncio.Lock(), False, ServerComparisons()

    async def all(self) -> None:
        """Serve the weights on all servers."""
        async with self._lock, self._delivery.sending(_VERSION) as deliver:
            delivered = await deliver(private=NO_KINDS, meanwhile=lambda: None)
            self._compare(delivered.reports, delivered.seal.checksums)
            await self._engine.weights.commit(_VERSION)
            self._served = True

    async def refit(self, name: str) -> None:
        """Serve them on a restarted server; nothing before `all`, whose servers are stale too."""
        async with self._lock:
            if self._served and self._engine.weights.stale(name):
                sealed = await self._delivery.filled(_VERSION)
                self._compare({name: await self._delivery.load(_VERSION, name)}, sealed.checksums)
                await self._engine.weights.commit(_VERSION, only=name)

    def _compare(self, reports: Mapping[str, Sequence[Report]], sealed: Mapping[str, int]) -> None:
        for name, said in reports.items():
            self._checks.find(name, sealed, mirror.shapes(self._path), said).verified(name, "of the folder")
