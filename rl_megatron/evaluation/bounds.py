"""Intervals of a set's figures, over its problems: a problem's samples are alike, so they are never counted apart.

They are about the mean over all problems that the set's could have been drawn from (arXiv:2411.00640). Pure.

How they hold, by 6,000 simulated sets at each of 120 settings (8 to 400 problems of 4 or 16 samples, whose rates are a
beta's of mean 0.02 to 0.5 and concentration 0.5 to 10; near 1 as near 0): `share_interval` holds the truth in 93 to
97 % of sets at 104 of the settings, in 91.3 to 98.0 % at all. It says too little where few problems are always solved
and the others never, as these may all be missing: 91 % of 8 problems, and 93 % of 100, of mean 2 %; and too much, up to
98 %, of 30 problems or fewer that are alike and hardly solved; for mean@n `rates.rate_interval` is nearer, and for
pass@k and all@k `chances.chance_interval`.
Student's t falls to 23 % where answers are rare, because problems without any right one have no spread.
`difference_interval` holds the truth in 95 to 98 % from 30 problems on; with fewer it is too wide, up to 100 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from rl_megatron.observability.intervals import LEVEL, Interval, t_quantile

_ROUNDING = 1e-12
_PRIOR_WEIGHT = 1.5
_NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)


def share_interval(values: Sequence[float], *, samples: int = 1) -> Interval:
    """Of the mean over P problems of ``values`` in [0, 1]. Raises ValueError for none.

    Wilson's interval, with the number of problems of one sample that these are worth: P · samples / d, for the design
    effect d = samples · s² / (m (1 - m)) of their spread, between 1 and ``samples``. Where h of them say something,
    with any right sample, or of a set that is mostly solved any wrong one, d is the mean of this, of weight h², and of
    ``samples``, of weight 1.5: the spread of few such problems says little, and their samples then count as alike.
    """
    count = len(values)
    if not count:
        raise ValueError("the mean of no problems")
    mean = min(max(math.fsum(values) / count, 0.0), 1.0)
    if samples > 1 and count == 1:
        return Interval(value=mean, low=None, high=None, count=1)
    z, worth = _NORMAL, count * samples / _design_effect(values, mean, samples)
    middle = (mean + z * z / (2 * worth)) / (1 + z * z / worth)
    half = z / (1 + z * z / worth) * math.sqrt(mean * (1 - mean) / worth + (z / (2 * worth)) ** 2)
    return Interval(value=mean, low=max(0.0, middle - half), high=min(1.0, middle + half), count=count)


def _design_effect(values: Sequence[float], mean: float, samples: int) -> float:
    """How many samples of a problem are worth one of a problem of its own, from 1 to ``samples``."""
    alone = mean * (1 - mean)
    if samples == 1 or alone < _ROUNDING:
        return float(samples)
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    seen = min(max(samples * spread / alone, 1.0), samples)
    weight = min(sum(value > 0 for value in values), sum(value < 1 for value in values)) ** 2
    return (weight * seen + _PRIOR_WEIGHT * samples) / (weight + _PRIOR_WEIGHT)


def difference_interval(first: Sequence[float], second: Sequence[float], *, samples: int = 1) -> Interval:
    """Of the mean of ``second`` minus ``first``, problem by problem; both are in [0, 1], of ``samples`` samples each.

    Bonett and Price's interval of paired shares (2012): the problems and two more, of which each side wins one, so that
    models that differ on no problem have a width too. With several samples these two count 1 / ``samples`` each, and
    the quantile is Student's over problems; of other figures `results.draws_of` says what ``samples`` is. Raises
    ValueError for sets that are empty or of different sizes.
    """
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    if not gaps:
        raise ValueError("the difference over no problems")
    more = 1 / samples
    count = len(gaps) + 2 * more
    middle = math.fsum(gaps) / count
    squares = math.fsum((gap - middle) ** 2 for gap in gaps) + more * ((1 - middle) ** 2 + (1 + middle) ** 2)
    quantile = _NORMAL if samples == 1 else t_quantile(count - 1)
    half = quantile * math.sqrt(squares / (count - 1) / count)
    value = math.fsum(gaps) / len(gaps)
    return Interval(value=value, low=max(-1.0, middle - half), high=min(1.0, middle + half), count=len(gaps))
