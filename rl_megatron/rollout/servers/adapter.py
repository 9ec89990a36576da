"""What an adapter of an engine says and takes: three Protocols, and the data that passes through them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rl_megatron.errors import EngineError
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Completion, GenerationRequest
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.layouts.recorded import Boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What a server that is started must know."""

    python: Path
    model_folder: Path
    bare_folder: Path  # with the model's config.json alone
    host: str  # the one address that it listens on
    port: int  # there
    device: str  # cpu or an accelerator
    dtype: str
    quantization: str  # format of its weights, or none
    max_length: int  # tokens of a prompt and its completion
    slots: int
    tp: int
    memory_fraction: float | None
    colocated: bool  # it gives memory back between phases
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
    problems: tuple[str, ...]  # what keeps it from being used, each with what to do
    no_routes: str | None = None  # why it returns none


class Sampling(Protocol):
    """What an engine samples, and what it says of itself. Every method raises as `Server` does."""

    async def describe(self, server: Server) -> Description:
        """What the server is, and what it lacks."""
        ...

    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        """All completions of ``request``, aborted ones too. ``request_id`` is a name for ``abort``."""
        ...

    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        """End a request; what was sampled of it is its answer."""
        ...

    async def score(self, server: Server, text: Sequence[int]) -> list[float]:
        """Log-probs, at temperature 1, of every token behind the first, from one forward of the whole text."""
        ...

    async def tokens(self, server: Server) -> Hashable:
        """What tells whether the server makes tokens: it is another whenever it made some since. At once, also of a
        server that is busy."""
        ...


class Loading(Protocol):
    """The weights that an engine holds; their versions are labels there. Every method raises as `Server` does."""

    async def load(
        self,
        server: Server,
        path: Path,
        version: int,
        *,
        private: Collection[str],
        straight: bool = False,
    ) -> list[Report]:
        """Load the mirror file ``path``, drop cached prefixes; what each rank holds then, but for ``private`` kinds.

        What is sampled then is labelled as `candidate` says. ``straight``: take what the learner's ranks send over the
        group joined last. Raises SyncError naming a tensor that is wrong.
        """
        ...

    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        """The box of each tensor of the mirror file that each rank of the server holds."""
        ...

    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        """Make the server's ranks ``first`` and those behind it of the group that meets at ``rendezvous``."""
        ...

    async def relabel(self, server: Server, version: int) -> None:
        """Label the weights that it holds as ``version``: they are verified."""
        ...

    async def held(self, server: Server, path: Path, private: Collection[str] = ()) -> list[Report]:
        """What each rank of the server holds of the mirror file's tensors, but for ``private`` kinds of parameters."""
        ...


class Running(Protocol):
    """How an engine starts, pauses and lends its memory. Every method but ``command`` raises as `Server` does."""

    def command(self, options: StartOptions) -> Command:
        """How a server is started. Raises ConfigError for what it cannot do."""
        ...

    async def pause(self, server: Server, mode: Literal["keep", "abort"]) -> None:
        """Stop sampling; running requests wait, or end as they are."""
        ...

    async def resume(self, server: Server) -> None:
        """Sample on."""
        ...

    async def release(self, server: Server) -> None:
        """Give the memory of weights and cache back; both are lost. Nothing may run."""
        ...

    async def reclaim(self, server: Server, what: Literal["weights", "cache"]) -> None:
        """Take memory again that was given back: for weights before they are loaded, for the cache after."""
        ...


class Adapter(Sampling, Loading, Running, Protocol):
    """One kind of engine: an engine's file has a class that implements it."""

    name: str
    module: str  # what must be importable in its interpreter
    tested: str  # version
    renormalises_top_p: bool  # whether log-probs are of the distribution that top_p leaves


class ForeignWeights(EngineError):
    """A server sampled with weights that no push of this run brought."""


def candidate(version: int) -> str:
    """The label of weights that are not verified yet."""
    return f"{version}?"


def version_of(label: object) -> int:
    """The version that a label names. Raises ForeignWeights for one that this trainer did not give."""
    text = str(label).removesuffix("?")
    if not text.isdecimal():
        raise ForeignWeights(
            f"the server sampled with weights labelled {label!r}, which no push of this run gave: was it started again?"
        )
    return int(text)
