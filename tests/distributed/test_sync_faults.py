"""Weight syncs that go wrong, in six real processes: four learner ranks fill an engine of two.

What is never wrong: a version is served by both engine ranks, whole and equal to the bit to its Hugging Face source, or
by none; and the next sync repairs what a fault left.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.qwen3_moe import ENGINE_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import plan, plan_into
from rl_megatron.weights.routes.delta import DeltaTransport
from rl_megatron.weights.routes.ends import Parcel
from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging
from rl_megatron.weights.routes.last_hop import LearnerEnd, end_beside
from rl_megatron.weights.routes.rendezvous import Keeper, Member, Rendezvous
from tests.distributed.test_transport import hf_tensors, megatron_tensors
from tests.forks import FORKS
from tests.small_models import SMALL_MOE

LEARNERS, ENGINES = 4, 2
WORLD = LEARNERS + ENGINES
BUCKET_BYTES = 128
TIMEOUT = 900.0  # seconds that a process waits for another; what ends only by it fails, since answers have `LIMIT`
LIMIT = 600.0  # seconds for a call
LAYOUTS = {"tp2 ep2": ParallelDims(tp=2, ep=2, dp=2), "pp2 ep2": ParallelDims(pp=2, ep=2, dp=2)}
REPLICAS = {"tp2": ParallelDims(tp=2, etp=2), "ep2": ParallelDims(tp=2, ep=2)}


def weights(seed: int, changes: int | None) -> dict[str, Tensor]:
    """A Hugging Face model; where ``changes`` is given, model 1 with so many elements of each tensor from ``seed``."""
    out = hf_tensors(seed if changes is None else 1)
    for name, tensor in hf_tensors(seed).items() if changes else ():
        out[name].view(-1)[:changes] = tensor.view(-1)[:changes]
    return out


def engine_tensors(hf: Mapping[str, Tensor], dims: ParallelDims, rank: int) -> dict[str, Tensor]:
    """A rank of a two-rank engine, cut without the table: stacked q, k and v; experts cut or spread."""
    half = lambda x, dim=0: x.chunk(2, dim)[rank]  # noqa: E731
    out = {name: tensor for name, tensor in hf.items() if "norm" in name or name.endswith("mlp.gate.weight")}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        out[name] = half(torch.nn.functional.pad(hf[name], (0, 0, 0, -len(hf[name]) % 16)))
    for layer in range(SMALL_MOE.num_layers):
        p = f"model.layers.{layer}."
        q, k, v, o = (hf[f"{p}self_attn.{x}_proj.weight"] for x in "qkvo")
        out[p + "self_attn.qkv_proj.weight"] = torch.cat([half(q), half(k), half(v)])
        out[p + "self_attn.o_proj.weight"] = half(o, 1)
        for e in range(SMALL_MOE.num_experts):
            gate, up, down = (hf[f"{p}mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down"))
            if dims.ep == 1:
                out[f"{p}mlp.experts.w13_weight.{e}"] = torch.cat([half(gate), half(up)])
                out[f"{p}mlp.experts.w2_weight.{e}"] = half(down, 1)
            elif e // (SMALL_MOE.num_experts // 2) == rank:
                out[f"{p}mlp.experts.w13_weight.{e}"] = torch.cat([gate, up])
                out[f"{p}mlp.experts.w2_weight.{e}"] = down
    return out


class Wire:
    """Adds up the bytes that a process group is given to send."""

    num_bytes = 0


class CountingTransport(ProcessGroupTransport):
    def start(self, ops: Any, version: int) -> list[dist.Work]:
        Wire.num_bytes += sum(buffer.nbytes for op, buffer, _ in ops if op is dist.isend)
        return super().start(ops, version)


def _digest_bytes(transport: ProcessGroupTransport) -> int:
    """The bytes other than payload in all parcels that a rank sends."""
    return sum(len(s.send.buffer) - s.send.bucket.num_bytes for s in transport.steps if s.send is not None)


@dataclass
class Engine:
    """An engine that knows which version it serves."""

    version: int | None = None

    def withdraw(self) -> None:
        self.version = None

    def serve(self, version: int) -> None:
        self.version = version


class Process:
    """One rank. Learners come first; every call is made on all ranks together."""

    def __init__(self, rank: int) -> None:
        self.rank, self.engine = rank, Engine()
        self.transport = self.staging = self.member = None
        self.src: dict[str, Tensor] = {}
        self.dst: dict[str, Tensor] = {}

    def connect(self, rendezvous: str | Rendezvous, kind: str, learner: str, engine: str) -> None:
        """Join a new group and make a transport over it. What a process holds stays."""
        self.leave()
        if isinstance(rendezvous, Rendezvous):
            self.member = Member(rendezvous, self.rank)
        else:
            limit, address = timedelta(seconds=TIMEOUT), f"file://{rendezvous}"
            dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=WORLD, timeout=limit)
        self.dims, self.to = LAYOUTS[learner], REPLICAS[engine]
        src = Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE, dims=self.dims)
        dst = Layout(table=ENGINE_QWEN3_MOE, shape=SMALL_MOE, dims=self.to)
        placement = {r: LEARNERS + r for r in range(ENGINES)}
        moves = plan_into(src, dst, self.member.receivers) if self.member else plan(src, dst, placement=placement)
        if self.rank < LEARNERS:
            self.src = megatron_tensors(hf_tensors(0), self.dims, self.rank)
        else:
            shapes = dst.local_shapes(self.rank - LEARNERS)
            if {name: tuple(t.shape) for name, t in self.dst.items()} != shapes:
                self.dst = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
        if self.member is not None:
            more = {"member": self.member, "bytes_into": lambda process: BUCKET_BYTES}
            learns = self.rank < LEARNERS
            self.transport = (
                LearnerEnd(moves, src=self.src, **more) if learns else end_beside(moves, dst=self.dst, **more)
            )
        else:
            make = {"gloo": CountingTransport, "delta": DeltaTransport}[kind]
            self.transport = make(moves, src=self.src, dst=self.dst, bucket_bytes=BUCKET_BYTES)
        self.planned = 4 * sum(plan(src, dst, placement=placement).traffic().values())
        self.staging = Staging(self.transport, self.engine if self.rank >= LEARNERS else None)
        self._unpack, self._pack = self.transport.ends.unpack, self.transport.ends.pack

    def leave(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.transport = None
        if self.member is not None:
            self.member.close()
        self.member = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def train(self, seed: int, changes: int | None) -> None:
        if self.rank < LEARNERS:
            for name, tensor in megatron_tensors(weights(seed, changes), self.dims, self.rank).items():
                self.src[name].copy_(tensor)

    def stage(self, version: int) -> tuple[str, str]:
        Wire.num_bytes = 0
        try:
            self.update = self.staging.stage(version)
        except SyncError as error:
            if not isinstance(error, CorruptionError):
                self.leave()  # others may wait for this process
            return type(error).__name__, str(error)
        return "staged", ""

    def commit(self, version: int) -> None:
        self.staging.commit(version)

    def serves(self) -> int | None:
        return self.engine.version

    def holds(self, seed: int, changes: int | None) -> str:
        """The first tensor that is not, bit for bit, the one cut from the Hugging Face source."""
        if self.rank < LEARNERS:
            return ""
        wanted = engine_tensors(weights(seed, changes), self.to, self.rank - LEARNERS)
        rows = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), SMALL_MOE.vocab_size)
        if wanted.keys() != self.dst.keys():
            return f"{wanted.keys() ^ self.dst.keys()}"
        for name, tensor in wanted.items():
            real = rows.get(name, len(tensor))  # padding is never written
            real = max(0, min(len(tensor), real - (self.rank - LEARNERS) * len(tensor))) if name in rows else real
            if not torch.equal(self.dst[name][:real], tensor[:real]):
                return name
        return ""

    def bytes(self) -> tuple[int, int, int]:
        """(the plan's of all ranks, received by this one, on this one's wire less digests)."""
        wire = Wire.num_bytes - _digest_bytes(self.transport) if isinstance(self.transport, CountingTransport) else -1
        return self.planned, self.update.num_bytes, wire

    def flip(self, at: int) -> None:
        """Flip a bit of the ``at``-th parcel that arrives here, between the wire and the tensors; once."""
        seen = 0

        def unpack(parcel: Parcel, version: int) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                parcel.payload[len(parcel.payload) // 2] ^= 4
            self._unpack(parcel, version)

        self.transport.ends.unpack = unpack

    def die(self, at: int, end: str) -> None:
        """Kill this process at the ``at``-th parcel that is packed or unpacked here."""
        seen, do = 0, {"pack": self._pack, "unpack": self._unpack}[end]

        def call(parcel: Parcel, version: int) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            do(parcel, version)

        setattr(self.transport.ends, end, call)


def _main(connection: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    process = Process(rank)
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = connection.recv()
            connection.send(getattr(process, name)(*arguments))


class Ranks:
    """The test's handle on all processes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._joined = folder, 0
        self._keeper = Keeper("127.0.0.1", TIMEOUT)
        self.processes: list[Any] = [None] * WORLD
        self.connections: list[Connection] = [None] * WORLD  # type: ignore[list-item]
        for rank in range(WORLD):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start a rank, or start it again."""
        ours, theirs = FORKS.Pipe()
        self.processes[rank] = FORKS.Process(target=_main, args=(theirs, rank), daemon=True)
        self.processes[rank].start()
        theirs.close()
        self.connections[rank] = ours

    def ready(self) -> None:
        """Wait for the ranks that were started: under load that takes longer than they wait for each other."""
        self.each("serves")

    def connect(self, kind: str, learner: str = "tp2 ep2", engine: str = "tp2") -> None:
        self.ready()
        self._joined += 1
        at: str | Rendezvous = str(self._folder / f"rendezvous{self._joined}")
        if kind == "last hop":
            at = self._keeper.rendezvous(WORLD, learners=LEARNERS, backend="gloo")
        self.each("connect", at, kind, learner, engine)

    def ask(self, ranks: range | list[int], name: str, *arguments: Any) -> dict[int, Any]:
        """Answers by rank; "killed" for a killed rank."""
        for rank in ranks:
            self.connections[rank].send((name, arguments))
        out: dict[int, Any] = {}
        for rank in ranks:
            try:
                assert self.connections[rank].poll(LIMIT), f"rank {rank} does not answer {name}"
                out[rank] = self.connections[rank].recv()
            except EOFError:
                self.processes[rank].join(LIMIT)
                out[rank] = ("killed", -self.processes[rank].exitcode)
        return out

    def each(self, name: str, *arguments: Any) -> list[Any]:
        return list(self.ask(range(WORLD), name, *arguments).values())

    def push(self, version: int) -> list[tuple[str, str]]:
        """Run both phases: commit everywhere if staged everywhere."""
        answers = self.each("stage", version)
        if all(how == "staged" for how, _ in answers):
            self.each("commit", version)
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


BOX = re.compile(r"weight\S* \(\(\d")  # a tensor and its box; which one it is depends on what arrives first
ENGINE_RANKS = range(LEARNERS, WORLD)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


def check_served(ranks: Ranks, version: int, seed: int, changes: int | None = None) -> None:
    assert ranks.each("serves")[LEARNERS:] == [version] * ENGINES
    assert ranks.each("holds", seed, changes) == [""] * WORLD


def maps_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


@pytest.mark.parametrize("kind", ["gloo", "last hop"])
def test_four_learner_ranks_fill_two_engine_ranks_to_the_bit(ranks: Ranks, kind: str) -> None:
    for learner in LAYOUTS:
        for engine in REPLICAS:
            ranks.connect(kind, learner, engine)
            for version in (1, 2):
                ranks.each("train", version, None)
                assert {how for how, _ in ranks.push(version)} == {"staged"}
                check_served(ranks, version, version)
            planned, received, wire = zip(*ranks.each("bytes"), strict=True)
            assert sum(received[LEARNERS:]) == planned[0]
            assert kind != "gloo" or sum(wire) == planned[0]


@pytest.mark.parametrize("kind", ["gloo", "delta"])
def test_a_corrupted_byte_is_found_named_never_served_and_repaired(ranks: Ranks, kind: str) -> None:
    ranks.connect(kind)
    ranks.each("train", 1, None)
    ranks.push(1)
    check_served(ranks, 1, 1)
    ranks.each("train", 2, None)
    ranks.ask([LEARNERS], "flip", 3)
    answers = ranks.push(2)
    assert [how for how, _ in answers] == ["staged"] * 4 + ["CorruptionError", "staged"]
    message = answers[LEARNERS][1]
    assert "version 2" in message
    assert f"on rank {LEARNERS} is not" in message
    assert BOX.search(message)
    assert any(f"as rank {sender} sent it" in message for sender in range(LEARNERS))
    assert ranks.each("serves")[LEARNERS:] == [None, None]
    assert {how for how, _ in ranks.push(2)} == {"staged"}
    check_served(ranks, 2, 2)


def test_delta_sends_what_changed_and_nothing_of_what_did_not(ranks: Ranks) -> None:
    ranks.connect("delta")
    moved = []
    for version, changes in ((1, 0), (2, 2), (3, 2)):
        ranks.each("train", 2, changes)
        assert {how for how, _ in ranks.push(version)} == {"staged"}
        moved.append(sum(received for _, received, _ in ranks.each("bytes")))
        check_served(ranks, version, 2, changes)
    whole = ranks.each("bytes")[0][0]
    assert moved[0] == whole
    assert moved[2] < moved[1] < whole


@pytest.mark.parametrize(("kind", "lost", "end"), [("gloo", 1, "pack"), ("last hop", WORLD - 1, "unpack")])
def test_a_killed_process_is_named_and_the_next_sync_repairs(ranks: Ranks, kind: str, lost: int, end: str) -> None:
    ranks.connect(kind)
    ranks.each("train", 1, None)
    ranks.push(1)
    check_served(ranks, 1, 1)
    ranks.each("train", 2, None)
    ranks.ask([lost], "die", 5, end)
    answers = ranks.push(2)
    assert answers[lost] == ("killed", signal.SIGKILL)
    told = [message for how, message in answers if how == "SyncError"]
    assert told
    assert any(f"rank {lost}" in message and "waited for" in message and BOX.search(message) for message in told)
    alive = [rank for rank in ENGINE_RANKS if rank != lost]
    assert set(ranks.ask(alive, "serves").values()) == {None}
    ranks.start(lost)
    ranks.connect(kind)
    ranks.each("train", 2, None)
    assert {how for how, _ in ranks.push(2)} == {"staged"}
    check_served(ranks, 2, 2)


def test_rings_have_no_name_that_could_be_left_behind(ranks: Ranks) -> None:
    ranks.connect("last hop")
    rings = {line.split(maxsplit=5)[5] for line in maps_of(ranks.processes[0].pid) if "weights" in line}
    assert rings == {"/memfd:weights (deleted)"}
