"""Decodes servers' responses into columns, checks them, and joins completions that a weight update interrupted.

Fields that a type does not name are skipped. This file imports neither torch nor pydantic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_megatron.columns import ColumnData, LogProbs, Ragged, TokenIds, one_after_the_other
from rl_megatron.errors import EngineError
from rl_megatron.feature import declared_columns
from rl_megatron.models.shape import ModelShape
from rl_megatron.seeds import text_seed
from rl_megatron.types import Completion, FinishReason, GenerationRequest, Span

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}  # form -> decoder: making one takes longer than using it


class LabeledSpan(msgspec.Struct, frozen=True):
    """A part of a completion that one version sampled."""

    start: int
    version: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledColumns:
    """One completion as a server sent it. Its spans and routes are not decoded yet."""

    token_ids: TokenIds
    logprobs: LogProbs
    finish_reason: FinishReason
    spans: Sequence[LabeledSpan]
    routes: str | None
    counts: tuple[int, ...] = ()  # one for each of the features' ``counters``
    kept: Ragged | None = None  # the tokens that each one was drawn from; log-probs are then over these


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
    """The log-probs [L - 1] at temperature 1 of every token after the first of a text of L tokens. At each position
    also the k most probable tokens [L - 1, k] with their log-probs, in descending order."""

    logprobs: LogProbs
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


def decode_as(text: bytes, form: type[T]) -> T:
    """Decodes the JSON ``text`` as ``form``. Raises ValueError that names the first part that does not match, or
    the position where the text ends early."""
    try:
        return cast(T, _decoder(form).decode(text))
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(text), form)  # NaN and infinity, which JSON lacks, and invalid text
    except RecursionError as error:
        raise ValueError(f"the answer is nested too deeply: {error}") from error


def decode_raw(text: bytes, form: type[T]) -> T | None:
    """Decodes like `decode_as`, for a form with `msgspec.Raw` parts. Returns None instead of an error or conversion."""
    try:
        return cast(T, _decoder(form).decode(text))
    except (msgspec.DecodeError, RecursionError):
        return None


def _decoder(form: type[T]) -> msgspec.json.Decoder[Any]:
    if form not in _decoders:
        _decoders[form] = msgspec.json.Decoder(form)
    return _decoders[form]


def whole_numbers(written: msgspec.Raw) -> TokenIds | None:
    """Parses a JSON array of whole numbers from 0 to 2**31 - 1 without blanks. Returns None for other text."""
    text = bytes(written)
    inner = text[1:-1]
    if text[:1] != b"[" or inner.translate(None, b"0123456789,"):
        return None
    found = np.fromstring(inner, np.int64, sep=",") if inner else np.empty(0, np.int64)
    known = len(found) == (inner.count(b",") + 1 if inner else 0) and (not inner or found.max() < 2**31)
    return found.astype(np.int32) if known else None


def token_column(token_ids: Sequence[int]) -> TokenIds:
    """Returns the int32 column. Raises ValueError for a number that is not a token id."""
    try:
        return np.array(token_ids, np.int32)
    except OverflowError as error:
        raise ValueError(f"token ids must be below {2**31}: {error}") from error


def logprob_column(logprobs: Sequence[float]) -> LogProbs:
    """Returns the float32 column."""
    column: NDArray[np.float32] = np.array(logprobs, np.float32)
    return column


_LOGPROBS = (-1000.0, 0.01)  # nats: excludes vLLM's -9999 for -inf; rounding alone gives values above 0


def completion_problem(completion: Completion, request: GenerationRequest, *, vocab_size: int) -> str | None:
    """Returns the reason why a completion must not be trained on, or None."""
    tokens, logprobs, most = completion.token_ids, completion.logprobs, request.params.max_new_tokens
    if len(tokens) != len(logprobs):
        return f"it has {len(logprobs)} log-probs for {len(tokens)} tokens"
    if len(tokens) > most:
        return f"it has {len(tokens)} tokens, but at most {most} were requested"
    if completion.finish_reason == "length" and len(tokens) < most:
        return (
            f"it was cut after {len(tokens)} tokens, but {most} were requested: check the size of the server's cache "
            "and its limits, as SGLANG_MAX_NEW_TOKENS_LIMIT"
        )
    known = (tokens >= 0) & (tokens < vocab_size)
    if not known.all():
        at = int(known.argmin())
        return f"token {at} has id {tokens[at]}, but the vocabulary has {vocab_size} tokens"
    starts = [span.start for span in completion.spans]
    if starts[:1] != [0] or any(b <= a for a, b in pairwise([*starts, max(1, len(tokens))])):
        return f"its weight versions begin at tokens {starts} of {len(tokens)}; they must ascend from 0"
    least, most_likely = _LOGPROBS
    possible = (logprobs >= least) & (logprobs <= most_likely)  # NaN is neither
    if not possible.all():
        at = int(possible.argmin())
        return f"token {at} has log-prob {logprobs[at]}, which no sampled token can have"
    return None


def fix_finish_reason(completion: Completion, request: GenerationRequest) -> Completion:
    """Corrects the finish reason of an aborted completion that ends with a stop token or has reached its limit."""
    params = request.params
    if completion.finish_reason != "abort":
        return completion
    if len(completion.token_ids) and completion.token_ids[-1] in params.stop_token_ids:
        return replace(completion, finish_reason="stop")
    if len(completion.token_ids) >= params.max_new_tokens:
        return replace(completion, finish_reason="length")
    return completion


def completion_seed(seed: int, place: int) -> int:
    """Returns the seed, 63 bits, of the completion at ``place`` in its group. ``seed`` is the request's."""
    return text_seed(f"{seed} {place}")


def continuation_request(request: GenerationRequest, completion: Completion, place: int) -> GenerationRequest:
    """Returns a request for the rest of the completion at ``place`` in its group. Its tokens extend the prompt."""
    left = request.params.max_new_tokens - len(completion.token_ids)
    return replace(
        request,
        token_ids=(*request.token_ids, *completion.token_ids.tolist()),
        num_completions=1,
        partial=None,
        params=replace(request.params, max_new_tokens=left, seed=completion_seed(request.params.seed, place)),
    )


def make_spans(parts: Iterable[tuple[int, int]]) -> tuple[Span, ...]:
    """Returns spans from the (first token, version) of each part. It merges neighbors of one version."""
    spans: list[Span] = []
    for start, version in parts:
        if not spans or version != spans[-1].version:
            spans.append(Span(start, version))
    return tuple(spans)


def with_adapter_version(request: GenerationRequest, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Returns a completion's spans: ``spans``, or one span if the request names the version that samples it."""
    return spans if request.named is None else (Span(0, request.named.version),)


def join_continuation(first: Completion, more: Completion) -> Completion:
    """Joins two completions. The second was sampled after the prompt and the first."""
    if not len(first.token_ids):
        return more
    if not len(more.token_ids):
        return replace(first, finish_reason=more.finish_reason)
    behind = ((len(first.token_ids) + span.start, span.version) for span in more.spans)
    return Completion(
        token_ids=np.concatenate((first.token_ids, more.token_ids)),
        logprobs=np.concatenate((first.logprobs, more.logprobs)),
        finish_reason=more.finish_reason,
        spans=make_spans((*first.spans, *behind)),
        columns={name: column for name in more.columns if (column := _joined_column(name, first, more)) is not None},
        continued=True,
    )


def _joined_column(name: str, first: Completion, more: Completion) -> ColumnData | None:
    """Joins a column of both, or returns None if the first part has no values for its tokens. Positions keep the
    values of the first part, which computed their tokens."""
    before, column = first.columns.get(name), more.columns[name]
    if declared_columns()[name].of == "positions":
        return column if before is None else one_after_the_other([before, column[len(before) :]])
    return None if before is None else one_after_the_other([before, column])


def read_kept(masks: Sequence[Sequence[int]], token_ids: TokenIds) -> Ragged:
    """Returns the column of kept tokens from their ids for each sampled token. Raises ValueError for a sampled token
    that is not among its own."""
    values = np.array([token for mask in masks for token in mask], np.int32)
    kept = Ragged(values, np.array([len(mask) for mask in masks], np.int32))
    drawn = np.repeat(token_ids[: len(masks)], kept.counts[: len(token_ids)])
    if len(masks) > len(token_ids) or int((values == drawn).sum()) != len(masks):
        raise ValueError(f"its {len(masks)} sampling masks are not those of its {len(token_ids)} tokens")
    return kept


def check_routes(experts: NDArray[Any], *, positions: int, shape: ModelShape) -> NDArray[Any]:
    """Returns routes, [positions, MoE layers, experts a token] in the shape's ``route_dtype``, from a response's expert
    numbers [positions, all layers, experts a token].

    Raises EngineError for a wrong shape or an unknown expert.
    """
    wanted = (positions, shape.num_layers, shape.experts_per_token)
    if experts.size != math.prod(wanted):
        raise EngineError(
            f"its routes have shape {experts.shape}; (positions, layers, experts a token) must be {wanted}"
        )
    layers = shape.moe_layers
    chosen = experts.reshape(wanted)[:, layers.start : layers.stop]
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < shape.num_experts:
        raise EngineError(
            f"its routes name experts {chosen.min()} to {chosen.max()}, but the model has {shape.num_experts}"
        )
    return chosen.astype(shape.route_dtype)
