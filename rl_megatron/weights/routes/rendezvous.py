"""The rendezvous of learner and engine ranks, before each version too, and the process group of some of them.

The controller keeps the store of the rendezvous. Before ranks join, and before each version moves, every rank reports
there that it is ready. If one cannot take part, the controller cancels the rendezvous for all. So no rank blocks in a
send to a server that refuses.

Ranks exchange JSON. Nothing from a network is unpickled: gloo and NCCL accept any process that reaches them
(docs/how_it_works.md), and reading a pickle executes it.
"""

from __future__ import annotations

import inspect
import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d
from typing_extensions import override

from rl_megatron.errors import ConfigError, SyncError
from rl_megatron.weights.checks.libraries import FIELDS, HANDLE, OF_A_GROUP, compare_facts, facts, loaded_libraries
from rl_megatron.weights.plans.plan import Place, find_receivers

_MOST_BYTES = 2**30


class Peers(Protocol):
    """Processes that a plan numbers from 0 on; this one is ``rank`` of ``size``."""

    rank: int
    size: int

    def gather(self, mine: object) -> list[Any]:
        """Each process's value, by rank. Collective; raises SyncError if a process is lost."""
        ...


class GroupPeers(Peers):
    """The processes of a group; None: the default group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self.size = group, dist.get_world_size(group)
        self.rank = dist.get_rank() if group is None else group.rank()

    @override
    def gather(self, mine: object) -> list[Any]:
        return gather_json(mine, self._group)


def gather_json(mine: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Each process's value, by rank. Collective; raises SyncError if a process sends no JSON or is lost."""
    device, size = wire_device(group), dist.get_world_size(group)
    data = torch.frombuffer(bytearray(deflated(mine)), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    with _lost():
        dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = _checked(max(int(length) for length in lengths))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    said = [torch.zeros_like(padded) for _ in range(size)]
    with _lost():
        dist.all_gather(said, padded, group=group)
    whole = (one[: int(length)].cpu().numpy().tobytes() for one, length in zip(said, lengths, strict=True))
    return [inflated(data, rank) for rank, data in enumerate(whole)]


@contextmanager
def _lost() -> Iterator[None]:
    """Turns the broken connections of a lost process into a SyncError, which fails the push but not this process."""
    try:
        yield
    except RuntimeError as error:
        raise SyncError(f"a process of the group was lost: {str(error).splitlines()[0]}") from error


def wire_device(group: dist.ProcessGroup | None) -> str:
    """The device of what a group carries, as torch chooses it for objects: NCCL carries only GPU memory."""
    return str(distributed_c10d._get_object_coll_device(group))


def deflated(value: object) -> bytes:
    """A value as compressed JSON. Raises SyncError if that exceeds 1 GiB."""
    data = json.dumps(value).encode()
    _checked(len(data))
    return zlib.compress(data, 1)


def inflated(data: bytes, rank: int) -> Any:
    """The value that rank ``rank`` `deflated`. Raises SyncError if it did not, or if it exceeds 1 GiB."""
    inflate = zlib.decompressobj()
    try:
        said = inflate.decompress(data, _MOST_BYTES + 1)
        if not inflate.eof:
            raise ValueError(f"it is cut off, or has more than {_MOST_BYTES} bytes")
        return json.loads(said)
    except (ValueError, zlib.error) as error:
        raise SyncError(f"rank {rank} sent no compressed JSON: {error}") from error


def _checked(length: int) -> int:
    if not 0 <= length <= _MOST_BYTES:
        raise SyncError(f"a process of the group announced {length} bytes, of {_MOST_BYTES} at most")
    return length


JOINING = "joining the group"
_SAID = "/said"  # the part of joining at which ranks exchange values
_LOOK_SECONDS, _LOOK_SHARE, _MOST_SECONDS = 0.002, 0.02, 0.1  # a pause is this share of the wait so far
_COUNT_BYTES = 1  # the number of further parts, before the first part of a value
_PART_BYTES = 4 * 2**20  # a value's part; torch's store resets a connection that sets more than 8 MiB in one call
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"  # read by torch when a group is made
_OTHER_WAY = "or set weights.transport=file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which ``size`` ranks meet, the learner's first. ``name`` is unique; ``seconds`` limits every wait.

    ``backend`` is that of the process group: gloo, or nccl, whose ranks must have libraries alike.
    """

    host: str
    port: int
    name: str
    size: int
    num_learner_ranks: int
    seconds: float
    backend: str


class RendezvousStore:
    """The controller's side; it listens only at ``host``.

    Raises ConfigError if that is not an address of this machine, or if this torch makes groups differently.
    """

    def __init__(self, host: str, seconds: float) -> None:
        check_torch()
        self.host, self._seconds, self._last = host, seconds, ""
        limit = timedelta(seconds=seconds)
        try:
            listener = socket.create_server((host, 0), backlog=4096)  # torch's own would listen at all addresses
        except OSError as error:
            raise ConfigError(
                f"weights.rendezvous_host={host}: {error.strerror}; give an address of the controller's node"
            ) from error
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def rendezvous(self, size: int, *, learners: int, backend: str) -> Rendezvous:
        """Makes the rendezvous of a new group, under a unique name.

        Removes what is left of others but the last, because its ranks may still look whether it was canceled.
        """
        for key in self._store.list_keys():
            if not key.startswith(self._last):
                self._store.delete_key(key)
        self._last = f"rl_megatron-{secrets.token_hex(16)}"  # an engine may have been in groups of other trainers
        return Rendezvous(
            host=self.host,
            port=self._store.port,
            name=self._last,
            size=size,
            num_learner_ranks=learners,
            seconds=self._seconds,
            backend=backend,
        )

    def cancel(self, rendezvous: Rendezvous, what: str, reason: str) -> None:
        """Cancels ``what`` for all ranks that wait for the others."""
        self._store.set(f"{rendezvous.name}/{what}/cancelled", reason)

    def forget(self, rendezvous: Rendezvous, what: str) -> None:
        """Removes the values that ranks set at ``what``, which they have left. Values that they must share stay."""
        at = f"{rendezvous.name}/{what}{_SAID if what == JOINING else ''}/"
        for key in self._store.list_keys():
            if key.startswith(at):
                self._store.delete_key(key)

    def missing_ranks(self, rendezvous: Rendezvous, what: str) -> list[int]:
        """Ranks that have not reported ready for ``what``."""
        return [rank for rank in range(rendezvous.size) if not self._store.check([f"{rendezvous.name}/{what}/{rank}"])]

    def mismatch(self, rendezvous: Rendezvous) -> str:
        """Returns why ranks that have all reported ready for `JOINING` cannot be one group; empty if they can."""
        keys = [f"{rendezvous.name}/{JOINING}/{rank}" for rank in range(rendezvous.size)]
        return _describe_mismatch(rendezvous, self._store.multi_get(keys))


def own_place(tensors: Iterable[Tensor]) -> Place:
    """The place of this process, which has ``tensors``: its GPU is that of the first that is on one.

    Processes of a node reach each other by sockets and files without a name if they are one user's, in one network
    namespace.
    """
    gpu = next((gpu_uuid(t.device.index) for t in tensors if t.device.type == "cuda"), "")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(
        node=f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}",
        name=socket.gethostname(),
        gpu=gpu,
    )


def gpu_uuid(number: int) -> str:
    """The UUID of the GPU that this process gives a number."""
    return str(torch.cuda.get_device_properties(number).uuid)


class RendezvousMember(Peers):
    """Rank ``rank`` of those that meet, with ``tensors``.

    ``places`` are those of all. ``receivers`` are the `find_receivers` the engine's ranks; with the learner's ranks
    they are ``grouped``, and make the process group ``group`` if they are several. Collective; raises SyncError if not
    all ranks join in time, or have all alike. Raises ConfigError if this torch makes groups differently, or would split
    the group out of the process's own."""

    def __init__(self, rendezvous: Rendezvous, rank: int, tensors: Iterable[Tensor] = ()) -> None:
        check_torch()
        _refuse_split(rendezvous.backend)
        self.rendezvous, self.rank, self.size = rendezvous, rank, rendezvous.size
        self.group: dist.ProcessGroup | None = None
        self._gathered = 0
        limit = timedelta(seconds=rendezvous.seconds)
        try:
            self._store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=limit)
            have = facts(loaded_libraries(), [*FIELDS] if rendezvous.backend == dist.Backend.NCCL else [])
            said = self._store.multi_get(self.barrier(JOINING, json.dumps([own_place(tensors), have])))
            if why := _describe_mismatch(rendezvous, said):
                raise SyncError(why)
            self.places = [place for place, _ in map(_introduced, said)]
            self.receivers = find_receivers(self.places, rendezvous.num_learner_ranks)
            self.grouped = _grouped(self.receivers, rendezvous.num_learner_ranks)
            if rank in self.grouped and len(self.grouped) > 1:
                self.group = self._new_group(len(self.grouped), limit)
        except (RuntimeError, ValueError) as error:
            raise SyncError(
                f"rank {rank} of {rendezvous.size} learner and engine ranks did not meet the others at "
                f"{rendezvous.host}:{rendezvous.port} in {rendezvous.seconds:g} s: {error}"
            ) from error

    def receiver_number(self, process: int) -> int:
        """The group's number of the process that receives what goes into engine process ``process``."""
        return self.grouped.index(self.receivers[process - self.rendezvous.num_learner_ranks])

    def receiver_lane(self, process: int) -> int:
        """Returns how many engine processes before ``process`` have the same receiver."""
        engine = process - self.rendezvous.num_learner_ranks
        return self.receivers[:engine].count(self.receivers[engine])

    def relayed_processes(self, rank: int) -> list[int]:
        """Returns the engine processes for which learner rank ``rank`` is the relay."""
        return [self.rendezvous.num_learner_ranks + i for i, receiver in enumerate(self.receivers) if receiver == rank]

    def _new_group(self, size: int, limit: timedelta) -> dist.ProcessGroup:
        """Makes a group as torch's own new_group does, for ranks without a common default group. Connects all of them.

        NCCL does so in a group's first call, and wants every rank in it; a push may begin with a few of them.
        """
        group: dist.ProcessGroup
        with _blocking_wait():
            group, _ = distributed_c10d._new_process_group_helper(
                group_size=size,
                group_rank=self.grouped.index(self.rank),
                global_ranks_in_group=[],
                backend=dist.Backend(self.rendezvous.backend),
                store=PrefixStore(self.rendezvous.name, self._store),
                group_name=distributed_c10d.GroupName(self.rendezvous.name),
                timeout=limit,
            )
        distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
        try:  # int32, because the programs that meet here may differ in torch's default dtype
            dist.all_reduce(torch.zeros((), dtype=torch.int32, device=wire_device(group)), group=group)
        except BaseException:
            self.group = group
            self.close()
            raise
        return group

    def barrier(self, what: str, value: str | bytes = "", part: str = "") -> list[str]:
        """Waits until every rank is ready for ``what``, or a ``part`` of it; this one sets the value ``values`` with
        it.

        Returns the keys of the store at which the ranks set their values. Raises SyncError if it is canceled, some
        ranks are not in time, or the store is lost.
        """
        at, began = f"{self.rendezvous.name}/{what}", time.monotonic()
        keys = [f"{at}{part}/{rank}" for rank in range(self.rendezvous.size)]
        arrived, all_here = f"{at}{part}/arrived", f"{at}{part}/all"
        with self._asking(f"{what}{part}"):
            self._set(keys[self.rank], value)
            if self._store.add(arrived, 1) >= len(keys) and self._store.check(keys):  # only the last asks for all
                self._set(all_here, "")
            while not self._store.check([all_here]):
                if self._store.check([f"{at}/cancelled"]):
                    raise SyncError(f"{what} was cancelled: {self._store.get(f'{at}/cancelled').decode()}")
                if (waited := time.monotonic() - began) > self.rendezvous.seconds:
                    there = set(self._store.list_keys())
                    missing = [rank for rank, key in enumerate(keys) if key not in there]
                    raise SyncError(
                        f"{what} failed, and nothing is served: rank {self.rank} waited {self.rendezvous.seconds:g} s "
                        f"for ranks {missing} of learner and engines"
                    )
                time.sleep(min(max(_LOOK_SECONDS, _LOOK_SHARE * waited), _MOST_SECONDS))
        return keys

    @override
    def gather(self, mine: object) -> list[Any]:
        """Each rank's value, which is JSON, by rank. Collective, while ranks join; raises like `barrier`."""
        return self._read_values(self._meet_again(deflated(mine)))

    def broadcast(self, value: object) -> Any:
        """Rank 0's value, on every rank. Collective, while ranks join; raises like `barrier`."""
        keys = self._meet_again(deflated(value) if self.rank == 0 else b"")
        return value if self.rank == 0 else self._read_values(keys[:1])[0]

    def _meet_again(self, value: bytes) -> list[str]:
        self._gathered += 1
        part = f"{_SAID}/{self._gathered}"
        first, *others = [value[at : at + _PART_BYTES] for at in range(0, max(len(value), 1), _PART_BYTES)]
        with self._asking(f"{JOINING}{part}"):
            for number, other in enumerate(others):
                self._set(f"{self.rendezvous.name}/{JOINING}{part}/{self.rank}/{number}", other)
        return self.barrier(JOINING, len(others).to_bytes(_COUNT_BYTES) + first, part)

    def _read_values(self, keys: Sequence[str]) -> list[Any]:
        """The values of the first ranks, which set ``keys``."""
        out = []
        with self._asking(f"{JOINING}{_SAID}/{self._gathered}"):
            for rank, said in enumerate(self._store.multi_get(list(keys))):
                others = [f"{keys[rank]}/{number}" for number in range(int.from_bytes(said[:_COUNT_BYTES]))]
                out.append(inflated(b"".join([said[_COUNT_BYTES:], *map(self._store.get, others)]), rank))
        return out

    def _set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes too, whatever torch's stub says

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turns a failure of the store, which the controller keeps, into a SyncError."""
        try:
            yield
        except RuntimeError as error:
            raise SyncError(
                f"{what} failed, and nothing is served: rank {self.rank} asked the controller's store at "
                f"{self.rendezvous.host}:{self.rendezvous.port}, {str(error).splitlines()[0]}"
            ) from error

    def close(self) -> None:
        """Leaves the group, if still in it: ranks that wait for this one see its connection close. Not collective."""
        if self.group is not None:
            self.group.abort()  # NCCL would wait for what a lost rank does not send
            dist.destroy_process_group(self.group)
            self.group = None  # its connections end with the last reference


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """While a group is made: ``Work.wait`` of its NCCL returns when the bytes are there, as gloo's does.

    It raises RuntimeError once the group's timeout has passed or a rank is lost. By default it returns immediately, the
    next wait for the GPU never returns, and NCCL's watchdog ends the process, an engine's server too.
    """
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING]
        else:
            os.environ[_BLOCKING] = before


def _introduced(data: bytes) -> tuple[Place, dict[str, str | None]]:
    """The place of a rank, and what it has that others must have alike."""
    place, have = json.loads(data)
    return Place(*place), have


def _grouped(receivers: Sequence[int], learners: int) -> list[int]:
    """The processes of the group, by number in it: the learner's ranks, then the engine ranks that are members."""
    return [*range(learners), *(process for process in receivers if process >= learners)]


def _describe_mismatch(rendezvous: Rendezvous, values: Sequence[bytes]) -> str:
    """Describes how ranks, which are all here, differ in values that must be equal; the same text for every rank."""
    if rendezvous.backend != dist.Backend.NCCL:
        return ""
    places, have = zip(*map(_introduced, values), strict=True)
    receivers, learners = find_receivers(places, rendezvous.num_learner_ranks), rendezvous.num_learner_ranks
    grouped = {f"rank {rank}": {n: have[rank][n] for n in OF_A_GROUP} for rank in _grouped(receivers, learners)}
    beside = {rank for pair in enumerate(receivers, learners) if pair[0] != pair[1] for rank in pair}
    mapped = {f"rank {rank}": {n: have[rank][n] for n in HANDLE} for rank in sorted(beside)}
    found = compare_facts(grouped if len(grouped) > 1 else {}) or compare_facts(mapped)
    return found and f"learner and engine ranks, in this order, cannot be one group: {found}, {_OTHER_WAY}"


_PRIVATE = ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name", "timeout")


def check_torch() -> None:
    """Raises ConfigError if torch's function that makes a group, which is private, takes other arguments by name."""
    try:
        make = distributed_c10d._new_process_group_helper
        inspect.signature(make).bind(**dict.fromkeys(_PRIVATE))
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"torch {torch.__version__} makes process groups otherwise than the versions of docs/engines.md "
            f"(_new_process_group_helper: {error}); install one of these in this environment, {_OTHER_WAY}"
        ) from error


def _refuse_split(backend: str) -> None:
    """Raises ConfigError if torch would split a group over NCCL out of the default one, which lacks the other ranks."""
    if backend != dist.Backend.NCCL or not dist.is_initialized():
        return
    if distributed_c10d._get_default_group().bound_device_id is not None:
        raise ConfigError(
            "this process's default group is bound to a GPU, so NCCL would split the group of learner and engine ranks "
            f"out of it; start the server with VLLM_DISTRIBUTED_USE_SPLIT_GROUP=0, {_OTHER_WAY}"
        )
