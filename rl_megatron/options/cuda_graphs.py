"""``learner.cuda_graphs``: a decoder layer's kernels, captured once and replayed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from rl_megatron.errors import ConfigError
from rl_megatron.options.implementation import torch_only, uses_transformer_engine
from rl_megatron.options.option import BYTES, Keywords, Option, Rank, Terms
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

_GIVEN = "learner.cuda_graphs=true"


class CudaGraphKeys(Section):
    """The key of `CudaGraphs`."""

    cuda_graphs: bool = False
    """Whether GPUs replay each decoder layer as a CUDA graph, forward and backward, which saves the host's time between
    kernels, for models without experts. Ranks capture them before their first pass, for each size of
    `learner.padding`. Not run on a GPU, not measured."""


class CudaGraphs(Option):
    """Megatron-core's ``cuda_graph_impl="local"`` over whole layers (transformer/cuda_graphs.py of 0.16.1).

    Its other one, TransformerEngine's ``make_graphed_callables``, takes no packed sequences (transformer_layer.py,
    ``_te_cuda_graph_replay``). A layer of experts cannot be captured whole, because its dispatcher waits for counts;
    of its parts megatron-core's ``local`` takes the router, where replay, balance losses and metrics act in Python.
    """

    keys = CudaGraphKeys
    changes: ClassVar[Mapping[str, str]] = {
        "cuda graphs": "set learner.cuda_graphs=false, lower learner.max_tokens_per_micro_batch or raise learner.tp"
    }

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """What has no static shapes or addresses, what cannot be captured, and what was not tried."""
        if not learner.cuda_graphs:
            return
        if learner.device == "cpu":
            yield f"{_GIVEN} with learner.device=cpu: a CPU has no such graphs; leave it out"
        if learner.layers == "torch":
            yield (
                f"{_GIVEN} with learner.layers=torch: their attention makes calls of other shapes for other lengths; "
                "set learner.layers=auto"
            )
        if not learner.padding.sizes or learner.padding.sequences is None:
            yield (
                f"{_GIVEN} without learner.padding: a graph replays the shapes that it was captured with; set "
                f"learner.padding.tokens={learner.max_tokens_per_micro_batch} and learner.padding.sequences"
            )
        yield from _refused(learner)
        if shape is not None and shape.num_experts:
            yield (
                f"{_GIVEN}: model_type={shape.family!r} has experts, whose dispatcher waits for counts on the host, "
                "which cannot be captured; leave it out"
            )
        elif shape is not None and (part := torch_only(shape)) is not None:
            yield f"{_GIVEN}: the model has {part}, which torch's layers alone compute; leave it out"
        elif shape is not None and shape.latent is not None:
            yield f"{_GIVEN}: rotary embeddings of latent attention wait for lengths on the host; leave it out"

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The implementation; without a scope it captures whole layers. Raises ConfigError without TransformerEngine,
        unless layers are the user's own."""
        if not learner.cuda_graphs:
            return Keywords()
        if learner.own_layers is None and not uses_transformer_engine(learner, shape):
            raise ConfigError(f"{_GIVEN}: TransformerEngine is not installed here; install it, or leave it out")
        return Keywords(model={"cuda_graph_impl": "local"})

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """What layers keep of the largest size is the graphs' own from the first pass on, also while servers sample.
        Beside it each size has buffers for the first layer's input, the gradient of the last one's output, and the
        angles of rotary embeddings."""
        if not learner.cuda_graphs or not learner.padding.sizes:
            return terms
        hidden = 2 * shape.hidden_size * BYTES[learner.dtype] / learner.tp
        angles = shape.rotary_dim * BYTES["float32"]
        buffers = sum(learner.padding.sizes) * (hidden + angles)
        return {**terms, "activations": 0.0, "cuda graphs": terms["activations"] + buffers}


def _refused(learner: LearnerSection) -> Iterator[str]:
    """Other keys that graphs do not go with."""
    if learner.pp > 1:
        yield (
            f"{_GIVEN} with learner.pp={learner.pp}: megatron-core then captures a graph for each micro-batch of the "
            "first step, and steps have other numbers of them; set learner.pp=1"
        )
    if learner.cp > 1:
        yield f"{_GIVEN} with learner.cp={learner.cp}: capturing attention's exchange was not tried; set learner.cp=1"
    recompute = learner.recompute
    if recompute.parts or recompute.uniform is not None:
        yield (
            f"{_GIVEN} with learner.recompute: megatron-core captures by torch.autograd.grad, in which its "
            "checkpointing raises an error, and refuses to recompute whole layers; leave one of them out"
        )
    if learner.fp8 is not None:
        yield f"{_GIVEN} with learner.fp8={learner.fp8}: weights' copies in float8 move; leave one of them out"
    if (level := learner.offload.while_sampling) is not None:
        yield (
            f"{_GIVEN} with learner.offload.while_sampling={level}: graphs read weights where they were when captured, "
            "and they come back elsewhere; leave one of them out"
        )
    if learner.overlap.parameters or learner.overlap.gradients:
        yield f"{_GIVEN} with learner.overlap: hooks that reduce and gather were not tried; leave one of them out"
