"""The importance ratio of a turn: one turn is a sequence, several are what plain loops over turns give."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from rl_megatron.algorithms.segments import segment_sum
from rl_megatron.types import LossInputs, Metric
from tests.property.test_losses_metrics import batch
from tests.rows import changed, policy_loss

GSPO = policy_loss(ratio_level="sequence", aggregation="seq_mean_token_mean", clip_low=0.1, clip_high=0.1)
LENGTHS = [5, 9, 1, 3]


def with_turns(inputs: LossInputs, ids: Tensor) -> LossInputs:
    """``ids`` [T] number the turns of all sequences."""
    num = int(ids.max()) + 1

    def turn_sum(values: Tensor) -> Tensor:
        assert not values.requires_grad, "turn_sum is given detached tensors only"
        return segment_sum(values, ids, num)[ids]

    return replace(inputs, turn_sum=turn_sum)


def evaluate(loss: object, inputs: LossInputs) -> tuple[Tensor, Tensor, dict[str, Metric[Tensor]]]:
    inputs = replace(inputs, logprobs=inputs.logprobs.detach().clone().requires_grad_())
    said = loss(inputs)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(said.loss, inputs.logprobs)
    return said.loss.detach(), gradient, dict(said.metrics)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_turn_is_the_sequence_to_the_bit(dtype: torch.dtype) -> None:
    inputs = batch(LENGTHS, 1, scale=0.3, dtype=dtype, kept=0.8)
    one = evaluate(GSPO, inputs)
    other = evaluate(changed(GSPO, ratio_level="turn"), with_turns(inputs, inputs.segment_ids))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert {name: m.value.tolist() for name, m in one[2].items()} == {n: m.value.tolist() for n, m in other[2].items()}


def test_turns_are_those_of_plain_loops() -> None:
    """Turns of four tokens; a quarter of the tokens is context."""
    inputs = batch(LENGTHS, 2, scale=0.6, kept=0.75)
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    ids = inputs.segment_ids * 10 + place // 4
    loss, gradient, metrics = evaluate(changed(GSPO, ratio_level="turn"), with_turns(inputs, ids))
    difference = (inputs.logprobs - inputs.old_logprobs).detach()
    total, slopes, limited = 0.0, [0.0] * len(ids), 0.0
    for s in range(len(LENGTHS)):
        mine = [t for t in range(len(ids)) if inputs.segment_ids[t] == s and inputs.mask[t]]
        for t in mine:
            turn = [u for u in mine if ids[u] == ids[t]]
            gaps = [float(difference[u]) for u in turn]
            ratio, advantage = math.exp(sum(gaps) / len(gaps)), float(inputs.advantages[t])
            free, clipped = ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage
            weight = 1 / len(LENGTHS) / len(mine)
            total -= min(free, clipped) * weight
            slopes[t] = 0.0 if clipped < free else -free * weight
            limited += weight * (clipped < free)
    assert float(loss) == pytest.approx(total, rel=1e-12)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-12)
    assert float(metrics["clip_fraction"].value) == pytest.approx(limited, rel=1e-12)
    assert 0 < limited < 1


def test_garbage_outside_the_mask_changes_nothing() -> None:
    inputs = batch(LENGTHS, 3, kept=0.7)
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
    assert [x.tolist() for x in evaluate(loss, inputs)[:2]] == [x.tolist() for x in evaluate(loss, poisoned)[:2]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"ratio_level": "turn", "aggregation": "seq_mean_token_mean"}, "samples' turn_of"),
        ({"aggregation": "prompt_mean"}, "samples' token_weight"),
    ],
)
def test_a_batch_without_what_the_loss_needs_is_refused(row: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        partial(policy_loss(**row), batch(LENGTHS, 1))()


def test_the_weights_of_the_controller_replace_those_of_counts() -> None:
    inputs = batch(LENGTHS, 4, kept=0.8)
    weights = torch.rand(len(inputs.mask), dtype=torch.float64)
    loss, gradient, _ = evaluate(policy_loss(objective="reinforce"), replace(inputs, token_weight=weights))
    wanted = torch.where(inputs.mask, -inputs.advantages * weights, 0.0)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, (wanted * inputs.logprobs.detach()).sum(), rtol=1e-12, atol=0)
