"""Counts route flips: tokens that the routers of a layer send to other experts in one pass than in another.

Letters: N positions, n of them sampled, L layers with experts, k experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.observability.recorder import Row

RATIO_BAND = 0.2
"""Half the width of the band around 1 that a token's importance ratio leaves: PPO's clip range."""
MOST_COUNTED = 65_536
"""Sampled tokens of a batch whose routes are compared; of more, evenly spaced ones."""


def flipped(routes: Tensor, others: Tensor) -> Tensor:
    """Whether a position's experts differ as a set, [n, L] bool, of two routes [n, L, k] integers each."""
    return (routes.sort(-1).values != others.sort(-1).values).any(-1)


def engine_flips(engine: Tensor, learner: Tensor, mask: Tensor) -> Row:
    """``moe/flips_engine``: the engine's experts beside those of the learner's pass, [N, L, k] each."""
    counted = _counted(mask)
    return _shares("moe/flips_engine", flipped(engine[counted], learner[counted]))


def update_flips(before: Tensor, after: Tensor, log_ratio: Tensor, mask: Tensor) -> Row:
    """``moe/flips_update``, ``moe/first_flip/*`` and ``ratio/outside*`` of an update.

    ``before`` and ``after`` [N, L, k] are the experts that passes with the old and the new policy used, ``log_ratio``
    [N] the difference of their log-probs. A token's first flip is in the lowest layer whose experts differ; routers
    above it have another input, so what follows is its effect too. Shares of a group without tokens are left out.
    """
    counted = _counted(mask)
    other = flipped(before[counted], after[counted])
    outside = (log_ratio[counted].exp() - 1).abs() > RATIO_BAND
    row = _shares("moe/flips_update", other)
    layers = other.shape[1]
    first = torch.where(other.any(1), other.int().argmax(1), layers)  # of equal values argmax takes the first
    if len(outside):
        row["ratio/outside"] = float(outside.double().mean())
    for number in range(layers + 1):
        name, group = f"layer{number}" if number < layers else "none", first == number
        if group.any():
            row[f"moe/first_flip/{name}"] = float(group.double().mean())
            row[f"ratio/outside/{name}"] = float(outside[group].double().mean())
    return row


def _counted(mask: Tensor) -> Tensor:
    """Positions of sampled tokens, [n], or so many of them as are counted."""
    sampled = mask.nonzero().view(-1)
    return sampled[:: -(-len(sampled) // MOST_COUNTED) or 1]


def _shares(name: str, other: Tensor) -> Row:
    """The share of flips over all (token, layer); empty without tokens."""
    if not other.numel():
        return {}
    by_layer = other.double().mean(0).tolist()
    return {name: sum(by_layer) / len(by_layer)}
