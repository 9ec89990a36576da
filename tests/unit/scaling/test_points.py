"""Predictions beside published runs: the figures that are reached, and the constants that were fitted to them."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from bench.scale_points import Prediction, ordered_pairs, predict_memory, predict_rates, shape_of_point
from bench.step_time import POINTS, described, fit, left_out, usable
from rl_megatron.scaling.constants import FITTED
from rl_megatron.weights.layouts.parsing import model_shape

RUNS = json.loads(POINTS.read_text())


def test_errors_beside_published_runs_are_these() -> None:
    """Every term of the formulas and of the plan is in one of these numbers, which NVIDIA and others measured."""
    rates = list(predict_rates(RUNS))
    errors = np.array([abs(point.error) for point in rates])
    assert len(errors) == 60
    assert errors.mean() < 0.095
    assert np.median(errors) < 0.075
    assert ordered_pairs(rates) == (38, 38)
    memory = {sparse: [abs(p.error) for p in predict_memory(RUNS) if p.sparse == sparse] for sparse in (1, 0)}
    assert (len(memory[1]), len(memory[0])) == (10, 2)
    assert max(memory[1]) < 0.03
    assert max(memory[0]) < 0.1


def test_the_constants_are_those_of_the_fit_and_so_is_the_error_of_points_left_out() -> None:
    points = usable(RUNS)
    refitted = asdict(fit(points).constants)
    assert refitted == pytest.approx(asdict(FITTED), rel=0.01)
    assert described(left_out(points))["mean"] == pytest.approx(0.112, abs=0.003)


def test_a_points_model_has_the_sizes_of_its_config() -> None:
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"):
        point = next(point for point in RUNS if point["model"] == name)
        ours, known = shape_of_point(point), model_shape(name)
        assert ours.active_parameters == known.active_parameters
        assert (ours.family, len(ours.moe_layers), ours.num_experts) == (
            known.family,
            len(known.moe_layers),
            known.num_experts,
        )


def rate(predicted: float, measured: float, model: str = "m", release: str = "2026.08") -> Prediction:
    group = (model, "h100")
    return Prediction(name="", group=group, release=release, predicted=predicted, measured=measured, sparse=True)


def test_pairs_count_only_within_a_model_gpu_and_release_and_where_they_lie_apart() -> None:
    assert ordered_pairs([rate(1, 100), rate(2, 120)]) == (1, 1)
    assert ordered_pairs([rate(2, 100), rate(1, 120)]) == (0, 1)
    assert ordered_pairs([rate(2, 100), rate(1, 114)]) == (0, 0)
    assert ordered_pairs([rate(2, 100), rate(1, 120, "other"), rate(1, 120, release="2026.06")]) == (0, 0)
