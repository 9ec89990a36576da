"""``learner.cuda_graphs``: decoder layers that GPUs replay as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_megatron.config.activations import TORCH_ONLY, require_transformer_engine
from rl_megatron.feature import Feature, Keywords
from rl_megatron.rules import SET, UNSET, Above, Excludes, Not, On, excluded
from rl_megatron.section import Section
from rl_megatron.types import BYTES

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape
    from rl_megatron.weights.layouts.learner import Rank, Terms

_KEY = "learner.cuda_graphs=true"


class CudaGraphKeys(Section):
    """The feature's key of the learner."""

    cuda_graphs: bool = False
    """Whether GPUs replay each decoder layer as a CUDA graph, forward and backward, which saves the host's time between
    kernels, for models without experts. Ranks capture them before their first pass, for each size of
    `learner.padding`. Not run on a GPU, not measured."""


def _is_used(learner: LearnerSection) -> bool:
    assert isinstance(learner, CudaGraphKeys)
    return learner.cuda_graphs


def _megatron(learner: LearnerSection, shape: ModelShape) -> Keywords:
    if not _is_used(learner):
        return Keywords()
    if learner.own_layers is None:
        require_transformer_engine(_KEY, learner, shape)
    return Keywords(model={"cuda_graph_impl": "local"})  # captures whole layers, as it has no scope


def _memory(learner: LearnerSection, shape: ModelShape, _rank: Rank, terms: Terms) -> Terms:
    """Moves the activations of the largest size to the graphs, which keep them from the first pass on, also while
    servers sample. Each size also has buffers for the first layer's input, the gradient of the last one's output, and
    the angles of rotary embeddings."""
    if not (_is_used(learner) and learner.padding.sizes):
        return terms
    buffers = 2 * shape.hidden_size * BYTES[learner.dtype] / learner.tp + shape.rotary_dim * BYTES["float32"]
    return {**terms, "activations": 0.0, "cuda graphs": terms["activations"] + sum(learner.padding.sizes) * buffers}


_ON = On("learner.cuda_graphs", True)
_ONE = "leave one of them out"
# fmt: off
_LEARNER_RULES = (
    *excluded(_ON,
        (On("shape.num_experts", Above(0), "shape.family"), "the dispatcher of experts waits for counts on the host, "
         "which cannot be captured", "leave it out"),
        (On("shape.latent", SET, "shape.family"), "rotary embeddings of latent attention wait for lengths on the host",
         "leave it out"),
        (TORCH_ONLY, "only torch's layers support that", "leave it out"), where="shape"),
    *excluded(_ON,
        (On("learner.padding.sequences", UNSET), "a graph replays the shapes that it was captured with",
         "set learner.padding.tokens and learner.padding.sequences"),
        (On("learner.device", "cpu"), "a CPU has no CUDA graphs", "leave it out"),
        (On("learner.layers", "torch"), "the shapes in their attention depend on lengths",
         "set learner.layers=auto"),
        (On("learner.pp", Above(1)), "megatron-core then captures a graph for each micro-batch of the first step, and "
         "the number varies by step", "set learner.pp=1"),
        (On("learner.cp", Above(1)), "capturing the exchange of attention is untested", "set learner.cp=1"),
        (On("learner.fp8"), "float8 copies of weights change their addresses", _ONE),
        *((on, "megatron-core captures by torch.autograd.grad, in which its checkpointing raises an error, and refuses "
           "to recompute whole layers", _ONE)
          for on in (On("learner.recompute.parts", Not(())), On("learner.recompute.uniform", SET))),
        *((On(f"learner.overlap.{key}", True), "capturing these hooks is untested", _ONE)
          for key in ("gradients", "parameters")),
        (On("learner.offload.while_sampling"), "graphs read weights where they were when captured, and they come back "
         "elsewhere", _ONE)),
    Excludes(one=On("learner.offload.activations", Not(())), other=_ON, why="graphs keep activations in their "
             "own memory, which cannot be offloaded", fix="set one of the two"),
    Excludes(one=On("learner.lora.rank"), other=_ON, why="a graph has fixed weights", fix=_ONE),
)
_RULES = (
    Excludes(one=On("algorithm.is_own_critic", True, "algorithm.critic.backbone"), other=_ON,
             why="capturing a value layer is untested", fix="leave it out, or set critic.backbone=own"),
    Excludes(one=_ON, other=(On("algorithm.needs_critic", True, "algorithm.credit"), On("roles.critic", "learner")),
             why="megatron-core captures only one trained model per process",
             fix="set roles.critic=separate"),
)
# fmt: on

FEATURE = Feature(
    name="cuda_graphs",
    active=_is_used,
    keys={"learner": CudaGraphKeys},
    may_change=frozenset({"learner.cuda_graphs"}),
    rules=_RULES,
    learner_rules=_LEARNER_RULES,
    megatron=_megatron,
    captures=True,
    memory=_memory,
    changes={
        "cuda graphs": "set learner.cuda_graphs=false, lower learner.max_tokens_per_micro_batch or raise learner.tp"
    },
    learner="rl_megatron.features.cuda_graphs.learner:Graphs",
)
