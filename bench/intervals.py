"""How often the intervals of an evaluation hold the truth, over simulated sets of problems.

    python -m bench.intervals [--sets 2000] [--figures mean pass@2 pass@8 maj] [--rules "by spread" "by a beta" both]

Problems are solved at rates that are a beta's, at 120 settings of 8 to 400 problems and 4 or 16 samples, or of a few
kinds of problems, at 100. Prints each setting that is not 95 ± 2 %, and for each rule how many there are, how far they
are out in all, the lowest, and the mean width. Of the mean there are three rules: by the spread of problems alone
(before), a beta's posterior alone, and both (now).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.results import parse, write
from rl_megatron.evaluation.bounds import share_interval
from rl_megatron.evaluation.figures import majority, pass_at
from rl_megatron.evaluation.rates import beta_quantiles, rate_interval
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
Rule = Callable[[tuple[int, ...], int], Ends]


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
    if figure == "mean":
        return right / samples
    if figure == "maj":
        return majority(["right"] * right + ["wrong"] * (samples - right), [i < right for i in range(samples)])
    return pass_at(right, samples, int(figure.removeprefix("pass@")))


def rules_of(figure: str) -> dict[str, Rule]:
    """By name; a rule gets right samples by problem."""

    def by_spread(right: tuple[int, ...], samples: int) -> Ends:
        k = {"mean": 1, "maj": samples}.get(figure) or int(figure.removeprefix("pass@"))
        return _ends(share_interval([value_of(figure, one, samples) for one in right], samples=samples // k))

    def by_beta(right: tuple[int, ...], samples: int) -> Ends:
        low, high = beta_quantiles(right, samples=samples)
        return low if any(right) else 0.0, high if any(one < samples for one in right) else 1.0

    if figure != "mean":
        return {"by spread": by_spread}
    both: Rule = lambda right, samples: _ends(rate_interval(right, samples=samples))  # noqa: E731
    return {"by spread": by_spread, "by a beta": by_beta, "both": both}


def _ends(found: Interval) -> Ends:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def covered(
    figure: str, population: Population, problems: int, samples: int, sets: int, rules: Mapping[str, Rule]
) -> Iterator[dict[str, str | float]]:
    """A row for each rule: the share of sets that hold the truth, and the mean width."""
    rng = np.random.default_rng([problems, samples, *population.name.encode()])
    drawn = np.sort(rng.binomial(samples, population.rates(rng, (sets, problems))), axis=1).tolist()
    truth = math.fsum(w * value_of(figure, c, samples) for c, w in enumerate(population.chances(samples)))
    for name, rule in rules.items():
        cached = functools.cache(rule)
        ends = np.array([cached(tuple(row), samples) for row in drawn])
        held = float(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean())
        yield {
            "figure": figure,
            "rule": name,
            "population": population.name,
            "problems": problems,
            "samples": samples,
            "truth": truth,
            "held": held,
            "width": float((ends[:, 1] - ends[:, 0]).mean()),
        }


def main() -> None:
    """Print the settings that are out, and a table of the rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=2000)
    parser.add_argument("--figures", nargs="+", default=["mean", "pass@2", "pass@8", "maj"])
    parser.add_argument("--rules", nargs="+", default=["by spread", "by a beta", "both"])
    options = parse(parser)
    rows = []
    for figure, population, problems, samples in itertools.product(options.figures, populations(), PROBLEMS, SAMPLES):
        if figure not in ("mean", "maj") and int(figure.removeprefix("pass@")) > samples:
            continue
        rules = {name: rule for name, rule in rules_of(figure).items() if name in options.rules}
        for row in covered(figure, population, problems, samples, options.sets, rules):
            rows.append(row)
            if _out(row) > 0:
                said = "{figure:8} {rule:10} {population:28} {problems:4} x {samples:2}: {held:.4f}"
                print(said.format(**row), flush=True)
    print(
        "\n| figure | rule | populations | out of 95 ± 2 % | by how much in all | lowest | width |\n" + "|---" * 7 + "|"
    )
    groups: dict[tuple[str, str, str], list[dict[str, str | float]]] = {}
    for row in rows:
        kind = "betas" if str(row["population"]).startswith("beta") else "kinds"
        groups.setdefault((str(row["figure"]), str(row["rule"]), kind), []).append(row)
    for key, group in groups.items():
        out, held = [_out(row) for row in group], [float(row["held"]) for row in group]
        width = np.mean([float(row["width"]) for row in group])
        print(
            f"| {' | '.join(key)} | {sum(one > 0 for one in out)} of {len(group)} | {math.fsum(out):.3f} "
            f"| {min(held):.3f} | {width:.3f} |"
        )
    write(options, rows)


def _out(row: dict[str, str | float]) -> float:
    """How far the share is beyond 93 or 97 %; to rounding."""
    beyond = abs(float(row["held"]) - 0.95) - 0.02
    return beyond if beyond > 1e-9 else 0.0


if __name__ == "__main__":
    main()
