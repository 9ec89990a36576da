"""Measures the gap between learner's and engine's log-probs of sampled tokens: overall, by position, by expert.

All metrics are over a whole rollout batch, before any step trains on it. d = log pi_learner - log pi_engine, in nats.
Letters: N positions, n of them sampled, L layers with experts, k experts a token.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rl_megatron.algorithms.segments import sequence_ids

QUANTILES = {"mismatch/logprob_abs_p50": 0.5, "mismatch/logprob_abs_p90": 0.9, "mismatch/logprob_abs_p99": 0.99}
_BOUNDS = (0, 1, 8, 64, 512, 4096)  # the first sampled token by itself, then eight times as many in each bucket
POSITIONS = ("t0", *(f"t{a}_{b - 1}" for a, b in pairwise(_BOUNDS[1:])), f"t{_BOUNDS[-1]}_up")
_MOST_ROUTED = 65_536  # tokens whose routes are counted
_LEAST_TOKENS = 32  # of an expert whose mean counts


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> dict[str, float]:
    """k1 of KL(engine || learner), quantiles of |d|, and its mean by place in the completion; [N] each, [S + 1].

    Empty if the engine sampled nothing; leaves out a bucket of places that no completion reaches.
    """
    d = (logprobs - rollout_logprobs)[mask].double()
    if not len(d):
        return {}
    absolute = d.abs()
    ordered = absolute.sort().values
    places = (torch.tensor(list(QUANTILES.values())) * (len(ordered) - 1)).round().long()
    row = {"mismatch/k1": -float(d.mean())}
    row |= dict(zip(QUANTILES, ordered[places].tolist(), strict=True))
    bucket = torch.bucketize(_places(mask, cu_seqlens), torch.tensor(_BOUNDS[1:]), right=True)
    counts = torch.bincount(bucket, minlength=len(POSITIONS))
    means = torch.bincount(bucket, weights=absolute, minlength=len(POSITIONS)) / counts
    of_buckets = zip(POSITIONS, means.tolist(), counts.tolist(), strict=True)
    return row | {f"mismatch/position/{name}": mean for name, mean, count in of_buckets if count}


def _places(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """For each sampled token the number of sampled tokens before it in its sequence, [n]."""
    before = mask.long().cumsum(0) - 1
    firsts = torch.cat([before.new_zeros(1), before + 1])[cu_seqlens[:-1]]
    return (before - firsts[sequence_ids(cu_seqlens)])[mask]


def expert_means(absolute: Tensor, routes: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of ``absolute`` [n] over the tokens that chose each expert, and their number, [L, E] each.

    ``routes`` [n, L, k] integers; E - 1 is the greatest. The mean is NaN for an expert without tokens. Of more than
    65,536 tokens it uses an evenly spaced part.
    """
    num_experts = int(routes.max()) + 1 if routes.numel() else 1
    stride = -(-len(absolute) // _MOST_ROUTED) if len(absolute) else 1
    absolute, routes = absolute[::stride].double(), routes[::stride]
    num_layers, per_token = routes.shape[1:]
    cells = routes.long() + num_experts * torch.arange(num_layers)[:, None]
    weights = absolute.repeat_interleave(num_layers * per_token)
    counts = torch.bincount(cells.view(-1), minlength=num_experts * num_layers)
    sums = torch.bincount(cells.view(-1), weights=weights, minlength=num_experts * num_layers)
    return (sums / counts).view(num_layers, num_experts), counts.view(num_layers, num_experts)


def expert_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, routes: Tensor) -> dict[str, float]:
    """The expert whose tokens differ most: their mean |d|, divided by that of all tokens; its layer and number.

    The layer's number counts only layers with experts. Empty if no expert had 32 tokens.
    """
    absolute = (logprobs - rollout_logprobs)[mask].abs()
    means, counts = expert_means(absolute, routes[mask])
    means = means.masked_fill(counts < _LEAST_TOKENS, -1.0)
    worst = float(means.max())
    if worst < 0:
        return {}
    layer, expert = divmod(int(means.argmax()), means.shape[1])
    overall = float(absolute.double().mean())
    ratio = worst / overall if overall else 1.0
    return {"mismatch/expert_worst": ratio, "mismatch/expert_layer": layer, "mismatch/expert_number": expert}
