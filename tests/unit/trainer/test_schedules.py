"""The trainer's small rules: learning rate, seeds, and metrics over several optimizer steps."""

from __future__ import annotations

import math

import pytest

from rl_megatron.config import RunConfig
from rl_megatron.types import StepResult
from rl_megatron.update import combine, learning_rate, seed_of


def rates(**train: object) -> list[float]:
    config = RunConfig.model_validate({"train": {"steps": 10, "learning_rate": 1.0, **train}})
    return [learning_rate(config, step) for step in range(1, 11)]


def test_rate_is_constant_without_a_schedule() -> None:
    assert rates() == [1.0] * 10


def test_linear_decay_ends_one_step_before_zero() -> None:
    assert rates(lr_decay="linear") == pytest.approx([1 - i / 10 for i in range(10)])


def test_warm_up_then_decay() -> None:
    assert rates(lr_warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert rates(lr_warmup_steps=4, lr_decay="linear")[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = rates(lr_decay="cosine")
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.5)
    assert found[9] == pytest.approx(0.5 - 0.5 * math.cos(math.pi * 0.1))


def test_seeds_differ_with_each_part_and_repeat() -> None:
    seeds = [seed_of(a, b) for a in range(20) for b in range(20)]
    assert len(set(seeds)) == 400
    assert seed_of(3, 4) == seed_of(3, 4)
    assert all(0 <= s < 2**63 for s in seeds)


def test_metrics_of_a_step_are_means_and_extremes_of_its_optimizer_steps() -> None:
    results = [
        StepResult(loss=1.0, grad_norm=2.0, metrics={"ratio/min": 0.5, "ratio/max": 1.5, "entropy": 1.0}),
        StepResult(loss=3.0, grad_norm=4.0, metrics={"ratio/min": 0.7, "ratio/max": 1.9, "entropy": 2.0}),
    ]
    assert combine(results) == {"loss": 2.0, "grad_norm": 3.0, "ratio/min": 0.5, "ratio/max": 1.9, "entropy": 1.5}
