"""Reads and writes a rank's stream from the event loop, which never waits for it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from launcher.wire import messages
from launcher.wire.messages import Message

_beside = memoryview(bytearray(64 << 10))  # of all streams: it is empty between two turns of the loop


class RankStream:
    """The controller's end of a stream. ``heard`` gets each message, and ``hearing`` is called each time a part of one
    was read whose rest is still to come; a stream that breaks only ends."""

    def __init__(self, connection: Connection, heard: Callable[[Message], None], hearing: Callable[[], None]) -> None:
        self._connection, self._heard, self._hearing = connection, heard, hearing
        self._loop = asyncio.get_running_loop()
        self.hung_up: asyncio.Future[None] = self._loop.create_future()
        self._coming, self._left = messages.Incoming(), deque[memoryview]()
        self._writing, self._awaiting = True, False  # whether the other side may still read; whether we wait for it
        self._file = connection.fileno()
        os.set_blocking(self._file, False)
        self._loop.add_reader(self._file, self._read)

    def send(self, message: Message) -> None:
        """Send after all that is still to be sent. Arrays of the message must not change before it is."""
        if not self._writing:
            return
        if not self._left:
            self._loop.call_soon(self._write)
        self._left.extend(messages.parts(message))

    def drain(self) -> None:
        """Read all that has arrived, once the other side has ended: its last message may say why."""
        while not self.hung_up.done() and self._read():
            pass

    def close(self) -> None:
        """Close it, whatever is still to be sent."""
        self._hang_up()
        self._connection.close()

    def _write(self) -> None:
        """In a turn of the loop of its own: a message to all ranks must not keep the loop."""
        if not self._left:
            return
        try:
            messages.write_some(self._file, self._left)
        except BlockingIOError:
            pass
        except OSError:  # what ended the other side is known soon
            self._writing = False
            self._left.clear()
        self._await_room(bool(self._left))

    def _await_room(self, wanted: bool) -> None:
        """Whether `_write` is called as soon as the stream takes more."""
        if wanted and not self._awaiting:
            self._loop.add_writer(self._file, self._write)
        elif self._awaiting and not wanted:
            self._loop.remove_writer(self._file)
        self._awaiting = wanted

    def _read(self) -> bool:
        """Read once: an array straight into its memory, and many small messages together. Whether there was any."""
        room = self._coming.room
        try:
            count = os.readv(self._file, [room, _beside])
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self._hang_up()
            return False
        message = self._coming.filled(min(count, len(room)))
        if message is not None:
            self._heard(message)
        if count > len(room):
            for message in self._coming.fed(_beside[: count - len(room)]):
                self._heard(message)
        if self._coming.inside:
            self._hearing()
        return True

    def _hang_up(self) -> None:
        self._writing = False
        self._left.clear()
        if not self.hung_up.done():
            self._loop.remove_reader(self._file)
            self._await_room(False)
            self.hung_up.set_result(None)
