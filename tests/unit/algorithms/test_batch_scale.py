"""correction.normalise: weights divided by their mean over the batch, as factors of advantages, beside plain loops."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch

from rl_megatron.algorithms.corrections import batch_scale
from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.algorithms.objectives import OBJECTIVES
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.correction import CorrectionSection, CorrectionWeight
from rl_megatron.errors import ConfigError
from rl_megatron.types import Samples
from tests.property.test_losses_metrics import batch
from tests.rows import policy_loss
from tests.samples import sequences_of

LENGTHS = [5, 1, 9, 3]


def samples(seed: int = 0) -> Samples:
    """Advantages of each token's own, some 0, which have no sign; of the last sequence no token is trained on."""
    g = torch.Generator().manual_seed(seed)
    count, old = sum(LENGTHS), -torch.rand(sum(LENGTHS), generator=g)
    mask = torch.rand(count, generator=g) < 0.8
    mask[-LENGTHS[-1] :] = False
    advantages = torch.randn(count, generator=g) * (torch.arange(count) % 4 > 0)
    return sequences_of(
        LENGTHS,
        mask=mask,
        advantages=advantages.where(mask, torch.nan),
        rollout_logprobs=(old + 0.4 * torch.randn(count, generator=g)).where(mask, torch.nan),
        old_logprobs=old,
    )


def in_loops(section: CorrectionSection, x: Samples) -> list[float]:
    """One divided by the means of the weights that weigh each trained token; 1 at others."""
    sequences = [[t for t in range(a, b) if x.mask[t]] for a, b in zip(x.cu_seqlens, x.cu_seqlens[1:], strict=False)]
    gap = {t: float(x.old_logprobs[t]) - float(x.rollout_logprobs[t]) for s in sequences for t in s}
    out = [1.0] * len(x.mask)
    for one in (section, *section.times.values()):
        if one.mode == "none" or not one.normalise:
            continue
        weighed = [[t for t in s if weighs(one, float(x.advantages[t]))] for s in sequences]
        weights = [
            [weight(one, [gap[u] for u in s], gap[t]) for t in w] for s, w in zip(sequences, weighed, strict=True)
        ]
        every = [w for row in weights for w in (row if one.level == "token" else row[:1])]
        mean = statistics.fmean(every) if every else 0.0
        for t in (t for w in weighed for t in w):
            out[t] /= mean or 1.0
    return out


def weighs(one: CorrectionWeight, advantage: float) -> bool:
    return {"all": True, "positive": advantage > 0, "negative": advantage < 0}[one.of]


def weight(one: CorrectionWeight, gaps: list[float], gap: float) -> float:
    d = {"token": gap, "sequence": statistics.fmean(gaps), "product": sum(gaps), "worst": 0.0}[one.level]
    if one.mode == "reject":
        k3 = [math.exp(x) - x - 1 for x in gaps]
        found = {"token": math.exp(gap) - gap - 1, "sequence": statistics.fmean(k3), "worst": max(k3)}[one.level]
        return float(found <= one.high)
    inside = one.low <= math.exp(d) <= one.high
    clamped = min(max(math.exp(d), one.low), one.high)
    return {"truncate": clamped, "mask": math.exp(d) * inside, "band": float(inside)}[one.mode]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "given",
    [
        {"mode": "truncate", "high": 1.2},
        {"mode": "mask", "low": 0.8, "high": 1.4, "of": "negative"},
        {"mode": "band", "level": "sequence", "low": 0.9, "high": 1.1},
        {"mode": "truncate", "level": "product", "of": "positive"},
        {"mode": "reject", "level": "token", "high": 0.05},
        {"mode": "reject", "level": "worst", "high": 0.2},
        {"mode": "truncate", "high": 1.1, "times": {"far": {"mode": "reject", "high": 0.1, "normalise": True}}},
        {"mode": "truncate", "normalise": False, "times": {"b": {"mode": "mask", "of": "negative", "normalise": True}}},
        {"mode": "band", "low": 1e-9, "high": 1e-8},
    ],
    ids=str,
)
def test_advantages_are_divided_by_the_mean_of_the_weights(given: dict[str, Any], seed: int) -> None:
    section = CorrectionSection.model_validate({"normalise": True, **given})
    found = batch_scale(section, samples(seed))
    assert found is not None
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(in_loops(section, samples(seed)), rel=1e-5)


def test_without_the_key_nothing_is_scaled() -> None:
    assert batch_scale(CorrectionSection(mode="truncate"), samples()) is None
    assert batch_scale(CorrectionSection(normalise=True), samples()) is None  # off


@pytest.mark.parametrize("dual_clip", [None, 1.1])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objectives_loss_is_in_proportion_to_the_advantage(objective: str, dual_clip: float | None) -> None:
    """So a factor of the advantage is one of the weight; the same of its gradient."""
    keys: dict[str, Any] = {"objective": objective, "dual_clip": dual_clip}
    if objective == "gmpo":
        keys["aggregation"] = "seq_mean_token_mean"
    loss = policy_loss(**keys, entropy_coefficient=0.0)
    one, three = (outcome(loss, factor) for factor in (1.0, 3.0))
    assert three[0] == pytest.approx(3 * one[0], rel=1e-6)
    torch.testing.assert_close(three[1], 3 * one[1])


def outcome(loss: PolicyLoss, factor: float) -> tuple[float, torch.Tensor]:
    inputs = batch([4, 3, 6], 0, kept=0.8)
    inputs.advantages.mul_(factor)
    value = loss(inputs).loss
    (gradient,) = torch.autograd.grad(value, inputs.logprobs)
    return value.item(), gradient


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["correction.mode=none"], "correction.normalise=true does nothing: algorithm.correction.mode=none"),
        (["old_logprobs=rollout"], "correction.mode=truncate does nothing"),
        (["old_logprobs=interpolated"], r"correction\.normalise=true with algorithm\.old_logprobs=interpolated"),
        (
            ["objective=mine:objective"],
            r"normalise=true with algorithm\.objective=mine:objective: advantages are divided",
        ),
    ],
)
def test_where_the_mean_cannot_be_known_or_used_it_is_refused(keys: list[str], reason: str) -> None:
    given = ["algorithm=decoupled_ppo", "algorithm.correction.normalise=true", *(f"algorithm.{key}" for key in keys)]
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", given)
