"""Wraps a launcher of learners, so that engine servers sample instead of the learner's ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from launcher.runs.folder import mirror_path
from launcher.servers.colocated import colocated
from launcher.servers.engines import adapter_of, adapter_places, longest_sequence
from launcher.servers.pool import ServedEngines
from launcher.servers.site import HERE, Sites
from rl_megatron.config.run import RunConfig
from rl_megatron.interfaces import Launcher, Roles, WeightSync, unheard
from rl_megatron.models.shape import ModelShape
from rl_megatron.rollout.servers.adapter import Adapter
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.weights import ReplicaWeights
from rl_megatron.weights.formats.served import FORMATS
from rl_megatron.weights.servers.beside import AdapterRanks, AdapterWeights
from rl_megatron.weights.servers.delivery import Delivery
from rl_megatron.weights.servers.direct import DirectDelivery, LearnerRanks
from rl_megatron.weights.servers.file import FileDelivery, LearnerWeights
from rl_megatron.weights.servers.leftovers import await_free
from rl_megatron.weights.servers.probe import Probe
from rl_megatron.weights.servers.sync import ServedWeights
from rl_megatron.weights.servers.trust import Trust
from rl_megatron.weights.transports.joined import Keeper

logger = logging.getLogger(__name__)


_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}  # nats


_QUANTISED_TOLERANCE = 1.0  # nats


class ServedLauncher(Launcher):
    """Starts engine servers while ``inner`` starts the learners; before that, where both have the same GPUs."""

    def __init__(
        self,
        inner: Launcher,
        model_folder: Path,
        run_folder: Path,
        shape: ModelShape,
        sites: Sequence[Sites] | None = None,
        host: str = HERE,
        *,
        resumes: bool = False,
    ) -> None:
        """``host``: this machine's address for the servers at all ``sites``. ``resumes``: servers have served this run
        before."""
        self._inner, self._model_folder, self._run_folder, self._shape = inner, model_folder, run_folder, shape
        self._sites, self._host, self._resumes = sites, host, resumes

    @override
    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig, tell: Callable[[str], None] = unheard) -> AsyncIterator[Roles]:
        """Raises ConfigError if a server does not fit the run, EngineError if none starts, SyncError if another run has
        the folder of weights."""
        if config.rollout.server.colocated and config.learner.device == "cpu":
            logger.warning("rollout.server.colocated: on CPUs servers do not release their memory")
        adapter = adapter_of(config.rollout.engine, self._shape)
        path = mirror_path(config, self._run_folder)
        await asyncio.to_thread(await_free, path.parent)  # before servers' end removes it
        async with contextlib.AsyncExitStack() as stack:
            servers = self._servers(config, adapter)
            starting = asyncio.create_task(stack.enter_async_context(servers.running(path)))
            tasks: list[asyncio.Task[Any]] = [starting]
            try:
                await self._before_learners(config, starting, tell)
                inner = asyncio.create_task(stack.enter_async_context(self._inner.start(config, tell)))
                tasks.append(inner)
                await asyncio.gather(*tasks)  # raises the first error, whoever still starts
                roles, engine = inner.result(), starting.result()
            except BaseException:
                for one in tasks:
                    one.cancel()
                await asyncio.wait(tasks)
                raise
            places = adapter_places(config, self._shape)
            loras = None if places is None else engine.beside(self._run_folder.resolve().name, places.count)
            trust = Trust(
                path=path,
                servers=loras or engine.weights,
                learner=roles.policy,
                dims=config.learner.dims,
                padding=config.learner.padding,
                probe=self._probe(config),
                probes=config.rollout.server.probes,
            )
            nodes = len(self._sites[0]) if self._sites else 1
            assert isinstance(roles.weights, LearnerWeights)
            file = FileDelivery(learner=roles.weights, path=path, servers=engine.weights, nodes=nodes)
            delivery = _delivery(config, roles.weights, engine.weights, file, self._host)
            weights: ServedWeights | AdapterWeights
            if loras is None:
                weights = ServedWeights(learner=roles.weights, delivery=delivery, trust=trust, servers=engine.weights)
            else:
                assert isinstance(roles.weights, AdapterRanks)
                weights = AdapterWeights(
                    learner=roles.weights, delivery=delivery, file=file, trust=trust, servers=loras, nodes=nodes
                )
            servers.refit = weights.refit
            roles = replace(roles, engine=engine, weights=weights, engine_metrics=engine.step_row)
            yield colocated(roles, engine.weights) if config.rollout.server.colocated else roles

    async def _before_learners(
        self, config: RunConfig, starting: asyncio.Task[ServedEngine], tell: Callable[[str], None]
    ) -> None:
        """Wait for servers on the learners' GPUs, which take what is allocated while they start for their own."""
        turns, shared = config.rollout.server.colocated, [site.shared for sites in self._sites or () for site in sites]
        if config.learner.device == "cpu" or not (turns or any(shared)):
            return
        tell("starting servers; the learner, which shares their GPUs, starts after them")
        engine = await starting
        if turns:
            await engine.weights.release()

    def _servers(self, config: RunConfig, adapter: Adapter) -> ServedEngines:
        folders = self._model_folder, self._run_folder
        return ServedEngines(config, adapter, *folders, self._shape, self._sites, resumes=self._resumes)

    def _probe(self, config: RunConfig) -> Probe:
        return Probe.make(
            vocab_size=self._shape.vocab_size,
            max_length=longest_sequence(config, self._shape),
            temperature=config.rollout.temperature,
            tolerance=_tolerance(config),
        )


def _tolerance(config: RunConfig) -> float:
    """The probe's tolerance in nats, for rounding or for quantised weights."""
    section, rounding = config.rollout.server, _TOLERANCE[config.learner.dtype]
    return section.probe_tolerance or (rounding if FORMATS[section.quantization] is None else _QUANTISED_TOLERANCE)


def _delivery(
    config: RunConfig, weights: WeightSync, servers: ReplicaWeights, file: FileDelivery, host: str
) -> Delivery:
    """Through mirror files, or directly where ``weights.transport`` is such."""
    section, kind = config.rollout.server, config.transport
    if not kind.direct:
        return file
    assert isinstance(weights, LearnerRanks)
    return DirectDelivery(
        file=file,
        learner=weights,
        servers=servers,
        keeper=Keeper(config.weights.meeting_host or host, section.timeout_seconds),
        learner_ranks=config.learner.dims.world_size,
        transport=kind.name,
        backend=kind.backend(config.learner.device),
        alike=kind.compared(config.learner.device),
    )
