"""Counts route flips: tokens that the routers of a layer send to other experts in one pass than in another.

Letters: N positions, n of them sampled, L layers with experts, k experts a token.
"""

from __future__ import annotations

from asyncio import to_thread

import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.data.samples import dense_column, drop_columns
from rl_megatron.feature import Ask, StepHooks
from rl_megatron.features.router_study.feature import counts_flips, is_only_reader
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.recorder import Row
from rl_megatron.training.scores import LOGPROBS, ScoredSamples
from rl_megatron.types import Samples

RATIO_BAND = 0.2
"""Half the width of the band around 1 that a token's importance ratio leaves: PPO's clip range."""
MAX_COUNTED_POSITIONS = 65_536
"""Number of a batch's sampled tokens with compared routes; evenly spaced ones if there are more."""


def make_hooks(config: RunConfig, roles: RunComponents) -> RouteFlips | None:
    """Returns the hooks that count a run's flips; None without ``train.route_flips``."""
    return RouteFlips(is_only_reader=is_only_reader(config)) if counts_flips(config.train) else None


class RouteFlips(StepHooks):
    """Compares the routes of the engine, of the policy before an update and of the one after it.

    ``is_only_reader``: no model reads the engine's routes. With replay no route flips: passes take the update's routes.
    """

    def __init__(self, *, is_only_reader: bool) -> None:
        self._alone = is_only_reader
        self._engine: Tensor | None = None  # [N, L, k] of a step's batch

    @override
    def sampled(self, samples: Samples) -> Samples:
        if not self._alone:
            return samples
        self._engine = dense_column(samples.extra, "routes")
        return drop_columns(samples, ["routes"])

    @override
    def described(self, found: ScoredSamples) -> Row:
        if self._engine is None:
            return {}
        return engine_flips(self._engine, found.policy["routes"], found.samples.mask)

    @override
    async def trained(self, found: ScoredSamples, ask: Ask) -> Row:
        """Counts flips of the update, by one more pass."""
        samples, replayed = found.samples, dense_column(found.samples.extra, "routes")
        new = await ask(LOGPROBS if replayed is not None else LOGPROBS | {"routes"})
        before = found.policy["routes"] if replayed is None else replayed
        after = new["routes"] if replayed is None else replayed
        assert found.current is not None
        return await to_thread(update_flips, before, after, new["logprobs"] - found.current, samples.mask)


def flipped(routes: Tensor, others: Tensor) -> Tensor:
    """Returns True where a position's experts differ as a set, [n, L], for two routes [n, L, k] integers each."""
    return (routes.sort(-1).values != others.sort(-1).values).any(-1)


def engine_flips(engine: Tensor, learner: Tensor, mask: Tensor) -> Row:
    """Returns ``moe/flips_engine``: the engine's experts compared with the learner's pass, [N, L, k] each."""
    counted = _counted(mask)
    return _shares("moe/flips_engine", flipped(engine[counted], learner[counted]))


def update_flips(before: Tensor, after: Tensor, log_ratio: Tensor, mask: Tensor) -> Row:
    """Returns ``moe/flips_update``, ``moe/first_flip/*`` and ``ratio/outside*`` of an update.

    ``before`` and ``after`` [N, L, k] are the experts in passes of the old and the new policy, ``log_ratio`` [N] the
    difference of their log-probs. A token's first flip is in the lowest layer with other experts; routers
    above it have another input, so later flips are its effect too. Shares of a group without tokens are left out.
    """
    counted = _counted(mask)
    other = flipped(before[counted], after[counted])
    outside = (log_ratio[counted].exp() - 1).abs() > RATIO_BAND
    row = _shares("moe/flips_update", other)
    layers = other.shape[1]
    first = torch.where(other.any(1), other.int().argmax(1), layers)  # argmax takes the first of equal values
    if len(outside):
        row["ratio/outside"] = float(outside.double().mean())
    for number in range(layers + 1):
        name, group = f"layer{number}" if number < layers else "none", first == number
        if group.any():
            row[f"moe/first_flip/{name}"] = float(group.double().mean())
            row[f"ratio/outside/{name}"] = float(outside[group].double().mean())
    return row


def _counted(mask: Tensor) -> Tensor:
    """Returns positions of sampled tokens, [n], at most `MAX_COUNTED_POSITIONS`."""
    sampled = mask.nonzero().view(-1)
    return sampled[:: -(-len(sampled) // MAX_COUNTED_POSITIONS) or 1]


def _shares(name: str, other: Tensor) -> Row:
    """Returns the share of flips over all (token, layer); empty without tokens."""
    if not other.numel():
        return {}
    by_layer = other.double().mean(0).tolist()
    return {name: sum(by_layer) / len(by_layer)}
