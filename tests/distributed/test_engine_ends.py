"""Learner shards sent straight into engine ranks of another process group; torch cuts the weights."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import distributed_c10d

from launcher.processes.guards import held_ports
from rl_megatron.errors import SyncError, WeightError
from rl_megatron.features.quantize.encoding import Quantization, ScaledLayout
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box, Shape, volume, whole_box
from rl_megatron.weights.checks.compare import compare
from rl_megatron.weights.checks.places import ParameterBox, record
from rl_megatron.weights.checks.reports import (
    BackgroundChecksums,
    ChecksumReport,
    make_checksum_report,
    seal_from_reports,
    sender_boxes,
)
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.recorded import Boxes, EngineLayout, recorded_layout, shared
from rl_megatron.weights.layouts.tables.grouped_query import ENGINE_QWEN3_MOE, HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import Place, plan
from rl_megatron.weights.routes import engine_ends
from rl_megatron.weights.routes import rendezvous as meeting
from rl_megatron.weights.routes.engine_ends import Receiver, Sender
from rl_megatron.weights.routes.rendezvous import JOINING, Rendezvous, RendezvousMember, RendezvousStore
from tests.distributed import test_transport as base
from tests.distributed.ranks import run_ranks
from tests.forks import FORKS

SHAPE = replace(base.SHAPE, expert_width=8, head_dim=8)
HF = Layout(table=HF_QWEN3_MOE, shape=SHAPE)
DIMS, TP = ParallelDims(tp=2, ep=2), 2
LEARNER = Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=DIMS)
VERSIONS = (3, 4)
DTYPES = dict.fromkeys(HF.local_shapes(0), torch.float32)
HEARD = 120.0  # seconds that a rank waits for the other of its pair: half of what the group waits
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


class Engine:
    """A rank: q over k over v, experts stacked and cut, the vocabulary padded."""

    def __init__(self, rank: int) -> None:
        self.rank, h, width = rank, SHAPE.hidden_size, SHAPE.expert_width // TP
        heads = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim // TP
        self.params: dict[str, Tensor] = {"norm": torch.zeros(h)}
        for name in ("embed", "head"):
            self.params[name] = torch.zeros(12, h)  # 21 tokens, of which the second rank has 9
        for layer in range(SHAPE.num_layers):
            self.params |= {
                f"{layer}.qkv": torch.zeros(heads, h),
                f"{layer}.o": torch.zeros(h, SHAPE.num_heads * SHAPE.head_dim // TP),
                f"{layer}.router": torch.zeros(SHAPE.num_experts, h),
                f"{layer}.w13": torch.zeros(SHAPE.num_experts, 2 * width, h),
                f"{layer}.w2": torch.zeros(SHAPE.num_experts, h, width),
                **{f"{layer}.{x}": torch.zeros(h) for x in ("input_layernorm", "post_attention_layernorm")},
                **{f"{layer}.{x}": torch.zeros(SHAPE.head_dim) for x in ("q_norm", "k_norm")},
            }

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            parts = name.split(".")
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                mine = tensor[12 * self.rank : 12 * self.rank + 12]
                self.params["embed" if "embed" in name else "head"][: len(mine)].copy_(mine)
            elif name == "model.norm.weight":
                self.params["norm"].copy_(tensor)
            else:
                self._load_layer(parts[2], parts[-2], int(parts[5]) if "experts" in parts else 0, tensor)

    def _load_layer(self, layer: str, what: str, expert: int, tensor: Tensor) -> None:
        row, column = tensor.chunk(TP)[self.rank], tensor.chunk(TP, -1)[self.rank]
        kv = SHAPE.num_kv_heads * SHAPE.head_dim // TP
        starts = {"q_proj": 0, "k_proj": 2 * kv, "v_proj": 3 * kv}
        if what in starts:
            self.params[f"{layer}.qkv"].narrow(0, starts[what], len(row)).copy_(row)
        elif what == "o_proj":
            self.params[f"{layer}.o"].copy_(column)
        elif what == "gate":
            self.params[f"{layer}.router"].copy_(tensor)
        elif what == "down_proj":
            self.params[f"{layer}.w2"][expert].copy_(column)
        elif what in ("gate_proj", "up_proj"):
            self.params[f"{layer}.w13"][expert].chunk(2)[what == "up_proj"].copy_(row)
        else:
            self.params[f"{layer}.{what}"].copy_(tensor)

    def record(self) -> list[ParameterBox]:
        shapes = HF.local_shapes(0)
        return record(self.load, shapes, self.params, dict.fromkeys(shapes, torch.float32))


def boxes(ranks: Sequence[Engine]) -> list[Boxes]:
    return [{held.hf: held.box for held in rank.record()} for rank in ranks]


def recorded() -> EngineLayout:
    return recorded_layout(HF, boxes([Engine(rank) for rank in range(TP)]))


def test_a_recorded_layout_costs_what_its_table_costs() -> None:
    """The rows of `ENGINE_QWEN3_MOE` say the same of engines of this kind, but for padding."""
    placement = {rank: DIMS.world_size + rank for rank in range(TP)}
    table = Layout(table=ENGINE_QWEN3_MOE, shape=SHAPE, dims=ParallelDims(tp=TP, etp=TP), vocab_multiple=4)
    mine, theirs = plan(LEARNER, recorded(), placement=placement), plan(LEARNER, table, placement=placement)
    received = [sum(n for (_, to), n in moves.traffic().items() if to == 2) for moves in (mine, theirs)]
    assert sum(mine.traffic().values()) == sum(theirs.traffic().values())
    assert received[0] == received[1]
    assert recorded().local_shapes(1)["model.embed_tokens.weight"] == (9, 8)


@pytest.mark.parametrize("stages", [1, 2])
def test_engine_ranks_get_their_own_layers_and_experts_alone(stages: int) -> None:
    """Two expert-parallel ranks in each pipeline stage, which repeat the rest of its layers."""
    layers, experts, last = SHAPE.num_layers // stages, SHAPE.num_experts // 2, stages - 1
    assert layers * stages > 1

    def keeps(name: str, rank: int) -> bool:
        stage, parts = rank // 2, name.split(".")
        mine = stage == (int(parts[2]) // layers if parts[1] == "layers" else 0 if "embed" in name else last)
        return mine and ("experts" not in parts or int(parts[5]) // experts == rank % 2)

    whole: dict[str, Box] = {n: tuple((0, size) for size in shape) for n, shape in HF.local_shapes(0).items()}
    ranks = [{name: box for name, box in whole.items() if keeps(name, rank)} for rank in range(2 * stages)]
    layout = recorded_layout(HF, ranks)
    assert [layout.local_shapes(rank).keys() for rank in range(2 * stages)] == [rank.keys() for rank in ranks]
    servers = [*ranks, *map(dict, ranks)]
    assert recorded_layout(HF, shared(servers)) == recorded_layout(HF, servers) != layout
    moves = plan(LEARNER, layout, placement={rank: 2 + rank for rank in range(2 * stages)})
    for rank, held in enumerate(ranks):
        got: Counter[str] = Counter()
        for t in moves.receives(2 + rank):
            got[t.dst_param] += volume(t.dst_box)
        assert got == {name: volume(box) for name, box in held.items()}


def test_what_no_rank_takes_is_named() -> None:
    ranks = boxes([Engine(0), Engine(1)])
    lost = [{name: box for name, box in rank.items() if name != "model.norm.weight"} for rank in ranks]
    with pytest.raises(WeightError, match=r"model\.norm\.weight: the engine's loader puts it on no rank"):
        recorded_layout(HF, lost)


@dataclass(frozen=True, kw_only=True)
class Job:
    rendezvous: Rendezvous
    folder: Path
    port: int
    apart: bool


def tensors_of(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in HF.local_shapes(0).items()}


def apart(rank: int) -> None:
    """Let this process believe that it is on a node of its own."""
    meeting.own_place = lambda tensors: Place(node=str(rank), name="", gpu="")


def process(rank: int, job: Job) -> None:
    """Ranks 0 and 1 are the learner's, 2 and 3 an engine's, each pair in a default group of its own."""
    torch.set_num_threads(1)
    if job.apart:
        apart(rank)
    engine_ends._BUCKET_BYTES = engine_ends._SLOT_BYTES = 1000  # most tensors come in several parcels
    pair, inner = divmod(rank, 2)
    store = dist.TCPStore("127.0.0.1", job.port + pair, is_master=inner == 0, timeout=timedelta(seconds=HEARD))
    dist.init_process_group("gloo", store=store, rank=inner, world_size=2, timeout=timedelta(seconds=HEARD))
    reports = learner(inner, job) if pair == 0 else engine(inner, job)
    torch.save(reports, job.folder / f"{rank}.pt")
    dist.destroy_process_group()


def learner(rank: int, job: Job) -> list[Any]:
    src = {n: torch.zeros_like(t) for n, t in cut(VERSIONS[0], rank).items()}
    sender = Sender(job.rendezvous, rank, (LEARNER, recorded()), src, sender_boxes(LEARNER, HF)[rank], dtypes=DTYPES)
    out = []
    for version in VERSIONS:
        for name, tensor in cut(version, rank).items():
            src[name].copy_(tensor)
        out.append(sender.send(version)[1])
    return out


def cut(version: int, rank: int) -> dict[str, Tensor]:
    return base.megatron_tensors(tensors_of(version), DIMS, rank, SHAPE)


def engine(rank: int, job: Job) -> list[Any]:
    mine = Engine(rank)
    held = mine.record()
    receiver = Receiver(job.rendezvous, 2 + rank, {one: one.local_slice(mine.params[one.param]) for one in held})
    out = []
    for version in VERSIONS:
        expected, beside, told = Engine(rank), BackgroundChecksums(), []
        expected.load(tensors_of(version).items())

        def whole(
            one: ParameterBox,
            expected: Engine = expected,
            beside: BackgroundChecksums = beside,
            told: list[ParameterBox] = told,
        ) -> None:
            assert torch.equal(
                one.local_slice(mine.params[one.param]).cpu(), one.local_slice(expected.params[one.param])
            )
            beside.checksum_boxes([one], mine.params)
            beside.sent(one, mine.params[one.param])
            told.append(one)

        turns: list[tuple[int, str]] = []

        def coming(
            turn: int,
            held: Sequence[ParameterBox],
            turns: list[tuple[int, str]] = turns,
            told: list[ParameterBox] = told,
        ) -> None:
            turns += [(turn, layer_of(one)) for one in held]
            assert {turn} == {number for number, layer in turns if layer == layer_of(held[0])}
            assert not {*held} & {*told}

        update = receiver.receive(version, whole, coming)
        assert sorted(told, key=held.index) == held
        came = [layer for layer, _ in groupby(map(layer_of, told))]  # each whole before the next
        assert came == list(dict.fromkeys(layer for _, layer in turns)) == [["", "0", "1"], ["", "1", "0"]][rank]
        assert [turn for turn, _ in turns] == sorted(turn for turn, _ in turns)
        for name, tensor in expected.params.items():
            torch.testing.assert_close(mine.params[name].cpu(), tensor, rtol=0, atol=0)
        report = beside.report()
        assert set(report.rows) == set(make_checksum_report(held, mine.params).rows)
        out.append((update.num_bytes, report))
    if (
        rank == 0 and job.apart
    ):  # a rank that waits for one that leaves fails before the group's limit, though that process lives
        with pytest.raises(RuntimeError):
            dist.recv(torch.zeros(1), group=receiver._member.group, group_src=3)
    else:
        receiver.close()
    dist.barrier()
    return out


def layer_of(one: ParameterBox) -> str:
    return one.hf.split(".")[2] if "layers" in one.hf else ""


@pytest.mark.parametrize("apart", [True, False], ids=["members", "beside"])
def test_each_engine_rank_gets_its_own_bytes_and_no_more(tmp_path: Path, apart: bool) -> None:
    """Bit for bit what its own loader makes of the checkpoint; checksums of both sides agree. 8 seconds."""
    keeper = RendezvousStore("127.0.0.1", 2 * HEARD)
    rendezvous = keeper.rendezvous(4, learners=2, backend="gloo")
    with held_ports("127.0.0.1") as port:
        run_ranks(process, 4, Job(rendezvous=rendezvous, folder=tmp_path, port=port, apart=apart))
    said = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)]
    traffic = plan(LEARNER, recorded(), placement={0: 2, 1: 3}).traffic()
    for i, _ in enumerate(VERSIONS):
        engines: list[ChecksumReport] = []
        for rank in (2, 3):
            num_bytes, report = said[rank][i]
            assert num_bytes == 4 * sum(n for (_, to), n in traffic.items() if to == rank)
            engines.append(report)
        sealed = seal_from_reports([said[0][i], said[1][i]], HF.local_shapes(0))
        found = compare(sealed, HF.local_shapes(0), engines, frozenset())
        assert not found.differing
        assert not found.unchecked
        rows, read = [*engines[0].rows], [*engines[0].read]
        rows[5], read[7] = (*rows[5][:3], 1), (*read[7][:2], 1)
        for wrong, name in ((replace(engines[0], rows=rows), rows[5][1]), (replace(engines[0], read=read), read[7][0])):
            found = compare(sealed, HF.local_shapes(0), [wrong, engines[1]], frozenset())
            assert set(found.differing) == {name}


def test_a_rank_that_waits_for_another_is_cancelled_and_the_keeper_knows_who_is_absent() -> None:
    keeper = RendezvousStore("127.0.0.1", 60.0)
    rendezvous = keeper.rendezvous(1, learners=1, backend="gloo")
    member = RendezvousMember(rendezvous, 0)
    member.rendezvous = replace(rendezvous, size=2, seconds=0.2)
    for _ in range(2):  # a rank that comes again is not taken for another
        with pytest.raises(SyncError, match=r"rank 0 waited 0\.2 s for ranks \[1\]"):
            member.barrier("version 1")
    member.rendezvous = replace(rendezvous, size=2)
    cancel = partial(keeper.cancel, rendezvous, "version 2", "http://engine: status 400")
    threading.Timer(0.2, cancel).start()
    with pytest.raises(SyncError, match="version 2 was cancelled: http://engine: status 400"):
        member.barrier("version 2")
    assert keeper.missing_ranks(member.rendezvous, "version 2") == [1]
    member.close()
    rendezvous = keeper.rendezvous(2, learners=1, backend="gloo")
    keeper.cancel(rendezvous, JOINING, "a server died")
    with pytest.raises(SyncError, match="joining the group was cancelled: a server died"):
        RendezvousMember(rendezvous, 0)


def test_a_rank_that_waits_does_not_ask_for_each_of_the_others_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's store has one thread, which all ranks ask every few milliseconds."""
    keeper = RendezvousStore("127.0.0.1", 60.0)
    rendezvous = keeper.rendezvous(1, learners=1, backend="gloo")
    member, asked = RendezvousMember(rendezvous, 0), list[int]()
    store, member.rendezvous = member._store, replace(rendezvous, size=768, seconds=0.2)

    def check(keys: list[str]) -> bool:
        asked.append(len(keys))
        return store.check(keys)

    seen = SimpleNamespace(set=store.set, add=store.add, check=check, list_keys=store.list_keys)
    monkeypatch.setattr(member, "_store", seen)
    with pytest.raises(SyncError, match=r"rank 0 waited 0\.2 s for ranks \[1, 2,"):
        member.barrier("version 1")
    assert set(asked) == {1}


class Whole:
    """A model of SGLang's that holds each tensor as it is."""

    def __init__(self) -> None:
        self.params = {name: torch.zeros(shape) for name, shape in HF.local_shapes(0).items()}

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        return self.params.items()

    def named_modules(self) -> Iterable[tuple[str, Any]]:
        return ()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.params[name].copy_(tensor)


def test_a_server_that_joins_again_is_in_no_earlier_group(tmp_path: Path) -> None:
    """Nor in that of a join that failed, the third of four. 3 seconds."""
    save_file(tensors_of(0), tmp_path / "model.safetensors")
    keeper = RendezvousStore("127.0.0.1", 2 * HEARD)
    new = partial(keeper.rendezvous, 2, learners=1, backend="gloo")
    run_ranks(joins_again, 2, [new() for _ in range(4)], tmp_path, FORKS.Barrier(2))


def joins_again(rank: int, meetings: Sequence[Rendezvous], folder: Path, both: Any) -> None:
    """Rank 0 is the learner's, rank 1 SGLang's by our worker."""
    torch.set_num_threads(1)
    apart(rank)
    serve = server(folder) if rank else None
    boxes, sender = {name: whole_box(shape) for name, shape in HF.local_shapes(0).items()}, None
    for version, place in enumerate(meetings):
        if serve is not None:
            said = serve("join", place=asdict(place), first=1, version=version)
            assert ("the learner is gone" in said.get("error", "")) == (version == 2), said
            if version != 2:
                assert len(serve("receive", version=version, private=[])["rows"]["places"]) == len(boxes)
            assert len(distributed_c10d._world.pg_map) == (version != 2)
        elif version == 2:
            sender = sender and sender.close()
            member = RendezvousMember(place, 0)
            member._store.set(f"{place.name}/{JOINING}/cancelled", "the learner is gone")
        else:
            sender = sender and sender.close()
            layouts, sources = (HF, recorded_layout(HF, [boxes])), sender_boxes(HF, HF)[0]
            sender = Sender(place, 0, layouts, tensors_of(version), sources, dtypes=DTYPES)
            sender.send(version)
        both.wait(HEARD)


def server(folder: Path) -> Callable[..., Any]:
    """What orders our worker in SGLang, of which it asks only the rank, and says the answer."""
    for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
        sys.modules[name] = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=0))  # type: ignore[assignment]
    from rl_megatron.engines.sglang import worker

    model, answer = Whole(), folder / "answer"

    def order(what: str, **more: object) -> Any:
        given = {"do": what, "path": str(folder / "model.safetensors"), "answer": str(answer), **more}
        worker.load(model, [(json.dumps(given), torch.empty(0))])
        return json.loads(answer.with_name("answer.0").read_text())

    return order


def beside(rank: int, rendezvous: Rendezvous, device: str) -> None:
    """Rank 0 is the learner's, which holds the model whole; rank 1 an engine's, on its GPU or node."""
    torch.set_num_threads(1)
    boxes = {name: whole_box(shape) for name, shape in HF.local_shapes(0).items()}
    held = {name: torch.zeros(shape, device=device) for name, shape in HF.local_shapes(0).items()}
    if rank == 0:
        layouts = HF, recorded_layout(HF, [boxes])
        sender = Sender(rendezvous, 0, layouts, held, sender_boxes(HF, HF)[0], dtypes=DTYPES)
        for version in VERSIONS:
            for name, tensor in tensors_of(version).items():
                held[name].copy_(tensor)
            sender.send(version)
        sender.close()
        return
    places = record(
        lambda tensors: [held[name].copy_(tensor) for name, tensor in tensors], HF.local_shapes(0), held, DTYPES
    )
    receiver = Receiver(rendezvous, 1, {one: one.local_slice(held[one.param]) for one in places})
    for version in VERSIONS:
        receiver.receive(version, lambda one: None)
        assert all(torch.equal(held[name].cpu(), tensor) for name, tensor in tensors_of(version).items())
    receiver.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_an_engine_rank_beside_the_only_learner_rank_is_in_no_group(device: str) -> None:
    """Nor is the learner's; on a GPU, both on one, through CUDA IPC."""
    keeper = RendezvousStore("127.0.0.1", 2 * HEARD)
    run_ranks(beside, 2, keeper.rendezvous(2, learners=1, backend="gloo" if device == "cpu" else "nccl"), device)


# Scales of quantized weights whose blocks learner ranks share: blocks of 128 end inside query groups (80 and 40 rows)
# and the halves of tp=2 and of etp=2 (104 rows). tests/matrix has what such ranks send.
WIDE = replace(base.SHAPE, hidden_size=160, head_dim=40, expert_width=208, vocab_size=24)
LAYOUTS = {"tp2-ep2": ParallelDims(tp=2, ep=2, dp=2), "tp2-etp2-pp2": ParallelDims(tp=2, etp=2, pp=2)}


def tiles(boxes: list[Box], shape: Shape) -> bool:
    seen = torch.zeros(shape, dtype=torch.int32)
    for box in boxes:
        seen[tuple(slice(low, high) for low, high in box)] += 1
    return bool((seen == 1).all())


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_scale_has_one_owner_and_shared_blocks_are_known(kind: str, layout: str) -> None:
    """Against a loop over the elements of every box."""
    hf, form = Layout(table=HF_QWEN3_MOE, shape=WIDE), Quantization(kind)
    mine = form.layout(Layout(table=MEGATRON_QWEN3_MOE, shape=WIDE, dims=LAYOUTS[layout]), hf)
    assert isinstance(mine, ScaledLayout)
    in_files, blocks = form.layout(hf, hf), form.blocks
    grids = in_files.local_shapes(0)
    boxes: dict[str, set[Box]] = {}
    for rank in range(4):
        for one, name, _ in mine.held(rank):
            boxes.setdefault(name, set()).add(one.hf_box)
    owned: dict[str, list[Box]] = {}
    for sources in sender_boxes(mine, in_files):
        for source in sources:
            owned.setdefault(source.hf, []).append(source.box)
    assert grids.keys() == owned.keys()
    for name, shape in grids.items():
        assert tiles(owned[name], shape), name
    shared = set()
    for name, held in boxes.items():
        high, wide = blocks.edges(grids[name])
        where = [{(r // high, c // wide) for r in range(*rows) for c in range(*columns)} for rows, columns in held]
        if sum(map(len, where)) > prod(grids[name + blocks.suffix]):
            shared.add(name)
    assert {name for name, _ in mine.cut_weights()} == shared != set()
