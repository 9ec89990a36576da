"""Train-inference corrections against written-out references; they are detached weights of the policy loss."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.algorithms.corrections import correction_weights, proximal_share, second_moment_mask
from rl_megatron.algorithms.kl import k3
from rl_megatron.config.sections.algorithm import CorrectionSection
from rl_megatron.types import LossInputs
from tests.losses import loss_inputs
from tests.rows import policy_loss

CORRECTIONS = [
    CorrectionSection(mode="truncate"),
    CorrectionSection(mode="mask", low=0.5, high=5.0),
    CorrectionSection(level="sequence", mode="truncate", high=1.1),
    CorrectionSection(level="sequence", mode="band", low=0.999, high=1.002),
    CorrectionSection(mode="band", low=0.9, high=1.2),
    CorrectionSection(mode="none", veto=0.5),
    CorrectionSection(mode="none", off_policy_delta=0.02),
    CorrectionSection(mode="truncate", low=0.9, high=1.1, veto=0.1, off_policy_delta=0.1),
    CorrectionSection(level="product", mode="truncate", low=0.2, high=1.5),
    *(
        CorrectionSection(mode="reject", level=level, high=high)
        for level, high in (("token", 0.05), ("sequence", 0.004), ("product", 0.5), ("worst", 0.02))
    ),
    CorrectionSection(mode="reject", level="worst", high=0.1, veto=0.4),
]
seeds = st.integers(0, 2**32)
ragged = st.lists(st.integers(0, 7), min_size=1, max_size=6)
quick = settings(max_examples=120, deadline=None, derandomize=True)


def draw(seed: int, lengths: list[int], scale: float) -> LossInputs:
    """Rollout, old and current log-probs that differ by ``scale``; NaN wherever masked out."""
    g = torch.Generator().manual_seed(seed)
    num = sum(lengths)
    mask = torch.rand(num, generator=g) < 0.8
    rollout = -torch.rand(num, generator=g, dtype=torch.float64)
    old = rollout + scale * torch.randn(num, generator=g, dtype=torch.float64)
    new = old + scale * torch.randn(num, generator=g, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=g, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    nan = torch.full((num,), math.nan, dtype=torch.float64)
    return loss_inputs(
        lengths,
        mask,
        logprobs=torch.where(mask, new, nan).requires_grad_(),
        entropy=nan,
        old_logprobs=torch.where(mask, old, nan),
        rollout_logprobs=torch.where(mask, rollout, nan),
        advantages=torch.where(mask, advantages, nan),
    )


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def far_from_engine(one: CorrectionSection, gaps: dict[int, float], t: int) -> float:
    """Of token t, or of its sequence: d = log pi_old - log pi_rollout."""
    every = {s: math.exp(clamp(d, -20, 20)) - clamp(d, -20, 20) - 1 for s, d in gaps.items()}
    total, worst = math.fsum(every.values()), max(every.values())
    return {"token": every[t], "sequence": total / len(every), "product": total, "worst": worst}[one.level]


def reference(c: CorrectionSection, x: LossInputs, num_sequences: int) -> list[float]:
    """Weights of all positions; NaN where masked out."""
    out, logprobs = [math.nan] * len(x.mask), x.logprobs.detach()
    for s in range(num_sequences):
        places = [t for t in range(len(x.mask)) if x.segment_ids[t] == s and x.mask[t]]
        gaps = {t: float(x.old_logprobs[t] - x.rollout_logprobs[t]) for t in places}
        drift = sum(float(x.rollout_logprobs[t] - logprobs[t]) for t in places) / max(len(places), 1)
        for t in places:
            weight = 1.0
            if c.mode == "reject":
                weight = float(far_from_engine(c, gaps, t) <= c.high)
            elif c.mode != "none":
                total = sum(gaps.values())
                gap = {"token": gaps[t], "sequence": total / len(places), "product": total}[c.level]
                ratio = math.exp(clamp(gap, -20, 20))
                inside = c.low <= ratio <= c.high
                weight = {
                    "truncate": clamp(ratio, c.low, c.high),
                    "mask": ratio if inside else 0.0,
                    "band": float(inside),
                }[c.mode]
            vetoed = any(math.exp(clamp(gap, -700, 700)) < c.veto for gap in gaps.values())
            if vetoed or (float(x.advantages[t]) < 0 and drift > (c.off_policy_delta or math.inf)):
                weight = 0.0
            out[t] = weight
    return out


@pytest.mark.parametrize("c", CORRECTIONS, ids=str)
@settings(parent=quick, max_examples=30)
@given(seed=seeds, lengths=ragged, scale=st.sampled_from([0.001, 0.1, 1.0, 1e4]))
def test_weights_scale_the_loss_of_every_token(
    c: CorrectionSection, seed: int, lengths: list[int], scale: float
) -> None:
    """Seen through the gradient of reinforce, which is weight x -A / tokens, and so without the weight's own."""
    inputs = draw(seed, lengths, scale)
    output = policy_loss(objective="reinforce", correction=c.model_dump())(inputs)
    output.loss.backward()
    weights = torch.tensor(reference(c, inputs, len(lengths)), dtype=torch.float64)
    num = max(inputs.num_tokens, 1)
    expected = torch.where(inputs.mask, -weights * inputs.advantages / num, 0.0)
    assert inputs.logprobs.grad is not None
    torch.testing.assert_close(inputs.logprobs.grad, expected, rtol=1e-9, atol=1e-9)
    kept = weights[inputs.mask]
    assert output.metrics["correction/weight_mean"].value.item() == pytest.approx(kept.sum().item() / num)
    assert output.metrics["correction/dropped_fraction"].value.item() == pytest.approx((kept == 0).sum().item() / num)


def test_weights_have_no_gradient_of_their_own() -> None:
    """Autograd equals finite differences of the loss with the weights held still, where they depend on the policy:
    old log-probs are interpolated from its own."""
    inputs = replace(draw(7, [4, 3, 5], 0.3), proximal_share=torch.full((12,), 0.5, dtype=torch.float64))
    loss = policy_loss(correction={"mode": "truncate", "level": "product", "high": 9.0}, objective="reinforce")
    loss(inputs).loss.backward()
    assert inputs.logprobs.grad is not None
    now = inputs.logprobs.detach()
    for t in torch.nonzero(inputs.mask).flatten().tolist():
        at_t = [s for s in range(12) if inputs.segment_ids[s] == inputs.segment_ids[t] and inputs.mask[s]]
        half = {s: 0.5 * float(now[s] - inputs.rollout_logprobs[s]) for s in at_t}
        weight, advantage, step = min(math.exp(sum(half.values())), 9.0), float(inputs.advantages[t]), 1e-4
        values = [-weight * advantage * (float(now[t]) + x) / inputs.num_tokens for x in (-step, step)]
        assert float(inputs.logprobs.grad[t]) == pytest.approx((values[1] - values[0]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize(("level", "high"), [("token", 0.04), ("sequence", 0.03), ("product", 0.1), ("worst", 0.07)])
def test_a_loss_with_rejections_has_the_gradient_of_finite_differences(level: str, high: float) -> None:
    """Tokens that are dropped have none, and some are."""
    inputs = draw(11, [4, 3, 5, 2, 6], 0.3)
    correction = {"mode": "reject", "level": level, "high": high}
    loss = policy_loss(correction=correction, clip_low=0.9, clip_high=9.0)
    output = loss(inputs)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    now, step = inputs.logprobs.detach(), 1e-5
    for t in torch.nonzero(inputs.mask).flatten().tolist():
        nudge = torch.zeros_like(now)
        nudge[t] = step
        up, down = (loss(replace(inputs, logprobs=now + sign * nudge)).loss for sign in (1, -1))
        assert float(gradient[t]) == pytest.approx(float(up - down) / (2 * step), abs=1e-8)
    assert 0 < output.metrics["correction/dropped_fraction"].value.item() < 1


def test_a_sequence_weight_does_not_grow_with_the_length() -> None:
    """exp of a sum would be e^0.01 and e^2 for the same gap a token."""
    for length in (1, 200):
        inputs = draw(0, [length], 0.0)
        old = torch.full((length,), -0.99, dtype=torch.float64)
        rollout = torch.full((length,), -1.0, dtype=torch.float64)
        inputs = replace(inputs, mask=torch.ones(length, dtype=torch.bool), old_logprobs=old, rollout_logprobs=rollout)
        section = CorrectionSection(mode="truncate", level="sequence", high=100.0)
        lengths = torch.tensor([float(length)]).double()
        weights = correction_weights(section, replace(inputs, advantages=old), lengths)
        torch.testing.assert_close(weights, torch.full_like(old, math.exp(0.01)))


@pytest.mark.parametrize(
    "section",
    [
        *(
            CorrectionSection(mode=mode, low=low, high=high)
            for mode in ("mask", "band")
            for low, high in ((1.0, 2.0), (0.5, 1.0))
        ),
        CorrectionSection(mode="none", veto=1.0),
        CorrectionSection(mode="none", off_policy_delta=0.5),
    ],
)
def test_a_token_at_a_limit_is_kept(section: CorrectionSection) -> None:
    """Of weight 1, whose policy has moved by half a nat."""
    ones = torch.ones(2, dtype=torch.float64)
    inputs = replace(draw(0, [2], 0.0), mask=ones.bool(), advantages=-ones, old_logprobs=-ones, rollout_logprobs=-ones)
    weights = correction_weights(section, replace(inputs, logprobs=-1.5 * ones), 2 * ones[:1])
    assert weights.tolist() == [1.0, 1.0]


def test_a_policy_that_has_drifted_drops_bad_sequences_alone() -> None:
    """Three of advantages -1, 0 and 1, each two nats from the engine: one third is counted as dropped."""
    ones = torch.ones(3, dtype=torch.float64)
    columns = {"old_logprobs": -ones, "rollout_logprobs": -ones, "logprobs": (-3 * ones).requires_grad_()}
    inputs = replace(draw(0, [1, 1, 1], 0.0), **columns, mask=ones.bool(), entropy=ones, num_tokens=3)
    loss = policy_loss(correction={"mode": "none", "off_policy_delta": 1.0}, objective="reinforce")
    output = loss(replace(inputs, advantages=torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)))
    assert output.metrics["correction/dropped_fraction"].value.item() == pytest.approx(1 / 3)
    assert output.metrics["correction/weight_mean"].value.item() == pytest.approx(2 / 3)
    assert torch.autograd.grad(output.loss, columns["logprobs"])[0].tolist() == pytest.approx([0.0, 0.0, -1 / 3])


@pytest.mark.parametrize(("level", "tokens"), [("token", 1), ("sequence", 1), ("product", 2), ("worst", 1)])
def test_a_divergence_at_the_limit_is_kept_and_one_above_it_is_not(level: str, tokens: int) -> None:
    """Two tokens of one nat's gap, so that each has the same k3."""
    ones = torch.ones(2, dtype=torch.float64)
    limit = tokens * float(k3(-2 * ones, -ones)[0])
    inputs = replace(
        draw(0, [2], 0.0), mask=ones.bool(), advantages=ones, old_logprobs=-ones, rollout_logprobs=-2 * ones
    )
    for high, wanted in ((limit, [1.0, 1.0]), (math.nextafter(limit, 0.0), [0.0, 0.0])):
        section = CorrectionSection.model_validate({"mode": "reject", "level": level, "high": high})
        assert correction_weights(section, inputs, 2 * ones[:1]).tolist() == wanted


def test_decoupled_ppo_is_the_clipped_proximal_ratio_times_the_capped_behaviour_weight() -> None:
    inputs = draw(3, [4, 6], 0.5)
    output = policy_loss(correction={"mode": "truncate", "high": 5.0})(inputs)
    total, logprobs = 0.0, inputs.logprobs.detach()
    for t in torch.nonzero(inputs.mask).flatten().tolist():
        ratio = math.exp(float(logprobs[t] - inputs.old_logprobs[t]))
        advantage = float(inputs.advantages[t])
        behaviour = min(math.exp(float(inputs.old_logprobs[t] - inputs.rollout_logprobs[t])), 5.0)
        total -= behaviour * min(ratio * advantage, clamp(ratio, 0.8, 1.2) * advantage)
    assert output.loss.item() == pytest.approx(total / inputs.num_tokens)


def test_second_moment_mask_drops_the_worst_token_only() -> None:
    kept = second_moment_mask(torch.tensor([0.0, 0.1, 0.8, 0.0]), threshold=0.04)
    assert kept.tolist() == [True, True, False, True]


@quick
@given(seeds, st.integers(0, 30), st.sampled_from([0.0, 0.04, 0.5]))
def test_second_moment_mask_is_the_largest_set_below_the_threshold(seed: int, num: int, threshold: float) -> None:
    rng = random.Random(seed)
    values = [rng.choice([0.0, rng.gauss(0, 0.5), 1e4]) for _ in range(num)]
    kept = second_moment_mask(torch.tensor(values, dtype=torch.float64), threshold=threshold).tolist()
    chosen = list(range(num))
    while chosen and sum(values[t] ** 2 for t in chosen) / len(chosen) > threshold + 1e-15:
        chosen.remove(max(chosen, key=lambda t: values[t] ** 2))
    assert sum(kept) == len(chosen)
    assert sorted(values[t] ** 2 for t in range(num) if kept[t]) == sorted(values[t] ** 2 for t in chosen)


def test_proximal_logprobs_are_log_linear_in_the_version() -> None:
    """Rollout -2, current -1: three quarters of the way, the rollout's own, and the same version throughout."""
    share = proximal_share(torch.tensor([0, 3, 4]), proximal_version=3, version=4)
    assert share.tolist() == [0.75, 0.0, 0.0]
    now = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(3, dtype=torch.float64)
    inputs = loss_inputs(
        [3],
        logprobs=now,
        old_logprobs=torch.full_like(zeros, math.nan),  # nobody computed them
        rollout_logprobs=zeros - 2,
        advantages=zeros + 1,
        proximal_share=share.double(),
    )
    output = policy_loss(correction={"mode": "truncate", "high": 5.0}, clip_high=9.0)(inputs)
    output.loss.backward()
    wanted = [math.exp(-1 + 1.25) * math.exp(-1.25 + 2), math.exp(-1 + 2), math.exp(-1 + 2)]  # ratio x behaviour weight
    assert output.loss.item() == pytest.approx(-sum(wanted) / 3)
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-w / 3 for w in wanted])
