"""``rollout.interrupt``: a text ends thinking that is too long (ScaleRL, arXiv:2510.13786)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rl_megatron.feature import Curve, Feature
from rl_megatron.rules import Above, CheckFunction, Excludes, On, ReadIf
from rl_megatron.section import NonNegativeFloat, Section

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.rollout import RolloutSection


class InterruptSection(Section):
    """Ends thinking that is too long by a text that the model did not sample and is not trained on. The model continues
    after it (ScaleRL). Only for completions to train on."""

    earliest: NonNegativeFloat = 0.0
    """Sampled tokens after which a completion that is still thinking (has no </think> yet) is interrupted, or below 1,
    this share of max_new_tokens; 0 is off. Not done if no token would follow the text within max_new_tokens."""
    latest: NonNegativeFloat | None = None
    """The place is drawn for each group, from ``earliest`` to this. null: it is ``earliest``."""
    text: Annotated[str, Field(min_length=1)] = (
        "\n\nOkay, time is up. Let me stop thinking and formulate a final answer now.\n</think>\n\n"
    )
    """The text that follows."""

    def between(self, max_new_tokens: int) -> tuple[int, int]:
        """Returns the first and the last place, in sampled tokens."""
        latest = self.earliest if self.latest is None else self.latest
        first, last = (int(one if one >= 1 else one * max_new_tokens) for one in (self.earliest, latest))
        return max(first, 1), max(last, 1)


class InterruptKeys(Section):
    """The feature's section of keys of sampling."""

    interrupt: InterruptSection = InterruptSection()


def interrupt_section(rollout: RolloutSection) -> InterruptSection:
    """Returns the feature's keys of the section of sampling."""
    assert isinstance(rollout, InterruptKeys)
    return rollout.interrupt


_INTERRUPTS = On("rollout.interrupt.earliest", Above(0))
_LEAVE_OUT = "leave one of them out"
_SINGLE = "only single completions without a time limit can be interrupted"
_TWO = "an interrupted completion already has two turns"


def _problems(c: RunConfig) -> Iterator[str]:
    """Yields an error for places that no completion reaches."""
    section, most = interrupt_section(c.rollout), c.rollout.max_new_tokens
    first, last = section.between(most)
    if section.earliest and not first <= last < max(most, 2):
        yield (
            f"rollout.interrupt.earliest={section.earliest:g}: completions of at most rollout.max_new_tokens={most} "
            f"would be interrupted after {first} to {last} sampled tokens; make the first at most the second, and both "
            "less than that"
        )


FEATURE = Feature(
    name="interrupt",
    keys={"rollout": InterruptKeys},
    rules=(
        *(Excludes(one=_INTERRUPTS, other=On(key), why=_SINGLE, fix=_LEAVE_OUT)
          for key in ("training_environments@function", "algorithm.preference.beta",
                      "rollout.completion_timeout_seconds")),
        *(Excludes(one=_INTERRUPTS, other=On(key, True), why=_TWO, fix=_LEAVE_OUT)
          for key in ("reward.steps", "data.sources.*.reward.steps")),
        ReadIf(keys=("rollout.interrupt",), any_of=(_INTERRUPTS,), why="no completion is interrupted"),
        CheckFunction(_problems),
    ),
    sampler="rl_megatron.features.interrupt.interruption:make_sampler_hooks",
    step="rl_megatron.features.interrupt.interruption:make_step_hooks",
    metrics=(
        ("response/interrupted_fraction", "", "share of completions with thinking that rollout.interrupt ended",
         Curve("Policy", "Responses whose thinking was interrupted")),
    ),
)  # fmt: skip
