"""What an option of the learner is: keys and refusals. One file an option.

Options import neither torch nor megatron-core: a login node checks and plans by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


@runtime_checkable
class Option(Protocol):
    """An option of the learner. Whatever it has nothing to say to stays as it is here."""

    keys: ClassVar[type[Section] | None] = None
    """Its keys, which the ``learner`` section has among its own."""

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Why it is refused, each with what was given and what to do. ``shape`` is None before a model is read."""
        yield from ()
