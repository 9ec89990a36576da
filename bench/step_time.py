"""Fit the constants of `tools.planner.time` to published runs, and print the errors, also of runs left out.

    python -m bench.step_time [--points FILE] [--json FILE]      # a quarter of a minute

Six constants are free, the others are held at `PRIOR`, whose values are physical ones: shares of peaks that kernels
reach in papers and microbenchmarks. Free ones are drawn back to them (a standard deviation of 35 %), as 60 points are
few. The loss is Huber's of the logarithm of predicted over measured, with a model's points weighted by one over the
root of their number; the solver is Levenberg's and Marquardt's. In each of four folds a quarter of the pairs (model,
GPU) is left out. Then each model is left out in turn: the errors of its points, and how many of its pairs are predicted
in order. A file of `--points` may have steps of reinforcement learning as well, to which nothing is fitted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.results import parse, write
from bench.scale_points import Points, Prediction, ordered_pairs, predict_rates, predict_rl_steps
from rl_megatron.evaluation.figures import share_interval
from tools.planner.hardware import PRIOR, Constants

POINTS = Path(__file__).with_name("published_runs.json")
FREE = ("gemm", "gemm_fp8", "attention", "links", "imbalance", "fixed")
SHARES = {"gemm": 0.92, "gemm_fp8": 0.92, "attention": 0.9, "links": 0.9}  # most that they can be
WIDTH, NOISE, HUBER = 0.35, 0.15, 0.1


@dataclass(frozen=True)
class Fit:
    """Constants, and the log of predicted over measured of the points that they are fitted to."""

    constants: Constants
    errors: np.ndarray


def usable(points: Points) -> list[Mapping[str, Any]]:
    """Points with a rate to compare."""
    names = {point.name for point in predict_rates(points, PRIOR)}
    return [point for point in points if point["id"] in names]


def logs(points: Points, constants: Constants) -> np.ndarray:
    """Log of predicted over measured rates."""
    return np.array([math.log(p.predicted / p.measured) for p in predict_rates(points, constants)])


def moved(x: np.ndarray) -> Constants:
    """The constants whose free ones are exp(x) times their priors."""
    values = {name: getattr(PRIOR, name) * math.exp(by) for name, by in zip(FREE, x, strict=True)}
    return replace(PRIOR, **{name: min(value, SHARES.get(name, math.inf)) for name, value in values.items()})


def loss(errors: np.ndarray, weights: np.ndarray, x: np.ndarray) -> float:
    """What the fit makes smallest."""
    size = np.abs(errors)
    huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
    return float((weights * huber).sum() / NOISE**2 + (x**2).sum() / 2 / WIDTH**2)


def fit(points: Points) -> Fit:
    """The constants for usable ``points``."""
    count = Counter(str(point["model"]) for point in points)
    weights = np.array([count[str(point["model"])] ** -0.5 for point in points])
    weights /= weights.mean()
    x, damping, step = np.zeros(len(FREE)), 1e-2, 0.02
    errors = logs(points, moved(x))
    best = loss(errors, weights, x)
    for _ in range(25):
        slopes = [(logs(points, moved(x + step * unit)) - errors) / step for unit in np.eye(len(FREE))]
        jacobian = np.stack(slopes, axis=1)
        robust = weights * np.minimum(1, HUBER / np.maximum(np.abs(errors), 1e-9)) / NOISE**2
        hessian = jacobian.T @ (jacobian * robust[:, None]) + np.eye(len(FREE)) / WIDTH**2
        gradient = jacobian.T @ (robust * errors) + x / WIDTH**2
        for _ in range(6):
            to = x - np.clip(np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient), -0.5, 0.5)
            there = logs(points, moved(to))
            if (value := loss(there, weights, to)) < best:
                break
            damping *= 5
        else:
            break
        done, x, errors, best, damping = best - value < 1e-3, to, there, value, max(1e-4, damping / 5)
        if done:
            break
    return Fit(moved(x), errors)


def left_out(points: Points, folds: int = 4) -> np.ndarray:
    """Errors of each point with the constants of a fit without its model and GPU."""
    pairs = sorted({(str(p["model"]), str(p["gpu"])) for p in points})
    out = np.zeros(len(points))
    for fold in range(folds):
        held = set(pairs[fold::folds])
        there = [(p["model"], p["gpu"]) in held for p in points]
        constants = fit([p for p, out_of in zip(points, there, strict=True) if not out_of]).constants
        out[np.array(there)] = logs([p for p, out_of in zip(points, there, strict=True) if out_of], constants)
    return out


def without_own_model(points: Points) -> dict[str, list[Prediction]]:
    """Returns each model's predictions by the constants of a fit without that model's points."""
    found = {}
    for model in sorted({str(point["model"]) for point in points}):
        constants = fit([point for point in points if point["model"] != model]).constants
        found[model] = [*predict_rates([point for point in points if point["model"] == model], constants)]
    return found


def model_rows(kind: str, found: Mapping[str, Sequence[Prediction]]) -> Iterator[dict[str, object]]:
    """Yields for each model, and for all, the mean error and the pairs in order. Order is within a model."""
    orders = {model: ordered_pairs(rates) for model, rates in found.items()}
    right, pairs = (sum(counts) for counts in zip(*orders.values(), strict=True))
    every = [rate for rates in found.values() for rate in rates]
    for model, rates, order in [*((m, r, orders[m]) for m, r in found.items()), ("all", every, (right, pairs))]:
        errors = np.array([abs(rate.error) for rate in rates])
        row = {"kind": kind, "left out": model, "points": len(errors), "mean": float(errors.mean())}
        yield {**row, "right": order[0], "pairs": order[1]}


def described(errors: np.ndarray) -> dict[str, float]:
    """Of predicted rates over measured ones, less 1: mean and median of the size, the worst, and the bias."""
    relative = np.expm1(errors)
    worst = relative[np.argmax(np.abs(relative))]
    size = np.abs(relative)
    bias = math.expm1(float(errors.mean()))
    return {"mean": float(size.mean()), "median": float(np.median(size)), "worst": float(worst), "bias": bias}


def main() -> None:
    """Fit, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=Path, default=POINTS)
    args = parse(parser)
    runs = json.loads(args.points.read_text(encoding="utf-8"))
    points = usable(runs)
    found = fit(points)
    rows: list[dict[str, object]] = []
    for name, errors, bar in (("given", found.errors, 0.12), ("left out", left_out(points), 0.15)):
        row = {"points": name, "count": len(points), **described(errors), "bar": bar}
        rows.append(row)
        print(" ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    right, total = ordered_pairs([*predict_rates(points, found.constants)])
    of_pairs = share_interval([float(n < right) for n in range(total)])
    low, high = of_pairs.low, of_pairs.high
    print(f"order: {right} of {total} pairs right, 95 % interval {low:.2f} to {high:.2f}; bar 0.80")
    rows.append({"right": right, "pairs": total, "low": low, "high": high, "bar": 0.8})
    steps: dict[str, list[Prediction]] = {}
    for step in predict_rl_steps(runs):
        steps.setdefault(step.group[0], []).append(step)
    for kind, rates in (("training", without_own_model(points)), ("RL steps", steps)):
        for row in model_rows(kind, rates) if rates else ():
            rows.append(row)
            line = "{kind}, left out {left out}: {points} points, mean error {mean:.3f}, order {right} of {pairs}"
            print(line.format(**row))
    for name, value in asdict(found.constants).items():
        print(f"    {name}={value:.3g},{'' if name in FREE else '  # held'}")
    write(args, [*rows, asdict(found.constants)])


if __name__ == "__main__":
    main()
