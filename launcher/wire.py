"""Opens TCP streams between the controller and ranks, which authenticate both ways, and has their first messages.

A message is a pickle, so neither side reads one before the other has proved that it has the run's token, by an
HMAC-SHA256 over both random numbers. Messages are not encrypted: they are as private as the allocation's network.

A message is a head, a pickle, and the raw bytes of its arrays. The stream makes the only copy of tensors and numpy
arrays: their bytes are written from their own memory, and read into the memory of the receiver's arrays. A rank waits
in `send` and `receive`; the controller, which must not, uses `parts` and `Incoming`.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import io
import json
import os
import pickle
import secrets
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import LEARNER

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The controller's message to a rank, one line of JSON."""

    host: str
    port: int
    token: str  # hexadecimal
    seconds: float  # time limit of the rank to connect
    threads: int
    device: str  # learner.device
    role: str = LEARNER
    store: bool = True  # rank 0 listens for torch.distributed's store; otherwise the ranks meet at a file
    cpus: Sequence[int] = ()  # the cores that it runs on; empty: all that its parent may use
    hindered: str = ""  # the reason why it is not forked from the process that imported for its node

    def line(self) -> bytes:
        """Returns the message as it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Muster:
    """The controller's message to all nodes of a step, one line of JSON: which ranks each starts."""

    call: Call
    nodes: Sequence[str]  # their names, in the order of their ranks
    ranks_per_node: Mapping[str, int]  # counts by role
    folder: str = ""  # has the ranks' output files; empty: their output is this process's
    parent: int | None = None  # the controller's pid if the node is its child, on its machine; None: Slurm started it
    stderr: Sequence[int] = ()  # a child's descriptors that are its ranks' stderr, in their order

    def line(self) -> bytes:
        """Returns the message as it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: str) -> Muster:
        """Returns the message that was sent."""
        fields = json.loads(line)
        return cls(**{**fields, "call": Call(**fields["call"])})

    def node_ranks(self, node: str) -> list[tuple[str, int]]:
        """Returns the ranks of a node, by role and number. Raises ValueError for another node."""
        if node not in self.nodes:
            raise ValueError(f"this node, {node}, is none of the step's: {', '.join(self.nodes)}")
        index = self.nodes.index(node)
        return [(role, index * each + local) for role, each in self.ranks_per_node.items() for local in range(each)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first message, as JSON: who it is and, from rank 0, the address of torch.distributed's store."""

    rank: int
    node: str
    pid: int
    store: str
    step: str  # Slurm's "<job>.<step>"; without Slurm the parts are empty
    role: str = LEARNER
    hindered: str = ""  # see Call

    def line(self) -> bytes:
        """Returns the message as it is sent."""
        return json.dumps(asdict(self)).encode()


def this_node() -> str:
    """Returns this node's name: Slurm's in a Slurm job."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup of a worker. Folders are absolute and the same on every node."""

    config: RunConfig
    model_folder: Path
    run_folder: Path
    rendezvous: str  # a torch.distributed init method
    role: str = LEARNER
    first_device: int = 0  # the first rank's on each node; neighboring ranks take one each
    ranks_per_node: int | None = None  # None: all are on one
    code: Path = field(default_factory=Path.cwd)  # the folder of the user's own modules
    stacks: Path | None = None  # the folder for stacks if this start hangs

    def gpu_index(self, rank: int) -> int:
        """Returns the number of the rank's GPU among those of its node."""
        return self.first_device + (rank if self.ranks_per_node is None else rank % self.ranks_per_node)


PROOF_BYTES = 32
TOKEN_BYTES = 32
HANDSHAKE_SECONDS = 10.0  # time limit of a whole handshake
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)  # a node's network may come up after Slurm
_PAUSE_SECONDS = 1.0  # pause between two tries to connect
_SILENCE_SECONDS = 60  # ends a stream with nothing in transit if the other node's kernel does not answer


class NotProven(ConnectionError):
    """The other side of a stream does not have the job's token."""


def listen(host: str, *, backlog: int) -> socket.socket:
    """Returns a socket that listens on a free port of one address, never of all addresses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(backlog)
    return listener


async def accept(accepted: socket.socket, token: bytes) -> Connection:
    """Returns the controller's end, authenticated. Closes the stream and raises OSError (e.g. NotProven) otherwise."""
    return await _proven(accepted, token, ours=b"controller", theirs=b"rank")


def connect(host: str, port: int, token: bytes, *, seconds: float) -> tuple[Connection, str]:
    """Returns a rank's end, after authentication, and this machine's address towards the controller. Raises OSError.

    Strangers can make the controller late: tries are repeated for ``seconds``, unless nothing listens there. Each new
    reason is printed to stderr, since the controller may end this process before they are over.
    """
    end, told = time.monotonic() + seconds, set[str]()
    while True:
        try:
            stream = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
            address = str(stream.getsockname()[0])
            return asyncio.run(_proven(stream, token, ours=b"rank", theirs=b"controller")), address
        except OSError as error:
            left, reason = end - time.monotonic(), str(error)
            passing = isinstance(error, TimeoutError | ConnectionError) or error.errno in _NO_ROUTE
            if isinstance(error, ConnectionRefusedError) or not passing or left < _PAUSE_SECONDS:
                raise
            if reason not in told:
                told.add(reason)
                again = f"tried again for {left:.0f} s"
                print(f"no connection to the controller at {host}:{port} yet: {reason}; {again}", file=sys.stderr)
        time.sleep(_PAUSE_SECONDS)


async def _proven(stream: socket.socket, token: bytes, *, ours: bytes, theirs: bytes) -> Connection:
    """Authenticates: both send a random number, then an HMAC of both numbers and their role."""
    loop = asyncio.get_running_loop()
    try:
        stream.setblocking(False)
        nonce = secrets.token_bytes(PROOF_BYTES)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await loop.sock_sendall(stream, nonce)
            challenge = await _exactly(stream, PROOF_BYTES)
            if ours == b"rank":  # the connecting side proves itself first, so that other programs learn nothing
                await loop.sock_sendall(stream, _proof(token, ours, challenge, nonce))
            if not hmac.compare_digest(await _exactly(stream, PROOF_BYTES), _proof(token, theirs, nonce, challenge)):
                raise NotProven("the other side does not have this job's token")
            if ours == b"controller":
                await loop.sock_sendall(stream, _proof(token, ours, challenge, nonce))
        stream.setblocking(True)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _probe(stream)
    except BaseException as error:
        stream.close()
        if isinstance(error, TimeoutError):
            late = f"the other side did not prove within {HANDSHAKE_SECONDS:g} s that it has this job's token"
            raise TimeoutError(late) from error
        raise
    return Connection(stream.detach())


def _probe(stream: socket.socket) -> None:
    """Makes the kernel detect a lost node. No TCP_USER_TIMEOUT: it ends streams of nodes that live but do not read."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_SECONDS // 2)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_SECONDS // 6)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _proof(token: bytes, role: bytes, challenge: bytes, asking: bytes) -> bytes:
    """Returns the proof by ``role`` for the random numbers ``challenge`` (received) and ``asking`` (sent)."""
    return hmac.new(token, b"|".join((b"rl_megatron", role, challenge, asking)), hashlib.sha256).digest()


async def _exactly(stream: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        part = await loop.sock_recv(stream, count - len(data))
        if not part:
            raise NotProven("the stream ended before the other side proved that it has this job's token")
        data += part
    return data


_LEAST_BYTES = 4096  # larger arrays travel next to the pickle; smaller ones are cheaper inside

_HEAD = struct.Struct("<QI")  # bytes of the pickle, number of arrays; the bytes of each array follow, 8 bytes each
_MOST_PARTS = 64  # buffers that one system call writes

Message = tuple[bytes | bytearray, list[memoryview]]
"""A pickle, and the memory of the arrays in it."""
STACKS: Message = (b"stacks", [])  # no pickle: answered outside of the calls, in files


def pack(value: object) -> Message:
    """Returns ``value`` as a message. Its arrays must not change before it is sent."""
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
    """Yields all memory to write, in order; none of it is empty."""
    pickled, buffers = message
    sizes = struct.pack(f"<{len(buffers)}q", *(len(b) for b in buffers))
    yield memoryview(_HEAD.pack(len(pickled), len(buffers)) + sizes)
    yield memoryview(pickled)
    yield from filter(len, buffers)


def write_some(file: int, left: deque[memoryview]) -> None:
    """Writes as much of ``left`` as the stream takes now, and removes it. Raises the OSError of `os.writev`."""
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
        """True if a part of a message has arrived."""
        return self._inside

    def filled(self, count: int) -> Message | None:
        """Returns the message that the first ``count`` bytes of ``room`` complete, if they do."""
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
        """Copies bytes that were read elsewhere. Yields the messages that they complete."""
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
        """Yields the memory of a message's parts, each once the one before it is filled."""
        import numpy as np  # not earlier: the import starts threads, and a process with threads must not fork ranks

        head = bytearray(_HEAD.size)
        yield memoryview(head)
        length, count = _HEAD.unpack(head)
        sizes = bytearray(8 * count)
        if count:
            yield memoryview(sizes)
        pickled = bytearray(length)
        buffers = [np.empty(size, np.uint8).data for size in struct.unpack(f"<{count}q", sizes)]
        self._message: Message = (pickled, buffers)
        yield memoryview(pickled)
        yield from filter(len, buffers)


def send(connection: Connection, message: Message) -> None:
    """Writes one message; one thread at a time. Raises OSError if the other side has closed the stream."""
    left = deque(parts(message))
    while left:
        write_some(connection.fileno(), left)


def receive(connection: Connection) -> Message:
    """Returns the next message. Raises EOFError if the other side hung up, OSError if the stream broke."""
    coming = Incoming()
    while True:
        count = os.readv(connection.fileno(), [coming.room])
        if not count:
            raise EOFError(f"the other side hung up{' inside a message' if coming.inside else ''}")
        message = coming.filled(count)
        if message is not None:
            return message


def unpack(message: Message) -> Any:
    """Returns the value that was packed. Its tensors use the message's memory."""
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
