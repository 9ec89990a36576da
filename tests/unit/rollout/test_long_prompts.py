"""Requests with long prompts, over real HTTP. docs/environments.md has what they take of the event loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.errors import EngineError
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from tests.unit.rollout.test_engine_servers import REQUEST, Words, push, running

TOKENS = tuple(range(100_000, 350_000))  # as an agent's history


async def test_a_long_prompt_arrives_whole() -> None:
    received = list[object]()
    with running(1) as (fake,):

        def answer(path: str, body: dict[str, object], number: int) -> tuple[int, object]:
            received.append(body.get("prompt"))
            return 200, {"label": fake.label}

        fake.answer = answer
        server = Server(fake.url, token=None, timeout_seconds=60.0)
        engine = ServedEngine(Words(), [server], ServerSection(), max_length=300_000, vocab_size=400_000)
        await push(engine, 1)
        await engine.generate(replace(REQUEST, token_ids=TOKENS))
        await engine.close()
    assert received.count([*TOKENS]) == 1


@pytest.mark.parametrize("stray", [-1, 400_000])
async def test_a_token_id_that_the_model_lacks_is_found_wherever_it_is(stray: int) -> None:
    server = Server("http://127.0.0.1:1", token=None, timeout_seconds=60.0)
    engine = ServedEngine(Words(), [server], ServerSection(), max_length=300_000, vocab_size=400_000)
    for place in (0, 7, len(TOKENS)):
        given = (*TOKENS[:place], stray, *TOKENS[place:])
        with pytest.raises(EngineError, match=r"token ids in \[0, 400000\), got \("):
            await engine.generate(replace(REQUEST, token_ids=given))
    await engine.close()
