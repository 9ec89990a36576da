"""One trajectory's turns: its conversation with the engine, and its budget of tokens, turns and seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_megatron.config.sections.environment import EnvironmentSection
from rl_megatron.environments.protocol import LimitReached, OpenAIMessage, Reply
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.rollout.conversation.conversation import Conversation
from rl_megatron.rollout.conversation.templates import Template
from rl_megatron.seeds import text_seed
from rl_megatron.types import Chain, GenerationRequest, Prompt, SamplingParams, StopReason, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySetting:
    """What all trajectories of a call have in common."""

    engine: RolloutEngine
    section: EnvironmentSection
    params: SamplingParams  # whose seed each turn replaces
    template: Template
    max_prompt_tokens: int
    birth: int | None = None  # this and the next: of its requests
    exact_logprobs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryPlace:
    """Which trajectory it is: everything that it depends on besides the weights."""

    task: Prompt
    name: str  # of its group
    number: int  # in its group
    seed: int


class LongPrompt(Exception):
    """What the model should read first is longer than ``rollout.max_prompt_tokens``; the text says so."""


class Episode:
    """Samples the turns of one trajectory. ``stop`` is why it can have no further one."""

    def __init__(self, setting: PlaySetting, place: TrajectoryPlace) -> None:
        self.conversation = Conversation(setting.template)
        self.replies: list[Reply] = []
        self.turns: list[Turn] = []  # one for each reply
        self.stop: StopReason | None = None
        self.began = asyncio.get_running_loop().time()
        self._setting, self._place, self._turn = setting, place, asyncio.Lock()
        self._longest: int | None = None  # tokens of a row; known with the first prompt

    @property
    def seconds_left(self) -> float:
        """Until ``environment.seconds`` have passed."""
        return self.began + self._setting.section.seconds - asyncio.get_running_loop().time()

    async def reply(self, messages: Sequence[OpenAIMessage], tools: Sequence[Mapping[str, Any]]) -> Reply:
        """Sample the turn that follows ``messages``.

        Raises LimitReached, LongPrompt for the first, and what the engine raises. A turn that was cut is answered, and
        is the last. Of calls at once, each is answered after the one before.
        """
        async with self._turn:
            return await self._reply(messages, tools)

    async def _reply(self, messages: Sequence[OpenAIMessage], tools: Sequence[Mapping[str, Any]]) -> Reply:
        if self.stop is not None:
            raise LimitReached(self.stop)
        asked = self.conversation.prompt_for(messages, tools)
        length = len(asked.token_ids)
        if self._longest is None:
            self._check_first(length)
            self._longest = length + self._setting.section.max_tokens
        room = min(self._setting.params.max_new_tokens, self._longest - length)
        self._check_limits(room)
        request = self._request(tuple(asked.token_ids.tolist()), room)
        try:
            async with asyncio.timeout(self.seconds_left):
                (completion,) = await self._setting.engine.generate(request)
        except TimeoutError as error:
            raise self._ended("seconds") from error
        if not len(completion.token_ids):
            raise self._ended("length")
        text = self._setting.template.decode(completion.token_ids)
        message = {"role": "assistant", "content": text}
        turn = self.conversation.add(asked, completion, message)
        assert turn is not None
        self.turns.append(turn)
        if completion.finish_reason != "stop":
            self.stop = "length" if completion.finish_reason == "length" else "abandoned"
        self.replies.append(Reply(text=text, message=message, finish_reason=completion.finish_reason))
        return self.replies[-1]

    def chains(self, rewards: Sequence[float | None] = ()) -> tuple[Chain, ...]:
        """The rows to train on; ``rewards`` are of the first turns."""
        of = {id(turn): reward for turn, reward in zip(self.turns, rewards, strict=False) if reward is not None}
        rows = self.conversation.chains()
        if not of:
            return rows
        return tuple(
            replace(row, turns=tuple(replace(one, reward=of.get(id(one))) for one in row.turns)) for row in rows
        )

    def _check_first(self, length: int) -> None:
        most = self._setting.max_prompt_tokens
        if length > most:
            raise LongPrompt(f"the first prompt has {length} tokens, rollout.max_prompt_tokens={most}")

    def _check_limits(self, room: int) -> None:
        section = self._setting.section
        if len(self.replies) >= section.max_turns:
            raise self._ended("turns")
        if room < min(section.min_turn_tokens, self._setting.params.max_new_tokens):
            raise self._ended("tokens")
        if self.seconds_left <= 0:
            raise self._ended("seconds")

    def _ended(self, stop: StopReason) -> LimitReached:
        self.stop = stop
        return LimitReached(stop)

    def _request(self, token_ids: tuple[int, ...], room: int) -> GenerationRequest:
        place, turn = self._place, len(self.replies)
        return GenerationRequest(
            id=f"{place.name}: {place.task.id}, trajectory {place.number}, turn {turn}",
            token_ids=token_ids,
            num_completions=1,
            params=replace(self._setting.params, max_new_tokens=room, seed=text_seed(f"{place.seed} {turn}")),
            group=f"{place.name}: {place.task.id}",
            birth=self._setting.birth,
            exact_logprobs=self._setting.exact_logprobs,
        )
