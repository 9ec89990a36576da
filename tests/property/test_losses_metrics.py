"""PolicyLoss's metrics and train-inference corrections against direct formulas; low precision and long sequences."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_megatron.algorithms.auxiliary import PreferenceLoss, ValueLoss
from rl_megatron.algorithms.corrections import correction_weights, proximal_share, second_moment_mask
from rl_megatron.algorithms.kl import k3
from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.config.sections.algorithm import CorrectionSection
from rl_megatron.observability.recorder import Row
from rl_megatron.training.optimizer_steps import CompletedStep, policy_row
from rl_megatron.types import Loss, LossInputs, Metric, StepResult
from tests.rows import pair_loss, policy_loss
from tests.samples import loss_inputs, part_of, values

GSPO = policy_loss(ratio_level="sequence", aggregation="seq_mean_token_mean", clip_low=0.03, clip_high=0.04)
ROWS = [
    policy_loss(),
    policy_loss(dual_clip=1.5),
    GSPO,
    policy_loss(objective="cispo", cap_low=0.8, cap_high=1.3),
    policy_loss(objective="cispo", ratio_level="sequence", cap_low=0.97, cap_high=1.03),
    policy_loss(objective="topr", ratio_level="sequence_sum", aggregation="seq_mean_token_sum", cap_high=1.0),
    policy_loss(objective="sapo"),
    policy_loss(objective="importance"),
    policy_loss(objective="gmpo", aggregation="seq_mean_token_mean"),
    policy_loss(objective="dppo_tv", clip_low=0.05, clip_high=0.05, cap_high=1.5),
    policy_loss(objective="dppo_kl", clip_low=0.01, clip_high=0.01, cap_high=1.5),
    policy_loss(kl_coefficient=0.1, entropy_coefficient=0.01, correction={"mode": "truncate", "level": "sequence"}),
]
seeds = st.integers(0, 2**32)
quick = settings(max_examples=40, deadline=None, derandomize=True)


def batch(
    lengths: list[int], seed: int, *, scale: float = 0.2, dtype: torch.dtype = torch.float64, kept: float = 1.0
) -> LossInputs:
    """Log-ratios of spread ``scale``; a share ``kept`` of the tokens is trained."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    num = len(ids)
    old = -torch.rand(num, generator=g, dtype=torch.float64)
    mask = torch.rand(num, generator=g) < kept
    new = old + scale * torch.randn(num, generator=g, dtype=torch.float64)
    return loss_inputs(
        lengths,
        mask,
        logprobs=new.to(dtype).requires_grad_(),
        entropy=torch.rand(num, generator=g, dtype=torch.float64).to(dtype),
        old_logprobs=old.to(dtype),
        rollout_logprobs=(old + 0.1 * scale).to(dtype),
        ref_logprobs=(old - scale).to(dtype),
        advantages=torch.randn(len(lengths), generator=g, dtype=torch.float64)[ids].to(dtype),
    )


@pytest.mark.parametrize("loss", ROWS)
@quick
@given(
    seed=seeds, lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), scale=st.sampled_from([0.02, 0.5, 50.0])
)
def test_two_sides_make_the_clip_fraction(loss: PolicyLoss, seed: int, lengths: list[int], scale: float) -> None:
    means = values(loss(batch(lengths, seed, scale=scale, kept=0.8)))
    low, high, both = (float(means[f"clip_fraction{side}"]) for side in ("/low", "/high", ""))
    assert low + high == pytest.approx(both, abs=1e-12)
    assert min(low, high) >= 0
    assert both <= 1 + 1e-12


@pytest.mark.parametrize("loss", ROWS)
@pytest.mark.parametrize("count", ["num_tokens", "num_sequences"])
def test_the_weight_of_a_mean_is_the_count_that_it_is_over(loss: PolicyLoss, count: str) -> None:
    x = batch([3, 5, 2], 1, scale=0.5)
    found, others = (loss(one).metrics for one in (x, replace(x, **{count: 2 * getattr(x, count)})))
    for name in found:
        if found[name].reduction == "mean" and not name.startswith("loss/"):
            totals = [one[name].value * one[name].weight for one in (found, others)]
            torch.testing.assert_close(totals[0], totals[1], msg=name)


def test_clip_sides_of_known_tokens() -> None:
    """Up by half with A > 0 is clipped above, down by half with A < 0 below; the other two are free."""
    x, log_ratios = batch([4], 0), torch.tensor([1.5, 0.5, 1.5, 0.5]).double().log()
    x = replace(x, logprobs=x.old_logprobs + log_ratios, advantages=torch.tensor([1.0, -1.0, -1.0, 1.0]).double())
    means = values(policy_loss()(x))
    assert (means["clip_fraction/low"].item(), means["clip_fraction/high"].item()) == (0.25, 0.25)


@pytest.mark.parametrize("loss", [policy_loss(), GSPO])
@quick
@given(seed=seeds, lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_the_effective_fraction_is_kishs_over_their_number(loss: PolicyLoss, seed: int, lengths: list[int]) -> None:
    """(sum w)² / (n · sum w²), n tokens at token level, n sequences at sequence level."""
    x = batch(lengths, seed)
    gaps = (x.logprobs - x.old_logprobs).detach()
    weights = (gaps if loss is not GSPO else torch.stack([part.mean() for part in gaps.split(lengths)])).exp()
    expected = weights.sum().square() / weights.square().sum() / len(weights)
    assert row_of(loss, x)["ratio/effective_fraction"] == pytest.approx(expected.item(), rel=1e-9)


def row_of(loss: Loss, *minibatches: LossInputs) -> Row:
    """The metrics of optimizer steps on the minibatches."""
    steps = []
    for x in minibatches:
        said: dict[str, Metric[float]] = {"loss": Metric(value=0.0)}
        for name, metric in loss(x).metrics.items():
            said[name] = Metric(value=metric.value.item(), reduction=metric.reduction, weight=metric.weight)
        steps.append(CompletedStep(said, StepResult(grad_norm=0.0)))
    return policy_row(steps)


@pytest.mark.parametrize("loss", [*ROWS, ValueLoss(clip=0.1), pair_loss(0.1)])
@quick
@given(seed=seeds, pairs=st.integers(2, 4), cut=st.integers(1, 3))
def test_means_of_a_step_are_those_of_all_minibatches_tokens(loss: Loss, seed: int, pairs: int, cut: int) -> None:
    """Minibatches of unequal sizes say what one of all their sequences says, but for parts of the loss."""
    lengths = torch.randint(1, 9, (2 * pairs,), generator=torch.Generator().manual_seed(seed)).tolist()
    x, cut = batch(lengths, seed, kept=1.0 if isinstance(loss, PreferenceLoss) else 0.6), 2 * min(cut, pairs - 1)
    x = replace(x, values=x.entropy, old_values=x.advantages, returns=x.rollout_logprobs)
    parts = [
        replace(part, num_tokens=int(part.mask.sum()), num_sequences=stop - first)
        for first, stop in ((0, cut), (cut, 2 * pairs))
        for part in [part_of(x, first, stop)]
    ]
    assume(all(part.num_tokens for part in parts))
    whole, found = row_of(loss, x), row_of(loss, *parts)
    for key in {"loss", "loss/kl"} & set(whole):
        del whole[key], found[key]
    assert len(found) > 2
    assert found == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence", "turn"])
def test_means_of_ratios_are_over_what_is_trained(level: str) -> None:
    """Sequences of one token, whose ratios are 1, 2 and 4 at each level; two more are dropped."""
    x = batch([1] * 5, 0)
    mask, ratios = torch.arange(5) < 3, torch.tensor([1.0, 2, 4, 8, 16]).double()
    x = replace(x, logprobs=x.old_logprobs + ratios.log(), advantages=torch.ones(5).double(), mask=mask, num_tokens=3)
    loss = policy_loss(ratio_level=level, aggregation="token_mean" if level == "token" else "seq_mean_token_mean")
    row = row_of(loss, replace(x, turn_sum=x.segment_sum))
    assert row["ratio/mean"] == pytest.approx(7 / 3)
    assert row["ratio/effective_fraction"] == pytest.approx(49 / 3 / 21)
    assert (row["clip_fraction"], row["clip_fraction/low"]) == (pytest.approx(2 / 3), 0)
    assert row["clip_fraction/high"] == row["clip_fraction"]
    far = replace(x, logprobs=x.old_logprobs + 30.0, turn_sum=x.segment_sum)
    assert row_of(loss, far)["ratio/mean"] == pytest.approx(math.exp(20))
    assert not {"ratio/share", "ratio/second_moment"} & set(row)


def test_an_entropy_term_has_the_weight_of_a_token_whatever_its_correction() -> None:
    x = batch([3, 5], 0, kept=0.8)
    x = replace(x, entropy=x.entropy.requires_grad_())
    loss = policy_loss(entropy_coefficient=0.2, correction={"mode": "mask", "low": 0.99, "high": 1.01})
    (gradient,) = torch.autograd.grad(loss(x).loss, x.entropy)
    torch.testing.assert_close(gradient, -0.2 * x.mask.double() / x.num_tokens, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", ROWS)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_log_ratios_of_ten_thousand_are_clamped_and_finite(loss: PolicyLoss, gap: float) -> None:
    x = batch([3, 5], 0, dtype=torch.float32)
    far = torch.arange(8) < 3  # the first sequence
    x = replace(x, logprobs=torch.where(far, x.old_logprobs + gap, x.logprobs.detach()).requires_grad_())
    output = loss(x)
    (gradient,) = torch.autograd.grad(output.loss, x.logprobs)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(value) for value in values(output, "mean").values())
    if loss.row.ratio_level == "token" and gap > 0:
        assert output.metrics["ratio/max"].value.item() == pytest.approx(math.exp(20))


def test_a_hundred_thousand_tokens_accumulate_in_float32() -> None:
    """A sequence ratio is off by the rounding of its log-probs' mean alone."""
    exact = batch([100_000, 20_000], 1, scale=1e-3, dtype=torch.float64)
    columns = ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
    single = replace(exact, **{name: getattr(exact, name).detach().float() for name in columns})
    single = replace(single, logprobs=single.logprobs.requires_grad_())
    for loss in (GSPO, policy_loss(kl_coefficient=0.1), policy_loss(objective="cispo")):
        wanted, found = loss(exact), loss(single)
        assert found.loss.dtype == torch.float32
        assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-3, abs=1e-5)
        (gradient,) = torch.autograd.grad(found.loss, single.logprobs)
        (exact_gradient,) = torch.autograd.grad(wanted.loss, exact.logprobs)
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("loss", ROWS)
def test_bfloat16_inputs_are_summed_in_float32(loss: PolicyLoss) -> None:
    """Value and gradient are those of the same numbers in float32; a sum in bfloat16 stops growing at 256 tokens."""
    low = batch([3000, 5], 2, dtype=torch.bfloat16)
    columns = ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
    single = replace(low, **{name: getattr(low, name).detach().float() for name in columns})
    single = replace(single, logprobs=single.logprobs.requires_grad_())
    wanted, found = loss(single), loss(low)
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(values(found, "mean"), values(wanted, "mean"))
    (gradient,) = torch.autograd.grad(found.loss, low.logprobs)
    (expected,) = torch.autograd.grad(wanted.loss, single.logprobs)
    torch.testing.assert_close(gradient, expected.bfloat16())


# Train-inference corrections against written-out references; they are detached weights of the policy loss.
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
ragged = st.lists(st.integers(0, 7), min_size=1, max_size=6)
many = settings(max_examples=120, deadline=None, derandomize=True)


def draw(seed: int, lengths: list[int], scale: float) -> LossInputs:
    """Rollout, old and current log-probs that differ by ``scale``; NaN wherever masked out."""
    g, num = torch.Generator().manual_seed(seed), sum(lengths)
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
                weights = {"truncate": clamp(ratio, c.low, c.high), "mask": ratio if inside else 0.0}
                weights["band"] = float(inside)
                weight = weights[c.mode]
            vetoed = any(math.exp(clamp(gap, -700, 700)) < c.veto for gap in gaps.values())
            if vetoed or (float(x.advantages[t]) < 0 and drift > (c.off_policy_delta or math.inf)):
                weight = 0.0
            out[t] = weight
    return out


@pytest.mark.parametrize("c", CORRECTIONS, ids=str)
@settings(parent=many, max_examples=30)
@given(seed=seeds, lengths=ragged, scale=st.sampled_from([0.001, 0.1, 1.0, 1e4]))
def test_weights_scale_every_tokens_loss(c: CorrectionSection, seed: int, lengths: list[int], scale: float) -> None:
    """Seen through the gradient of reinforce, which is weight x -A / tokens, and so without the weight's own."""
    inputs = draw(seed, lengths, scale)
    output = policy_loss(objective="reinforce", correction=c.model_dump())(inputs)
    output.loss.backward()
    weights = torch.tensor(reference(c, inputs, len(lengths)), dtype=torch.float64)
    num = max(inputs.num_tokens, 1)
    expected = torch.where(inputs.mask, -weights * inputs.advantages / num, 0.0)
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
    now = inputs.logprobs.detach()
    for t in torch.nonzero(inputs.mask).flatten().tolist():
        at_t = [s for s in range(12) if inputs.segment_ids[s] == inputs.segment_ids[t] and inputs.mask[s]]
        half = {s: 0.5 * float(now[s] - inputs.rollout_logprobs[s]) for s in at_t}
        weight, advantage, step = min(math.exp(sum(half.values())), 9.0), float(inputs.advantages[t]), 1e-4
        values = [-weight * advantage * (float(now[t]) + x) / inputs.num_tokens for x in (-step, step)]
        assert float(inputs.logprobs.grad[t]) == pytest.approx((values[1] - values[0]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("c", [c for c in CORRECTIONS if c.mode == "reject"], ids=str)
def test_a_clip_loss_with_rejections_is_its_equation_and_has_its_finite_differences(c: CorrectionSection) -> None:
    """Some tokens are dropped, some of the others are clipped, and some are neither."""
    inputs = draw(9, lengths := [4, 3, 5, 2, 6, 1, 1, 2, 7, 3], 0.3)
    weights, old = reference(c, inputs, len(lengths)), inputs.old_logprobs.tolist()
    output = policy_loss(correction=c.model_dump())(inputs)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)

    def token(t: int, logprob: float) -> float:
        ratio, advantage = math.exp(logprob - old[t]), float(inputs.advantages[t])
        return -weights[t] * min(ratio * advantage, clamp(ratio, 0.8, 1.2) * advantage) / inputs.num_tokens

    now, kept = inputs.logprobs.tolist(), torch.nonzero(inputs.mask).flatten().tolist()
    assert output.loss.item() == pytest.approx(sum(token(t, now[t]) for t in kept))
    slopes = {t: (token(t, now[t] + 1e-6) - token(t, now[t] - 1e-6)) / 2e-6 for t in kept}
    assert [float(gradient[t]) for t in kept] == pytest.approx([*slopes.values()], abs=1e-8)
    seen = {(weights[t] == 0, slopes[t] == 0) for t in kept}
    assert seen == {(True, True), (False, True), (False, False)}


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
    assert correction_weights(section, replace(inputs, logprobs=-1.5 * ones), 2 * ones[:1]).tolist() == [1.0, 1.0]


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
    mask = ones.bool()
    inputs = replace(draw(0, [2], 0.0), mask=mask, advantages=ones, old_logprobs=-ones, rollout_logprobs=-2 * ones)
    for high, wanted in ((limit, [1.0, 1.0]), (math.nextafter(limit, 0.0), [0.0, 0.0])):
        section = CorrectionSection.model_validate({"mode": "reject", "level": level, "high": high})
        assert correction_weights(section, inputs, 2 * ones[:1]).tolist() == wanted


def test_second_moment_mask_drops_the_worst_token_only() -> None:
    kept = second_moment_mask(torch.tensor([0.0, 0.1, 0.8, 0.0]), threshold=0.04)
    assert kept.tolist() == [True, True, False, True]


@many
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
    wanted = [math.exp(-1 + 1.25) * math.exp(-1.25 + 2), math.exp(-1 + 2), math.exp(-1 + 2)]  # ratio x behavior weight
    assert output.loss.item() == pytest.approx(-sum(wanted) / 3)
    assert now.grad.tolist() == pytest.approx([-w / 3 for w in wanted])
