"""A completion that updates interrupted: when it is complete, and how its parts are joined."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from rl_megatron.rollout.servers.answers import as_it_should_end, joined
from rl_megatron.types import Completion, GenerationRequest, Routes, SamplingParams
from tests.completions import completion, plain

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=2, stop_token_ids=(), seed=0)
REQUEST = GenerationRequest(id="step 1: 2+2=", token_ids=(1, 2), num_completions=1, params=PARAMS)


def test_routes_of_a_completion_in_two_parts_are_those_that_chose_its_tokens() -> None:
    def part(tokens: int, positions: int, expert: int) -> Completion:
        routes = Routes(data=bytes([expert] * positions * 2), shape=(positions, 1, 2))
        return completion((5,) * tokens, spans=((0, 1),), routes=routes)

    whole = joined(part(2, 4, 0), part(3, 7, 9))  # a prompt of 3 tokens
    assert whole.routes == Routes(data=bytes([0] * 8 + [9] * 6), shape=(7, 1, 2))
    ended_at_once = completion((), finish="abort", spans=((0, 2),))
    assert joined(whole, ended_at_once).routes == whole.routes


def test_a_completion_in_parts_keeps_what_each_version_sampled() -> None:
    parts = [
        completion((1, 2), (-1.0, -2.0), spans=((0, 3),)),
        completion((), spans=((0, 4),)),
        completion((3, 4, 5), (-3.0, -4.0, -5.0), spans=((0, 3), (2, 5))),
        completion((6,), (-6.0,), spans=((0, 7),), finish="length"),
    ]
    whole = functools.reduce(joined, parts)
    assert plain(whole) == (
        [1, 2, 3, 4, 5, 6],
        [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
        "length",
        ((0, 3), (4, 5), (5, 7)),
        None,
    )


@pytest.mark.parametrize(("tokens", "finish"), [((3,), "abort"), ((), "abort"), ((9,), "stop"), ((3, 4), "length")])
def test_what_was_ended_at_its_end_has_nothing_left(tokens: tuple[int, ...], finish: str) -> None:
    params = replace(PARAMS, stop_token_ids=(9,))
    cut = completion(tokens, finish="abort", spans=((0, 1),))
    assert as_it_should_end(cut, replace(REQUEST, params=params)).finish_reason == finish
