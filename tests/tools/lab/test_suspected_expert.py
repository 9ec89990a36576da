"""Which expert the mismatch doctor suspects: means over the tokens that chose each."""

from __future__ import annotations

import math

import torch

from tools.lab.mismatch.experiments import expert_means, suspected_expert


def test_a_token_counts_for_every_expert_it_takes_in_every_layer() -> None:
    routes = torch.tensor([[[0, 3], [1, 0]], [[3, 1], [0, 1]], [[0, 1], [0, 1]]])  # 2 and, in layer 1, 3 are unused
    means, counts = expert_means(torch.tensor([0.1, 0.2, 0.6]), routes)
    assert counts.tolist() == [[2, 2, 0, 2], [3, 3, 0, 0]]
    expected = [[0.35, 0.4, math.nan, 0.15], [0.3, 0.3, math.nan, math.nan]]
    torch.testing.assert_close(means, torch.tensor(expected, dtype=torch.float64), equal_nan=True, rtol=1e-6, atol=0)
    means, counts = expert_means(torch.zeros(0), routes[:0])
    assert (means.shape, counts.tolist()) == ((2, 1), [[0], [0]])


def test_the_expert_whose_tokens_differ_is_named() -> None:
    chosen = torch.Generator().manual_seed(1)
    size, layers, per_token = 4000, 3, 2
    routes = torch.rand(size, layers, 8, generator=chosen).topk(per_token).indices.to(torch.uint8)
    learner = 0.01 * torch.randn(size, generator=chosen)
    wrong = (routes[:, 1] == 5).any(1)
    learner[wrong] += 0.5
    means, counts = expert_means(learner.abs(), routes)
    assert int(counts.sum()) == size * layers * per_token
    assert torch.argmax(means).item() == 1 * 8 + 5
    inside = float(learner.abs()[wrong].mean())
    assert abs(float(means[1, 5]) - inside) < 1e-5 * inside
    assert "through expert 5 of MoE layer 1 differ by" in suspected_expert(learner, routes)
