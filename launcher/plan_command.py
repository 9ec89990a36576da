"""``rl-megatron plan``: what moving a model's weights between two layouts costs, before any machine is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.cost import Cost, Links, broadcast_cost, plan_cost
from rl_megatron.weights.layout import Layout, ParamSpec, split_layers
from rl_megatron.weights.plan import plan
from rl_megatron.weights.tables import deepseek_v3, qwen3_moe

_FAMILIES = ("qwen3_moe", "deepseek_v3", "kimi_k2")
_QWEN3_MOE: Mapping[str, Sequence[ParamSpec]] = {
    "hf": qwen3_moe.HF_QWEN3_MOE,
    "megatron": qwen3_moe.MEGATRON_QWEN3_MOE,
    "engine": qwen3_moe.ENGINE_QWEN3_MOE,
}
_DEEPSEEK_V3: Mapping[str, Sequence[ParamSpec]] = {
    "hf": deepseek_v3.HF_DEEPSEEK_V3,
    "megatron": deepseek_v3.MEGATRON_DEEPSEEK_V3,
    "engine": deepseek_v3.ENGINE_DEEPSEEK_V3,
}
_DEGREES = tuple(f.name for f in fields(ParallelDims))
_KEYS = (*_DEGREES, "first", "last", "vocab_multiple")


def show(model: str, layouts: Sequence[str], *, element_bytes: int, links: Links, colocated: bool) -> None:
    """Print the cost of moving ``model`` as ``layouts`` (``src=...``, ``dst=...``) say. Raises ConfigError."""
    shape = _shape(model)
    texts = _texts(layouts)
    src, dst = (parse_layout(side, texts[side], shape) for side in ("src", "dst"))
    first = 0 if colocated else src.dims.world_size
    placement = {rank: first + rank for rank in range(dst.dims.world_size)}
    started = time.perf_counter()
    moves = plan(src, dst, placement=placement)
    seconds = time.perf_counter() - started
    direct = plan_cost(moves, element_bytes, links)
    usual = broadcast_cost(src, placement.values(), element_bytes, links)
    console = Console()
    console.print(_table(f"{model}: {texts['src']} to {texts['dst']}", direct, usual, src, dst, placement))
    console.print(
        f"{moves.num_transfers():,} transfers between {len(moves.traffic()):,} pairs, planned in {seconds:.2f} s. "
        f"{element_bytes} bytes an element; a GPU's NIC {links.nic / 1e9:g} GB/s, NVLink {links.nvlink / 1e9:g} GB/s "
        f"each way; {links.per_node} GPUs a node.",
        soft_wrap=True,
    )


def parse_layout(side: str, text: str, shape: ModelShape) -> Layout:
    """A layout written ``table,key=number,...``: ``megatron,tp=4,pp=8,first=11,last=11``. Raises ConfigError."""
    tables = _DEEPSEEK_V3 if shape.latent else _QWEN3_MOE
    table, *settings = text.split(",")
    if table not in tables:
        raise ConfigError(
            f"{side}={text}: no table {table!r}; allowed: {', '.join(tables)}, as in {side}=megatron,tp=4"
        )
    values: dict[str, int] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in _KEYS or not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"{side}={text}: {setting!r} is no setting; allowed: a positive {', '.join(_KEYS)}")
        values[key] = int(value)
    dims = ParallelDims(**{key: value for key, value in values.items() if key in _DEGREES})
    ends = values.get("first"), values.get("last")
    stages = split_layers(shape.num_layers, dims.pp, first=ends[0], last=ends[1]) if any(ends) else None
    if table == "hf" and dims.world_size != dims.dp:
        raise ConfigError(f"{side}={text}: an hf layout is full copies; give dp alone")
    multiple = values.get("vocab_multiple", 8)
    return Layout(table=tables[table], shape=shape, dims=dims, stages=stages, vocab_multiple=multiple)


def _shape(model: str) -> ModelShape:
    if model in NAMED:
        return NAMED[model]
    if not Path(model).is_dir():
        raise ConfigError(f"{model}: neither a folder nor a known model; known: {', '.join(NAMED)}")
    return ModelShape.from_folder(Path(model), families=_FAMILIES)


def _texts(layouts: Sequence[str]) -> dict[str, str]:
    out = dict(text.partition("=")[::2] for text in layouts)
    if len(layouts) != 2 or out.keys() != {"src", "dst"}:
        given = " ".join(layouts) or "nothing"
        raise ConfigError(f"layouts: {given} given; give both, as in src=megatron,tp=4,ep=8,dp=2 dst=hf,dp=8")
    return out


def _table(title: str, direct: Cost, usual: Cost, src: Layout, dst: Layout, placement: Mapping[int, int]) -> Table:
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
        "bytes within nodes": _gigabytes(cost.within),
        "bytes across nodes": _gigabytes(cost.across),
        f"sent by {len(senders)} ranks, max / mean": _spread(cost.sent, senders),
        f"received by {len(receivers)} ranks, max / mean": _spread(cost.received, receivers),
        "bound: the busiest port": f"{cost.bound:.2f} s",
        "expected": f"{cost.expected:.2f} s",
    }


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"


def _spread(moved: Mapping[int, int], ranks: Sequence[int]) -> str:
    counts = [moved.get(rank, 0) for rank in ranks]
    return f"{_gigabytes(max(counts))} / {_gigabytes(sum(counts) / len(counts))}"
