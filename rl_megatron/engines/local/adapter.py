"""The adapter for servers of the in-process engine, which run as separate processes on this machine's CPUs.

Adapter and server exchange the JSON that this file defines; columns are base64.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from typing_extensions import TypedDict, override

from rl_megatron.columns import read_column, written_column
from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.engines.adapter import Adapter, EngineGauges, ServerInfo, StartCommand, StartOptions
from rl_megatron.engines.answers import decode_as
from rl_megatron.engines.http import AttemptFailed, Server
from rl_megatron.errors import ConfigError, SyncError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Completion, FinishReason, GenerationRequest, NamedVersion, SamplingParams, Span
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checks.compare import ReportReader
from rl_megatron.weights.checks.reports import ChecksumReport
from rl_megatron.weights.layouts.recorded import Boxes

PROTOCOL = "5"
"""The protocol's version, which must be equal at both ends."""


class CompletionRow(TypedDict):
    """A `Completion`: little-endian columns, spans as (first token, version)."""

    tokens: str
    logprobs: str
    finish_reason: FinishReason
    spans: list[tuple[int, int]]
    columns: dict[str, dict[str, Any]]  # name -> column as `written_column` encodes it


SAID = TypeAdapter(list[CompletionRow])


def encode_generation(name: str, request: GenerationRequest) -> dict[str, object]:
    """Returns the JSON of a request with the given ``name``."""
    return {
        "name": name,
        "token_ids": request.token_ids,
        "num_completions": request.num_completions,
        "params": asdict(request.params),
        "columns": request.columns,
    }


def decode_request(body: Mapping[str, Any]) -> tuple[str, GenerationRequest]:
    """Returns the inverse of `encode_generation`."""
    params = dict(body["params"])
    stops, texts = tuple(params.pop("stop_token_ids")), tuple(params.pop("stop"))
    return body["name"], GenerationRequest(
        id=body["name"],
        token_ids=tuple(body["token_ids"]),
        num_completions=body["num_completions"],
        params=SamplingParams(stop_token_ids=stops, stop=texts, **params),
        columns=tuple(body["columns"]),
    )


def encode_completions(completions: Sequence[Completion]) -> list[CompletionRow]:
    """Returns the completions' JSON."""
    return [
        CompletionRow(
            tokens=base64.b64encode(one.token_ids.astype("<i4").tobytes()).decode(),
            logprobs=base64.b64encode(one.logprobs.astype("<f4").tobytes()).decode(),
            finish_reason=one.finish_reason,
            spans=[(span.start, span.version) for span in one.spans],
            columns={name: written_column(column, _encoded) for name, column in one.columns.items()},
        )
        for one in completions
    ]


def decode_completions(answer: Sequence[CompletionRow]) -> list[Completion]:
    """Returns the inverse of `encode_completions`. Raises ValueError if columns are not base64 of whole numbers."""
    return [
        Completion(
            token_ids=np.frombuffer(base64.b64decode(one["tokens"], validate=True), "<i4"),
            logprobs=np.frombuffer(base64.b64decode(one["logprobs"], validate=True), "<f4"),
            finish_reason=one["finish_reason"],
            spans=tuple(Span(start, version) for start, version in one["spans"]),
            columns={name: read_column(said, _decoded) for name, said in one["columns"].items()},
        )
        for one in answer
    ]


def _encoded(array: NDArray[np.uint8]) -> str:
    return base64.b64encode(array.data).decode()


def _decoded(given: Any) -> NDArray[np.uint8]:
    return np.frombuffer(base64.b64decode(given, validate=True), np.uint8)


class EmbeddedAdapter(Adapter):
    """The adapter for ``rollout.engine=local`` with ``rollout.server.replicas``."""

    name = "local"
    module = "rl_megatron"
    tested_version = PROTOCOL
    renormalizes_top_p = True

    def __init__(self, shape: ModelShape) -> None:
        self._shape, self._reader = shape, ReportReader()

    @override
    def command(self, options: StartOptions) -> StartCommand:
        if options.extra_options:
            raise ConfigError(
                f"rollout.server.options={' '.join(options.extra_options)}: servers of rollout.engine=local have "
                "none; leave "
                "the key out"
            )
        return StartCommand(
            arguments=(
                str(options.python),
                *("-P", "-m", "rl_megatron.engines.local.server", "--model", str(options.config_folder)),
                *("--host", options.host, "--port", str(options.port), "--dtype", options.dtype),
                *("--max-length", str(options.max_length), "--slots", str(options.max_num_seqs)),
                *(("--tokenizer", str(options.model_folder)) if options.stops else ()),
            ),
            environment={},
        )

    @override
    async def describe(self, server: Server) -> ServerInfo:
        found = await server.get("/openapi.json")
        return ServerInfo(
            version=str(found.get("protocol", "unknown")),
            dtype=str(found["dtype"]),
            architecture=str(found["architecture"]),
            max_length=int(found["max_length"]),
            problems=(),
        )

    @override
    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        answer = await server.post_sampling("/generate", encode_generation(request_id, request), SAID.validate_json)
        try:
            return decode_completions(answer)
        except ValueError as error:
            raise AttemptFailed(f"{server.url}/generate: its columns are not base64 of numbers: {error}") from error

    @override
    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        await server.post("/abort", {"name": request_id})

    @override
    async def score(self, server: Server, text: Sequence[int], named: NamedVersion | None = None) -> list[float]:
        found: list[float] = await server.post("/score", {"text": list(text)})
        return found

    @override
    async def tokens(self, server: Server) -> int:
        return int(await server.get("/tokens"))

    @override
    async def gauges(self, server: Server) -> EngineGauges:
        return EngineGauges(**await server.get("/gauges"))

    @override
    async def pause(self, server: Server, mode: RunningRequests) -> None:
        await server.post("/pause", {"mode": mode})

    @override
    async def resume(self, server: Server) -> None:
        await server.post("/resume")

    @override
    async def load(
        self, server: Server, path: Path, version: int, *, private: Collection[str], straight: bool = False
    ) -> list[ChecksumReport]:
        if straight:
            raise SyncError(f"{server.url}: servers of rollout.engine=local load files; set weights.transport=auto")
        body = {"path": str(path), "version": version, "known": self._reader.known}
        return [await server.post_report("/load", body, self._reader.read)]

    @override
    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        return [await server.post_report("/boxes", None, partial(decode_as, form=dict[str, Box]))]

    @override
    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        raise SyncError(f"{server.url}: servers of rollout.engine=local join no group; set weights.transport=auto")

    @override
    async def relabel(self, server: Server, version: int) -> None:
        """Does nothing: loaded weights are labeled with their version, and are served after this."""

    @override
    async def release_memory(self, server: Server) -> None:
        """Does nothing: on CPUs servers do not release their memory."""

    @override
    async def resume_memory(self, server: Server, what: Literal["weights", "cache"]) -> None:
        """Does nothing, like `release`."""

    @override
    async def rank_reports(self, server: Server, path: Path, private: Collection[str] = ()) -> list[ChecksumReport]:
        return [await server.post_report("/held", {"known": self._reader.known}, self._reader.read)]
