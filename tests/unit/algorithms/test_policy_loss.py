"""Worked values, identities between rows of choices, and the faults that other implementations ship."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.corrections import second_moment_mask
from rl_megatron.algorithms.losses import CrossEntropy, PolicyLoss
from rl_megatron.algorithms.losses import policy_loss as loss_of
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.samples import single_turns, to_samples
from rl_megatron.training.credit import AlgorithmState, assign_credit, shape_rewards, trainable_groups
from rl_megatron.types import Loss, LossInputs, LossOutput, Prompt, Samples
from tests.completions import completion
from tests.rows import changed, policy_loss
from tests.samples import loss_inputs

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
    g, lengths = torch.Generator().manual_seed(seed), [5, 9, 1, 3]
    old = [(-torch.rand(n, generator=g)).tolist() for n in lengths]
    new = [[x + spread * float(torch.randn((), generator=g)) for x in row] for row in old]
    advantages = [[float(a)] * n for a, n in zip(torch.randn(4, generator=g), lengths, strict=True)]
    return batch(new, old=old, advantages=advantages)


def evaluate(loss: Callable[[LossInputs], LossOutput], inputs: LossInputs) -> tuple[Tensor, Tensor]:
    inputs = replace(inputs, logprobs=inputs.logprobs.detach().clone().requires_grad_())
    value = loss(inputs).loss
    (gradient,) = torch.autograd.grad(value, inputs.logprobs)
    return value.detach(), gradient


@pytest.mark.parametrize("objective", ["clip", "cispo", "topr", "dppo_tv", "dppo_kl", "gmpo"])
def test_a_token_of_advantage_zero_has_no_gradient_to_limit(objective: str) -> None:
    far = math.log(9)
    inputs = batch([[-3 + far, -3 - far]], old=[[-3, -3]], advantages=[[0.0, 0.0]])
    loss = policy_loss(objective=objective, aggregation="seq_mean_token_mean")
    assert loss.row.cap_high < 9
    assert loss(inputs).metrics["clip_fraction"].value.item() == 0.0


def test_a_long_sequence_weighs_no_more_than_a_short_one_in_gspo() -> None:
    """Token-averaged GSPO turns the sign of this loss; the row that would do it is refused."""
    inputs = batch([[-1] * 2, [-1] * 20], advantages=[[-1] * 2, [0.5] * 20])
    assert evaluate(GSPO, inputs)[0].item() == pytest.approx((1 - 0.5) / 2)
    for aggregation in ("token_mean", "seq_mean_token_sum_norm", "prompt_mean"):
        with pytest.raises(ValueError, match="seq_mean_token_mean"):
            load_config("tiny_cpu", ["algorithm=gspo", f"algorithm.aggregation={aggregation}"])


def test_entropy_is_the_one_given_and_not_that_of_the_sampled_token() -> None:
    assert policy_loss()(ragged()).metrics["entropy"].value.item() == pytest.approx(0.7)
    assert CrossEntropy()(ragged()).metrics["entropy"].value.item() == pytest.approx(0.7)


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
        ({"objective": "cispo", "cap_low": 2.0, "cap_high": 1.0}, "cap_low=2 with algorithm.cap_high=1: the low"),
        ({"correction": {"low": 3.0}}, "low=3 with algorithm.correction.high=2: the lower limit is above the upper"),
        ({"correction": {"high": NAN}}, "correction.high"),
        ({"correction": {"mode": "band", "level": "worst"}}, "worst with algorithm.correction.mode=band: weights"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"parameters": {"tau_negative": 0.0}}, "tau_negative=0: must be from 1e-06 to 1e"),
        ({"parameters": {"second_moment": 0.0}}, "second_moment=0: must be above 0"),
        ({"parameters": {"tau": 1.0}}, "tau"),
        ({"ratio_level": "sequence_sum"}, "detached weight"),
        ({"objective": "sapo", "ratio_level": "sequence"}, "seq_mean_token_mean"),
    ],
)
def test_a_row_that_cannot_be_meant_is_refused_with_the_reason(choices: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RunConfig.model_validate({"algorithm": choices})


RATES = dict.fromkeys(("rate_positive", "rate_negative"), 1e-9)
PRODUCT = {"mode": "truncate", "level": "product", "high": 1e9}


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize(
    ("choices", "most"),
    [
        ({"objective": "importance", "correction": PRODUCT}, 2),
        ({"objective": "vespo", "parameters": dict.fromkeys(("shape_positive", "shape_negative"), 9.0) | RATES}, 1),
    ],
)
def test_weights_are_finite_where_ratios_are_not(choices: dict[str, object], most: int, advantage: float) -> None:
    """Tokens of log-prob -1 that were at -101, and at -201 in the engine: e^100 is no float32, A
    weight of e^20 is left, beside it in the first case the ratio at its own bound, which has no gradient."""
    inputs = batch([[-1.0, -1.0]], old=[[-101.0] * 2], advantages=[[advantage] * 2])
    inputs = replace(inputs, rollout_logprobs=inputs.old_logprobs - 100)
    narrow = {name: getattr(inputs, name).float() for name in ("logprobs", "old_logprobs", "rollout_logprobs")}
    inputs = replace(inputs, **narrow, advantages=inputs.advantages.float(), entropy=inputs.entropy.float())
    value, gradient = evaluate(policy_loss(**choices), inputs)
    sign = -1 if most == 2 else 1  # of -rho A, and of -A log pi
    assert value.item() == pytest.approx(sign * advantage * math.exp(20 * most), rel=1e-5)
    slope = 0.0 if most == 2 else -advantage * math.exp(20) / 2
    assert gradient.tolist() == pytest.approx([slope] * 2, rel=1e-5)


def test_a_token_advantage_under_a_sequence_ratio_is_gspo_token() -> None:
    """s_t = sg(s)·pi/sg(pi): every token has its own advantage, min and clip under the same ratio."""
    inputs = batch([[-1.0, -0.5, -2.0]], old=[[-1.1, -0.6, -2.3]], advantages=[[1.0, -2.0, 0.5]])
    s = math.exp((0.1 + 0.1 + 0.3) / 3)
    value, gradient = evaluate(changed(GSPO, clip_low=0.5, clip_high=0.5), inputs)
    assert value.item() == pytest.approx(-s * (1.0 - 2.0 + 0.5) / 3)
    assert gradient.tolist() == pytest.approx([-s / 3, 2 * s / 3, -0.5 * s / 3])


# Rows of conf/algorithm that must agree with one another, and a choice that must not depend on how a batch is cut.
# Rows are read from their files, so what is compared is what a user gets by name.
LENGTHS = [5, 9, 1, 3]
COPG = ("coefficient=0.3", "placement=completion_reward", "estimator=k1")


def row(*keys: str) -> Loss:
    return loss_of(load_config("tiny_cpu", list(keys)).algorithm, kl_coefficient=0.0, max_new_tokens=9)


def drawn(spread: float = 0.3, seed: int = 0) -> LossInputs:
    """Old log-probs lie ``spread`` from the current ones, the rollout's as far from the old ones."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -torch.rand(len(ids), generator=g, dtype=torch.float64)
    noise = [spread * torch.randn(len(ids), generator=g, dtype=torch.float64) for _ in range(2)]
    return loss_inputs(
        LENGTHS,
        logprobs=(old + noise[0]).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old + noise[1],
        advantages=torch.randn(len(LENGTHS), generator=g, dtype=torch.float64)[ids],
    )


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def credited(*keys: str, rewards: tuple[float, ...] = (1.0, 0, 0.25, 0.5), given: LossInputs | None = None) -> Samples:
    """One group of completions of unlike lengths and rewards, with the advantages of a row; log-probs as ``given``."""
    prompt = Prompt(id="a", text="", token_ids=(1, 2), answer="")
    group = single_turns(prompt, [completion((7,) * n) for n in LENGTHS[: len(rewards)]], rewards=rewards)
    section, samples = load_config("tiny_cpu", list(keys)).algorithm, to_samples([group])
    if given is not None and given.ref_logprobs is not None:
        places = {"old_logprobs": given.old_logprobs, "ref_logprobs": given.ref_logprobs}
        zeros = torch.zeros_like(samples.old_logprobs)
        columns = {name: zeros.masked_scatter(samples.mask, values.float()) for name, values in places.items()}
        samples = replace(samples, **columns)
    shaped = shape_rewards([group], section, AlgorithmState(), max_new_tokens=9)
    return assign_credit(samples, [group], shaped, section, success_reward=1.0)[0]


def test_topr_weighs_a_bad_completion_by_its_product_to_the_policy_that_sampled() -> None:
    """Its taper (arXiv:2503.14286), in the first minibatch of stale samples: the policy is the learner's old one."""
    fresh = drawn(spread=0.0)
    rollout = fresh.old_logprobs + 0.1
    old = {"rollout": rollout, "learner": fresh.old_logprobs}
    chosen = load_config("tiny_cpu", ["algorithm=topr"]).algorithm.old_logprobs
    signs = torch.tensor([0.7, -0.4, -1.1, 0.9], dtype=torch.float64)[fresh.segment_ids]
    x = replace(fresh, rollout_logprobs=rollout, old_logprobs=old[chosen], advantages=signs)
    _, gradient = evaluate(row("algorithm=topr"), x)
    slopes = [[-a * (1 if a > 0 else math.exp(-0.1 * len(of))) / len(LENGTHS) for a in of] for of in cut(x.advantages)]
    assert gradient.tolist() == pytest.approx([slope for of in slopes for slope in of], rel=1e-6)


def test_gspo_token_is_gspo_where_the_advantage_is_constant_in_a_sequence() -> None:
    x = drawn()
    assert_same(evaluate(row("algorithm=gspo_token"), x), evaluate(row("algorithm=gspo"), x))
    torch.testing.assert_close(credited("algorithm=gspo_token").advantages, credited("algorithm=gspo").advantages)


def sequence_forms(name: str, logprobs: list[list[float]], x: LossInputs) -> list[float]:
    """|y| min(s A, clip(s) A) of each sequence, or without its length, as the papers write them."""
    out, starts = [], [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    section = load_config("tiny_cpu", [f"algorithm={name}"]).algorithm
    for first, values in zip(starts, logprobs, strict=True):
        old, advantage = x.old_logprobs[first : first + len(values)].tolist(), float(x.advantages[first])
        s = math.exp(sum(a - b for a, b in zip(values, old, strict=True)) / len(values))
        clipped = min(max(s, 1 - section.clip_low), 1 + section.clip_high)
        out.append((len(values) if name == "luspo" else 1) * min(s * advantage, clipped * advantage))
    return out


@pytest.mark.parametrize("name", ["luspo", "gspo"])
@pytest.mark.parametrize("spread", [0.3, 1e-3, 1e-5])
def test_the_token_form_has_the_gradient_of_the_papers_sequence_form(name: str, spread: float) -> None:
    """By finite differences, some sequences clipped and some not."""
    x = drawn(spread=spread)
    value, gradient = evaluate(row(f"algorithm={name}"), x)
    flat, step = x.logprobs.detach(), 1e-6
    assert value.item() == pytest.approx(-sum(sequence_forms(name, cut(flat), x)) / len(LENGTHS), rel=1e-9)
    for t in range(len(flat)):
        nudge = torch.zeros_like(flat)
        nudge[t] = step
        up, down = (sum(sequence_forms(name, cut(flat + sign * nudge), x)) for sign in (1, -1))
        assert gradient[t].item() == pytest.approx(-(up - down) / (2 * step) / len(LENGTHS), rel=1e-5, abs=1e-7)


def cut(flat: Tensor) -> list[list[float]]:
    return [part.tolist() for part in flat.split(LENGTHS)]


def test_copg_is_rloo_with_the_kl_in_its_rewards_whoever_sampled() -> None:
    """Contrastive policy gradient (arXiv:2406.19185), of each pair (ΔR - β/2·Δh)·Δh, h = log pi/ref: by autograd. The
    one optimizer step of train.minibatches=1 begins at the policy that h is of."""
    keys, beta = ["algorithm=rloo", *(f"algorithm.kl.{key}" for key in COPG)], 0.3
    x = drawn(spread=0.0)
    x = replace(x, ref_logprobs=x.old_logprobs - torch.linspace(-1, 1, sum(LENGTHS), dtype=torch.float64))
    made = credited(*keys, given=x)
    _, gradient = evaluate(row(*keys), replace(x, advantages=made.advantages[made.mask].double()))
    h = torch.stack([one.sum() for one in (x.logprobs - x.ref_logprobs).split(LENGTHS)])
    rewards = torch.tensor([1.0, 0.0, 0.25, 0.5], dtype=torch.float64)
    pairs = torch.combinations(torch.arange(4))
    apart, further = rewards[pairs[:, 0]] - rewards[pairs[:, 1]], h[pairs[:, 0]] - h[pairs[:, 1]]
    objective = ((apart - beta / 2 * further) * further).sum() / 12
    torch.testing.assert_close(gradient, -torch.autograd.grad(objective, x.logprobs)[0], rtol=1e-5, atol=1e-6)


def test_a_group_of_two_without_a_std_has_the_pairwise_gradient_of_p3o() -> None:
    """(r1 - r2)·∇(log pi1 - log pi2)/2 a pair (arXiv:2310.00212), over two sequences, with its ratios clipped apart."""
    keys = ["algorithm=dr_grpo", "algorithm.aggregation=seq_mean_token_sum"]
    made = credited(*keys, rewards=(0.7, 0.2)).advantages
    assert made[made != 0].tolist() == pytest.approx([0.25] * LENGTHS[0] + [-0.25] * LENGTHS[1])
    x = drawn(spread=0.0)
    advantages = torch.tensor([0.25, -0.25, 0.0, 0.0], dtype=torch.float64)[x.segment_ids]
    _, gradient = evaluate(row(*keys), replace(x, advantages=advantages, num_sequences=2))
    wanted = [-0.5 / 2 / 2] * LENGTHS[0] + [0.5 / 2 / 2] * LENGTHS[1] + [0.0] * sum(LENGTHS[2:])
    assert gradient.tolist() == pytest.approx(wanted)


def test_gpg_is_reinforce_over_the_groups_that_dynamic_sampling_keeps() -> None:
    """arXiv:2504.02546 times the mean over all tokens by B / (B - M), M completions of groups without a gradient."""
    keys = ["algorithm=reinforce", "algorithm.advantage_mean=group", "rollout.dynamic_sampling=drop"]
    config, told = load_config("tiny_cpu", keys), [[1.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0, 0.0, 1.0, 0.0], [0.0] * 4]
    prompt, length = Prompt(id="a", text="", token_ids=(1, 2), answer=""), 3
    groups = [single_turns(prompt, [completion((7,) * length)] * 4, rewards=rewards) for rewards in told]
    kept = trainable_groups(groups, config.algorithm, max_new_tokens=9)
    trained = [group for group, keep in zip(groups, kept, strict=True) if keep]
    shaped = shape_rewards(trained, config.algorithm, AlgorithmState(), max_new_tokens=9)
    made = assign_credit(to_samples(trained), trained, shaped, config.algorithm, success_reward=1.0)[0]
    advantages = made.advantages[made.mask].double()
    x = replace(drawn(), logprobs=torch.full_like(advantages, -0.5).requires_grad_())
    zeros, ids = torch.zeros_like(advantages), torch.arange(len(advantages)) // length
    x = replace(x, entropy=zeros, old_logprobs=zeros, rollout_logprobs=zeros, advantages=advantages, segment_ids=ids)
    x = replace(x, mask=ids >= 0, segment_sum=lambda values: values.new_zeros(8).index_add_(0, ids, values))
    _, gradient = evaluate(row(*keys), replace(x, num_tokens=len(ids), num_sequences=8))
    alpha, tokens = 16 / (16 - 8), 16 * length
    wanted = [-(r - sum(of) / 4) * alpha / tokens for of in (told[0], told[2]) for r in of for _ in range(length)]
    assert gradient.tolist() == pytest.approx(wanted)


def test_what_m2po_leaves_out_depends_on_the_whole_minibatch() -> None:
    """Chosen by halves, the token of 0.3 would go: its own half's second moment is above the limit."""
    log_ratios = torch.tensor([0.0, 0.3, 0.0, 0.0, 0.0, 0.0])
    assert second_moment_mask(log_ratios, threshold=0.04).all()
    halves = [second_moment_mask(part, threshold=0.04) for part in log_ratios.split(2)]
    assert torch.cat(halves).tolist() == [True, False, True, True, True, True]
    order = torch.tensor([5, 1, 3, 0, 2, 4])
    moved = second_moment_mask(torch.tensor([0.0, 0.9, 0.1, 0.0, 0.0, 0.0])[order], threshold=0.04)
    assert (order[~moved]).tolist() == [1]
