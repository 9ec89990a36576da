"""Generates additions: ``37+08=`` with answer ``540``, lowest digit first. No held-out sum is in the training split."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rl_megatron.errors import ConfigError

MAX_TRAIN_SUMS = 20_000  # unordered; beyond it (3 digits and more) problems are sampled without replacement

Sum = tuple[int, int]


def split_sums(*, digits: int, num_eval: int, seed: int, key: str = "data") -> tuple[list[Sum], list[Sum]]:
    """(train, held-out) pairs of addends below ``10**digits``; ``key``: of the section that says so, for errors.

    ``num_eval`` unordered pairs are held out, each in one order; train has both orders of the other pairs.
    Raises ConfigError if nothing would be left to train on.
    """
    limit = 10**digits
    num_sums = limit * (limit + 1) // 2
    if num_eval >= num_sums:
        raise ConfigError(
            f"{key}.num_eval={num_eval} leaves nothing to train on: {key}.digits={digits} has {num_sums} different "
            f"sums; lower {key}.num_eval below {num_sums} or raise {key}.digits"
        )
    rng = np.random.default_rng([seed, digits])
    chosen = rng.choice(num_sums, size=min(num_sums, num_eval + MAX_TRAIN_SUMS), replace=False)
    large, small = _unrank(chosen)
    flip = rng.random(num_eval) < 0.5
    first = np.where(flip, large[:num_eval], small[:num_eval])
    second = np.where(flip, small[:num_eval], large[:num_eval])
    a, b = large[num_eval:], small[num_eval:]
    both = a != b
    train = [*zip(a.tolist(), b.tolist(), strict=True), *zip(b[both].tolist(), a[both].tolist(), strict=True)]
    return train, list(zip(first.tolist(), second.tolist(), strict=True))


def _unrank(index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ``index``-th pairs (large, small) with large >= small, in the order (0,0), (1,0), (1,1), (2,0) ..."""
    large = np.fromiter(((math.isqrt(8 * k + 1) - 1) // 2 for k in index.tolist()), np.int64, len(index))
    return large, index - large * (large + 1) // 2
