"""Messages between the controller and a rank: a pickle, followed by the raw bytes of its arrays.

Bytes of tensors and numpy arrays are written from their own memory, and read into the memory that the receiver's will
use: the stream makes the only copy. Only pickles from an authenticated side (`channel`) or a child process are read.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LEAST_BYTES = 4096  # larger arrays travel beside the pickle; smaller ones are cheaper inside

Message = tuple[bytes, list[memoryview]]
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


def send(connection: Connection, message: Message) -> None:
    """Write one message; one thread at a time. Raises OSError if the other side has closed the stream."""
    pickled, buffers = message
    connection.send_bytes(np.array([len(b) for b in buffers], np.int64).tobytes())
    connection.send_bytes(pickled)
    for buffer in buffers:
        done = 0
        while done < len(buffer):
            done += os.write(connection.fileno(), buffer[done:])


def receive(connection: Connection) -> Message:
    """The next message. Raises EOFError if the other side hung up, OSError if the stream broke."""
    sizes = np.frombuffer(connection.recv_bytes(), np.int64)
    pickled = connection.recv_bytes()
    buffers = [np.empty(size, np.uint8).data for size in sizes.tolist()]
    for buffer in buffers:
        done = 0
        while done < len(buffer):
            count = os.readv(connection.fileno(), [buffer[done:]])
            if not count:
                raise EOFError("the other side hung up inside a message")
            done += count
    return pickled, buffers


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
