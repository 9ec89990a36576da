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

from rl_megatron.columns import ColumnData
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
_NAME = re.compile(r"^--[^.=]+")  # an option's name, up to its value or a key of it


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The options to start a server with."""

    python: Path
    model_folder: Path
    config_folder: Path  # holds the model's config.json without weights
    host: str  # this node's address, the only one that the server listens on
    port: int  # first of a block of neighboring ports that it uses, on ``head_address``
    num_nodes: int = 1  # number of nodes that the server spans
    node_rank: int = 0  # index of this node among them; the first answers requests
    head_address: str  # address of the first node
    device: str  # cpu or an accelerator
    dtype: str
    quantization: str  # format of its weights, or none
    max_length: int  # tokens of a prompt and its completion
    max_num_seqs: int
    max_completions: int = 1  # maximum for one request
    tp: int
    pp: int
    dp: int  # replicas of the attention
    ep: int
    memory_fraction: float | None
    timeout_seconds: float  # limit for each part of a weight update
    colocated: bool  # it releases memory between phases
    batch_invariant: bool  # a token's log-prob must not depend on its batch
    features: Mapping[str, object] = field(default_factory=dict)  # settings of each feature for servers, by name
    stops: bool = False  # requests have texts that end completions
    extra_options: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """The number of processes of the whole server."""
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
    problems: tuple[str, ...]  # reasons why a run cannot use it, each with a fix
    features: Mapping[str, object] = field(default_factory=dict)  # its settings of each feature, by name
    has_priorities: bool = False  # it orders requests by their priority


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGauges:
    """The load of a server, over all of its schedulers."""

    running: int  # requests
    waiting: int
    cache: float | None = None  # fraction of it in use, if the server reports that
    tokens: float | None = None  # sampled since its start, or:
    tokens_per_second: float | None = None  # their recent speed, if the server reports that itself


class Sampling(Protocol):
    """Samples, scores and describes a server. Every method raises as `Server` does."""

    async def ping(self, server: Server) -> None:
        """Checks that every rank of an idle server answers, for engines with a /health that does not ask all ranks."""

    async def describe(self, server: Server) -> ServerInfo:
        """Asks the server for its properties and for what it lacks."""
        ...

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        """Returns all completions of ``request``, including aborted ones. ``request_id`` names it for ``abort``."""
        ...

    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        """Aborts a request. Its response has the tokens sampled so far."""
        ...

    async def abort_all(
        self, server: Server, requests: Mapping[str, GenerationRequest], turn: Callable[[], Awaitable[None]]
    ) -> None:
        """Aborts ``requests``, given by name, and no others. It awaits ``turn`` before each, or sends one message for
        all if the engine has one."""

        async def abort(name: str, request: GenerationRequest) -> None:
            await turn()
            await self.abort(server, request, name)

        await asyncio.gather(*itertools.starmap(abort, requests.items()))

    async def score(self, server: Server, text: Sequence[int], named: NamedVersion | None = None) -> list[float]:
        """Returns log-probs at temperature 1 of every token after the first, from one forward pass over the text.
        A version is ``named`` only if a feature makes servers hold several."""
        ...

    async def score_top(self, server: Server, text: Sequence[int], top: int) -> TopLogprobs:
        """Scores like `score`, with the ``top`` most probable tokens at each position, from the same pass. Raises
        EngineError if the engine does not report them."""
        raise EngineError(f"{server.url}: this engine tells no probable tokens of a prompt")

    async def tokens(self, server: Server) -> Hashable:
        """Returns a value that changes whenever the server has generated tokens. Must return immediately, even if the
        server is busy."""
        ...

    async def gauges(self, server: Server) -> EngineGauges | None:
        """Returns the server's load for the timeline, or None if it does not report it."""
        return None


class WeightLoading(Protocol):
    """Loads, labels and checks an engine's weights. Every method raises as `Server` does."""

    async def load(
        self, server: Server, path: Path, version: int, *, private: Collection[str], straight: bool = False
    ) -> list[ChecksumReport]:
        """Loads the mirror file ``path``. Returns each rank's report without ``private`` kinds.

        Cached prefixes are dropped, unless ``server.salt`` distinguishes them from later ones.

        Completions are then labeled by `WeightLabels.candidate`. With ``straight`` the weights come from the learner's
        ranks, over the group joined last. Raises SyncError that names a wrong tensor.
        """
        ...

    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        """Returns the box of each of the mirror file's tensors that each rank of the server holds."""
        ...

    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        """Joins the server's ranks to the process group at ``rendezvous``, with ranks from ``first`` on."""
        ...

    async def relabel(self, server: Server, version: int) -> None:
        """Labels the loaded weights by `WeightLabels.verified`."""
        ...

    async def rank_reports(self, server: Server, path: Path, private: Collection[str] = ()) -> list[ChecksumReport]:
        """Returns each rank's report on the mirror file's tensors, without ``private`` kinds of parameters."""
        ...


class EngineControl(Protocol):
    """Starts and pauses an engine, and releases its memory. Every method but ``command`` raises as `Server` does."""

    def command(self, options: StartOptions) -> StartCommand:
        """Returns the command that starts a server on one of its nodes. Raises ConfigError for unsupported options."""
        ...

    async def pause(self, server: Server, mode: RunningRequests) -> None:
        """Pauses sampling between two tokens. Running requests wait: ``keep_cache`` keeps their keys and values, and
        ``recompute`` drops them. With ``abort`` the requests end.
        """
        ...

    async def resume(self, server: Server) -> None:
        """Resumes sampling."""
        ...

    async def release_memory(self, server: Server) -> None:
        """Releases the memory of weights and cache and so loses both. Only canceled requests may still run."""
        ...

    async def resume_memory(self, server: Server, what: Literal["weights", "cache"]) -> None:
        """Allocates released memory again: for weights before they are loaded, for the cache afterwards."""
        ...


class Adapter(Sampling, WeightLoading, EngineControl, Protocol):
    """The interface of one kind of engine. Each engine's file has a class that implements it."""

    name: str
    module: str  # the server's interpreter must be able to import it
    tested_version: str  # release that it was tested with
    renormalizes_top_p: bool  # log-probs are of the distribution after top_p
    temperatures: tuple[float, float] = (MIN_TEMPERATURE, MAX_TEMPERATURE)  # range that it samples at, besides 0
    variables: Mapping[str, str] = {}  # name -> reason, of variables that its servers cannot have
    hooks: Sequence[EngineHooks] = ()  # features' sides

    def batch_problem(self, extra: Sequence[str]) -> str:
        """Returns why ``extra`` options allow no batch-invariant kernels, or an empty string."""
        return (
            f"rollout.server.batch_invariant=true: the adapter of {self.name} has no such mode; give its options in "
            "rollout.server.options, and leave the key out"
        )

    def options_problem(self, extra: Sequence[str]) -> str:
        """Returns why its servers cannot start with ``extra`` options, or an empty string."""
        return ""

    def gpu_problem(self, quantization: str, extra: Sequence[str], capability: float) -> str:
        """Returns why it cannot serve a weight format on GPUs of this capability with ``extra`` options, or ""."""
        return ""


class ForeignEngine(Adapter):
    """The base of adapters to other projects' engines. ``module`` is also the engine's name in features."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape, self._reader, self.labels = shape, ReportReader(), WeightLabels()
        self.hooks = engine_hooks(self.module, shape)

    @contextlib.asynccontextmanager
    async def _paused(self, server: Server) -> AsyncIterator[None]:
        """Context in which the server samples nothing. A server that a push has paused stays paused."""
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
        """Returns the first ``count`` tokens of ``answer``. ``spans``: (first token, version) of each part."""
        columns: dict[str, ColumnData] = {}
        if "routes" in request.columns and count:
            columns["routes"] = read_routes(answer.routes, len(request.token_ids) + count - 1, self._shape)
        if "kept" in request.columns and count:
            if answer.kept is None or len(answer.kept) < count:
                raise EngineError(f"it returned {len(answer.kept or ())} sampling masks of {count} tokens")
            columns["kept"] = answer.kept[:count]
        return Completion(
            token_ids=answer.token_ids[:count],
            logprobs=answer.logprobs[:count],
            finish_reason=answer.finish_reason,
            spans=with_adapter_version(request, make_spans(spans)),
            columns=columns,
        )


def version_fields(version: NamedVersion | None) -> dict[str, str]:
    """Returns the fields of a request that select the version. Servers refuse an unknown name."""
    return {} if version is None else {version.field: version.name}


def normalize_options(options: str) -> tuple[str, ...]:
    """Returns the words of a command line, with hyphens in options' names: vLLM reads underscores as hyphens."""
    words = shlex.split(options)
    return tuple(_NAME.sub(lambda name: name[0].replace("_", "-"), word, count=1) for word in words)


def hook_variables(hooks: Sequence[EngineHooks], options: StartOptions) -> dict[str, str]:
    """Returns the environment variables that features need in a server started with ``options``."""
    return {name: one.environment[name] for one in hooks if options.features.get(one.name) for name in one.environment}


def describe_settings(hooks: Sequence[EngineHooks], settings: Mapping[str, Any]) -> tuple[dict[str, object], list[str]]:
    """Returns each feature's settings in a server with ``settings``, and the reasons why no run can use it."""
    found = {one.name: one.described(settings) for one in hooks}
    return {name: value for name, (value, _) in found.items()}, [why for _, whys in found.values() for why in whys]


def refused_option(
    extra: Sequence[str], *, keys: Mapping[str, str], hooks: Sequence[EngineHooks], reasons: Mapping[str, str]
) -> str:
    """Returns why ``extra`` cannot have one of its options, or an empty string. It refuses options that a key sets
    (option -> ``keys`` of ``rollout.server``), that ``hooks`` refuse, or that have ``reasons``."""
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
    """Returns a line for each variable of a server's environment that has ``reasons``, unless it is off."""
    return [
        f"{name}={environment[name]} in the environment of servers: {why}; unset it"
        for name, why in reasons.items()
        if environment.get(name, "").lower() not in _OFF
    ]


MOVES_EXPERTS = "it moves experts between ranks, but pushes send them to where they were"
"""The reason to refuse an option by which an engine balances experts."""


def option_values(extra: Sequence[str], *options: str) -> list[tuple[str, str]]:
    """Returns (name, value) of each word that engines may read as one of ``options``. The name includes keys
    (``--option.key``); the value follows a space or an equals sign."""
    out = []
    for given, after in itertools.pairwise((*extra, "")):
        if any(same_option(given, option) for option in options):
            name, equals, value = given.partition("=")
            out.append((name, value if equals else after))
    return out


def option_value(extra: Sequence[str], option: str) -> str | None:
    """Returns the value of a command line's last ``option``, which engines use, or None if it is absent."""
    return next((value for _, value in reversed(option_values(extra, option))), None)


class UnknownWeights(EngineError):
    """A server sampled with weights that no run pushed, for example after a restart."""


class WeightsOfOtherRun(EngineError):
    """A server sampled with weights that another run has pushed to it."""


class WeightLabels:
    """Labels of the weights that one start of a run pushes: the version, and a word that is unique to the start.

    Two runs may be given one server by address. Each pushes to it, and between its own pushes it may sample with the
    other's weights, which may have the same versions.
    """

    def __init__(self) -> None:
        self.start = uuid.uuid4().hex

    def candidate(self, version: int) -> str:
        """Returns the label of ``version`` before it is verified."""
        return f"{version}?@{self.start}"

    def verified(self, version: int) -> str:
        """Returns the label of ``version`` once it is verified."""
        return f"{version}@{self.start}"

    def version(self, label: object) -> int:
        """Returns the version that a label names. Raises UnknownWeights for a label that no run set, as after a
        server's restart, and WeightsOfOtherRun for one that another start set."""
        found = _LABEL.fullmatch(str(label))
        if found is None:
            raise UnknownWeights(
                f"the server sampled with weights labeled {label!r}, which this run did not push; check that no other "
                "run uses the server, and that it was not restarted"
            )
        if found["start"] != self.start:
            raise WeightsOfOtherRun(
                "another run has pushed its weights to the server, and this one sampled with them. It may be an "
                "evaluation, an earlier start of this run that still runs, or another user's run. End it, or give it "
                "other servers (rollout.server.addresses); then continue with --resume"
            )
        return int(found["version"])
