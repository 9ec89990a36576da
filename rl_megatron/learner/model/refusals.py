"""Refuses models that the learner cannot build: routers that megatron-core lacks, and what the options refuse."""

from __future__ import annotations

from collections.abc import Iterator

from rl_megatron.config.learner_checks import problems
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape


def refuse(shape: ModelShape, learner: LearnerSection) -> None:
    """Raises ConfigError naming every part of the model that megatron-core 0.16 computes wrongly or cannot build."""
    found = [*_router_problems(shape), *problems(learner, shape)]
    if found:
        raise ConfigError(f"model_type={shape.family!r} cannot be trained as configured:\n  " + "\n  ".join(found))


def _router_problems(shape: ModelShape) -> Iterator[str]:
    router, top_k = shape.router, shape.experts_per_token
    if router.score == "sigmoid" and (top_k == 1 or not shape.normalize_top_k):
        yield (
            f"a sigmoid router with num_experts_per_tok={top_k} and norm_topk_prob={shape.normalize_top_k}: megatron "
            f"normalizes the weights of the chosen experts if and only if there are two or more of them"
        )
    if router.score == "softmax" and shape.normalize_top_k and top_k == 1 < shape.num_experts:
        yield (
            f"num_experts_per_tok=1 of {shape.num_experts} experts with norm_topk_prob=True: the chosen expert's "
            "weight is always 1, so its router would never learn, and megatron refuses it; choose 2 experts, or set "
            "norm_topk_prob=False in a model that was trained so"
        )
    summed, of_group = {"top2": 2, "max": 1}[router.group_score], shape.num_experts // router.groups
    if 1 <= router.top_groups < router.groups and of_group < summed:
        yield (
            f"{router.groups} groups of {of_group} of {shape.num_experts} experts, of each of which the best {summed} "
            "count: set n_group in config.json (where it is left out, the family's default holds, as 8 of deepseek_v3)"
        )
    if 1 <= router.top_groups < router.groups and top_k // router.top_groups != summed:
        yield (
            f"the model scores a group of experts by its best {summed}; megatron scores it by its best "
            f"num_experts_per_tok / topk_group = {top_k} / {router.top_groups} = {top_k // router.top_groups}"
        )
