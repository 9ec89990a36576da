"""Adapts the clip to each minibatch, until tokens of positive advantage have their share of the loss (BAPO)."""

from __future__ import annotations

import math
from asyncio import to_thread
from dataclasses import dataclass, field

from torch import Tensor

from rl_megatron.algorithms.objectives import ClipLimits, balanced_limits
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.data.packing import part_of, tokens_of_part, unpack
from rl_megatron.interfaces import Learner
from rl_megatron.observability.recorder import Row, Stopwatch
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
    found: list[ClipLimits] = field(default_factory=list)

    async def __call__(self, batch: Batch, watch: Stopwatch) -> dict[str, float]:
        """The keys of ``algorithm`` whose values are the minibatch's."""
        current = self.current
        if self.found:
            with watch("logprobs"):
                said = await self.policy.score(batch, LOGPROBS)
            current = await to_thread(unpack, batch, said["logprobs"], batch.samples)
        limits = await to_thread(self._limits, batch, current)
        self.found.append(limits)
        return {"clip_low": limits.low, "clip_high": limits.high}

    def _limits(self, batch: Batch, current: Tensor) -> ClipLimits:
        samples = batch.samples
        mine = tokens_of_part(samples, part_of(batch))
        columns = (current[mine], samples.old_logprobs[mine], samples.advantages[mine])
        return balanced_limits(*columns, self.row, self.share)

    def metrics(self) -> Row:
        """The means of the limits over minibatches, and the share of positive tokens in all of them; none where the
        policy is not trained, as in a critic's first steps."""
        if not self.found:
            return {}
        num, every = len(self.found), math.fsum(one.all for one in self.found)
        return {
            "balance/clip_low": math.fsum(one.low for one in self.found) / num,
            "balance/clip_high": math.fsum(one.high for one in self.found) / num,
            "balance/positive_share": math.fsum(one.positive for one in self.found) / every if every else 0.0,
        }
