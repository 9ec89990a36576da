"""Programs that serve until a signal: one that comes as soon as they say so ends them in order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import FrameType

import pytest

from launcher.processes.parent import until_signalled


@pytest.mark.parametrize(
    ("number", "usual"), [(signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)]
)
async def test_a_signal_while_the_address_is_printed_ends_the_wait_and_not_the_process(
    number: signal.Signals, usual: Callable[[int, FrameType | None], object]
) -> None:
    before = signal.signal(number, usual)  # a shell's job in the background ignores SIGINT
    try:
        async with asyncio.timeout(10), until_signalled():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)


def test_an_error_before_the_signal_is_not_waited_on() -> None:
    async def serve() -> None:
        async with asyncio.timeout(10), until_signalled():
            raise OSError("the address is taken")

    with pytest.raises(OSError, match="the address is taken"):
        asyncio.run(serve())
