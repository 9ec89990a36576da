"""Measures the gap between learner's and engine's log-probs of sampled tokens: overall, by position, by expert.

All metrics are over a whole rollout batch, before any step trains on it. d = log pi_learner - log pi_engine, in nats.
Letters: N positions, n of them sampled, L layers with experts, k experts a token.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_megatron.algorithms.segments import whole_sequences

QUANTILES = {"mismatch/logprob_abs_p50": 0.5, "mismatch/logprob_abs_p90": 0.9, "mismatch/logprob_abs_p99": 0.99}
_BOUNDS = np.array([0, 1, 8, 64, 512, 4096])  # the first sampled token by itself, then eight times as many in each
POSITIONS = ("t0", *(f"t{a}_{b - 1}" for a, b in pairwise(_BOUNDS[1:].tolist())), f"t{_BOUNDS[-1]}_up")
_MOST_ROUTED = 65_536  # tokens whose routes are counted
_MOST_LOG_RATIO = 20.0  # nats; its ratio's sum stays finite in float32
_LEAST_TOKENS = 32  # of an expert whose mean counts


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> dict[str, float]:
    """k1 and k3 of KL(engine || learner); mean, greatest and quantiles of |d|, and its mean by place in the completion;
    [N] each, [S + 1].

    Empty if the engine sampled nothing; leaves out a bucket of places that no completion reaches. Sums are float64.
    Numpy makes a few passes over parts that stay in the processor's cache: a bucket is a run of a sequence's sampled
    tokens, so no token needs its bucket's number, and quantiles need no whole order.
    """
    chosen = mask.numpy()
    sampled = _sampled(chosen, cu_seqlens.numpy())
    count = int(sampled.sum())
    if not count:
        return {}
    ours, theirs = logprobs.numpy(), rollout_logprobs.numpy()
    absolute = np.empty(count, np.result_type(ours, theirs))
    sums, total, total_k3, done = np.zeros(len(POSITIONS)), 0.0, 0.0, 0
    for sequences, positions in whole_sequences(cu_seqlens):
        d = (ours[positions] - theirs[positions])[chosen[positions]]
        part = absolute[done : done + len(d)]
        done += len(d)
        total += float(d.sum(dtype=np.float64))
        np.abs(d, out=part)
        bounded = d.clip(-_MOST_LOG_RATIO, _MOST_LOG_RATIO, dtype=np.float64)
        total_k3 += float((np.expm1(bounded) - bounded).sum())
        firsts, buckets = _segments(sampled[sequences])
        sums += np.bincount(buckets, np.add.reduceat(part, firsts, dtype=np.float64), len(POSITIONS))
    reached = np.clip(sampled[:, None] - _BOUNDS, 0, [*np.diff(_BOUNDS), count]).sum(0)
    places = (torch.tensor(list(QUANTILES.values())) * (count - 1)).round().long().numpy()
    absolute.partition(places)
    row = {"mismatch/k1": -total / count, "kl/rollout": total_k3 / count}
    row |= {"mismatch/logprob_abs_mean": float(sums.sum()) / count, "mismatch/logprob_abs_max": float(absolute.max())}
    row |= dict(zip(QUANTILES, absolute[places].tolist(), strict=True))
    of_buckets = zip(POSITIONS, sums.tolist(), reached.tolist(), strict=True)
    return row | {f"mismatch/position/{name}": its / number for name, its, number in of_buckets if number}


def gap_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, gaps: Tensor) -> dict[str, float]:
    """k1 of KL(engine || learner), and the mean of pi_learner / pi_engine, for tokens of each version gap; [N] each.

    ``gaps`` [spans, 2]: the sampled tokens are in so many spans, one after the other; tokens and gap of each. Under
    exact log-probs the mean ratio's expectation is 1 at every gap. Log-ratios count as at most 20 nats.
    """
    lengths, of_spans = gaps.numpy()[gaps.numpy()[:, 0] > 0].T
    chosen = mask.numpy()
    d = (logprobs.numpy() - rollout_logprobs.numpy())[chosen]
    assert len(d) == lengths.sum(), (len(d), lengths.sum())
    if not len(d):
        return {}
    firsts = np.cumsum(lengths) - lengths
    tokens = np.bincount(of_spans, lengths)
    log_ratios = np.bincount(of_spans, np.add.reduceat(d, firsts, dtype=np.float64))
    np.exp(np.minimum(d, _MOST_LOG_RATIO, out=d), out=d)
    ratios = np.bincount(of_spans, np.add.reduceat(d, firsts, dtype=np.float64))
    there = np.flatnonzero(tokens).tolist()
    row = {f"mismatch/k1/v{gap}": -float(log_ratios[gap] / tokens[gap]) for gap in there}
    return row | {f"mismatch/ratio/v{gap}": float(ratios[gap] / tokens[gap]) for gap in there}


def _sampled(mask: NDArray[np.bool_], cu_seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sampled tokens of each sequence, [S]."""
    out = np.zeros(len(cu_seqlens) - 1, np.int64)
    some = np.flatnonzero(np.diff(cu_seqlens))  # of an empty segment `reduceat` gives the next one's first
    if len(some):
        out[some] = np.add.reduceat(mask.view(np.uint8), cu_seqlens[:-1][some], dtype=np.int64)
    return out


def _segments(sampled: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of sequences with so many ``sampled`` tokens, one after the other: where each bucket of each begins, and which
    bucket that is; without those that no token reaches."""
    reached = sampled[:, None] > _BOUNDS
    firsts = (np.cumsum(sampled) - sampled)[:, None] + _BOUNDS
    return firsts[reached], np.broadcast_to(np.arange(len(_BOUNDS)), reached.shape)[reached]


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
