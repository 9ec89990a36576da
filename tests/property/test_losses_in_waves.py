"""Which count each mean of a loss is over, of every row that is shipped: twice that count halves it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_megatron.algorithms.losses import PolicyLoss, loss_of
from tests.property.test_losses_metrics import batch
from tests.rows import NAMES, PAIR_ROWS, config_of


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PAIR_ROWS])
def test_every_mean_has_one_denominator_which_the_loss_names(name: str) -> None:
    terms = ["algorithm.kl.coefficient=0.3", "algorithm.kl.placement=loss"]
    demonstrates = config_of(name).algorithm.demonstration_gamma is not None  # which a KL is refused with
    section = config_of(name, "algorithm.entropy_coefficient=0.1", *([] if demonstrates else terms)).algorithm
    loss = loss_of(section, kl_coefficient=0.3, max_new_tokens=8)
    assert isinstance(loss, PolicyLoss)
    inputs = batch([3, 5, 2], 1, scale=0.5)
    if loss.denominator("loss") == "num_prompts":  # a count that is in the controller's weights
        lengths = torch.tensor([3.0, 5.0, 2.0], dtype=torch.float64)
        inputs = replace(inputs, token_weight=(1 / (3 * lengths))[inputs.segment_ids])
    if demonstrates:
        inputs = replace(inputs, demonstrated=inputs.segment_ids == 1)
    if section.kl.estimator == "top_k":  # of a vocabulary of five
        mine, theirs = torch.randn(2, 10, 5, generator=torch.Generator().manual_seed(2)).double().log_softmax(-1)
        top = theirs.topk(3)
        chosen = torch.stack([top.indices.double(), top.values], 1)
        inputs = replace(inputs, ref_top=chosen, top_logprobs=mine.gather(1, top.indices))
    said = loss(inputs)
    means = {"loss": said.loss} | {n: m.value for n, m in said.metrics.items() if m.over == "mean"}
    beside = "demonstration/share" if demonstrates else "loss/kl"
    assert {"loss", beside, "entropy", "ratio/mean", "clip_fraction"} <= set(means)
    doubled = {count: loss(replace(inputs, **{count: 2 * getattr(inputs, count)})) for count in COUNTS}
    for key, value in means.items():
        for (count, names), other in zip(COUNTS.items(), doubled.values(), strict=True):
            found = other.loss if key == "loss" else other.metrics[key].value
            factor = 2 if loss.denominator(key) in names else 1
            torch.testing.assert_close(found, value / factor, msg=f"{key} {count}")


COUNTS = {"num_tokens": {"num_tokens"}, "num_sequences": {"num_sequences", "num_trajectories"}}
"""The fields of a loss's inputs, and what they count where each sequence is a trajectory."""
