"""Pushes into engines that fail, rings, handles and pinned memory on their way, and what a commit serves."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import socket
import zlib
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from typing_extensions import override

from rl_megatron.errors import AllReplicasLost, ConfigError, CorruptionError, SyncError, WeightError
from rl_megatron.types import ParallelDims, WeightUpdate
from rl_megatron.weights.bytes.parked import Extent, PinnedPool
from rl_megatron.weights.checks.libraries import FIELDS
from rl_megatron.weights.checks.reports import NO_KINDS, ChecksumReport, Kinds
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.layouts.tables.grouped_query import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import Place, Transfer, from_json, plan
from rl_megatron.weights.routes import ends
from rl_megatron.weights.routes import rendezvous as joined
from rl_megatron.weights.routes import rendezvous as words
from rl_megatron.weights.routes.delivery import DirectDelivery, FileDelivery
from rl_megatron.weights.routes.ends import PIECE_BYTES, Bucket, Dtypes, PlanEndpoint, _split
from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging
from rl_megatron.weights.routes.last_hop import _HELLO, CudaRings, Rings, run_rounds
from rl_megatron.weights.routes.mirror import Mirror
from rl_megatron.weights.routes.rendezvous import Peers, Rendezvous, RendezvousMember, RendezvousStore
from tests.distributed.test_transport import hf_tensors, megatron_tensors
from tests.small_models import SMALL_MOE

LIMIT = 100.0  # seconds, which nobody may wait


@dataclass
class Ends:
    """A learner's rank and a server's; the one that has no error waits for the other."""

    learner: Exception | None = None  # why it does not come
    server: Exception | None = None  # likewise; it dies where neither has an error
    alive: list[str] = field(default_factory=lambda: ["it"])

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        if self.learner is not None:
            raise self.learner
        if self.server is None:
            self.alive.clear()
        await asyncio.to_thread(RendezvousMember, rendezvous, 0)

    async def join(self, path: Path, rendezvous: Mapping[str, object], first: Mapping[str, int]) -> None:
        if self.server is not None:
            raise self.server
        if self.learner is None:
            while self.alive:
                await asyncio.sleep(0.01)
            raise SyncError("the server is gone")
        await asyncio.to_thread(RendezvousMember, Rendezvous(**rendezvous), first["it"])  # type: ignore[arg-type]

    async def send(self, version: int) -> tuple[WeightUpdate, Sequence[ChecksumReport]]:
        raise AssertionError

    def names(self) -> Sequence[str]:
        return self.alive

    def stale(self, name: str) -> bool:
        return False

    async def boxes(self, path: Path) -> Mapping[str, Sequence[Boxes]]:
        return {"it": [{}]}

    async def load(
        self, path: Path, version: int, *, straight: Collection[str] = (), private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[ChecksumReport]]:
        raise AssertionError


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("learner", WeightError("no plan leads there")),
        ("learner", SyncError("the learner is gone")),
        ("server", SyncError("http://it: status 400")),
        ("server", SyncError("http://it: its reservation was cancelled, and all were")),
    ],
)
def test_the_error_of_the_end_that_does_not_come_is_raised(end: str, why: Exception, tmp_path: Path) -> None:
    """Whatever its text: the other end's is that it was cancelled, with the same text."""
    with pytest.raises(type(why)) as raised:
        asyncio.run(push(Ends(**{end: why}), tmp_path))
    assert raised.value is why


async def push(ends: Ends, folder: Path, backend: str = "gloo") -> None:
    keeper = RendezvousStore("127.0.0.1", LIMIT)
    file = FileDelivery(learner=ends, path=folder, servers=ends)
    direct = DirectDelivery(file=file, learner=ends, servers=ends, keeper=keeper, learner_ranks=1, backend=backend)
    async with asyncio.timeout(LIMIT / 2), direct.sending(1) as deliver:
        await deliver(private=NO_KINDS, meanwhile=lambda: None)


def test_a_server_that_dies_meanwhile_is_no_end(tmp_path: Path) -> None:
    with pytest.raises(AllReplicasLost, match="a server died while the learner joined its group"):
        asyncio.run(push(Ends(), tmp_path))


def test_ranks_meet_at_one_address_and_what_comes_there_is_never_unpickled() -> None:
    keeper = RendezvousStore("127.0.0.1", LIMIT)
    rendezvous = keeper.rendezvous(1, learners=1, backend="gloo")
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == rendezvous.port] == ["127.0.0.1"]
    with pytest.raises(ConfigError, match=r"weights\.rendezvous_host=192\.0\.2\.1: .*controller's node"):
        RendezvousStore("192.0.2.1", LIMIT)  # of nobody (RFC 5737)
    member = RendezvousMember(rendezvous, 0)
    assert member.group is None  # it would be alone in it
    member.group = member._new_group(1, timedelta(seconds=LIMIT))
    try:
        assert member.broadcast({"a": [1, None]}) == {"a": [1, None]}
        assert member.gather(["b"]) == [["b"]]
        assert words.gather_json(["b"], member.group) == [["b"]]
        with pytest.raises(SyncError, match="rank 3 sent no compressed JSON"):
            words.inflated(pickle.dumps(print), 3)
        with pytest.raises(SyncError, match="announced 1099511627776 bytes"):
            words._checked(2**40)
        with pytest.raises(WeightError, match="is not a plan of weights"):
            from_json([[1, 2]])
    finally:
        member.close()


def test_values_that_no_key_of_the_store_holds_arrive_whole() -> None:
    """torch's store takes 8 MiB a key; a plan for 768 ranks is larger. These do not compress."""
    keeper = RendezvousStore("127.0.0.1", LIMIT)
    rendezvous = keeper.rendezvous(2, learners=1, backend="gloo")
    plan, place = (b64encode(os.urandom(size * 2**20)).decode() for size in (20, 5))
    said = {0: plan, 1: None}, {0: "here", 1: place}

    def come(rank: int) -> tuple[object, list[object]]:
        member = RendezvousMember(rendezvous, rank)
        return member.broadcast(said[0][rank]), member.gather(said[1][rank])

    with ThreadPoolExecutor(2) as threads:
        for told, gathered in threads.map(come, (0, 1)):
            assert told == plan
            assert gathered == ["here", place]


def test_what_a_peer_compressed_fills_no_memory_and_may_be_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_MOST_BYTES", 1000)
    assert words.inflated(words.deflated("0" * 998), 3) == "0" * 998
    with pytest.raises(SyncError, match="announced 1001 bytes"):
        words.deflated("0" * 999)
    for data in (zlib.compress(b"0" * 1001), words.deflated([1])[:-1], zlib.compress(b"?"), b"?", b""):
        with pytest.raises(SyncError, match="rank 3 sent no compressed JSON"):
            words.inflated(data, 3)


def test_a_store_that_is_lost_fails_what_was_asked_of_it() -> None:
    keeper = RendezvousStore("127.0.0.1", LIMIT)
    member = RendezvousMember(keeper.rendezvous(1, learners=1, backend="gloo"), 0)
    port = member.rendezvous.port
    del keeper
    asks = (
        (partial(member.barrier, "version 3"), "version 3"),
        (partial(member.broadcast, 1), "joining the group/said/1"),
    )
    for ask, what in asks:
        with pytest.raises(SyncError, match=rf"{what} failed, .* rank 0 asked the controller's store at \S+:{port}"):
            ask()


@dataclass
class Met(Ends):
    """Both ends come. The server's error loses its text on the way, as of one that answers with status 500."""

    errors: list[str] = field(default_factory=list)

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        await self._come(rendezvous, 0)

    async def join(self, path: Path, rendezvous: Mapping[str, object], first: Mapping[str, int]) -> None:
        try:
            await self._come(Rendezvous(**rendezvous), first["it"])  # type: ignore[arg-type]
        except SyncError as error:
            raise SyncError("http://it: status 500") from error

    async def _come(self, rendezvous: Rendezvous, rank: int) -> None:
        try:
            await asyncio.to_thread(RendezvousMember, rendezvous, rank)
        except SyncError as error:
            self.errors.append(str(error))
            raise


def test_ranks_with_other_libraries_find_it_out_when_they_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever environment they are in: a container, an attached server. Before NCCL would, in words of its own."""
    value = r"2\.29\.[78] \(rank [01]\)"
    handles = "the number of fields of torch's handles of GPU memory"
    for nodes, name, said in (("ab", "nccl", "NCCL"), ("aa", "handle", handles)):
        both = iter([{**dict.fromkeys(FIELDS, "1"), name: known} for known in ("2.29.7", "2.29.8")])
        places = iter([Place(node=node, name="", gpu=node) for node in nodes])  # threads share it: no generator
        monkeypatch.setattr(joined, "facts", lambda libraries, fields, both=both: next(both))
        monkeypatch.setattr(joined, "own_place", lambda tensors, places=places: next(places))
        ends = Met()
        with pytest.raises(SyncError, match=f"{said} differs: {value} and {value}; install") as raised:
            asyncio.run(push(ends, tmp_path, "nccl"))
        assert ends.errors == [str(raised.value)] * 2


def test_ranks_have_alike_only_what_they_use_together() -> None:
    """Rank 2 is a member of the group, rank 3 gets all through rank 1's memory."""
    known, places = dict.fromkeys(FIELDS, "1"), [Place(node=node, name="", gpu=node) for node in "abcb"]
    rendezvous = Rendezvous(host="", port=0, name="", size=4, num_learner_ranks=2, seconds=1.0, backend="nccl")

    def unlike(rank: int, **other: str) -> str:
        have = [{**known, **(other if rank == one else {})} for one in range(4)]
        return joined._describe_mismatch(
            rendezvous, [json.dumps(one).encode() for one in zip(places, have, strict=True)]
        )

    assert unlike(0) == unlike(3, nccl="2", torch="2") == unlike(2, handle="2") == unlike(0, handle="2") == ""
    assert "NCCL differs: 1 (rank 0, rank 1) and 2 (rank 2)" in unlike(2, nccl="2")
    assert "handles of GPU memory differs: 1 (rank 1) and 2 (rank 3)" in unlike(3, handle="2")
    assert "handles of GPU memory differs: 2 (rank 1) and 1 (rank 3)" in unlike(1, handle="2")


@dataclass
class Pushed(Ends):
    """Both ends come, exchange values and stay for versions, of which nothing is moved."""

    members: dict[int, RendezvousMember] = field(default_factory=dict)

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        await asyncio.to_thread(self._come, rendezvous, 0)

    async def join(self, path: Path, rendezvous: Mapping[str, object], first: Mapping[str, int]) -> None:
        await asyncio.to_thread(self._come, Rendezvous(**rendezvous), first["it"])  # type: ignore[arg-type]

    def _come(self, rendezvous: Rendezvous, rank: int) -> None:
        self.members[rank] = RendezvousMember(rendezvous, rank)
        self.members[rank].broadcast("of several parts" if rank == 0 else None)
        self.members[rank].gather(rank)

    async def send(self, version: int) -> tuple[WeightUpdate, Sequence[ChecksumReport]]:
        await asyncio.to_thread(self.members[0].barrier, f"version {version}")
        return WeightUpdate(version=version, num_bytes=0, seconds=0.0), [ChecksumReport(rows=[], seconds=0.0)]

    async def load(
        self, path: Path, version: int, *, straight: Collection[str] = (), private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[ChecksumReport]]:
        await asyncio.to_thread(self.members[1].barrier, f"version {version}")
        return {"it": [ChecksumReport(rows=[], seconds=0.0)]}


async def test_the_store_of_a_long_run_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks said is gone once all have left; of rendezvous the last two are there."""
    monkeypatch.setattr(joined, "_PART_BYTES", 8)
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "w" / "model.safetensors"
    Mirror.make(path, {}, torch.bfloat16, tmp_path / "config.json")
    ends, keeper = Pushed(), RendezvousStore("127.0.0.1", LIMIT)
    file = FileDelivery(learner=ends, path=path, servers=ends)  # type: ignore[arg-type]
    how = {"learner_ranks": 1, "backend": "gloo"}
    direct = DirectDelivery(file=file, learner=ends, servers=ends, keeper=keeper, **how)  # type: ignore[arg-type]

    async def keys(version: int) -> int:
        async with asyncio.timeout(LIMIT / 2), direct.sending(version) as deliver:
            await deliver(private=NO_KINDS, meanwhile=lambda: None)
        return keeper._store.num_keys()

    found = [await keys(version) for version in range(5)]
    for version in (4, 5):
        direct._rendezvous, direct._met = None, frozenset()  # as after a server is new
        found.append(await keys(version))
    assert found == [4] * 5 + [8] * 2  # each rank's libraries, how many came, and that all did


@dataclass
class Many(Ends):
    """Servers of two ranks that hold the same as those of every other server, and that die before they join."""

    servers: int = 1
    told: Sequence[Boxes] = ()

    async def boxes(self, path: Path) -> Mapping[str, Sequence[Boxes]]:
        self.alive = [f"server {i}" for i in range(self.servers)]
        return {name: [{f"layers.{i}": ((r, r + 1), (0, 9)) for i in range(99)} for r in (0, 1)] for name in self.alive}

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        self.told = ranks
        self.alive = []

    async def join(self, path: Path, rendezvous: Mapping[str, object], first: Mapping[str, int]) -> None:
        raise SyncError("it is gone")


def test_what_ranks_of_like_servers_hold_is_told_once(tmp_path: Path) -> None:
    """To each of the learner's ranks: of a thousand engine ranks it is gigabytes."""
    sizes = []
    for servers in (1, 64):
        many = Many(servers=servers)
        with pytest.raises(AllReplicasLost):
            asyncio.run(push(many, tmp_path))
        assert list(many.told) == [one for said in asyncio.run(many.boxes(tmp_path)).values() for one in said]
        sizes.append(len(pickle.dumps(many.told)))
    assert sizes[1] - sizes[0] < 126 * 8  # a reference each


class Refusing(Met):
    """The learner's rank refuses after both met, as one that finds no carrier for an engine rank."""

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        await super().join_engines(rendezvous, ranks)
        raise ConfigError("no learner rank is there")

    async def _come(self, rendezvous: Rendezvous, rank: int) -> None:
        def come() -> None:
            member = RendezvousMember(rendezvous, rank)
            if rank:
                member.gather("what the learner never answers")

        await asyncio.to_thread(come)


def test_a_refusal_after_both_ends_met_cancels_the_other_and_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no learner rank is there"):
        asyncio.run(push(Refusing(), tmp_path))


def test_a_torch_that_makes_groups_otherwise_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def helper(
        group_size: int, group_rank: int, ranks: list[int], backend: str, store: object, group_name: str
    ) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "__version__", "2.99.0")
    for make, why in ((helper, "missing a required argument: 'ranks'"), (None, "None is not a callable object")):
        monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", make)
        with pytest.raises(ConfigError, match=rf"torch 2\.99\.0 makes process groups otherwise .*{why}\); install"):
            RendezvousStore("127.0.0.1", LIMIT)


class Group:
    """A process group over NCCL that notes what happens to it."""

    def __init__(self, heard: list[object], **made: Any) -> None:
        self.heard = heard
        heard.append((made["backend"], os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))

    def abort(self) -> None:
        self.heard.append("abort")


@pytest.mark.parametrize("before", [None, "0"])
def test_a_group_over_nccl_is_connected_at_once_waits_for_bytes_and_ends_without_lost_ranks(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL connects ranks in a group's first call, in which all must be; a push may begin with few of them. Without
    blocking waits (an environment variable, read when a group is made) a lost rank is never told, and without an abort
    a group's end waits for it."""
    heard: list[object] = []
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if before:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)

    def make(*, group_size: int, **made: Any) -> tuple[Group, None]:
        return Group(heard, **made), None

    monkeypatch.setattr(joined, "check_torch", lambda: None)
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(joined, "wire_device", lambda group: "meta")
    monkeypatch.setattr(joined.dist, "all_reduce", lambda x, group: heard.append((x.device.type, group)))
    monkeypatch.setattr(joined.dist, "destroy_process_group", lambda group: heard.append("end"))
    keeper = RendezvousStore("127.0.0.1", LIMIT)
    member = RendezvousMember(keeper.rendezvous(1, learners=1, backend="nccl"), 0)
    member.group = member._new_group(1, timedelta(seconds=LIMIT))
    assert heard == [("nccl", "1"), ("meta", member.group)]
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    member.close()
    assert heard[2:] == ["abort", "end"]


def test_a_group_over_nccl_is_not_split_out_of_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM binds its default group to a GPU if VLLM_DISTRIBUTED_USE_SPLIT_GROUP=1; the other ranks are not in it."""
    keeper = RendezvousStore("127.0.0.1", 0.1)
    rendezvous = keeper.rendezvous(2, learners=1, backend="nccl")
    monkeypatch.setattr(joined.dist, "is_initialized", lambda: True)
    for device, error, said in (
        (torch.device("meta"), ConfigError, "VLLM_DISTRIBUTED_USE_SPLIT_GROUP=0, or set weights.transport=file"),
        (None, SyncError, r"waited 0\.1 s for ranks \[1\]"),
    ):
        own = SimpleNamespace(bound_device_id=device)
        monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda own=own: own)
        with pytest.raises(error, match=said):
            RendezvousMember(rendezvous, 0)


# Rings between processes of which one dies between the rendezvous and its connection.
class Dying(Peers):
    """This process, rank 0, and others: after the rendezvous they listen no more, and ``last`` is all that they do."""

    rank, size = 0, 4

    def __init__(self, last: Callable[[bytes], None] = lambda address: None) -> None:
        self._last = last

    @override
    def gather(self, mine: Any) -> list[Any]:
        self._last(bytes.fromhex(mine))
        return [mine, *((b"\0" + os.urandom(16)).hex() for _ in range(1, self.size))]


def made(slots: dict[tuple[int, int], int], peers: Peers) -> Rings:
    ends: Any = SimpleNamespace(rank=0, device=torch.device("cpu"))
    return Rings(ends, slots, lambda peer, slots, leaving: [], peers=peers, timeout_seconds=0.05)


def cut_off(address: bytes) -> None:
    """Connect, and end before the first word."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)


def cut_off_later(address: bytes) -> None:
    """Connect, announce more than is sent, and end."""
    with socket.socket(socket.AF_UNIX) as connection, Path("/dev/null").open() as file:
        connection.connect(address)
        socket.send_fds(connection, [_HELLO.pack(2, 4096, 9), b"four"], [file.fileno()])


@pytest.mark.parametrize(
    ("slots", "last", "said"),
    [
        ({(0, 2): 8, (3, 0): 8}, None, "rank 0 waited for rank 2 to take .*refused"),
        ({(2, 0): 8, (3, 0): 8}, None, "rank 0 waited for rank 2 or 3 to offer .*timed out"),
        ({(2, 0): 8}, cut_off, "rank 0 waited for rank 2 to offer .*its connection is closed"),
        ({(2, 0): 8}, cut_off_later, "rank 0 waited for rank 2 to offer .*its connection is closed"),
    ],
)
def test_a_process_that_dies_before_it_is_connected_is_named(
    slots: dict[tuple[int, int], int], last: Callable[[bytes], None] | None, said: str
) -> None:
    with pytest.raises(SyncError, match=said):
        made(slots, Dying() if last is None else Dying(last))


# CUDA IPC between processes that number the GPUs otherwise; torch's handles are doubles, as there is no GPU.
HANDLE = (3, b"\x01handle", 64, 0, b"\x02counter", 0, b"\x03event", False)  # of the sender's GPU 3


class Opened(Exception):
    """What torch was asked to open."""


def sees(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number]))


def told(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The ring's description by the sender, which sees four GPUs."""
    sees(monkeypatch, "a", "b", "c", "d")
    ring = SimpleNamespace(untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: HANDLE))
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: ring)
    rings = CudaRings.__new__(CudaRings)
    rings.ends = SimpleNamespace(device="cuda")  # type: ignore[assignment]
    _, message, _ = rings._new_ring(64)
    return message


def opened(monkeypatch: pytest.MonkeyPatch, message: bytes) -> tuple[object, ...]:
    def open_handle(*parts: object) -> None:
        raise Opened(*parts)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_handle)
    with pytest.raises(Opened) as caught:
        CudaRings.__new__(CudaRings)._open_ring(64, message, [])
    return caught.value.args


def test_the_receiver_opens_the_gpu_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    message = told(monkeypatch)
    sees(monkeypatch, "d")
    assert opened(monkeypatch, message) == (0, *HANDLE[1:])


def test_a_gpu_that_the_receiver_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    message = told(monkeypatch)
    sees(monkeypatch, "a", "b")
    with pytest.raises(WeightError, match=r"GPU d, and this process sees a, b "):
        CudaRings.__new__(CudaRings)._open_ring(64, message, [])


# Pinned memory in pieces: bounded by what is taken at once, however sizes differ, and no byte is two's.
SLAB = 2**16


class Moment:
    """A copy that is done only when somebody waits for it."""

    def __init__(self, *, done: bool) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


class Stream:
    def wait_event(self, event: Moment) -> None:
        event.done = True


def test_ragged_steps_pin_what_the_fullest_takes_and_no_two_pieces_share_a_byte() -> None:
    draw, memory, stream = random.Random(3), PinnedPool(SLAB), Stream()
    most = 0
    for _ in range(300):  # steps, of other micro-batches each
        sizes = [draw.randrange(1, 3 * SLAB // 2) for _ in range(draw.randrange(1, 12))]
        held: list[tuple[int, list[Extent]]] = []
        for number, size in enumerate(sizes):
            extents = memory.allocate(size, stream)  # type: ignore[arg-type]
            rest = size
            for extent in extents:
                part = memory.view(extent)
                assert len(part) == extent[1] - extent[0]
                part.fill_(number)
                rest -= len(part)
            assert -512 < rest <= 0
            held.append((number, extents))
        most = max(most, sum(-(-size // 512) * 512 for size in sizes))
        draw.shuffle(held)
        for number, extents in held:
            assert all(bool((memory.view(extent) == number).all()) for extent in extents)
            memory.free(extents, Moment(done=draw.random() < 0.5))  # type: ignore[arg-type]
        assert memory.num_bytes == -(-most // SLAB) * SLAB


def test_what_is_still_copied_is_written_only_after_it_was_waited_for() -> None:
    memory, stream = PinnedPool(SLAB), Stream()
    first = memory.allocate(SLAB, stream)  # type: ignore[arg-type]
    copying = Moment(done=False)
    memory.free(first, copying)  # type: ignore[arg-type]
    second = memory.allocate(512, stream)  # type: ignore[arg-type]
    assert copying.done
    assert second == [(0, 512)]
    assert memory.num_bytes == SLAB


@pytest.mark.parametrize("size", [1, 511, 512, SLAB, SLAB + 1])
def test_a_piece_may_be_larger_than_a_slab(size: int) -> None:
    memory = PinnedPool(SLAB)
    extents = memory.allocate(size, Stream())  # type: ignore[arg-type]
    assert torch.cat([memory.view(extent) for extent in extents])[:size].numel() == size
    assert memory.num_bytes == -(-size // SLAB) * SLAB


# A process's end of a plan: its parts, their order, and what it says of those that did not arrive whole.
def end_of_one() -> PlanEndpoint:
    moves = plan(Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE), Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE))
    src = megatron_tensors(hf_tensors(0), ParallelDims(), 0)
    return PlanEndpoint(moves, rank=0, src=src, dst=hf_tensors(1), exchange=lambda mine: [mine], verify=True)


def transfer(name: str, elements: int) -> Transfer:
    shape, box = (elements,), ((0, elements),)
    return Transfer(
        layer=None,
        src_rank=1,
        src_param=name,
        src_shape=shape,
        src_box=box,
        dst_rank=0,
        dst_param=name,
        dst_shape=shape,
        dst_box=box,
    )


def test_a_cpus_parts_fit_its_cache() -> None:
    end, name = end_of_one(), next(iter(hf_tensors(0)))
    size = PIECE_BYTES // end.dst[name].dtype.itemsize

    def sizes() -> list[int]:
        buckets = end.split_buckets(0, [transfer(name, 3 * size)], 8 * PIECE_BYTES)
        return [part.num_elements for bucket in buckets for part in bucket.parts]

    assert sizes() == [size] * 3
    end.device = torch.device("meta")
    assert sizes() == [3 * size]


def test_rows_that_fit_together_are_one_part() -> None:
    assert [*_split((4, 3), 6)] == [((0, 2), (0, 3)), ((2, 4), (0, 3))]


def test_what_goes_through_a_ring_begins_with_the_ranks_own_carrier() -> None:
    bucket = Bucket(dtype=torch.float32, layer_position=0, number=0, parts=[])
    member: Any = SimpleNamespace(receiver_number=lambda to: 1, receiver_lane=lambda to: 0, grouped=range(3))
    assert [frm for _, frm, _ in run_rounds({sender: [bucket] for sender in range(3)}, 9, member)] == [1, 0, 2]


def test_a_dtype_that_others_of_its_kind_do_not_have_is_found() -> None:
    held = {"layers.0.a": torch.zeros(1), "layers.1.a": torch.zeros(1, dtype=torch.bfloat16)}
    dtypes = Dtypes.from_tensors(held)
    expected = [torch.float32, torch.bfloat16, torch.float32, None]
    assert [dtypes.find(name) for name in (*held, "layers.2.a", "b")] == expected
    assert dtypes.others == {"layers.1.a": torch.bfloat16}


@pytest.mark.parametrize(("failures", "more"), [(10, []), (13, ["and 3 more"])], ids=["ten", "more"])
def test_of_many_parts_that_did_not_arrive_ten_are_told(failures: int, more: list[str]) -> None:
    end = end_of_one()
    end._failures = [f"part {i}" for i in range(failures)]
    with pytest.raises(CorruptionError) as raised:
        end.finish(8)
    assert str(raised.value).splitlines()[10:] == ["part 9", *more]


def test_a_copy_within_a_process_is_timed_and_refused_if_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    end = end_of_one()
    parts = len(end._local)
    assert parts > 2
    monkeypatch.setattr(ends, "time", SimpleNamespace(perf_counter=count(5).__next__))
    end.begin()
    assert end.finish(8) == parts
    end._copy_on_device()
    assert end.finish(8) == parts + 1
    wrong, right = [2, 1, *[0] * (parts - 2)], [1, 2, *[0] * (parts - 2)]
    digests = iter([digest for pair in zip(wrong, right, strict=True) for digest in pair])
    monkeypatch.setattr(ends, "digest", lambda data: next(digests))
    end.begin()
    assert end._failures == [end._difference(part, 0) for part in end._local[:2]]
    both = iter([torch.tensor(right), torch.tensor(wrong)])
    monkeypatch.setattr(ends, "tensor_digests", lambda tensors: next(both))
    end._failures = []
    end._copy_on_device()
    assert end._failures == [end._difference(part, 0) for part in end._local[:2]]


# What a process serves between the phases of a commit.
@dataclass
class Engine:
    version: int | None = 7

    def withdraw(self) -> None:
        self.version = None

    def serve(self, version: int) -> None:
        self.version = version


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def one_process() -> tuple[Staging, Engine]:
    moves = plan(Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE), Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE))
    src = megatron_tensors(hf_tensors(0), ParallelDims(), 0)
    transport, engine = ProcessGroupTransport(moves, src=src, dst=hf_tensors(1)), Engine()
    return Staging(transport, engine), engine


@pytest.mark.usefixtures("group_of_one")
def test_a_version_is_served_from_its_commit_and_nothing_while_it_is_staged() -> None:
    staging, engine = one_process()
    staging.stage(8)
    assert engine.version is None
    staging.commit(8)
    assert engine.version == 8


@pytest.mark.usefixtures("group_of_one")
def test_what_was_not_staged_is_not_committed() -> None:
    staging, _ = one_process()
    with pytest.raises(SyncError, match="version 8 cannot be committed, because what is staged here is nothing"):
        staging.commit(8)
    staging.stage(9)
    with pytest.raises(SyncError, match="is version 9"):
        staging.commit(8)


class Torn:
    """A transport that fails at its second version."""

    def __init__(self) -> None:
        self.moved = 0

    def move(self, version: int) -> WeightUpdate:
        self.moved += 1
        if self.moved == 2:
            raise CorruptionError(f"version {version} did not arrive whole")
        return WeightUpdate(version=version, num_bytes=0, seconds=0.0)

    def close(self) -> None: ...


@pytest.mark.usefixtures("group_of_one")
def test_a_failed_version_takes_the_staged_one_with_it_and_serves_nothing() -> None:
    engine = Engine()
    staging = Staging(Torn(), engine)
    staging.stage(8)
    with pytest.raises(CorruptionError):
        staging.stage(9)
    for version in (8, 9):
        with pytest.raises(SyncError, match="is nothing"):
            staging.commit(version)
    assert engine.version is None
    staging.stage(9)
    staging.commit(9)
    assert engine.version == 9
