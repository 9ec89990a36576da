"""The form of SGLang 0.5.21's answers (srt/managers/tokenizer_manager.py)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from rl_megatron.errors import CorruptionError, EngineError
from rl_megatron.models.shape import ModelShape
from rl_megatron.rollout.servers.answers import checked_routes
from rl_megatron.rollout.servers.decoding import (
    Judged,
    LabelledSpan,
    SampledColumns,
    as_form,
    logprob_column,
    token_column,
)
from rl_megatron.types import FinishReason, Routes

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
    spec_num_proposed_drafts: int = 0
    spec_num_correct_drafts: int = 0


class _Sampled(msgspec.Struct):
    meta_info: _Meta


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


def read_sampled(text: bytes) -> list[SampledColumns]:
    """The completions, in the order asked. Raises ValueError as `as_form` does."""
    return [_answer(one.meta_info) for one in as_form(text, list[_Sampled])]


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


def read_routes(given: str | None, positions: int, shape: ModelShape) -> Routes:
    """Decode routes: little-endian int32 in base64, without a shape."""
    try:
        experts = np.frombuffer(base64.b64decode(given or ""), "<i4")
    except ValueError as error:
        raise EngineError(f"its routes are not an array: {error!s:.200}") from error
    return checked_routes(experts, positions=positions, shape=shape)


def _answer(said: _Meta) -> SampledColumns:
    tokens = said.output_token_logprobs
    return SampledColumns(
        token_ids=token_column([one.token for one in tokens]),
        logprobs=logprob_column([one.logprob for one in tokens]),
        finish_reason=said.finish_reason.type,
        spans=said.weight_versions or [LabelledSpan(start=0, version=said.weight_version)],
        routes=said.routed_experts,
        proposed=said.spec_num_proposed_drafts,
        accepted=said.spec_num_correct_drafts,
    )
