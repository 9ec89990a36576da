"""What the learner cannot build of a shape, and which of its parts TransformerEngine's layers do not have."""

from __future__ import annotations

from collections.abc import Iterator

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.learner.model.latent import megatron_has
from rl_megatron.models.shape import ModelShape


def refuse(shape: ModelShape, learner: LearnerSection) -> None:
    """Raises ConfigError naming every part of the model that megatron-core 0.16 would get wrong or cannot build."""
    problems = list(_problems(shape, learner))
    if problems:
        raise ConfigError(f"model_type={shape.family!r} cannot be trained so:\n  " + "\n  ".join(problems))


def _problems(shape: ModelShape, learner: LearnerSection) -> Iterator[str]:
    router, top_k = shape.router, shape.experts_per_token
    if router.score == "sigmoid" and (top_k == 1 or not shape.normalize_top_k):
        yield (
            f"a sigmoid router with num_experts_per_tok={top_k} and norm_topk_prob={shape.normalize_top_k}: megatron "
            f"makes the weights of the chosen add up to 1 where there are two or more, and only there"
        )
    summed = {"top2": 2, "max": 1}[router.group_score]
    if 1 <= router.top_groups < router.groups and top_k // router.top_groups != summed:
        yield (
            f"groups of experts are chosen by their best {summed}; megatron takes num_experts_per_tok / topk_group = "
            f"{top_k} / {router.top_groups} = {top_k // router.top_groups}"
        )
    if shape.expert_bias and learner.dims.etp > 1:
        yield f"its experts are spread by ep, not cut: learner.etp={learner.dims.etp} is refused; use etp=1, ep=tp"


def torch_only(shape: ModelShape) -> str | None:
    """The part for which our torch layers are used on GPUs too; None where TransformerEngine has them all."""
    parts = {
        "sliding windows": any(shape.windows),
        "attention sinks": shape.sinks,
        "norms over all heads": shape.qk_norm == "all",
        "fused experts with biases": shape.expert_bias,
        "a factor on rotary embeddings": shape.latent is None and shape.rope.attention_factor != 1,
        "latent attention with these norms or rotary embeddings": shape.latent is not None and not megatron_has(shape),
    }
    return next((part for part, there in parts.items() if there), None)
