"""``learner.draft``: training of a model's draft layer, for multi-token prediction (arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from rl_megatron.options.kept import kept
from rl_megatron.options.option import BYTES, Option, Rank, Terms
from rl_megatron.section import PositiveFloat, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

_STATES = 7


class DraftSection(Section):
    """The draft layer after the decoder, which proposes tokens to an engine that decodes speculatively."""

    train: bool = False
    """Train the draft layer beside the policy, on detached hidden states, embedding and output matrix, so that no
    gradient of the policy changes. It is pushed, saved and exported with the policy. false: it stays as it was in
    model.path, whose draft layer exports have."""
    learning_rate_factor: PositiveFloat = 1.0
    """The draft layer's learning rate over the policy's. It has an optimizer of its own, and its gradient is clipped by
    its own norm."""


class DraftKeys(Section):
    """The section of keys of `Draft`."""

    draft: DraftSection = DraftSection()


class Draft(Option):
    """Trains one draft layer on the last pipeline stage, which is made of torch's layers."""

    keys = DraftKeys
    changes: ClassVar[Mapping[str, str]] = {
        "draft layer": "lower learner.max_tokens_per_micro_batch, raise learner.tp, or set learner.draft.train=false"
    }

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Keys without effect, models without one draft layer, and options that need the layer to be the model's."""
        draft = learner.draft
        if not draft.train:
            if draft.model_dump(exclude_defaults=True):
                yield (
                    "learner.draft.learning_rate_factor without learner.draft.train=true would have no effect; set it, "
                    "or leave the factor out"
                )
            return
        given = "learner.draft.train=true"
        for key, remedy in _excluded(learner).items():
            yield f"{given} with {key}; {remedy}"
        if shape is None:
            return
        if shape.scores:
            yield f"{given}: a model that scores has no output matrix, so its draft layer is of no use; leave it out"
        elif shape.draft_layers != 1:
            yield (
                f"{given}: the model has {shape.draft_layers} draft layers by its config.json; exactly one is trained, "
                "so leave it out"
            )
        elif shape.indexer is not None:
            yield (
                f"{given}: the draft layer of model_type={shape.family!r} has an indexer of its own, which is not held "
                "while it trains; leave it out, and exports have the layer as it was"
            )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of what one pass of the draft layer keeps, and of the embedding's copy on a last stage that is not the
        first."""
        if not learner.draft.train:
            return terms
        last = rank.stage == learner.dims.pp - 1
        return {**terms, "draft layer": _passes(learner, shape, rank) + _copied(learner, shape) if last else 0.0}


def _passes(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """What the layer keeps between its two passes, which follow each other, and its parts around the decoder's layer:
    seven hidden states of this rank's tokens (of the decoder, the embedding, both normed, joined twice as wide, and the
    last norm's), and the gathered one that log-probs are made of."""
    torch_layers = learner.model_copy(update={"layers": "torch"})
    of_layer = kept(torch_layers, shape, shape.num_layers - 1, rank.longest)
    around = (_STATES / learner.tp + 1) * shape.hidden_size * BYTES[learner.dtype]
    return rank.tokens * (of_layer + around)


def _copied(learner: LearnerSection, shape: ModelShape) -> float:
    if learner.dims.pp == 1 or shape.tie_embeddings:
        return 0.0
    return shape.vocab_size * shape.hidden_size / learner.tp * BYTES[learner.dtype]


def _excluded(learner: LearnerSection) -> Mapping[str, str]:
    """What cannot be set beside it, and what to do."""
    found = {
        "learner.optimizer.name=muon: its optimizer is Adam alone": learner.optimizer.name == "muon",
        f"learner.lora.rank={learner.lora.rank}: checkpoints of adapters hold no draft layer": (
            learner.lora.rank is not None
        ),
        f"learner.fp8={learner.fp8}: the draft layer has no float8 here": learner.fp8 is not None,
        "learner.cuda_graphs=true: graphs of the policy's layers leave no hidden states behind": learner.cuda_graphs,
        f"learner.layers={learner.layers}: the draft layer is made of this package's layers": (
            learner.own_layers is not None
        ),
    }
    return {key: "leave one of them out" for key, there in found.items() if there}
