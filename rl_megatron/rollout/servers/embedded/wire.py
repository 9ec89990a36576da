"""What the adapter and the server of the in-process engine say to each other, in JSON; columns are base64."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from rl_megatron.types import Completion, FinishReason, GenerationRequest, Routes, SamplingParams, Span

PROTOCOL = "4"
"""Both ends have the same."""


class SaidRoutes(TypedDict):
    """`Routes`."""

    data: str
    shape: tuple[int, int, int]


class Said(TypedDict):
    """A `Completion`: little-endian columns, spans as (first token, version)."""

    tokens: str
    logprobs: str
    finish_reason: FinishReason
    spans: list[tuple[int, int]]
    routes: SaidRoutes | None


SAID = TypeAdapter(list[Said])


def asked(name: str, request: GenerationRequest) -> dict[str, object]:
    """A request that the server knows by ``name``."""
    return {
        "name": name,
        "token_ids": request.token_ids,
        "num_completions": request.num_completions,
        "params": asdict(request.params),
        "routes": request.routes,
    }


def request_of(body: Mapping[str, Any]) -> tuple[str, GenerationRequest]:
    """The inverse of `asked`."""
    params = dict(body["params"])
    stops, texts = tuple(params.pop("stop_token_ids")), tuple(params.pop("stop"))
    return body["name"], GenerationRequest(
        id=body["name"],
        token_ids=tuple(body["token_ids"]),
        num_completions=body["num_completions"],
        params=SamplingParams(stop_token_ids=stops, stop=texts, **params),
        routes=body["routes"],
    )


def answer_of(completions: Sequence[Completion]) -> list[Said]:
    """The completions' JSON."""
    return [
        Said(
            tokens=base64.b64encode(one.token_ids.astype("<i4").tobytes()).decode(),
            logprobs=base64.b64encode(one.logprobs.astype("<f4").tobytes()).decode(),
            finish_reason=one.finish_reason,
            spans=[(span.start, span.version) for span in one.spans],
            routes=None if one.routes is None else _of_routes(one.routes),
        )
        for one in completions
    ]


def completions_of(answer: Sequence[Said]) -> list[Completion]:
    """The inverse of `answer_of`. Raises ValueError for what is no base64 of whole numbers."""
    return [
        Completion(
            token_ids=np.frombuffer(base64.b64decode(one["tokens"], validate=True), "<i4"),
            logprobs=np.frombuffer(base64.b64decode(one["logprobs"], validate=True), "<f4"),
            finish_reason=one["finish_reason"],
            spans=tuple(Span(start, version) for start, version in one["spans"]),
            routes=None if one["routes"] is None else _routes_of(one["routes"]),
        )
        for one in answer
    ]


def _of_routes(routes: Routes) -> SaidRoutes:
    return SaidRoutes(data=base64.b64encode(routes.data).decode(), shape=routes.shape)


def _routes_of(given: SaidRoutes) -> Routes:
    return Routes(data=base64.b64decode(given["data"], validate=True), shape=given["shape"])
