"""The interval of pass@k and all@k, over problems, and a part of mean@n's. docs/evaluation.md has how it holds. Pure.

Their values are no shares of samples: the chance that one of 8 is right is 0.9 and more for most problems that are ever
solved, so that their spread is small, and a few others make the mean. `share_interval` trusts that spread, and is too
narrow; the posterior of `rates.beta_quantiles` would be wrong for every population that is no beta's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_megatron.evaluation.bounds import share_interval
from rl_megatron.observability.intervals import LEVEL, Interval, beta_quantile


def chance_interval(values: Sequence[float], *, samples: int) -> Interval:
    """Of the mean over P problems of ``values`` in [0, 1], each from ``samples`` samples. Raises ValueError for none.

    Each end is the mean of its end by `share_interval` and of its end by P problems and two more, of which one is 1 and
    the other 0: of a Dirichlet's posterior over these P + 2, as a beta with the mean and the variance that it gives the
    figure. For the low end the problem of 1 counts no more than all ``values`` do together, and for the high end that
    of 0 no more than all that they lack: so a set of tiny values has a low end near 0. None where that of
    `share_interval` is.
    """
    whole = share_interval(values, samples=samples)
    if whole.low is None or whole.high is None:
        return whole
    lacking = [1 - value for value in values]
    low, high = _low_end(values), 1 - _low_end(lacking)
    return Interval(value=whole.value, low=(whole.low + low) / 2, high=(whole.high + high) / 2, count=whole.count)


def _low_end(values: Sequence[float]) -> float:
    total = math.fsum(values)
    if total <= 0:
        return 0.0
    one = min(1.0, total)
    count = len(values) + one + 1
    mean = (total + one) / count
    variance = (math.fsum(value * value for value in values) + one) / count - mean * mean
    like = mean * (1 - mean) / variance * (count + 1) - 1
    return beta_quantile((1 - LEVEL) / 2, mean * like, (1 - mean) * like)
