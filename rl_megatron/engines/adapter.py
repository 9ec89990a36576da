"""The protocols of an engine's adapter, and the data that passes through them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shlex
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from rl_megatron.config.sections.rollout import RunningRequests, same_option
from rl_megatron.engines.answers import SampledColumns, TopLogprobs, make_spans, with_adapter_version
from rl_megatron.engines.http import Server
from rl_megatron.errors import EngineError
from rl_megatron.feature import EngineHooks, engine_hooks
from rl_megatron.models.shape import ModelShape
from rl_megatron.section import MAX_TEMPERATURE, MIN_TEMPERATURE
from rl_megatron.types import Completion, GenerationRequest, NamedVersion
from rl_megatron.weights.checks.compare import ReportReader
from rl_megatron.weights.checks.reports import ChecksumReport
from rl_megatron.weights.layouts.recorded import Boxes

_OFF = ("", "0", "false")
_LABEL = re.compile(r"(?P<version>\d+)\??@(?P<start>\w+)", re.ASCII)
_NAME = re.compile(r"^--[^.=]+")  # of an option, up to its value or a key of it


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The options to start a server with."""

    python: Path
    model_folder: Path
    bare_folder: Path  # holds the model's config.json, no weights
    host: str  # this node's address, the only one that it listens on
    port: int  # on ``head``; the first of a block of neighboring ports that are its own
    nodes: int = 1  # that the server spans
    node: int = 0  # the number of this node among them; the first answers requests
    head: str  # the address of the first
    device: str  # cpu or an accelerator
    dtype: str
    quantization: str  # format of its weights, or none
    max_length: int  # tokens of a prompt and its completion
    slots: int
    completions: int = 1  # of one request, at most
    tp: int
    pp: int
    dp: int  # replicas of the attention
    ep: int
    memory_fraction: float | None
    timeout_seconds: float  # for each part of a weight update
    colocated: bool  # whether it releases memory between phases
    batch_invariant: bool  # whether a token's log-prob must not depend on its batch
    features: Mapping[str, object] = field(default_factory=dict)  # what each feature has servers do
    stops: bool = False  # requests have texts that end completions
    extra: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """Processes of the whole server."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommand:
    """A server's command line, and the variables that its environment adds to the trainer's."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A running server's report about itself."""

    version: str
    dtype: str
    architecture: str
    max_length: int  # tokens of a prompt and its completion, by its context and its cache
    problems: tuple[str, ...]  # reasons why a run cannot use it, each with what to do
    features: Mapping[str, object] = field(default_factory=dict)  # what it does of each
    priorities: bool = False  # whether it takes requests by their priority


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGauges:
    """How busy a server is, over all of its schedulers."""

    running: int  # requests
    waiting: int
    cache: float | None = None  # the share of it that is in use, if it tells
    tokens: float | None = None  # sampled since its start,
    tokens_per_second: float | None = None  # or their speed of late, if it tells that itself


class Sampling(Protocol):
    """Samples, scores and describes a server. Every method raises as `Server` does."""

    async def ping(self, server: Server) -> None:
        """Have every rank of an idle server answer; for one whose /health does not ask them all."""

    async def describe(self, server: Server) -> ServerInfo:
        """Ask the server what it is, and what it lacks."""
        ...

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        """All completions of ``request``, including aborted ones. ``request_id`` names it for ``abort``."""
        ...

    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        """Abort a request; it answers with what was sampled so far."""
        ...

    async def abort_all(
        self, server: Server, requests: Mapping[str, GenerationRequest], turn: Callable[[], Awaitable[None]]
    ) -> None:
        """Abort ``requests``, one or more by their names, and no others: each in its ``turn``, or all by one message
        where the engine has one."""

        async def abort(name: str, request: GenerationRequest) -> None:
            await turn()
            await self.abort(server, request, name)

        await asyncio.gather(*itertools.starmap(abort, requests.items()))

    async def score(self, server: Server, text: Sequence[int], named: NamedVersion | None = None) -> list[float]:
        """Log-probs, at temperature 1, of every token after the first, from one forward pass over the whole text; by a
        version that is ``named`` only where a feature has servers hold some."""
        ...

    async def judge(self, server: Server, text: Sequence[int], top: int) -> TopLogprobs:
        """Scores as `score`, with the ``top`` most probable tokens at each place, from the same pass. Raises
        EngineError where the engine does not tell them."""
        raise EngineError(f"{server.url}: this engine tells no probable tokens of a prompt")

    async def tokens(self, server: Server) -> Hashable:
        """A value that changes whenever the server has made tokens. It must return at once, even if the server is
        busy."""
        ...

    async def gauges(self, server: Server) -> EngineGauges | None:
        """How busy it is, for the timeline; None: it does not tell."""
        return None


class WeightLoading(Protocol):
    """Loads, labels and checks an engine's weights. Every method raises as `Server` does."""

    async def load(
        self, server: Server, path: Path, version: int, *, private: Collection[str], straight: bool = False
    ) -> list[ChecksumReport]:
        """Load the mirror file ``path``. Returns each rank's report without ``private`` kinds.

        Cached prefixes are dropped, unless ``server.salt`` tells them from those to come.

        Completions are then labeled by `WeightLabels.candidate`. With ``straight`` take the weights from the learner's
        ranks, over the group joined last. Raises SyncError that names a wrong tensor.
        """
        ...

    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        """The box of each of the mirror file's tensors that each rank of the server holds."""
        ...

    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        """Join the server's ranks to the group at ``rendezvous``, with ranks from ``first`` on."""
        ...

    async def relabel(self, server: Server, version: int) -> None:
        """Label the loaded weights by `WeightLabels.verified`."""
        ...

    async def held(self, server: Server, path: Path, private: Collection[str] = ()) -> list[ChecksumReport]:
        """Each rank's report on the mirror file's tensors, without ``private`` kinds of parameters."""
        ...


class EngineControl(Protocol):
    """Starts and pauses an engine, and releases its memory. Every method but ``command`` raises as `Server` does."""

    def command(self, options: StartOptions) -> StartCommand:
        """The command that starts a server on one of its nodes. Raises ConfigError for options without support."""
        ...

    async def pause(self, server: Server, mode: RunningRequests) -> None:
        """Pause sampling between two tokens. Running requests wait, and with ``keep_cache`` their keys and values
        stay; with ``recompute`` these are dropped, and with ``abort`` the requests end.
        """
        ...

    async def resume(self, server: Server) -> None:
        """Resume sampling."""
        ...

    async def release(self, server: Server) -> None:
        """Release the memory of weights and cache, and so lose both. No request may run but cancelled ones."""
        ...

    async def reclaim(self, server: Server, what: Literal["weights", "cache"]) -> None:
        """Allocate released memory again: for weights before they are loaded, for the cache afterwards."""
        ...


class Adapter(Sampling, WeightLoading, EngineControl, Protocol):
    """One kind of engine: an engine's file has a class that implements it."""

    name: str
    module: str  # its interpreter must be able to import it
    tested: str  # the version it was tested with
    renormalizes_top_p: bool  # whether log-probs are of the distribution after top_p
    temperatures: tuple[float, float] = (MIN_TEMPERATURE, MAX_TEMPERATURE)  # that it samples at, besides 0
    variables: Mapping[str, str] = {}  # that its servers' environment cannot have, each with the reason
    hooks: Sequence[EngineHooks] = ()  # features' sides

    def batch_problem(self, extra: Sequence[str]) -> str:
        """Why it has no kernels that do not depend on the batch, with ``extra`` options; or empty."""
        return (
            f"rollout.server.batch_invariant=true: the adapter of {self.name} has no such mode; give its options in "
            "rollout.server.options, and leave the key out"
        )

    def options_problem(self, extra: Sequence[str]) -> str:
        """Why its servers cannot be started with ``extra`` options; or empty."""
        return ""

    def gpu_problem(self, quantization: str, extra: Sequence[str], capability: float) -> str:
        """Why it cannot serve weights of a format on GPUs of a compute capability, with ``extra`` options; or empty."""
        return ""


class ForeignEngine(Adapter):
    """What adapters of other projects' engines have in common. ``module`` is also the engine's name in features."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape, self._reader, self.labels = shape, ReportReader(), WeightLabels()
        self.hooks = engine_hooks(self.module, shape)

    @contextlib.asynccontextmanager
    async def _paused(self, server: Server) -> AsyncIterator[None]:
        """The server samples nothing inside. One that a push has paused stays so."""
        if server.paused:
            yield
            return
        server.paused = True
        try:
            await self.pause(server, "keep_cache")
            try:
                yield
            finally:
                await self.resume(server)
        finally:
            server.paused = False

    def _completion(
        self,
        answer: SampledColumns,
        request: GenerationRequest,
        spans: Iterable[tuple[int, int]],
        count: int,
        read_routes: Callable[[str | None, int, ModelShape], NDArray[Any]],
    ) -> Completion:
        """The first ``count`` tokens of an answer. ``spans``: the first token and the version of each of its parts."""
        columns = {}
        if "routes" in request.columns and count:
            columns["routes"] = read_routes(answer.routes, len(request.token_ids) + count - 1, self._shape)
        return Completion(
            token_ids=answer.token_ids[:count],
            logprobs=answer.logprobs[:count],
            finish_reason=answer.finish_reason,
            spans=with_adapter_version(request, make_spans(spans)),
            columns=columns,
        )


def version_fields(version: NamedVersion | None) -> dict[str, str]:
    """The part of a request that says by which version it is computed. Servers refuse an unknown name."""
    return {} if version is None else {version.field: version.name}


def normalize_options(options: str) -> tuple[str, ...]:
    """The words of a command line, its options' names with hyphens, as vLLM reads those with underscores."""
    words = shlex.split(options)
    return tuple(_NAME.sub(lambda name: name[0].replace("_", "-"), word, count=1) for word in words)


def variables_of(hooks: Sequence[EngineHooks], options: StartOptions) -> dict[str, str]:
    """The variables of a server that is started with ``options``, of what it does of features."""
    return {name: one.environment[name] for one in hooks if options.features.get(one.name) for name in one.environment}


def described_by(hooks: Sequence[EngineHooks], settings: Mapping[str, Any]) -> tuple[dict[str, object], list[str]]:
    """What a server with the engine's ``settings`` does of each feature, and why no run can use it."""
    found = {one.name: one.described(settings) for one in hooks}
    return {name: value for name, (value, _) in found.items()}, [why for _, whys in found.values() for why in whys]


def refused_option(
    extra: Sequence[str], *, keys: Mapping[str, str], hooks: Sequence[EngineHooks], reasons: Mapping[str, str]
) -> str:
    """Why ``extra`` cannot have an option that a key sets, ``keys`` of ``rollout.server`` by option, one that ``hooks``
    refuse, or one for which there are ``reasons``; or empty."""
    beginnings = {beginning: why for one in hooks for beginning, why in one.refused.items()}
    for given in extra:
        if (why := next((beginnings[one] for one in beginnings if given.startswith(one)), None)) is not None:
            return f"rollout.server.options has {given}: {why}"
        if (key := next((keys[option] for option in keys if same_option(given, option)), None)) is not None:
            return f"rollout.server.options has {given}, which rollout.server.{key} sets; use that key"
        if (why := next((reasons[option] for option in reasons if same_option(given, option)), None)) is not None:
            return f"rollout.server.options has {given}: {why}; leave it out"
    return ""


def refused_variables(environment: Mapping[str, str], reasons: Mapping[str, str]) -> list[str]:
    """A line for each variable of a server's environment for which there are ``reasons``, unless it is off."""
    return [
        f"{name}={environment[name]} in the environment of servers: {why}; unset it"
        for name, why in reasons.items()
        if environment.get(name, "").lower() not in _OFF
    ]


MOVES_EXPERTS = "it moves experts between ranks, but pushes send them to where they were"
"""The reason of an option by which an engine balances experts."""


def option_values(extra: Sequence[str], *options: str) -> list[tuple[str, str]]:
    """Each word of a command line that engines may read as one of ``options``, with its keys (``--option.key``) and
    without its value, and that value: behind a space or an equals sign."""
    out = []
    for given, after in itertools.pairwise((*extra, "")):
        if any(same_option(given, option) for option in options):
            name, equals, value = given.partition("=")
            out.append((name, value if equals else after))
    return out


def option_value(extra: Sequence[str], option: str) -> str | None:
    """The value that a command line's ``option`` has, of several the last, as engines read it; None: not given."""
    return next((value for _, value in reversed(option_values(extra, option))), None)


class UnknownWeights(EngineError):
    """A server sampled with weights that no run pushed, as one that was started again."""


class WeightsOfOtherRun(EngineError):
    """A server sampled with weights that another run has pushed to it."""


class WeightLabels:
    """Labels of the weights that one start of a run pushes: versions, and a word that no other start has.

    Two runs may be given one server by address. Each pushes to it, and samples between its own pushes with the weights
    of the other, whose versions may be the same.
    """

    def __init__(self) -> None:
        self.start = uuid.uuid4().hex

    def candidate(self, version: int) -> str:
        """The label of ``version`` before it is verified."""
        return f"{version}?@{self.start}"

    def verified(self, version: int) -> str:
        """The label of ``version`` once it is."""
        return f"{version}@{self.start}"

    def version(self, label: object) -> int:
        """The version that a label names. Raises UnknownWeights for a label that no run set, as those of a server that
        was started again, and WeightsOfOtherRun for one that another start set."""
        found = _LABEL.fullmatch(str(label))
        if found is None:
            raise UnknownWeights(
                f"the server sampled with weights labeled {label!r}, which this run did not push; check that no other "
                "run uses the server and that nobody restarted it"
            )
        if found["start"] != self.start:
            raise WeightsOfOtherRun(
                "another run has pushed its weights to the server, and this one sampled with them: an evaluation, an "
                "earlier start of this run that goes on, or somebody else's. End it, or give it other servers "
                "(rollout.server.addresses); then go on with --resume"
            )
        return int(found["version"])
