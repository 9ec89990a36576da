"""``learner.draft``: training of a model's draft layer, for multi-token prediction (arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_megatron.config.activations import activation_bytes
from rl_megatron.errors import ConfigError
from rl_megatron.feature import Curve, Feature, Serving
from rl_megatron.rules import SET, TEXT, Above, Excludes, Needs, Not, On, OneOf, Rule, excluded
from rl_megatron.section import NonNegative, Section
from rl_megatron.types import BYTES

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.config.sections.rollout import ServerSection
    from rl_megatron.models.shape import ModelShape
    from rl_megatron.weights.layouts.learner import Rank, Terms

_STATES = 7
_TRAIN = "learner.draft.train=true"


class DraftSection(Section):
    """The draft layer after the decoder, which proposes tokens to an engine that decodes speculatively."""

    train: bool = False
    """Train the draft layer together with the policy, on detached hidden states, embedding and output matrix, so that
    no gradient of the policy changes. It has its own optimizer, at the policy's learning rate, and its gradient is
    clipped by its own norm. It is pushed, saved and exported with the policy. false: it stays as it was in model.path,
    and exports have that draft layer."""


class DraftKeys(Section):
    """The feature's section of keys of the learner."""

    draft: DraftSection = DraftSection()


class DraftTokenKeys(Section):
    """The feature's key of servers."""

    draft_tokens: NonNegative = 0
    """Tokens that the model's draft layer proposes at each step of a server (docs/sft.md); 0 is off. The server accepts
    or replaces them so that samples have the model's distribution. Needs learner.draft.train=true: pushes then include
    the layer."""


def server_draft_tokens(server: ServerSection) -> int:
    """Returns the number of tokens that a server's draft layer proposes at each step; 0: it does not."""
    assert isinstance(server, DraftTokenKeys)
    return server.draft_tokens


def draft_section(learner: LearnerSection) -> DraftSection:
    """Returns the feature's keys of the learner's section."""
    assert isinstance(learner, DraftKeys)
    return learner.draft


def _with_drafts(_learner: LearnerSection, shape: ModelShape) -> ModelShape:
    from rl_megatron.weights.layouts.families import find_family
    from rl_megatron.weights.layouts.tables.drafts import has_draft_rows

    if not has_draft_rows(find_family(shape).tables["megatron"]):
        raise ConfigError(
            f"{_TRAIN}: draft layers of model_type={shape.family!r} are unknown (docs/checkpoints.md); leave it out"
        )
    return replace(shape, num_draft_layers=True)


def _memory(learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
    """Adds the bytes that one pass of the draft layer keeps. A last stage that is not the first also has the
    embedding's copy."""
    if not draft_section(learner).train:
        return terms
    last = rank.stage == learner.dims.pp - 1
    return {**terms, "draft layer": _passes(learner, shape, rank) + _copied(learner, shape) if last else 0.0}


def _passes(learner: LearnerSection, shape: ModelShape, rank: Rank) -> float:
    """Returns the bytes kept between the two passes, which follow each other, by the decoder's layer and around it.
    Around it are seven hidden states of this rank's tokens, and the gathered one for log-probs. The seven: the
    decoder's, the embedding, both normed, both joined (twice as wide), and the last norm's."""
    torch_layers = learner.model_copy(update={"layers": "torch"})
    of_layer = activation_bytes(torch_layers, shape, shape.num_layers - 1, rank.longest)
    around = (_STATES / learner.tp + 1) * shape.hidden_size * BYTES[learner.dtype]
    return rank.tokens * (of_layer + around)


def _copied(learner: LearnerSection, shape: ModelShape) -> float:
    if learner.dims.pp == 1 or shape.tie_embeddings:
        return 0.0
    return shape.vocab_size * shape.hidden_size / learner.tp * BYTES[learner.dtype]


_TRAINS = On("learner.draft.train", True)
_PROPOSES = On("rollout.server.draft_tokens", Above(0))
_SGLANG = On("rollout.engine", "sglang")
# fmt: off
_LEARNER_RULES: Sequence[Rule] = (
    *(Excludes(one=_TRAINS, other=other, why=why, fix="leave one of them out") for other, why in (
        (On("learner.optimizer.name", "muon"), "the draft layer needs Adam"),
        (On("learner.lora.rank"), "checkpoints of adapters have no draft layer"),
        (On("learner.fp8"), "the draft layer does not support float8"),
        (On("learner.cuda_graphs", True), "graphs do not return hidden states"),
        (On("learner.own_layers", SET, "learner.layers"), "the draft layer needs this package's layers"))),
    *excluded(_TRAINS,
        (On("shape.scores", True, "shape.family"), "a model that scores has no output matrix, so it cannot use a draft "
         "layer", "leave it out"),
        (On("shape.draft_layers", Not(1)), "the learner trains exactly one draft layer", "leave it out"),
        (On("shape.indexer", SET, "shape.family"), "its draft layer has its own indexer, which the learner cannot "
         "train", "leave it out; exports keep the layer unchanged"), where="shape"),
)
_RULES: Sequence[Rule] = (
    Excludes(one=_TRAINS, other=On("kind.rows", OneOf(("pairs", "labels")), shown="job"),
             why="the draft layer would also learn the answers that the policy should avoid",
             fix="leave it out, and train the layer with job=sft or rl"),
    Excludes(one=On("algorithm.is_own_critic", True, shown="algorithm.critic.backbone"), other=_TRAINS,
             why="both read the last hidden states, and the combination is untested",
             fix="leave it out, or set critic.backbone=own"),
    Excludes(one=_PROPOSES, other=On("rollout.embedded", True, shown="rollout.engine"),
             why="this engine decodes one token at a time", fix="set rollout=vllm or sglang, or leave it out"),
    Needs(when=_PROPOSES, all=_TRAINS,
          why="pushes include the draft layer only if the learner trains it",
          fix="set learner.draft.train=true"),
    Excludes(one=_PROPOSES,
             other=(On("rollout.served", True, "rollout.engine"), On("transport.direct", True, "weights.transport")),
             why="direct pushes include the model, but not its draft layer",
             fix="set weights.transport=file"),
    Excludes(one=_PROPOSES, other=On("rollout.server.quantization", Not("none")),
             why="a push would quantize linear layers of the draft layer that do not support it",
             fix="set it to none"),
    Excludes(one=_PROPOSES, other=On("rollout.server.pp", Above(1)), why="only the last stage has the draft layer",
             fix="set it to 1"),
    Excludes(one=_PROPOSES, other=On("required_columns.routes", SET, TEXT),
             why="routes of replaced proposals cannot be told apart",
             fix="leave one of them out"),
    Excludes(one=_PROPOSES, other=On("eval.sets.*.min_p", Above(0)),
             why="with proposals vLLM rejects it, and SGLang ignores it", fix="set it to 0"),
    # SGLang 0.5.21, speculative/eagle_utils.py `_verify_uses_greedy`
    Excludes(one=_PROPOSES, other=(_SGLANG, On("learner.device", "cpu")),
             why="on CPUs SGLang with proposals always takes the most probable token, so samples would not follow "
             "the model's distribution", fix="set rollout=vllm, or leave it out"),
    # managers/scheduler_components/weight_updater.py `resume_memory_occupation`
    Excludes(one=_PROPOSES, other=(_SGLANG, On("rollout.server.colocated", True)),
             why="after a release of memory SGLang restores some tensors, like tables of positions, only for the "
             "model, not for its draft layer", fix="set rollout=vllm, or one of them to its default"),
    Excludes(one=_PROPOSES, other=On("shape.delta", SET, shown="shape.family"),
             why="a server would have to restore the states of delta nets if it replaces a proposal, and that is "
             "untested", fix="leave it out", where="shape"),
)
# fmt: on

FEATURE = Feature(
    name="draft",
    active=lambda learner: draft_section(learner).train,
    keys={"learner": DraftKeys, "rollout.server": DraftTokenKeys},
    may_change=frozenset({"rollout.server.draft_tokens"}),
    rules=_RULES,
    learner_rules=_LEARNER_RULES,
    memory=_memory,
    changes={
        "draft layer": "lower learner.max_tokens_per_micro_batch, raise learner.tp, or set learner.draft.train=false"
    },
    check_files="rl_megatron.features.draft.files:check_files",
    shape=_with_drafts,
    serving=Serving(
        key="rollout.server.draft_tokens",
        given=lambda config: server_draft_tokens(config.rollout.server),
        proposed=server_draft_tokens,
        engines={
            "vllm": "rl_megatron.features.draft.engines:VLLMDrafts",
            "sglang": "rl_megatron.features.draft.engines:SGLangDrafts",
        },
        lacks="starts no draft layer; leave the key out",
        misfit="its draft layer proposes {found} tokens at a step, but {given}; make them equal",
    ),
    learner="rl_megatron.features.draft.learner:make_hooks",
    metrics=(
        ("draft/loss", "nats", "mean cross-entropy of the draft layer per trained token; only with learner.draft.train",
         Curve("Health", "Draft layer's loss")),
        ("draft/acceptance", "", "share of accepted tokens among those that the servers' draft layers proposed since "
         "the previous push; only with rollout.server.draft_tokens",
         Curve("Health", "Draft layer's proposals that are accepted")),
        ("draft/grad_norm", "", "L2 norm of the draft layer's gradient before clipping, mean over minibatches",
         Curve("Health", "Draft layer's gradient norm")),
    ),
)  # fmt: skip
