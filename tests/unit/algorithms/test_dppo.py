"""DPPO (arXiv:2602.04879), Binary-TV and Binary-KL: plain loops over its equations, finite differences, a split."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.types import LossInputs, LossOutput
from tests.property.test_losses_metrics import batch
from tests.rows import policy_loss

LENGTHS = [5, 9, 1, 3, 7, 4]
LIMITS = {"tv": (0.12, 0.2), "kl": (0.03, 0.06)}
CAP = 1.6


def evaluate(kind: str, inputs: LossInputs, mask: Tensor | None = None) -> tuple[LossOutput, Tensor]:
    low, high = LIMITS[kind]
    loss = policy_loss(objective=f"dppo_{kind}", clip_low=low, clip_high=high, cap_high=CAP)
    given = inputs.logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, logprobs=given, mask=inputs.mask if mask is None else mask))
    return output, torch.autograd.grad(output.loss, given)[0]


def leaves(kind: str, logp: float, old: float, advantage: float) -> bool:
    """Its mask: the distance of two Bernoulli distributions, and the side on which the ratio is."""
    p, q = math.exp(logp), math.exp(old)
    if kind == "tv":
        distance = (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    else:
        distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    low, high = LIMITS[kind]
    return (advantage > 0 and p > q and distance > high) or (advantage < 0 and p < q and distance > low)


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_equation_of_its_paper(kind: str, seed: int) -> None:
    """The gradient is that of -M rho A by central differences; a weight beyond the cap is the cap's."""
    inputs = batch(LENGTHS, seed, scale=0.6, kept=0.75)
    inputs = replace(inputs, logprobs=inputs.logprobs.clamp(max=-0.02), old_logprobs=inputs.old_logprobs - 0.2)
    output, gradient = evaluate(kind, inputs)
    total, num, kinds = 0.0, int(inputs.mask.sum()), {"left": 0, "capped": 0, "free": 0}
    for t in torch.where(inputs.mask)[0].tolist():
        logp, old = inputs.logprobs[t].item(), inputs.old_logprobs[t].item()
        advantage, ratio, step = inputs.advantages[t].item(), math.exp(logp - old), 1e-6
        up, down = (-math.exp(logp + x - old) * advantage / num for x in (step, -step))
        slope, weight = (up - down) / (2 * step), min(ratio, CAP)
        if leaves(kind, logp, old, advantage):
            slope = weight = 0.0
        total -= weight * advantage * logp / num
        kinds["free" if weight == ratio else "capped" if weight else "left"] += 1
        assert gradient[t].item() == pytest.approx(slope * weight / ratio, abs=1e-9)
    assert output.loss.item() == pytest.approx(total, rel=1e-12)
    assert output.metrics["clip_fraction"].value.item() == pytest.approx((kinds["left"] + kinds["capped"]) / num)
    assert min(kinds.values()) > 0, kinds
    assert not gradient[~inputs.mask].any()


@pytest.mark.parametrize("kind", LIMITS)
def test_a_token_that_comes_back_is_never_left_alone(kind: str) -> None:
    """Far from the old policy on either side, under advantages of either sign: 0 where it would go further."""
    inputs = batch([4], 0)
    old = torch.tensor([0.1, 0.9, 0.1, 0.9], dtype=torch.float64).log()
    new = torch.tensor([0.9, 0.1, 0.9, 0.1], dtype=torch.float64).log()
    inputs = replace(inputs, old_logprobs=old, logprobs=new, advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]).double())
    _, gradient = evaluate(kind, inputs)
    assert (gradient != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("kind", LIMITS)
def test_a_token_without_an_advantage_has_no_limit_to_be_counted(kind: str) -> None:
    """Two that have come far, one on either side, beside two that are left alone."""
    old = torch.tensor([0.1, 0.9, 0.1, 0.9], dtype=torch.float64).log()
    inputs = replace(batch([4], 0), old_logprobs=old, logprobs=old.flip(0))
    inputs = replace(inputs, advantages=torch.tensor([1.0, 0.0, 0.0, -1.0]).double())
    output, gradient = evaluate(kind, inputs)
    assert output.metrics["clip_fraction"].value.item() == 0.5
    assert not gradient.any()


@pytest.mark.parametrize("kind", LIMITS)
def test_a_certain_token_and_one_that_was_impossible_are_finite(kind: str) -> None:
    """Log-probs of 0 and of -60 in float32, and an advantage of 0."""
    inputs = batch([4], 0, dtype=torch.float32)
    inputs = replace(
        inputs,
        logprobs=torch.tensor([0.0, -60.0, 0.0, -60.0]),
        old_logprobs=torch.tensor([0.0, 0.0, -60.0, -60.0]),
        advantages=torch.tensor([1.0, -1.0, 1.0, 0.0]),
    )
    output, gradient = evaluate(kind, inputs)
    assert output.loss.isfinite()
    assert (gradient != 0).tolist() == [True, False, False, False]


@pytest.mark.parametrize("kind", LIMITS)
def test_micro_batches_add_up(kind: str) -> None:
    inputs = batch(LENGTHS, 7, scale=0.6, kept=0.75)
    whole, gradient = evaluate(kind, inputs)
    parts = [evaluate(kind, inputs, inputs.mask & (inputs.segment_ids % 2 == side)) for side in (0, 1)]
    assert sum(part.loss.item() for part, _ in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(parts[0][1] + parts[1][1], gradient, rtol=1e-12, atol=0)


def test_the_rows_have_the_limits_of_the_paper_and_the_policy_that_sampled() -> None:
    for name, limit in (("dppo_tv", 0.15), ("dppo_kl", 0.05)):
        row = load_config("tiny_cpu", [f"algorithm={name}"]).algorithm
        assert (row.clip_low, row.clip_high, row.cap_high, row.old_logprobs) == (limit, limit, 20.0, "rollout")


@pytest.mark.parametrize("key", ["ratio_level=sequence", "dual_clip=3", "cap_low=0.5"])
def test_what_it_does_not_read_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"objective=dppo_tv does not read it"):
        load_config("tiny_cpu", ["algorithm=dppo_tv", f"algorithm.{key}"])


def test_pairs_alone_have_lengths_to_be_normalised() -> None:
    with pytest.raises(ConfigError, match=r"preference.per_token=true does nothing: without algorithm.preference.beta"):
        load_config("tiny_cpu", ["algorithm=grpo", "algorithm.preference.per_token=true"])
