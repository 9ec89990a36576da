"""Decodes servers' answers by their type, straight into columns; fields that the type does not name are skipped.

It imports neither torch nor pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from rl_megatron.columns import LogProbs, TokenIds
from rl_megatron.types import FinishReason

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}  # by form: to make one takes longer than to use it


class LabelledSpan(msgspec.Struct, frozen=True):
    """A part of a completion that one version of the weights sampled."""

    start: int
    version: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledColumns:
    """One completion as a server sent it. Its spans and routes are not decoded yet."""

    token_ids: TokenIds
    logprobs: LogProbs
    finish_reason: FinishReason
    spans: Sequence[LabelledSpan]
    routes: str | None
    proposed: int = 0  # tokens by a draft layer, where answers tell
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """What a server says of a text of L tokens, at temperature 1: the log-prob [L - 1] of every token after the first,
    and behind each beginning the most probable tokens [L - 1, k], the first the most probable, with theirs."""

    logprobs: LogProbs
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


def as_form(text: bytes, form: type[T]) -> T:
    """The JSON ``text`` as ``form``. Raises ValueError that names the first part that is not of this form, or where the
    text breaks off."""
    try:
        return cast(T, _decoder(form).decode(text))
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(text), form)  # NaN and infinity, which JSON lacks, and what is broken
    except RecursionError as error:
        raise ValueError(f"the answer is nested too deeply: {error}") from error


def as_form_at_once(text: bytes, form: type[T]) -> T | None:
    """The same, for a form with parts as they are written (`msgspec.Raw`); None for what it would raise or convert."""
    try:
        return cast(T, _decoder(form).decode(text))
    except (msgspec.DecodeError, RecursionError):
        return None


def _decoder(form: type[T]) -> msgspec.json.Decoder[Any]:
    if form not in _decoders:
        _decoders[form] = msgspec.json.Decoder(form)
    return _decoders[form]


def whole_numbers(written: msgspec.Raw) -> TokenIds | None:
    """The column of a JSON array of whole numbers from 0 to 2**31 - 1 without blanks; None for anything else."""
    text = bytes(written)
    inner = text[1:-1]
    if text[:1] != b"[" or inner.translate(None, b"0123456789,"):
        return None
    found = np.fromstring(inner, np.int64, sep=",") if inner else np.empty(0, np.int64)
    known = len(found) == (inner.count(b",") + 1 if inner else 0) and (not inner or found.max() < 2**31)
    return found.astype(np.int32) if known else None


def token_column(token_ids: Sequence[int]) -> TokenIds:
    """Raises ValueError for what is no token id."""
    try:
        return np.array(token_ids, np.int32)
    except OverflowError as error:
        raise ValueError(f"token ids must be below {2**31}: {error}") from error


def logprob_column(logprobs: Sequence[float]) -> LogProbs:
    """A float32 column."""
    column: NDArray[np.float32] = np.array(logprobs, np.float32)
    return column
