"""Makes a mixture of experts from a dense Hugging Face folder: an expert begins as the layer's MLP, or a part of it.

Sparse upcycling (Komatsuzaki et al., arXiv:2212.05055). With ``granularity`` g > 1 an expert is one of g equal parts of
a copy. The router's rows are equal for the parts of a copy, so that a token chooses whole copies. The down
projection is g times as large, because the weights of the chosen add up to 1 (He et al., arXiv:2410.07524, section 3).
So without noise the new model's logits are the dense one's for any router. With g > 1 the few tokens that have equal
logits of copies at the edge of the top k are an exception; bfloat16 has some.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, ValidationError

from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.section import NonNegative, NonNegativeFloat, Positive, Section
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.bytes.bits import to_bits, to_tensor
from rl_megatron.weights.bytes.dtypes import Bits, DType
from rl_megatron.weights.checkpoints.convert import cast_copies, convert_options, write_hf
from rl_megatron.weights.checkpoints.hugging_face import hf_copies
from rl_megatron.weights.checkpoints.megatron import is_megatron
from rl_megatron.weights.checkpoints.safetensors_io import STD, RandomWeights
from rl_megatron.weights.checkpoints.streaming import Copy, Fragment, OnProgress, Share, Sliceable
from rl_megatron.weights.formats.hf_folder import config_text
from rl_megatron.weights.layouts.families import hf_layout, read_shape

_ALL = Share()
_ROUTED: Mapping[str, object] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


class Upcycling(Section):
    """The mixture of experts to make from a dense model: ``--upcycle experts=8,topk=2``."""

    experts: Annotated[int, Field(ge=2)]
    """Experts of each layer."""
    topk: Positive | None = None
    """Experts that a token chooses; null: two copies' parts, 2 * ``granularity``."""
    granularity: Positive = 1
    """Equal parts into which each copy of the MLP is divided; each is an expert."""
    noise: NonNegativeFloat = 0.0
    """Standard deviation of the noise on each element of the experts, so that copies differ from the start; 0: no
    noise, so that only training on their tokens makes them differ."""
    seed: NonNegative = 0
    """Seed of the routers' elements, with a standard deviation of 0.02, and of the noise."""

    @property
    def chosen(self) -> int:
        """The number of experts that a token chooses."""
        return self.topk or 2 * self.granularity


def read_upcycling(text: str) -> Upcycling:
    """Parses ``experts=8,topk=2``. Raises one ConfigError for all problems."""
    given = dict(pair.strip().partition("=")[::2] for pair in text.split(","))
    try:
        found = Upcycling.model_validate(given)
    except ValidationError as error:
        keys = ", ".join(Upcycling.model_fields)
        raise ConfigError(
            "\n".join(
                f"--upcycle {text}: {each['loc'][0]}: {each['msg'].removeprefix('Input should ')}; keys: {keys}"
                for each in error.errors()
            )
        ) from error
    if problems := list(_problems(found)):
        raise ConfigError("\n".join(f"--upcycle {text}: {problem}" for problem in problems))
    return found


def _problems(given: Upcycling) -> list[str]:
    out, parts = [], given.granularity
    if given.experts % parts:
        out.append(f"experts={given.experts} are not a multiple of granularity={parts}, the parts of a copy")
    if given.chosen % parts:
        out.append(
            f"topk={given.chosen} is not a multiple of granularity={parts}, so tokens would choose parts of a copy; "
            f"set topk={parts * max(given.chosen // parts, 1)}"
        )
    if given.chosen > given.experts:
        out.append(f"topk={given.chosen} of experts={given.experts}: a token cannot choose more than there are")
    return out


def upcycle(
    source: Path,
    out: Path,
    given: Upcycling,
    *,
    dtype: DType | None = None,
    shard_bytes: int = 2 * 10**9,
    on_progress: OnProgress = lambda n, total: None,
    share: Share = _ALL,
) -> list[int]:
    """Writes a Qwen3 folder, or a Qwen3-MoE one of one expert, as Qwen3-MoE. Returns and raises like `megatron_to_hf`.

    Raises ConfigError for other families, models that have experts, and widths that ``granularity`` does not divide.
    """
    if is_megatron(source):
        raise ConfigError(
            f"{source} is a megatron checkpoint; convert it to a Hugging Face folder first, then upcycle it"
        )
    if dtype is DType.F8_E4M3:
        raise ConfigError(
            "dtype=float8_e4m3fn with --upcycle: routers and experts are not quantized; convert in two steps"
        )
    shape = read_shape(source)
    width = _width(source, shape, given)
    stored, files = hf_copies(source, shape, dtype)
    tensors = [new for tensor in stored for new in _of(tensor, width, given)]
    tensors += [_router(layer, shape, given, _dtype_of_mlp(stored)) for layer in range(shape.num_layers)]

    tensors = cast_copies(sorted(tensors, key=lambda tensor: tensor.name), dtype, hf_layout(shape))
    return write_hf(
        source,
        out,
        tensors,
        files,
        companion=source,
        config=_config(config_text(source, {str(dtype)} if dtype else set()), shape, width, given),
        options=convert_options(source, None, dtype, shard_bytes) | {"upcycle": given.model_dump(mode="json")},
        shard_bytes=shard_bytes,
        on_progress=on_progress,
        share=share,
    )


def _width(source: Path, shape: ModelShape, given: Upcycling) -> int:
    """Returns the width of one new expert. Raises ConfigError."""
    if shape.family not in {"qwen3", "qwen3_moe"}:
        raise ConfigError(
            f"{source}: model_type={shape.family!r} cannot be upcycled; allowed: 'qwen3', or 'qwen3_moe' of one "
            "expert, whose mixture of experts (Qwen3-MoE) has the same attention and norms"
        )
    if shape.num_experts > 1:
        raise ConfigError(
            f"{source} has {shape.num_experts} experts; only a dense model, or one of a single expert, is upcycled"
        )
    whole = shape.expert_width or shape.dense_width
    if whole % given.granularity:
        raise ConfigError(f"{source}: its MLP is {whole} wide, which granularity={given.granularity} does not divide")
    return whole // given.granularity


_PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


def _of(tensor: Copy, width: int, given: Upcycling) -> list[Copy]:
    """Returns the new tensors for one of the dense model: experts for an MLP's, none for a router, otherwise itself."""
    layer, is_mlp, part = tensor.name.partition(".mlp.")
    if not is_mlp:
        return [tensor]
    part = part.removeprefix("experts.0.")
    if part not in _PARTS:  # the router of one expert
        return []
    return [_expert(tensor, f"{layer}.mlp.experts.{e}.{part}", e, width, given) for e in range(given.experts)]


def _expert(tensor: Copy, name: str, expert: int, width: int, given: Upcycling) -> Copy:
    """Returns an expert's matrix: rows of gate and up, columns of down."""
    low, (fragment,), down = expert % given.granularity * width, tensor.fragments, name.endswith(_PARTS[2])
    cut, (rows, columns) = (low, low + width), tensor.shape
    src: Box = ((0, rows), cut) if down else (cut, (0, columns))
    size = (rows, width) if down else (width, columns)
    factor = given.granularity if down else 1
    source = fragment.source
    if factor != 1 or given.noise:
        noise = RandomWeights(Path(), {name: tensor.shape}, given.seed)
        source = partial(_changed, source, tensor.dtype, factor, noise, given.noise, name)
    box: Box = ((0, size[0]), (0, size[1]))
    return Copy(name=name, shape=size, dtype=tensor.dtype, fragments=(Fragment(box=box, source=source, src_box=src),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changed:
    """A stored matrix times a factor, with noise, computed in float32 when it is read."""

    source: Sliceable
    dtype: DType
    factor: int
    noise: RandomWeights
    deviation: float
    name: str

    def __getitem__(self, box: tuple[slice, ...]) -> Bits:
        values = to_tensor(self.source[box].copy(), self.dtype).float() * self.factor
        if self.deviation:
            drawn = self.noise.read(self.name, tuple((cut.start, cut.stop) for cut in box))
            values += drawn * (self.deviation / STD)
        return to_bits(values.to(getattr(torch, self.dtype)))


def _changed(
    source: Callable[[], Sliceable], dtype: DType, factor: int, noise: RandomWeights, deviation: float, name: str
) -> _Changed:
    return _Changed(source=source(), dtype=dtype, factor=factor, noise=noise, deviation=deviation, name=name)


def _router(layer: int, shape: ModelShape, given: Upcycling, dtype: DType) -> Copy:
    """Returns a router of random rows, one for each copy, which its parts share."""
    name, copies = f"model.layers.{layer}.mlp.gate.weight", given.experts // given.granularity
    box: Box = ((0, given.experts), (0, shape.hidden_size))

    def source() -> Bits:
        drawn = RandomWeights(Path(), {name: (copies, shape.hidden_size)}, given.seed).read(name, ((0, copies), box[1]))
        return to_bits(drawn.repeat_interleave(given.granularity, 0).to(getattr(torch, dtype)))

    size = (given.experts, shape.hidden_size)
    return Copy(name=name, shape=size, dtype=dtype, fragments=(Fragment(box=box, source=source, src_box=box),))


def _dtype_of_mlp(stored: Sequence[Copy]) -> DType:
    return next(tensor.dtype for tensor in stored if tensor.name.endswith(_PARTS[2]))


def _config(text: str, shape: ModelShape, width: int, given: Upcycling) -> str:
    """Returns the new config.json from the dense one's text, which may leave out only defaults of its family."""
    config: dict[str, object] = json.loads(text)
    config.pop("num_local_experts", None)  # transformers 5's name
    sizes = {
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": given.experts,
        "num_experts_per_tok": given.chosen,
        "moe_intermediate_size": width,
    }
    return json.dumps({**config, **_ROUTED, **sizes}, indent=2) + "\n"
