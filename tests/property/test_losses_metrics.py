"""PolicyLoss's metrics against direct formulas; and float32 at extreme ratios, low precision and long sequences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_megatron.algorithms.auxiliary import PreferenceLoss, ValueLoss
from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.algorithms.ratios import histogram, ratio_quantiles
from rl_megatron.observability.recorder import Row
from rl_megatron.training.measures import Made, policy_row
from rl_megatron.types import Counts, Loss, LossInputs, Metric, StepResult
from tests.losses import loss_inputs, part_of
from tests.reduction import values
from tests.rows import pair_loss, policy_loss

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
def test_the_two_sides_of_the_clip_fraction_are_all_of_it(
    loss: PolicyLoss, seed: int, lengths: list[int], scale: float
) -> None:
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
        if found[name].over == "mean" and not name.startswith("loss/"):
            totals = [one[name].value * one[name].weight for one in (found, others)]
            torch.testing.assert_close(totals[0], totals[1], msg=name)


def test_clip_sides_of_known_tokens() -> None:
    """Up by half with A > 0 is clipped above, down by half with A < 0 below; the other two are free."""
    x = batch([4], 0)
    log_ratios = torch.tensor([1.5, 0.5, 1.5, 0.5]).double().log()
    x = replace(x, logprobs=x.old_logprobs + log_ratios, advantages=torch.tensor([1.0, -1.0, -1.0, 1.0]).double())
    means = values(policy_loss()(x))
    assert (means["clip_fraction/low"].item(), means["clip_fraction/high"].item()) == (0.25, 0.25)


@quick
@given(seeds, st.integers(1, 400), st.sampled_from([1e-4, 0.05, 1.0, 30.0]))
def test_quantiles_of_the_histogram_are_torchs_within_a_bin(seed: int, num: int, scale: float) -> None:
    """A bin is at most 10 % of the log-ratio wide, 1e-6 nats around 0, and its middle stands for it."""
    g = torch.Generator().manual_seed(seed)
    values = (scale * torch.randn(num, generator=g, dtype=torch.float64)).clamp(-20, 20)
    shares = [0.01, 0.25, 0.5, 0.75, 0.99]
    counts = histogram(values, torch.ones(num, dtype=torch.bool))
    assert counts.sum().item() == num
    for share, ratio in zip(shares, ratio_quantiles(counts.tolist(), shares), strict=True):
        low, high = (torch.quantile(values, share, interpolation=side).item() for side in ("lower", "higher"))
        assert low - 0.05 * abs(low) - 1e-6 <= math.log(ratio) <= high + 0.05 * abs(high) + 1e-6


def test_quantiles_of_one_are_it_and_of_none_are_not_a_number() -> None:
    one = torch.tensor([0.5])
    found = ratio_quantiles(histogram(one, torch.tensor([True])).tolist(), [0.01, 0.99])
    assert found == pytest.approx([math.exp(0.5)] * 2, rel=0.03)
    (beyond,) = ratio_quantiles(histogram(torch.tensor([30.0]), torch.tensor([True])).tolist(), [0.5])
    assert math.exp(20) < beyond < math.exp(30)
    none = ratio_quantiles(histogram(one, torch.tensor([False])).tolist(), [0.01, 0.5, 0.99])
    assert [math.isnan(ratio) for ratio in none] == [True] * 3


@quick
@given(seeds, st.integers(1, 60), st.integers(0, 60))
def test_histograms_of_a_split_add_up(seed: int, num: int, cut: int) -> None:
    g = torch.Generator().manual_seed(seed)
    values, mask = torch.randn(num, generator=g), torch.rand(num, generator=g) < 0.7
    whole = histogram(values, mask)
    assert torch.equal(histogram(values[:cut], mask[:cut]) + histogram(values[cut:], mask[cut:]), whole)
    assert whole.sum().item() == mask.sum().item()


@pytest.mark.parametrize("loss", [policy_loss(), GSPO])
@quick
@given(seed=seeds, lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_the_effective_fraction_is_kishs_over_the_number_of_weights(
    loss: PolicyLoss, seed: int, lengths: list[int]
) -> None:
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
        said: dict[str, Metric[float | Counts]] = {"loss": Metric(value=0.0)}
        for name, metric in loss(x).metrics.items():
            value = metric.value.detach()
            said[name] = Metric(
                value=tuple(value.tolist()) if metric.over == "histogram" else value.item(),
                over=metric.over,
                weight=metric.weight,
            )
        steps.append(Made(said, StepResult(grad_norm=0.0)))
    return policy_row(steps)


@pytest.mark.parametrize("loss", [*ROWS, ValueLoss(clip=0.1), pair_loss(0.1)])
@quick
@given(seed=seeds, pairs=st.integers(2, 4), cut=st.integers(1, 3))
def test_means_of_a_step_are_those_of_its_minibatches_tokens_together(
    loss: Loss, seed: int, pairs: int, cut: int
) -> None:
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
    assert row_of(loss, far)["ratio/clamped_fraction"] == pytest.approx(1)
    assert not {"ratio/share", "ratio/second_moment"} & set(row)


def test_an_entropy_term_has_the_weight_of_a_token_whatever_its_correction() -> None:
    x = batch([3, 5], 0, kept=0.8)
    x = replace(x, entropy=x.entropy.requires_grad_())
    loss = policy_loss(entropy_coefficient=0.2, correction={"mode": "mask", "low": 0.99, "high": 1.01})
    (gradient,) = torch.autograd.grad(loss(x).loss, x.entropy)
    torch.testing.assert_close(gradient, -0.2 * x.mask.double() / x.num_tokens, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", ROWS)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_log_ratios_of_ten_thousand_are_clamped_counted_and_finite(loss: PolicyLoss, gap: float) -> None:
    x = batch([3, 5], 0, dtype=torch.float32)
    far = torch.arange(8) < 3  # the first sequence
    x = replace(x, logprobs=torch.where(far, x.old_logprobs + gap, x.logprobs.detach()).requires_grad_())
    output = loss(x)
    (gradient,) = torch.autograd.grad(output.loss, x.logprobs)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(gradient).all()
    assert all(torch.isfinite(value) for value in values(output, "mean").values())
    counted = 3 / 8 if loss.row.ratio_level == "token" else 1 / 2
    assert output.metrics["ratio/clamped_fraction"].value.item() == pytest.approx(counted)


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
