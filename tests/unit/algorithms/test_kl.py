from __future__ import annotations

import math

import pytest
import torch

from rl_megatron.algorithms.kl import (
    adaptive_beta,
    full_kl,
    kl_in_sequence_rewards,
    kl_in_token_rewards,
    kl_per_token,
    kl_term,
)
from rl_megatron.config_algorithm import KLSection
from rl_megatron.types import LossInputs
from tests.rows import policy_loss


def inputs(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, ref: torch.Tensor) -> LossInputs:
    return LossInputs(
        ref_logprobs=ref,
        logprobs=logprobs,
        entropy=torch.zeros_like(old),
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.zeros_like(old),
        mask=mask,
        segment_ids=torch.zeros(len(old), dtype=torch.int64),
        segment_sum=lambda values: values.sum()[None],
        num_tokens=int(mask.sum()),
        num_sequences=1,
    )


def test_placement_in_rewards_of_tokens_and_of_sequences() -> None:
    mask = torch.tensor([True, True, False, True])
    logprobs = torch.tensor([-1.0, -1.0, math.nan, -1.0])
    kl = kl_per_token(logprobs, torch.tensor([-1.5, -2.0, math.inf, -1.0]), mask, estimator="k1")
    assert kl.tolist() == [0.5, 1.0, 0.0, 0.0]
    assert kl_in_token_rewards(torch.tensor([0.0, 0, 0, 1]), kl, beta=0.1).tolist() == pytest.approx(
        [-0.05, -0.1, 0, 1]
    )
    summed = kl_in_sequence_rewards(torch.tensor([1.0, 2.0]), kl, torch.tensor([0, 3, 4]), beta=0.1)
    assert summed.tolist() == pytest.approx([0.85, 2.0])


def test_importance_weighted_k3_has_the_gradient_of_the_divergence() -> None:
    """Averaged over a vocabulary in the proportions of pi_old, value and gradient are those of KL(pi‖ref)."""
    old = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    ref = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64).log()
    drawn = [0, 0, 1, 2]
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - ref)).sum()
    torch.testing.assert_close(full_kl(logits, ref), exact)
    (expected,) = torch.autograd.grad(exact, logits)
    x = inputs(logits.log_softmax(0)[drawn], old.log()[drawn], torch.ones(4, dtype=torch.bool), ref[drawn])
    term = kl_term(x, KLSection(estimator="k3", importance_weighted=True)).mean()
    torch.testing.assert_close(term, exact)
    (gradient,) = torch.autograd.grad(term, logits)
    torch.testing.assert_close(gradient, expected)


def test_kl_in_the_loss_is_a_term_under_its_coefficient_and_ignores_garbage_outside_the_mask() -> None:
    mask = torch.tensor([True, False])
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    x = inputs(logprobs, torch.tensor([-1.0, math.inf]), mask, torch.tensor([-1.5, math.nan]))
    loss = policy_loss(aggregation="seq_mean_token_mean", kl_coefficient=0.5)
    output = loss(x)  # advantages are 0: nothing but the KL is left
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.5 * 0.106531, abs=1e-6)
    assert output.means["loss/kl"].item() == pytest.approx(output.loss.item())
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.5 * (1 - math.exp(-0.5)), 0.0])


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.1, 0.2), (0.11, 0.2 * (1 + 0.1 * 0.05)), (9.0, 0.2 * 1.01), (0.0, 0.2 * 0.99)]
)
def test_adaptive_beta(kl: float, expected: float) -> None:
    assert adaptive_beta(0.2, kl, target=0.1, num_samples=500) == pytest.approx(expected)
