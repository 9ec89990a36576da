"""Measures the gap between learner's and engine's log-probs of sampled tokens.

All metrics are over a whole rollout batch, before any step trains on it. d = log pi_learner - log pi_engine, in nats.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rl_megatron.algorithms.segments import whole_sequences

_MOST_LOG_RATIO = 20.0  # nats; its ratio's sum stays finite in float32


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> dict[str, float]:
    """k1 and k3 of KL(engine || learner); mean and greatest |d|; [N] each, [S + 1].

    Empty if the engine sampled nothing. Sums are float64. Numpy makes a few passes over parts that stay in the
    processor's cache.
    """
    chosen, ours, theirs = mask.numpy(), logprobs.numpy(), rollout_logprobs.numpy()
    count, total, total_k3, total_size, largest = int(chosen.sum()), 0.0, 0.0, 0.0, 0.0
    if not count:
        return {}
    for _, positions in whole_sequences(cu_seqlens):
        d = (ours[positions] - theirs[positions])[chosen[positions]]
        total += float(d.sum(dtype=np.float64))
        bounded = d.clip(-_MOST_LOG_RATIO, _MOST_LOG_RATIO, dtype=np.float64)
        total_k3 += float((np.expm1(bounded) - bounded).sum())
        np.abs(d, out=d)
        total_size += float(d.sum(dtype=np.float64))
        largest = max(largest, float(d.max(initial=0.0)))
    return {
        "mismatch/k1": -total / count,
        "kl/rollout": total_k3 / count,
        "mismatch/logprob_abs_mean": total_size / count,
        "mismatch/logprob_abs_max": largest,
    }
