"""A reward model's loss against its formula over pairs, whose gradient autograd takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.auxiliary import ScoreLoss
from rl_megatron.algorithms.losses import LossOutput
from tests.losses import loss_inputs

LENGTHS = [2, 3, 1, 2, 4, 1]  # three pairs
ENDS = torch.tensor(LENGTHS).cumsum(0) - 1
MARGINS = torch.tensor([0.5, 0.0, -0.25])
CENTRING = 0.1


def values() -> Tensor:
    """NaN wherever no score is read."""
    found = torch.full((sum(LENGTHS),), math.nan)
    found[ENDS] = torch.tensor([0.3, -0.2, 1.5, 2.0, -1.0, -1.25])
    return found


def loss_of(given: Tensor, kept: list[bool]) -> LossOutput:
    """Of the pairs that are ``kept``; others are masked out, as sequences that fill up a micro-batch are."""
    mask, returns = torch.zeros(len(given), dtype=torch.bool), torch.zeros(len(given))
    mask[ENDS] = torch.tensor(kept).repeat_interleave(2)
    returns[ENDS[::2]] = MARGINS
    return ScoreLoss(centring=CENTRING)(loss_inputs(LENGTHS, mask, values=given, returns=returns))


@pytest.mark.parametrize("kept", [[True] * 3, [True, False, True], [False, True, False]], ids=str)
def test_loss_gradient_and_metrics_are_those_of_the_formula(kept: list[bool]) -> None:
    given = values().requires_grad_()
    found = loss_of(given, kept)
    found.loss.backward()

    scores = values()[ENDS].requires_grad_()
    (better, worse), of_pair = scores.view(3, 2).T, torch.tensor(kept) / 3
    losses = torch.log1p(torch.exp(-(better - worse - MARGINS))) + CENTRING * (better + worse) ** 2
    (losses * of_pair).sum().backward()

    assert found.loss.item() == pytest.approx((losses * of_pair).sum().item(), rel=1e-6)
    assert given.grad is not None
    assert scores.grad is not None
    torch.testing.assert_close(given.grad[ENDS], scores.grad)
    assert given.grad.count_nonzero() == 2 * sum(kept)
    means = {
        "preference/accuracy": better > worse,
        "preference/margin": better - worse,
        "reward_model/score_mean": (better + worse) / 2,
    }
    for name, of_pairs in means.items():
        assert found.metrics[name].value.item() == pytest.approx((of_pairs * of_pair).sum().item(), abs=1e-6)
