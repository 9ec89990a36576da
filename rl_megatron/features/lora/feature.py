"""``learner.lora``: low-rank adapters for a frozen model's matrices (arXiv:2106.09685); only these are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from typing_extensions import override

from rl_megatron.feature import Feature, Pushes, Serving
from rl_megatron.rules import SET, Excludes, Needs, Not, On, OneOf, Rule, excluded
from rl_megatron.section import LISTED, Positive, PositiveFloat, Section
from rl_megatron.types import BYTES

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape
    from rl_megatron.weights.layouts.learner import Rank, Terms

Adaptable = Literal["attention", "mlp", "experts"]
_MERGED = 2  # a layer's merged weights, and their gradient
_SPARE = 2  # the version being loaded, and one more than samples name that wait for their step


class LoraSection(Section):
    """Adapters A [rank, in] and B [out, rank] for each targeted matrix W [out, in] of a Hugging Face checkpoint. The
    model computes with W + alpha / rank * B A in learner.dtype, and engines get the same. All else is frozen."""

    rank: Positive | None = None
    """Rows of A and columns of B. null: no adapters, the whole model is trained."""
    expert_rank: Positive | None = None
    """The rank for routed experts' matrices. null: rank divided by the experts of a token, at least 1."""
    alpha: PositiveFloat = 32.0
    """The scale of B A is alpha / rank, each with its own rank."""
    targets: Annotated[tuple[Adaptable, ...], LISTED] = ("attention", "mlp", "experts")
    """The parts with adapters on their linears: attention (latents and delta nets, too), dense layers and shared
    experts, routed experts. Routers, norms, embedding and output layer have none."""

    def ranks(self, shape: ModelShape) -> Mapping[Adaptable, int]:
        """Returns the rank for each target; empty without adapters."""
        if self.rank is None:
            return {}
        ranks: dict[Adaptable, int] = dict.fromkeys(self.targets, self.rank)
        if "experts" in ranks:
            ranks["experts"] = self.expert_rank or max(1, self.rank // max(1, shape.experts_per_token))
        return ranks


class LoraKeys(Section):
    """The feature's section of keys of the learner."""

    lora: LoraSection = LoraSection()


class PushKeys(Section):
    """The feature's key of pushes."""

    push: Literal["merged", "adapters"] = "merged"
    """The weights that servers get of a model with adapters (docs/sft.md). merged: at each push the whole model,
    adapters merged, so that engines need no LoRA support. adapters: the frozen model once, then each version's
    adapters, which servers load while they sample and hold together with earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """The slots of a server for adapters of its model."""

    max_versions: int
    """Versions that it holds at the same time."""
    lora: LoraSection

    @override
    def __str__(self) -> str:
        return "adapters"


def lora_section(learner: LearnerSection) -> LoraSection:
    """Returns the feature's keys of the learner's section."""
    assert isinstance(learner, LoraKeys)
    return learner.lora


def make_adapter_slots(config: RunConfig) -> AdapterSlots | None:
    """Returns the servers' slots for ``weights.push=adapters``; None without it.

    Completions to train on name one of ``train.max_staleness`` versions, and new requests name the newest.
    """
    weights = config.weights
    assert isinstance(weights, PushKeys)
    if weights.push != "adapters":
        return None
    return AdapterSlots(max_versions=config.train.max_staleness + _SPARE, lora=lora_section(config.learner))


def _problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields errors: keys without effect, experts of one tensor a layer, and options that need gradients of the whole
    model or the same weights in each pass."""
    lora = lora_section(learner)
    if lora.rank is None:
        if changed := lora.model_dump(exclude_defaults=True):
            key = min(changed)
            yield f"learner.lora.{key} without learner.lora.rank would have no effect; set rank, or leave it out"
        return
    given = f"learner.lora.rank={lora.rank}"
    if not lora.targets or len(set(lora.targets)) < len(lora.targets):
        yield f"learner.lora.targets={','.join(lora.targets)}: name some of attention, mlp, experts, each once"
    if learner.offload.activations:
        yield f"{given} with learner.offload.activations: merged weights are kept by other means; {_ONE}"
    if changed := learner.router.model_dump(exclude_defaults=True):
        yield f"{given} with learner.router.{min(changed)}: routers are frozen; {_ONE}"
    if lora.expert_rank and "experts" not in lora.targets:
        yield "learner.lora.expert_rank without experts in learner.lora.targets would have no effect; leave it out"
    if shape is None:
        return
    lacking = _lacking(shape)
    if lora.targets and set(lora.targets) <= lacking.keys():
        parts = " and no ".join(lacking[target] for target in lora.targets)
        yield (
            f"learner.lora.targets={','.join(lora.targets)}: model_type={shape.family!r} has no {parts}, so "
            "nothing would be trained; set others"
        )
    if "experts" not in lora.targets:
        return
    if lora.expert_rank and not shape.num_experts:
        yield f"learner.lora.expert_rank: model_type={shape.family!r} has no experts; leave it out"
    if shape.expert_bias or shape.stacked_experts:
        yield (
            f"{given}: experts of model_type={shape.family!r} are in one tensor per layer, which cannot have "
            f"adapters here; set learner.lora.targets={'attention' if 'mlp' in lacking else 'attention,mlp'}"
        )


def _lacking(shape: ModelShape) -> Mapping[Adaptable, str]:
    """Returns the matrices that the model lacks, for each target that matches none of its matrices."""
    if not shape.num_experts:
        return {"experts": "routed experts"}
    return {} if shape.dense_layers or shape.shared_width else {"mlp": "dense layers and no shared experts"}


def _memory(learner: LearnerSection, _shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
    """Adds the bytes of the merged weights of a layer, and their gradient."""
    if lora_section(learner).rank is None or not rank.layers:
        return terms
    return {**terms, "merged weights": _MERGED * (rank.matrices.both / len(rank.layers)) * BYTES[learner.dtype]}


_ONE = "leave one of them out"
_OUT = "leave learner.lora out"
_LORA, _PUSHED = On("learner.lora.rank"), On("weights.push", "adapters")
_MERGE = "leave the key out, or set weights.push=merged"
# fmt: off
_OF_LEARNER: Sequence[Rule] = (
    *excluded(_LORA,
        (On("learner.fp8"), "merged weights have no copies in float8", _ONE),
        (On("learner.own_layers", SET, "learner.layers"), "adapters know this package's layers alone", _ONE)),
)
_RULES: Sequence[Rule] = (
    *excluded(_LORA,
        (On("kind.scores", True, "job"), "its score layer starts at 0, and adapters freeze it", _OUT),
        (On("algorithm.needs_critic", True, "algorithm.credit"), "that algorithm has a critic, a second model that is "
         "trained whole", f"take one without, as algorithm=gspo, or {_OUT}")),
    Excludes(one=On("algorithm.is_own_critic", True, "algorithm.critic.backbone"), other=_LORA,
             why="adapters freeze its value layer", fix="leave it out, or set critic.backbone=own"),
    Needs(when=_PUSHED, all=_LORA, why="the whole model is trained", fix="set learner.lora.rank, or leave weights.push "
          "out"),
    Needs(when=_PUSHED, all=On("rollout.engine", OneOf(("vllm", "sglang"))),
          why="only vllm and sglang hold adapters beside a model here", fix="set rollout=vllm or sglang, or "
          "weights.push=merged"),
    *excluded(_PUSHED,
        (On("rollout.server.addresses"), "a run starts its servers with places for its adapters", _MERGE),
        (On("rollout.server.colocated", True), "servers that release their memory lose the model, which is pushed "
         "once", _MERGE),
        (On("rollout.server.running_requests", Not("recompute")), "no push pauses a request", _MERGE)),
)
# fmt: on

FEATURE = Feature(
    name="lora",
    active=lambda learner: lora_section(learner).rank is not None,
    keys={"learner": LoraKeys, "weights": PushKeys},
    may_change=frozenset({"weights.push"}),
    rules=_RULES,
    learner_rules=_OF_LEARNER,
    problems=_problems,
    memory=_memory,
    changes={"merged weights": "raise learner.tp, learner.ep or learner.etp"},
    adapters="rl_megatron.features.lora.rows:adapter_row_layouts",
    serving=Serving(
        key="weights.push",
        given=make_adapter_slots,
        engines={
            "vllm": "rl_megatron.features.lora.engines:VLLMAdapters",
            "sglang": "rl_megatron.features.lora.engines:SGLangAdapters",
        },
    ),
    pushes=Pushes(
        is_used=lambda config: make_adapter_slots(config) is not None,
        sync="rl_megatron.features.lora.push:AdapterSync",
        ends="rl_megatron.features.lora.push:adapter_ends",
    ),
    prepare="rl_megatron.features.lora.learner:add_adapters",
    learner="rl_megatron.features.lora.learner:make_hooks",
    export="rl_megatron.features.lora.merging:export",
)
