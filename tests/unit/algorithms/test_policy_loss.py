"""Worked values, identities between rows of choices, and the faults that other implementations ship."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.losses import CrossEntropy, PolicyLoss
from rl_megatron.types import LossInputs, LossOutput
from tests.losses import loss_inputs
from tests.rows import changed, policy_loss

NAN = math.nan
GSPO = policy_loss(ratio_level="sequence", aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4)


def batch(
    logprobs: Sequence[Sequence[float]],
    *,
    old: Sequence[Sequence[float]] | None = None,
    advantages: Sequence[Sequence[float]] | None = None,
    mask: Sequence[Sequence[int]] | None = None,
) -> LossInputs:
    """Rows are sequences. By default: old = logprobs, advantages 1, nothing masked."""

    def flat(rows: Sequence[Sequence[float]]) -> Tensor:
        return torch.tensor([value for row in rows for value in row], dtype=torch.float64)

    values = flat(logprobs)
    old_values = values.clone() if old is None else flat(old)
    return loss_inputs(
        [len(row) for row in logprobs],
        None if mask is None else flat(mask).bool(),
        logprobs=values.requires_grad_(),
        entropy=torch.full_like(old_values, 0.7),
        old_logprobs=old_values,
        rollout_logprobs=old_values,
        advantages=torch.ones_like(old_values) if advantages is None else flat(advantages),
    )


def ragged(seed: int = 0, spread: float = 0.3) -> LossInputs:
    g = torch.Generator().manual_seed(seed)
    lengths = [5, 9, 1, 3]
    old = [(-torch.rand(n, generator=g)).tolist() for n in lengths]
    new = [[x + spread * float(torch.randn((), generator=g)) for x in row] for row in old]
    advantages = [[float(a)] * n for a, n in zip(torch.randn(4, generator=g), lengths, strict=True)]
    return batch(new, old=old, advantages=advantages)


def evaluate(loss: Callable[[LossInputs], LossOutput], inputs: LossInputs) -> tuple[Tensor, Tensor]:
    inputs = replace(inputs, logprobs=inputs.logprobs.detach().clone().requires_grad_())
    value = loss(inputs).loss
    (gradient,) = torch.autograd.grad(value, inputs.logprobs)
    return value.detach(), gradient


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(a[0], b[0])
    torch.testing.assert_close(a[1], b[1])


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 2.0), ("seq_mean_token_mean", 1.75), ("seq_mean_token_sum", 3.0)]
)
def test_aggregations_of_a_masked_batch(aggregation: str, expected: float) -> None:
    """With A = -1, the reinforce loss of a token is its log-prob."""
    inputs = batch([[1, NAN], [2, 3]], advantages=[[-1, NAN], [-1, -1]], mask=[[1, 0], [1, 1]])
    value, gradient = evaluate(policy_loss(objective="reinforce", aggregation=aggregation), inputs)
    assert value.item() == pytest.approx(expected)
    assert gradient[1] == 0


@pytest.mark.parametrize(("aggregation", "expected"), [("seq_mean_token_mean", 2.35), ("token_mean", 2.2)])
def test_aggregations_of_a_long_and_a_short_sequence(aggregation: str, expected: float) -> None:
    inputs = batch([[1] * 4 + [10], [1] * 9 + [10]], advantages=[[-1] * 5, [-1] * 10])
    value, _ = evaluate(policy_loss(objective="reinforce", aggregation=aggregation), inputs)
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        ("token_mean", -2 / 11, -2 / 11),
        ("seq_mean_token_mean", -2 / 4 / 2, -2 / 7 / 2),
        ("seq_mean_token_sum", -2 / 2, -2 / 2),
    ],
)
def test_gradient_of_a_token_in_sequences_of_4_and_7(aggregation: str, short: float, long: float) -> None:
    inputs = batch([[-1] * 4, [-1] * 7], advantages=[[2] * 4, [2] * 7])
    _, gradient = evaluate(policy_loss(aggregation=aggregation), inputs)
    assert gradient.tolist() == pytest.approx([short] * 4 + [long] * 7)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (math.log(1.1), 1.0, -1.1, -1.1),  # inside the band
        (math.log(1.5), 1.0, -1.28, 0.0),  # clipped above: no more push up
        (math.log(1.5), -1.0, 1.5, 1.5),  # pessimistic: a bad token that grew keeps its gradient
        (math.log(0.5), -1.0, 0.8, 0.0),  # clipped below: no more push down
        (math.log(0.5), 1.0, -0.5, -0.5),
    ],
)
def test_ppo_clip_of_one_token(log_ratio: float, advantage: float, loss: float, gradient: float) -> None:
    inputs = batch([[-1 + log_ratio]], old=[[-1]], advantages=[[advantage]])
    value, slope = evaluate(policy_loss(clip_low=0.2, clip_high=0.28), inputs)
    assert (value.item(), slope.item()) == pytest.approx((loss, gradient))


def test_cispo_caps_are_absolute_ratios_and_keep_every_gradient() -> None:
    """A cap of 5 caps at 5, not at 1 + 5."""
    inputs = batch([[-1 + math.log(8), -1 + math.log(4)]], old=[[-1, -1]])
    output = policy_loss(objective="cispo", cap_high=5.0)(inputs)
    output.loss.backward()
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([-5 / 2, -4 / 2])
    assert output.metrics["clip_fraction"].value.item() == pytest.approx(0.5)


@pytest.mark.parametrize("objective", ["clip", "cispo", "topr", "dppo_tv", "dppo_kl"])
def test_a_token_of_advantage_zero_has_no_gradient_to_limit(objective: str) -> None:
    far = math.log(9)
    inputs = batch([[-3 + far, -3 - far]], old=[[-3, -3]], advantages=[[0.0, 0.0]])
    assert policy_loss(objective=objective).row.cap_high < 9
    assert policy_loss(objective=objective)(inputs).metrics["clip_fraction"].value.item() == 0.0


def test_gspo_is_grpo_with_a_sequence_ratio() -> None:
    grpo = policy_loss(aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4)
    assert changed(grpo, ratio_level="sequence") == GSPO
    ones = [[-0.5], [-0.1]], [[-0.6], [-0.2]]
    assert_same(evaluate(grpo, batch(ones[0], old=ones[1])), evaluate(GSPO, batch(ones[0], old=ones[1])))


def test_gspo_is_the_loss_of_its_paper() -> None:
    """-mean over sequences of min(sA, clip(s)A), s by autograd through the sequence's mean log-ratio."""
    for seed in range(20):
        inputs = ragged(seed, spread=0.1)
        loss = changed(GSPO, clip_low=0.03, clip_high=0.04)
        logprobs = inputs.logprobs.detach().clone().requires_grad_()
        terms = []
        for s in range(4):
            chosen = inputs.segment_ids == s
            ratio = (logprobs[chosen] - inputs.old_logprobs[chosen]).mean().exp()
            advantage = inputs.advantages[chosen][0]
            terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.97, 1.04) * advantage))
        value = torch.stack(terms).mean()
        (gradient,) = torch.autograd.grad(value, logprobs)
        assert_same(evaluate(loss, inputs), (value.detach(), gradient))


def test_a_long_sequence_weighs_no_more_than_a_short_one_in_gspo() -> None:
    """Token-averaged GSPO turns the sign of this loss; the row that would do it is refused."""
    inputs = batch([[-1] * 2, [-1] * 20], advantages=[[-1] * 2, [0.5] * 20])
    assert evaluate(GSPO, inputs)[0].item() == pytest.approx((1 - 0.5) / 2)
    for aggregation in ("token_mean", "seq_mean_token_sum_norm", "prompt_mean"):
        with pytest.raises(ValueError, match="seq_mean_token_mean"):
            changed(GSPO, aggregation=aggregation)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_at_ratio_one_clip_and_uncapped_cispo_have_the_gradient_of_reinforce(aggregation: str) -> None:
    inputs = ragged(spread=0.0)
    reinforce = evaluate(policy_loss(objective="reinforce", aggregation=aggregation), inputs)
    clip = evaluate(policy_loss(objective="clip", aggregation=aggregation), inputs)
    cispo = evaluate(policy_loss(objective="cispo", aggregation=aggregation, cap_high=1e30), inputs)
    torch.testing.assert_close(clip[1], reinforce[1])
    assert_same(cispo, reinforce)


def test_entropy_is_the_one_given_and_not_that_of_the_sampled_token() -> None:
    assert policy_loss()(ragged()).metrics["entropy"].value.item() == pytest.approx(0.7)
    assert CrossEntropy()(ragged()).metrics["entropy"].value.item() == pytest.approx(0.7)


def test_kl_to_the_old_policy_is_the_k3_estimate_of_the_sampler_against_the_current() -> None:
    """Averaged over tokens drawn from pi_old, k3 is exactly KL(pi_old‖pi): here summed over a vocabulary of 3."""
    old, new = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    drawn = [0, 0, 1, 2]  # the proportions of pi_old
    inputs = batch([new.log()[drawn].tolist()], old=[old.log()[drawn].tolist()])
    kl = (old * (old / new).log()).sum().item()
    assert policy_loss()(inputs).metrics["kl/old_policy"].value.item() == pytest.approx(kl)


def test_cross_entropy_is_the_mean_over_kept_tokens() -> None:
    inputs = batch([[-1, NAN], [-2, -3]], mask=[[1, 0], [1, 1]], old=[[NAN, NAN], [0, 0]])
    value, gradient = evaluate(CrossEntropy(), inputs)
    assert value.item() == pytest.approx(2.0)
    assert gradient.tolist() == pytest.approx([-1 / 3, 0, -1 / 3, -1 / 3])


@pytest.mark.parametrize("loss", [GSPO, policy_loss(objective="cispo"), CrossEntropy()])
@pytest.mark.parametrize("num_positions", [0, 3])
def test_an_empty_micro_batch_gives_zero_with_a_gradient_path(loss: PolicyLoss, num_positions: int) -> None:
    inputs = batch([[NAN] * num_positions], advantages=[[NAN] * num_positions], mask=[[0] * num_positions])
    value, gradient = evaluate(loss, inputs)
    assert value.item() == 0.0
    assert gradient.tolist() == [0.0] * num_positions


@pytest.mark.parametrize("loss", [GSPO, policy_loss(objective="cispo", cap_high=3.0), CrossEntropy()])
def test_a_loss_survives_pickling(loss: PolicyLoss) -> None:
    assert pickle.loads(pickle.dumps(loss)) == loss


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": NAN}, "clip_high"),
        ({"objective": "cispo", "cap_low": 2.0, "cap_high": 1.0}, "cap_low=2.0 is above algorithm.cap_high=1.0"),
        ({"correction": {"low": 3.0}}, "low=3.0 is above algorithm.correction.high=2.0"),
        ({"correction": {"high": NAN}}, "correction.high"),
        ({"correction": {"mode": "band", "level": "worst"}}, "level=worst with mode=band: a weight is of a token or"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"tau_negative": 0.0}, "tau_negative"),
        ({"ratio_level": "sequence_sum"}, "detached weight"),
        ({"objective": "sapo", "ratio_level": "sequence"}, "seq_mean_token_mean"),
    ],
)
def test_a_row_that_cannot_be_meant_is_refused_with_the_reason(choices: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        policy_loss(**choices)


@pytest.mark.parametrize("objective", ["clip", "importance", "sapo", "vespo", "cispo", "topr"])
def test_at_ratio_one_every_objective_has_the_gradient_of_reinforce(objective: str) -> None:
    inputs = ragged(spread=0.0)
    expected = evaluate(policy_loss(objective="reinforce"), inputs)[1]
    torch.testing.assert_close(evaluate(policy_loss(objective=objective), inputs)[1], expected)


PRODUCT = {"mode": "truncate", "level": "product", "high": 1e9}


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize(
    ("choices", "most"),
    [
        ({"objective": "importance", "correction": PRODUCT}, 2),
        ({"objective": "vespo", **dict.fromkeys(("shape_positive", "shape_negative"), 9.0)}, 1),
    ],
)
def test_weights_are_finite_in_float32_where_ratios_are_not(
    choices: dict[str, object], most: int, advantage: float
) -> None:
    """Tokens of log-prob -1 that were at -101, and at -201 in the engine: e^100 is no float32, A
    weight of e^20 is left, beside it in the first case the ratio at its own bound, which has no gradient."""
    rates = dict.fromkeys(("rate_positive", "rate_negative"), 1e-9) if choices["objective"] == "vespo" else {}
    inputs = batch([[-1.0, -1.0]], old=[[-101.0] * 2], advantages=[[advantage] * 2])
    inputs = replace(inputs, rollout_logprobs=inputs.old_logprobs - 100)
    narrow = {name: getattr(inputs, name).float() for name in ("logprobs", "old_logprobs", "rollout_logprobs")}
    inputs = replace(inputs, **narrow, advantages=inputs.advantages.float(), entropy=inputs.entropy.float())
    value, gradient = evaluate(policy_loss(**choices, **rates), inputs)
    sign = -1 if most == 2 else 1  # of -rho A, and of -A log pi
    assert value.item() == pytest.approx(sign * advantage * math.exp(20 * most), rel=1e-5)
    slope = 0.0 if most == 2 else -advantage * math.exp(20) / 2
    assert gradient.tolist() == pytest.approx([slope] * 2, rel=1e-5)


def test_a_fixed_length_norm_is_token_sums_over_it() -> None:
    """[[1,.],[2,3]] over 2 is 1.5; [1,1,1,1,10] and [1x9,10] over 10 are 1.4 and 1.9."""
    fixed = policy_loss(objective="reinforce", aggregation="seq_mean_token_sum_norm", max_new_tokens=2)
    inputs = batch([[1, NAN], [2, 3]], advantages=[[-1, NAN], [-1, -1]], mask=[[1, 0], [1, 1]])
    assert evaluate(fixed, inputs)[0].item() == pytest.approx(1.5)
    ten = replace(fixed, max_new_tokens=10)
    for row, expected in (([1] * 4 + [10], 1.4), ([1] * 9 + [10], 1.9)):
        assert evaluate(ten, batch([row], advantages=[[-1] * len(row)]))[0].item() == pytest.approx(expected)
    seven = policy_loss(aggregation="seq_mean_token_sum_norm", max_new_tokens=7)
    _, gradient = evaluate(seven, batch([[-1] * 4, [-1] * 7], advantages=[[2] * 4, [2] * 7]))
    assert gradient.tolist() == pytest.approx([-2 / 14] * 11)


def test_dual_clip_bounds_a_bad_token_that_grew() -> None:
    inputs = batch([[-1 + math.log(10), -1 + math.log(2)]], old=[[-1, -1]], advantages=[[-1, -1]])
    value, gradient = evaluate(policy_loss(dual_clip=3.0), inputs)
    assert value.item() == pytest.approx((3 + 2) / 2)
    assert gradient.tolist() == pytest.approx([0.0, 1.0])


def test_a_token_advantage_under_a_sequence_ratio_is_gspo_token() -> None:
    """s_t = sg(s)·pi/sg(pi): every token has its own advantage, min and clip under the same ratio."""
    inputs = batch([[-1.0, -0.5, -2.0]], old=[[-1.1, -0.6, -2.3]], advantages=[[1.0, -2.0, 0.5]])
    s = math.exp((0.1 + 0.1 + 0.3) / 3)
    value, gradient = evaluate(changed(GSPO, clip_low=0.5, clip_high=0.5), inputs)
    assert value.item() == pytest.approx(-s * (1.0 - 2.0 + 0.5) / 3)
    assert gradient.tolist() == pytest.approx([-s / 3, 2 * s / 3, -0.5 * s / 3])
