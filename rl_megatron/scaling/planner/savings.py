"""What a run's keys leave open that frees memory of GPUs, and takes time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from rl_megatron.options import table as options
from rl_megatron.scaling.planner.layouts import Wanted, with_keys


def savings(wanted: Wanted) -> Iterator[dict[str, object]]:
    """All that free memory, from none to the most, which the user's keys leave open and no option refuses."""
    shape, given = wanted.shape, wanted.given
    parts: dict[str, object] = {"learner.recompute.moe_act": True} if shape.num_experts else {}
    if shape.latent is not None:
        parts["learner.recompute.mla_up_proj"] = True
    again: list[dict[str, object]] = [{}, *([parts] if parts else []), {"learner.recompute.uniform": 1}]
    moments: list[dict[str, object]] = [{}, {"learner.offload.optimizer": 1.0, "learner.layers": "torch"}]
    head: list[dict[str, object]] = [{}, {"learner.head_dtype": "float32"}]
    if any(key.startswith("learner.recompute") for key in given):
        again = [{}]
    if "learner.offload.optimizer" in given or "learner.layers" in given:
        moments = [{}]
    if "learner.head_dtype" in given:
        head = [{}]
    known = set(options.problems(wanted.base.learner, shape))
    for one in product(head, moments, again):
        saved = {key: value for keys in one for key, value in keys.items()}
        if not set(options.problems(with_keys(wanted.base, saved).learner, shape)) - known:
            yield saved
