"""The ``learner`` section: its own keys, and those of features; ``roles``: models with their own ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from rl_megatron.feature import with_features
from rl_megatron.section import LISTED, SORTED, Fraction, NonNegativeFloat, OwnCode, Positive, PositiveFloat, Section
from rl_megatron.types import ParallelDims

if TYPE_CHECKING:
    pass

GPU = "cuda"
"""``learner.device`` of ranks on GPUs."""
Part = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""Parts out of megatron-core's ``recompute_modules``."""
HALVES: Mapping[str, tuple[str, ...]] = {
    "attention": ("core_attn", "mla_up_proj", "layernorm"),
    "mlp": ("mlp", "layernorm"),
    "moe": ("moe", "moe_act", "shared_experts", "layernorm"),
}
"""Parts that ``learner.recompute`` may compute again, by the half of a decoder layer that they are in."""
_TERM = r"[1-9]\d{0,3}(\*[1-9]\d{0,3})?"
COUNTS = re.compile(rf"{_TERM}(\+{_TERM})*")
"""Text that `layer_counts` takes."""
_SIZES = re.compile(r"[1-9]\d{0,11}(,[1-9]\d{0,11})*")


def layer_counts(text: str) -> tuple[int, ...]:
    """Numbers of layers: ``7+8*2+6`` is (7, 8, 8, 6)."""
    terms = (term.partition("*") for term in text.split("+"))
    return tuple(int(count) for count, _, times in terms for _ in range(int(times or 1)))


def _checked_layers(text: str) -> str:
    if not COUNTS.fullmatch(text):
        raise PydanticCustomError("stage_layers", "Input should be numbers of layers, as 7+8*2+6")
    return text


def _checked_sizes(text: str) -> str:
    if not _SIZES.fullmatch(text):
        raise PydanticCustomError("sizes", "Input should be numbers of positions, as 4096,8192")
    return text


StageLayers = Annotated[str, AfterValidator(_checked_layers)]
Sizes = Annotated[
    str, AfterValidator(_checked_sizes), BeforeValidator(lambda given: str(given) if type(given) is int else given)
]


class RecomputeSection(Section):
    """Activations that the backward pass recomputes in place of keeping them: of whole layers, or of parts of each."""

    uniform: Positive | None = None
    """Whole layers, this many together: only the first one's input is kept; 1 costs a third more computation."""
    parts: Annotated[tuple[Part, ...], LISTED, SORTED] = ()
    """Parts of each layer in megatron-core's words; one that would free nothing is refused. moe: routers, dispatch and
    experts, with shared experts; moe_act: the activation of experts, with torch's layers gate and up, too, so that
    experts keep only their rows; shared_experts; mlp: of dense layers; mla_up_proj: queries, keys and values of latent
    attention, from their latents; core_attn: attention without its projections, where torch's layers keep more than its
    inputs; layernorm: norms before experts and latent attention, in TransformerEngine's layers."""


@with_features("learner.router")
class RouterSection(Section):
    """Routers of a mixture of experts. By default they learn from the loss alone, and selection biases do not move."""

    frozen: bool = False
    """Whether routers keep their weights; experts and all else still learn."""


@with_features("learner.optimizer")
class OptimizerSection(Section):
    """AdamW or Muon, by megatron-core's OptimizerConfig. Data-parallel ranks shard the state: AdamW's in equal parts,
    Muon's in whole parameters."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: the matrices of the decoder's layers, routers among them, are stepped by their orthogonalized momentum,
    query, key, value, gate and up projections and those of each expert by themselves. AdamW steps the rest: embedding,
    output layer, norms, biases."""
    beta1: Fraction = 0.9
    """Decay of the moving mean of gradients."""
    beta2: Fraction = 0.95
    """Decay of the moving mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Constant added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices and embeddings. Norms and biases do not decay, as in megatron-core."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global norm of the gradient; 0 does not clip."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which both moments are kept between steps, by TransformerEngine's Adam, on GPUs alone. bfloat16 halves
    their 8 bytes a parameter. Steps are still computed in float32. How training fares is not measured."""


class PaddingSection(Section):
    """Sizes to which micro-batches are padded. Padding counts nowhere: not in losses, metrics, or experts' balance."""

    tokens: Sizes | None = None
    """Sizes in positions of all cp ranks, as `4096,8192`, rising, the last of them `max_tokens_per_micro_batch`: a
    micro-batch is padded to the least that holds it, and its padding repeats its own tokens, so that experts get their
    usual shares. null: to the multiple that tp, cp and fp8 need."""
    sequences: Positive | None = None
    """The most sequences of a micro-batch; each then tells attention of as many, and one of padding. null: as many as
    fit. Needs `tokens`."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of ``tokens``; none if that is null."""
        return tuple(int(size) for size in self.tokens.split(",")) if self.tokens else ()


class OffloadSection(Section):
    """State that a rank keeps in the host's memory, not in its GPU's."""

    activations: Annotated[tuple[Literal["attention", "mlp", "moe"], ...], LISTED, SORTED] = ()
    """Halves of decoder layers, with their norms, whose activations wait in the host's pinned memory for the backward
    pass: attention; the mlp of dense layers; moe, so routers, dispatch and all experts. Copies leave while the next
    half computes, and come back while the backward pass computes the one after it. Results keep their bits. A GPU then
    holds two halves of one micro-batch, but the host all of those in flight. Copies overlap with computing if
    sequences are long, or matrices wide: how far is not measured. Tensors of less than 1 MiB stay."""
    optimizer: Fraction = 0.0
    """Share of the optimizer's moments, rounded up to whole parameters. Those parameters are stepped on the CPU, which
    takes longer, and take 16 bytes each of the host's memory, or more: weight, moments and gradient in float32. Weight
    and gradient are pinned in powers of two."""
    while_sampling: Literal["gradients", "optimizer"] | None = None
    """State that leaves the GPU before servers that take turns with the learner (``rollout.server.colocated``) wake,
    until it is needed again: the memory of gradients and of weights' copies in float8, which costs nothing; or that,
    the optimizer's state, and the weights of a critic and a reference, which take as much pinned memory of the host."""

    @property
    def leaving(self) -> frozenset[str]:
        """The state that leaves a GPU while servers sample. "gradients" leave without a copy, as do weights' copies in
        float8. "optimizer" and "models", which are the models without pushes, are copied to the host's memory."""
        kinds = {"gradients": ("gradients",), "optimizer": ("gradients", "optimizer", "models")}
        return frozenset(kinds[self.while_sampling] if self.while_sampling else ())


def sequence_multiple(dims: ParallelDims) -> int:
    """Returns the divisor of a padded sequence's positions: 2 * cp equal chunks, unless cp is 1."""
    return 2 * dims.cp if dims.cp > 1 else 1


def max_padded_length(tokens: int, dims: ParallelDims) -> int:
    """Returns the most positions of a micro-batch of at most ``tokens`` with its padding for TP and CP."""
    return padded_tokens(tokens, sequence_multiple(dims) * dims.tp, ())


def padded_tokens(tokens: int, multiple: int, sizes: Sequence[int]) -> int:
    """Returns the positions of a micro-batch of ``tokens`` with its padding: the least of ``sizes`` that holds it, or
    the next multiple."""
    least = -(-tokens // multiple) * multiple
    return next((size for size in sizes if size >= least), least)


class ComputeKeys(Section):
    """The keys of the device, the precision and the layers that a model computes with."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: CPUs, which communicate over gloo, or GPUs, over NCCL."""
    model: OwnCode | None = None
    """A Family of your own, as ``package.module:name`` in an installed package, which reads the config.json of
    ``model.path`` (docs/checkpoints.md). Its code is run. null: the family that config.json names."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and activations; the optimizer keeps float32."""
    fp8: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """Recipe of TransformerEngine by which decoder layers multiply in float8, on GPUs: a scale for each tensor (Hopper
    or later), for each 128 values and each 128 x 128 weights (Hopper, CUDA 12.9), or for each 32 values (Blackwell).
    Parameters, attention, routers, norms, embedding and output layer stay in ``dtype``. Not run."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are added up over micro-batches and ranks. bfloat16 halves their bytes, in memory and
    over the network; its rounding grows with the number of micro-batches."""
    layers: Literal["auto", "torch", "transformer_engine"] | OwnCode = "auto"
    """Implementation of the decoder layers. auto: TransformerEngine's if it is installed, device=cuda, and it supports
    the model (it has no float32 attention with cp > 1), else torch's. It groups experts' products in one call, as
    torch's do in bfloat16 on Hopper and Blackwell; else torch's are one expert after the other. ``package.module:name``
    is a function of your own, ``(shape, layer) -> ModuleSpec`` of megatron's, called for each decoder layer from 0 on
    (docs/checkpoints.md). Its code is run."""

    @field_validator("fp8", mode="before")
    @classmethod
    def _refuse_delayed(cls, value: object) -> object:
        if value == "delayed":
            raise PydanticCustomError(
                "not_offered",
                "Input should be 'tensorwise', 'blockwise' or 'mxfp8': delayed scaling has scales of earlier steps, "
                "which checkpoints do not hold",
            )
        return value

    @property
    def own_layers(self) -> str | None:
        """The name of the user's code if ``layers`` is one, or None."""
        return self.layers if ":" in self.layers else None


class LayoutKeys(Section):
    """The degrees of parallelism."""

    tp: Positive = 1
    """Tensor-parallel degree; above 1 it also turns on sequence parallelism."""
    pp: Positive = 1
    """Pipeline-parallel degree."""
    vpp: Positive = 1
    """Number of model chunks of each pipeline stage; above 1 is the interleaved schedule."""
    stage_layers: StageLayers | None = None
    """The number of layers of each pipeline stage, as ``7+8*6+6`` for 7, six times 8, and 6; with vpp of each chunk, in
    the order of the model: the first chunks of all stages, then their second chunks, and so on. null: all the same."""
    ep: Positive = 1
    """Expert-parallel degree."""
    etp: Positive | None = None
    """Tensor-parallel degree of an expert; null: tp if ep=1, else 1."""
    cp: Positive = 1
    """Context-parallel degree."""
    dp: Positive | None = None
    """Data-parallel degree; null: the smallest for which ep*etp divides tp*cp*dp."""

    @property
    def stages(self) -> tuple[int, ...] | None:
        """``stage_layers`` as numbers."""
        return None if self.stage_layers is None else layer_counts(self.stage_layers)


@with_features("learner")
class LearnerSection(LayoutKeys, ComputeKeys):  # pydantic takes the keys of the last base first
    """The megatron-core learner. ``etp``, ``dp`` and ``threads`` default to values that follow from the other keys."""

    dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """Dispatch of tokens to the ranks of their experts. alltoall: NCCL's or gloo's all-to-all, a copy of a token for
    each of its experts. deepep: DeepEP's kernels, a copy for each node that has some. hybridep: those of its branch
    hybrid-ep, which also sort tokens by expert, and want one size of micro-batches (learner.padding). Both need GPUs
    and bfloat16, take buffers of their own that no plan counts, and have not been run."""
    threads: Positive | None = None
    """CPU threads of each process; null: an equal share of the machine's cores."""
    max_tokens_per_micro_batch: Positive = 8192
    """Positions of a packed micro-batch on one data-parallel rank."""
    head_dtype: Literal["float32"] | None = None
    """float32: the policy's logits are float32 products of hidden states and the output layer's weight, which exist a
    chunk at a time, and are computed again in the backward pass. null: logits in ``learner.dtype``, all together."""
    recompute: RecomputeSection = RecomputeSection()
    timeout_seconds: PositiveFloat = 600.0
    """Time limit for all ranks to join a collective."""
    router: RouterSection = RouterSection()
    optimizer: OptimizerSection = OptimizerSection()
    padding: PaddingSection = PaddingSection()
    offload: OffloadSection = OffloadSection()
    deterministic: bool = False
    """Whether ranks use kernels alone that add in the same order each time: of two equal runs on the same machines
    every number is then equal to the bit, on GPUs too. They are slower there, by how much is not measured; CPUs' are
    such kernels anyway (docs/troubleshooting.md)."""

    @property
    def dims(self) -> ParallelDims:
        """All degrees. etp defaults to tp if ep=1, else to 1; dp to the least for which ep*etp divides tp*cp*dp."""
        etp = self.etp or (self.tp if self.ep == 1 else 1)
        experts = self.ep * etp
        dp = self.dp or experts // math.gcd(experts, self.tp * self.cp)
        return ParallelDims(tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=etp, cp=self.cp, dp=dp)

    @property
    def float8_rows(self) -> int:
        """The divisor of a rank's number of tokens: as many as share a scale, or cuBLAS's divisor."""
        return {None: 1, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}[self.fp8]

    @property
    def token_multiple(self) -> int:
        """The divisor of a micro-batch's positions on all cp ranks: zig-zag chunks over tp, and rows of float8."""
        return math.lcm(sequence_multiple(self.dims) * self.tp, self.float8_rows * self.tp * self.cp)


class RoleLayoutSection(LayoutKeys):
    """The layout of the ranks of a separate ``critic`` or ``reference``, or of a teacher or a reward model that ranks
    hold (``teacher_<name>``, ``reward_<name>``), in place of the learner's. A key that is not given has the default of
    ``learner``, not its value."""


SeparateRole = Annotated[str, Field(pattern=r"^(critic|reference|(teacher|reward)_[a-z][a-z0-9_]*)$")]


class RolesSection(Section):
    """Which ranks hold the critic and the reference, and in what layout. In the learner's layout the results are equal
    to the bit either way."""

    critic: Literal["learner", "separate"] = "learner"
    """learner: each learner rank also holds a shard of the critic; separate: the critic has ranks of its own, which
    compute at the same time: as many as the learner, in its layout, unless ``roles.layouts.critic`` is another."""
    reference: Literal["learner", "separate"] = "learner"
    """The same as ``roles.critic``, for the reference."""
    layouts: Mapping[SeparateRole, RoleLayoutSection] = Field(default_factory=dict)

    @property
    def separate(self) -> tuple[str, ...]:
        """The roles with ranks of their own, in the order of a job's nodes."""
        return tuple(role for role in ("critic", "reference") if getattr(self, role) == "separate")
