"""Predictions beside published runs: the figures that are reached, and the constants that were fitted to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from bench.scale_points import Prediction, dims_of_point, ordered_pairs, predict_rates, shape_of_point
from bench.step_time import POINTS, described, fit, left_out, usable
from rl_megatron.config.run import RunConfig
from rl_megatron.scaling.constants import FITTED
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.memory import footprints
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


def learner_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """Without recomputing attention's core, which keeps no more than its inputs (FlashAttention), or norms, which are
    parts of TransformerEngine's linears."""
    d, layers, recompute = dims_of_point(point), point["shape"]["layers"], point["recompute"] or []
    again: dict[str, Any] = {"uniform": 1} if recompute == "full" else dict.fromkeys(recompute, True)
    each, rest = divmod(layers, d.pp * d.vpp)  # the last chunks have fewer, beside the output layer
    return {
        **{key: getattr(d, key) for key in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")},
        "stage_layers": "+".join(str(each + (i < rest)) for i in range(d.pp * d.vpp)) if rest else None,
        "device": "cuda",
        "dtype": "bfloat16",
        "gradient_dtype": "bfloat16" if point["gradient_dtype"] == "bf16" else "float32",
        "layers": "auto",
        "max_tokens_per_micro_batch": max(2, (point["micro_batch"] or 0) * (point["sequence_tokens"] or 0)),
        "recompute": {name: on for name, on in again.items() if name not in ("core_attn", "layernorm")},
        "offload": {"optimizer": (point["offload"] or {}).get("optimizer_fraction", 0)},
    }


def planned_bytes(point: Mapping[str, Any]) -> float:
    """Of the fullest GPU, or of the last stage's where the point is logged there. In float8 layers keep inputs of
    products in one byte and the others in two; moments in bfloat16 take half."""
    rollout = {"max_prompt_tokens": 1, "max_new_tokens": 1}  # which must fit into a micro-batch
    config = RunConfig.model_validate({"learner": learner_of(point), "rollout": rollout})
    shares = {"parameters": 1.0, "gradients": 1.0, "optimizer": 1.0, "activations": 1.0, "logits": 1.0}
    if "8" in point["precision"]:
        shares["activations"] = 1.35 / 2
    if point["optimizer_moments"] == "bf16":
        shares["optimizer"] = 8 / 12
    ranks = footprints(config, shape_of_point(point))
    totals = [sum(rank.terms[term] * share for term, share in shares.items()) for rank in ranks]
    return totals[-1] if "last rank" in (point.get("notes") or "") else max(totals)


def test_planned_memory_is_near_published_peaks() -> None:
    known = [point for point in RUNS if point["peak_memory_gb"] and point["shape"].get("vocab")]
    for sparse, count, bar in ((True, 10, 0.03), (False, 2, 0.1)):
        points = [point for point in known if bool(point["shape"]["experts"]) == sparse]
        assert len(points) == count
        assert max(abs(planned_bytes(point) / GB / point["peak_memory_gb"] - 1) for point in points) < bar


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
    return Prediction(name="", group=group, release=release, predicted=predicted, measured=measured)


def test_pairs_count_only_within_a_model_gpu_and_release_and_where_they_lie_apart() -> None:
    assert ordered_pairs([rate(1, 100), rate(2, 120)]) == (1, 1)
    assert ordered_pairs([rate(2, 100), rate(1, 120)]) == (0, 1)
    assert ordered_pairs([rate(2, 100), rate(1, 114)]) == (0, 0)
    assert ordered_pairs([rate(2, 100), rate(1, 120, "other"), rate(1, 120, release="2026.06")]) == (0, 0)
