"""LUFFY (arXiv:2504.14945): the loss of demonstrated tokens in plain loops, and metrics that leave them out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rl_megatron.algorithms.losses import PolicyLoss
from rl_megatron.types import LossInputs
from tests.losses import part_of
from tests.property.test_losses_metrics import batch, row_of
from tests.reduction import joined, values
from tests.rows import changed, policy_loss

LENGTHS, SHOWN = [3, 1, 4, 2, 5, 3], (1, 4)
ROWS = [
    policy_loss(advantage_std="none", aggregation="seq_mean_token_sum_norm", max_new_tokens=7, demonstration_gamma=0.1),
    policy_loss(demonstration_gamma=0.5, entropy_coefficient=0.1, dual_clip=1.5),
    policy_loss(ratio_level="sequence", aggregation="seq_mean_token_mean", demonstration_gamma=0.02),
]


def mixed(seed: int = 3) -> LossInputs:
    """Two of six sequences are demonstrations, of which nothing is known but the policy's log-probs now."""
    inputs = batch(LENGTHS, seed, scale=0.8, kept=0.75)
    shown = torch.isin(inputs.segment_ids, torch.tensor(SHOWN))
    unknown = {name: torch.where(shown, 0.0, getattr(inputs, name)) for name in ("old_logprobs", "rollout_logprobs")}
    return replace(inputs, demonstrated=shown, **unknown)


def of_paper(loss: PolicyLoss, inputs: LossInputs, logprobs: list[float]) -> float:
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
    assert output.loss.item() == pytest.approx(of_paper(loss, inputs, at), rel=1e-12)
    for t, found in enumerate(gradient.tolist()):
        up, down = (of_paper(loss, inputs, [x + step * (u == t) for u, x in enumerate(at)]) for step in (1e-6, -1e-6))
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
    only = row_of(loss, counts[2])
    assert only.keys() == {"loss", "grad_norm", "demonstration/share", "demonstration/probability"}
