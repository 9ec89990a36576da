"""Block-scaled float8 weights: e4m3 numbers and a float32 scale for each block of 128 rows and 128 columns.

Upstream: DeepSeek-V3's checkpoint (arXiv:2412.19437, section 3.3.2), which Kimi-K2, Qwen3-FP8 and MiniMax-M2 share and
transformers (``integrations/finegrained_fp8.py``), vLLM and SGLang read: ``x.weight`` beside ``x.weight_scale_inv``,
the factor that gives the weight back, and ``quantization_config`` in config.json. Linear layers are quantised; norms,
biases, embedding, output layer and router are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_megatron.errors import ConfigError
from rl_megatron.weights.layout import Shape
from rl_megatron.weights.streaming import Job, Progress, Streamed

FP8 = torch.float8_e4m3fn
BLOCK = 128  # rows and columns of a block that is written
_SCALES = "_scale_inv"
_LARGEST = torch.finfo(FP8).max
_WHOLE_MODULES = ("embed_tokens", "lm_head", "gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Rows and columns of a block, and the dtype of the tensors that are not quantised."""

    edges: tuple[int, int]
    dtype: torch.dtype


def blocks_of(folder: Path) -> Blocks | None:
    """How the checkpoint ``folder`` is quantised; None where it is not. Raises ConfigError for other kinds."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    given = config.get("quantization_config")
    if given is None:
        return None
    edges = given.get("weight_block_size")
    if given.get("quant_method") != "fp8" or given.get("fmt", "e4m3") != "e4m3" or not edges or len(edges) != 2:
        told = ", ".join(f"{key}={given.get(key)!r}" for key in ("quant_method", "fmt", "weight_block_size"))
        raise ConfigError(
            f"{path}: quantization_config has {told}; allowed: quant_method='fp8', fmt='e4m3' and a weight_block_size "
            "as [128, 128]. Give an unquantised checkpoint"
        )
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return Blocks(edges=(int(edges[0]), int(edges[1])), dtype=getattr(torch, name))


def scales_of(held: Mapping[str, tuple[torch.dtype, Shape]], blocks: Blocks | None) -> tuple[dict[str, str], list[str]]:
    """Name of each float8 weight's scales, of the tensors in a checkpoint; and a line for each that does not fit."""
    scales: dict[str, str] = {}
    wrong: list[str] = []
    for name, (dtype, shape) in held.items():
        if dtype != FP8:
            continue
        if blocks is None:
            wrong.append(f"{name} is float8, but config.json has no quantization_config")
            continue
        want = tuple(-(-size // edge) for size, edge in zip(shape, blocks.edges, strict=False))
        found = held.get(name + _SCALES)
        if found is None:
            wrong.append(f"{name} is float8 and has no {name + _SCALES}")
        elif found[1] != want:
            wrong.append(f"{name + _SCALES} has shape {found[1]}; blocks of {blocks.edges} in {shape} make {want}")
        scales[name] = name + _SCALES
    return scales, wrong


def dequantise(weight: Tensor, scales: Tensor, start: Sequence[int], edges: tuple[int, int]) -> Tensor:
    """A box [r, c] of a float8 weight that begins at ``start`` -> float32; ``scales`` are all of the weight's."""
    rows, columns = (
        torch.arange(low, low + size) // edge for low, size, edge in zip(start, weight.shape, edges, strict=True)
    )
    factors = scales[int(rows[0]) : int(rows[-1]) + 1].float()[:, columns]
    return weight.float().mul_(factors[rows - rows[0]])


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """[r, c] -> float8 [r, c] and its float32 scales, one for each block; a block's largest number becomes 448."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = tiles.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    tiles = (tiles / scales[:, None, :, None]).clamp(-_LARGEST, _LARGEST)  # e4m3fn has no infinity: beyond is NaN
    return tiles.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(FP8).contiguous(), scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A float8 weight in a mapped file that reads as float32, box by box."""

    weight: Tensor
    scales: Tensor
    edges: tuple[int, int]

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        rows, columns = box
        return dequantise(self.weight[box], self.scales, (rows.start, columns.start), self.edges)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantised:
    """What of a float32 ``values`` is written: its numbers, or where ``scales`` its scales."""

    values: Job
    scales: bool

    @property
    def name(self) -> str:
        return self.values.name + (_SCALES if self.scales else "")

    @property
    def shape(self) -> Shape:
        return tuple(-(-size // BLOCK) for size in self.values.shape) if self.scales else self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.scales else FP8

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def blocks(self, progress: Progress) -> Iterator[Tensor]:
        """Rows in order; the scales come of a second reading, so that memory does not grow with the weight."""
        for values in self.values.blocks(lambda n: None, multiple=BLOCK):
            block = quantise(values)[self.scales]
            progress(block.nbytes)
            yield block


def quantised(job: Job) -> list[Streamed]:
    """What to write for a tensor: float8 numbers and their scales for a linear layer's weight, else the tensor."""
    if len(job.shape) != 2 or not job.name.endswith(".weight") or job.name.split(".")[-2] in _WHOLE_MODULES:
        return [job]
    values = replace(job, dtype=torch.float32)
    return [_Quantised(values=values, scales=scales) for scales in (False, True)]


def quantization_config(jobs: Sequence[Streamed]) -> dict[str, Any]:
    """config.json's ``quantization_config`` for a checkpoint of ``jobs``."""
    names = {job.name for job in jobs}
    matrices = (job.name for job in jobs if len(job.shape) == 2 and job.name.endswith(".weight"))
    whole = [name.removesuffix(".weight") for name in matrices if name + _SCALES not in names]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(whole),
    }
