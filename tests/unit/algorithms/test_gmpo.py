"""GMPO (arXiv:2507.20673): plain loops over its equation, finite differences, a split into micro-batches."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.types import LossInputs, LossOutput
from tests.losses import part_of
from tests.property.test_losses_metrics import batch
from tests.rows import policy_loss

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
            inside = min(max(ratio, 1 - LOW), 1 + HIGH)
            kept = min(ratio**sign, inside**sign) ** sign
            product *= kept
            if not math.isclose(kept, ratio, rel_tol=1e-12):
                clipped.append(t)
        total -= product ** (1 / len(mine)) * advantage / len(LENGTHS)
    return total, sequences, clipped


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_equation_of_its_paper(seed: int) -> None:
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


def test_an_advantage_of_zero_clips_nothing() -> None:
    inputs = batch([4], 1, scale=3.0)
    output, gradient = evaluate(replace(inputs, advantages=torch.zeros_like(inputs.advantages)))
    assert (output.loss.item(), gradient.any().item(), output.metrics["clip_fraction"].value.item()) == (0, False, 0)


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
    ratios = torch.tensor([1.2, 0.8], dtype=torch.float64)
    output, gradient = evaluate(inputs, inputs.old_logprobs + ratios.log())
    assert output.loss.item() == pytest.approx(-math.sqrt(0.96) * 0.5)
    assert gradient.tolist() == pytest.approx([-math.sqrt(0.96), math.sqrt(0.96) / 2])


def test_micro_batches_add_up() -> None:
    """Three of two sequences each, under the whole batch's denominators."""
    inputs = batch(LENGTHS, 7, scale=0.6, kept=0.75)
    whole, gradient = evaluate(inputs)
    losses, gradients = [], []
    for first in range(0, len(LENGTHS), 2):
        output, slope = evaluate(part_of(inputs, first, first + 2))
        losses.append(output.loss)
        gradients.append(slope)
    torch.testing.assert_close(torch.stack(losses).sum(), whole.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=0)


def test_the_row_has_the_limits_of_the_paper() -> None:
    """(e^-0.4, e^0.4), as 1 minus and 1 plus."""
    row = load_config("tiny_cpu", ["algorithm=gmpo"]).algorithm
    assert (1 - row.clip_low, 1 + row.clip_high) == pytest.approx((math.exp(-0.4), math.exp(0.4)), abs=1e-4)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("aggregation=token_mean", "one loss a sequence.*set aggregation=seq_mean_token_mean"),
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
    (example,) = re.findall(r"GMPO is the example,.*?test_gmpo\.py`", (root / "CONTRIBUTING.md").read_text(), re.S)
    named = re.findall(r"`([\w/]+\.\w+)`", example)
    files = [*root.glob("rl_megatron/**/*.py"), *root.glob("conf/**/*.yaml")]
    places = {str(path.relative_to(root)) for path in files if re.search(r"\bgmpo\b", path.read_text())}
    written = {f"docs/{name}.md" for name in ("algorithms", "asynchronous")} | {"tests/unit/algorithms/test_gmpo.py"}
    there = [path if (root / path).is_file() else f"rl_megatron/{path}" for path in named]
    assert sorted(there) == sorted(places | written)
