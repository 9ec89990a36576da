"""Reinforcement learning: samples completions of the policy, rewards them and trains on them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rl_megatron.errors import DataError
from rl_megatron.rollout.batch import RolloutBatch
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.training.group_job import GroupJob

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Reinforcement(GroupJob):
    """Takes its groups from the sampler."""

    sampler: RolloutSampler

    async def take(self) -> RolloutBatch:
        """The next rollout batch, after dynamic sampling; short or empty if too many groups have equal rewards.

        Raises DataError if failed rewards left no group.
        """
        section = self.config.rollout
        tries, wanted, informative = {
            "off": (1, 1, False),
            "drop": (section.max_refills, 1, True),
            "refill": (section.max_refills, section.prompts_per_step, True),
        }[section.dynamic_sampling]
        batch = RolloutBatch()
        for _ in range(tries):
            self.batches_taken += 1
            prompts = self.prompts.take(section.prompts_per_step)
            sampled = await self.sampler.sample(prompts, step=self.batches_taken)
            batch = batch.joined(sampled.filtered(self.teaches(sampled.groups)) if informative else sampled)
            if len(batch.groups) >= wanted:
                return batch.cut(section.prompts_per_step)
        found = (
            f"rollout batch {self.batches_taken}: {tries} x {section.prompts_per_step} prompts left "
            f"{len(batch.groups)} groups to train on, {wanted} were wanted: {batch.dropped_groups} were dropped for "
            f"a failed reward (log.txt names them), {batch.filtered_groups} had equal rewards"
        )
        if not batch.groups and not batch.filtered_groups:
            raise DataError(f"{found}. Fix the reward or the data")
        logger.warning("%s; the step trains on these", found)
        return batch
