"""Fits a hardware entry to what was measured on a machine: microbenchmarks first, then steps of the real learner.

Products, attention, memory and messages have figures of their own. What no microbenchmark sees (launches, what lies
between products, the optimizer) is fitted to steps of made-up models, with the formulas of `time` and all else held.
Constants are fitted as logarithms by Levenberg's and Marquardt's method to logarithms of seconds, under Huber's loss,
and drawn weakly to where they start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from rl_megatron.scaling.hardware import Gpu
from rl_megatron.scaling.machines.calibration import (
    Curves,
    Decoded,
    LearnerProbe,
    MachineEntry,
    MachineLoad,
    Moved,
    Product,
    hardware,
)
from rl_megatron.scaling.machines.embedded import decode_parts
from rl_megatron.scaling.time import LearnerWork, step_seconds
from rl_megatron.types import ParallelDims

Vector = NDArray[np.float64]
_NOISE, _HUBER = 0.1, 0.15
_LARGE_BYTES = 4 << 20  # of a copy that caches do not hold
_LARGE_FLOPS = 1e8  # of a product whose passes are compared
_OF_STEPS = {
    "passes": 30.0,
    "inside": 1.0,
    "host": 1e-3,
    "each_expert": 2e-4,
    "adam": 1.0,
    "logits": 2.0,
    "fixed": 1e-2,
}
"""Constants that are fitted to steps, and where each starts."""


def fit_load(curves: Curves, *, device: str, dtype: str) -> MachineLoad:
    """The entry of one load of a machine."""
    flops, tile, operation, backward = fit_products(curves.products)
    large = [m for m in curves.memory if m.num_bytes >= _LARGE_BYTES] or curves.memory
    memory_rate = median(2 * m.num_bytes / m.seconds for m in large) / 1e9
    attention = median(_attended_flops(a.tokens, a.length, a.heads, a.head_dim) / a.both for a in curves.attention)
    latency, gathered = fit_messages(curves.all_gather)
    _, exchanged = fit_messages(curves.all_to_all)
    entry = MachineEntry(
        flops=flops,
        memory_rate=memory_rate,
        link=gathered / 1e9,
        tile=tile,
        attention=attention / flops,
        plain=exchanged / gathered,
        backward=backward,
        operation=operation,
        latency=4 * latency if curves.ranks > 1 else 0.0,
        **_OF_STEPS,
        decode_layer=1e-4,
        decode_token=1e-4,
        decode_products=1.0,
    )
    gpu = hardware(entry, name="fitted", device=device, memory=1.0, ranks=curves.ranks)
    constants = fit_steps(gpu, [p for p in curves.probes if p.ep == 1], dtype, _OF_STEPS)
    if split := [p for p in curves.probes if p.ep > 1]:
        known = replace(gpu, constants=replace(gpu.constants, **constants))
        # Beside bytes on a link, tokens are permuted and sorted, as they are not where one rank has all experts.
        constants |= fit_steps(known, split, dtype, {"latency": max(entry.latency, 1e-4), "plain": entry.plain})
    decoded = fit_decoding(gpu, curves.decoded) if curves.decoded else {}
    return MachineLoad(curves=curves, entry=entry.model_copy(update={**constants, **decoded}))


def fit_products(rows: Sequence[Product]) -> tuple[float, float, float, float]:
    """FLOP/s of large products, the rows at which a product has half of that, seconds of a product beside its own, and
    seconds of the backward pass over those of the forward pass."""
    sizes = np.array([(p.rows, p.wide, p.deep) for p in rows], dtype=float)
    m, a, b = sizes.T
    narrow = np.minimum(a, b)

    def seconds(x: Vector) -> Vector:
        rate, tile, operation = x
        return np.asarray(2 * m * a * b / rate * (1 + tile / m) * (1 + tile / narrow) + operation)

    measured = np.array([p.forward for p in rows])
    best = float((2 * m * a * b / measured).max())
    rate, tile, operation = least(seconds, np.array([best, 10.0, 1e-5]), measured, width=3.0)
    large = [p for p in rows if 2 * p.rows * p.wide * p.deep >= _LARGE_FLOPS] or rows
    return float(rate), float(tile), float(operation), median((p.both - p.forward) / p.forward for p in large)


def fit_messages(rows: Sequence[Moved]) -> tuple[float, float]:
    """Seconds of a message without bytes, and bytes per second. Without messages: none, and 1e12."""
    if not rows:
        return 0.0, 1e12
    sizes, measured = np.array([m.num_bytes for m in rows], dtype=float), np.array([m.seconds for m in rows])

    def seconds(x: Vector) -> Vector:
        return np.asarray(x[0] + sizes / x[1])

    start = np.array([float(measured.min()), float((sizes / measured).max())])
    latency, rate = least(seconds, start, measured, width=3.0)
    return float(latency), float(rate)


def fit_steps(gpu: Gpu, probes: Sequence[LearnerProbe], dtype: str, start: Mapping[str, float]) -> dict[str, float]:
    """The constants named in ``start`` with which `time` gives the seconds of ``probes``, to train and to score."""
    names = list(start)

    def seconds(x: Vector) -> Vector:
        own = replace(gpu, constants=replace(gpu.constants, **dict(zip(names, map(float, x), strict=True))))
        works = [probe_work(p, own, dtype) for p in probes]
        train = [step_seconds(work) for work in works]
        score = [step_seconds(replace(work, scored=True)) for work in works]
        return np.array([*train, *score])

    measured = np.array([*(p.train for p in probes), *(p.score for p in probes)])
    found = least(seconds, np.array(list(start.values())), measured, width=2.0)
    return dict(zip(names, map(float, found), strict=True))


def probe_work(probe: LearnerProbe, gpu: Gpu, dtype: str) -> LearnerWork:
    """The learner's work of a probe."""
    return LearnerWork(
        shape=probe.sizes.shape,
        dims=ParallelDims(dp=probe.dp, ep=probe.ep),
        gpu=gpu,
        tokens=probe.tokens / probe.micro_batches,
        length=probe.length,
        micro_batches=probe.micro_batches,
        precision="float32" if dtype == "float32" else "bfloat16",
        dispatcher="alltoall",
        natural=probe.ep > 1,
    )


def fit_decoding(gpu: Gpu, rows: Sequence[Decoded]) -> dict[str, float]:
    """``decode_layer``, ``decode_token`` and ``decode_products`` of the embedded engine."""
    parts = np.array([decode_parts(d.sizes.shape, gpu, d.rows, d.context) for d in rows])
    layers = np.array([float(d.sizes.layers) for d in rows])

    def seconds(x: Vector) -> Vector:
        return np.asarray(x[0] * layers + x[1] + x[2] * parts)

    found = least(seconds, np.array([2e-4, 2e-4, 1.0]), np.array([d.seconds for d in rows]), width=2.0)
    return dict(zip(("decode_layer", "decode_token", "decode_products"), map(float, found), strict=True))


def least(seconds: Callable[[Vector], Vector], start: Vector, measured: Vector, *, width: float) -> Vector:
    """Positive constants with which ``seconds`` gives ``measured``, both as logarithms.

    ``width`` is the standard deviation with which the constants' logarithms are drawn to ``start``'s.
    """
    goal, x, damping, step = np.log(measured), np.zeros(len(start)), 1e-2, 1e-4

    def errors(at: Vector) -> Vector:
        return np.asarray(np.log(seconds(start * np.exp(at))) - goal)

    def loss(of: Vector, at: Vector) -> float:
        size = np.abs(of)
        huber = np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))
        return float(huber.sum() / _NOISE**2 + (at**2).sum() / 2 / width**2)

    here = errors(x)
    best = loss(here, x)
    for _ in range(40):
        slopes = np.stack([(errors(x + step * unit) - here) / step for unit in np.eye(len(x))], axis=1)
        weights = np.minimum(1, _HUBER / np.maximum(np.abs(here), 1e-12)) / _NOISE**2
        hessian = slopes.T @ (slopes * weights[:, None]) + np.eye(len(x)) / width**2
        gradient = slopes.T @ (weights * here) + x / width**2
        for _ in range(12):
            moved = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            to = x - np.clip(moved, -1.0, 1.0)
            there = errors(to)
            if (value := loss(there, to)) < best:
                break
            damping *= 4
        else:
            break
        done, x, here, best, damping = best - value < 1e-5 * best + 1e-9, to, there, value, max(1e-9, damping / 8)
        if done:
            break
    return np.asarray(start * np.exp(x))


def _attended_flops(tokens: int, length: int, heads: int, head_dim: int) -> float:
    """Of both passes of causal attention; the backward pass has five products for the forward's two."""
    return 3.5 * 2 * heads * 2 * head_dim * (length / 2) * tokens
