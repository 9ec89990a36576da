"""Cancelled requests, with real HTTP."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from tests.unit.rollout.test_engine_servers import REQUEST, engine_of, push, running

LIMIT = 60.0


def test_a_cancelled_request_is_aborted_where_it_runs() -> None:
    with running(1) as (fake,):
        over = threading.Event()

        def answer(path: str, body: dict[str, Any], number: int) -> tuple[int, object]:
            if path == "/generate":
                over.wait(LIMIT)
            return 200, {}

        async def cancel() -> None:
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

        fake.answer = answer
        asyncio.run(cancel())
