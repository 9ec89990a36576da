"""Columns of numbers: read-only, and the same bits behind a checkpoint's JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from rl_megatron.columns import LogProbs, TokenIds
from tests.completions import completion

TOKENS, LOGPROBS = TypeAdapter(TokenIds), TypeAdapter(LogProbs)


def test_what_was_sampled_cannot_be_changed() -> None:
    one = completion((1, 2, 3))
    for column in (one.token_ids, one.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


@pytest.mark.parametrize("values", [[], [0, 1, -1, 2**31 - 1, -(2**31)]])
def test_json_keeps_every_token(values: list[int]) -> None:
    again = TOKENS.validate_json(TOKENS.dump_json(np.array(values, np.int32)))
    assert (again.tolist(), again.dtype) == (values, np.int32)


def test_json_keeps_every_bit_of_a_log_prob() -> None:
    bits = np.array([0, 1, 0x80000000, 0xBF000001, 0x7F800000, 0xFF800000, 0x7FC00001], np.uint32)
    again = LOGPROBS.validate_json(LOGPROBS.dump_json(bits.view(np.float32)))
    assert again.dtype == np.float32
    assert again.view(np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([1, 2], "it must be base64 of <i4 numbers, not a list"),
        ("AAAA\n", "base64"),
        ("AAAA", "buffer size must be a multiple"),
        (None, "not a NoneType"),
    ],
)
def test_what_is_no_column_is_refused(text: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TOKENS.validate_json(json.dumps(text))
