"""Objectives of papers: plain loops over their equations, finite differences, and splits into micro-batches."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.algorithms.segments import segment_sum
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.types import LossInputs, LossOutput, Metric
from tests.property.test_losses_metrics import batch, row_of
from tests.rows import changed, policy_loss
from tests.samples import joined, part_of, values

LENGTHS = [5, 9, 1, 3, 7, 4]
LOW, HIGH = 0.3, 0.5
GMPO = policy_loss(objective="gmpo", aggregation="seq_mean_token_mean", clip_low=LOW, clip_high=HIGH)


def evaluate(inputs: LossInputs, logprobs: Tensor | None = None) -> tuple[LossOutput, Tensor]:
    given = (inputs.logprobs if logprobs is None else logprobs).detach().clone().requires_grad_()
    output = GMPO(replace(inputs, logprobs=given))
    (gradient,) = torch.autograd.grad(output.loss, given)
    return output, gradient


def of_the_paper(inputs: LossInputs, logprobs: list[float]) -> tuple[float, list[list[int]], list[int]]:
    """Its equation 4 as products and roots, one sequence at a time: the loss, each sequence's tokens, the clipped."""
    total, sequences, clipped = 0.0, [], []
    for s in range(len(LENGTHS)):
        mine = [t for t in range(len(logprobs)) if inputs.segment_ids[t] == s and inputs.mask[t]]
        sequences.append(mine)
        if not mine:
            continue
        advantage, product = float(inputs.advantages[mine[0]]), 1.0
        sign = 1 if advantage > 0 else -1
        for t in mine:
            ratio = math.exp(logprobs[t] - float(inputs.old_logprobs[t]))
            kept = min(ratio**sign, min(max(ratio, 1 - LOW), 1 + HIGH) ** sign) ** sign
            product *= kept
            if not math.isclose(kept, ratio, rel_tol=1e-12):
                clipped.append(t)
        total -= product ** (1 / len(mine)) * advantage / len(LENGTHS)
    return total, sequences, clipped


@pytest.mark.parametrize("seed", range(4))
def test_gmpo_is_the_equation_of_its_paper(seed: int) -> None:
    """Value and gradient by central differences of the plain loops, a quarter of the tokens being context."""
    inputs = batch(LENGTHS, seed, scale=0.6, kept=0.75)
    output, gradient = evaluate(inputs)
    values: list[float] = inputs.logprobs.tolist()
    loss, sequences, clipped = of_the_paper(inputs, values)
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    step = 1e-6
    for t in range(len(values)):
        up, down = ([*values[:t], values[t] + sign * step, *values[t + 1 :]] for sign in (1, -1))
        slope = (of_the_paper(inputs, up)[0] - of_the_paper(inputs, down)[0]) / (2 * step)
        assert gradient[t].item() == pytest.approx(slope, abs=1e-8)
    assert not gradient[clipped].any()
    trained = sum(len(tokens) for tokens in sequences)
    assert output.metrics["clip_fraction"].value.item() == pytest.approx(len(clipped) / trained)
    assert 0 < len(clipped) < trained


def test_the_side_that_is_clipped_follows_the_sign_of_the_advantage() -> None:
    """A good sequence keeps its small ratios, a bad one its large ones: 0.1 * 1.5 and 0.7 * 10, under the root."""
    inputs = batch([2, 2], 0)
    ratios = torch.tensor([0.1, 10.0, 0.1, 10.0], dtype=torch.float64)
    inputs = replace(inputs, advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]).double())
    output, gradient = evaluate(inputs, inputs.old_logprobs + ratios.log())
    good, bad = math.sqrt(0.1 * 1.5), math.sqrt(0.7 * 10)
    assert output.loss.item() == pytest.approx((bad - good) / 2)
    assert gradient.tolist() == pytest.approx([-good / 4, 0, 0, bad / 4])
    sides = [output.metrics[f"clip_fraction/{side}"].value.item() for side in ("low", "high")]
    assert sides == pytest.approx([0.25, 0.25])


def test_a_token_without_an_advantage_counts_in_its_sequences_mean_as_a_bad_one() -> None:
    """One token of advantage 2 beside one of 0: √(1.5 * 10) where the latter grew, √(1.5 * 0.7) where it shrank; the
    limit that shaped the mean is counted for the first token alone."""
    inputs = replace(batch([2, 2], 0), advantages=torch.tensor([2.0, 0.0, 2.0, 0.0]).double())
    ratios = torch.tensor([3.0, 10.0, 3.0, 0.1], dtype=torch.float64)
    output, gradient = evaluate(inputs, inputs.old_logprobs + ratios.log())
    grown, shrunk = math.sqrt(1.5 * 10), math.sqrt(1.5 * 0.7)
    assert output.loss.item() == pytest.approx(-2 * (grown + shrunk) / 4)
    assert not gradient.any()
    assert output.metrics["clip_fraction"].value.item() == 0.5


def test_tokens_with_advantages_of_their_own_share_the_mean_and_go_by_their_own() -> None:
    """Advantages 2, -1 of ratios 1.2, 0.8, within the limits: √0.96 times their mean of 0.5, and half of each."""
    inputs = replace(batch([2], 0), advantages=torch.tensor([2.0, -1.0]).double())
    output, gradient = evaluate(inputs, inputs.old_logprobs + torch.tensor([1.2, 0.8], dtype=torch.float64).log())
    assert output.loss.item() == pytest.approx(-math.sqrt(0.96) * 0.5)
    assert gradient.tolist() == pytest.approx([-math.sqrt(0.96), math.sqrt(0.96) / 2])


def test_the_row_has_the_limits_of_the_paper() -> None:
    """(e^-0.4, e^0.4), as 1 minus and 1 plus."""
    row = load_config("tiny_cpu", ["algorithm=gmpo"]).algorithm
    assert (1 - row.clip_low, 1 + row.clip_high) == pytest.approx((math.exp(-0.4), math.exp(0.4)), abs=1e-4)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("aggregation=token_mean", "a sequence has one loss.*set aggregation=seq_mean_token_mean"),
        ("clip_low=1.0", "clip_low=1 .*no logarithm; set it below 1"),
        ("ratio_level=sequence", "objective=gmpo does not read it"),
        ("dual_clip=3", "objective=gmpo does not read it"),
    ],
)
def test_what_it_cannot_use_is_refused(key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config("tiny_cpu", ["algorithm=gmpo", f"algorithm.{key}"])


def test_the_contributors_page_names_every_place_of_its_example() -> None:
    """And no other: each file of the package and of conf/ in which the name is a word, and what was written of it."""
    root = Path(__file__).parents[3]
    (example,) = re.findall(
        r"GMPO is the example,.*?test_objectives\.py`", (root / "CONTRIBUTING.md").read_text(), re.S
    )
    named = re.findall(r"`([\w/]+\.\w+)`", example)
    files = [*root.glob("rl_megatron/**/*.py"), *root.glob("conf/**/*.yaml")]
    places = {str(path.relative_to(root)) for path in files if re.search(r"\bgmpo\b", path.read_text())}
    written = {"docs/algorithms.md", "tests/unit/algorithms/test_objectives.py"}
    there = [path if (root / path).is_file() else f"rl_megatron/{path}" for path in named]
    assert sorted(there) == sorted(places | written)


# DPPO (arXiv:2602.04879), Binary-TV and Binary-KL: plain loops over its equations, finite differences, a split.
LIMITS = {"tv": (0.12, 0.2), "kl": (0.03, 0.06)}
CAP = 1.6


def evaluate_dppo(kind: str, inputs: LossInputs, mask: Tensor | None = None) -> tuple[LossOutput, Tensor]:
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
def test_dppo_is_the_equation_of_its_paper(kind: str, seed: int) -> None:
    """The gradient is that of -M rho A by central differences; a weight beyond the cap is the cap's."""
    inputs = batch(LENGTHS, seed, scale=0.6, kept=0.75)
    inputs = replace(inputs, logprobs=inputs.logprobs.clamp(max=-0.02), old_logprobs=inputs.old_logprobs - 0.2)
    output, gradient = evaluate_dppo(kind, inputs)
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
    _, gradient = evaluate_dppo(kind, inputs)
    assert (gradient != 0).tolist() == [False, True, True, False]


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
    output, gradient = evaluate_dppo(kind, inputs)
    assert output.loss.isfinite()
    assert (gradient != 0).tolist() == [True, False, False, False]


def test_the_rows_have_the_limits_of_the_paper_and_the_policy_that_sampled() -> None:
    for name, limit in (("dppo_tv", 0.15), ("dppo_kl", 0.05)):
        row = load_config("tiny_cpu", [f"algorithm={name}"]).algorithm
        assert (row.clip_low, row.clip_high, row.cap_high, row.old_logprobs) == (limit, limit, 20.0, "rollout")


@pytest.mark.parametrize("key", ["ratio_level=sequence", "dual_clip=3", "cap_low=0.5"])
def test_what_it_does_not_read_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"objective=dppo_tv does not read it"):
        load_config("tiny_cpu", ["algorithm=dppo_tv", f"algorithm.{key}"])


def test_pairs_alone_have_lengths_to_be_normalised() -> None:
    with pytest.raises(ConfigError, match=r"per_token=true does nothing: with algorithm.preference.beta=null the"):
        load_config("tiny_cpu", ["algorithm=grpo", "algorithm.preference.per_token=true"])


# CE-GPPO (arXiv:2509.20712) and GPPO: plain loops over the three cases of its loss, by finite differences.
LENGTHS_OF_THREE = [3, 1, 4, 2] * 8
KEPT_LOW, KEPT_HIGH, DUAL = 0.2, 0.28, 1.5


def gradient_of(loss: PolicyLoss, inputs: LossInputs) -> tuple[torch.Tensor, list[float]]:
    given = inputs.logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, logprobs=given))
    return output.loss.detach(), torch.autograd.grad(output.loss, given)[0].tolist()


def of_paper(ratio: float, at: float, advantage: float, beta1: float, beta2: float) -> float:
    """Its loss of one token, a function of the ratio where ``at`` is the ratio without a gradient."""
    if at < 1 - KEPT_LOW and advantage < 0:
        return -beta1 * (1 - KEPT_LOW) / at * ratio * advantage
    if at > 1 + KEPT_HIGH and advantage > 0:
        return -beta2 * (1 + KEPT_HIGH) / at * ratio * advantage
    if advantage < 0 and at > DUAL:
        return -DUAL * advantage
    return -ratio * advantage


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.75, 1.0), (0.0, 0.5), (0.5, 0.0)])
def test_the_gradient_is_that_of_its_paper(beta1: float, beta2: float, level: str) -> None:
    """Ratios of tokens, or one of a sequence, of which each token has an equal part; beside a dual clip."""
    row = {"clip_high": KEPT_HIGH, "dual_clip": DUAL, "ratio_level": level, "aggregation": "seq_mean_token_mean"}
    inputs = batch(LENGTHS_OF_THREE, 3, scale=0.8, kept=0.75)
    value, found = gradient_of(policy_loss(keep_low=beta1, keep_high=beta2, **row), inputs)
    cases, log_ratio = set(), (inputs.logprobs - inputs.old_logprobs).tolist()
    trained = [t for t in range(len(log_ratio)) if inputs.mask[t]]
    for t in trained:
        of_sequence = [u for u in trained if inputs.segment_ids[u] == inputs.segment_ids[t]]
        num, advantage = len(of_sequence), inputs.advantages[t].item()
        of = [t] if level == "token" else of_sequence
        at = math.exp(sum(log_ratio[u] for u in of) / len(of))
        up, down = (of_paper(at * math.exp(step), at, advantage, beta1, beta2) for step in (1e-6, -1e-6))
        cases.add((at < 1 - KEPT_LOW, at > 1 + KEPT_HIGH, advantage > 0))
        assert found[t] == pytest.approx((up - down) / 2e-6 / num / inputs.num_sequences, abs=1e-8)
    assert {(True, False, False), (False, True, True)} <= cases
    assert not any(found[t] for t in range(len(found)) if not inputs.mask[t])
    plain, clipped = gradient_of(policy_loss(**row), inputs)
    assert value == plain
    assert found != clipped


# The importance ratio of a turn: one turn is a sequence, several are what plain loops over turns give.
GSPO = policy_loss(ratio_level="sequence", aggregation="seq_mean_token_mean", clip_low=0.1, clip_high=0.1)
TURN_LENGTHS = [5, 9, 1, 3]


def with_turns(inputs: LossInputs, ids: Tensor) -> LossInputs:
    """``ids`` [T] number the turns of all sequences."""
    num = int(ids.max()) + 1

    def turn_sum(values: Tensor) -> Tensor:
        assert not values.requires_grad, "turn_sum is given detached tensors only"
        return segment_sum(values, ids, num)[ids]

    return replace(inputs, turn_sum=turn_sum)


def evaluate_turns(loss: object, inputs: LossInputs) -> tuple[Tensor, Tensor, dict[str, Metric[Tensor]]]:
    inputs = replace(inputs, logprobs=inputs.logprobs.detach().clone().requires_grad_())
    said = loss(inputs)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(said.loss, inputs.logprobs)
    return said.loss.detach(), gradient, dict(said.metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_turn_is_the_sequence_to_the_bit(dtype: torch.dtype) -> None:
    inputs = batch(TURN_LENGTHS, 1, scale=0.3, dtype=dtype, kept=0.8)
    one = evaluate_turns(GSPO, inputs)
    other = evaluate_turns(changed(GSPO, ratio_level="turn"), with_turns(inputs, inputs.segment_ids))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert {name: m.value.tolist() for name, m in one[2].items()} == {n: m.value.tolist() for n, m in other[2].items()}


def test_turns_are_those_of_plain_loops() -> None:
    """Turns of four tokens; a quarter of the tokens is context."""
    inputs = batch(TURN_LENGTHS, 2, scale=0.6, kept=0.75)
    ids = inputs.segment_ids * 10 + torch.cat([torch.arange(length) for length in TURN_LENGTHS]) // 4
    loss, gradient, metrics = evaluate_turns(changed(GSPO, ratio_level="turn"), with_turns(inputs, ids))
    difference = (inputs.logprobs - inputs.old_logprobs).detach()
    total, slopes, limited = 0.0, [0.0] * len(ids), 0.0
    for s in range(len(TURN_LENGTHS)):
        mine = [t for t in range(len(ids)) if inputs.segment_ids[t] == s and inputs.mask[t]]
        for t in mine:
            turn = [u for u in mine if ids[u] == ids[t]]
            gaps = [float(difference[u]) for u in turn]
            ratio, advantage = math.exp(sum(gaps) / len(gaps)), float(inputs.advantages[t])
            free, clipped = ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage
            weight = 1 / len(TURN_LENGTHS) / len(mine)
            total -= min(free, clipped) * weight
            slopes[t] = 0.0 if clipped < free else -free * weight
            limited += weight * (clipped < free)
    assert float(loss) == pytest.approx(total, rel=1e-12)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-12)
    assert float(metrics["clip_fraction"].value) == pytest.approx(limited, rel=1e-12)
    assert 0 < limited < 1


def test_garbage_outside_the_mask_changes_nothing() -> None:
    inputs = batch(TURN_LENGTHS, 3, kept=0.7)
    inputs = with_turns(replace(inputs, token_weight=torch.rand(18).double()), inputs.segment_ids)
    junk = torch.tensor([math.nan, math.inf, -math.inf] * 6).double()
    poisoned = replace(
        inputs,
        **{
            name: torch.where(inputs.mask, getattr(inputs, name), junk)
            for name in ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "entropy", "token_weight")
        },
    )
    loss = changed(GSPO, ratio_level="turn")
    assert [x.tolist() for x in evaluate_turns(loss, inputs)[:2]] == [
        x.tolist() for x in evaluate_turns(loss, poisoned)[:2]
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"ratio_level": "turn", "aggregation": "seq_mean_token_mean"}, "samples' turn_of"),
        ({"aggregation": "prompt_mean"}, "samples' token_weight"),
    ],
)
def test_a_batch_without_what_the_loss_needs_is_refused(row: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        partial(policy_loss(**row), batch(TURN_LENGTHS, 1))()


def test_the_weights_of_the_controller_replace_those_of_counts() -> None:
    inputs = batch(TURN_LENGTHS, 4, kept=0.8)
    weights = torch.rand(len(inputs.mask), dtype=torch.float64)
    loss, gradient, _ = evaluate_turns(policy_loss(objective="reinforce"), replace(inputs, token_weight=weights))
    wanted = torch.where(inputs.mask, -inputs.advantages * weights, 0.0)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, (wanted * inputs.logprobs.detach()).sum(), rtol=1e-12, atol=0)


# LUFFY (arXiv:2504.14945): the loss of demonstrated tokens in plain loops, and metrics that leave them out.
MIXED_LENGTHS, SHOWN = [3, 1, 4, 2, 5, 3], (1, 4)
ROWS = [
    policy_loss(advantage_std="none", aggregation="seq_mean_token_sum_norm", max_new_tokens=7, demonstration_gamma=0.1),
    policy_loss(demonstration_gamma=0.5, entropy_coefficient=0.1, dual_clip=1.5),
    policy_loss(ratio_level="sequence", aggregation="seq_mean_token_mean", demonstration_gamma=0.02),
]


def mixed(seed: int = 3) -> LossInputs:
    """Two of six sequences are demonstrations, of which nothing is known but the policy's log-probs now."""
    inputs = batch(MIXED_LENGTHS, seed, scale=0.8, kept=0.75)
    shown = torch.isin(inputs.segment_ids, torch.tensor(SHOWN))
    unknown = {name: torch.where(shown, 0.0, getattr(inputs, name)) for name in ("old_logprobs", "rollout_logprobs")}
    return replace(inputs, demonstrated=shown, **unknown)


def luffy(loss: PolicyLoss, inputs: LossInputs, logprobs: list[float]) -> float:
    """Its objective over all tokens, negated; of a sequence's ratio each token has its part."""
    row, total = loss.row, 0.0
    trained = [t for t in range(len(logprobs)) if inputs.mask[t]]
    for t in trained:
        mine = [u for u in trained if inputs.segment_ids[u] == inputs.segment_ids[t]]
        a, old = inputs.advantages[t].item(), inputs.old_logprobs.tolist()
        if int(inputs.segment_ids[t]) in SHOWN:
            p = math.exp(logprobs[t])
            term = -p / (p + row.demonstration_gamma) * a
        else:
            of = mine if row.ratio_level == "sequence" else [t]
            ratio = math.exp(sum(logprobs[u] - old[u] for u in of) / len(of))
            term = -min(ratio * a, min(max(ratio, 1 - row.clip_low), 1 + row.clip_high) * a)
            if row.dual_clip is not None and a < 0:
                term = min(term, -row.dual_clip * a)
        term -= row.entropy_coefficient * inputs.entropy[t].item()
        sequences = inputs.num_sequences
        total += (
            term
            / {
                "token_mean": inputs.num_tokens,
                "seq_mean_token_mean": sequences * len(mine),
                "seq_mean_token_sum_norm": sequences * 7,
            }[row.aggregation]
        )
    return total


@pytest.mark.parametrize("loss", ROWS)
def test_value_and_gradient_are_those_of_the_equation(loss: PolicyLoss) -> None:
    inputs = mixed()
    output = loss(inputs)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    at = inputs.logprobs.tolist()
    assert output.loss.item() == pytest.approx(luffy(loss, inputs, at), rel=1e-12)
    for t, found in enumerate(gradient.tolist()):
        up, down = (luffy(loss, inputs, [x + step * (u == t) for u, x in enumerate(at)]) for step in (1e-6, -1e-6))
        assert found == pytest.approx((up - down) / 2e-6, abs=1e-8)
    assert all(gradient[inputs.mask & inputs.demonstrated])


@pytest.mark.parametrize("loss", ROWS)
def test_it_does_not_depend_on_what_an_engine_or_an_old_policy_would_say(loss: PolicyLoss) -> None:
    inputs, shown = mixed(), mixed().demonstrated
    wild = {name: torch.where(shown, 40.0, getattr(inputs, name)) for name in ("old_logprobs", "rollout_logprobs")}
    one, other = loss(inputs), loss(replace(inputs, **wild))
    assert one.loss == other.loss
    assert all(torch.equal(metric.value, other.metrics[name].value) for name, metric in one.metrics.items())


@pytest.mark.parametrize("loss", ROWS)
def test_parts_add_up(loss: PolicyLoss) -> None:
    inputs = mixed()
    whole, parts = loss(inputs), [loss(part_of(inputs, first, first + 2)) for first in (0, 2, 4)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(joined(parts), values(whole))


@pytest.mark.parametrize("loss", ROWS)
def test_metrics_are_of_the_sampled_tokens_as_if_there_were_no_others(loss: PolicyLoss) -> None:
    """Minibatches of other shares, of which one is demonstrations alone; then a step of these alone."""
    inputs = mixed()
    parts = [part_of(inputs, first, stop) for first, stop in ((0, 2), (2, 4), (4, 5), (5, 6))]
    counts = [replace(x, num_tokens=int(x.mask.sum()), num_sequences=int(x.segment_ids.max()) + 1) for x in parts]
    sampled = [part_of(inputs, first, stop) for first, stop in ((0, 1), (2, 4), (5, 6))]
    plain = changed(loss, demonstration_gamma=None)
    alone = [
        replace(x, demonstrated=None, num_tokens=int(x.mask.sum()), num_sequences=int(x.segment_ids.max()) + 1)
        for x in sampled
    ]
    found, wanted = row_of(loss, *counts), row_of(plain, *alone)
    shown = inputs.mask & inputs.demonstrated
    assert found.pop("demonstration/share") == pytest.approx(float(shown.sum() / inputs.mask.sum()))
    assert found.pop("demonstration/probability") == pytest.approx(inputs.logprobs[shown].exp().mean().item())
    for row in (found, wanted):
        del row["loss"], row["grad_norm"]
    assert found == {name: pytest.approx(x) for name, x in wanted.items()}
    assert row_of(loss, counts[2]).keys() == {"loss", "grad_norm", "demonstration/share", "demonstration/probability"}
