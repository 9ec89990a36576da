"""Adapts the clip to each minibatch until tokens of positive advantage have their share of the loss (BAPO)."""

from __future__ import annotations

from asyncio import to_thread

from torch import Tensor
from typing_extensions import override

from rl_megatron.algorithms.objectives import ClipLimits, balanced_limits
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import minibatch_sequences, minibatch_token_mask, unpack
from rl_megatron.feature import StepHooks
from rl_megatron.features.balanced_clip.feature import balance_section
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.scores import LOGPROBS, ScoredSamples
from rl_megatron.types import Batch


def make_hooks(config: RunConfig, roles: RunComponents) -> BalancedClip | None:
    """Returns the hooks that adapt the clip; None without ``algorithm.balance.share``."""
    return None if balance_section(config).share is None else BalancedClip(config, roles)


class BalancedClip(StepHooks):
    """The limits of a step's minibatches, on the controller, over all of a minibatch's tokens: the same in every
    layout.

    Ratios are the policy's before the minibatch's optimizer step. For the first one they come from the scores
    of the batch; later ones take a pass of the policy each.
    """

    def __init__(self, config: RunConfig, roles: RunComponents) -> None:
        self._row, self._keys, self._policy = config.algorithm, balance_section(config), roles.policy
        self._scored: Tensor | None = None  # [N] log-probs of the policy, until the first minibatch

    @override
    def scored(self, found: ScoredSamples) -> ScoredSamples:
        self._scored = found.current
        return found

    @override
    async def limits(self, batch: Batch, watch: Stopwatch) -> ClipLimits:
        """Returns the limits of the minibatch."""
        current, self._scored = self._scored, None
        if current is None:
            with watch("logprobs"):
                said = await self._policy.score(batch, LOGPROBS)
            current = await to_thread(unpack, batch, said["logprobs"], batch.samples)
        return await to_thread(self._limits, batch, current)

    def _limits(self, batch: Batch, current: Tensor) -> ClipLimits:
        samples, keys = batch.samples, self._keys
        assert keys.share is not None
        mine = minibatch_token_mask(samples, minibatch_sequences(batch))
        columns = (current[mine], samples.old_logprobs[mine], samples.advantages[mine])
        return balanced_limits(*columns, self._row, keys.share, max_high=keys.high, min_low=keys.low)
