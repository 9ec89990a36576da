"""The critic's loss and DPO against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.auxiliary import ValueLoss
from rl_megatron.algorithms.losses import loss_of
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.types import LossInputs
from tests.losses import loss_inputs
from tests.rows import pair_loss


def test_value_loss_is_the_worse_of_the_free_and_the_clipped() -> None:
    values = torch.tensor([1.0, 1.0, math.nan], requires_grad=True)
    old, returns = torch.tensor([0.5, 0.5, math.inf]), torch.tensor([0.0, 2.0, math.nan])
    batch = loss_inputs([3], [True, True, False], values=values, old_values=old, returns=returns)
    output = ValueLoss(clip=0.2)(batch)
    output.loss.backward()
    # token 0: (1-0)² = 1 > (0.7-0)²; token 1: (1-2)² = 1 < (0.7-2)² = 1.69, whose gradient the clip removes
    assert output.loss.item() == pytest.approx((1 + 1.69) / 2 / 2)
    assert output.metrics["critic/clip_fraction"].value.item() == pytest.approx(0.5)
    assert output.metrics["critic/value_mean"].value.item() == pytest.approx(1.0)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.5, 0.0, 0.0])


def test_value_loss_without_clipping_is_half_the_squared_error() -> None:
    batch = loss_inputs([1], [True], values=torch.tensor([3.0]), old_values=torch.zeros(1), returns=torch.ones(1))
    output = ValueLoss()(batch)
    assert (output.loss.item(), output.metrics["critic/clip_fraction"].value.item()) == (2.0, 0.0)


def test_a_column_that_the_batch_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="returns"):
        ValueLoss()(loss_inputs([1], [True], values=torch.ones(1)))
    with pytest.raises(ValueError, match="ref_logprobs"):
        pair_loss(0.1)(loss_inputs([1, 1], [True, True]))


def pairs() -> tuple[Tensor, LossInputs]:
    """Two pairs, chosen first, and an odd sequence of padding; garbage outside the mask."""
    logprobs = torch.tensor([math.nan, -0.5, -0.5, -2.0, -5.0, -1.0, -3.0, math.inf], requires_grad=True)
    ref = torch.tensor([math.inf, -1.0, -0.5, -1.0, -5.0, -3.0, -4.0, math.nan])
    mask = [False, True, True, True, True, True, True, False]
    return logprobs, loss_inputs([3, 1, 1, 2, 1], mask, logprobs=logprobs, ref_logprobs=ref)


def test_dpo_of_two_pairs() -> None:
    logprobs, batch = pairs()
    batch = replace(batch, num_sequences=4)  # the global number leaves padding out
    output = pair_loss(0.1)(batch)
    output.loss.backward()
    margins = [0.1 * ((-1.0 + 2.0) - (-1.5 + 1.0)), 0.1 * ((-5.0 + 4.0) - (-5.0 + 7.0))]
    assert output.loss.item() == pytest.approx(sum(math.log(1 + math.exp(-m)) for m in margins) / 2)
    slopes = [0.1 / (1 + math.exp(m)) / 2 for m in margins]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(
        [0, -slopes[0], -slopes[0], slopes[0], -slopes[1], slopes[1], slopes[1], 0]
    )
    assert output.metrics["preference/accuracy"].value.item() == pytest.approx(0.5)
    assert output.metrics["preference/margin"].value.item() == pytest.approx(sum(margins) / 2)


@pytest.mark.parametrize("without", [0, 1], ids=["chosen", "rejected"])
def test_a_pair_without_a_trained_token_on_one_side_is_padding(without: int) -> None:
    sides = [side == without for side in (0, 1)]
    mask = [not sides[0], not sides[0], not sides[1], True, True]
    logprobs, ref = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0], requires_grad=True), torch.zeros(5)
    batch = loss_inputs([2, 1, 1, 1], mask, num_sequences=2, logprobs=logprobs, ref_logprobs=ref)
    output = pair_loss(1.0)(batch)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert output.metrics["preference/margin"].value.item() == pytest.approx(1.0)
    assert logprobs.grad is not None
    assert logprobs.grad[:3].tolist() == [0.0] * 3


@pytest.mark.parametrize("per_token", [False, True], ids=["sums", "means"])
def test_dpo_is_torchs_logsigmoid_of_the_margin(per_token: bool) -> None:
    """Value and gradient by autograd through plain sums or means, in float64."""
    g = torch.Generator().manual_seed(2)
    lengths = [3, 5, 2, 2]
    logprobs = -torch.rand(12, generator=g, dtype=torch.float64)
    ref = -torch.rand(12, generator=g, dtype=torch.float64)
    ours, plain = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    batch = loss_inputs(lengths, [True] * 12, logprobs=ours, ref_logprobs=ref)
    output = pair_loss(0.7, per_token=per_token)(batch)
    output.loss.backward()
    sums = torch.stack([part.mean() if per_token else part.sum() for part in (plain - ref).split(lengths)])
    wanted = -torch.nn.functional.logsigmoid(0.7 * (sums[::2] - sums[1::2])).mean()
    wanted.backward()
    assert abs(output.loss.item() - wanted.item()) < 1e-9
    assert ours.grad is not None
    assert plain.grad is not None
    assert (ours.grad - plain.grad).abs().max() < 1e-9


def test_a_policy_that_is_its_own_critic_adds_its_value_loss_by_the_coefficient() -> None:
    """Of two tokens, one has -2 log pi of 2, and the value loss is that of the first test here; a quarter counts."""
    choices = {"objective": "reinforce", "credit": "gae", "advantage_mean": "none", "advantage_std": "none"}
    critic = {"backbone": "policy", "coefficient": 0.25, "clip": 0.2}
    row = AlgorithmSection.model_validate({**choices, "critic": critic})
    loss = loss_of(row, kl_coefficient=0.0, max_new_tokens=1)
    logprobs, values = (torch.tensor(x, requires_grad=True) for x in ([-1.0, -3.0], [1.0, 1.0]))
    columns = {"values": values, "old_values": torch.tensor([0.5, 0.5]), "returns": torch.tensor([0.0, 2.0])}
    batch = loss_inputs([2], [True, True], logprobs=logprobs, **columns)
    output = loss(replace(batch, advantages=torch.tensor([2.0, 0.0])))
    output.loss.backward()
    of_values = (1 + 1.69) / 2 / 2
    assert output.loss.item() == pytest.approx(2 / 2 + 0.25 * of_values)
    assert output.metrics["critic/loss"].value.item() == pytest.approx(of_values)
    assert not output.metrics["critic/loss"].value.requires_grad
    assert {"clip_fraction", "critic/value_mean", "critic/clip_fraction"} <= output.metrics.keys()
    assert logprobs.grad is not None
    assert values.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 0.0])
    assert values.grad.tolist() == pytest.approx([0.25 * 0.5, 0.0])
