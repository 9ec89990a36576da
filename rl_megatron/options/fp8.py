"""``learner.fp8``: products of decoder layers in float8, by TransformerEngine's recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from rl_megatron.errors import ConfigError
from rl_megatron.options.implementation import torch_only, uses_transformer_engine
from rl_megatron.options.option import Keywords, Option, Rank, Terms
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

_COPIES = 2  # bytes of a weight's copies in float8: one for each direction in which it is multiplied


CAPABILITIES: Mapping[str, float] = {"tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0}
"""By recipe, the least compute capability that has kernels: TransformerEngine 2.11, pytorch/quantization.py."""


class Fp8Keys(Section):
    """The key of `Fp8`."""

    fp8: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """Recipe of TransformerEngine by which decoder layers multiply in float8, on GPUs: a scale for each tensor (Hopper
    or later), for each 128 values and each 128 x 128 weights (Hopper, CUDA 12.9), or for each 32 values (Blackwell).
    Parameters, attention, routers, norms, embedding and output layer stay in ``dtype``. Not run."""

    @field_validator("fp8", mode="before")
    @classmethod
    def _of_earlier_steps(cls, value: object) -> object:
        if value == "delayed":
            raise PydanticCustomError(
                "not_offered",
                "Input should be 'tensorwise', 'blockwise' or 'mxfp8': delayed scaling has scales of earlier steps, "
                "which checkpoints do not hold",
            )
        return value


class Fp8(Option):
    """Megatron-core's ``fp8`` with a recipe whose scales are each tensor's own, so that there is no state to save.

    ``tensorwise`` takes e5m2 for gradients (``hybrid``), the others e4m3 for all, as Megatron-LM's documentation does.
    """

    keys = Fp8Keys
    changes: ClassVar[Mapping[str, str]] = {"fp8 weights": "raise learner.tp, learner.pp or learner.ep"}

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """CPUs, float32, torch's layers, sizes that no block fits, and kernels that take no float8."""
        if learner.fp8 is None:
            return
        given = f"learner.fp8={learner.fp8}"
        if learner.device == "cpu":
            yield f"{given} with learner.device=cpu: its kernels need GPUs; leave it out"
        if learner.dtype != "bfloat16":
            yield f"{given} with learner.dtype={learner.dtype}: parameters must be bfloat16; set learner.dtype=bfloat16"
        if learner.layers == "torch" or learner.own_layers is not None:
            yield f"{given} with learner.layers={learner.layers}: TransformerEngine's layers alone have it; set auto"
        if learner.batch_invariant:
            yield f"{given} with learner.batch_invariant=true: its kernels take no float8; leave one of them out"
        if shape is None:
            return
        if (part := torch_only(shape)) is not None:
            yield f"{given}: the model has {part}, which torch's layers alone compute; leave it out"
        unit = 32 if learner.fp8 == "mxfp8" else 16
        if learner.fp8 == "blockwise" and learner.tp > 1:
            for size, what in _gathered(shape).items():
                if size % rows(learner):
                    yield (
                        f"{given} with learner.tp={learner.tp}: ranks gather the {size} {what} in float8, and they are "
                        f"no multiple of {rows(learner)}; set learner.tp=1, or learner.fp8=tensorwise"
                    )
        for size, what in _sizes(learner, shape).items():
            if size % unit:
                yield f"{given}: the {size} {what} are no multiple of {unit}; lower learner.tp or etp, or leave it out"

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """Format and recipe. Raises ConfigError if TransformerEngine is not installed."""
        if learner.fp8 is None:
            return Keywords()
        if not uses_transformer_engine(learner, shape):
            raise ConfigError(
                f"learner.fp8={learner.fp8}: TransformerEngine is not installed here; install it, or leave it out"
            )
        kind = "hybrid" if learner.fp8 == "tensorwise" else "e4m3"
        return Keywords(model={"fp8": kind, "fp8_recipe": learner.fp8})

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of weights' copies in float8, which stay between passes, but for ``learner.offload.while_sampling``."""
        if learner.fp8 is None:
            return terms
        last = rank.stage == learner.pp - 1
        tables = (rank.stage == 0) + last - (shape.tie_embeddings and rank.stage == 0 and last)
        products = rank.parameters.both - tables * shape.vocab_size * shape.hidden_size / learner.tp
        return {**terms, "fp8 weights": _COPIES * products}


def rows(learner: LearnerSection) -> int:
    """The number of which a rank's tokens must be a multiple: as many as share a scale, or cuBLAS's."""
    return {None: 1, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}[learner.fp8]


def _gathered(shape: ModelShape) -> dict[int, str]:
    """Sizes of what the ranks of a tensor-parallel group gather for a linear, in words."""
    ranks = () if shape.latent is None else (shape.latent.query_rank or 0, shape.latent.kv_rank)
    return {shape.hidden_size: "hidden columns", **{rank: "columns of a latent" for rank in ranks if rank}}


def _sizes(learner: LearnerSection, shape: ModelShape) -> dict[int, str]:
    """A rank's sizes of what linears take and give, in words."""
    d, out = learner.dims, {shape.hidden_size: "hidden columns"}
    if shape.latent is None:
        out[shape.num_heads * shape.head_dim // d.tp] = "columns of a rank's heads"
        out[max(shape.num_kv_heads // d.tp, 1) * shape.head_dim] = "columns of a rank's keys"
    else:
        out[shape.num_heads * shape.latent.value_dim // d.tp] = "columns of a rank's heads"
        out[shape.latent.kv_rank + shape.latent.rope_dim] = "columns of latents"
        out |= _gathered(shape)
    if shape.dense_width:
        out[shape.dense_width // d.tp] = "columns of a rank's dense layers"
    if shape.num_experts:
        out[shape.expert_width // d.etp] = "columns of a rank's experts"
    if shape.shared_width:
        out[shape.shared_width // d.tp] = "columns of a rank's shared experts"
    return out
