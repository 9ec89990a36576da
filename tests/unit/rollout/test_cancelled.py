"""Cancelled requests, and requests that wait behind no other, with real HTTP."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from rl_megatron.rollout.servers import attempts
from tests.unit.rollout.test_engine_servers import REQUEST, SECTION, engine_of, push, running

LIMIT = 300.0


async def test_a_cancelled_request_is_aborted_where_it_runs() -> None:
    with running(1) as (fake,):
        over = threading.Event()

        def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
            if path == "/generate":
                over.wait(LIMIT)
            return 200, {}

        fake.answer = answer
        engine = engine_of([fake])
        await push(engine, 4)
        asked = asyncio.create_task(engine.generate(REQUEST))
        while "/generate" not in fake.asked:
            await asyncio.sleep(0.01)
        asked.cancel()
        async with asyncio.timeout(LIMIT):
            while "/abort" not in fake.asked:
                await asyncio.sleep(0.01)
        over.set()
        await engine.close()


async def test_the_end_of_a_run_waits_for_an_abort_for_a_short_time_and_says_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for as long as a request may take, which is the limit of the abort's answer too."""
    monkeypatch.setattr(attempts, "_CLOSE_SECONDS", 0.2)
    over = threading.Event()

    def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if path in ("/generate", "/abort"):
            over.wait(LIMIT)
        return 200, {}

    with running(1) as (fake,):
        engine = engine_of([fake])
        await push(engine, 4)
        fake.answer = answer
        asked = asyncio.create_task(engine.generate(REQUEST))
        while "/generate" not in fake.asked:
            await asyncio.sleep(0.01)
        asked.cancel()
        while "/abort" not in fake.asked:
            await asyncio.sleep(0.01)
        await engine.close()
        over.set()
        assert f"aborted requests are left: no answer from {fake.url} in 0.2 s" in caplog.text


async def test_an_evaluation_does_not_wait_behind_what_is_sampled_ahead() -> None:
    evaluated = threading.Event()

    def behind(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
        if body["id"].startswith("evaluation"):
            evaluated.set()
        else:
            evaluated.wait(SECTION.timeout_seconds)
        return 200, {"label": "1@t"}

    with running(1) as (fake,):
        engine = engine_of([fake])
        await push(engine, 1)
        fake.answer = behind
        later = replace(REQUEST, birth=0)  # as a trajectory's later turns
        ahead = [asyncio.ensure_future(engine.generate(later)) for _ in range(2 * SECTION.concurrency)]
        await asyncio.sleep(0)
        await engine.generate(replace(REQUEST, id="evaluation: 2+2=", ahead=True))
        await asyncio.gather(*ahead)
        await engine.close()
