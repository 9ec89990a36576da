"""The process-group transport on real gloo processes, and faults of it, against shards cut by torch itself."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from launcher.processes.guards import held_ports
from rl_megatron.errors import CorruptionError, SyncError, WeightError
from rl_megatron.features.sparse.changes import Changes
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.grouped_query import ENGINE_QWEN3_MOE, HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import Plan, plan, plan_into
from rl_megatron.weights.routes import rendezvous
from rl_megatron.weights.routes.ends import BoundBucket
from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging, Transport
from rl_megatron.weights.routes.last_hop import LearnerEnd, make_local_end
from rl_megatron.weights.routes.rendezvous import Rendezvous, RendezvousMember, RendezvousStore
from tests.distributed.ranks import run_ranks
from tests.forks import FORKS
from tests.small_models import SMALL_MOE

SHAPE = SMALL_MOE
BUCKET_BYTES = 40  # a row of the hidden size fits (32 bytes), one of the attention output does not (64)


def _process(rank: int, world_size: int, port: int, body: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        body(rank, folder)
    finally:
        dist.destroy_process_group()


def spawn(world_size: int, body: Callable[[int, Path], None], folder: Path) -> None:
    with held_ports("127.0.0.1") as port:
        run_ranks(_process, world_size, world_size, port, body, folder)


def hf_tensors(version: int) -> dict[str, Tensor]:
    """The same on every process, other numbers for each version."""
    generator = torch.Generator().manual_seed(version)
    shapes = Layout(table=HF_QWEN3_MOE, shape=SHAPE).local_shapes(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def megatron_tensors(
    hf: dict[str, Tensor], dims: ParallelDims, rank: int, shape: ModelShape | None = None
) -> dict[str, Tensor]:
    """A rank's shards, cut without the table: two stages of one layer, tp over attention and vocabulary, ep experts."""
    shape = shape or SHAPE
    inner = dims.tp * dims.dp
    stage, tp, ep = rank // inner, rank % dims.tp, rank % inner % dims.ep
    out: dict[str, Tensor] = {}
    vocab = lambda x: torch.nn.functional.pad(x, (0, 0, 0, -len(x) % (8 * dims.tp))).chunk(dims.tp)[tp]  # noqa: E731
    if stage == 0:
        out["embedding.word_embeddings.weight"] = vocab(hf["model.embed_tokens.weight"])
    if stage == dims.pp - 1:
        out["output_layer.weight"] = vocab(hf["lm_head.weight"])
        out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    for layer in torch.arange(shape.num_layers).chunk(dims.pp)[stage].tolist():
        p, q = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        groups = [hf[p + f"self_attn.{x}_proj.weight"].chunk(shape.num_kv_heads) for x in "qkv"]
        qkv = torch.cat([torch.cat(group) for group in zip(*groups, strict=True)])
        out[q + "self_attention.linear_qkv.weight"] = qkv.chunk(dims.tp)[tp]
        out[q + "self_attention.linear_qkv.layer_norm_weight"] = hf[p + "input_layernorm.weight"]
        out[q + "self_attention.q_layernorm.weight"] = hf[p + "self_attn.q_norm.weight"]
        out[q + "self_attention.k_layernorm.weight"] = hf[p + "self_attn.k_norm.weight"]
        out[q + "self_attention.linear_proj.weight"] = hf[p + "self_attn.o_proj.weight"].chunk(dims.tp, 1)[tp]
        out[q + "pre_mlp_layernorm.weight"] = hf[p + "post_attention_layernorm.weight"]
        out[q + "mlp.router.weight"] = hf[p + "mlp.gate.weight"]
        for e in torch.arange(shape.num_experts).chunk(dims.ep)[ep].tolist():
            gate, up, down = (hf[p + f"mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down"))
            out[q + f"mlp.experts.linear_fc1.weight{e}"] = torch.cat([gate, up])
            out[q + f"mlp.experts.linear_fc2.weight{e}"] = down
    return {name: tensor.clone() for name, tensor in out.items()}


def push_plan(dims: ParallelDims, engines: int) -> Plan:
    source = Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=dims)
    return plan(source, Layout(table=HF_QWEN3_MOE, shape=SHAPE, dims=ParallelDims(dp=engines)))


def over_gloo(moves: Plan, src: dict[str, Tensor], dst: dict[str, Tensor], *, verify: bool = True) -> Transport:
    return ProcessGroupTransport(moves, src=src, dst=dst, bucket_bytes=BUCKET_BYTES, verify=verify)


def changes_only(moves: Plan, src: dict[str, Tensor], dst: dict[str, Tensor]) -> Transport:
    return ProcessGroupTransport(moves, src=src, dst=dst, bucket_bytes=4 * BUCKET_BYTES, compression=Changes())


def check_push(
    rank: int,
    dims: ParallelDims,
    engines: int,
    dtype: torch.dtype,
    connect: Callable[[Plan, dict[str, Tensor], dict[str, Tensor]], Transport],
    device: str = "cpu",
) -> None:
    """Two versions through one transport into ``engines`` processes that are learners as well; routers stay float32."""
    moves = push_plan(dims, engines)
    src = {name: tensor.to(device) for name, tensor in megatron_tensors(hf_tensors(0), dims, rank).items()}
    shapes = Layout(table=HF_QWEN3_MOE, shape=SHAPE).local_shapes(0)

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if name.endswith("mlp.gate.weight") else dtype

    dst = {}
    if rank < engines:
        dst = {n: torch.full(size, torch.nan, dtype=dtype_of(n), device=device) for n, size in shapes.items()}
    transport = connect(moves, src, dst)
    for version in (1, 2):
        for name, tensor in megatron_tensors(hf_tensors(version), dims, rank).items():
            src[name].copy_(tensor)
        update = transport.move(version)
        wanted = hf_tensors(version)
        for name, tensor in dst.items():
            assert torch.equal(tensor.cpu(), wanted[name].to(dtype_of(name))), name
        crossed = sum(
            torch.Size([stop - start for start, stop in t.dst_box]).numel() * dtype_of(t.dst_param).itemsize
            for t in moves.receives(rank)
            if t.src_rank != t.dst_rank
        )
        assert (update.version, update.num_bytes) == (version, crossed)
    transport.close()


def _two(rank: int, folder: Path) -> None:
    for connect in (over_gloo, changes_only):
        check_push(rank, ParallelDims(ep=2, dp=2), 2, torch.float32, connect)
        check_push(rank, ParallelDims(pp=2), 1, torch.bfloat16, connect)
    globals()["SHAPE"] = replace(SHAPE, hidden_size=9)  # no bucket in bfloat16 ends at a word
    check_push(rank, ParallelDims(ep=2, dp=2), 2, torch.bfloat16, partial(over_gloo, verify=False))


def _four(rank: int, folder: Path) -> None:
    check_push(rank, ParallelDims(tp=2, pp=2, ep=2), 4, torch.float32, over_gloo)
    check_push(rank, ParallelDims(tp=2, ep=4, dp=2), 3, torch.bfloat16, over_gloo)


@pytest.mark.parametrize(("world_size", "body"), [(2, _two), (4, _four)])
def test_engines_hold_each_version_exactly(world_size: int, body: Callable[[int, Path], None], tmp_path: Path) -> None:
    spawn(world_size, body, tmp_path)


def _one_process(rank: int, folder: Path) -> None:
    check_push(rank, ParallelDims(), 1, torch.float32, over_gloo)
    check_push(rank, ParallelDims(), 1, torch.bfloat16, over_gloo)
    transport = ProcessGroupTransport(
        push_plan(ParallelDims(), 1), src=megatron_tensors(hf_tensors(0), ParallelDims(), 0), dst=hf_tensors(1)
    )
    assert transport.move(0).num_bytes == 0


def test_one_process_copies_and_sends_nothing(tmp_path: Path) -> None:
    spawn(1, _one_process, tmp_path)


def _misfits(rank: int, folder: Path) -> None:
    dims = ParallelDims(ep=2, dp=2)
    src, dst = megatron_tensors(hf_tensors(0), dims, rank), hf_tensors(0)
    if rank == 1:
        src["decoder.final_layernorm.weight"] = torch.zeros(9)
        del src["decoder.layers.1.mlp.experts.linear_fc1.weight2"]
        dst["model.layers.2.mlp.gate.weight"] = torch.zeros(4, 8)
    with pytest.raises(WeightError) as caught:
        ProcessGroupTransport(push_plan(dims, 2), src=src, dst=dst)
    assert sorted(str(caught.value).splitlines()) == [
        "rank 1: destination tensor model.layers.2.mlp.gate.weight is written by no transfer; "
        "leave it out or add it to the layout",
        "rank 1: source tensor decoder.final_layernorm.weight has shape (9,), the plan's layout says (8,)",
        "rank 1: source tensor decoder.layers.1.mlp.experts.linear_fc1.weight2 is missing; "
        "the plan needs it with shape (12, 8)",
    ]


def test_every_process_hears_of_one_processs_misfits(tmp_path: Path) -> None:
    spawn(2, _misfits, tmp_path)


# Messages between the processes of a group, over gloo.
def words_main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert rendezvous.gather_json(f"of {rank}", None) == ["of 0", "of 1"]
    if rank == 1:
        os._exit(0)
    with pytest.raises(SyncError, match="a process of the group was lost: "):
        rendezvous.gather_json("anybody there?", None)
    os._exit(0)


def test_a_process_that_is_lost_is_told_as_a_sync_that_failed(tmp_path: Path) -> None:
    run_ranks(words_main, 2, tmp_path)


# Reduce-scatter and all-gather of buffers between ranks on CPUs, through memory that they share or by sends.
SHARD, ROUNDS = 40, 10  # a shard is exchanged in pieces of 64 bytes at most


def exchange_main(rank: int, size: int, memory: str, folder: Path) -> None:
    from rl_megatron.learner import cpu

    cpu.NODE_MEMORY = folder / str(rank) if memory == "apart" else folder / "memory"
    cpu.NODE_MEMORY.mkdir(exist_ok=True)
    cpu.SHARED_BYTES = 1 << 60 if memory == "no room" else 64 * 2 * size**2
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size + 1)
    group = dist.new_group([*range(1, size + 1)])  # whose ranks have other numbers in the world
    if rank:
        for number in range(ROUNDS):
            check(group, together(cpu.reduce_scatter), together(cpu.all_gather), number)
        assert (cpu._shared_by(group) is not None) is (memory == "shared" and size > 1)
        assert not [*cpu.NODE_MEMORY.iterdir()]
    dist.barrier()
    dist.destroy_process_group()
    del group
    gc.collect()
    assert not cpu._SHARED  # another world's ranks share other memory


def together(call: Any) -> Any:
    """As megatron calls it for several buckets, which has torch put all-reduces and gathers off until the end."""

    def calls(*buffers: torch.Tensor, group: dist.ProcessGroup) -> None:
        with _coalescing_manager(group, async_ops=False):
            call(*buffers, group=group)

    return calls


def check(group: dist.ProcessGroup, reduce_scatter: Any, all_gather: Any, number: int) -> None:
    size, mine = group.size(), group.rank()
    numbers = torch.arange(size * SHARD, dtype=torch.float32) + number
    for in_place in (True, False):
        buffer = numbers * 10.0**mine
        own = buffer.chunk(size)[mine] if in_place else torch.empty(SHARD)
        reduce_scatter(own, buffer, group=group)
        wanted = numbers.chunk(size)[mine] * sum(10.0**rank for rank in range(size))
        assert torch.equal(own, wanted)
        whole = torch.full((size * SHARD,), -1.0)
        if in_place:
            own = whole.chunk(size)[mine].copy_(own)
        all_gather(whole, own, group=group)
        assert torch.equal(whole, numbers * sum(10.0**rank for rank in range(size)))


@pytest.mark.parametrize(
    ("size", "memory"), [(1, "shared"), (2, "shared"), (3, "shared"), (3, "apart"), (2, "no room")]
)
def test_each_rank_gets_its_shards_sum_and_all_get_all_shards(size: int, memory: str, tmp_path: Path) -> None:
    run_ranks(exchange_main, size + 1, size, memory, tmp_path)


# Weight syncs that go wrong, in six real processes: four learner ranks fill an engine of two. What is never wrong: a
# version is served by both engine ranks, whole and equal to the bit to its Hugging Face source, or by none; and the
# next sync repairs what a fault left.
LEARNERS, ENGINES = 4, 2
WORLD = LEARNERS + ENGINES
SYNC_BUCKET_BYTES = 128
TIMEOUT = 900.0  # seconds that a process waits for another; what ends only by it fails, since answers have `CALL_LIMIT`
CALL_LIMIT = 600.0  # seconds for a call
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
            self.member = RendezvousMember(rendezvous, self.rank)
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
            more = {"member": self.member, "bytes_into": lambda process: SYNC_BUCKET_BYTES}
            learns = self.rank < LEARNERS
            self.transport = (
                LearnerEnd(moves, src=self.src, **more) if learns else make_local_end(moves, dst=self.dst, **more)
            )
        else:
            compression = Changes() if kind == "delta" else None
            self.transport = CountingTransport(
                moves, src=self.src, dst=self.dst, bucket_bytes=SYNC_BUCKET_BYTES, compression=compression
            )
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

        def unpack(parcel: BoundBucket, version: int) -> None:
            nonlocal seen
            seen += 1
            if seen == at:
                parcel.payload[len(parcel.payload) // 2] ^= 4
            self._unpack(parcel, version)

        self.transport.ends.unpack = unpack

    def die(self, at: int, end: str) -> None:
        """Kill this process at the ``at``-th parcel that is packed or unpacked here."""
        seen, do = 0, {"pack": self._pack, "unpack": self._unpack}[end]

        def call(parcel: BoundBucket, version: int) -> None:
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
        self._keeper = RendezvousStore("127.0.0.1", TIMEOUT)
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
        self.call_all("serves")

    def connect(self, kind: str, learner: str = "tp2 ep2", engine: str = "tp2") -> None:
        self.ready()
        self._joined += 1
        at: str | Rendezvous = str(self._folder / f"rendezvous{self._joined}")
        if kind == "last hop":
            at = self._keeper.rendezvous(WORLD, learners=LEARNERS, backend="gloo")
        self.call_all("connect", at, kind, learner, engine)

    def call(self, ranks: range | list[int], name: str, *arguments: Any) -> dict[int, Any]:
        """Answers by rank; "killed" for a killed rank."""
        for rank in ranks:
            self.connections[rank].send((name, arguments))
        out: dict[int, Any] = {}
        for rank in ranks:
            try:
                assert self.connections[rank].poll(CALL_LIMIT), f"rank {rank} does not answer {name}"
                out[rank] = self.connections[rank].recv()
            except EOFError:
                self.processes[rank].join(CALL_LIMIT)
                out[rank] = ("killed", -self.processes[rank].exitcode)
        return out

    def call_all(self, name: str, *arguments: Any) -> list[Any]:
        return list(self.call(range(WORLD), name, *arguments).values())

    def push(self, version: int) -> list[tuple[str, str]]:
        """Run both phases: commit everywhere if staged everywhere."""
        answers = self.call_all("stage", version)
        if all(how == "staged" for how, _ in answers):
            self.call_all("commit", version)
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
    assert ranks.call_all("serves")[LEARNERS:] == [version] * ENGINES
    assert ranks.call_all("holds", seed, changes) == [""] * WORLD


def maps_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


@pytest.mark.parametrize("kind", ["gloo", "last hop"])
def test_four_learner_ranks_fill_two_engine_ranks_to_the_bit(ranks: Ranks, kind: str) -> None:
    for learner in LAYOUTS:
        for engine in REPLICAS:
            ranks.connect(kind, learner, engine)
            for version in (1, 2):
                ranks.call_all("train", version, None)
                assert {how for how, _ in ranks.push(version)} == {"staged"}
                check_served(ranks, version, version)
            planned, received, wire = zip(*ranks.call_all("bytes"), strict=True)
            assert sum(received[LEARNERS:]) == planned[0]
            assert kind != "gloo" or sum(wire) == planned[0]


@pytest.mark.parametrize("kind", ["gloo", "delta"])
def test_a_corrupted_byte_is_found_named_never_served_and_repaired(ranks: Ranks, kind: str) -> None:
    ranks.connect(kind)
    ranks.call_all("train", 1, None)
    ranks.push(1)
    check_served(ranks, 1, 1)
    ranks.call_all("train", 2, None)
    ranks.call([LEARNERS], "flip", 3)
    answers = ranks.push(2)
    assert [how for how, _ in answers] == ["staged"] * 4 + ["CorruptionError", "staged"]
    message = answers[LEARNERS][1]
    assert "version 2" in message
    assert f"on rank {LEARNERS} is not" in message
    assert BOX.search(message)
    assert any(f"as rank {sender} sent it" in message for sender in range(LEARNERS))
    assert ranks.call_all("serves")[LEARNERS:] == [None, None]
    assert {how for how, _ in ranks.push(2)} == {"staged"}
    check_served(ranks, 2, 2)


def test_delta_sends_what_changed_and_nothing_of_what_did_not(ranks: Ranks) -> None:
    ranks.connect("delta")
    moved = []
    for version, changes in ((1, 0), (2, 2), (3, 2)):
        ranks.call_all("train", 2, changes)
        assert {how for how, _ in ranks.push(version)} == {"staged"}
        moved.append(sum(received for _, received, _ in ranks.call_all("bytes")))
        check_served(ranks, version, 2, changes)
    whole = ranks.call_all("bytes")[0][0]
    assert moved[0] == whole
    assert moved[2] < moved[1] < whole


@pytest.mark.parametrize(("kind", "lost", "end"), [("gloo", 1, "pack"), ("last hop", WORLD - 1, "unpack")])
def test_a_killed_process_is_named_and_the_next_sync_repairs(ranks: Ranks, kind: str, lost: int, end: str) -> None:
    ranks.connect(kind)
    ranks.call_all("train", 1, None)
    ranks.push(1)
    check_served(ranks, 1, 1)
    ranks.call_all("train", 2, None)
    ranks.call([lost], "die", 5, end)
    answers = ranks.push(2)
    assert answers[lost] == ("killed", signal.SIGKILL)
    told = [message for how, message in answers if how == "SyncError"]
    assert told
    assert any(f"rank {lost}" in message and "waited for" in message and BOX.search(message) for message in told)
    alive = [rank for rank in ENGINE_RANKS if rank != lost]
    assert set(ranks.call(alive, "serves").values()) == {None}
    ranks.start(lost)
    ranks.connect(kind)
    ranks.call_all("train", 2, None)
    assert {how for how, _ in ranks.push(2)} == {"staged"}
    check_served(ranks, 2, 2)


def test_rings_have_no_name_that_could_be_left_behind(ranks: Ranks) -> None:
    ranks.connect("last hop")
    rings = {line.split(maxsplit=5)[5] for line in maps_of(ranks.processes[0].pid) if "weights" in line}
    assert rings == {"/memfd:weights (deleted)"}
