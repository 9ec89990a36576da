"""vLLM 0.32.0's requests and answers (entrypoints/scale_out/token_in_token_out/protocol.py)."""

from __future__ import annotations

import base64
import heapq
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_megatron.columns import TokenIds, freeze
from rl_megatron.engines.answers import (
    Judged,
    LabelledSpan,
    SampledColumns,
    as_form,
    as_form_at_once,
    checked_routes,
    logprob_column,
    token_column,
    whole_numbers,
)
from rl_megatron.engines.http import Server
from rl_megatron.errors import EngineError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import FinishReason


def scoring(server: Server, text: Sequence[int], top: int) -> dict[str, object]:
    """A request for the log-probs of a text and of the ``top`` most probable tokens, with one token behind it."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": top, "ignore_eos": True, "detokenize": False}
    return {"token_ids": list(text), "sampling_params": sampling, **salted(server)}


def aborting(names: Collection[str]) -> dict[str, list[str]]:
    """An order to abort requests by the names that they were given."""
    assert names, "vLLM takes an empty list for all requests, those of others too"
    return {"request_ids": [f"generate-tokens-{name}" for name in names]}


def salted(server: Server) -> dict[str, str]:
    """The key by which prefixes that other weights cached are not found."""
    return {} if server.salt is None else {"cache_salt": server.salt}


T = TypeVar("T")


class _LogProb(msgspec.Struct, gc=False):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] | None
    logprobs: _LogProbs | None
    finish_reason: FinishReason
    weight_versions: list[LabelledSpan] | None
    routed_experts: str | None = None


class _Sampled(msgspec.Struct):
    choices: list[_Choice]


class _RawChoice(_Choice):
    token_ids: msgspec.Raw  # type: ignore[assignment]  # as they are written: a number object each takes a tenth of all


class _RawSampled(msgspec.Struct):
    choices: list[_RawChoice]


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _LogProb] | None]


class _Called(msgspec.Struct):
    results: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]


def read_gathered(text: bytes, read: Callable[[bytes], T]) -> list[T]:
    """Each rank's answer by ``read``, of which the first has gathered all; another thread may run between two. Raises
    ValueError as `as_form` does."""
    gathered = bytes(as_form(text, _Called).results[0])
    return [read(bytes(one)) for one in as_form(gathered, list[msgspec.Raw])]


def read_sampled(text: bytes) -> list[SampledColumns]:
    """The choices, in order. Raises ValueError as `as_form` does."""
    raw = as_form_at_once(text, _RawSampled)
    of_raw = [] if raw is None else [(choice, whole_numbers(choice.token_ids)) for choice in raw.choices]
    plain: list[tuple[_Choice, TokenIds]] = [(choice, ids) for choice, ids in of_raw if ids is not None]
    if raw is None or len(plain) < len(of_raw):  # anything else than usual, such as NaN, null and what is wrong
        plain = [(choice, token_column(choice.token_ids or [])) for choice in as_form(text, _Sampled).choices]
    return [_answer(choice, ids) for choice, ids in sorted(plain, key=lambda one: one[0].index)]


def read_scored(text: bytes) -> Sequence[Mapping[str, float]]:
    """Log-probs by token id of each token after the first. Raises ValueError as `as_form` does."""
    said = as_form(text, _Scored).prompt_logprobs[1:]
    return [{token: one.logprob for token, one in (found or {}).items()} for found in said]


def read_judged(answer: bytes, *, text: Sequence[int], top: int) -> Judged:
    """What it says of the ``text``. Raises ValueError as `as_form` does, and where a token has no log-prob, or a place
    fewer probable tokens than ``top``, as of a vocabulary of fewer."""
    said = read_scored(answer)
    if len(said) != len(text) - 1:
        raise ValueError(f"log-probs of {len(said) + 1} tokens, and {len(text)} were sent")
    logprobs = np.empty(len(said), np.float32)
    ids, of_ids = np.empty((len(said), top), np.int32), np.empty((len(said), top), np.float32)
    for place, (token, found) in enumerate(zip(text[1:], said, strict=True)):
        if str(token) not in found or len(found) < top:
            raise ValueError(f"token {place + 1} of the text has {len(found)} log-probs, {top} were asked for")
        logprobs[place] = found[str(token)]
        best = heapq.nlargest(top, found.items(), key=itemgetter(1))
        ids[place], of_ids[place] = [int(name) for name, _ in best], [logprob for _, logprob in best]
    freeze(logprobs)
    return Judged(logprobs=logprobs, top_ids=ids, top_logprobs=of_ids)


def read_routes(given: str | None, positions: int, shape: ModelShape) -> NDArray[Any]:
    """Decode routes: a .npy file in base64."""
    if not given:
        raise EngineError("it returned no routes; start it with --enable-return-routed-experts")
    try:
        experts = np.load(io.BytesIO(base64.b64decode(given)), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:  # MemoryError: its header asks for too much memory
        raise EngineError(f"its routes are not an array: {error!s:.200}") from error
    return checked_routes(experts, positions=positions, shape=shape)


def _answer(choice: _Choice, token_ids: TokenIds) -> SampledColumns:
    content = (choice.logprobs.content if choice.logprobs else None) or []
    return SampledColumns(
        token_ids=token_ids,
        logprobs=logprob_column([one.logprob for one in content]),
        finish_reason=choice.finish_reason,
        spans=choice.weight_versions or [LabelledSpan(start=0, version=None)],
        routes=choice.routed_experts,
    )
