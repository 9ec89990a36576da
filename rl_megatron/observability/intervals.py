"""Intervals over a few seeds by Student's t: of a mean, and of differences of arms that share seeds; and quantiles of
Student's t and of betas. Pure; no files."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""The share of intervals that hold the truth, wherever this package shows one."""

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with the interval about it; ``low`` and ``high`` are None if there are too few seeds."""

    value: float
    low: float | None
    high: float | None
    count: int  # seeds, or pairs of them

    @property
    def all_equal(self) -> bool:
        """True if the values do not vary, to rounding: then their spread says nothing of the next seed's."""
        if self.low is None or self.high is None or self.count < 2:
            return False
        return self.high - self.low <= _ROUNDING * max(1.0, abs(self.value))

    @property
    def excludes_zero(self) -> bool:
        """True if 0 lies outside; False if all values are equal, which give no interval."""
        outside = self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)
        return outside and not self.all_equal


def mean_interval(values: Sequence[float]) -> Interval:
    """The interval of the mean of independent values: ± t(n - 1) · s / √n. Raises ValueError for none."""
    count = len(values)
    if not count:
        raise ValueError("the mean of no values")
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(value=mean, low=None, high=None, count=1)
    variance = math.fsum((v - mean) ** 2 for v in values) / (count - 1)
    half = t_quantile(count - 1) * math.sqrt(variance / count)
    return Interval(value=mean, low=mean - half, high=mean + half, count=count)


def contrast(
    results: Mapping[str, Mapping[int, float]], weights: Mapping[str, float], *, paired: bool
) -> Interval | None:
    """The interval of a weighted sum of arms; ``results`` are by arm and seed. None if an arm or its seeds are missing.

    ``paired``: seed by seed, over the seeds that all these arms have. Otherwise the arms' means are independent:
    Welch's interval, with Satterthwaite's degrees of freedom.
    """
    if any(not results.get(arm) for arm in weights):
        return None
    if paired:
        seeds = sorted(set.intersection(*(set(results[arm]) for arm in weights)))
        sums = [math.fsum(weight * results[arm][seed] for arm, weight in weights.items()) for seed in seeds]
        return mean_interval(sums) if sums else None
    means = {arm: mean_interval(list(results[arm].values())) for arm in weights}
    value = math.fsum(weight * means[arm].value for arm, weight in weights.items())
    count, terms = sum(mean.count for mean in means.values()), []
    for arm, mean in means.items():
        if mean.high is None:
            return Interval(value=value, low=None, high=None, count=count)
        error = weights[arm] * (mean.high - mean.value) / t_quantile(mean.count - 1)
        terms.append((error**2, mean.count - 1))
    total = math.fsum(square for square, _ in terms)
    if total == 0:
        return Interval(value=value, low=value, high=value, count=count)
    degrees = total**2 / math.fsum(square**2 / free for square, free in terms)
    half = t_quantile(degrees) * math.sqrt(total)
    return Interval(value=value, low=value - half, high=value + half, count=count)


@functools.lru_cache(maxsize=256)  # it takes a millisecond, and a page asks for one at each point of each chart
def t_quantile(degrees: float) -> float:
    """The t above which (1 - `LEVEL`) / 2 of Student's distribution lies, by bisection; ``degrees`` at least 1."""
    tail, low, high = (1 - LEVEL) / 2, 0.0, 1.0
    while _t_tail(high, degrees) > tail:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, degrees) > tail else (low, middle)
    return (low + high) / 2


def beta_quantile(share: float, a: float, b: float) -> float:
    """The x in [0, 1] below which ``share`` of a beta's distribution lies; 0 if x is below 1e-12, 1 as near to 1.

    Newton's method from the mean, and bisection if it leaves the bracket.
    """
    low, high = _ROUNDING, 1 - _ROUNDING
    if _incomplete_beta(low, a, b) >= share:
        return 0.0
    if _incomplete_beta(high, a, b) <= share:
        return 1.0
    x, front = min(max(a / (a + b), low), high), math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    for _ in range(200):
        gap = _incomplete_beta(x, a, b) - share
        low, high = (low, x) if gap > 0 else (x, high)
        density = front + (a - 1) * math.log(x) + (b - 1) * math.log1p(-x)  # its logarithm
        newton = x - gap * math.exp(min(-density, 700.0))
        before, x = x, newton if low < newton < high else (low + high) / 2
        if abs(x - before) <= 1e-10 * x:
            break
    return x


def _t_tail(t: float, degrees: float) -> float:
    """P(T > t) = I_x(degrees / 2, 1 / 2) / 2 at x = degrees / (degrees + t²) (Abramowitz and Stegun 26.7.1)."""
    return _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized I_x(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8), modified Lentz's method."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    tiny, c, d = 1e-300, 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d, tiny)
            c = _nonzero(1 + term / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a


def _nonzero(value: float, tiny: float = 1e-300) -> float:
    return value if abs(value) > tiny else tiny
