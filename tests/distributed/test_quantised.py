"""Learner ranks that quantise what they send, also where they share a block: each byte is that of the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.processes.ports import held_ports
from rl_megatron.errors import SyncError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box, Shape, whole_box
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checks.compare import compare
from rl_megatron.weights.checks.places import Held, record
from rl_megatron.weights.checks.reports import Beside, largest_change, sealed_by, sources_of
from rl_megatron.weights.formats.at_sender import at_sender
from rl_megatron.weights.formats.scaled import ScaledLayout, with_scales
from rl_megatron.weights.formats.served import FORMATS, Format, stored
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.recorded import recorded_layout
from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import plan
from rl_megatron.weights.transports import engine_ends
from rl_megatron.weights.transports.engine_ends import Receiver, Sender
from rl_megatron.weights.transports.joined import Keeper, Rendezvous
from tests.distributed import test_transport as base
from tests.distributed.ranks import run_ranks

# Blocks of 128 end inside tensors, query groups (of 80 and 40 rows), the halves of tp=2, and of etp=2 (104 rows).
SHAPE = replace(base.SHAPE, hidden_size=160, head_dim=40, expert_width=208, vocab_size=24)
HF = Layout(table=HF_QWEN3_MOE, shape=SHAPE)
LAYOUTS = {"tp2-ep2": ParallelDims(tp=2, ep=2, dp=2), "tp2-etp2-pp2": ParallelDims(tp=2, etp=2, pp=2)}
LEARNERS, ENGINES = 4, 2
VERSIONS = (3, 4)
SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    layout: str
    rendezvous: Rendezvous

    @property
    def form(self) -> Format:
        found = FORMATS[self.kind]
        assert found is not None
        return found

    @property
    def learner(self) -> ScaledLayout:
        layout = Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=LAYOUTS[self.layout])
        found = with_scales(layout, HF, self.form.blocks)
        assert isinstance(found, ScaledLayout)
        return found

    @property
    def hf(self) -> Layout:
        return with_scales(HF, HF, self.form.blocks)

    def whole(self, version: int) -> tuple[dict[str, Tensor], tuple[float, str]]:
        """What the mirror file would have of a version, and its largest error."""
        values, changes = tensors_of(version), {}
        out = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype))
            for name, (dtype, shape) in stored(HF.local_shapes(0), DType.BF16, self.form).items()
        }
        for name, tensor in values.items():
            if (scales := out.get(name + self.form.blocks.suffix)) is not None:
                changes[name] = self.form.write(name, tensor, out[name], scales)
            else:
                out[name].copy_(tensor)
        found = largest_change([changes])
        assert found is not None
        return out, found

    def share(self, rank: int) -> dict[str, Box]:
        """What an engine rank holds: half of the experts, one block or more of the queries' rows, and all else."""
        out = {}
        for name, shape in self.hf.local_shapes(0).items():
            parts, box = name.split("."), list(whole_box(shape))
            if "experts" in parts and int(parts[5]) % ENGINES != rank:
                continue
            if "q_proj" in parts:
                block = shape[0] if name.endswith("_scale_inv") else 0
                edge = 1 if block else 128
                box[0] = (0, edge) if rank == 0 else (edge, shape[0])
            out[name] = tuple(box)
        return out


def tensors_of(version: int) -> dict[str, Tensor]:
    """Numbers of several sizes, so that blocks and rows have scales of their own; some in each are zero."""
    generator = torch.Generator().manual_seed(version)
    out = {n: torch.randn(shape, generator=generator).bfloat16() for n, shape in HF.local_shapes(0).items()}
    for tensor in out.values():
        if tensor.ndim == 2:
            tensor.mul_(torch.logspace(-2, 2, tensor.shape[1])).mul_(torch.logspace(1, -3, tensor.shape[0])[:, None])
            tensor[3].zero_()
    return out


def cut(layout: Layout, hf: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A learner rank's parameters, by the plan that loads a checkpoint."""
    out = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in layout.local_shapes(rank).items()}
    for t in plan(HF, layout, placement={rank: rank}).receives(rank):
        of(out[t.dst_param], t.dst_box).copy_(of(hf[t.src_param], t.src_box))
    return out


def of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(low, high) for low, high in box)]


def process(rank: int, cases: list[Case], port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    engine_ends._BUCKET_BYTES = engine_ends._SLOT_BYTES = 9000  # parts of boxes end inside blocks
    if rank < LEARNERS:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=SECONDS))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=LEARNERS)
    said = [learner(rank, case) if rank < LEARNERS else engine(rank - LEARNERS, case) for case in cases]
    torch.save(said, folder / f"{rank}.pt")
    if rank < LEARNERS:
        dist.barrier()
        dist.destroy_process_group()


def learner(rank: int, case: Case) -> dict[str, Any]:
    layout, ranks = case.learner, [case.share(rank) for rank in range(ENGINES)]
    tensors = {name: torch.zeros_like(tensor) for name, tensor in cut(layout.base, tensors_of(0), rank).items()}
    quantiser, mine, hf = at_sender(case.form, layout.base, HF, rank, tensors)
    assert quantiser is not None
    sources = sources_of(mine, hf)[rank]
    dtypes = {name: tensor.dtype for name, tensor in case.whole(0)[0].items()}
    sender = Sender(
        case.rendezvous, rank, (mine, recorded_layout(hf, ranks)), tensors, sources, dtypes=dtypes, quantiser=quantiser
    )
    reports = []
    for version in VERSIONS:
        for name, tensor in cut(layout.base, tensors_of(version), rank).items():
            tensors[name].copy_(tensor)
        reports.append(sender.send(version)[1])
    sender.close()
    broken, refused = tensors_of(0), ""
    broken["model.layers.1.self_attn.k_proj.weight"][3, 7] = torch.nan  # in a block that both ranks of tp share
    for name, tensor in cut(layout.base, broken, rank).items():
        tensors[name].copy_(tensor)
    try:
        quantiser.begin(engine_ends.largest_of_all)
    except SyncError as error:
        refused = str(error)
    return {"reports": reports, "refused": refused}


def engine(rank: int, case: Case) -> list[Any]:
    share, blank = case.share(rank), case.whole(0)[0]
    params = {name: torch.zeros_like(of(blank[name], box)) for name, box in share.items()}

    def load(given: Any) -> None:
        for name, tensor in given:
            if name in params:
                params[name].copy_(of(tensor, share[name]))

    shapes = {name: tuple(tensor.shape) for name, tensor in blank.items()}
    held = record(load, shapes, params, {name: tensor.dtype for name, tensor in blank.items()})
    boxes = {one: one.of(params[one.param]) for one in held}
    receiver = Receiver(case.rendezvous, LEARNERS + rank, boxes)
    out = []
    for version in VERSIONS:
        beside = Beside()

        def whole(one: Held, beside: Beside = beside) -> None:
            beside.sent(one, params[one.param])
            beside.held([one], params)

        num_bytes = receiver.receive(version, whole).num_bytes
        expected = case.whole(version)[0]
        for name, box in share.items():
            assert same(params[name], of(expected[name], box)), (case.kind, case.layout, name)
        assert num_bytes == sum(tensor.nbytes for tensor in params.values())
        out.append(beside.report())
    receiver.close()
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_ranks_that_share_blocks_send_the_bytes_of_the_whole_tensors(tmp_path: Path) -> None:
    """For each format and layout, over another transport each. 10 seconds."""
    keeper, made = Keeper("127.0.0.1", SECONDS), iter(("process_group", "process_group", "carried", "carried"))
    cases = [
        Case(
            kind=kind,
            layout=layout,
            rendezvous=keeper.rendezvous(LEARNERS + ENGINES, learners=LEARNERS, transport=next(made), backend="gloo"),
        )
        for kind in ("fp8", "int8")
        for layout in LAYOUTS
    ]
    with held_ports("127.0.0.1") as port:
        run_ranks(process, LEARNERS + ENGINES, cases, port, tmp_path)
    said = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(LEARNERS + ENGINES)]
    for i, case in enumerate(cases):
        shapes = case.hf.local_shapes(0)
        learners = [one[i] for one in said[:LEARNERS]]
        for j, version in enumerate(VERSIONS):
            reports = [one["reports"][j] for one in learners]
            sealed = sealed_by(reports, shapes)
            found = compare(sealed, shapes, [one[i][j] for one in said[LEARNERS:]], frozenset())
            assert not found.differing
            assert all(name.endswith(case.form.blocks.suffix) for name in found.unseen)
            assert largest_change(one.changes for one in reports) == (
                pytest.approx((wanted := case.whole(version)[1])[0], rel=1e-6),
                wanted[1],
            )
        layers = [rank // 2 if "pp2" in case.layout else 1 for rank in range(LEARNERS)]
        holds = [layer == 1 and (case.kind == "fp8" or rank % 2 == 0) for rank, layer in enumerate(layers)]
        assert [bool(one["refused"]) for one in learners] == holds
        assert {one["refused"].partition(" has values that are NaN")[0] for one in learners if one["refused"]} == {
            "model.layers.1.self_attn.k_proj.weight"
        }


def tiles(boxes: list[Box], shape: Shape) -> bool:
    seen = torch.zeros(shape, dtype=torch.int32)
    for box in boxes:
        of(seen, box).add_(1)
    return bool((seen == 1).all())


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_scale_has_one_owner_and_shared_blocks_are_known(kind: str, layout: str) -> None:
    """Against a loop over the elements of every box."""
    nobody = Keeper("127.0.0.1", 1.0).rendezvous(1, learners=1, transport="carried", backend="gloo")
    case = Case(kind=kind, layout=layout, rendezvous=nobody)
    mine, grids, blocks = case.learner, case.hf.local_shapes(0), case.form.blocks
    boxes: dict[str, set[Box]] = {}
    for rank in range(LEARNERS):
        for one, name, _ in mine.held(rank):
            boxes.setdefault(name, set()).add(one.hf_box)
    owned: dict[str, list[Box]] = {}
    for sources in sources_of(mine, case.hf):
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
