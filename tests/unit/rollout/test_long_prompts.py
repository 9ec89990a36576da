"""What a request with a long prompt takes of the controller's event loop, with real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from time import thread_time

import pytest

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import EngineError
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from tests.unit.rollout.test_engine_servers import REQUEST, Words, push, running

TOKENS = tuple(range(100_000, 350_000))  # as an agent's history


def seconds(work: Callable[[], object]) -> float:
    began = thread_time()
    work()
    return thread_time() - began


def test_a_long_prompt_is_checked_and_sent_in_less_time_than_python_looks_at_each_token() -> None:
    received = list[object]()

    async def ask(url: str) -> float:
        server = Server(url, token=None, timeout_seconds=60.0)
        engine = ServedEngine(Words(), [server], ServerSection(), max_length=300_000, vocab_size=400_000)
        await push(engine, 1)
        took = []
        for _ in range(5):
            began = thread_time()
            await engine.generate(replace(REQUEST, token_ids=TOKENS))
            took.append(thread_time() - began)
        await engine.close()
        return min(took)

    with running(1) as (fake,):

        def answer(path: str, body: dict[str, object], number: int) -> tuple[int, object]:
            received.append(body.get("prompt"))
            return 200, {"label": fake.label}

        fake.answer = answer
        took = asyncio.run(ask(fake.url))
    assert received.count([*TOKENS]) == 5
    assert took < min(seconds(lambda: (min(TOKENS), max(TOKENS), json.dumps(TOKENS))) for _ in range(5))


@pytest.mark.parametrize("stray", [-1, 400_000])
def test_a_token_id_that_the_model_lacks_is_found_wherever_it_is(stray: int) -> None:
    async def ask(place: int) -> None:
        server = Server("http://127.0.0.1:1", token=None, timeout_seconds=60.0)
        engine = ServedEngine(Words(), [server], ServerSection(), max_length=300_000, vocab_size=400_000)
        given = (*TOKENS[:place], stray, *TOKENS[place:])
        with pytest.raises(EngineError, match=r"token ids in \[0, 400000\), got \("):
            await engine.generate(replace(REQUEST, token_ids=given))
        await engine.close()

    for place in (0, 7, len(TOKENS)):
        asyncio.run(ask(place))
