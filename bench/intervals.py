"""How often the intervals of an evaluation hold the truth, over simulated sets of problems.

    python -m bench.intervals [--sets 2000] [--figures mean pass@2 pass@8 all@2 all@8 maj] [--rules before now beta]

Problems are solved at rates that are a beta's, at 120 settings of 8 to 400 problems and 4 or 16 samples, or of a few
kinds of problems, at 100. Of maj@n all wrong answers are one answer. Prints each setting as it ends, with the share of
sets whose interval holds the truth, marked where it is not 95 ± 2 %; and for each rule how many are marked, how far
they are out in all, the lowest and the mean width. *Now* is what an evaluation writes, *before* what it wrote, and
*beta*, which mean@n alone has, a beta's posterior.

Where figures are rare most sets have the same values, and no rule may be right in 95 ± 2 % of sets: it is right or
wrong in all sets of the same values at once. *Best* is the nearest that any rule can be that sees a set's values, even
one that knows the truth: the nearest sum of the shares of sets that are alike. A second count leaves out settings where
this is out too.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.results import parse, write
from rl_megatron.evaluation.figures import (
    all_at_k,
    beta_quantiles,
    chance_interval,
    majority,
    pass_at_k,
    rate_interval,
    share_interval,
)
from rl_megatron.observability.intervals import Interval

PROBLEMS, SAMPLES = (8, 15, 30, 100, 400), (4, 16)
BETAS = tuple(itertools.product((0.02, 0.05, 0.2, 0.5), (0.5, 2.0, 10.0)))  # mean, and a + b
KINDS: dict[str, dict[float, float]] = {
    "all alike": {0.3: 1},
    "two, far apart": {0.0: 0.7, 0.9: 0.3},
    "never, half, always": {0.0: 1 / 3, 0.5: 1 / 3, 1.0: 1 / 3},
    "two, near": {0.1: 0.5, 0.6: 0.5},
    "hard, a tenth always": {0.05: 0.9, 1.0: 0.1},
    "one in twenty always": {0.3: 0.95, 1.0: 0.05},
    "three": {0.2: 0.5, 0.4: 0.4, 1.0: 0.1},
    "one in fifty at all": {0.0: 0.98, 0.5: 0.02},
    "two, hardly": {0.0: 0.6, 0.1: 0.4},
    "a fifth never": {0.6: 0.8, 0.0: 0.2},
}
Ends = tuple[float, float]
Rule = Callable[[tuple[int, ...]], Ends]
Row = dict[str, str | float]


@dataclass(frozen=True, kw_only=True)
class Population:
    """``rates`` draws those of so many problems; ``chances`` are of 0 to n right samples of a problem [n + 1]."""

    name: str
    rates: Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]
    chances: Callable[[int], list[float]]


def populations() -> Iterator[Population]:
    """Betas, then kinds."""
    for mean, like in BETAS:
        a, b = mean * like, (1 - mean) * like
        yield Population(
            name=f"beta, mean {mean:g}, a + b {like:g}",
            rates=lambda rng, size, a=a, b=b: rng.beta(a, b, size),  # type: ignore[misc]
            chances=lambda n, a=a, b=b: [_beta_binomial(c, n, a, b) for c in range(n + 1)],  # type: ignore[misc]
        )
    for name, kinds in KINDS.items():
        at, weights = np.array(list(kinds)), np.array(list(kinds.values()))
        yield Population(
            name=name,
            rates=lambda rng, size, at=at, weights=weights: at[rng.choice(len(at), p=weights, size=size)],  # type: ignore[misc]
            chances=lambda n, kinds=kinds: [  # type: ignore[misc]
                math.comb(n, c) * math.fsum(w * p**c * (1 - p) ** (n - c) for p, w in kinds.items())
                for c in range(n + 1)
            ],
        )


def _beta_binomial(c: int, n: int, a: float, b: float) -> float:
    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return math.comb(n, c) * math.exp(log_beta(a + c, b + n - c) - log_beta(a, b))


def value_of(figure: str, right: int, samples: int) -> float:
    """The figure of a problem; all wrong answers are one answer."""
    kind, _, k = figure.partition("@")
    if kind == "mean":
        return right / samples
    if kind == "maj":
        return majority(["right"] * right + ["wrong"] * (samples - right), [i < right for i in range(samples)])
    return {"pass": pass_at_k, "all": all_at_k}[kind](right, samples, int(k))


def rules_of(figure: str, samples: int) -> dict[str, Rule]:
    """By name; a rule gets right samples by problem."""
    kind, _, k = figure.partition("@")
    values = [value_of(figure, right, samples) for right in range(samples + 1)]

    def by_spread(worth: int) -> Rule:
        return lambda right: _ends(share_interval([values[one] for one in right], samples=worth))

    def by_beta(right: tuple[int, ...]) -> Ends:
        low, high = beta_quantiles(right, samples=samples)
        return low if any(right) else 0.0, high if any(one < samples for one in right) else 1.0

    if kind == "mean":
        now: Rule = lambda right: _ends(rate_interval(right, samples=samples))  # noqa: E731
        return {"before": by_spread(samples), "now": now, "beta": by_beta}
    if kind == "maj":
        return {"before": by_spread(1), "now": by_spread(samples)}
    chance: Rule = lambda right: _ends(chance_interval([values[one] for one in right], samples=samples))  # noqa: E731
    return {"before": by_spread(samples // int(k)), "now": chance}


def _ends(found: Interval) -> Ends:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def covered(
    figure: str, population: Population, problems: int, samples: int, sets: int, rules: Iterable[str]
) -> Iterator[Row]:
    """A row for each rule: the share of sets that hold the truth, the nearest to 95 % it can be, and the mean width."""
    rng = np.random.default_rng([problems, samples, *population.name.encode()])
    drawn = np.sort(rng.binomial(samples, population.rates(rng, (sets, problems))), axis=1)
    alike = Counter(map(tuple, drawn.tolist()))
    values = np.array([value_of(figure, right, samples) for right in range(samples + 1)])
    truth = math.fsum(w * one for w, one in zip(population.chances(samples), values, strict=True))
    best = nearest(Counter(map(tuple, np.sort(values[drawn], axis=1).tolist())).values())
    for name, rule in rules_of(figure, samples).items():
        if name not in rules:
            continue
        ends = {right: rule(right) for right in alike}
        yield {
            "figure": figure,
            "rule": name,
            "population": population.name,
            "problems": problems,
            "samples": samples,
            "truth": truth,
            "held": sum(alike[right] for right, (low, high) in ends.items() if low <= truth <= high) / sets,
            "best": best,
            "width": math.fsum(alike[right] * (high - low) for right, (low, high) in ends.items()) / sets,
        }


def nearest(counts: Iterable[int]) -> float:
    """Of all shares of sets that some of these ``counts`` of equal ones make, that nearest to 95 %."""
    counts, sums = list(counts), 1  # bit i of sums: whether some make i
    for count in counts:
        sums |= sums << count
    total = sum(counts)
    return min((i / total for i in range(total + 1) if sums >> i & 1), key=lambda share: abs(share - 0.95))


def main() -> None:
    """Print each setting, and a table of the rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=2000)
    parser.add_argument("--figures", nargs="+", default=["mean", "pass@2", "pass@8", "all@2", "all@8", "maj"])
    parser.add_argument("--rules", nargs="+", choices=["before", "now", "beta"], default=["before", "now"])
    options = parse(parser)
    rows: list[Row] = []
    for figure, population, problems, samples in itertools.product(options.figures, populations(), PROBLEMS, SAMPLES):
        if int(figure.partition("@")[2] or 1) > samples:
            continue
        found = list(covered(figure, population, problems, samples, options.sets, options.rules))
        rows += found
        held = "  ".join(f"{row['rule']} {row['held']:.4f}{'*' if _out(row['held']) else ' '}" for row in found)
        print(
            f"{figure:8} {population.name:28} {problems:4} x {samples:2}: {held}  best {found[0]['best']:.4f}",
            flush=True,
        )
    print(f"\n| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|")
    for kind, figure, rule in itertools.product(("betas", "kinds"), options.figures, options.rules):
        mine = [row for row in rows if (row["figure"], row["rule"]) == (figure, rule)]
        mine = [row for row in mine if str(row["population"]).startswith("beta") == (kind == "betas")]
        if mine:
            print(f"| {figure} | {rule} | {kind} | {_summary(mine)} |", flush=True)
    write(options, rows)


COLUMNS = (
    "figure",
    "rule",
    "populations",
    "out of 95 ± 2 %",
    "of them where a rule can be in",
    "by how much in all",
    "lowest",
    "width",
)


def _summary(rows: list[Row]) -> str:
    out = [_out(row["held"]) for row in rows]
    can = sum(one > 0 and not _out(row["best"]) for one, row in zip(out, rows, strict=True))
    held, width = min(float(row["held"]) for row in rows), np.mean([float(row["width"]) for row in rows])
    return f"{sum(one > 0 for one in out)} of {len(rows)} | {can} | {math.fsum(out):.3f} | {held:.3f} | {width:.3f}"


def _out(share: str | float) -> float:
    """How far it is beyond 93 or 97 %; to rounding."""
    beyond = abs(float(share) - 0.95) - 0.02
    return beyond if beyond > 1e-9 else 0.0


if __name__ == "__main__":
    main()
