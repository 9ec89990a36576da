"""``learner.lora``: adapters of low rank beside frozen linears (arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rl_megatron.options.option import BYTES, Option, Rank, Terms
from rl_megatron.section import LISTED, Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

Adaptable = Literal["attention", "mlp", "experts"]
_MERGED = 2  # a layer's merged weights, and their gradient


class LoraSection(Section):
    """Adapters A [rank, in] and B [out, rank] beside each targeted matrix W [out, in] of a Hugging Face checkpoint. The
    model computes with W + alpha / rank * B A in learner.dtype, which is also what engines get. All else is frozen."""

    rank: Positive | None = None
    """Rows of A and columns of B. null: no adapters, the whole model is trained."""
    expert_rank: Positive | None = None
    """The rank beside routed experts' matrices. null: rank divided by the experts of a token, at least 1."""
    alpha: PositiveFloat = 32.0
    """The scale of B A is alpha / rank, each with its own rank."""
    targets: Annotated[tuple[Adaptable, ...], LISTED] = ("attention", "mlp", "experts")
    """Whose linears have adapters: attention (latents and delta nets, too), dense layers and shared experts, routed
    experts. Routers, norms, embedding and output layer have none."""

    def ranks(self, shape: ModelShape) -> Mapping[Adaptable, int]:
        """The rank for each target; empty without adapters."""
        if self.rank is None:
            return {}
        ranks: dict[Adaptable, int] = dict.fromkeys(self.targets, self.rank)
        if "experts" in ranks:
            ranks["experts"] = self.expert_rank or max(1, self.rank // max(1, shape.experts_per_token))
        return ranks


class LoraKeys(Section):
    """The section of keys of `Lora`."""

    lora: LoraSection = LoraSection()


class Lora(Option):
    """Trains adapters alone. A pass merges each linear's weight when it is multiplied, and again in the backward pass,
    so that no second copy of the model is kept."""

    keys = LoraKeys
    changes: ClassVar[Mapping[str, str]] = {"merged weights": "raise learner.tp, learner.ep or learner.etp"}

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Keys without effect, options that need gradients of the whole model or the same weights in each pass, and
        experts of one tensor a layer."""
        lora = learner.lora
        if lora.rank is None:
            if changed := lora.model_dump(exclude_defaults=True):
                key = min(changed)
                yield f"learner.lora.{key} without learner.lora.rank would have no effect; set rank, or leave it out"
            return
        given = f"learner.lora.rank={lora.rank}"
        if not lora.targets or len(set(lora.targets)) < len(lora.targets):
            yield f"learner.lora.targets={','.join(lora.targets)}: name some of attention, mlp, experts, each once"
        for key, remedy in _excluded(learner).items():
            yield f"{given} with {key}; {remedy}"
        if lora.expert_rank and "experts" not in lora.targets:
            yield "learner.lora.expert_rank without experts in learner.lora.targets would have no effect; leave it out"
        if shape is None:
            return
        lacking = _lacking(shape)
        if lora.targets and set(lora.targets) <= lacking.keys():
            parts = " and no ".join(lacking[target] for target in lora.targets)
            yield (
                f"learner.lora.targets={','.join(lora.targets)}: model_type={shape.family!r} has no {parts}, so that "
                "nothing would be trained; name others"
            )
        if "experts" not in lora.targets:
            return
        if lora.expert_rank and not shape.num_experts:
            yield f"learner.lora.expert_rank: model_type={shape.family!r} has no experts; leave it out"
        if shape.expert_bias or shape.stacked_experts:
            yield (
                f"{given}: experts of model_type={shape.family!r} are in one tensor a layer, which has no adapters "
                f"here; set learner.lora.targets={'attention' if 'mlp' in lacking else 'attention,mlp'}"
            )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of one layer's merged weights and of their gradient."""
        if learner.lora.rank is None or not rank.layers:
            return terms
        layers = len(rank.layers)
        each = (rank.matrices.both / layers) * BYTES[learner.dtype]
        return {**terms, "merged weights": _MERGED * each}


def _lacking(shape: ModelShape) -> Mapping[Adaptable, str]:
    """What the model lacks, for each target that matches none of its matrices."""
    if not shape.num_experts:
        return {"experts": "routed experts"}
    return {} if shape.dense_layers or shape.shared_width else {"mlp": "dense layers and no shared experts"}


def _excluded(learner: LearnerSection) -> Mapping[str, str]:
    """What cannot be set beside adapters, and what to do."""
    router = learner.router.model_dump(exclude_defaults=True)
    found = {
        "learner.optimizer.name=muon: it steps whole matrices": learner.optimizer.name == "muon",
        f"learner.fp8={learner.fp8}: merged weights have no copies in float8": learner.fp8 is not None,
        "learner.batch_invariant=true: that mode's torch.addmm, which merges, takes no factor": learner.batch_invariant,
        "learner.cuda_graphs=true: a graph has fixed weights": learner.cuda_graphs,
        "learner.overlap.parameters=true: adapters are merged before they are there": learner.overlap.parameters,
        "learner.offload.activations: merged weights are kept by other means": bool(learner.offload.activations),
        f"learner.layers={learner.layers}: adapters know this package's layers alone": learner.own_layers is not None,
        f"learner.router.{min(router, default='')}: routers are frozen": bool(router),
    }
    return {key: "leave one of them out" for key, there in found.items() if there}
