"""A Stream over groups that only take time, for tests on a virtual clock; and over the sampler, for those of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.engines.adapter import Adapter
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.rewards.threads import Plain
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.rollout.stream import Draw, GroupResult, Ledger, RolloutStream
from rl_megatron.types import GenerationRequest, Prompt, RolloutGroup

PROMPTS = [Prompt(id=f"p{i}", text="", token_ids=(1,), answer="") for i in range(600)]
OF_TOKENS = [Prompt(id=f"p{i}", text="", token_ids=(i, 5), answer="") for i in range(40)]


@dataclass
class Source:
    """Takes ``seconds(prompt)`` for each group, all of those asked together as long as the longest."""

    seconds: Callable[[str], float]
    dropped: Callable[[str], bool] = lambda _: False
    stream: RolloutStream = field(init=False)
    versions: dict[str, int] = field(default_factory=dict)  # served when a prompt was last asked for
    asked: list[list[int]] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)
    now: int = 0  # groups that are under way
    most: int = 0  # of these, at any time

    async def groups(self, drawn: Sequence[Draw]) -> list[GroupResult]:
        self.asked.append([one.ordinal for one in drawn])
        self.asked_at.append(asyncio.get_running_loop().time())
        self.versions |= {one.prompt.id: self.stream.version for one in drawn}
        self.now += len(drawn)
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(max(self.seconds(one.prompt.id) for one in drawn))
        finally:
            self.now -= len(drawn)
        return [self._answer(one.prompt) for one in drawn]

    async def collect_partials(self) -> None:
        """Nothing is known of what is under way."""

    def partial_completion(self, drawn: Draw) -> tuple[()]:
        return ()

    def _answer(self, prompt: Prompt) -> GroupResult:
        rewards = (0.0, 0.0) if self.dropped(prompt.id) else (0.0, 1.0)
        return GroupResult(group=RolloutGroup(prompt=prompt, trajectories=()), rewards=rewards)


def stream_over(
    source: Source,
    *,
    size: int,
    staleness: int,
    last_step: int = 10**6,
    served: bool = True,
    path: Path | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    **section: Any,
) -> RolloutStream:
    source.stream = RolloutStream(
        prompts=PromptStream(prompts, seed=0),
        source=source,
        section=RolloutSection(prompts_per_step=size, engine="vllm" if served else "local", **section),
        max_staleness=staleness,
        last_step=last_step,
        teaches=lambda groups: [not source.dropped(group.prompt.id) for group in groups],
        ledger=Ledger(path),
    )
    return source.stream


def sampled_from(
    engine: RolloutEngine, *, staleness: int, last_step: int, path: Path | None = None
) -> tuple[RolloutSampler, RolloutStream]:
    """Two prompts of `OF_TOKENS` a step, three completions of each, and a reward that is the length of their text."""
    section = RolloutSection(engine="vllm", prompts_per_step=2, group_size=3, max_new_tokens=20)
    sampler = RolloutSampler(
        engine=engine,
        reward_function=Plain(lambda prompt, completions, texts: [float(len(text)) for text in texts]),
        decode=lambda tokens: " ".join(map(str, tokens)),
        rollout=section,
        reward=RewardSection(),
        stop_token_ids=(),
        seed=0,
        one_request_each=staleness > 0,
    )
    stream = RolloutStream(
        prompts=PromptStream(OF_TOKENS, seed=0),
        source=sampler,
        section=section,
        max_staleness=staleness,
        last_step=last_step,
        teaches=lambda groups: [True] * len(groups),
        ledger=Ledger(path),
    )
    return sampler, stream


# An adapter whose servers need not know of pushes.
class Still(Adapter):
    """Loading, pausing and aborting do nothing; how a server samples is for who inherits from it to say."""

    name, module, tested_version, renormalizes_top_p = "Still", "still", "1", True

    async def abort(self, server: Any, request: GenerationRequest, request_id: str) -> None: ...

    async def pause(self, server: Any, mode: object) -> None: ...

    async def resume(self, server: Any) -> None: ...

    async def load(self, server: Any, path: Path, version: int, **options: object) -> list[Any]:
        return []

    async def relabel(self, server: Any, version: int) -> None: ...
