"""Engine servers as one RolloutEngine: replicas, retries, and new weights served only once somebody vouched for them.

An adapter (vllm.py, sglang.py) says a request or an order in its server's words; everything else is here, once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from numpy.typing import NDArray

from rl_megatron.config_rollout import ServerSection
from rl_megatron.data.routes import encode_routes
from rl_megatron.errors import DataError, EngineError, SyncError
from rl_megatron.models.shape import ModelShape
from rl_megatron.rollout.http import AttemptFailed, Server
from rl_megatron.types import Completion, FinishReason, GenerationRequest, Routes

logger = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_SECONDS = 2.0  # a server that dies fails its last requests before its end is known
FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What a server that is started must know."""

    python: Path
    model_folder: Path
    bare_folder: Path  # with the model's config.json alone
    host: str  # the one address that it listens on
    port: int
    device: str  # cpu or an accelerator
    dtype: str
    max_length: int  # tokens of a prompt and its completion
    slots: int
    tp: int
    memory_fraction: float | None
    token: str
    routes: bool  # whether requests ask for them
    extra: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A server's command line, and what its environment has beside the trainer's."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a running server says of itself."""

    version: str
    dtype: str
    architecture: str
    max_length: int
    problems: tuple[str, ...]  # what keeps it from being used, each with the way out
    no_routes: str | None = None  # why it returns none


class Adapter(Protocol):
    """One kind of engine. Weight versions are labels there; every method but ``command`` raises as `Server` does."""

    name: str
    module: str  # what must be importable in its interpreter
    renormalises_top_p: bool  # whether log-probs are of the distribution that top_p leaves

    def command(self, options: StartOptions) -> Command:
        """How a server is started. Raises ConfigError for what it cannot do."""
        ...

    async def describe(self, server: Server) -> Description:
        """What the server is, and what it lacks."""
        ...

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        """All completions of ``request``, aborted ones too. ``request_id`` is a name for ``abort``."""
        ...

    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        """End a request; what was sampled of it is its answer."""
        ...

    async def pause(self, server: Server, mode: Literal["keep", "abort"]) -> None:
        """Stop sampling; running requests wait, or end as they are."""
        ...

    async def resume(self, server: Server) -> None:
        """Sample on."""
        ...

    async def load(self, server: Server, path: Path, version: int, label: str) -> None:
        """Load the mirror file ``path``, drop cached prefixes. Raises SyncError naming a tensor that is wrong."""
        ...

    async def relabel(self, server: Server, label: str) -> None:
        """Name the weights that it holds."""
        ...


def version_of(label: object) -> int:
    """The version that a label names. Raises EngineError for one that this trainer did not give."""
    text = str(label).removesuffix("?")
    if not text.isdecimal():
        raise EngineError(
            f"the server sampled with weights labelled {label!r}, which no push of this run gave: was it started again?"
        )
    return int(text)


def checked_routes(experts: NDArray[Any], *, positions: int, shape: ModelShape) -> Routes:
    """Those of the MoE layers, from an answer's numbers by position, layer (all of them) and expert of a token.

    Raises EngineError where there are more or fewer of them, or one names no expert.
    """
    wanted = (positions, shape.num_layers, shape.experts_per_token)
    if experts.size != math.prod(wanted):
        raise EngineError(
            f"it answered with routes of shape {experts.shape}; (positions, layers, experts a token) is {wanted}"
        )
    layers = shape.moe_layers
    try:
        return encode_routes(experts.reshape(wanted)[:, layers.start : layers.stop], num_experts=shape.num_experts)
    except DataError as error:
        raise EngineError(str(error)) from error


class ServedEngine:
    """A RolloutEngine over servers. Weights are served from ``commit`` on, and by nobody after ``load`` until then.

    ``load`` and ``commit`` belong to the weight sync. Requests that run meanwhile wait in the engine and go on with the
    new weights; their answers are held back until these are committed. A prompt and its completion have at most
    ``max_length`` tokens, of ids below ``vocab_size``: what else a server would cut short, or die of, is refused here.
    """

    def __init__(
        self, adapter: Adapter, servers: Sequence[Server], section: ServerSection, *, max_length: int, vocab_size: int
    ) -> None:
        self.adapter, self._servers, self._section = adapter, tuple(servers), section
        self._max_length, self._vocab_size = max_length, vocab_size
        self._slots = asyncio.Semaphore(section.concurrency)
        self._version: int | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def servers(self) -> list[Server]:
        """Those that are there. Raises EngineError, saying how the last one went, where none is."""
        alive = [s for s in self._servers if s.lost is None]
        if not alive:
            raise EngineError(f"no {self.adapter.name} server is left: {self._servers[-1].lost}")
        return alive

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """See interfaces.RolloutEngine."""
        if not request.num_completions:
            return []
        self._check(request)
        async with self._slots:
            before = await self._vouched(request)
            completions = await self._sampled(request, self._least_busy)
            after = await self._vouched(request)
        if len(completions) != request.num_completions:
            raise EngineError(
                f"request {request.id!r}: {len(completions)} completions came, {request.num_completions} were asked for"
            )
        strays = {v for c in completions for v in c.versions if not before <= v <= after}
        if strays:
            raise EngineError(
                f"request {request.id!r} was sampled with version {min(strays)}, but {before} to {after} were served: "
                "was a server started again, or fed by another run?"
            )
        return completions

    def _check(self, request: GenerationRequest) -> None:
        prompt, new = request.token_ids, request.params.max_new_tokens
        if not prompt or min(prompt) < 0 or max(prompt) >= self._vocab_size:
            problem = f"the prompt must have one or more token ids in [0, {self._vocab_size}), got {prompt[:8]}..."
        elif len(prompt) + new > self._max_length:
            problem = (
                f"{len(prompt)} prompt tokens + max_new_tokens={new} exceed the engine's "
                f"max_length={self._max_length}; shorten the prompt or lower max_new_tokens"
            )
        else:
            return
        raise EngineError(f"request {request.id!r}: {problem}")

    async def _vouched(self, request: GenerationRequest) -> int:
        """The version that is served, once no update is under way."""
        await self._settled.wait()
        if self._version is None:
            raise EngineError(f"request {request.id!r}: no weights are served; push some first")
        return self._version

    def _least_busy(self, failed: Server | None) -> Server:
        """Another than ``failed`` where there is one."""
        return min(self.servers, key=lambda s: (s is failed, s.in_flight))

    async def _sampled(self, request: GenerationRequest, pick: Callable[[Server | None], Server]) -> list[Completion]:
        """Completions by the replica that ``pick`` chooses, given the one that failed in the attempt before."""
        wait, failed = self._section.backoff_seconds, None
        for left in range(self._section.retries, -1, -1):
            server = pick(failed)
            server.in_flight += 1
            try:
                return await self.adapter.generate(server, request, f"{request.id} {uuid.uuid4().hex}")
            except AttemptFailed as error:
                if not left:
                    tries = self._section.retries + 1
                    raise EngineError(f"request {request.id!r}: {error}; attempts made: {tries}") from error
                logger.warning("request %r: %s; again in %g s", request.id, error, wait)
                failed = server
            except EngineError as error:
                raise EngineError(f"request {request.id!r}: {error}") from error
            finally:
                server.in_flight -= 1
            await asyncio.sleep(wait)
            wait *= 2
        raise AssertionError("the last attempt returns or raises")

    async def load(self, path: Path, version: int) -> None:
        """Every replica holds ``version`` when this returns, and nothing is served. Raises SyncError."""
        self._settled.clear()
        self._version = None

        async def one(server: Server) -> None:
            await self.adapter.pause(server, "keep")
            await self.adapter.load(server, path, version, f"{version}?")
            await self.adapter.resume(server)

        try:
            await self._everywhere(version, one)
        except BaseException:
            self._settled.set()
            raise

    async def sample_everywhere(self, requests: Sequence[GenerationRequest]) -> dict[str, list[list[Completion]]]:
        """By each replica, whatever it holds; by URL."""

        async def all_of(server: Server) -> list[list[Completion]]:
            return list(await asyncio.gather(*(self._sampled(r, lambda failed: server) for r in requests)))

        return await self._everywhere(None, all_of)

    async def commit(self, version: int) -> None:
        """Serve what ``load`` brought, as ``version``."""
        await self._everywhere(version, lambda server: self.adapter.relabel(server, str(version)))
        self._version = version
        self._settled.set()

    def refuse(self) -> None:
        """Serve nothing until another ``load`` is committed; requests that wait fail."""
        self._settled.set()

    async def _everywhere(self, version: int | None, order: Callable[[Server], Awaitable[T]]) -> dict[str, T]:
        """``order`` on every replica at once; one that ends meanwhile is done without.

        Raises SyncError that names the replicas it failed on.
        """
        servers = self.servers
        answers = await asyncio.gather(*(order(s) for s in servers), return_exceptions=True)
        if any(isinstance(a, AttemptFailed) for a in answers):
            await asyncio.sleep(_GRACE_SECONDS)
        done: dict[str, T] = {}
        problems = []
        for server, answer in zip(servers, answers, strict=True):
            if not isinstance(answer, BaseException):
                done[server.url] = answer
            elif not isinstance(answer, AttemptFailed | EngineError | SyncError):
                raise answer
            elif server.lost is None:
                problems.append(f"{server.url}: {answer}")
        if problems or not done:
            what = "a probe of new weights" if version is None else f"version {version}"
            lost = [str(server.lost) for server in servers if server.lost is not None]
            raise SyncError("\n  ".join([f"{what} failed, and is not served:", *problems, *lost]))
        return done

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(server.close() for server in self._servers))
