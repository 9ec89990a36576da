"""Counts the merged weights of adapters that are alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from rl_megatron.learner.lora.merging import Linear

_MADE: list[weakref.ref[Tensor]] = []


@contextmanager
def merging() -> Iterator[None]:
    """Remember what is merged meanwhile."""
    from rl_megatron.learner.lora import merging

    merge = merging.Linear.merge

    def remembered(self: Linear) -> list[Tensor]:
        made = merge(self)
        _MADE.extend(map(weakref.ref, made))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging.Linear, "merge", remembered)
        yield


def alive() -> int:
    """How many of the merged weights are held."""
    gc.collect()
    assert _MADE
    return sum(ref() is not None for ref in _MADE)
