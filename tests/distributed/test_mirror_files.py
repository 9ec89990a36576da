"""Learner ranks of two pretended nodes write a mirror file in each: whole, received once, shared out evenly."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.config.io import load_config
from rl_megatron.errors import SyncError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import volume, whole_box
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.places import Held, record
from rl_megatron.weights.checks.reports import Beside, Report, checksums_of, sealed_by
from rl_megatron.weights.formats.served import FORMATS
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.qwen3_moe import MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import Plan, plan_into_copies
from rl_megatron.weights.servers import mirror
from rl_megatron.weights.servers.mirror import Mirror
from rl_megatron.weights.transports.engine_ends import Receiver
from rl_megatron.weights.transports.joined import Keeper, Rendezvous
from rl_megatron.weights.transports.process_group import ProcessGroupTransport
from tests.distributed import test_transport as base
from tests.distributed.ranks import run_ranks
from tests.distributed.test_carried import HF, SHAPE, tensors_of
from tests.family_models import save_model

RANKS = 4
SHAPES = HF.local_shapes(0)
PIPELINE, EXPERTS = ParallelDims(pp=2, tp=2, ep=2), ParallelDims(ep=4, dp=4)
Groups = tuple[tuple[int, ...], ...]
TWO, FIRST, ALL = ((0, 1), (2, 3)), ((0, 1),), ((0, 1, 2, 3),)


def cut(tensors: dict[str, Tensor], dims: ParallelDims, rank: int) -> dict[str, Tensor]:
    theirs, base.SHAPE = base.SHAPE, SHAPE
    try:
        return base.megatron_tensors(tensors, dims, rank)
    finally:
        base.SHAPE = theirs


def plan_of(dims: ParallelDims, groups: Groups) -> Plan:
    return plan_into_copies(Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=dims), HF, groups)


def process(dims: ParallelDims, groups: Groups, quantization: str, rank: int, folder: Path) -> None:
    """Two versions into the file of this rank's group, as a learner rank does it."""
    group: tuple[int, ...] = next((group for group in groups if rank in group), ())
    path, kind = (
        folder / f"node-{groups.index(group) if group else 'none'}" / "model.safetensors",
        FORMATS[quantization],
    )
    if group and rank == group[0]:
        Mirror.make(path, SHAPES, torch.bfloat16, folder / "config.json", kind, writers=len(group))
    dist.barrier()
    moves, src = (
        plan_of(dims, groups),
        {name: torch.zeros_like(t) for name, t in cut(tensors_of(0), dims, rank).items()},
    )
    wanted = {transfer.dst_param for transfer in moves.receives(rank)}
    made = Mirror(path, SHAPES, torch.bfloat16, kind, writer=group.index(rank), writers=len(group)) if group else None
    dst = {name: tensor for name, tensor in made.tensors.items() if name in wanted} if made else {}
    transport, received, sent = ProcessGroupTransport(moves, src=src, dst=dst, bucket_bytes=4096), 0, 0
    for version in (1, 2):
        for name, tensor in cut(tensors_of(version), dims, rank).items():
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
    said = {"received": received, "sent": sent, "written": written, "sums": made.sums().rows if made else []}
    torch.save(said, folder / f"{rank}.pt")


def run(folder: Path, dims: ParallelDims, groups: Groups, quantization: str = "none") -> list[dict[str, Any]]:
    (folder / "config.json").write_text("{}")
    base.spawn(RANKS, partial(process, dims, groups, quantization), folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def lacking(dims: ParallelDims, group: tuple[int, ...]) -> int:
    """How many elements no rank of the group holds, by a number in each element."""
    ends = torch.tensor([0, *(prod(shape) for shape in SHAPES.values())]).cumsum(0)
    numbers = {
        name: torch.arange(1 + int(first), 1 + int(first) + prod(shape)).view(shape)
        for (name, shape), first in zip(SHAPES.items(), ends, strict=False)
    }
    held = torch.cat([tensor.flatten() for rank in group for tensor in cut(numbers, dims, rank).values()])
    return int(ends[-1]) - int(held[held > 0].unique().numel())  # 0 is padding


@pytest.mark.parametrize(
    ("dims", "groups"),
    [(PIPELINE, TWO), (EXPERTS, TWO), (EXPERTS, FIRST), (PIPELINE, ALL)],
    ids=["stages", "experts", "one-of-two", "one-node"],
)
def test_each_node_has_the_whole_model_from_its_own_ranks(tmp_path: Path, dims: ParallelDims, groups: Groups) -> None:
    """Bytes received ÷ needed is 1.00, where what a rank of the node holds is not needed."""
    said = run(tmp_path, dims, groups)
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


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_writers_quantise_together_as_one_does(tmp_path: Path, quantization: str) -> None:
    said, kind = run(tmp_path, PIPELINE, TWO, quantization), FORMATS[quantization]
    alone = tmp_path / "alone" / "model.safetensors"
    Mirror.make(alone, SHAPES, torch.bfloat16, tmp_path / "config.json", kind)
    one = Mirror(alone, SHAPES, torch.bfloat16, kind)
    for name, tensor in tensors_of(2).items():
        one.tensors[name].copy_(tensor)
    one.serve(2)
    wanted, sealed = mirror.read(alone, 2), mirror.seal(alone, 2, {})
    for number, group in enumerate(TWO):
        path = tmp_path / f"node-{number}" / "model.safetensors"
        found = mirror.read(path, 2)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(t.view(torch.uint8), wanted[name].view(torch.uint8)) for name, t in found.items())
        assert mirror.seal(path, 2, {}).error == sealed.error
        assert sorted(row for rank in group for row in said[rank]["sums"]) == sorted(one.sums().rows)


WIDER = ("mlp.gate.weight",)  # in engines, not in files
FLOAT32 = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")  # in engines of any dtype


def pushes(rank: int, root: Path, rendezvous: Rendezvous) -> None:
    """Rank 0 is the learner's, whose weights are bfloat16; rank 1 an engine's, which receives them straight."""
    torch.set_num_threads(1)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(root / "model" / "model.safetensors").items()}
    if rank == 0:
        from launcher.runs.folder import mirror_path
        from launcher.wire.greetings import Setup
        from launcher.worker.learner_rank import Worker

        keys = ("rollout=vllm", "learner.dtype=bfloat16", "learner.ep=1", "learner.threads=1", f"weights.folder={root}")
        config = load_config("tiny_cpu", keys)
        setup = Setup(config=config, model_folder=root / "model", run_folder=root, rendezvous=f"file://{root}/store")
        worker = Worker(setup, 0, None)
        worker.stage(1)
        worker.commit(1)
        worker.export(root / "exported")
        worker.join_engines(rendezvous, [{name: whole_box(shape) for name, shape in shapes.items()}])
        sent = worker.send(1)
        assert not isinstance(sent, SyncError)
        found = {name: checksum(t, shapes[name]) for name, t in mirror.read(mirror_path(config, root), 1).items()}
        said = {"file": found, "sums": sealed_by([worker.sums()], shapes), "straight": sealed_by([sent[1]], shapes)}
        torch.save(said, root / "learner.pt")
        worker.close()
    else:
        dtypes = {name: torch.float32 if name.endswith(FLOAT32) else torch.bfloat16 for name in shapes}
        params = {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
        params |= {name: param.float() for name, param in params.items() if name.endswith(WIDER)}
        held = record(lambda tensors: [params[name].copy_(tensor) for name, tensor in tensors], shapes, params, dtypes)
        receiver = Receiver(rendezvous, 1, {one: one.of(params[one.param]) for one in held})
        beside = Beside()

        def whole(one: Held) -> None:
            beside.sent(one, params[one.param])

        receiver.receive(1, whole)
        came = [Report(rows=[("", *row) for row in beside.report().read], seconds=0.0)]
        said = {"held": sealed_by([checksums_of(held, params)], shapes), "came": sealed_by(came, shapes)}
        torch.save(said, root / "engine.pt")
        receiver.close()


def test_what_engines_hold_in_float32_is_not_rounded_in_the_file_and_straight_pushes_agree(tmp_path: Path) -> None:
    """Learner and engine of a model with a selection bias and an indexer, both in bfloat16. 8 seconds.

    The engine holds routers in float32, as vLLM and SGLang do: its checksums are those of the file all the same.
    """
    save_model("deepseek_v32", tmp_path / "model", q_lora_rank=12)
    keeper = Keeper("127.0.0.1", 240.0)
    rendezvous = keeper.rendezvous(2, learners=1, transport="process_group", backend="gloo")
    run_ranks(pushes, 2, tmp_path, rendezvous)
    wanted = load_file(tmp_path / "model" / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, tensor in wanted.items():
        right = tensor if name.endswith(FLOAT32) else tensor.bfloat16()
        assert exported[name].dtype == right.dtype
        assert torch.equal(exported[name], right), name
        assert not torch.equal(tensor, tensor.bfloat16().float()), name
    said = torch.load(tmp_path / "learner.pt") | torch.load(tmp_path / "engine.pt")
    assert said["file"] == {name: checksum(tensor, tuple(tensor.shape)) for name, tensor in exported.items()}
    assert said["sums"] == said["file"]
    assert said["straight"] == said["came"] == said["held"] == said["file"]
