from __future__ import annotations

import math

import pytest
import torch

from rl_megatron.algorithms.auxiliary import dpo, positive_nll, value_loss


def test_value_loss_is_the_worse_of_the_free_and_the_clipped() -> None:
    values = torch.tensor([1.0, 1.0, math.nan], requires_grad=True)
    old, returns = torch.tensor([0.5, 0.5, math.inf]), torch.tensor([0.0, 2.0, math.nan])
    loss, clipped = value_loss(values, old, returns, torch.tensor([True, True, False]), clip=0.2, num_tokens=2)
    loss.backward()
    # token 0: (1-0)² = 1 > (0.7-0)²; token 1: (1-2)² = 1 < (0.7-2)² = 1.69, whose gradient the clip removes
    assert loss.item() == pytest.approx((1 + 1.69) / 2 / 2)
    assert clipped.item() == pytest.approx(0.5)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.5, 0.0, 0.0])


def test_value_loss_without_clipping_is_half_the_squared_error() -> None:
    values, returns = torch.tensor([3.0]), torch.tensor([1.0])
    loss, clipped = value_loss(values, torch.zeros(1), returns, torch.ones(1).bool(), clip=math.inf, num_tokens=1)
    assert (loss.item(), clipped.item()) == (2.0, 0.0)


def test_positive_nll_is_the_mean_over_tokens_of_correct_completions() -> None:
    logprobs = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    loss = positive_nll(logprobs, torch.tensor([True, False, True]), num_positive_tokens=4)
    loss.backward()
    assert loss.item() == 1.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.25, 0.0, -0.25]


def test_dpo_of_two_pairs() -> None:
    chosen = torch.tensor([-1.0, -5.0], requires_grad=True)
    loss = dpo(chosen, torch.tensor([-2.0, -4.0]), torch.tensor([-1.5, -5.0]), torch.tensor([-1.0, -7.0]), num_pairs=2)
    loss.backward()
    margins = [0.1 * (1.0 + 0.5), 0.1 * (-1.0 - 2.0)]
    expected = sum(math.log(1 + math.exp(-m)) for m in margins) / 2
    assert loss.item() == pytest.approx(expected)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.1 / (1 + math.exp(m)) / 2 for m in margins])
