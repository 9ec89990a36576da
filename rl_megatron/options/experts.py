"""``learner.ep``, ``etp``: experts on several ranks."""

from __future__ import annotations

from rl_megatron.options.option import Option
from rl_megatron.section import Positive, Section


class ExpertKeys(Section):
    """Its keys."""

    ep: Positive = 1
    """Expert-parallel degree."""
    etp: Positive | None = None
    """Tensor-parallel degree inside an expert; null: tp where ep=1, else 1."""


class ExpertParallel(Option):
    """Experts are spread, and cut, over the ranks of one pipeline stage."""

    keys = ExpertKeys
