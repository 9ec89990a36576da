"""CE-GPPO (arXiv:2509.20712) and GPPO: plain loops over the three cases of its loss, by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.types import LossInputs
from tests.property.test_losses_metrics import batch
from tests.rows import policy_loss

LENGTHS = [3, 1, 4, 2] * 8
LOW, HIGH, DUAL = 0.2, 0.28, 1.5


def gradient_of(loss: PolicyLoss, inputs: LossInputs) -> tuple[torch.Tensor, list[float]]:
    given = inputs.logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, logprobs=given))
    return output.loss.detach(), torch.autograd.grad(output.loss, given)[0].tolist()


def of_paper(ratio: float, at: float, advantage: float, beta1: float, beta2: float) -> float:
    """Its loss of one token, a function of the ratio where ``at`` is the ratio without a gradient."""
    if at < 1 - LOW and advantage < 0:
        return -beta1 * (1 - LOW) / at * ratio * advantage
    if at > 1 + HIGH and advantage > 0:
        return -beta2 * (1 + HIGH) / at * ratio * advantage
    if advantage < 0 and at > DUAL:
        return -DUAL * advantage
    return -ratio * advantage


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.75, 1.0), (0.0, 0.5), (0.5, 0.0)])
def test_the_gradient_is_that_of_its_paper(beta1: float, beta2: float, level: str) -> None:
    """Ratios of tokens, or one of a sequence, of which each token has an equal part; beside a dual clip."""
    row = {"clip_high": HIGH, "dual_clip": DUAL, "ratio_level": level, "aggregation": "seq_mean_token_mean"}
    inputs = batch(LENGTHS, 3, scale=0.8, kept=0.75)
    value, found = gradient_of(policy_loss(keep_low=beta1, keep_high=beta2, **row), inputs)
    cases = set()
    log_ratio = (inputs.logprobs - inputs.old_logprobs).tolist()
    trained = [t for t in range(len(log_ratio)) if inputs.mask[t]]
    for t in trained:
        of_sequence = [u for u in trained if inputs.segment_ids[u] == inputs.segment_ids[t]]
        num, advantage = len(of_sequence), inputs.advantages[t].item()
        of = [t] if level == "token" else of_sequence
        at = math.exp(sum(log_ratio[u] for u in of) / len(of))
        up, down = (of_paper(at * math.exp(step), at, advantage, beta1, beta2) for step in (1e-6, -1e-6))
        cases.add((at < 1 - LOW, at > 1 + HIGH, advantage > 0))
        assert found[t] == pytest.approx((up - down) / 2e-6 / num / inputs.num_sequences, abs=1e-8)
    assert {(True, False, False), (False, True, True)} <= cases
    assert not any(found[t] for t in range(len(found)) if not inputs.mask[t])
    plain, clipped = gradient_of(policy_loss(**row), inputs)
    assert value == plain
    assert found != clipped
