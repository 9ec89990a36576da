"""Where a ``torch_dist`` checkpoint holds each parameter of a model, whoever saved it. No torch.

megatron-core 0.16 writes one model in three ways, by ``metadata`` of ``sharded_state_dict`` and the model's kind:

- layers and experts stacked: ``decoder.layers.mlp.experts.experts.linear_fc1.weight`` [layer, expert, ...];
- each layer by its own (``non_homogeneous_layers``, or layers that differ): ``decoder.layers.3.mlp.…``;
- experts as well, and gate and up of SwiGLU apart (``singleton_local_shards``):
  ``decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w`` and ``…_v``.

Megatron-LM and Megatron-Bridge save their models by it, under these names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.errors import WeightError
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.formats.hf_folder import raise_lines
from rl_megatron.weights.layouts.layout import Layout

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_DRAFTED = re.compile(r"^mtp\.layers\.(\d+)\.(transformer_layer\.)?(.*)$")
_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_HALVES = ("_w", "_v")  # of SwiGLU's first matrix: gate, up
_DRAFT = "mtp."
VALUES = "value_layer."
"""Begins the names of a policy's value layer, where it is its own critic."""
VALUE_BIAS = "output_layer.bias"
"""Of a critic; the output layer of a reward model has none."""
BESIDE = "beside_"
"""Begins the names of tensors that a run keeps beside the model's, as of a reference that follows it."""
_STATE = re.compile(rf"(chained_\d+\.)?optimizer\.|{BESIDE}|.*\._extra_state\b")
_FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A tensor that holds a parameter, or its rows from ``first`` on."""

    key: str
    index: Shape  # in the tensor's leading dims, which number layers and experts
    first: int = 0
    rows: int | None = None  # None: all


def place_of(param: str, shape: ModelShape) -> tuple[str, Shape]:
    """The stacked tensor and leading indices as which we write a parameter with a global name (weights/layouts/tables).

    Layers are stacked if all have the same parts, experts always. Draft layers are not, and are numbered from 0.
    """
    return next(_spellings(param, shape, stacked=shape.uniform))


def _spellings(param: str, shape: ModelShape, *, stacked: bool) -> Iterator[tuple[str, Shape]]:
    """Every tensor and index by which the parameter may be found; first with layers ``stacked``, or not."""
    if found := _DRAFTED.match(param):
        prefixes: list[tuple[str, Shape]] = [(f"mtp.layers.{int(found[1]) - shape.num_layers}.{found[2] or ''}", ())]
        rest = found[3]
    elif found := _LAYER.match(param):
        both: list[tuple[str, Shape]] = [("decoder.layers.", (int(found[1]),)), (f"decoder.layers.{found[1]}.", ())]
        prefixes, rest = both if stacked else both[::-1], found[2]
    else:
        yield param, ()
        return
    expert = _EXPERT.match(rest)
    for prefix, index in prefixes:
        if expert:
            yield f"{prefix}mlp.experts.experts.{expert[1]}.weight", (*index, int(expert[2]))
        else:
            yield prefix + rest, index
    if expert:
        alone = next(prefix for prefix, index in prefixes if not index)
        yield f"{alone}mlp.experts.experts.{expert[2]}.{expert[1]}.weight", ()


def find_homes(
    source: Path, layout: Layout, sizes: Mapping[str, Shape], dtypes: Mapping[str, DType]
) -> dict[str, tuple[Home, ...]]:
    """The homes of every parameter of ``layout``'s only rank, among tensors of these global ``sizes`` and ``dtypes``.

    Raises WeightError that names each parameter that is missing, and each tensor that is misshapen, of no float dtype
    or unknown, and for a critic. Optimizer state is left out, and so are draft layers of a model without them, and a
    value layer.
    """
    if sizes.get("output_layer.bias") == (1,):
        raise WeightError(
            f"{source} is a critic's: one value of a token, with a bias, which no class of transformers has; give the "
            f"policy's, {source.parent / 'learner'} in a checkpoint of a run"
        )
    params = layout.local_shapes(0)
    homes = {param: _homes(param, layout.shape, shape, sizes) for param, shape in params.items()}
    missing = sorted({place_of(param, layout.shape)[0] for param, found in homes.items() if not found})
    if missing:
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        odd = (
            ""
            if (source / "metadata.json").is_file()
            else ("; it has no metadata.json: only ckpt_format torch_dist is read, not fsdp_dtensor or torch_dcp")
        )
        raise WeightError(
            f"{source} lacks {', '.join(missing[:20])}{more}; its config.json describes another model{odd}"
        )
    wanted = _wanted(homes, params)
    padded = {spec.name for spec in layout.rows() if spec.padded}
    used = {home.key for found in homes.values() for home in found}
    raise_lines(
        f"{source} does not fit the model of its config.json",
        [
            *_misshapen(wanted, sizes, padded, layout.shape.vocab_size),
            *(
                f"{key} is {dtypes[key]}; weights are one of {', '.join(_FLOATS)}"
                for key in sorted(used)
                if dtypes.get(key, DType.F32) not in _FLOATS
            ),
            *(
                f"{key} {sizes[key]} is unknown; the model has no such tensor"
                for key in _unknown(sizes, used, drafts=layout.shape.drafts)
            ),
        ],
    )
    return homes


def _homes(param: str, model: ModelShape, shape: Shape, sizes: Mapping[str, Shape]) -> tuple[Home, ...]:
    for key, index in _spellings(param, model, stacked=True):
        if key in sizes:
            return (Home(key=key, index=index),)
        if all(key + half in sizes for half in _HALVES):
            rows = shape[0] // 2
            return tuple(Home(key=key + half, index=index, first=i * rows, rows=rows) for i, half in enumerate(_HALVES))
    return ()


def _wanted(homes: Mapping[str, tuple[Home, ...]], params: Mapping[str, Shape]) -> dict[str, Shape]:
    """The size that each tensor must have: of its stack, then of a parameter in it."""
    out: dict[str, Shape] = {}
    for param, found in homes.items():
        for home in found:
            rows, *others = params[param] or (0,)
            stack = tuple(i + 1 for i in home.index)
            own = (*stack, *((home.rows or rows, *others) if params[param] else ()))
            out[home.key] = tuple(map(max, out.get(home.key, own), own))
    return out


def _misshapen(wanted: Mapping[str, Shape], sizes: Mapping[str, Shape], padded: Set[str], vocab: int) -> Iterator[str]:
    """A line for each tensor of another size. A padded one may have any number of rows above the vocabulary's."""
    for key, want in wanted.items():
        have = sizes[key]
        if key in padded and have[1:] == want[1:] and have[:1] >= (vocab,):
            continue
        if have != want:
            yield f"{key} has shape {have}; it should have {want}"


def _unknown(sizes: Mapping[str, Shape], used: Set[str], *, drafts: bool) -> list[str]:
    left = (key for key in sizes if key not in used and not _STATE.match(key) and not key.startswith(VALUES))
    return sorted(key for key in left if drafts or not key.startswith(_DRAFT))


def has_draft(sizes: Mapping[str, Shape]) -> bool:
    """Whether the checkpoint has draft layers, for multi-token prediction."""
    return any(key.startswith(_DRAFT) for key in sizes)
