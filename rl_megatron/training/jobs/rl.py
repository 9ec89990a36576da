"""Reinforcement learning: samples completions of the policy, rewards them and trains on them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.errors import DataError
from rl_megatron.rollout.batch import UNTAUGHT, GroupSource, Ledger, Reason, RolloutBatch
from rl_megatron.rollout.stream import Stream
from rl_megatron.training.credit import groups_to_train_on
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
        last_step=config.train.steps,
        teaches=partial(groups_to_train_on, section=config.algorithm, max_new_tokens=limit),
        untaught="zero_advantages" if config.algorithm.own_decides else "equal_rewards",
        ledger=ledger,
    )


_LEFT_OUT: Mapping[Reason, str] = {
    "equal_rewards": "equal rewards",
    "zero_advantages": "advantages of 0",
    "poison": "servers that ended under them",
    "reward_error": "failed rewards",
    "environment_error": "failed trajectories",
    "long_prompt": "prompts that are too long",
    "nothing_sampled": "trajectories without a sampled turn",
}


@dataclass(slots=True, kw_only=True)
class Reinforcement(GroupJob):
    """Takes its groups from the stream, which draws from ``prompts``."""

    stream: Stream

    @override
    async def take(self) -> RolloutBatch:
        """The next batch, after dynamic sampling; short or empty if too many groups would give no gradient."""
        section = self.config.rollout
        wanted = section.prompts_per_step if section.dynamic_sampling == "refill" else 1
        batch = await self.stream.take(self.number)
        if len(batch.groups) >= wanted:
            return batch
        reasons = Counter(one.answered.reason for one in batch.places if one.answered is not None)
        left_out = {reason: reasons[reason] for reason in _LEFT_OUT if reasons[reason]}
        found = (
            f"step {self.number}: {len(batch.groups) + sum(left_out.values())} prompts left {len(batch.groups)} groups "
            f"to train on, {wanted} were wanted; left out (log.txt names those that failed): "
            + ", ".join(f"{count} for {_LEFT_OUT[reason]}" for reason, count in left_out.items())
        )
        if not batch.groups and not left_out.keys() & UNTAUGHT and left_out.keys() != {"poison"}:
            problems = (one.answered.problem for one in batch.places if one.answered is not None)
            first = next((f"; the first of them: {problem}" for problem in problems if problem), "")
            raise DataError(f"{found}. Fix these, or the data{first}")
        logger.warning("%s; the step trains on these", found)
        return batch
