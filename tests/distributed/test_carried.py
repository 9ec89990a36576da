"""Learner shards into engine ranks of two pretended nodes, handed on by the learner rank of each, and mirror files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d

from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError, SyncError
from rl_megatron.features.lora import merging
from rl_megatron.learner.keywords import SLAB
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box, volume, whole_box
from rl_megatron.weights.bytes.parked import OffloadedTensors
from rl_megatron.weights.checks.compare import compare
from rl_megatron.weights.checks.places import ParameterBox, record
from rl_megatron.weights.checks.reports import (
    BackgroundChecksums,
    ChecksumReport,
    checksum,
    make_checksum_report,
    seal_from_reports,
    sender_boxes,
)
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.recorded import Boxes, EngineLayout, recorded_layout
from rl_megatron.weights.layouts.tables.grouped_query import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans import plan as plans
from rl_megatron.weights.plans.plan import Place, Plan, find_receivers, plan_into_copies
from rl_megatron.weights.routes import engine_ends, mirror
from rl_megatron.weights.routes import rendezvous as meeting
from rl_megatron.weights.routes.engine_ends import Receiver, Sender
from rl_megatron.weights.routes.group import Exchange, ProcessGroupTransport
from rl_megatron.weights.routes.mirror import Mirror
from rl_megatron.weights.routes.rendezvous import Rendezvous, RendezvousStore
from tests.distributed import test_transport as base
from tests.distributed.ranks import LIMIT, run_ranks
from tests.family_models import save_model
from tests.matrix.probes import Drawn

SHAPE = replace(base.SHAPE, hidden_size=32, num_experts=8, expert_width=24, vocab_size=60)
HF = Layout(table=HF_QWEN3_MOE, shape=SHAPE)
DIMS = ParallelDims(tp=2, ep=2, dp=2)
LEARNER = Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=DIMS)
LEARNERS = ENGINES = 4
BUCKET = 4096  # a page, of which slots are multiples
MEMBERS_BUCKET = 6000  # into members of the group
WHOLE, FLIPPED, LOST, AGAIN = 3, 4, 5, 6  # versions: what happens on the way
HEARD, FAR = 600.0, LIMIT * 10  # seconds that a rank waits for another: who waits for FAR fails the test


def share(rank: int) -> dict[str, Box]:
    """What an engine rank holds: a quarter of the experts whole, half of all else that a tp of 2 cuts."""
    out: dict[str, Box] = {}
    for name, shape in HF.local_shapes(0).items():
        parts, box = name.split("."), list(whole_box(shape))
        if "experts" in parts and int(parts[5]) // (SHAPE.num_experts // ENGINES) != rank:
            continue
        rows = {"q_proj", "k_proj", "v_proj", "embed_tokens", "lm_head"}
        cut = 1 if "o_proj" in parts else 0 if rows & {*parts} else None
        if cut is not None:
            half = shape[cut] // 2
            box[cut] = (half * (rank % 2), half * (rank % 2) + half)
        out[name] = tuple(box)
    return out


def boxes() -> EngineLayout:
    ranks: list[Boxes] = [share(rank) for rank in range(ENGINES)]
    return recorded_layout(HF, ranks)


def of(box: Box, tensor: Tensor) -> Tensor:
    return tensor[tuple(slice(low, high) for low, high in box)]


def tensors_of(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in HF.local_shapes(0).items()}


def cut(tensors: dict[str, Tensor], rank: int, dims: ParallelDims = DIMS) -> dict[str, Tensor]:
    return base.megatron_tensors(tensors, dims, rank, SHAPE)


@dataclass(frozen=True, kw_only=True)
class Job:
    rendezvous: Rendezvous
    folder: Path
    nodes: str  # of each rank, the learner's first
    versions: tuple[int, ...]
    flips: int  # the learner rank that flips a bit
    device: str = "cpu"  # of all weights; ``nodes`` are GPUs of one node for cuda, whose engine ranks sleep in between


class Wire:
    """Bytes that a learner rank gave its process group to send and to receive."""

    sent = received = 0


def process(rank: int, job: Job) -> None:
    torch.set_num_threads(1)
    engine_ends._BUCKET_BYTES = BUCKET if job.device == "cuda" else MEMBERS_BUCKET
    engine_ends._SLOT_BYTES = BUCKET
    if job.device == "cuda":
        torch.cuda.set_device(ord(job.nodes[rank]) - ord("A"))
    else:
        meeting.own_place = lambda tensors: Place(node=job.nodes[rank], name=f"node {job.nodes[rank]}", gpu="")
    said = learner(rank, job) if rank < LEARNERS else engine(rank - LEARNERS, job)
    torch.save(said, job.folder / f"{rank}.pt")


def learner(rank: int, job: Job) -> dict[str, Any]:
    start: Callable[..., Any] = Exchange.start

    def counting(self: Exchange, ops: Any, version: int) -> Any:
        for op, buffer, _ in ops if version == WHOLE else ():
            Wire.sent += buffer.nbytes * (op is dist.isend)
            Wire.received += buffer.nbytes * (op is dist.irecv)
        return start(self, ops, version)

    Exchange.start = counting  # type: ignore[method-assign]
    src = {n: torch.zeros_like(t, device=job.device) for n, t in cut(tensors_of(0), rank).items()}
    sources, dtypes = sender_boxes(LEARNER, HF)[rank], dict.fromkeys(HF.local_shapes(0), torch.float32)
    sender = Sender(job.rendezvous, rank, (LEARNER, boxes()), src, sources, dtypes=dtypes)
    out: dict[str, Any] = {"reports": [], "staged": staged(sender), "flipped": "", "lost": ""}
    for version in job.versions:
        for name, tensor in cut(tensors_of(version), rank).items():
            src[name].copy_(tensor)
        if version == FLIPPED and rank == job.flips:
            out["flipped"] = flip_one(sender._transport)
        try:
            out["reports"].append(sender.send(version)[1])
        except SyncError as error:
            out["lost"] = str(error)
        if out["lost"]:  # and the error, which refers to the group, is gone
            wait_for_others(sender, rank)
    out |= {"sent": Wire.sent, "received": Wire.received, "groups": groups()}
    sender.close()
    return out


def wait_for_others(end: Sender | Receiver, rank: int) -> None:
    """Until all ranks but the lost one know of it: nobody shall know it by the end of another's process."""
    store = end._member._store
    store.set(f"lost/{rank}", "")
    store.wait([f"lost/{other}" for other in range(LEARNERS + ENGINES - 1)])


def staged(sender: Sender) -> int:
    """Bytes of the buffers in which parcels are, sent and received ones and those of rings."""
    transport: Any = sender._transport
    parcels = [p for step in transport.steps for p in (step.send, step.receive) if p is not None]
    storages = {p.buffer.untyped_storage().data_ptr(): p.buffer.untyped_storage().nbytes() for p in parcels}
    return sum(storages.values())


def groups() -> list[int]:
    """The sizes of the process groups that this process is in."""
    return [group.size() for group in distributed_c10d._world.pg_map]


def flip_one(transport: Any) -> str:
    """Have a bit flip in a parcel that is handed on, after it arrived; the tensor to which it belongs."""
    parcel = next(s.receive for s in transport.steps if s.receive is not None and not s.receive.is_outgoing)
    arrived = transport.arrived

    def flipping(one: Any, version: int) -> None:
        if one is parcel:
            one.payload[0] ^= 1
            transport.arrived = arrived
        arrived(one, version)

    transport.arrived = flipping
    return str(parcel.bucket.parts[0].dst_param)


def engine(rank: int, job: Job) -> dict[str, Any]:
    sizes = {name: [high - low for low, high in box] for name, box in share(rank).items()}
    params = {name: torch.zeros(size, device=job.device) for name, size in sizes.items()}

    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            if name in params:
                params[name].copy_(of(share(rank)[name], tensor))

    shapes = HF.local_shapes(0)
    held = record(load, shapes, params, dict.fromkeys(shapes, torch.float32))
    receiver = Receiver(job.rendezvous, LEARNERS + rank, {one: one.local_slice(params[one.param]) for one in held})
    out: dict[str, Any] = {"reports": [], "bytes": [], "groups": groups(), "lost": ""}
    for version in job.versions:
        expected, beside, asleep = tensors_of(version), BackgroundChecksums(), OffloadedTensors(SLAB)
        asleep.offload("weights", params.values(), kept=False)
        asleep.onload()  # elsewhere, with whatever was there
        for param in params.values() if job.device == "cuda" else ():
            param.fill_(torch.nan)

        def coming(turn: int, held: Sequence[ParameterBox], version: int = version) -> None:
            if version == LOST and rank == ENGINES - 1:
                os._exit(0)

        def whole(one: ParameterBox, beside: BackgroundChecksums = beside) -> None:
            beside.sent(one, params[one.param])

        try:
            out["bytes"].append(receiver.receive(version, whole, coming).num_bytes)
        except SyncError as error:
            out["lost"] = str(error)
        if out["lost"]:
            wait_for_others(receiver, LEARNERS + rank)
            break
        for name, box in share(rank).items() if version in (WHOLE, AGAIN) else ():
            assert torch.equal(params[name].cpu(), of(box, expected[name])), name
        out["reports"].append(beside.report())
    receiver.close()
    return out


def run(
    folder: Path,
    nodes: str,
    *versions: int,
    seconds: float = HEARD,
    flips: int = 0,
    device: str = "cpu",
    start: Callable[..., None] = run_ranks,
) -> list[Any]:
    keeper = RendezvousStore("127.0.0.1", seconds)
    rendezvous = keeper.rendezvous(
        LEARNERS + ENGINES, learners=LEARNERS, backend="nccl" if device == "cuda" else "gloo"
    )
    job = Job(rendezvous=rendezvous, folder=folder, nodes=nodes, versions=versions, flips=flips, device=device)
    start(process, LEARNERS + ENGINES, job)
    return [torch.load(p, weights_only=False) if p.exists() else None for p in (folder / f"{r}.pt" for r in range(8))]


def missing(carrier: int, rank: int) -> int:
    """How many elements of an engine rank its carrier does not hold, by a number in each element."""
    ends = torch.tensor([0, *(tensor.numel() for tensor in tensors_of(0).values())]).cumsum(0)
    numbers = {
        name: torch.arange(1 + int(first), 1 + int(first) + tensor.numel()).view(tensor.shape)
        for (name, tensor), first in zip(tensors_of(0).items(), ends, strict=False)
    }
    held = torch.cat([tensor.flatten() for tensor in cut(numbers, carrier).values()])
    needed = torch.cat([of(box, numbers[name]).flatten() for name, box in share(rank).items()])
    return int((~torch.isin(needed, held)).sum())


def differing(learners: Sequence[Any], engines: Sequence[Any], number: int) -> set[str]:
    """The tensors of a push whose checksums differ."""
    shapes = HF.local_shapes(0)
    sealed = seal_from_reports([one["reports"][number] for one in learners], shapes)
    return set(compare(sealed, shapes, [one["reports"][number] for one in engines], frozenset()).differing)


@pytest.mark.parametrize(
    ("nodes", "receivers"),
    [
        ("AABBBBAA", [2, 3, 0, 1]),
        ("AABBABBB", [0, 2, 3, 2]),  # the second learner rank hands on to nobody, the third to two
        ("AABBCCDD", [4, 5, 6, 7]),
        ("AABBCBDA", [4, 2, 6, 0]),
    ],
    ids=["one-each", "two-on-one", "all-members", "some-members"],
)
def test_ranks_hand_on_what_is_needed_alone(tmp_path: Path, nodes: str, receivers: list[int]) -> None:
    """Bit for bit what torch cuts; members of the group get theirs over it."""
    size = [4 * sum(volume(box) for box in share(rank).values()) for rank in range(ENGINES)]
    needed = Counter[int]()  # over the group, by receiver
    for rank, receiver in enumerate(receivers):
        needed[receiver] += size[rank] if receiver >= LEARNERS else 4 * missing(receiver, rank)
    hands_on = [receiver for receiver in receivers if receiver < LEARNERS]
    flips = max(hands_on, key=needed.__getitem__, default=0)
    said = run(tmp_path, nodes, WHOLE, *([FLIPPED] if hands_on else []), flips=flips)
    learners, engines = said[:LEARNERS], said[LEARNERS:]
    assert [one["bytes"][0] for one in engines] == size
    assert not differing(learners, engines, 0)
    members = [receiver for receiver in receivers if receiver >= LEARNERS]
    groups = [[LEARNERS + len(members)] if rank < LEARNERS or rank in members else [] for rank in range(len(said))]
    assert [one["groups"] for one in said] == groups
    assert [one["received"] for one in learners] == [needed[rank] for rank in range(LEARNERS)]
    sent = [one["sent"] for one in learners]
    assert sum(sent) == needed.total()
    for rank, one in enumerate(learners):
        assert one["staged"] <= 2 * engine_bucket(members) + 2 * receivers.count(rank) * BUCKET
    if len({*hands_on}) == LEARNERS:
        assert max(sent) <= 1.05 * sum(sent) / LEARNERS
        assert max(needed.values()) > 8 * BUCKET
    if hands_on:
        assert differing(learners, engines, 1) == {learners[flips]["flipped"]}


def engine_bucket(members: Sequence[int]) -> int:
    """The most bytes that are sent at once: those into members are more."""
    return MEMBERS_BUCKET if members else BUCKET


def test_an_engine_rank_that_is_lost_leaves_nobody_waiting(tmp_path: Path) -> None:
    said = run(tmp_path, "ABCDDCBA", LOST, seconds=FAR)  # whose carriers all need something of others
    assert said.pop() is None
    assert all("version 5 is not served" in one["lost"] for one in said)


def test_an_engine_rank_on_a_learner_ranks_gpu_gets_all_from_that_and_others_are_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [Place(node=node, name=f"node-{node}", gpu=gpu) for node in "ab" for gpu in "xy"]
    places[2:] = [place._replace(gpu=f"{place.gpu}b") for place in places[2:]]
    assert find_receivers([*places, *reversed(places)], 4) == [3, 2, 1, 0]
    assert find_receivers([*places, places[0], places[0]], 4) == [0, 0]
    away = Place(node="c", name="node-c", gpu="z")
    assert find_receivers([*places, places[0], away, places[0]._replace(gpu="z")], 4) == [0, 5, 6]
    with pytest.raises(
        ConfigError, match="direct: engine rank 1 is on node-c, GPU x, as a learner rank is that cannot"
    ):
        find_receivers([*places, places[0], away._replace(gpu="x")], 4)
    cpus = [place._replace(gpu="") for place in places]
    on_nodes = [*cpus, cpus[0], cpus[3], away._replace(gpu=""), cpus[0], cpus[0]]
    assert find_receivers(on_nodes, 4) == [0, 2, 6, 1, 0]
    monkeypatch.setattr(plans, "_HOP_ON_A_GPU", False)
    assert find_receivers(on_nodes, 4) == [0, 2, 6, 1, 0]
    with pytest.raises(ConfigError, match="engine rank 0 is on node-a, GPU x, as a learner rank is that cannot hand"):
        find_receivers([*places, places[0]], 4)


def test_processes_of_another_user_or_network_are_not_beside_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not connect to its socket, on the same machine."""
    here = meeting.own_place([])
    assert meeting.own_place([torch.zeros(1)]) == here
    for name, other in (("getuid", lambda: -1), ("readlink", lambda path: "net:[1]")):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, other)
            assert meeting.own_place([]).node != here.node


# Learner ranks of two pretended nodes write a mirror file in each: whole, received once, shared out evenly.
RANKS = 4
SHAPES = HF.local_shapes(0)
PIPELINE, EXPERTS = ParallelDims(pp=2, tp=2, ep=2), ParallelDims(ep=4, dp=4)
Groups = tuple[tuple[int, ...], ...]
TWO, FIRST, ALL = ((0, 1), (2, 3)), ((0, 1),), ((0, 1, 2, 3),)


def plan_of(dims: ParallelDims, groups: Groups) -> Plan:
    return plan_into_copies(Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=dims), HF, groups)


def mirror_process(dims: ParallelDims, groups: Groups, rank: int, folder: Path) -> None:
    """Two versions into the file of this rank's group, as a learner rank does it."""
    group: tuple[int, ...] = next((group for group in groups if rank in group), ())
    path = folder / f"node-{groups.index(group) if group else 'none'}" / "model.safetensors"
    if group and rank == group[0]:
        Mirror.make(path, SHAPES, torch.bfloat16, folder / "config.json", None, writers=len(group))
    dist.barrier()
    moves, src = (
        plan_of(dims, groups),
        {name: torch.zeros_like(t) for name, t in cut(tensors_of(0), rank, dims).items()},
    )
    wanted = {transfer.dst_param for transfer in moves.receives(rank)}
    made = Mirror(path, SHAPES, torch.bfloat16, writer=group.index(rank), writers=len(group)) if group else None
    dst = {name: tensor for name, tensor in made.tensors.items() if name in wanted} if made else {}
    transport, received, sent = ProcessGroupTransport(moves, src=src, dst=dst, bucket_bytes=4096), 0, 0
    for version in (1, 2):
        for name, tensor in cut(tensors_of(version), rank, dims).items():
            src[name].copy_(tensor)
        if made:
            made.withdraw()
        received = transport.move(version).num_bytes
        dist.barrier()
        if made and version == 2 and rank != group[-1]:
            made.serve(version)
        dist.barrier()
        if made and version == 2 and rank == group[-1]:
            if len(group) > 1:
                with pytest.raises(SyncError, match="holds version None, not 2"):  # one writer has not served it
                    mirror.read(path, version)
            made.serve(version)
    dist.barrier()
    sent = transport.ends.bytes_sent.total()
    written = sum(volume(t.dst_box) for t in moves.receives(rank))
    said = {"received": received, "sent": sent, "written": written}
    torch.save(said, folder / f"{rank}.pt")


def mirrored(folder: Path, dims: ParallelDims, groups: Groups) -> list[dict[str, Any]]:
    (folder / "config.json").write_text("{}")
    base.spawn(RANKS, partial(mirror_process, dims, groups), folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def lacking(dims: ParallelDims, group: tuple[int, ...]) -> int:
    """How many elements no rank of the group holds, by a number in each element."""
    ends = torch.tensor([0, *(prod(shape) for shape in SHAPES.values())]).cumsum(0)
    numbers = {
        name: torch.arange(1 + int(first), 1 + int(first) + prod(shape)).view(shape)
        for (name, shape), first in zip(SHAPES.items(), ends, strict=False)
    }
    held = torch.cat([tensor.flatten() for rank in group for tensor in cut(numbers, rank, dims).values()])
    return int(ends[-1]) - int(held[held > 0].unique().numel())  # 0 is padding


@pytest.mark.parametrize(
    ("dims", "groups"),
    [(PIPELINE, TWO), (EXPERTS, TWO), (EXPERTS, FIRST), (PIPELINE, ALL)],
    ids=["stages", "experts", "one-of-two", "one-node"],
)
def test_each_node_has_the_whole_model_from_its_own_ranks(tmp_path: Path, dims: ParallelDims, groups: Groups) -> None:
    """Bytes received ÷ needed is 1.00, where what a rank of the node holds is not needed."""
    said = mirrored(tmp_path, dims, groups)
    total, needed = sum(map(prod, SHAPES.values())), 0
    for number, group in enumerate(groups):
        found, truth = mirror.read(tmp_path / f"node-{number}" / "model.safetensors", 2), tensors_of(2)
        assert found.keys() == truth.keys()
        assert all(torch.equal(tensor, truth[name].bfloat16()) for name, tensor in found.items())
        assert sum(said[rank]["received"] for rank in group) == 2 * lacking(dims, group)
        assert sum(said[rank]["written"] for rank in group) == total  # each element once
        assert max(said[rank]["written"] for rank in group) <= 1.05 * total / len(group)
        needed += lacking(dims, group)
    sent = [one["sent"] for one in said]
    assert sum(sent) == 2 * needed
    senders = [rank for rank in range(RANKS) if needed and (len(groups) > 1 or rank not in groups[0])]
    assert sum(sent[rank] for rank in senders) == sum(sent)
    assert max(sent) * max(1, len(senders)) <= 1.05 * sum(sent)


WIDER = ("mlp.gate.weight",)  # in engines, not in files
FLOAT32 = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")  # in engines of any dtype


def pushes(rank: int, root: Path, rendezvous: Rendezvous, lora: Sequence[str]) -> None:
    """Rank 0 is the learner's, whose weights are bfloat16; rank 1 an engine's, which receives them straight."""
    torch.set_num_threads(1)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(root / "model" / "model.safetensors").items()}
    if rank == 0:
        from launcher.runs.folder import mirror_path
        from launcher.wire import Setup
        from launcher.worker.learner_rank import LearnerRank

        merging.UntrainedAdapters = Drawn  # type: ignore[misc]
        keys = ("rollout=vllm", "learner.dtype=bfloat16", "learner.ep=1", "learner.threads=1", f"weights.folder={root}")
        config = load_config("tiny_cpu", [*keys, *lora])
        setup = Setup(config=config, model_folder=root / "model", run_folder=root, rendezvous=f"file://{root}/store")
        worker = LearnerRank(setup, 0, None)
        worker.stage(1)
        worker.commit(1)
        worker.export(root / "exported")
        worker.join_engines(rendezvous, [{name: whole_box(shape) for name, shape in shapes.items()}])
        sent = worker.send(1)
        assert not isinstance(sent, SyncError)
        found = {name: checksum(t, shapes[name]) for name, t in mirror.read(mirror_path(config, root), 1).items()}
        said = {
            "file": found,
            "sums": seal_from_reports([worker.sums()], shapes),
            "straight": seal_from_reports([sent[1]], shapes),
        }
        torch.save(said, root / "learner.pt")
        worker.close()
    else:
        dtypes = {name: torch.float32 if name.endswith(FLOAT32) else torch.bfloat16 for name in shapes}
        params = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
        params |= {name: param.float() for name, param in params.items() if name.endswith(WIDER)}
        held = record(lambda tensors: [params[name].copy_(tensor) for name, tensor in tensors], shapes, params, dtypes)
        receiver = Receiver(rendezvous, 1, {one: one.local_slice(params[one.param]) for one in held})
        beside = BackgroundChecksums()

        def whole(one: ParameterBox) -> None:
            beside.sent(one, params[one.param])

        receiver.receive(1, whole)
        came = [ChecksumReport(rows=[("", *row) for row in beside.report().read], seconds=0.0)]
        said = {
            "held": seal_from_reports([make_checksum_report(held, params)], shapes),
            "came": seal_from_reports(came, shapes),
        }
        torch.save(said, root / "engine.pt")
        receiver.close()


@pytest.mark.parametrize("lora", [(), ("learner.lora.rank=4",)], ids=["trained", "merged"])
def test_what_engines_hold_in_float32_is_not_rounded_in_the_file_and_straight_pushes_agree(
    tmp_path: Path, lora: tuple[str, ...]
) -> None:
    """Learner and engine of a model with a selection bias and an indexer, both in bfloat16, also with adapters that are
    merged. 8 seconds.

    The engine holds routers in float32, as vLLM and SGLang do: its checksums are those of the file all the same.
    """
    save_model("deepseek_v32", tmp_path / "model", q_lora_rank=12)
    keeper = RendezvousStore("127.0.0.1", 240.0)
    rendezvous = keeper.rendezvous(2, learners=1, backend="gloo")
    run_ranks(pushes, 2, tmp_path, rendezvous, lora)
    wanted = load_file(tmp_path / "model" / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, tensor in wanted.items():
        right = tensor if name.endswith(FLOAT32) else tensor.bfloat16()
        assert exported[name].dtype == right.dtype
        adapted = bool(lora) and "_proj" in name and "indexer" not in name
        assert torch.equal(exported[name], right) is not adapted, name
        assert not torch.equal(tensor, tensor.bfloat16().float()), name
    said = torch.load(tmp_path / "learner.pt") | torch.load(tmp_path / "engine.pt")
    assert said["file"] == {name: checksum(tensor, tuple(tensor.shape)) for name, tensor in exported.items()}
    assert said["sums"] == said["file"]
    assert said["straight"] == said["came"] == said["held"] == said["file"]
