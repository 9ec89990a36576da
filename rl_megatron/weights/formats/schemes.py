"""The quantized formats of Hugging Face checkpoints that are read: which tensors make up a weight. No torch.

- ``fp8`` with ``weight_block_size`` (DeepSeek-V3, Kimi-K2, Qwen3-FP8): ``x.weight``, e4m3, and ``x.weight_scale_inv``,
  one a block.
- ``fp8`` without, ``fbgemm_fp8`` (Llama-3.1-405B-FP8): the same, or ``x.weight_scale``, one a row or one in all.
- ``compressed-tensors``: ``float-``, ``int-`` and ``naive-quantized`` are ``x.weight``, e4m3 or int8, and
  ``x.weight_scale``; ``pack-quantized`` (Kimi-K2-Thinking) is ``x.weight_packed``, int32 words of 8 integers of 4 bits
  or 4 of 8 bits, the lowest bits first, each raised by half of the range, and ``x.weight_scale``, one a group of
  columns or a row.
- ``mxfp4`` (gpt-oss): ``x_blocks`` [expert, row, group, 16], bytes of two e2m1, the low half first, and ``x_scales``
  [expert, row, group], exponents above theirs by 127; the weight is [expert, column, row].

A weight is its numbers times their scales (`quantize.read_quantized`). Every other method is refused by name. Scales of
activations next to a weight are for engines, and are left out. Sources: transformers
``integrations/{finegrained_fp8,mxfp4}.py``; compressed-tensors 0.13 ``compressors/quantized_compressors``.

One is written: block-scaled float8, of DeepSeek-V3's checkpoint (arXiv:2412.19437, section 3.3.2), which transformers,
vLLM and SGLang read, with a float32 factor for each block of 128 rows and 128 columns. Linear layers are quantized;
norms, biases, convolutions, embedding, output layer, router, gates of one row a head and the indexer's weights of heads
are not: engines hold them whole (vLLM 0.32.0 ``qwen_gdn_linear_attn.py``: a delta net's decays and steps have fewer
rows than a block; SGLang 0.5.21 ``qwen3_next_mtp.py``: the draft layer's ``fc``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rl_megatron.errors import ConfigError, quote_start
from rl_megatron.models.families.fields import ConfigFields, NumberFields, QuantizationFields, read_config
from rl_megatron.models.json_files import Fields
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import DType

BLOCK = 128  # rows and columns of a written block
SCALES = "_scale_inv"  # the suffix that a weight's name gets for its scales
_OF_HEADS = ("weights_proj", "in_proj_ba", "in_proj_b", "in_proj_a")  # these have a row or two a head
_WHOLE_MODULES = ("embed_tokens", "lm_head", "gate", "router", "shared_expert_gate", "eh_proj", "fc", *_OF_HEADS)


def is_quantized(name: str, shape: Shape) -> bool:
    """True if the format quantizes this tensor, that is, if it is a linear layer's weight."""
    return len(shape) == 2 and name.endswith(".weight") and name.split(".")[-2] not in _WHOLE_MODULES


def quantization_config(tensors: Sequence[tuple[str, Shape]]) -> dict[str, Any]:
    """config.json's ``quantization_config`` for a checkpoint of tensors with these names and shapes.

    Experts of one tensor a layer, which are not quantized, are named by their module: readers take each ``experts``
    that is not named for quantized.
    """
    names = {name for name, _ in tensors}
    matrices = (name for name, shape in tensors if len(shape) == 2 and name.endswith(".weight"))
    whole = {name.removesuffix(".weight") for name in matrices if name + SCALES not in names}
    stacks = (name.rpartition(".")[0] for name, shape in tensors if len(shape) == 3 and name + SCALES not in names)
    whole |= {module for module in stacks if module.endswith(".experts")}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(whole),
    }


_OTHER_SCALES = (".weight_scale", ".weight" + SCALES, ".scale", ".scales", ".weight_scales")
_PLAIN = (DType.F32, DType.F16, DType.BF16)
_FACTORS = (*_PLAIN, DType.F8_E8M0)
_WORD = 32  # bits
_GROUP = 32  # columns that share an exponent in mxfp4
_ADVICE = (
    "Give an unquantized checkpoint, or write one with the quantizer's own library (with transformers: "
    "model.dequantize(), then save_pretrained)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One format, as config.json describes it."""

    dtype: DType  # the dtype of unquantized tensors, and of a weight where no other is requested
    stored: DType  # the dtype of the numbers' tensor: U8 has two e2m1 a byte, I32 several integers a word
    numbers: str = ".weight"  # ends its name
    weight: str = ".weight"  # ends the weight's name
    scales: tuple[str, ...]  # may end the name of the scales
    bits: int = 8  # the size of a number
    edges: tuple[int, int] | None = None  # rows and columns that share a scale; None: a row's, or all
    unused: tuple[str, ...] = ()  # may end the names of tensors that are not read


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A weight that is stored as numbers and their scales."""

    scheme: Scheme
    shape: Shape  # the shape of the weight
    numbers: str  # the name of its tensor
    scales: str
    scales_shape: Shape
    edges: tuple[int, int]  # rows and columns that share a scale


def read_scheme(folder: Path) -> Scheme | None:
    """Returns the quantization of the checkpoint in ``folder``, if any. Raises ConfigError naming a format not read."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = read_config(folder)
    text = dict(config).get("text_config")  # may be anything if the family has no such key
    keys = config.get("quantization_config")
    if keys is None and isinstance(text, dict):
        keys = Fields(text, path, ConfigFields, "text_config.").get("quantization_config")
    if keys is None:
        return None
    given = Fields(keys, path, QuantizationFields, "quantization_config.")
    method = given.get("quant_method")
    make = _METHODS.get(method)
    if make is None:
        _refuse(path, f"quant_method={quote_start(method)}", ", ".join(map(repr, _METHODS)))
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in _PLAIN:
        raise ConfigError(f"{path}: dtype={quote_start(name)} is not supported; allowed: {', '.join(_PLAIN)}")
    return make(given, path, DType(name))


def _refuse(path: Path, text: str, allowed: str) -> NoReturn:
    raise ConfigError(f"{path}: quantization_config has {text}, which is not read; allowed: {allowed}. {_ADVICE}")


def _fp8(given: Fields, path: Path, dtype: DType) -> Scheme:
    edges, fmt = given.get("weight_block_size"), given.get("fmt")
    if fmt not in ("e4m3", DType.F8_E4M3, None) or (edges is not None and len(edges) != 2):
        told = f"fmt={quote_start(fmt)}, weight_block_size={quote_start(edges)}"
        _refuse(path, told, f"fmt='e4m3' or '{DType.F8_E4M3}', and a weight_block_size as [128, 128] or none")
    return Scheme(
        dtype=dtype,
        stored=DType.F8_E4M3,
        scales=(".weight" + SCALES,) if edges else (".weight" + SCALES, ".weight_scale"),
        edges=(edges[0], edges[1]) if edges else None,
        unused=(".activation_scale", ".input_scale"),
    )


_COMPRESSED: Mapping[tuple[str, str], tuple[DType, tuple[int, ...]]] = {  # key: format and type; num_bits that are read
    ("pack-quantized", "int"): (DType.I32, (4, 8)),
    ("float-quantized", "float"): (DType.F8_E4M3, (8,)),
    ("int-quantized", "int"): (DType.I8, (8,)),
    ("naive-quantized", "float"): (DType.F8_E4M3, (8,)),
    ("naive-quantized", "int"): (DType.I8, (8,)),
}
_ORDERS = (None, False, "weight", "static")  # orders of columns when they were quantized; others permute the groups


def _compressed(given: Fields, path: Path, dtype: DType) -> Scheme:
    """All modules must be quantized alike: which of them is in which group is not read."""
    if given.get("transform_config"):
        _refuse(path, "a transform_config, which rotates weights", "none")
    kinds = {
        _describe(kind := group.format or given.get("format"), group.weights): (kind, group.weights)
        for group in (given.get("config_groups") or {}).values()
        if group.weights is not None
    }
    if len(kinds) != 1:
        _refuse(path, f"weights of {len(kinds)} kinds ({'; '.join(sorted(kinds)) or 'no config_groups'})", "one kind")
    ((told, (kind, weights)),) = kinds.items()
    stored, bits = _COMPRESSED.get((kind or "", weights.type or ""), (DType.I8, ()))
    shared = {"tensor": None, "channel": None, "group": [1, weights.group_size], "block": weights.block_structure}
    edges = shared.get(weights.strategy or "", [])
    matrix = isinstance(edges, list) and len(edges) == 2 and all(isinstance(edge, int) and edge > 0 for edge in edges)
    good = weights.num_bits in bits and weights.symmetric is not False and weights.actorder in _ORDERS
    if not good or not (edges is None or matrix):
        formats = ", ".join(f"{name} of {numbers}" for name, numbers in _COMPRESSED)
        which = f"strategy {', '.join(shared)}; num_bits 8, or 4 packed; symmetric; no actorder by group"
        _refuse(path, told, f"format {formats}; {which}")
    packed = stored is DType.I32
    return Scheme(
        dtype=dtype,
        stored=stored,
        numbers=".weight_packed" if packed else ".weight",
        scales=(".weight_scale",),
        bits=weights.num_bits or 8,
        edges=(int(edges[0] or 1), int(edges[1] or 1)) if isinstance(edges, list) else None,
        unused=(".weight_shape",) if packed else (".input_scale",),
    )


def _describe(kind: str | None, weights: NumberFields) -> str:
    keys = ("type", "num_bits", "strategy", "group_size", "block_structure", "symmetric", "actorder")
    parts = [f"{key}={quote_start(getattr(weights, key))}" for key in keys if getattr(weights, key) is not None]
    return ", ".join([f"format={quote_start(kind)}", *parts])


def _mxfp4(_: Fields, __: Path, dtype: DType) -> Scheme:
    return Scheme(
        dtype=dtype, stored=DType.U8, numbers="_blocks", weight="", scales=("_scales",), bits=4, edges=(1, _GROUP)
    )


_METHODS: Mapping[str, Callable[[Fields, Path, DType], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}


def find_quantized(
    held: Mapping[str, tuple[DType, Shape]], scheme: Scheme | None
) -> tuple[dict[str, Quantized], set[str], list[str]]:
    """The quantized weights by name, the names of all tensors that belong to them, and a line for each misfit.

    ``held`` has every tensor of the checkpoint. A dtype that neither a weight nor its format has is a misfit.
    """
    found: dict[str, Quantized] = {}
    parts: set[str] = set()
    wrong: list[str] = []
    for name, (dtype, shape) in held.items():
        if scheme is None or dtype is not scheme.stored or not name.endswith(scheme.numbers):
            continue
        base = name.removesuffix(scheme.numbers)
        scales = next((base + end for end in scheme.scales if base + end in held), None)
        parts |= {name} | {base + end for end in scheme.unused if base + end in held}
        if scales is None:
            near = next((base + end for end in _OTHER_SCALES if base + end in held), None)
            other = "" if near is None else f"; {near} is there, which the format does not read"
            wrong.append(f"{name} is {dtype}, but there is no {base + scheme.scales[0]}{other}")
            continue
        parts.add(scales)
        fitted = _expert_weight if scheme.stored is DType.U8 else _matrix
        weight = fitted(scheme, name, shape, scales, *held[scales])
        if isinstance(weight, str):
            wrong.append(weight)
        else:
            found[base + scheme.weight] = weight
    told = (
        "the quantization_config of config.json describes no such"
        if scheme
        else "config.json has no quantization_config"
    )
    odd = {name: dtype for name, (dtype, _) in held.items() if name not in parts and dtype not in (*_PLAIN, DType.F64)}
    return found, parts, wrong + [f"{name} is {dtype}, but {told}" for name, dtype in odd.items()]


def _matrix(scheme: Scheme, name: str, stored: Shape, scales: str, dtype: DType, given: Shape) -> Quantized | str:
    """The weight, or the line that says what does not fit."""
    if len(stored) != 2 or 0 in stored:
        return f"{name} has shape {stored}; only matrices are read quantized"
    if dtype not in _FACTORS:
        return f"{scales} is {dtype}; allowed: {', '.join(_FACTORS)}"
    rows, columns = stored[0], stored[1] * (_WORD // scheme.bits if scheme.stored is DType.I32 else 1)
    if scheme.edges is not None:
        edges = scheme.edges
        want = -(-rows // edges[0]), -(-columns // edges[1])
        if given != want:
            return f"{scales} has shape {given}; blocks of {edges} in {(rows, columns)} need {want}"
    elif given in ((rows,), (rows, 1)):
        edges = 1, columns
    elif given in ((), (1,), (1, 1)):
        edges = rows, columns
    else:
        return f"{scales} has shape {given}; {(rows, columns)} needs {(rows, 1)}, or one in all"
    return Quantized(scheme=scheme, shape=(rows, columns), numbers=name, scales=scales, scales_shape=given, edges=edges)


def _expert_weight(
    scheme: Scheme, name: str, stored: Shape, scales: str, dtype: DType, given: Shape
) -> Quantized | str:
    """Reads as `_matrix` a stack of experts in mxfp4."""
    if len(stored) != 4 or 2 * stored[3] != _GROUP:
        return f"{name} has shape {stored}; mxfp4 is [expert, row, group, {_GROUP // 2}]"
    if given != stored[:3] or dtype is not DType.U8:
        return f"{scales} is {dtype} {given}; it should be {DType.U8} {stored[:3]}"
    experts, rows, groups, _ = stored
    return Quantized(
        scheme=scheme,
        shape=(experts, groups * _GROUP, rows),
        numbers=name,
        scales=scales,
        scales_shape=given,
        edges=(1, _GROUP),
    )
