"""``learner.tp``: the parts of a layer's matrices on several ranks."""

from __future__ import annotations

from rl_megatron.options.option import Option
from rl_megatron.section import Positive, Section


class TensorKeys(Section):
    """Its key."""

    tp: Positive = 1
    """Tensor-parallel degree, with sequence parallelism where above 1."""


class TensorParallel(Option):
    """Tensor parallelism, never without sequence parallelism: megatron-core trains experts only so."""

    keys = TensorKeys
