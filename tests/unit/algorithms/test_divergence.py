from __future__ import annotations

import math

import pytest
import torch

from rl_megatron.algorithms.kl import ESTIMATORS


@pytest.mark.parametrize(("name", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531), ("abs", 0.5)])
def test_worked_values(name: str, expected: float) -> None:
    value = ESTIMATORS[name](torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(name: str) -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.1, 0.3, 0.6]).double()
    expected = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert (p * ESTIMATORS[name](p.log(), q.log())).sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_extreme_differences_stay_finite_in_value_and_gradient(name: str, gap: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    value = ESTIMATORS[name](logprobs, logprobs.detach() + gap)
    value.backward()
    assert torch.isfinite(value).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_k2_has_the_gradient_of_the_divergence_in_expectation() -> None:
    """Its sampled gradient, d times the score, is what makes k2 the estimator to put into a loss."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)
    logp = logits.log_softmax(0)
    (sampled,) = torch.autograd.grad((logp.detach().exp() * ESTIMATORS["k2"](logp, reference)).sum(), logits)
    torch.testing.assert_close(sampled, expected)
