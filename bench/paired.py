"""How often intervals of differences between two models hold the truth, over simulated sets of problems.

    python -m bench.paired [--sets 2000] [--figures mean pass@2 pass@4 pass@8] [--problems 15 30 100]

As `bench.intervals`, whose populations give the first model's rates. The second has the same; or solves a problem as
often as the first in two tries; or has its rate on every other problem, and another of the population else. *Now* is
what ``rl-megatron eval --compare`` writes, *before* what it wrote. *Single* is the first model's own interval of the
figure: the last count is of settings where this one is in 95 ± 2 % and the difference's below, or above.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.intervals import SAMPLES, Population, populations, rules_of, value_of
from bench.results import parse, write
from rl_megatron.evaluation.figures import difference_interval
from rl_megatron.evaluation.results import num_draws

SECOND: dict[str, Callable[[np.random.Generator, Population, NDArray[np.float64]], NDArray[np.float64]]] = {
    "the same": lambda rng, population, rates: rates,
    "two tries": lambda rng, population, rates: 1 - (1 - rates) ** 2,
    "half others": lambda rng, population, rates: np.where(
        rng.random(rates.shape) < 0.5, rates, population.rates(rng, rates.shape)
    ),
}
Row = dict[str, str | float]


def truth_of(population: Population, second: str, k: int) -> float:
    """The mean difference of pass@k: none of k samples is right in (1 - rate)^k, and of two tries' in its square."""
    return population.chances(k)[0] - population.chances(2 * k)[0] if second == "two tries" else 0.0


def covered(population: Population, second: str, problems: int, samples: int, k: int, sets: int) -> Row:
    """The shares of sets whose intervals hold the truth, and their mean widths."""
    rng = np.random.default_rng([problems, samples, k, *population.name.encode()])
    rates = population.rates(rng, (sets, problems))
    both = [rng.binomial(samples, one) for one in (rates, SECOND[second](rng, population, rates))]
    figure = f"pass@{k}" if k > 1 else "mean"
    values = np.array([value_of(figure, right, samples) for right in range(samples + 1)])
    row: Row = {"figure": figure, "population": population.name, "second": second}
    row |= {"problems": problems, "samples": samples, "truth": truth_of(population, second, k)}
    first, other = (values[one].tolist() for one in both)
    for rule, draws in (("before", samples // k), ("now", num_draws(samples, k))):
        held, width = _shares(first, other, draws, float(row["truth"]))
        row |= {rule: held, f"{rule} width": width}
    own, truth = rules_of(figure, samples)["now"], 1 - population.chances(k)[0]
    ends = [own(tuple(one)) for one in np.sort(both[0], axis=1)[: sets // 4].tolist()]
    return row | {"single": float(np.mean([low <= truth <= high for low, high in ends]))}


def _shares(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], draws: int, truth: float
) -> tuple[float, float]:
    found = [difference_interval(a, b, samples=draws) for a, b in zip(first, second, strict=True)]
    ends = np.array([(one.low, one.high) for one in found], np.float64)
    return float(np.mean((ends[:, 0] <= truth + 1e-12) & (truth - 1e-12 <= ends[:, 1]))), float(np.ptp(ends, 1).mean())


def settings(figures: Sequence[str], problems: Sequence[int]) -> Iterator[tuple[Population, str, int, int, int]]:
    """Arguments of `covered`."""
    for figure, population, second, count, samples in itertools.product(
        figures, populations(), SECOND, problems, SAMPLES
    ):
        if (k := int(figure.partition("@")[2] or 1)) <= samples:
            yield population, second, count, samples, k


def main() -> None:
    """Print each setting as it ends, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=2000)
    parser.add_argument("--figures", nargs="+", default=["mean", "pass@2", "pass@4", "pass@8"])
    parser.add_argument("--problems", nargs="+", type=int, default=[15, 30, 100])
    options = parse(parser)
    rows = []
    for setting in settings(options.figures, options.problems):
        rows.append(row := covered(*setting, options.sets))
        said = "  ".join(f"{rule} {row[rule]:.4f}" for rule in ("before", "now", "single"))
        print(*(row[name] for name in ("figure", "population", "second", "problems", "samples")), said, flush=True)
    print(f"\n| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|")
    for figure, rule in itertools.product(options.figures, ("before", "now")):
        print(f"| {figure} | {rule} | {_summary([one for one in rows if one['figure'] == figure], rule)} |")
    write(options, rows)


COLUMNS = ("figure", "rule", "settings", "below 93 %", "above 97 %", "lowest", "mean", "width", "single in, out here")


def _summary(rows: Sequence[Row], rule: str) -> str:
    held = [float(row[rule]) for row in rows]
    own = [abs(float(row["single"]) - 0.95) <= 0.02 for row in rows]
    low, high = ([one < 0.93 for one in held], [one > 0.97 for one in held])
    apart = f"{sum(map(min, low, own))} below, {sum(map(min, high, own))} above of {sum(own)}"
    width = math.fsum(float(row[f"{rule} width"]) for row in rows) / len(rows)
    return f"{len(rows)} | {sum(low)} | {sum(high)} | {min(held):.3f} | {np.mean(held):.4f} | {width:.3f} | {apart}"


if __name__ == "__main__":
    main()
