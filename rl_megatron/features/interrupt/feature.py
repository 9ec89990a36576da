"""``rollout.interrupt``: a text ends thinking that is too long (ScaleRL, arXiv:2510.13786)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.feature import Curve, Feature
from rl_megatron.rules import Above, CheckFunction, Excludes, On, ReadIf

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig

_INTERRUPTS = On("rollout.interrupt.earliest", Above(0))
_LEAVE_OUT = "leave one of them out"
_SINGLE = "only single completions without a time limit can be interrupted"
_TWO = "a completion that was interrupted is two turns already"


def _problems(c: RunConfig) -> Iterator[str]:
    """Places that no completion reaches."""
    section, most = c.rollout.interrupt, c.rollout.max_new_tokens
    first, last = section.between(most)
    if section.earliest and not first <= last < max(most, 2):
        yield (
            f"rollout.interrupt.earliest={section.earliest:g}: completions of at most rollout.max_new_tokens={most} "
            f"would be interrupted after {first} to {last} sampled tokens; make the first at most the second, and both "
            "less than that"
        )


FEATURE = Feature(
    name="interrupt",
    rules=(
        *(Excludes(one=_INTERRUPTS, other=On(key), why=_SINGLE, fix=_LEAVE_OUT)
          for key in ("training_environments@function", "algorithm.preference.beta", "rollout.max_seconds")),
        *(Excludes(one=_INTERRUPTS, other=On(key, True), why=_TWO, fix=_LEAVE_OUT)
          for key in ("reward.steps", "data.sources.*.reward.steps")),
        ReadIf(keys=("rollout.interrupt",), any_of=(_INTERRUPTS,), why="no completion is interrupted"),
        CheckFunction(_problems),
    ),
    sampler="rl_megatron.features.interrupt.interruption:make_sampler_hooks",
    step="rl_megatron.features.interrupt.interruption:make_step_hooks",
    metrics=(
        ("response/interrupted_fraction", "", "share of completions whose thinking rollout.interrupt ended by a text",
         Curve("Policy", "Responses whose thinking was interrupted")),
    ),
)  # fmt: skip
