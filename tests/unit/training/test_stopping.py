"""A stop requested before the first step."""

from __future__ import annotations

import asyncio

import pytest

from rl_megatron.errors import Stopped
from rl_megatron.training.tasks import unless_stopped


async def never(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


def test_work_that_nobody_wants_any_more_is_ended_first() -> None:
    async def main() -> list[str]:
        stop, ended = asyncio.Event(), list[str]()
        asyncio.get_running_loop().call_soon(stop.set)
        with pytest.raises(Stopped, match="before the first step"):
            await unless_stopped(stop, never(ended))
        return ended

    assert asyncio.run(main()) == ["work"]


def test_without_a_stop_it_is_the_work_and_its_error() -> None:
    async def fails() -> None:
        raise KeyError("x")

    async def main() -> int:
        with pytest.raises(KeyError):
            await unless_stopped(asyncio.Event(), fails())
        return await unless_stopped(asyncio.Event(), asyncio.sleep(0, 7))

    assert asyncio.run(main()) == 7
