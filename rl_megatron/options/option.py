"""What an option of the learner is: its keys. One file an option.

Options import neither torch nor megatron-core: a login node checks and plans by them.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from rl_megatron.section import Section


@runtime_checkable
class Option(Protocol):
    """An option of the learner. Whatever it has nothing to say to stays as it is here."""

    keys: ClassVar[type[Section] | None] = None
    """Its keys, which the ``learner`` section has among its own."""
