"""Predictions beside published runs: the figures that are reached, and what a file of points must have."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from bench.step_time import POINTS, described, fit, left_out, usable
from rl_megatron.errors import ConfigError
from rl_megatron.scaling.constants import FITTED, LEFT_OUT
from rl_megatron.scaling.published.points import (
    Prediction,
    interval,
    ordered_pairs,
    predictions,
    read_points,
    shape_of_point,
    summary,
)
from rl_megatron.scaling.published.rl import rl_predictions
from rl_megatron.weights.layouts.parsing import model_shape

RUNS = read_points(POINTS)
NEVER_READ = ("etp", "step_s", "allocated_after_step_gb", "mfu", "rl", "notes", "source")
TRAINED = next(point for point in RUNS if point["kind"] == "train" and point["tokens_per_s_per_gpu"])


def test_errors_beside_published_runs_are_these() -> None:
    """Every term of the formulas and of the plan is in one of these numbers, which NVIDIA and others measured."""
    found = list(predictions(RUNS))
    rates = np.array([abs(point.error) for point in found if point.kind == "throughput"])
    assert len(rates) == 60
    assert rates.mean() < 0.095
    assert np.median(rates) < 0.075
    assert ordered_pairs(found) == (38, 38)
    memory = {sparse: [abs(p.error) for p in found if p.kind == "memory" and p.sparse == sparse] for sparse in (1, 0)}
    assert (len(memory[1]), len(memory[0])) == (10, 2)
    assert max(memory[1]) < 0.03
    assert max(memory[0]) < 0.1


def test_errors_beside_published_steps_of_reinforcement_learning_are_these() -> None:
    """NeMo-RL's; nothing is fitted to them, and the bar is 30 %."""
    refused: list[str] = []
    found = list(rl_predictions(RUNS, refused))
    sizes = [abs(point.error) for point in found]
    assert len(sizes) == 11  # in bfloat16, with lengths
    assert sum(sizes) / len(sizes) < 0.28
    measured = {point.name: point.measured for point in found}
    assert measured["nemorl-deepseek-v3-h100-256-off0"] == 134  # as NeMo-RL's page has it
    assert not refused
    assert "11 points: mean error 27.6% (bar 30 %)" in summary(found)[0]
    assert ordered_pairs(found) == (0, 0)


def test_a_published_step_that_cannot_be_is_refused_with_the_reason() -> None:
    """As NeMo-RL's page has it: 16 ranks of experts, of a learner on half of 16 GPUs."""
    (given,) = (point for point in RUNS if point["id"] == "nemorl-qwen3-30b-a3b-gb200-16-off1")
    refused: list[str] = []
    assert not list(rl_predictions([{**given, "ep": 16}], refused))
    assert "ep*etp = 16*1 = 16 does not divide tp*cp*dp = 1*1*8 = 8" in refused[0]


def test_what_a_published_step_says_of_its_engines_counts() -> None:
    """Of 192 GPUs 64 sample; with half of them the learner has fewer, and trains longer."""
    (given,) = (point for point in RUNS if point["id"] == "nemorl-qwen3-30b-a3b-h100-192-off8")
    (as_it_is,) = rl_predictions([given])
    (halves,) = rl_predictions([{**given, "rl": {k: v for k, v in given["rl"].items() if k != "engine_gpus"}}])
    assert as_it_is.predicted > 1.2 * halves.predicted  # engines set the pace: 64 take 1.5 times as long as 96


def test_the_constants_are_those_of_the_fit_and_so_is_the_error_of_points_left_out() -> None:
    points = usable(RUNS)
    refitted = asdict(fit(points).constants)
    assert refitted == pytest.approx(asdict(FITTED), rel=0.01)
    assert described(left_out(points))["mean"] == pytest.approx(LEFT_OUT, abs=0.003)


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
    return Prediction(
        name="", kind="throughput", group=group, release=release, predicted=predicted, measured=measured, sparse=True
    )


def test_pairs_count_only_within_a_model_gpu_and_release_and_where_they_lie_apart() -> None:
    assert ordered_pairs([rate(1, 100), rate(2, 120)]) == (1, 1)
    assert ordered_pairs([rate(2, 100), rate(1, 120)]) == (0, 1)
    assert ordered_pairs([rate(2, 100), rate(1, 114)]) == (0, 0)
    assert ordered_pairs([rate(2, 100), rate(1, 120, "other"), rate(1, 120, release="2026.06")]) == (0, 0)
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson's, as Agresti and Coull tabulate it


def test_a_summary_has_each_bar_beside_its_figure() -> None:
    said = summary([rate(90, 100), rate(50, 40)])
    assert said[0] == "throughput, 2 points: mean error 17.5% (bar 12 %), median 17.5%, worst 25%"
    assert said[2].startswith(
        "order of 1 pairs of one model, GPU and release that lie 15 % apart: 100% right (bar 80 %)"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "must be a list of points"),
        ('[{"id": "x"}]', "point 0, x: lacks cp, dispatcher, dp, ep, ep_overlap, global_batch, gpu"),
        ('[{"kind": "train"}]', "point 0, without id: lacks cp"),
        (json.dumps([RUNS[1], {**RUNS[0], "gpu": "b100"}]), "point 1, .*: gpu=b100; known: a100, h100"),
        (
            json.dumps([{**RUNS[0], "shape": {"layers": 2}}]),
            "shape lacks attention, dense_ffn, dense_layers, expert_ffn",
        ),
        (json.dumps([{**RUNS[0], "released": "soon"}]), "released='soon' must be a year and a month, as in 2026.04"),
        (json.dumps([{**RUNS[0], "tp": None}]), "tp=None must be a whole number above 0"),
        (json.dumps([{**TRAINED, "global_batch": None}]), "global_batch=None must be a whole number above 0"),
    ],
)
def test_a_file_of_another_form_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "points.json").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        read_points(tmp_path / "points.json")


def test_every_key_that_a_point_lacks_is_named(tmp_path: Path) -> None:
    """Whichever it is: either it is read nowhere, or its file is refused."""
    for key in TRAINED:
        (tmp_path / "points.json").write_text(json.dumps([{k: v for k, v in TRAINED.items() if k != key}]))
        if key in NEVER_READ:
            assert list(predictions(read_points(tmp_path / "points.json")))
            continue
        with pytest.raises(ConfigError, match=f"lacks {key}"):
            read_points(tmp_path / "points.json")
    for key in TRAINED["shape"]:
        shape = {k: v for k, v in TRAINED["shape"].items() if k != key}
        (tmp_path / "points.json").write_text(json.dumps([{**TRAINED, "shape": shape}]))
        with pytest.raises(ConfigError, match=f"shape lacks {key}"):
            read_points(tmp_path / "points.json")


def test_a_layout_that_cannot_be_is_named_and_the_others_are_compared() -> None:
    golden = next(point for point in RUNS if point["id"] == "golden-8x22b-h100")
    refused: list[str] = []
    found = list(predictions([{**golden, "id": "odd", "ep": 3}, golden], kinds=("memory",), refused=refused))
    assert [point.name for point in found] == ["golden-8x22b-h100"]
    assert len(refused) == 1
    assert "odd: learner: ep*etp = 3*2 = 6 does not divide" in refused[0]
