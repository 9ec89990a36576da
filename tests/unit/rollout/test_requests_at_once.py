"""Requests that come at once, as those of a push do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.unit.rollout.test_engine_servers import REQUEST, Fake, engine_of, fakes, push

__all__ = ["fakes"]


def test_requests_that_come_at_once_leave_the_loop_to_others(fakes: list[Fake]) -> None:
    """What another task waits for takes some passes of the loop, not the sending of all of them."""

    async def ask() -> tuple[int, int]:
        engine = engine_of(fakes, concurrency=64)
        await push(engine, 1)
        asked = [asyncio.create_task(engine.generate(replace(REQUEST, id=f"{n}"))) for n in range(64)]
        for _ in range(24):
            await asyncio.sleep(0)
        early = sum(server.in_flight for server in engine.servers)
        await asyncio.gather(*asked)
        return early, sum(fake.asked.count("/generate") for fake in fakes)

    early, served = asyncio.run(ask())
    assert 1 <= early <= 4
    assert served == 64
