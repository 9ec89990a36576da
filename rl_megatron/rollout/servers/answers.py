"""Checks servers' answers, and joins completions that a weight update cut into parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_megatron.data.routes import encode_routes
from rl_megatron.errors import DataError, EngineError
from rl_megatron.models.shape import ModelShape
from rl_megatron.seeds import text_seed
from rl_megatron.types import Completion, GenerationRequest, Routes, Span

_LOGPROBS = (-1000.0, 0.01)  # nats: excludes vLLM's -9999 for -inf; rounding alone gives values above 0


def problem_of(completion: Completion, request: GenerationRequest, *, vocab_size: int) -> str | None:
    """The reason why a completion must not be trained on; None if it may."""
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


def as_it_should_end(completion: Completion, request: GenerationRequest) -> Completion:
    """Correct the finish reason of an aborted completion that ends with a stop token or has reached its limit."""
    params = request.params
    if completion.finish_reason != "abort":
        return completion
    if len(completion.token_ids) and completion.token_ids[-1] in params.stop_token_ids:
        return replace(completion, finish_reason="stop")
    if len(completion.token_ids) >= params.max_new_tokens:
        return replace(completion, finish_reason="length")
    return completion


def completion_seed(seed: int, place: int) -> int:
    """The seed of the completion at ``place`` in its group, whose request has ``seed``: 63 bits."""
    return text_seed(f"{seed} {place}")


def rest_of(request: GenerationRequest, completion: Completion, place: int) -> GenerationRequest:
    """A request for the rest of the completion at ``place`` in its group: its tokens are appended to the prompt."""
    left = request.params.max_new_tokens - len(completion.token_ids)
    return replace(
        request,
        token_ids=(*request.token_ids, *completion.token_ids.tolist()),
        num_completions=1,
        begun=None,
        params=replace(request.params, max_new_tokens=left, seed=completion_seed(request.params.seed, place)),
    )


def spans_of(parts: Iterable[tuple[int, int]]) -> tuple[Span, ...]:
    """Spans from the (first token, version) of each part; merges neighbours of one version."""
    spans: list[Span] = []
    for start, version in parts:
        if not spans or version != spans[-1].version:
            spans.append(Span(start, version))
    return tuple(spans)


def sampled_with(request: GenerationRequest, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans of a completion: ``spans`` are of the model, beside which one version of adapters sampled it whole."""
    return spans if request.adapters is None else (Span(0, request.adapters.version),)


def joined(first: Completion, more: Completion) -> Completion:
    """Join two completions, of which the second was sampled after prompt and first."""
    if not len(first.token_ids):
        return more
    if not len(more.token_ids):
        return replace(first, finish_reason=more.finish_reason)
    routes = more.routes
    if first.routes is not None and routes is not None:  # the first part's routes produced its tokens
        routes = replace(routes, data=first.routes.data + routes.data[len(first.routes.data) :])
    behind = ((len(first.token_ids) + span.start, span.version) for span in more.spans)
    return Completion(
        token_ids=np.concatenate((first.token_ids, more.token_ids)),
        logprobs=np.concatenate((first.logprobs, more.logprobs)),
        finish_reason=more.finish_reason,
        spans=spans_of((*first.spans, *behind)),
        routes=routes,
        continued=True,
    )


def checked_routes(experts: NDArray[Any], *, positions: int, shape: ModelShape) -> Routes:
    """Routes of the MoE layers, from an answer's expert numbers [positions, all layers, experts a token].

    Raises EngineError for a wrong shape or an unknown expert.
    """
    wanted = (positions, shape.num_layers, shape.experts_per_token)
    if experts.size != math.prod(wanted):
        raise EngineError(
            f"its routes have shape {experts.shape}; (positions, layers, experts a token) must be {wanted}"
        )
    layers = shape.moe_layers
    try:
        return encode_routes(experts.reshape(wanted)[:, layers.start : layers.stop], num_experts=shape.num_experts)
    except DataError as error:
        raise EngineError(str(error)) from error
