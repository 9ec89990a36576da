"""How often the intervals of fits hold the truth, over synthetic studies of 5 seeds.

    python -m bench.fits [--studies 500] [--seeds 5]

Each design has a true R0, A, B and Cmid, about which seeds vary where it says so, and noise of evaluations. Prints the
share of studies whose 95 % interval holds each parameter, the share of fits that are refused, and of studies without a
bend the share that are not. The truth is the sigmoid of the mean curve: where seeds differ, it is flatter than theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.results import parse, write
from tools.lab.report import NAMES, Array, SeedCurve, find_fit_problem, fit_sigmoid

RATE = (0.0, 1.0)
LONG, SHORT = np.linspace(1, 40, 40), np.linspace(1, 20, 20)


@dataclass(frozen=True, kw_only=True)
class Design:
    """``between``: 1 for seeds that vary by 0.02, 0.03, 10 % and 15 % of standard deviation."""

    name: str
    compute: Array
    truth: tuple[float, float, float, float] = (0.2, 0.7, 1.5, 8.0)
    between: float = 1.0
    noise: float = 0.02

    def seed(self, rng: np.random.Generator, noise: float) -> Array:
        """One seed's values [n]."""
        floor, ceiling = np.array(self.truth[:2]) + self.between * rng.normal(size=2) * (0.02, 0.03)
        steep, middle = np.array(self.truth[2:]) * np.exp(self.between * rng.normal(size=2) * (0.1, 0.15))
        rise = 1 / (1 + (middle / self.compute) ** steep)
        return np.asarray(floor + (ceiling - floor) * rise + noise * rng.normal(size=len(self.compute)))


DESIGNS = (
    Design(name="seeds differ", compute=LONG),
    Design(name="seeds are equal", compute=LONG, between=0.0),
    Design(name="noise of 0.03, 20 points", compute=LONG[::2], noise=0.03),
    Design(name="to 2.5 Cmid", compute=SHORT),
    Design(name="steep: B = 3, Cmid = 12", compute=LONG, truth=(0.1, 0.9, 3.0, 12.0)),
)
UNBENT: dict[str, Callable[[Array], Array]] = {
    "a line in log C": lambda c: 0.2 + 0.1 * np.log(c),
    "a power law": lambda c: 0.05 * c**0.6,
    "no change": lambda c: np.full(len(c), 0.3),
}


def covered(design: Design, rng: np.random.Generator, studies: int, seeds: int) -> dict[str, object]:
    """The share of intervals that hold the truth, by parameter."""
    mean = np.mean([design.seed(rng, 0.0) for _ in range(20_000)], axis=0)
    truth = fit_sigmoid([SeedCurve(compute=design.compute, reached=mean)]).parameters
    held, refused = np.zeros(4), 0
    for _ in range(studies):
        curves = [SeedCurve(compute=design.compute, reached=design.seed(rng, design.noise)) for _ in range(seeds)]
        found = fit_sigmoid(curves, RATE).intervals()
        ends = [(found[name].low, found[name].high) for name in NAMES]
        held += [
            low is not None and high is not None and low <= t <= high
            for (low, high), t in zip(ends, truth, strict=True)
        ]
        refused += find_fit_problem(curves, RATE) is not None
    return {"design": design.name, **dict(zip(NAMES, held / studies, strict=True)), "refused": refused / studies}


def fitted_all_the_same(curve: Callable[[Array], Array], rng: np.random.Generator, studies: int, seeds: int) -> float:
    """The share of fits that are not refused."""
    fitted = 0
    for _ in range(studies):
        reached = [curve(LONG) + 0.02 * rng.normal() + 0.02 * rng.normal(size=len(LONG)) for _ in range(seeds)]
        fitted += find_fit_problem([SeedCurve(compute=LONG, reached=each) for each in reached], RATE) is None
    return fitted / studies


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    options = parse(parser)
    rng = np.random.default_rng(0)
    print("| design | R0 | A | B | Cmid | refused |\n|---|---|---|---|---|---|")
    rows = []
    for design in DESIGNS:
        rows.append(covered(design, rng, options.studies, options.seeds))
        print("| {design} | {R0:.3f} | {A:.3f} | {B:.3f} | {Cmid:.3f} | {refused:.3f} |".format(**rows[-1]), flush=True)
    print("\n| without a bend | fitted |\n|---|---|")
    for name, curve in UNBENT.items():
        share = fitted_all_the_same(curve, rng, options.studies, options.seeds)
        rows.append({"unbent": name, "fitted": share})
        print(f"| {name} | {share:.3f} |", flush=True)
    write(options, rows)


if __name__ == "__main__":
    main()
