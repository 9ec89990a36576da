"""The format of block-scaled float8 checkpoints: which weights have scales, and the size of their blocks. No torch.

Upstream: DeepSeek-V3's checkpoint (arXiv:2412.19437, section 3.3.2), which Kimi-K2, Qwen3-FP8 and MiniMax-M2 share and
transformers (``integrations/finegrained_fp8.py``), vLLM and SGLang read: ``x.weight``, e4m3, beside
``x.weight_scale_inv``, a float32 factor for each block of 128 rows and 128 columns, which restores the weight; and
``quantization_config`` in config.json. Linear layers are quantised; norms, biases, embedding, output layer and router
are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.config.errors import shorten
from rl_megatron.errors import ConfigError
from rl_megatron.models.families.fields import ConfigFields
from rl_megatron.models.json_files import read_json
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import DType

BLOCK = 128  # rows and columns of a written block
SCALES = "_scale_inv"  # the suffix that a weight's name gets for its scales
_PLAIN = (DType.F32, DType.F16, DType.BF16)  # of weights without scales
_WHOLE_MODULES = ("embed_tokens", "lm_head", "gate", "router", "shared_expert_gate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Rows and columns of a block, and the dtype of the tensors that are not quantised."""

    edges: tuple[int, int]
    dtype: DType


def blocks_of(folder: Path) -> Blocks | None:
    """The quantisation of the checkpoint in ``folder``; None if it has none. Raises ConfigError for other kinds."""
    path = folder / "config.json"
    config = read_json(path, ConfigFields) if path.is_file() else ConfigFields()
    given = config.quantization_config
    if given is None:
        return None
    edges = given.weight_block_size
    if given.quant_method != "fp8" or given.fmt not in ("e4m3", None) or not edges or len(edges) != 2:
        keys = ("quant_method", "fmt", "weight_block_size")
        told = ", ".join(f"{key}={shorten(getattr(given, key))}" for key in keys)
        raise ConfigError(
            f"{path}: quantization_config has {told}; allowed: quant_method='fp8', fmt='e4m3' and a weight_block_size "
            "as [128, 128]. Give an unquantised checkpoint"
        )
    name = config.dtype or config.torch_dtype or "bfloat16"
    if name not in _PLAIN:
        raise ConfigError(f"{path}: dtype={shorten(name)} is not supported; allowed: {', '.join(_PLAIN)}")
    return Blocks(edges=(edges[0], edges[1]), dtype=DType(name))


def scales_of(held: Mapping[str, tuple[DType, Shape]], blocks: Blocks | None) -> tuple[dict[str, str], list[str]]:
    """The scales of each float8 weight of a checkpoint, by name; and a line for each tensor that does not fit."""
    scales: dict[str, str] = {}
    wrong: list[str] = []
    for name, (dtype, shape) in held.items():
        if dtype is not DType.F8_E4M3:
            continue
        if blocks is None:
            wrong.append(f"{name} is float8, but config.json has no quantization_config")
            continue
        want = tuple(-(-size // edge) for size, edge in zip(shape, blocks.edges, strict=False))
        found = held.get(name + SCALES)
        if found is None:
            wrong.append(f"{name} is float8, but there is no {name + SCALES}")
        elif found[1] != want:
            wrong.append(f"{name + SCALES} has shape {found[1]}; blocks of {blocks.edges} in {shape} need {want}")
        scales[name] = name + SCALES
    return scales, wrong


def is_quantised(name: str, shape: Shape) -> bool:
    """Whether the format quantises this tensor, that is, whether it is a linear layer's weight."""
    return len(shape) == 2 and name.endswith(".weight") and name.split(".")[-2] not in _WHOLE_MODULES


def quantization_config(tensors: Sequence[tuple[str, Shape]]) -> dict[str, Any]:
    """config.json's ``quantization_config`` for a checkpoint of tensors with these names and shapes."""
    names = {name for name, _ in tensors}
    matrices = (name for name, shape in tensors if len(shape) == 2 and name.endswith(".weight"))
    whole = [name.removesuffix(".weight") for name in matrices if name + SCALES not in names]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(whole),
    }
