"""Completions move from busy servers to less busy ones: the rule, on a virtual clock, and by real servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.places import surplus
from rl_megatron.types import Completion, GenerationRequest
from tests.completions import completion
from tests.unit.rollout.still import Still
from tests.unit.rollout.test_engine_servers import REQUEST, push
from tests.unit.rollout.test_suspects import Seat
from tests.virtual_time import run_at_once

ROW_SECONDS = 0.01  # of a token, for each row of the server
LONG, SHORT = 400, 10


def too_uneven(running: Sequence[int]) -> bool:
    return max(running) - min(running) > max(2, min(running) // 4)


def test_as_few_move_as_level_the_servers() -> None:
    """Against all ways to share the completions out."""
    draw = random.Random(0)
    for _ in range(60):
        running = [draw.randint(0, 9) for _ in range(draw.randint(1, 3))]
        level = [
            shares
            for shares in product(range(sum(running) + 1), repeat=len(running))
            if sum(shares) == sum(running) and not too_uneven(shares)
        ]
        least = min(sum(max(0, a - b) for a, b in zip(running, shares, strict=True)) for shares in level)
        moved = surplus(running)
        assert sum(moved) == least, running
        assert all(0 <= count <= has for count, has in zip(moved, running, strict=True))
    assert surplus([]) == []
    assert surplus([160, 130, 128]) == [0, 0, 0]  # a quarter
    assert surplus([161, 128, 128]) == [1, 0, 0]


class Rows(Still):
    """A server's rows get a token each in turn, the n-th token n; so with fewer rows they are faster."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []  # request, server, tokens that it has
        self.ended: set[str] = set()
        self.lengths: dict[str, int] = {}  # those that the second server is sent are short

    async def generate(self, server: Any, request: GenerationRequest, request_id: str) -> list[Completion]:
        first = len(request.token_ids) - len(REQUEST.token_ids)
        length = self.lengths.setdefault(request.id, LONG if server.number == 0 else SHORT)
        self.asked.append((request.id, server.url, first))
        made = first
        while made < length and request_id not in self.ended:
            await asyncio.sleep(ROW_SECONDS * server.in_flight)
            made += 1
        finish = "stop" if made == length else "abort"
        return [completion(list(range(first, made)), finish=finish, spans=((0, 1),))]

    async def abort(self, server: Any, request: GenerationRequest, request_id: str) -> None:
        self.ended.add(request_id)


async def sampled(adapter: Rows, *, grouped: bool) -> float:
    """Seconds of twelve completions by two servers, of which six are long."""
    seats: list[Any] = [Seat(0), Seat(1)]
    engine = ServedEngine(adapter, seats, ServerSection(), max_length=2000, vocab_size=2000)
    await push(engine, 1)
    params = replace(REQUEST.params, max_new_tokens=LONG, stop_token_ids=())
    one = replace(REQUEST, group="a" if grouped else None, params=params)
    answers = await asyncio.gather(*(engine.generate(replace(one, id=f"{n}")) for n in range(12)))
    for n, (answer,) in enumerate(answers):
        assert answer.token_ids.tolist() == list(range(adapter.lengths[f"{n}"]))
        assert answer.finish_reason == "stop"
        assert answer.spans == ((0, 1),)
    seconds = asyncio.get_running_loop().time()
    await engine.close()
    return seconds


def test_long_completions_of_a_busy_server_go_on_at_an_idle_one_from_their_tokens() -> None:
    """Six rows until five seconds after the short ones; four and two until five after these two; three and one."""
    adapter = Rows()
    first = 6 * ROW_SECONDS * SHORT + 5
    made = first / (6 * ROW_SECONDS)
    second = (LONG - made) * 2 * ROW_SECONDS + 5
    later = made + second / (4 * ROW_SECONDS)
    seconds = run_at_once(sampled(adapter, grouped=True))
    assert seconds == pytest.approx(first + second + (LONG - later) * 3 * ROW_SECONDS, abs=1.0)
    again = adapter.asked[12:]
    assert [server for _, server, _ in again] == ["seat 1"] * 3
    assert [tokens for _, _, tokens in again] == pytest.approx([made, made, later], abs=20)
    long = [request for request, server, _ in adapter.asked[:12] if server == "seat 0"]
    assert {request for request, _, _ in again[:2]} == set(long[-2:])  # sent last
    assert again[2][0] == long[-3]


def test_evaluations_and_groups_of_one_request_stay() -> None:
    adapter = Rows()
    seconds = run_at_once(sampled(adapter, grouped=False))
    assert len(adapter.asked) == 12
    assert seconds == pytest.approx(LONG * 6 * ROW_SECONDS, abs=0.5)
