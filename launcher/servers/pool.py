"""The engine servers of a run: starts each under a guard, or attaches to running ones; checks and supervises them.

Wraps a launcher of learners, so that engine servers sample instead of the learner's ranks. On the same accelerators
they take turns: before a model is loaded, trains or scores, the servers release their memory. The next push of weights
allocates it again (`ReplicaWeights.load`), for which the models release theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from typing_extensions import override

from launcher.processes.guards import HERE, GpuStartLock, GuardSpec, ServerSite, Sites, has_remote_server
from launcher.processes.own_thread import run_in_own_thread
from launcher.processes.scratch import scratch
from launcher.runs.folder import mirror_path
from launcher.servers import supervisor as supervision
from launcher.servers.engines import engine_problems, load_adapter, longest_sequence
from launcher.servers.supervisor import AttachedServer, FailedServer, ServerState, StartedServer, Supervisor
from launcher.servers.versions import (
    check_interpreter,
    compare_environments,
    other_container,
    python_path,
    shared_settings,
    show_package,
)
from rl_megatron.config.rules import find_problems
from rl_megatron.config.run import RunConfig
from rl_megatron.engines import engine_token
from rl_megatron.engines.adapter import Adapter, ServerInfo, StartOptions, normalize_options
from rl_megatron.engines.engine import GaugePoller, ServerEngine
from rl_megatron.engines.http import AttemptFailed, Server, TooManyOpenFiles
from rl_megatron.engines.replicas import Replica
from rl_megatron.engines.weights import ReplicaWeights
from rl_megatron.errors import ConfigError, EngineError, task_group
from rl_megatron.feature import features, given_to_servers, load_side, make_encoding, make_pushes
from rl_megatron.http.token_file import TokenFile
from rl_megatron.interfaces import FrozenModel, Launcher, RunComponents, WeightSync, ignore_progress
from rl_megatron.models.families.fields import read_config
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.mapped import header_bytes
from rl_megatron.weights.formats.hf_folder import config_text, copy_companions, stored
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.push.sync import ServedSync, ServedWeights
from rl_megatron.weights.push.trust import Probe, Probed, PushVerifier
from rl_megatron.weights.routes.delivery import Delivery, DirectDelivery, FileDelivery, LearnerRanks, LearnerWeights
from rl_megatron.weights.routes.mirror import wait_until_unlocked
from rl_megatron.weights.routes.rendezvous import RendezvousStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChecks:
    """The requirements on servers for a run whose longest sequence has ``max_length`` tokens."""

    config: RunConfig
    adapter: Adapter
    model_folder: Path
    max_length: int

    async def check(self, servers: Sequence[Server]) -> None:
        """Raises ConfigError with all problems of the servers together, and EngineError."""
        found = [(server, await self._described(server)) for server in servers]
        self._raise_misfits([(server.url, described) for server, described in found])
        for server, described in found:
            server.priorities, server.features = described.has_priorities, described.features

    async def _described(self, server: Server) -> ServerInfo:
        try:
            open_to_strangers = await server.allows_unauthenticated()
            described = await self.adapter.describe(server)
        except AttemptFailed as error:
            raise EngineError(f"rollout.engine={self.config.rollout.engine}: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{server.url} answers as no server of {self.adapter.name} does ({error!r:.200}); "
                "check what runs there, rollout.engine and rollout.server.addresses"
            ) from error
        if open_to_strangers and self.config.rollout.server.addresses:
            logger.warning("%s answers without a token: who reaches it can change weights or run code", server.url)
        elif open_to_strangers:
            raise ConfigError(f"{server.url} answers without the run's token; check rollout.server.options")
        return described

    def _raise_misfits(self, found: Sequence[tuple[str, ServerInfo]]) -> None:
        wanted = self.config.learner.dtype
        known = read_config(self.model_folder).get("architectures") or ()
        architecture, problems = ",".join(known), []
        for url, described in found:
            logger.info("%s %s at %s: %s", self.adapter.name, described.version, url, described)
            problems += [f"{url}: {problem}" for problem in described.problems]
            if described.version.split("+")[0] != self.adapter.tested_version:
                logger.warning("%s: only %s %s is tested", url, self.adapter.name, self.adapter.tested_version)
            if architecture and not described.problems and described.architecture != architecture:
                problems.append(
                    f"{url}: it serves {described.architecture}, but the model to train is {architecture}; start it "
                    f"with {self.model_folder}"
                )
            if not described.problems and described.dtype != wanted:
                problems.append(f"{url}: it computes in {described.dtype}, but learner.dtype={wanted}; make them equal")
            for hooks in self.adapter.hooks:
                serving, runs = features()[hooks.name].serving, described.features.get(hooks.name, 0)
                if serving is None or described.problems or hooks.fits(runs, given := serving.given(self.config)):
                    continue
                problems.append(f"{url}: " + serving.misfit.format(found=runs, given=serving.named(given)))
            if described.max_length < self.max_length:
                problems.append(
                    f"{url}: its longest sequence is {described.max_length}, by its context and its cache; "
                    f"{self.max_length} is needed: raise rollout.server.memory_fraction, tp or dp, start servers at "
                    "rollout.server.addresses with a longer context, or lower rollout.max_new_tokens"
                )
        if problems:
            raise ConfigError("\n".join(problems))


_LOOK_SECONDS = 0.25


class ServerPool:
    """The servers of one run, at ``sites`` or here. ``refit`` pushes the served weights into a restarted server.

    ``resumes``: servers of this run have served before, so one that does not come up is restarted as one that dies.
    """

    def __init__(
        self,
        config: RunConfig,
        adapter: Adapter,
        model_folder: Path,
        run_folder: Path,
        shape: ModelShape,
        sites: Sequence[Sites] | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        self._config, self._section, self._adapter = config, config.rollout.server, adapter
        self._model_folder, self._run_folder, self._shape = model_folder.resolve(), run_folder, shape
        self._max_length = longest_sequence(config, shape)
        if problems := [*find_problems(config, "shape", shape), *engine_problems(config, adapter, shape, os.environ)]:
            raise ConfigError("\n".join(problems))
        self._checks = ServerChecks(
            config=config, adapter=adapter, model_folder=self._model_folder, max_length=self._max_length
        )
        self._encoding, self._shapes = make_encoding(config), hf_layout(shape).local_shapes(0)
        stored(self._shapes, DType(config.learner.dtype), self._encoding)  # first refuses models without such a format
        self._sites = dict(enumerate(sites or [[ServerSite()] for _ in range(self._section.count)]))
        self._turns = GpuStartLock()
        self._resumes = resumes
        self.refit: Callable[[str], Awaitable[None]] | None = None  # set before anything is served

    @contextlib.asynccontextmanager
    async def running(self, mirror: Path) -> AsyncIterator[ServerEngine]:
        """Starts, checks and supervises the servers. Leaving the context ends the servers that it started.

        It also removes ``mirror``'s folder.
        """
        async with contextlib.AsyncExitStack() as stack:
            shared = (
                self._run_folder.resolve() if has_remote_server(list(self._sites.values())) else None
            )  # otherwise this machine's own
            packages = stack.enter_context(scratch(mirror.parent, within=shared))
            running = await stack.enter_async_context(contextlib.AsyncExitStack())  # servers, also later ones
            if self._section.addresses:
                standing: list[ServerState] = [AttachedServer(server=server) for server in self._attached()]
            else:
                await self._prepare(packages)
                standing = await self._start_all(running, packages)
            standing = await self._checked(standing)
            known = self._config.one_by_one and not self._section.addresses  # else a request is for a whole group
            engine = ServerEngine(
                self._adapter,
                [one.server for one in standing],
                self._section,
                max_length=self._max_length,
                vocab_size=self._shape.vocab_size,
                group_size=self._config.rollout.group_size,
                samples=self._config.max_completions,
                slots=self._config.rollout.slots if known else None,
            )
            stack.push_async_callback(engine.close)
            await stack.enter_async_context(self._supervised(running, packages, engine, standing))
            await stack.enter_async_context(GaugePoller(self._adapter, engine.replicas).polling())
            yield engine

    @contextlib.asynccontextmanager
    async def _supervised(
        self, running: contextlib.AsyncExitStack, packages: Path, engine: ServerEngine, standing: Sequence[ServerState]
    ) -> AsyncIterator[None]:
        """Supervises every replica; restarted servers are put on ``running``."""

        async def start(number: int) -> ServerState:
            started = await self._start_ready(running, number, packages)
            try:
                await self._checks.check([started.server])
            except BaseException:
                await started.end()  # else it would keep its GPUs
                raise
            return started

        async def restart(replica: Replica) -> ServerState:
            if not self._section.addresses:
                return await start(replica.number)
            return await self._attach(replica.server)

        async def refit(url: str) -> None:
            if self.refit is not None:
                await self.refit(url)

        supervisor = Supervisor(engine=engine, section=self._section, restart=restart, push_current=refit)
        async with supervisor.watched(standing):
            yield

    def _attached(self) -> list[Server]:
        file = self._section.token_file
        token = None if file is None else TokenFile(file=file, key="rollout.server.token_file")
        urls = [url.strip() for url in str(self._section.addresses).split(",")]
        bad = [url for url in urls if not url.startswith(("http://", "https://"))]
        if bad:
            raise ConfigError(f"rollout.server.addresses: {', '.join(bad)}: write each as http://host:port")
        return [self._server(url, token) for url in urls]

    def _server(self, url: str, token: str | TokenFile | None, answers: Path | None = None) -> Server:
        return Server(url, token=token, timeout_seconds=self._section.timeout_seconds, answers=answers)

    async def _prepare(self, packages: Path) -> None:
        """Prepares a start."""
        if self._config.slurm.engines.container is None:
            await check_interpreter(self._python, self._adapter)
            await self._compare()
        show_package(packages)
        self._write_models(packages)

    async def _compare(self) -> None:
        """Raises ConfigError if ranks of learner and engine cannot be one group."""
        if other_container(self._config) is not None:  # ranks compare themselves when they meet
            return
        compare = partial(
            compare_environments, learner=Path(sys.executable), engine=self._python, seconds=self._section.start_seconds
        )
        try:
            compared = await run_in_own_thread("interpreters", compare, self._config, os.environ)
        except EngineError as error:
            logger.warning("%s; ranks compare themselves when they meet", error)
            return
        logger.info("libraries of both environments:\n%s", compared.table)
        if compared.problem:
            raise ConfigError(compared.problem)

    def _write_models(self, packages: Path) -> None:
        """Writes the folders that servers start from: config.json alone, and with the tokenizer.

        config.json describes the pushed weights, whatever format ``model.path`` has.
        """
        quantization = None if self._encoding is None else self._encoding.config(self._shapes)
        config = config_text(self._model_folder, set(), quantization, drafts=self._shape.num_draft_layers)
        for name in ("bare", "model"):
            (packages / name).mkdir()
            (packages / name / "config.json").write_text(config)
        copy_companions(self._model_folder, packages / "model")
        if make_pushes(self._config) is not None:
            # SGLang's side of adapters starts with --load-format safetensors, which reads a file; vLLM's reads none.
            (packages / "bare" / "model.safetensors").write_bytes(header_bytes([]))

    async def _start_all(self, stack: contextlib.AsyncExitStack, packages: Path) -> list[ServerState]:
        """Starts the servers of the run's beginning; in a resume one that fails is left to its supervisor."""
        still, all_came = set(range(self._section.count)), asyncio.Event()

        def came(number: int) -> None:
            still.discard(number)
            if not still:
                all_came.set()

        async def start(number: int) -> ServerState:
            try:
                started = await self._start_ready(stack, number, packages)
                came(number)
                return await _require_started(started, all_came)
            except (EngineError, OSError) as error:
                if not self._resumes:
                    raise
                came(number)
                return FailedServer(
                    server=self._server(f"http://{self._sites[number][0].host}", None), reason=str(error)
                )

        async with task_group() as tasks:
            starting = [tasks.create_task(start(number)) for number in sorted(still)]
        return [one.result() for one in starting]

    async def _checked(self, standing: list[ServerState]) -> list[ServerState]:
        """Returns checked servers. Raises ConfigError with all problems, and EngineError. In a resume, a server that
        does not answer becomes a FailedServer without a delay of others: that takes minutes if its host is gone."""
        if not self._resumes:
            await self._checks.check([one.server for one in standing])
            return standing

        async def check(one: ServerState) -> ServerState:
            try:
                if not isinstance(one, FailedServer):
                    await self._checks.check([one.server])
                return one
            except TooManyOpenFiles:
                raise
            except EngineError as error:
                await one.end()
                return FailedServer(server=one.server, reason=str(error))

        async with task_group() as tasks:
            checking = [tasks.create_task(check(one)) for one in standing]
        return [one.result() for one in checking]

    async def _start_ready(self, stack: contextlib.AsyncExitStack, number: int, packages: Path) -> StartedServer:
        """Starts a server in its turn, and waits until it is ready."""
        async with self._turns.acquire(self._sites[number]):
            started = await self._start_one(stack, number, packages)
            try:
                await started.ready(self._section.start_seconds)
            except BaseException:
                await started.end()  # else it would keep its GPUs
                raise
            return started

    async def _start_one(self, stack: contextlib.AsyncExitStack, number: int, packages: Path) -> StartedServer:
        sites, token, ports = self._sites[number], secrets.token_hex(24), contextlib.ExitStack()
        port = ports.enter_context(sites[0].ports())
        server = self._server(f"http://{sites[0].host}:{port}", token, packages)
        started = StartedServer(guards=[], server=server, logs=[], ports=ports)
        stack.push_async_callback(started.end)
        try:
            for node, site in enumerate(sites):
                command = self._adapter.command(self._options(sites, node, port, packages))
                own = {"PYTHONPATH": python_path(packages), engine_token.VARIABLE: token}
                name = f"{self._adapter.name.lower()}_{number}" + (f"_node_{node}" if node else "")
                order = GuardSpec(
                    prefix_command=site.prefix_command,
                    python=site.python,
                    host=site.host,
                    command=command.arguments,
                    environment={
                        **os.environ,
                        **shared_settings(self._config, os.environ),
                        **own,
                        **command.environment,
                    },
                    gpus=site.gpus,
                    folder=Path.cwd(),
                    log=self._run_folder.resolve() / f"{name}.log",
                )
                started.guards.append(await site.start(order))
                started.logs.append(order.log)
        except BaseException:
            await started.end()  # its first nodes would keep GPUs and ports
            raise
        return started

    def _options(self, sites: Sites, node: int, port: int, packages: Path) -> StartOptions:
        config, section = self._config, self._section
        return StartOptions(
            python=self._python,
            model_folder=packages / "model",
            config_folder=packages / "bare",
            host=sites[node].host,
            port=port,
            num_nodes=len(sites),
            node_rank=node,
            head_address=sites[0].host,
            device=config.learner.device,
            dtype=config.learner.dtype,
            quantization=section.quantization,
            max_length=self._max_length,
            max_num_seqs=config.rollout.slots,
            max_completions=config.max_completions,
            tp=section.tp,
            pp=section.pp,
            dp=section.dp,
            ep=section.ep,
            memory_fraction=section.memory_fraction,
            timeout_seconds=section.timeout_seconds,
            colocated=section.colocated,
            batch_invariant=section.batch_invariant,
            features=given_to_servers(config),
            stops=bool(config.rollout.stop),
            extra_options=normalize_options(section.options or ""),
        )

    @property
    def _python(self) -> Path:
        return self._config.rollout.python or Path(sys.executable)

    async def _attach(self, server: Server) -> AttachedServer:
        """Returns the server at this address, once it serves. Raises EngineError after
        ``rollout.server.start_seconds``, and ConfigError for one that does not fit the run."""
        limit, heard = self._section.start_seconds, "nothing was asked"
        again = self._server(server.url, server.token)
        try:
            async with asyncio.timeout(limit):
                while True:
                    try:
                        async with asyncio.timeout(supervision.ANSWER_SECONDS):
                            await again.text("/health")
                        await self._checks.check([again])
                        return AttachedServer(server=again)
                    except TooManyOpenFiles:
                        raise
                    except TimeoutError:
                        heard = f"{server.url}/health: no answer within {supervision.ANSWER_SECONDS:g} s"
                    except (AttemptFailed, EngineError) as error:
                        heard = str(error)
                    await asyncio.sleep(_LOOK_SECONDS)
        except BaseException as error:
            await again.close()
            if not isinstance(error, TimeoutError):
                raise
            late = f"{server.url} does not serve after rollout.server.start_seconds={limit:g}"
            raise EngineError(f"{late}: {heard}") from error


async def _require_started(started: StartedServer, all_came: asyncio.Event) -> StartedServer:
    """Returns the server, once the others have come up or failed too. Raises EngineError if it ends before."""
    ended, waiting = asyncio.ensure_future(started.wait_for_exit()), asyncio.ensure_future(all_came.wait())
    try:
        await asyncio.wait({ended, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if all_came.is_set():
            return started
        raise EngineError(ended.result())
    except BaseException:
        await started.end()
        raise
    finally:
        ended.cancel()
        waiting.cancel()


_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}  # nats


class ServerLauncher(Launcher):
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
    async def start(
        self, config: RunConfig, tell: Callable[[str], None] = ignore_progress
    ) -> AsyncIterator[RunComponents]:
        """Raises ConfigError if a server does not fit the run, EngineError if none starts, SyncError if another run has
        the folder of weights."""
        if config.rollout.server.colocated and config.learner.device == "cpu":
            logger.warning("rollout.server.colocated: on CPUs servers do not release their memory")
        adapter = load_adapter(config.rollout.engine, self._shape)
        path = mirror_path(config, self._run_folder)
        await asyncio.to_thread(wait_until_unlocked, path.parent)  # not inside `running`, which removes it
        async with contextlib.AsyncExitStack() as stack:
            servers = self._servers(config, adapter)
            starting = asyncio.create_task(stack.enter_async_context(servers.running(path)))
            tasks: list[asyncio.Task[Any]] = [starting]
            try:
                await self._before_learners(config, starting, tell)
                inner = asyncio.create_task(stack.enter_async_context(self._inner.start(config, tell)))
                tasks.append(inner)
                await asyncio.gather(*tasks)  # raises the first error, even if the other still starts
                roles, engine = inner.result(), starting.result()
            except BaseException:
                for one in tasks:
                    one.cancel()
                await asyncio.wait(tasks)
                raise
            weights = self._sync(config, roles, engine, path)
            servers.refit = weights.refit
            roles = replace(roles, engine=engine, weight_sync=weights, engine_metrics=engine.step_row)
            yield colocated(roles, engine.weights) if config.rollout.server.colocated else roles

    def _sync(self, config: RunConfig, roles: RunComponents, engine: ServerEngine, path: Path) -> ServedSync:
        """Makes the sync that delivers to the servers of ``engine`` and verifies. Mirror files are at ``path``."""

        def make_verifier(servers: Probed) -> PushVerifier:
            return PushVerifier(
                path=path,
                servers=servers,
                learner=roles.policy,
                dims=config.learner.dims,
                padding=config.learner.padding,
                probe=Probe.make(
                    vocab_size=self._shape.vocab_size,
                    max_length=longest_sequence(config, self._shape),
                    temperature=config.rollout.temperature,
                    tolerance=_tolerance(config),
                ),
                probes=config.rollout.server.probes,
            )

        learner, servers, nodes = roles.weight_sync, engine.weights, len(self._sites[0]) if self._sites else 1
        assert isinstance(learner, LearnerWeights)
        file = FileDelivery(learner=learner, path=path, servers=servers, nodes=nodes)
        delivery = _delivery(config, learner, servers, file, self._host)
        if (pushes := make_pushes(config)) is None:
            return ServedWeights(learner=learner, delivery=delivery, trust=make_verifier(servers), servers=servers)
        sync: ServedSync = load_side(pushes.sync)(
            config, engine, learner, delivery, file, make_verifier, run=self._run_folder.resolve().name, nodes=nodes
        )
        return sync

    async def _before_learners(
        self, config: RunConfig, starting: asyncio.Task[ServerEngine], tell: Callable[[str], None]
    ) -> None:
        """Waits for servers on the learners' GPUs, which count memory allocated during their start as their own."""
        turns, shared = (
            config.rollout.server.colocated,
            [site.shares_gpus for sites in self._sites or () for site in sites],
        )
        if config.learner.device == "cpu" or not (turns or any(shared)):
            return
        tell("starting servers; the learner, which shares their GPUs, starts after them")
        engine = await starting
        if turns:
            await engine.weights.release()

    def _servers(self, config: RunConfig, adapter: Adapter) -> ServerPool:
        folders = self._model_folder, self._run_folder
        return ServerPool(config, adapter, *folders, self._shape, self._sites, resumes=self._resumes)


def _tolerance(config: RunConfig) -> float:
    """Returns the probe's tolerance in nats, for rounding or for encoded weights."""
    encoding, rounding = make_encoding(config), _TOLERANCE[config.learner.dtype]
    return config.rollout.server.probe_tolerance or max(rounding, encoding.tolerance if encoding else 0.0)


def _delivery(
    config: RunConfig, weights: WeightSync, servers: ReplicaWeights, file: FileDelivery, host: str
) -> Delivery:
    """Makes the delivery through mirror files, or a direct one if ``weights.transport`` is direct."""
    if not config.transport.direct:
        return file
    assert isinstance(weights, LearnerRanks)
    return DirectDelivery(
        file=file,
        learner=weights,
        servers=servers,
        keeper=RendezvousStore(config.weights.rendezvous_host or host, config.rollout.server.timeout_seconds),
        learner_ranks=config.learner.dims.world_size,
        backend="gloo" if config.learner.device == "cpu" else "nccl",
    )


T = TypeVar("T")

COMPUTING = ("score", "load_weights", "backward", "step", "zero_grad", "update_reference", "load")
"""The calls of models before which servers release their memory."""


def colocated(roles: RunComponents, servers: ReplicaWeights) -> RunComponents:
    """Returns the roles, such that their models make ``servers`` release their memory before they compute, and a push
    makes the models release theirs. Reward models score while servers sample, and do not alternate with them."""

    def take_turns(model: T) -> T:
        return cast(T, _InTurn(model, servers))

    return replace(
        roles,
        weight_sync=_Weights(inner=roles.weight_sync, models=(*roles.learners.values(), *roles.frozen_models.values())),
        learners={role: take_turns(one) for role, one in roles.learners.items()},
        frozen_models={role: take_turns(one) for role, one in roles.frozen_models.items()},
        shared_ranks=[take_turns(one) for one in roles.shared_ranks],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Makes the ``models`` release their memory before a push, in which servers take theirs."""

    inner: WeightSync
    models: Sequence[FrozenModel]

    async def push(self, version: int) -> WeightUpdate:
        for model in self.models:
            await model.release_memory()
        return await self.inner.push(version)

    async def export(self, folder: Path) -> None:
        await self.inner.export(folder)


class _InTurn:
    """A model, or models on the same ranks, whose `COMPUTING` calls first make the servers release their memory."""

    def __init__(self, inner: object, servers: ReplicaWeights) -> None:
        self._inner, self._servers = inner, servers

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._released, found) if name in COMPUTING else found

    async def _released(self, call: Any, *given: Any, **named: Any) -> Any:
        await self._servers.release()
        return await call(*given, **named)
