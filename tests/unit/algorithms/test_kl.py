from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rl_megatron.algorithms.kl import average_age, kl_in_sequence_rewards, kl_in_token_rewards, kl_per_token
from rl_megatron.config.sections.algorithm import KLSection
from rl_megatron.types import LossInputs
from tests.losses import loss_inputs
from tests.rows import policy_loss


def inputs(logprobs: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, ref: torch.Tensor) -> LossInputs:
    return loss_inputs([len(old)], mask, logprobs=logprobs, ref_logprobs=ref, old_logprobs=old, rollout_logprobs=old)


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


V = 5
LOGITS, *_OTHERS = torch.randn(4, V, generator=torch.Generator().manual_seed(1)).double()
REF, OLD, ROLLOUT = (logits.log_softmax(0) for logits in _OTHERS)


def expected_gradient(section: dict[str, object], sampler: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Of the loss, in the logits of a categorical policy, over all tokens in the proportions of who sampled them."""
    loss = policy_loss(
        kl_coefficient=1.0, kl={"coefficient": 1.0, **section}, correction={"mode": "truncate", "high": 1.1}
    )
    logits, total = LOGITS.clone().requires_grad_(), torch.zeros(V).double()
    for token in range(V):
        here = slice(token, token + 1)
        x = inputs(logits.log_softmax(0)[here], old[here], torch.ones(1, dtype=torch.bool), REF[here])
        (gradient,) = torch.autograd.grad(loss(replace(x, rollout_logprobs=sampler[here])).loss, logits)
        total += sampler[token].exp() * gradient
    return total


def exact_gradient() -> torch.Tensor:
    """Of KL(pi‖ref), by central differences."""

    def kl(logits: torch.Tensor) -> float:
        logp = logits.log_softmax(0)
        return float((logp.exp() * (logp - REF)).sum())

    steps = 1e-5 * torch.eye(V, dtype=torch.float64)
    return torch.tensor([(kl(LOGITS + h) - kl(LOGITS - h)) / 2e-5 for h in steps], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_weighted_kl_has_the_gradient_of_the_kl_whoever_sampled(estimator: str) -> None:
    """The engine is neither the old policy nor the current one, and a correction bounds the objective's weights."""
    found = expected_gradient({"estimator": estimator}, ROLLOUT, OLD)
    torch.testing.assert_close(found, exact_gradient(), rtol=1e-8, atol=1e-9)


def test_without_weights_only_k2_on_policy_has_the_gradient_of_the_kl() -> None:
    """k1's is zero, so it is refused, as is abs; k3's is that of the other KL, KL(ref‖pi)."""
    logp, exact = LOGITS.log_softmax(0), exact_gradient()
    alike = {"importance_weighted": False}
    torch.testing.assert_close(expected_gradient(alike | {"estimator": "k2"}, logp, logp), exact, rtol=1e-8, atol=1e-9)
    k3 = expected_gradient(alike | {"estimator": "k3"}, logp, logp)
    torch.testing.assert_close(k3, logp.exp() - REF.exp(), rtol=1e-8, atol=1e-9)
    for estimator in ("k1", "abs"):
        with pytest.raises(ValueError, match=rf"kl.estimator={estimator} in the loss without weights"):
            expected_gradient(alike | {"estimator": estimator}, logp, logp)


def test_a_second_name_of_an_estimator_is_refused_with_the_first() -> None:
    with pytest.raises(ValueError, match="set k2"):
        KLSection.model_validate({"estimator": "mse"})


def test_kl_in_the_loss_is_a_term_under_its_coefficient_and_ignores_garbage_outside_the_mask() -> None:
    mask = torch.tensor([True, False])
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    x = inputs(logprobs, torch.tensor([-1.0, math.inf]), mask, torch.tensor([-1.5, math.nan]))
    loss = policy_loss(aggregation="seq_mean_token_mean", kl_coefficient=0.5)
    output = loss(x)  # advantages are 0: nothing but the KL is left
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.5 * 0.106531, abs=1e-6)
    assert output.metrics["loss/kl"].value.item() == pytest.approx(output.loss.item())
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.5 * (1 - math.exp(-0.5) + 0.106531), 0.0], abs=1e-6)


@pytest.mark.parametrize(("rate", "every"), [(0.25, 1), (0.6, 3), (1.0, 4)])
def test_the_age_of_a_moving_average_is_that_of_the_policies_in_it(rate: float, every: int) -> None:
    shares = {0: 1.0}  # of the policy after each step
    for step in range(12):
        wanted = sum(share * (step - made) for made, share in shares.items())
        assert average_age(step, rate=rate, every=every) == pytest.approx(wanted)
        if (step + 1) % every == 0:
            shares = {made: share * (1 - rate) for made, share in shares.items()}
            shares[step + 1] = rate
