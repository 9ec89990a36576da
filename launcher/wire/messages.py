"""Messages between the controller and a rank: a head, a pickle, and the raw bytes of its arrays.

Bytes of tensors and numpy arrays are written from their own memory, and read into the memory that the receiver's will
use: the stream makes the only copy. Only pickles from an authenticated side (`channel`) or a child process are read.
A rank waits in `send` and `receive`; the controller, which must not, uses `parts` and `Incoming`.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LEAST_BYTES = 4096  # larger arrays travel beside the pickle; smaller ones are cheaper inside

_HEAD = struct.Struct("<QI")  # bytes of the pickle, number of arrays; the bytes of each array follow, 8 bytes each
_MOST_PARTS = 64  # in one system call

Message = tuple[bytes | bytearray, list[memoryview]]
"""A pickle, and the memory of the arrays in it."""
STACKS: Message = (b"stacks", [])  # no pickle: answered outside of the calls, in files


def pack(value: object) -> Message:
    """``value`` as a message. Its arrays must not change before it is sent."""
    buffers: list[memoryview] = []

    def inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes >= _LEAST_BYTES:
            buffers.append(memory)
        return memory.nbytes < _LEAST_BYTES

    with io.BytesIO() as file:
        _Pickler(file, inside).dump(value)
        return file.getvalue(), buffers


def parts(message: Message) -> Iterator[memoryview]:
    """All memory to write, in order; none of it is empty."""
    pickled, buffers = message
    sizes = np.array([len(b) for b in buffers], "<i8").tobytes()
    yield memoryview(_HEAD.pack(len(pickled), len(buffers)) + sizes)
    yield memoryview(pickled)
    yield from filter(len, buffers)


def write_some(file: int, left: deque[memoryview]) -> None:
    """Write as much of ``left`` as the stream takes at once, and remove it. Raises OSError as `os.writev`."""
    done = os.writev(file, [left[i] for i in range(min(len(left), _MOST_PARTS))])
    while left and done >= len(left[0]):
        done -= len(left.popleft())
    if done:
        left[0] = left[0][done:]


class Incoming:
    """Messages of one stream, as their bytes arrive."""

    _room: memoryview

    def __init__(self) -> None:
        self._begin()

    @property
    def room(self) -> memoryview:
        """The memory of the next bytes; never empty."""
        return self._room

    @property
    def inside(self) -> bool:
        """Whether a part of a message has arrived."""
        return self._inside

    def filled(self, count: int) -> Message | None:
        """The message that the first ``count`` bytes of ``room`` complete, if they do."""
        self._inside, self._room = True, self._room[count:]
        if len(self._room):
            return None
        try:
            self._room = next(self._memory)
        except StopIteration:
            message = self._message
            self._begin()
            return message
        return None

    def fed(self, data: memoryview) -> Iterator[Message]:
        """Copy bytes that were read elsewhere. Yields the messages that they complete."""
        while len(data):
            count = min(len(data), len(self._room))
            self._room[:count] = data[:count]
            data = data[count:]
            message = self.filled(count)
            if message is not None:
                yield message

    def _begin(self) -> None:
        self._inside, self._memory = False, self._parts()
        self._room = next(self._memory)

    def _parts(self) -> Iterator[memoryview]:
        """The memory of a message's parts, each once the one before it is filled."""
        head = bytearray(_HEAD.size)
        yield memoryview(head)
        length, count = _HEAD.unpack(head)
        sizes = bytearray(8 * count)
        if count:
            yield memoryview(sizes)
        pickled = bytearray(length)
        buffers = [np.empty(size, np.uint8).data for size in np.frombuffer(sizes, "<i8").tolist()]
        self._message: Message = (pickled, buffers)
        yield memoryview(pickled)
        yield from filter(len, buffers)


def send(connection: Connection, message: Message) -> None:
    """Write one message; one thread at a time. Raises OSError if the other side has closed the stream."""
    left = deque(parts(message))
    while left:
        write_some(connection.fileno(), left)


def receive(connection: Connection) -> Message:
    """The next message. Raises EOFError if the other side hung up, OSError if the stream broke."""
    coming = Incoming()
    while True:
        count = os.readv(connection.fileno(), [coming.room])
        if not count:
            raise EOFError(f"the other side hung up{' inside a message' if coming.inside else ''}")
        message = coming.filled(count)
        if message is not None:
            return message


def unpack(message: Message) -> Any:
    """The value that was packed. Its tensors use the message's memory."""
    pickled, buffers = message
    return pickle.loads(pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, keep: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep)

    def reducer_override(self, value: Any) -> Any:
        """Pickles a CPU tensor as its bytes, type and shape; everything else as usual."""
        import torch  # here, because a rank sends heartbeats before it imports torch

        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        if value.layout is not torch.strided or not value.numel():
            return NotImplemented
        flat = value.contiguous().view(-1).view(torch.uint8).numpy()
        memory = pickle.PickleBuffer(flat.data) if value.nbytes >= _LEAST_BYTES else bytearray(flat.data)
        return _tensor, (memory, value.dtype, tuple(value.shape))


def _tensor(memory: memoryview | bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.frombuffer(memory, dtype=dtype).view(shape)
