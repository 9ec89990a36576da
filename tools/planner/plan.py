"""``rl-megatron plan``: estimates the cost of moving weights between two layouts, or the memory that GPUs need."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from launcher.preflight.checks import Preflight
from launcher.preflight.devices import check_node_fit
from launcher.preflight.sizes import size_problems
from rl_megatron.config.activations import wants_transformer_engine
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB, ConfigError, gigabytes
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.files import weights_folder
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import ranks_by_role
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.learner import job_shape
from rl_megatron.weights.plans.plan import plan as plan_moves
from tools.convert.commands import OwnFamily
from tools.convert.layouts import model_shape, parse_layout
from tools.planner.estimates import Cost, Links, broadcast_cost, estimate, plan_cost
from tools.planner.hardware import GPUS
from tools.planner.memory import (
    Footprint,
    check_memory,
    copies_bytes,
    file_bytes,
    footprints,
    fullest,
    host_bytes,
    host_memory_keys,
)

_KEYS = {
    "nic": "slurm.speeds.gpu",
    "nvlink": "slurm.speeds.gpu",
    "per_node": "slurm.gpus_per_node",
    "element_bytes": "learner.dtype",
    "gpu_memory_gb": "slurm.gpu_memory_gb",
    "colocated": "rollout.server.colocated",
    "family": "learner.model",
}
"""Option of two layouts -> the equivalent key of a configuration."""
_NO_FOLDER = Path(os.devnull)  # stands for a missing model.path, which a configuration for a model must have

ElementBytes = Annotated[int | None, typer.Option(min=1, help="bytes per element; 2, as of bfloat16, if not given")]
GpuMemory = Annotated[
    float | None,
    typer.Option(min=0.001, help="memory of a GPU, 1e9 bytes; warn about ranks that need more; 80 if not given"),
]


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL LAYOUTS",
            help="a folder with a config.json or a name as kimi-k2, then src=megatron,tp=4,ep=8,dp=2 and dst=hf,dp=8 "
            "or dst=engine,tp=8 (experts cut by tp; spread with ep=8); with --config: section.key=value",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="a name under conf/, or a YAML file: print the memory that each GPU needs instead, "
            "the route, bytes and seconds of a push, and those of a checkpoint"
        ),
    ] = None,
    nic: Annotated[
        float | None, typer.Option(min=0.001, help="a GPU's share of the network, GB/s each way; 50 if not given")
    ] = None,
    nvlink: Annotated[
        float | None, typer.Option(min=0.001, help="a GPU's bandwidth inside its node, GB/s each way; 450 if not given")
    ] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="GPUs per node; 8 if not given")] = None,
    element_bytes: ElementBytes = None,
    gpu_memory_gb: GpuMemory = None,
    colocated: Annotated[bool, typer.Option("--colocated", help="rank r of dst lives in process r of src")] = False,
    family: OwnFamily = None,
) -> None:
    """Print the cost of moving a model's weights between two layouts, compared with gather-and-broadcast."""
    if config is not None:
        sizes = {"per_node": per_node, "element_bytes": element_bytes, "gpu_memory_gb": gpu_memory_gb}
        _refuse(nic=nic, nvlink=nvlink, **sizes, colocated=colocated or None, family=family)
        show_config(config, arguments or [])
        return
    if not arguments:
        raise ConfigError("give a model and two layouts, as in kimi-k2 src=megatron,ep=8,dp=8 dst=hf, or --config NAME")
    model, *layouts = arguments
    usual = GPUS["h100"]
    links = Links(nic=(nic or usual.network) * GB, nvlink=(nvlink or usual.nvlink) * GB, per_node=per_node or 8)
    show_plan(
        model,
        layouts,
        family=family,
        element_bytes=element_bytes or 2,
        links=links,
        colocated=colocated,
        gpu_memory_gb=gpu_memory_gb or 80.0,
    )


def _refuse(**given: object) -> None:
    """Raises ConfigError, which names the key to set, for each given option of two layouts."""
    for name, value in given.items():
        if value is not None:
            option, key = f"--{name.replace('_', '-')}", _KEYS[name]
            raise ConfigError(f"{option} goes with a model and two layouts; with --config set {key} instead")


def show_plan(
    model: str,
    layouts: Sequence[str],
    *,
    family: str | None,
    element_bytes: int,
    links: Links,
    colocated: bool,
    gpu_memory_gb: float,
) -> None:
    """Prints the cost of moving ``model`` between ``layouts`` (``src=...``, ``dst=...``). Raises ConfigError.

    Names a rank if its weights exceed ``gpu_memory_gb`` (1e9 bytes).
    """
    shape = model_shape(model, family)
    texts = _texts(layouts)
    src, dst = (parse_layout(side, texts[side], shape) for side in ("src", "dst"))
    first = 0 if colocated else src.dims.world_size
    placement = {rank: first + rank for rank in range(dst.dims.world_size)}
    started = time.perf_counter()
    moves = plan_moves(src, dst, placement=placement)
    seconds = time.perf_counter() - started
    direct = plan_cost(moves, element_bytes, links)
    usual = broadcast_cost(src, placement.values(), element_bytes, links)
    console = Console(markup=False)
    console.print(_table(f"{model}: {texts['src']} to {texts['dst']}", direct, usual, src, placement))
    console.print(
        f"{moves.num_transfers():,} transfers between {len(moves.traffic()):,} pairs, planned in {seconds:.2f} s. "
        f"{element_bytes} bytes an element; a GPU's NIC {links.nic / GB:g} GB/s, NVLink {links.nvlink / GB:g} GB/s "
        f"each way; {links.per_node} GPUs a node.",
        soft_wrap=True,
    )
    for side, layout in (("src", src), ("dst", dst)):
        if not texts[side].startswith("hf"):
            for line in _too_large(side, layout, element_bytes, gpu_memory_gb):
                console.print(line, style="bold red", soft_wrap=True)


def _too_large(side: str, layout: Layout, element_bytes: int, gpu_memory_gb: float) -> Iterator[str]:
    """Yields a line if the largest rank's weights exceed a GPU's memory; full copies on disk are not on a GPU."""
    held = {rank: sum(map(math.prod, layout.local_shapes(rank).values())) for rank in _stage_leaders(layout.dims)}
    rank = max(held, key=lambda r: held[r])
    needs = held[rank] * element_bytes / GB
    if needs > gpu_memory_gb:
        yield (
            f"{side}: rank {rank} holds {needs:,.1f} GB of weights, which do not fit a GPU of {gpu_memory_gb:g} GB "
            "(--gpu-memory-gb); raise tp, pp, ep or etp"
        )


def _stage_leaders(dims: ParallelDims) -> range:
    """Returns the first rank of each pipeline stage; the stage's other ranks hold as much."""
    return range(0, dims.world_size, dims.world_size // dims.pp)


def show_config(config_name: str, overrides: Sequence[str]) -> None:
    """Prints a configuration's memory as a job, and the cost of a push and a checkpoint.

    A configuration with model.name needs no folder of the model; an existing folder must hold that model. Raises
    ConfigError, also if the job does not fit.
    """
    job = [] if any(item.startswith("run.launcher=") for item in overrides) else ["run.launcher=slurm"]
    config = load_config(config_name, [*overrides, *job], otherwise={"model.path": _NO_FOLDER})
    shape = job_shape(config, model_shape(_model(config_name, config), config.learner.model))
    found_here = Preflight(found=(*check_node_fit(config), *size_problems(config, shape)), seconds=0.0)
    found_here.raise_problems()
    show_memory(config_name, config, shape)
    print(_counted_layers(config, shape))
    if check_memory(config, shape) is not None:
        print(f"It fits in slurm.gpu_memory_gb={config.slurm.gpu_memory_gb:g}.")
    found = estimate(config, shape)
    for line in (*found.lines(), *found_here.notes(), *(f"note: {warning}" for warning in found.warnings())):
        print(line)


def _model(config_name: str, config: RunConfig) -> str:
    """Returns the folder or the name that gives the model's sizes."""
    path, name = config.model.path, config.model.name
    if path == _NO_FOLDER and name is None:
        raise ConfigError(f"{config_name}: the model's sizes are not known; set model.path or model.name")
    if name is None or (path is not None and path.is_dir()):
        return str(path)
    if path != _NO_FOLDER:
        print(f"model.path={path} is not on this machine: the sizes are those of model.name={name}.")
    return name


def _counted_layers(config: RunConfig, shape: ModelShape) -> str:
    """Returns a sentence about the kind of layers for which the table counts activations."""
    learner = config.learner
    if not wants_transformer_engine(learner, shape):
        return "The activations are those of torch's layers."
    torch = learner.model_copy(update={"layers": "torch"})
    most = fullest(config.model_copy(update={"learner": torch}), shape).total / GB
    return (
        "The activations are those of TransformerEngine's layers, which learner ranks use where it is installed; with "
        f"torch's the fullest GPU needs {most:.1f} GB (learner.layers)."
    )


def show_memory(config_name: str, config: RunConfig, shape: ModelShape) -> None:
    """Prints the memory on the fullest GPU of each pipeline stage."""
    stages: dict[str, Footprint] = {}
    for found in footprints(config, shape):
        stage = " ".join(filter(None, (found.role if found.role != LEARNER else "", str(found.stage), found.phase)))
        if stage not in stages or found.total > stages[stage].total:
            stages[stage] = found
    console = Console(markup=False)
    ranks = ranks_by_role(config)
    console.print(
        f"{config_name}: GB on the fullest GPU of each pipeline stage, {sum(ranks.values())} GPUs in all",
        soft_wrap=True,
    )
    for table in _tables(stages, console.width):
        console.print(table)
    for role in config.roles.layouts:
        degrees = asdict(config.role_learner(role).dims)
        said = ", ".join(f"{key}={n}" for key, n in degrees.items() if n > 1 or key == "dp")
        console.print(f"{role}: {ranks[role]} of these GPUs, in a layout of its own: {said}", soft_wrap=True)
    if held := host_bytes(config, shape):
        keys = " and ".join(host_memory_keys(config))
        said = f"{gigabytes(held)[0]} of a node's memory for what the learner keeps off its GPUs ({keys})"
        console.print(said, soft_wrap=True)
    if copied := copies_bytes(config, shape):
        said = f"{gigabytes(copied)[0]} of a node's memory for copies of what is saved (checkpoint.async_save)"
        console.print(said, soft_wrap=True)
    if written := file_bytes(config, shape):
        said = f"{gigabytes(written)[0]} of a node's memory for the file of weights in {weights_folder(config)}"
        console.print(said, soft_wrap=True)


def _tables(stages: Mapping[str, Footprint], width: int) -> Iterator[Table]:
    """Yields a table with a column for each stage, cut to ``width`` into several; a term that all lack has no row."""
    terms = [t for t in next(iter(stages.values())).terms if any(found.terms[t] for found in stages.values())]
    rows = [(t, {name: f"{found.terms[t] / GB:.1f}" for name, found in stages.items()}) for t in terms]
    rows.append(("together", {name: f"{found.total / GB:.1f}" for name, found in stages.items()}))
    widest = max(len(text) for _, cells in rows for pair in cells.items() for text in pair)
    room = width - 1 - len("│  ") - max(len(term) for term, _ in rows)
    each = math.ceil(len(stages) / math.ceil(len(stages) / max(1, room // (widest + len("│  ")))))
    for first in range(0, len(stages), each):
        table, names = Table("stage"), list(stages)[first : first + each]
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for term, cells in rows:
            table.add_row(term, *(cells[name] for name in names), end_section=term == terms[-1])
        yield table


def _texts(layouts: Sequence[str]) -> dict[str, str]:
    out = dict(text.partition("=")[::2] for text in layouts)
    if len(layouts) != 2 or out.keys() != {"src", "dst"}:
        given = " ".join(layouts) or "nothing"
        raise ConfigError(f"layouts: {given} given; give both, for example src=megatron,tp=4,ep=8,dp=2 dst=hf,dp=8")
    return out


def _table(title: str, direct: Cost, usual: Cost, src: Layout, placement: Mapping[int, int]) -> Table:
    table = Table("", "shard to shard", "gather, then broadcast", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    senders, receivers = range(src.dims.world_size), list(placement.values())
    ours, theirs = (_cells(cost, senders, receivers) for cost in (direct, usual))
    for name, value in ours.items():
        table.add_row(name, value, theirs[name])
    return table


def _cells(cost: Cost, senders: Sequence[int], receivers: Sequence[int]) -> dict[str, str]:
    return {
        "bytes within nodes": gigabytes(cost.bytes_within_nodes)[0],
        "bytes across nodes": gigabytes(cost.bytes_across_nodes)[0],
        f"sent by {len(senders)} ranks, max / mean": _divisor(cost.sent, senders),
        f"received by {len(receivers)} ranks, max / mean": _divisor(cost.received, receivers),
        "bound: the busiest port": f"{cost.bound:.2f} s",
        "expected": f"{cost.expected:.2f} s",
    }


def _divisor(moved: Mapping[int, int], ranks: Sequence[int]) -> str:
    counts = [moved.get(rank, 0) for rank in ranks]
    return " / ".join(gigabytes(max(counts)) + gigabytes(sum(counts) / len(counts)))
