"""``learner.overlap``: communication of the learner's ranks that runs while they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from rl_megatron.errors import RLMegatronError
from rl_megatron.feature import Built, Feature, Keywords, LearnerHooks
from rl_megatron.rules import SET, Excludes, Has, Not, On, excluded
from rl_megatron.section import Section
from rl_megatron.types import BYTES

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape
    from rl_megatron.weights.layouts.learner import Rank, Terms


class OverlapSection(Section):
    """Communication that runs while ranks compute. Results are the same but for the order of sums: that of a norm which
    clips gradients, and of gradients of more than two ranks. How much time it saves is not measured."""

    gradients: bool = False
    """Whether ranks reduce the gradients of a bucket as soon as the last micro-batch's backward pass has computed
    them; false: all together after it. The first step after a start still reduces them then. A bucket ends after 40
    million parameters, or a million for each data-parallel rank if that is more. Only the first chunk of the first
    pipeline stage has several."""
    parameters: bool = False
    """Whether ranks gather the parameters that an optimizer step changed during the next forward pass, a bucket ahead
    of it; false: at the end of the step. A push or a checkpoint right after the step gathers them first."""
    shared_experts: bool = False
    """Whether shared experts compute while tokens are sent to the other experts and back."""


class OverlapKeys(Section):
    """The feature's section of keys of the learner."""

    overlap: OverlapSection = OverlapSection()


def overlap_section(learner: LearnerSection) -> OverlapSection:
    """Returns the feature's keys of the learner's section."""
    assert isinstance(learner, OverlapKeys)
    return learner.overlap


def _problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error if there is nothing to reduce."""
    d = learner.dims
    if overlap_section(learner).gradients and d.dp * d.cp == 1 and d.tp == d.ep * d.etp:
        yield (
            "learner.overlap.gradients=true: no rank shares parameters, so there is nothing to reduce; "
            "leave it out, or raise learner.dp"
        )


def _megatron(learner: LearnerSection, shape: ModelShape) -> Keywords:
    overlap = overlap_section(learner)
    gathers = {"overlap_param_gather": True} if overlap.parameters else {}
    return Keywords(
        model={"moe_shared_expert_overlap": True} if overlap.shared_experts else {},
        ddp={"overlap_grad_reduce": True, **gathers} if overlap.gradients else gathers,
        optimizer=gathers,
    )


def _memory(learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
    """Adds the bytes of a float32 head: zeros of its size announce the weight's gradient to autograd. The hidden states
    and their gradient are there too."""
    if not overlap_section(learner).gradients or learner.head_dtype is None or not terms["logits"]:
        return terms
    rows = 2 * rank.tokens + shape.vocab_size / learner.tp
    return {**terms, "logits": max(terms["logits"], rows * shape.hidden_size * BYTES[learner.dtype])}


def _work(learner: LearnerSection, shape: ModelShape, length: float) -> Mapping[str, Any]:
    overlap = overlap_section(learner)
    return {"sync_hidden": overlap.gradients and overlap.parameters}


class Reducing(LearnerHooks):
    """Delays the schedule's reduction of gradients until the last micro-batch, and checks each pass."""

    def __init__(self, built: Built) -> None:
        self._wrapped, self._passes = built.chunks, 0
        self._config = built.chunks[0].config
        waiting = [chunk.no_sync for chunk in built.chunks]
        self._config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]

    @override
    @contextlib.contextmanager
    def around_pass(self) -> Iterator[None]:
        """Raises RLMegatronError for a second pass since `clear`, because the gradients of the first are being reduced;
        and for parameters that got no gradient: megatron would wait for them."""
        if self._config.no_sync_func is None:  # a pass of a single micro-batch: its gradients stay
            yield
            return
        if self._passes:
            raise RLMegatronError(
                "learner.overlap.gradients=true: a step takes one backward pass, whose gradients are reduced in its "
                "last micro-batch; call step before another backward, or set learner.overlap.gradients=false"
            )
        self._passes += 1
        yield
        groups = (g for chunk in self._wrapped for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups))
        if late := {p for group in groups for p in group.params - group.per_param_grad_ready_counts.keys()}:
            names = [name for chunk in self._wrapped for name, p in chunk.module.named_parameters() if p in late]
            raise RLMegatronError(
                f"learner.overlap.gradients=true: {len(names)} parameters got no gradient, so that it is never reduced "
                f"({', '.join(names[:_NAMED])}); set learner.overlap.gradients=false"
            )

    @override
    def clear(self) -> None:
        self._passes = 0


_NAMED = 5  # parameters that an error names at most
_ONE, _TWO, _OUT = "leave one of them out", "set one of the two", "leave it out"
_GRADIENTS, _GATHERS = On("learner.overlap.gradients", True), On("learner.overlap.parameters", True)
_SHARED = On("learner.overlap.shared_experts", True)
# fmt: off
_LEARNER_RULES = (
    *excluded(_GATHERS,
        (On("learner.overlap.gradients", False), "megatron-core needs both overlaps for this", "set it to true"),
        (On("learner.optimizer.name", Not("adamw")), "megatron-core can do this only with AdamW", "set it to adamw"),
        (On("learner.own_layers", SET, "learner.layers"), "a rank waits for parameters when it calls their module, "
         "and custom layers may read them elsewhere", _OUT)),
    Excludes(one=_SHARED, other=On("shape.shared_width", 0, "shape.family"), where="shape", fix=_OUT,
             why="the model has no shared experts"),
    *excluded(_SHARED,
        ((On("learner.dims.ep", 1, "learner.ep"), On("learner.dims.etp", 1, "learner.etp")), "no token leaves its "
         "rank, so there is nothing to overlap with", _OUT),
        (On("learner.dispatcher", Not("alltoall")), "megatron-core can do this only with alltoall", _TWO),
        (On("learner.recompute.parts", Has("shared_experts")), "megatron-core cannot recompute what overlaps", _TWO)),
    Excludes(one=On("learner.offload.activations", Has("moe")), other=_SHARED, fix=_TWO,
             why="tensors of other streams than the layers' would be moved, for which nothing waits"),
    Excludes(one=On("learner.lora.rank"), other=_GATHERS, why="adapters are merged before they are there", fix=_ONE),
)
_RULES = (
    Excludes(one=On("algorithm.is_own_critic", True, "algorithm.critic.backbone"), other=_GRADIENTS,
             why="in a warm start the value layer has no gradient to wait for",
             fix="leave it out, or set critic.backbone=own"),
)
# fmt: on

FEATURE = Feature(
    name="overlap",
    active=lambda learner: overlap_section(learner).gradients,
    keys={"learner": OverlapKeys},
    may_change=frozenset({"learner.overlap"}),
    rules=_RULES,
    learner_rules=_LEARNER_RULES,
    problems=_problems,
    megatron=_megatron,
    memory=_memory,
    work=_work,
    learner="rl_megatron.features.overlap.feature:Reducing",
)
