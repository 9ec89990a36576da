"""Adapts the clip to each minibatch, until tokens of positive advantage have their share of the loss (BAPO)."""

from __future__ import annotations

from asyncio import to_thread
from dataclasses import dataclass

from torch import Tensor

from rl_megatron.algorithms.objectives import ClipLimits, balanced_limits
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.packing import part_of, tokens_of_part, unpack
from rl_megatron.interfaces import Learner
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.measures import LOGPROBS
from rl_megatron.types import Batch


@dataclass(slots=True, kw_only=True)
class BalancedClip:
    """The limits of a step's minibatches, on the controller, over all of a minibatch's tokens: the same in every
    layout.

    Ratios are those of the policy before the minibatch's optimizer step. The first has ``current`` [N], the log-probs
    at the start of the step; later ones take a pass of ``policy`` each.
    """

    row: AlgorithmSection
    share: float
    policy: Learner
    current: Tensor
    _begun: bool = False

    async def __call__(self, batch: Batch, watch: Stopwatch) -> ClipLimits:
        """The limits of the minibatch."""
        current = self.current
        if self._begun:
            with watch("logprobs"):
                said = await self.policy.score(batch, LOGPROBS)
            current = await to_thread(unpack, batch, said["logprobs"], batch.samples)
        self._begun = True
        return await to_thread(self._limits, batch, current)

    def _limits(self, batch: Batch, current: Tensor) -> ClipLimits:
        samples = batch.samples
        mine = tokens_of_part(samples, part_of(batch))
        columns = (current[mine], samples.old_logprobs[mine], samples.advantages[mine])
        return balanced_limits(*columns, self.row, self.share)
