"""Pushes: four learner ranks fill the two of an engine, or files of two nodes, in one encoding or as adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import SyncError
from rl_megatron.features.lora.push import ADAPTERS, AdapterFolders, adapters_folder
from rl_megatron.features.quantize.encoding import ENCODINGS, Quantization
from rl_megatron.features.sparse.changes import Changes
from rl_megatron.types import ParallelDims
from rl_megatron.weights.boxes import Box, whole_box
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checks.places import ParameterBox, record
from rl_megatron.weights.checks.reports import BackgroundChecksums, largest_change, sender_boxes
from rl_megatron.weights.formats.hf_folder import PREFIX, stored
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.recorded import recorded_layout
from rl_megatron.weights.plans.plan import Place, plan, plan_into_copies
from rl_megatron.weights.routes import engine_ends, mirror
from rl_megatron.weights.routes import rendezvous as meeting
from rl_megatron.weights.routes.engine_ends import Receiver, Sender
from rl_megatron.weights.routes.group import ProcessGroupTransport
from rl_megatron.weights.routes.rendezvous import Rendezvous
from tests.matrix.cells import shape_of
from tests.matrix.probes import of_adapters

LEARNERS, ENGINES, VERSIONS = 4, 2, (1, 2)
LAYOUTS = {
    "tp2-ep2": ParallelDims(tp=2, ep=2, dp=2),
    "tp2-etp2-pp2": ParallelDims(tp=2, etp=2, pp=2),
    "pp2-ep2": ParallelDims(pp=2, ep=2, dp=2),
    "ep4": ParallelDims(ep=4, dp=4),
}
WIDE = {"num_layers": 2, "hidden_size": 160, "head_dim": 40, "expert_width": 208}
"""Blocks of 128 end inside tensors, query groups (of 80 and 40 rows), and the halves of tp=2 and etp=2 (104 rows)."""
WRITERS = ((0, 1), (2, 3))  # of each node's file
BUCKET = 9000  # bytes: parts of boxes end inside blocks
LORA = LearnerSection.model_validate({"lora": {"rank": 4, "alpha": 12.0}})


@dataclass(frozen=True, slots=True)
class Push:
    """``end``: an engine on nodes of its own (members), one on a learner rank's (beside), or files."""

    model: str
    learner: str
    end: str
    encoding: str

    def __str__(self) -> str:
        return f"{self.model}, {self.learner}, {self.end}, {self.encoding}"

    @property
    def form(self) -> Quantization | None:
        """The encoding of quantized weights."""
        return ENCODINGS.get(self.encoding)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """The learner's and that of files, without scales; with adapters, theirs."""
        shape = shape_of(self.model)
        shape = replace(shape, **WIDE) if self.model == "qwen3_moe" else shape
        found = megatron_layout(shape, LAYOUTS[self.learner]), hf_layout(shape)
        return of_adapters(*found, LORA) if self.encoding == "adapters" else found


QUICK = (Push("qwen3_moe", "tp2-ep2", "members", "fp8"), Push("deepseek_v3", "pp2-ep2", "files", "int8"))
PUSHES = (
    *QUICK,
    Push("qwen3_moe", "tp2-etp2-pp2", "members", "fp8"),
    Push("qwen3_moe", "tp2-ep2", "beside", "int8"),
    Push("qwen3_moe", "tp2-etp2-pp2", "beside", "int8"),
    Push("qwen3_moe", "tp2-etp2-pp2", "files", "fp8"),
    Push("qwen3_moe", "tp2-ep2", "files", "int8"),
    Push("qwen3_moe", "ep4", "files", "sparse"),
    Push("qwen3_moe", "tp2-etp2-pp2", "files", "adapters"),
    Push("deepseek_v3", "tp2-ep2", "members", "int8"),
    Push("deepseek_v3", "tp2-etp2-pp2", "beside", "fp8"),
    Push("deepseek_v3", "tp2-ep2", "files", "adapters"),
    Push("glm4_moe", "pp2-ep2", "files", "sparse"),
    Push("glm4_moe", "ep4", "members", "fp8"),
    Push("qwen3_next", "tp2-ep2", "beside", "int8"),
    Push("qwen3_next", "pp2-ep2", "files", "adapters"),
    Push("qwen3_5_moe_stacked", "tp2-ep2", "members", "none"),
    Push("gpt_oss", "tp2-ep2", "beside", "none"),
    Push("gpt_oss", "pp2-ep2", "files", "sparse"),
)


def tensors_of(cell: Push, version: int) -> dict[str, Tensor]:
    """In bfloat16, of several sizes, so that blocks and rows have scales of their own; some in each are zero. A sparse
    version has few numbers of its own."""
    generator = torch.Generator().manual_seed(1 if cell.encoding == "sparse" else version)
    out = {n: torch.randn(s, generator=generator).bfloat16() for n, s in cell.layouts[1].local_shapes(0).items()}
    for tensor in out.values():
        if tensor.ndim == 2:
            tensor.mul_(torch.logspace(-2, 2, tensor.shape[1])).mul_(torch.logspace(1, -3, tensor.shape[0])[:, None])
            tensor[-1].zero_()
        if cell.encoding == "sparse":
            tensor.view(-1)[:2] = version
    return out


@cache
def whole(cell: Push, version: int) -> tuple[dict[str, Tensor], tuple[float, str]]:
    """The tensors of files as the encoding writes them one by one, and the largest error."""
    values, form = tensors_of(cell, version), cell.form
    if form is None:
        return values, (0.0, "")
    entries = stored(cell.layouts[1].local_shapes(0), DType.BF16, form).items()
    out = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in entries}
    changes = {name: change for name, one in values.items() if (change := form.write(name, one, out)) is not None}
    return out, largest_change([changes]) or (0.0, "")


def of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(low, high) for low, high in box)]


def fill(tensors: Mapping[str, Tensor], cell: Push, version: int, rank: int) -> None:
    """Gives a learner rank's parameters their numbers, by the plan that loads a checkpoint."""
    (layout, hf), values = cell.layouts, tensors_of(cell, version)
    for t in plan(hf, layout, placement={rank: rank}).receives(rank):
        of(tensors[t.dst_param], t.dst_box).copy_(of(values[t.src_param], t.src_box))


def share(cell: Push, rank: int) -> dict[str, Box]:
    """What an engine rank holds: every other expert, half of the rows of other matrices in whole blocks, and the rest
    of what has rows, if that is all."""
    out, shapes = {}, {name: tuple(tensor.shape) for name, tensor in whole(cell, 0)[0].items()}
    unit = 128 if cell.encoding == "fp8" else 1
    for name, shape in shapes.items():
        box, expert = list(whole_box(shape)), re.search(r"experts\.(\d+)\.", name)
        if expert is None and len(shape) > 1:
            half = -(-shapes[name.partition("_scale")[0]][0] // (ENGINES * unit))
            edge = min(shape[0], half if "_scale" in name else half * unit)
            box[0] = (0, edge) if rank == 0 else (edge, shape[0])
        if (expert is None or int(expert[1]) % ENGINES == rank) and box[0][0] < box[0][1]:
            out[name] = tuple(box)
    return out


def pushed(rank: int, cell: Push, rendezvous: Rendezvous, folder: Path) -> dict[str, Any]:
    """What a rank of the learner sent or wrote, or one of an engine received, of each version."""
    with ExitStack() as ends:
        for name in ("_BUCKET_BYTES", "_SLOT_BYTES"):
            ends.enter_context(patch.object(engine_ends, name, BUCKET))
        if cell.end == "members":
            ends.enter_context(patch.object(meeting, "own_place", lambda _: Place(node=str(rank), name="", gpu="")))
        if rank >= LEARNERS:
            return received(rank - LEARNERS, cell, rendezvous)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=LEARNERS)
        tensors = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in cell.layouts[0].local_shapes(rank).items()}
        out = written(rank, cell, tensors, folder) if cell.end == "files" else sent(rank, cell, tensors, rendezvous)
        dist.barrier()
        dist.destroy_process_group()
        return out


def sent(rank: int, cell: Push, tensors: Mapping[str, Tensor], rendezvous: Rendezvous) -> dict[str, Any]:
    """By a learner rank, straight into engine ranks; at last all have a NaN in their first quantized tensor."""
    (layout, hf), form, encoder = cell.layouts, cell.form, None
    if form is not None:
        layout, hf = form.layout(layout, hf), form.layout(hf, hf)
        encoder = form.encoder(layout, rank, tensors)
    layouts = layout, recorded_layout(hf, [share(cell, engine) for engine in range(ENGINES)])
    dtypes = {name: tensor.dtype for name, tensor in whole(cell, 0)[0].items()}
    sources = sender_boxes(layout, hf)[rank]
    sender = Sender(rendezvous, rank, layouts, tensors, sources, dtypes=dtypes, encoder=encoder)
    out: dict[str, Any] = {"reports": [], "refused": ""}
    for version in VERSIONS:
        fill(tensors, cell, version, rank)
        out["reports"].append(sender.send(version)[1])
    sender.close()
    if encoder is not None:
        one, out["name"], param = next(iter(layout.held(rank)))  # type: ignore[attr-defined]
        of(tensors[param], one.box)[0, 0] = torch.nan
        try:
            encoder.begin(engine_ends.all_reduce_max)
        except SyncError as error:
            out["refused"] = str(error)
    return out


def received(rank: int, cell: Push, rendezvous: Rendezvous) -> dict[str, Any]:
    """By an engine rank, whose every tensor must be what the encoding makes of the whole one."""
    mine, blank = share(cell, rank), whole(cell, 0)[0]
    params = {name: torch.zeros_like(of(blank[name], box)) for name, box in mine.items()}

    def load(given: Any) -> None:
        for name, tensor in given:
            if name in params:
                params[name].copy_(of(tensor, mine[name]))

    shapes = {name: tuple(tensor.shape) for name, tensor in blank.items()}
    held = record(load, shapes, params, {name: tensor.dtype for name, tensor in blank.items()})
    receiver = Receiver(rendezvous, LEARNERS + rank, {one: one.local_slice(params[one.param]) for one in held})
    out: dict[str, Any] = {"reports": []}
    for version in VERSIONS:
        beside = BackgroundChecksums()

        def arrived(one: ParameterBox, beside: BackgroundChecksums = beside) -> None:
            beside.sent(one, params[one.param])
            beside.checksum_boxes([one], params)

        num_bytes = receiver.receive(version, arrived).num_bytes
        assert num_bytes == sum(tensor.nbytes for tensor in params.values())
        assert differing(params, {name: of(whole(cell, version)[0][name], box) for name, box in mine.items()}) == []
        out["reports"].append(beside.report())
    receiver.close()
    return out


def differing(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """The tensors that are not the same to the bit."""
    assert found.keys() == wanted.keys()
    bits = [(name, found[name].contiguous(), wanted[name].contiguous()) for name in found]
    return [n for n, a, b in bits if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]


def written(rank: int, cell: Push, tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Any]:
    """By a learner rank, into the file of its node that it writes with another; the first alone writes adapters."""
    (layout, hf), adapters = cell.layouts, cell.encoding == "adapters"
    writers = [group[:1] if adapters else group for group in WRITERS]
    node = next(i for i, group in enumerate(WRITERS) if rank in group)
    path, shapes, group = folder / f"node-{node}" / "model.safetensors", hf.local_shapes(0), writers[node]
    if not adapters and rank == group[0]:
        mirror.Mirror.make(path, shapes, torch.bfloat16, folder / "config.json", cell.form, writers=len(group))
    dist.barrier()
    moves, holder = plan_into_copies(layout, hf, writers), None
    path.parent.mkdir(exist_ok=True)
    if adapters and rank in group:
        holder = AdapterFolders(path, shapes, torch.bfloat16, {})
    elif not adapters:
        number = group.index(rank)
        holder = mirror.Mirror(path, shapes, torch.bfloat16, cell.form, writer=number, writers=len(group))
    mine = {transfer.dst_param for transfer in moves.receives(rank)}
    dst = {name: tensor for name, tensor in holder.tensors.items() if name in mine} if holder else {}
    compression = Changes() if cell.encoding == "sparse" else None
    transport = ProcessGroupTransport(moves, src=tensors, dst=dst, bucket_bytes=BUCKET, compression=compression)
    out: dict[str, Any] = {"sums": [], "bytes": []}
    for version in VERSIONS:
        fill(tensors, cell, version, rank)
        if isinstance(holder, AdapterFolders):
            holder.announce(f"v{version}", [f"v{version - 1}"])
        if holder:
            holder.withdraw()
        out["bytes"].append(transport.move(version).num_bytes)
        dist.barrier()  # each writer encodes what any has written
        if holder:
            holder.serve(version)
        dist.barrier()
        for one in VERSIONS[:version] if adapters else ():
            found = load_file(adapters_folder(path, f"v{one}") / ADAPTERS)
            assert differing(found, {PREFIX + name: tensor for name, tensor in whole(cell, one)[0].items()}) == []
        if isinstance(holder, mirror.Mirror):
            out["sums"].append(holder.sums())
            wanted, error = whole(cell, version)
            assert (wrong := differing(mirror.read(path, version), wanted)) == [], wrong
            assert cell.form is None or mirror.seal(path, version, {}).error == error
        dist.barrier()
    transport.close()
    return out
