"""Engine servers of a run: started here, each under a guard, or running ones by address; checked before the first step.

The one table of engines is here. A launcher of learners is wrapped: what it starts is kept, but for engine and weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher import engine_guard
from launcher.placement import engines_elsewhere
from launcher.seats import elsewhere, places
from launcher.slurm import Job
from rl_megatron.config import RunConfig
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.interfaces import Launcher, Roles
from rl_megatron.models.shape import ModelShape
from rl_megatron.rollout.http import AttemptFailed, Server
from rl_megatron.rollout.served import Adapter, Description, ServedEngine, StartOptions
from rl_megatron.rollout.sglang import SGLangAdapter
from rl_megatron.rollout.vllm import VLLMAdapter
from rl_megatron.weights.served import PROBE_LENGTH, Probe, ServedWeights

logger = logging.getLogger(__name__)

SERVERS: Mapping[str, type[SGLangAdapter] | type[VLLMAdapter]] = {"sglang": SGLangAdapter, "vllm": VLLMAdapter}
LEAST_HEAD_DIM = 32  # of vLLM's attention kernels on CPUs
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}  # nats
_STOP_SECONDS = 20.0
_TAIL = 20  # lines of a log in an error


def mirror_path(config: RunConfig, run_folder: Path) -> Path:
    """The file in which this run's weights are handed to servers: where those on other nodes see it, if there are."""
    digest = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    usual = run_folder.resolve() if engines_elsewhere(config) else Path("/dev/shm")
    folder = config.rollout.server.weights_dir or usual
    return folder / f"rl_megatron-{digest}" / "model.safetensors"


def longest_sequence(config: RunConfig, shape: ModelShape) -> int:
    """Tokens of the longest prompt and completion, a probe's among them."""
    longest = max(config.rollout.max_prompt_tokens + config.rollout.max_new_tokens, PROBE_LENGTH)
    return min(longest, shape.max_positions)


class ServedLauncher:
    """See interfaces.Launcher. Learners start as ``inner`` starts them, engine servers meanwhile."""

    def __init__(
        self, inner: Launcher, model_folder: Path, run_folder: Path, shape: ModelShape, job: Job | None = None
    ) -> None:
        self._inner, self._model_folder, self._run_folder, self._shape = inner, model_folder, run_folder, shape
        self._job = job

    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig) -> AsyncIterator[Roles]:
        """See interfaces.Launcher. Raises ConfigError where a server does not fit, EngineError where none comes up."""
        adapter = SERVERS[config.rollout.engine](self._shape)
        path = mirror_path(config, self._run_folder)
        async with contextlib.AsyncExitStack() as stack:
            engine = ServedEngines(config, adapter, self._model_folder, self._run_folder, self._shape, self._job)
            starting = asyncio.create_task(stack.enter_async_context(engine.running(path)))
            try:
                roles = await stack.enter_async_context(self._inner.start(config))
            except BaseException:
                starting.cancel()
                await asyncio.wait([starting])
                raise
            replicas = await starting
            probe = Probe.make(
                vocab_size=self._shape.vocab_size,
                max_length=longest_sequence(config, self._shape),
                temperature=config.rollout.temperature,
                tolerance=config.rollout.server.probe_tolerance or _TOLERANCE[config.learner.dtype],
            )
            weights = ServedWeights(
                inner=roles.weights,
                path=path,
                replicas=replicas,
                learner=roles.learner,
                dims=config.learner.dims,
                probe=probe,
            )
            yield replace(roles, engine=replicas, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """One server that was started: its guard, where it listens and what it says."""

    guard: asyncio.subprocess.Process
    server: Server
    log: Path

    def ended(self) -> str:
        """How it ended, with the end of its log."""
        status = self.guard.returncode
        tail = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"{self.server.url} ended with status {status}; {self.log} ends with:", *tail])


class ServedEngines:
    """The servers of one run."""

    def __init__(
        self,
        config: RunConfig,
        adapter: Adapter,
        model_folder: Path,
        run_folder: Path,
        shape: ModelShape,
        job: Job | None = None,
    ) -> None:
        self._config, self._section, self._adapter = config, config.rollout.server, adapter
        self._model_folder, self._run_folder, self._shape = model_folder.resolve(), run_folder, shape
        self._max_length = longest_sequence(config, shape)
        self._places = places(config, job)

    @contextlib.asynccontextmanager
    async def running(self, mirror: Path) -> AsyncIterator[ServedEngine]:
        """Ready and checked servers; those that were started are gone at the end, and ``mirror``'s folder with them."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, mirror.parent, ignore_errors=True)
            if self._section.addresses:
                servers = self._attached()
            else:
                started = await self._start(stack, mirror)
                servers = [s.server for s in started]
            engine = ServedEngine(
                self._adapter,
                servers,
                self._section,
                max_length=self._max_length,
                vocab_size=self._shape.vocab_size,
            )
            stack.push_async_callback(engine.close)
            self._check([(s.url, await self._described(s)) for s in servers])
            yield engine

    def _attached(self) -> list[Server]:
        file = self._section.token_file
        token = file.read_text().strip() if file else None
        urls = [url.strip() for url in str(self._section.addresses).split(",")]
        bad = [url for url in urls if not url.startswith(("http://", "https://"))]
        if bad:
            raise ConfigError(f"rollout.server.addresses: {', '.join(bad)}: write each as http://host:port")
        return [Server(url, token=token, timeout_seconds=self._section.timeout_seconds) for url in urls]

    async def _start(self, stack: contextlib.AsyncExitStack, mirror: Path) -> list[_Started]:
        python = self._config.rollout.python or Path(sys.executable)
        await _check_interpreter(python, self._adapter)
        # The engine's interpreter sees this package alone, never the packages that lie beside it.
        shared = self._run_folder.resolve() if elsewhere(self._places) else None  # else this machine's own
        packages = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl_megatron-", dir=shared)))
        (packages / "rl_megatron").symlink_to(Path(__file__).resolve().parent.parent / "rl_megatron")
        (packages / "model").mkdir()
        shutil.copy(self._model_folder / "config.json", packages / "model")
        started = [
            await self._start_one(stack, number, python, packages, mirror) for number in range(self._section.replicas)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in started:
                    tasks.create_task(self._ready(one))
        except ExceptionGroup as failed:  # the first is the cause; callers catch it by its type
            raise failed.exceptions[0] from failed
        for one in started:
            watch = asyncio.create_task(_watch(one))
            stack.callback(watch.cancel)
        return started

    async def _start_one(
        self, stack: contextlib.AsyncExitStack, number: int, python: Path, packages: Path, mirror: Path
    ) -> _Started:
        section, place, token = self._section, self._places[number], secrets.token_urlsafe(24)
        port = place.port()
        command = self._adapter.command(
            StartOptions(
                python=python,
                model_folder=self._model_folder,
                bare_folder=packages / "model",
                host=place.host,
                port=port,
                device=self._config.learner.device,
                dtype=self._config.learner.dtype,
                max_length=self._max_length,
                slots=self._config.rollout.slots,
                tp=section.tp,
                memory_fraction=section.memory_fraction,
                token=token,
                routes=self._config.algorithm.routing_replay == "r3",
                extra=tuple(shlex.split(section.options or "")),
            )
        )
        log = self._run_folder / f"{self._config.rollout.engine}_{number}.log"
        with log.open("ab") as file:
            guard = await asyncio.create_subprocess_exec(
                *place.before,
                sys.executable,
                str(engine_guard.__file__),
                str(mirror.parent),
                *command.arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": _joined(packages), **place.environment, **command.environment},
            )
        stack.push_async_callback(_end, guard)
        server = Server(f"http://{place.host}:{port}", token=token, timeout_seconds=section.timeout_seconds)
        return _Started(guard=guard, server=server, log=log)

    async def _ready(self, one: _Started) -> None:
        limit = self._section.start_seconds
        try:
            async with asyncio.timeout(limit):
                while one.guard.returncode is None:
                    with contextlib.suppress(AttemptFailed, EngineError):
                        await one.server.get("/health")
                        return
                    await asyncio.sleep(0.25)
        except TimeoutError as error:
            raise EngineError(
                f"{one.server.url} is not ready after rollout.server.start_seconds={limit:g}; {one.log} tells how far "
                "it came. Raise the limit if loading takes longer"
            ) from error
        raise EngineError(one.ended())

    async def _described(self, server: Server) -> Description:
        try:
            return await self._adapter.describe(server)
        except AttemptFailed as error:
            raise EngineError(f"rollout.engine={self._config.rollout.engine}: {error}") from error

    def _check(self, found: Sequence[tuple[str, Description]]) -> None:
        """Raises ConfigError with everything at once that keeps the servers from being used."""
        wanted, top_p = self._config.learner.dtype, self._config.rollout.top_p
        problems = []
        if top_p < 1 and not self._adapter.renormalises_top_p:
            problems.append(
                f"rollout.top_p={top_p}: {self._adapter.name}'s log-probs are not of the tokens that top_p leaves, so "
                "importance ratios would be wrong; set rollout.top_p=1"
            )
        for url, described in found:
            logger.info("%s %s at %s: %s", self._adapter.name, described.version, url, described)
            problems += [f"{url}: {problem}" for problem in described.problems]
            if not described.problems and described.dtype != wanted:
                problems.append(f"{url}: it computes in {described.dtype}, learner.dtype={wanted}; make them equal")
            if self._config.algorithm.routing_replay == "r3" and described.no_routes:
                problems.append(
                    f"{url}: algorithm.routing_replay=r3 needs routes, and it returns none; {described.no_routes}, or "
                    "set routing_replay=r2 or off"
                )
            if described.max_length < self._max_length:
                problems.append(f"{url}: its longest sequence is {described.max_length}, needed: {self._max_length}")
        if problems:
            raise ConfigError("\n".join(problems))


async def _watch(one: _Started) -> None:
    await one.guard.wait()
    one.server.lost = one.ended()
    logger.error("%s", one.server.lost)


async def _end(guard: asyncio.subprocess.Process) -> None:
    """Close the pipe that the guard watches, and wait until it has ended its server."""
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        await asyncio.wait_for(guard.wait(), _STOP_SECONDS)
    except TimeoutError:
        logger.warning("the guard of an engine server (pid %d) did not end in %g s; killed", guard.pid, _STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)


async def _check_interpreter(python: Path, adapter: Adapter) -> None:
    """Raises ConfigError where the engine is not installed in ``python``."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({adapter.module!r}) is None)"
    try:
        process = await asyncio.create_subprocess_exec(str(python), "-c", code)
    except OSError as error:
        raise ConfigError(f"rollout.python={python}: {error.strerror}; give the engine's interpreter") from error
    if await process.wait():
        raise ConfigError(
            f"rollout.python={python}: {adapter.name} is not installed there; docs/engines.md says how to install it, "
            "and rollout.python=<its environment>/bin/python where it is"
        )


def _joined(packages: Path) -> str:
    """``packages`` before what the user's own PYTHONPATH names."""
    return os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
