"""The trainer's small rules: learning rate, seeds, and metrics over several optimizer steps."""

from __future__ import annotations

import math

import pytest
import torch

from rl_megatron.algorithms.losses import MEANS_OF_RATIOS
from rl_megatron.algorithms.ratios import histogram
from rl_megatron.config.run import RunConfig
from rl_megatron.training.measures import Made, critic_row, policy_row
from rl_megatron.training.optimizer_steps import critic_learning_rate, learning_rate, steps_of
from rl_megatron.types import Counts, Metric, StepResult


def rates(count: int = 10, **train: object) -> list[float]:
    config = RunConfig.model_validate({"train": {"steps": 10, "learning_rate": 1.0, **train}})
    return [learning_rate(config, step) for step in range(1, count + 1)]


def test_rate_is_constant_without_a_schedule() -> None:
    assert rates() == [1.0] * 10


def test_linear_decay_ends_one_step_before_zero() -> None:
    assert rates(lr_decay="linear") == pytest.approx([1 - i / 10 for i in range(10)])


def test_warm_up_then_decay() -> None:
    assert rates(lr_warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    for decay in ("linear", "cosine"):
        assert rates(lr_warmup_steps=4, lr_decay=decay)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates(lr_warmup_steps=4, lr_decay="linear")[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


@pytest.mark.parametrize(
    ("epochs", "rows", "batch_size", "steps"),
    [
        (1.1, 100, 10, 11),
        (2.2, 7000, 100, 154),
        (0.29, 100, 1, 29),
        (1.0, 100, 30, 4),
        (1e-7, 100, 10, 1),
        (3, 7, 7, 3),
    ],
)
def test_epochs_take_the_steps_that_hold_their_rows(epochs: float, rows: int, batch_size: int, steps: int) -> None:
    assert steps_of(epochs, rows, batch_size) == steps


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = rates(lr_decay="cosine")
    assert found[0] == 1.0
    assert found[5] == pytest.approx(0.5)
    assert found[9] == pytest.approx(0.5 - 0.5 * math.cos(math.pi * 0.1))


def test_the_critic_has_a_rate_of_its_own_on_the_same_schedule() -> None:
    config = RunConfig.model_validate(
        {
            "train": {"steps": 4, "learning_rate": 1.0, "lr_decay": "linear"},
            "algorithm": {
                "credit": "gae",
                "advantage_mean": "none",
                "advantage_std": "none",
                "critic": {"learning_rate": 8.0},
            },
        }
    )
    assert [critic_learning_rate(config, step) for step in range(1, 5)] == pytest.approx([8, 6, 4, 2])
    assert [learning_rate(config, step) for step in range(1, 5)] == pytest.approx([1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
@pytest.mark.parametrize("warm", [0, 3])
def test_the_policys_schedule_begins_after_the_steps_of_the_critic_alone(decay: str, warm: int) -> None:
    def config(alone: int) -> RunConfig:
        train = {"steps": 10 + alone, "learning_rate": 1.0, "lr_warmup_steps": warm, "lr_decay": decay}
        algorithm = {"credit": "gae", "advantage_mean": "none", "advantage_std": "none"}
        return RunConfig.model_validate(
            {"train": train, "algorithm": {**algorithm, "critic": {"only_steps": alone, "learning_rate": 8.0}}}
        )

    found = [learning_rate(config(5), step) for step in range(1, 16)]
    assert found == [0.0] * 5 + [learning_rate(config(0), step) for step in range(1, 11)]
    assert found[5] == (1 / 3 if warm else 1.0)
    of_critic = [critic_learning_rate(config(5), step) for step in range(1, 16)]
    assert of_critic == [8.0 * rate for rate in rates(15, steps=15, lr_warmup_steps=warm, lr_decay=decay)]


def test_quantiles_and_effective_samples_are_those_of_all_optimizer_steps_together() -> None:
    """Half of the ratios are 1, half are e^0.1: counts of both minibatches decide, not the mean of their medians."""
    first, second = torch.zeros(30), torch.full((10,), 0.1)
    results = [
        Made(
            {
                "loss": Metric(value=0.0),
                **{name: Metric(value=0.0) for name in MEANS_OF_RATIOS},
                "ratio/share": Metric(value=1.0),
                "ratio/mean": Metric(value=x.exp().mean().item()),
                "ratio/second_moment": Metric(value=(2 * x).exp().mean().item()),
                "ratio": Metric(value=tuple(histogram(x, torch.ones_like(x).bool()).tolist()), over="histogram"),
            },
            StepResult(grad_norm=1.0),
        )
        for x in (first, second)
    ]
    row = policy_row(results)
    assert row["ratio/p50"] == 1.0
    assert row["ratio/p99"] == pytest.approx(math.exp(0.1), rel=0.006)
    mean, square = (1 + math.exp(0.1)) / 2, (1 + math.exp(0.2)) / 2
    assert row["ratio/effective_fraction"] == pytest.approx(mean**2 / square)
    assert "ratio/second_moment" not in row


def test_each_metric_of_several_optimizer_steps_is_reduced_as_it_says_whatever_its_name() -> None:
    first: dict[str, Metric[float | Counts]] = {
        "a/max": Metric(value=0.5, over="min"),
        "b/min": Metric(value=1.5, over="max"),
        "c/sum": Metric(value=1.0),
        "d": Metric(value=2.0, over="sum"),
        "e": Metric(value=1.0, weight=3.0),
    }
    second: dict[str, Metric[float | Counts]] = {
        "a/max": Metric(value=0.7, over="min"),
        "b/min": Metric(value=1.9, over="max"),
        "c/sum": Metric(value=2.0),
        "d": Metric(value=3.0, over="sum"),
        "e": Metric(value=5.0, weight=1.0),
    }
    results = [
        Made(
            first | {"loss": Metric(value=1.0)},
            StepResult(grad_norm=2.0, metrics={"moe/load_imbalance": Metric(value=1.0)}),
        ),
        Made(
            second | {"loss": Metric(value=3.0)},
            StepResult(grad_norm=4.0, metrics={"moe/load_imbalance": Metric(value=2.0)}),
        ),
    ]
    own = {"a/max": 0.5, "b/min": 1.9, "c/sum": 1.5, "d": 5.0, "e": 2.0}
    assert policy_row(results) == {"loss": 2.0, "grad_norm": 3.0, "moe/load_imbalance": 1.5, **own}
    assert critic_row(results) == {"critic/loss": 2.0, "critic/grad_norm": 3.0, **own}


def test_a_metric_is_of_the_optimizer_steps_that_have_it() -> None:
    """An observer may have nothing to say of a step, or a mean over nothing."""
    nothing = Metric(value=math.nan, weight=0.0)
    said: list[dict[str, Metric[float]]] = [
        {"observer/first": Metric(value=1.0), "observer/empty": nothing},
        {"observer/second": Metric(value=2.0), "observer/empty": nothing, "observer/in_part": nothing},
        {"observer/second": Metric(value=4.0), "observer/in_part": Metric(value=5.0, weight=3.0)},
    ]
    row = policy_row([Made({"loss": Metric(value=0.0)}, StepResult(grad_norm=1.0, metrics=one)) for one in said])
    own = {"observer/first": 1.0, "observer/second": 3.0, "observer/in_part": 5.0}
    assert row == {"loss": 0.0, "grad_norm": 1.0, **own}
