"""The interval of mean@n, over problems: how often each is solved is drawn from a population that is to be found too.

Where many problems say something, their spread tells how alike samples are, and `chance_interval` holds whatever the
population is. Where few do, it does not: then the population is taken for a beta's. Each has the other's fault, so that
ends are means of both. A beta's alone would hold the truth of no other population: of 2,000 problems of which 30 % are
solved in 90 % of samples and the others never, in no set at all. docs/evaluation.md has how both hold. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl_megatron.evaluation.bounds import share_interval
from rl_megatron.evaluation.chances import chance_interval
from rl_megatron.observability.intervals import LEVEL, Interval

FEW = 4
"""So many problems that say something weigh as much as the beta's."""

_Array = NDArray[np.float64]
_LIKENESS = np.geomspace(0.1, 100.0, 25)  # a beta's a + b; equally likely in logarithms
_LIKENESS_WEIGHTS = np.array([0.5, *[1.0] * 23, 0.5])  # of the trapezoidal rule
_CELLS = 96  # of means
_NEGLIGIBLE = 16.0  # below the largest log-density


def rate_interval(right: Sequence[int], *, samples: int) -> Interval:
    """Of the mean over P problems of ``right`` / ``samples``; a problem has ``right`` of so many samples right.

    With one sample a problem, or of one problem, it is that of `share_interval`. Else each end is the mean of that of
    `chance_interval`, of weight h, and of `beta_quantiles`, of weight `FEW`, where h problems say something: have any
    right sample, or any wrong one if these are fewer. Raises ValueError for no problems, and for more right samples
    than there are.
    """
    if not all(0 <= one <= samples for one in right):
        raise ValueError(f"right samples from {min(right)} to {max(right)} of {samples}: each is from 0 to samples")
    if samples == 1 or len(right) <= 1:
        return share_interval([one / samples for one in right], samples=samples)
    value, wrong = sum(right) / (samples * len(right)), [samples - one for one in right]
    if (sum(right), sorted(right)) > (sum(wrong), sorted(wrong)):  # so that right and wrong are treated alike
        other = rate_interval(wrong, samples=samples)
        assert other.low is not None
        assert other.high is not None
        return Interval(value=value, low=1 - other.high, high=1 - other.low, count=len(right))
    whole = chance_interval([one / samples for one in right], samples=samples)
    assert whole.low is not None
    assert whole.high is not None
    low, high = beta_quantiles(right, samples=samples)
    say = min(sum(one > 0 for one in right), sum(one < samples for one in right))
    low, high = ((say * a + FEW * b) / (say + FEW) for a, b in ((whole.low, low), (whole.high, high)))
    return Interval(value=value, low=min(low, value), high=high, count=len(right))


def beta_quantiles(right: Sequence[int], *, samples: int) -> tuple[float, float]:
    """Between which the mean of a beta is, in `LEVEL` of its posterior, whose draws are the rates of problems.

    A problem's ``right`` are then beta-binomial (Skellam 1948). Beforehand each mean in [0, 1] is as likely as another,
    and so is each logarithm of a + b from 0.1 to 100. Computed on a grid of both, which is made again of those means
    that are possible until they are half of it.
    """
    counts = np.bincount(right, minlength=samples + 1)
    above = counts[::-1].cumsum()[::-1][1:]  # [samples], problems with more than j right samples
    below = counts.cumsum()[:-1][::-1]  # with more than j wrong ones
    edges = np.linspace(0, np.pi, _CELLS + 1)
    while True:
        found = _log_density(edges, above, below, len(right))
        seen = np.flatnonzero(found > found.max() - _NEGLIGIBLE)
        first, last = max(seen[0] - 1, 0), min(seen[-1] + 2, _CELLS)
        if last - first > _CELLS // 2:
            break
        edges = np.linspace(edges[first], edges[last], _CELLS + 1)
    share = np.concatenate([[0.0], np.exp(found - found.max()).cumsum()])
    angles = np.interp([(1 - LEVEL) / 2, (1 + LEVEL) / 2], share / share[-1], edges)
    low, high = np.sin(angles / 2) ** 2
    return float(low), float(high)


def _log_density(edges: _Array, above: NDArray[np.int64], below: NDArray[np.int64], problems: int) -> _Array:
    """[cells], but for a constant, in the middle of each cell of angles t, whose mean is sin²(t / 2): so posteriors are
    about as wide near means of 0 and 1 as between."""
    middle = (edges[1:] + edges[:-1]) / 2
    a, b = (share[:, None] * _LIKENESS for share in (np.sin(middle / 2) ** 2, np.cos(middle / 2) ** 2))
    logs = np.log(np.sin(middle))[:, None] + np.log(_LIKENESS_WEIGHTS)  # [cells, likenesses]; sin t: of d mean / d t
    for j, (more, less) in enumerate(zip(above.tolist(), below.tolist(), strict=True)):
        logs += more * np.log(a + j) + less * np.log(b + j) - problems * np.log(_LIKENESS + j)
    largest = logs.max(axis=1)
    return np.asarray(largest + np.log(np.exp(logs - largest[:, None]).sum(axis=1)))
