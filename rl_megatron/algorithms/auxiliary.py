"""Loss terms beside the policy's: the critic's value loss, VAPO's positive-example NLL, DPO on pairs.

Each gives a rank's share over a global denominator, as policy losses do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """½·max((V - R)², (V_clip - R)²) and the share of tokens where the clipped one is larger; both [], token means.

    All [T]; V_clip is V within ``clip`` of V_old (``clip=inf``: no clipping). Nothing outside ``mask`` matters.
    """
    values, old_values, returns = (x.where(mask, 0.0) for x in (values, old_values, returns))
    free = (values - returns).square()
    clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square()
    limited = (clipped > free).to(values.dtype)
    return torch.maximum(free, clipped).sum() / 2 / max(num_tokens, 1), limited.sum() / max(num_tokens, 1)


def positive_nll(logprobs: Tensor, positive: Tensor, *, num_positive_tokens: int) -> Tensor:
    """Mean -log pi over tokens of correct completions, [] (VAPO, arXiv:2504.05118: added with weight 0.1).

    ``positive`` [T] bool marks trained tokens of correct completions; ``num_positive_tokens`` counts the global ones.
    """
    return -logprobs.where(positive, 0.0).sum() / max(num_positive_tokens, 1)


def dpo(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1, num_pairs: int
) -> Tensor:
    """Mean over pairs of -log σ(beta·(Δlog pi - Δlog ref)), [] (arXiv:2305.18290).

    Each argument [P] is the summed log-prob of one answer of a pair.
    """
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    return -logsigmoid(beta * margin).sum() / max(num_pairs, 1)
