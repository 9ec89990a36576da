"""Reinforcement learning: samples completions of the policy, rewards them and trains on them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.errors import DataError
from rl_megatron.rollout.batch import GroupSource, RolloutBatch
from rl_megatron.rollout.ledger import Ledger
from rl_megatron.rollout.stream import Stream
from rl_megatron.training.credit.shaping import groups_that_differ
from rl_megatron.training.group_job import GroupJob

logger = logging.getLogger(__name__)


def stream_of(config: RunConfig, prompts: PromptStream, source: GroupSource, ledger: Ledger) -> Stream:
    """The stream of a run's groups."""
    limit = config.most_sampled
    return Stream(
        prompts=prompts,
        source=source,
        section=config.rollout,
        max_staleness=config.train.max_staleness,
        teaches=partial(groups_that_differ, section=config.algorithm, max_new_tokens=limit),
        ledger=ledger,
        keep_tokens=config.checkpoint.in_flight == "tokens",
    )


@dataclass(slots=True, kw_only=True)
class Reinforcement(GroupJob):
    """Takes its groups from the stream, which draws from ``prompts``."""

    stream: Stream

    @override
    async def take(self) -> RolloutBatch:
        """The next batch, after dynamic sampling; short or empty if too many groups have equal rewards."""
        section = self.config.rollout
        wanted = section.prompts_per_step if section.dynamic_sampling == "refill" else 1
        batch = await self.stream.take(self.number)
        if len(batch.groups) >= wanted:
            return batch
        left_out = batch.dropped_groups + batch.filtered_groups
        found = (
            f"step {self.number}: {len(batch.groups) + left_out} prompts left {len(batch.groups)} groups to train on, "
            f"{wanted} were wanted: {batch.dropped_groups} were dropped for a failed reward or because servers ended "
            f"under them (log.txt names them), {batch.filtered_groups} had equal rewards"
        )
        if not batch.groups and not batch.filtered_groups:
            raise DataError(f"{found}. Fix the reward or the data")
        logger.warning("%s; the step trains on these", found)
        return batch
