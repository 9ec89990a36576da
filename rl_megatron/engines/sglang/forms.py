"""SGLang 0.5.21's requests (srt/managers/io_struct.py) and answers (srt/managers/tokenizer_manager.py).

Orders to the loader in its schedulers (`worker.load`) stand here too, and the files that the loader answers in.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rl_megatron.engines.answers import (
    Judged,
    LabelledSpan,
    SampledColumns,
    as_form,
    checked_routes,
    logprob_column,
    token_column,
)
from rl_megatron.engines.http import Refused, Server
from rl_megatron.errors import CorruptionError, EngineError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import FinishReason, GenerationRequest


def names(request: GenerationRequest, request_id: str) -> list[str]:
    """The name of each of its completions."""
    return [f"{request_id} {number}" for number in range(request.num_completions)]


def scoring(server: Server, text: Sequence[int]) -> dict[str, object]:
    """A request for the log-probs of a text, with one token behind it."""
    sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
    given = {"input_ids": list(text), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return {**given, **labels(server, 0)}


def labels(server: Server, birth: int) -> dict[str, object]:
    """Older requests go first, since higher priorities do. The key is that by which prefixes that other weights cached
    are not found."""
    first = {"priority": -birth} if server.priorities else {}
    return {**first, **({} if server.salt is None else {"extra_key": server.salt})}


def packed(order: Mapping[str, object]) -> str:
    """An order as the name of a tensor without numbers, as /update_weights_from_tensor takes those of one rank."""
    return base64.b64encode(pickle.dumps([(json.dumps(order), torch.empty(0))])).decode()


@asynccontextmanager
async def update(server: Server, to: Mapping[str, str]) -> AsyncIterator[None]:
    """A weight update of what ``to`` selects. First ends one that a killed run left open: SGLang refuses a second."""
    try:
        await server.post("/begin_weight_update", to)
    except Refused:
        with contextlib.suppress(Refused):
            await server.post("/end_weight_update", {})
        await server.post("/begin_weight_update", to)
    try:
        yield
    finally:
        await server.post("/end_weight_update", {})


def loaders_answers(path: Path, ranks: int) -> list[bytes]:
    """Read and remove the answer file of each rank's loader: ``path`` with the rank's number behind a dot.

    Raises EngineError where one is missing.
    """
    files = [path.with_name(f"{path.name}.{rank}") for rank in range(ranks)]
    try:
        said = [file.read_bytes() for file in files]
    except FileNotFoundError as error:
        raise EngineError(
            f"a loader's answer is not here: {error.filename}; each node of the server must see {path.parent}, and be "
            "able to write there: set weights.folder to a folder that this machine and the server see"
        ) from error
    for file in files:
        file.unlink()
    return said


T = TypeVar("T")


class _Token(msgspec.Struct, array_like=True, gc=False):
    """[log-prob, token id, text]."""

    logprob: float
    token: int


class _ScoredToken(msgspec.Struct, array_like=True, gc=False):
    logprob: float | None  # the first has none


class _Finish(msgspec.Struct):
    type: FinishReason


class _Meta(msgspec.Struct):
    output_token_logprobs: list[_Token]
    finish_reason: _Finish
    weight_version: Any = None
    weight_versions: list[LabelledSpan] | None = None
    routed_experts: str | None = None


class _ScoredMeta(msgspec.Struct):
    input_token_logprobs: list[_ScoredToken]


class _Scored(msgspec.Struct):
    meta_info: _ScoredMeta


class _TopMeta(_ScoredMeta):
    input_top_logprobs: list[list[_Token] | None] = []  # the first has none, and without ``top`` there is no list


class _TopScored(msgspec.Struct):
    meta_info: _TopMeta


class _Refused(msgspec.Struct):
    error: str | None = None


def read_loaders(text: bytes, *, read: Callable[[bytes], T], rank: int) -> T:
    """The answer of a rank's loader by ``read``. Raises CorruptionError with its error, and EngineError."""
    try:
        if (error := as_form(text, _Refused).error) is not None:
            raise CorruptionError(f"rank {rank}: {error}")
        return read(text)
    except ValueError as error:
        raise EngineError(f"rank {rank}: its loader's answer has another form: {error!s:.300}") from error


@cache
def _sampled_form(counters: tuple[str, ...]) -> Any:
    meta = msgspec.defstruct("_CountedMeta", [(name, int, 0) for name in counters], bases=(_Meta,))
    return list[msgspec.defstruct("_Sampled", [("meta_info", meta)])]  # type: ignore[misc]


def read_sampled(text: bytes, counters: tuple[str, ...] = ()) -> list[SampledColumns]:
    """The completions, in the order asked, with more integer fields of each, the ``counters``. Raises ValueError as
    `as_form` does."""
    said = [one.meta_info for one in as_form(text, _sampled_form(counters))]
    return [_answer(one, tuple(getattr(one, name) for name in counters)) for one in said]


def read_scored(text: bytes) -> list[float]:
    """Log-probs of the tokens after the first that have one. Raises ValueError as `as_form` does."""
    said = as_form(text, _Scored).meta_info.input_token_logprobs[1:]
    return [one.logprob for one in said if one.logprob is not None]


def read_judged(answer: bytes, *, length: int, top: int) -> Judged:
    """What it says of a text of ``length`` tokens. Raises ValueError as `as_form` does, and where a place has fewer
    probable tokens than ``top``, as of a vocabulary of fewer."""
    said = as_form(answer, _TopScored).meta_info
    logprobs = [one.logprob for one in said.input_token_logprobs[1:] if one.logprob is not None]
    places = [place or [] for place in said.input_top_logprobs[1:]] if top else [[] for _ in logprobs]
    if len(logprobs) != length - 1 or len(places) != length - 1:
        raise ValueError(f"{len(logprobs)} log-probs and {len(places)} places of {length - 1}")
    if any(len(place) != top for place in places):
        raise ValueError(f"a place has {min(map(len, places))} probable tokens, {top} were asked for")
    shape = len(places), top
    return Judged(
        logprobs=logprob_column(logprobs),
        top_ids=np.array([one.token for place in places for one in place], np.int32).reshape(shape),
        top_logprobs=np.array([one.logprob for place in places for one in place], np.float32).reshape(shape),
    )


def read_routes(given: str | None, positions: int, shape: ModelShape) -> NDArray[Any]:
    """Decode routes: little-endian int32 in base64, without a shape."""
    try:
        experts = np.frombuffer(base64.b64decode(given or ""), "<i4")
    except ValueError as error:
        raise EngineError(f"its routes are not an array: {error!s:.200}") from error
    return checked_routes(experts, positions=positions, shape=shape)


def _answer(said: _Meta, counts: tuple[int, ...]) -> SampledColumns:
    tokens = said.output_token_logprobs
    return SampledColumns(
        token_ids=token_column([one.token for one in tokens]),
        logprobs=logprob_column([one.logprob for one in tokens]),
        finish_reason=said.finish_reason.type,
        spans=said.weight_versions or [LabelledSpan(start=0, version=said.weight_version)],
        routes=said.routed_experts,
        counts=counts,
    )
