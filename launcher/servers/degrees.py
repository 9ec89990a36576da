"""Compares the parallel degrees of servers with the model, and counts the bytes that they read. No torch, for a login
node."""

from __future__ import annotations

from math import prod

from rl_megatron.config.rules import problems_of
from rl_megatron.config.run import RunConfig
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import BYTES
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.formats.scaled import BLOCKS, NUMBER, SCALE, Blocks, ScaledLayout, with_scales
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import Slice, float32_in_files
from rl_megatron.weights.layouts.learner import engine_layout


def degree_problems(config: RunConfig, shape: ModelShape) -> list[str]:
    """A line for each degree of the servers that does not fit the model, and each rule of a shape that is broken."""
    blocks = block_problems(config, shape) if config.rollout.served else []
    return [*blocks, *problems_of(config, "shape", shape)]


def block_problems(config: RunConfig, shape: ModelShape) -> list[str]:
    """A line for each weight whose blocks the servers' ranks, or the parts of a fused parameter, would cut.

    vLLM 0.32.0 (validate_fp8_block_shape) and SGLang 0.5.21 (fp8.py) end at their start; vLLM would make smaller blocks
    of the experts' scales, which a push cannot fill.
    """
    server, blocks = config.rollout.server, BLOCKS.get(config.rollout.server.quantization)
    ranks = engine_layout(config, shape) if blocks is not None else None
    if blocks is None or blocks.columns is None or ranks is None:
        return []
    scaled = with_scales(ranks, hf_layout(shape), blocks)
    assert isinstance(scaled, ScaledLayout)
    found: dict[str, str] = {}
    for spec in scaled.of_weights.values():
        for slices in ranks.chunks(spec):
            for i, one in enumerate(slices):
                ends = i == len(slices) - 1 and (i == 0 or "{expert}" not in spec.name)  # may end inside a block
                if one.hf in scaled.shapes and (told := _cut_block(one, scaled.shapes[one.hf], blocks, ends=ends)):
                    found.setdefault(one.hf, told)
    given = f"rollout.server.quantization={server.quantization} with tp={server.tp}, dp={server.dp}, ep={server.ep}"
    ways = ["lower rollout.server.tp or dp", "set rollout.server.quantization=none"]
    whole = f"set rollout.server.ep={server.tp * server.dp}, so that ranks have whole experts"
    return [
        f"{given}: a rank of the servers has {told}, no multiple of a block's {blocks.rows}; "
        + ", or ".join([*ways[:1], *([whole] if "{expert}" in hf and server.ep == 1 else []), *ways[1:]])
        for hf, told in found.items()
    ]


def _cut_block(one: Slice, whole: Shape, blocks: Blocks, *, ends: bool) -> str:
    """How a rank's box of a weight of shape ``whole`` is cut inside a block; with ``ends`` the last may be shorter."""
    for what, (low, high), size, edge in zip(("rows", "columns"), one.hf_box, whole, blocks.edges(whole), strict=True):
        uncut = (low, high) == (0, size) and (ends or what == "columns")
        if (high - low) % edge and not uncut:
            return f"{high - low} of the {size} {what} of {one.hf}"
    return ""


def served_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the model as servers read it from a file: quantised weights with their scales, where they have any."""
    each, blocks = BYTES[config.learner.dtype], BLOCKS.get(config.rollout.server.quantization)
    hf, total = hf_layout(shape), 0
    float32 = float32_in_files(hf)
    for name, size in hf.local_shapes(0).items():
        if blocks is None or blocks.kept(name, size):
            total += prod(size) * (BYTES["float32"] if name in float32 else each)
        else:
            total += prod(size) * NUMBER + prod(blocks.grid(size)) * SCALE
    return total
