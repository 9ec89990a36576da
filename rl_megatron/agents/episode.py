"""One trajectory's turns: its conversation with the engine, and its budget of tokens, turns and seconds.

An agent gets the model as a method, and as a URL with a key for clients of OpenAI's API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from rl_megatron.agents.conversation.conversation import Conversation, TokenRows
from rl_megatron.agents.conversation.messages import UnsupportedMessages
from rl_megatron.agents.conversation.templates import Template
from rl_megatron.agents.endpoint.server import Endpoint, RequestCounts
from rl_megatron.agents.endpoint.shapes import ConversationHandler, RequestRejected, ServedTurn
from rl_megatron.agents.parsers import ParsedReply, Parser, opens_thought
from rl_megatron.columns import TokenIds
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.environments.protocol import AgentModelClient, LimitReached, OpenAIMessage, Reply
from rl_megatron.errors import EngineError
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.rollout.sampler import traced_generate
from rl_megatron.seeds import text_seed
from rl_megatron.types import Completion, GenerationRequest, Prompt, SamplingParams, StopReason, TokenSequence, Turn

T = TypeVar("T")
_LEAST_SECONDS = 1.0  # minimum for a turn in a server, which aborts it then and gets it again until it has a token
_templates = ThreadPoolExecutor(1, "templates")  # their process renders one at a time
_OPENING = 16  # tokens at the end of a prompt that have its <think> in them, whatever the tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """Settings that all trajectories of a call have in common."""

    engine: RolloutEngine
    section: EnvironmentSection
    params: SamplingParams  # each turn replaces the seed
    template: Template
    max_prompt_tokens: int
    vocab_size: int  # the model's
    parser: Parser | None = None  # splits replies into reasoning and calls
    skips_queue: bool = False  # this and the next two: of its requests
    exact_logprobs: bool = True
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryKey:
    """Identifies a trajectory by everything that it depends on besides the weights."""

    task: Prompt
    name: str  # name of its group
    number: int  # index in its group
    seed: int


class PromptTooLong(Exception):
    """The first prompt is longer than ``rollout.max_prompt_tokens``; the text says so."""


class Episode(ConversationHandler):
    """Samples the turns of one trajectory. ``stop`` is why it can have no further one.

    Concurrent calls are answered one after the other.
    """

    def __init__(self, setting: EpisodeSettings, place: TrajectoryKey) -> None:
        self.conversation = Conversation(setting.template, setting.params.stop_token_ids)
        self.replies: list[Reply] = []
        self.turns: list[Turn] = []  # one for each reply
        self.stop: StopReason | None = None
        self.failed: Exception | None = None  # error of the last request that got no turn, if it ends trajectories
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()
        self._setting, self._place, self._turn = setting, place, asyncio.Lock()
        self._rows = TokenRows()
        self._longest: int | None = None  # tokens of a row; known with the first prompt
        self._left = setting.section.max_tokens

    @property
    def seconds_left(self) -> float:
        """Seconds until ``environment.seconds`` have passed."""
        return self.began + self._setting.section.seconds - self._loop.time()

    @property
    @override
    def max_length(self) -> int:
        return self._longest or self._setting.max_prompt_tokens + self._setting.section.max_tokens

    @property
    @override
    def params(self) -> SamplingParams:
        return self._setting.params

    async def reply(self, messages: Sequence[OpenAIMessage], tools: Sequence[Mapping[str, Any]]) -> Reply:
        """Samples the turn that follows ``messages``.

        Raises LimitReached, PromptTooLong for the first, and what the engine raises. A turn that was cut is answered,
        and is the last; so is one that the template cannot show."""
        async with self._next_turn():
            reply, _, _ = await self._reply(messages, tools, None)
            return reply

    @override
    async def answer(
        self, messages: Sequence[OpenAIMessage], tools: Sequence[Mapping[str, Any]], max_tokens: int | None
    ) -> ServedTurn:
        if tools and self._setting.parser is None:
            raise RequestRejected(
                400, "tools: the run reads no calls of them in what its model writes; set environment.tool_parser"
            )
        async with self._track_request():
            reply, prompt_tokens, completion_tokens = await self._reply(messages, tools, max_tokens)
            return ServedTurn(
                message=reply.message,
                finish_reason=reply.finish_reason,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
            )

    @override
    async def complete(self, token_ids: Sequence[int], max_tokens: int | None) -> Completion:
        prompt = np.array(token_ids, np.int32)
        if not len(prompt) or int(prompt.max()) >= self._setting.vocab_size:
            raise RequestRejected(
                400, f"token_ids: one or more ids in [0, {self._setting.vocab_size}) are needed, got {token_ids[:8]}..."
            )
        async with self._track_request():
            completion = await self._sample(prompt, max_tokens)
            text = self._setting.template.decode(completion.token_ids)
            self._store_turn(self._rows.add(prompt, completion, text), _unparsed(text))
            return completion

    async def _reply(
        self, messages: Sequence[OpenAIMessage], tools: Sequence[Mapping[str, Any]], max_tokens: int | None
    ) -> tuple[Reply, int, int]:
        """Returns the reply, and the tokens of its prompt and its own."""
        try:
            asked = await _off_loop(self.conversation.prompt_for, messages, tools)
        except UnsupportedMessages as error:
            if await _off_loop(self.conversation.cannot_show_turn, messages, tools):  # the model's doing
                raise self._ended("bad_call") from error
            raise
        completion = await self._sample(asked.token_ids, max_tokens)
        read = self._read(asked.token_ids, completion, tools)
        reply = self._store_turn(self.conversation.add(asked, completion, read.message), read)
        return reply, len(asked.token_ids), len(completion.token_ids)

    def _read(self, prompt: TokenIds, completion: Completion, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        if self._setting.parser is None:
            return _unparsed(self._setting.template.decode(completion.token_ids))
        ids = completion.token_ids
        if completion.finish_reason == "stop" and int(ids[-1]) in self._setting.params.stop_token_ids:
            ids = ids[:-1]
        opened = opens_thought(self._setting.template.decode(prompt[-_OPENING:], special=True))
        read = self._setting.parser(self._setting.template.decode(ids, special=True), tools, opened=opened)
        return replace(read, message=_with_ids(read.message, f"{self._place.seed} {len(self.replies)}"))

    def _store_turn(self, turn: Turn | None, read: ParsedReply) -> Reply:
        assert turn is not None  # no completion is empty
        bad_call = read.problem if turn.finish_reason == "stop" else None  # else it was cut
        self.turns.append(turn)
        self.replies.append(
            Reply(text=turn.text, message=read.message, finish_reason=turn.finish_reason, bad_call=bad_call)
        )
        return self.replies[-1]

    @asynccontextmanager
    async def _next_turn(self) -> AsyncIterator[None]:
        """Takes a turn, after the one before, and keeps what ends the trajectory in ``failed``."""
        async with self._turn:
            try:
                yield
            except (LimitReached, PromptTooLong, EngineError) as error:
                self.failed = error
                raise
            self.failed = None

    @asynccontextmanager
    async def _track_request(self) -> AsyncIterator[None]:
        """Takes a turn for a client, and refuses it with what ends the trajectory."""
        try:
            async with self._next_turn():
                yield
        except PromptTooLong as error:
            raise RequestRejected(400, str(error)) from error
        except LimitReached as error:
            raise RequestRejected(
                410, f"the trajectory has ended at a limit ({error.stop}) and may have no further turn"
            ) from error

    async def _sample(self, token_ids: TokenIds, max_tokens: int | None) -> Completion:
        """Samples what follows the tokens: at least one token, and at most what limits leave and the client asks for.

        A turn that was cut is the last, unless the client asked for fewer tokens than it may have. Servers end one that
        is being sampled at the limit of ``environment.seconds``, with the tokens that it has.
        """
        if self.stop is not None:
            raise LimitReached(self.stop)
        if not self.turns:
            self._check_first(len(token_ids))
            self._longest = len(token_ids) + self._setting.section.max_tokens
        read = self._observed(token_ids)
        room = min(self._setting.params.max_new_tokens, self._left - read)
        self._check_limits(room)
        most = room if max_tokens is None else min(room, max_tokens)
        request = self._request(tuple(token_ids.tolist()), most)
        try:
            async with asyncio.timeout(self._turn_timeout):
                (completion,) = await traced_generate(self._setting.engine, request, self._decode)
        except TimeoutError as error:
            raise self._ended("seconds") from error
        if not len(completion.token_ids):
            raise self._ended("length")
        self._left -= read + len(completion.token_ids)
        if completion.finish_reason == "length" and len(completion.token_ids) < most:
            self.stop = "seconds"
        elif completion.finish_reason == "length" and most == room:
            self.stop = "length"
        elif completion.finish_reason not in ("stop", "length"):
            self.stop = "abandoned"
        return completion

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._setting.template.decode(np.array(token_ids, np.int32), special=True)

    @property
    def _turn_timeout(self) -> float | None:
        """Seconds for a turn. The first has no limit: without it there is nothing to train on."""
        return self.seconds_left + self._setting.section.step_seconds / 2 if self.turns else None

    @property
    def is_sampling(self) -> bool:
        """True if a turn is being sampled."""
        return self._turn.locked()

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(one.logprobs) for one in self.turns)

    def chains(
        self, rewards: Sequence[float | None] = (), states: Sequence[str | None] = ()
    ) -> tuple[TokenSequence, ...]:
        """Returns the rows to train on; ``rewards`` and names of ``states`` are of the first turns."""
        numbered = enumerate(zip_longest(self.turns, rewards[: len(self.turns)], states[: len(self.turns)]))
        of = {id(one): replace(one, number=n, reward=reward, state=state) for n, (one, reward, state) in numbered}
        rows = (*self.conversation.chains(), *self._rows.chains())
        return tuple(replace(row, turns=tuple(of[id(one)] for one in row.turns)) for row in rows)

    def _observed(self, token_ids: TokenIds) -> int:
        """Returns the tokens of a prompt that no earlier row begins with; 0 of the first."""
        rows = [*self.conversation.rows(), *self._rows.rows()]
        if not rows:
            return 0
        known = 0
        for row in reversed(rows):  # the newest row shares most; one token tells whether another shares more
            if known < min(len(row), len(token_ids)) and row[known] == token_ids[known]:
                known = max(known, _common_length(row, token_ids))
        return len(token_ids) - known

    def _check_first(self, length: int) -> None:
        most = self._setting.max_prompt_tokens
        if length > most:
            raise PromptTooLong(f"the first prompt has {length} tokens, rollout.max_prompt_tokens={most}")

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
            prefix_group=f"{place.name}: {place.task.id}",
            start_version=self.turns[0].spans[0].version if self.turns and not self._setting.skips_queue else None,
            skips_queue=self._setting.skips_queue,
            exact_logprobs=self._setting.exact_logprobs,
            columns=self._setting.columns,
            max_seconds=max(_LEAST_SECONDS, self.seconds_left),
        )


async def _off_loop(call: Callable[..., T], *arguments: Any) -> T:
    """Renders in a thread, after calls before it: a template's process may be slow, or stopped."""
    return await asyncio.get_running_loop().run_in_executor(_templates, call, *arguments)


def _common_length(one: TokenIds, other: TokenIds) -> int:
    """Returns the number of equal tokens that both begin with."""
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


def _with_ids(message: OpenAIMessage, turn: str) -> OpenAIMessage:
    """Returns the message with unique ids of its calls: agents know by them which call was answered."""
    if "tool_calls" not in message:
        return message
    numbered = enumerate(message["tool_calls"])
    calls = [{"id": f"call_{text_seed(f'{turn} {place}'):016x}", **call} for place, call in numbered]
    return {**message, "tool_calls": calls}


def _unparsed(text: str) -> ParsedReply:
    return ParsedReply(message={"role": "assistant", "content": text})


_OPENING_LIMIT = 60.0  # seconds; a trajectory without time left gets a URL too, which refuses its turns by that reason


class AgentModel(AgentModelClient):
    """The model of one trajectory, created in the event loop that serves it and used in the agent's own thread."""

    def __init__(self, episode: Episode, endpoint: Endpoint) -> None:
        self._episode, self._endpoint = episode, endpoint
        self._loop = asyncio.get_running_loop()
        self._served: tuple[str, str] | None = None  # None until it is asked for
        self._closed = False
        self.requests: RequestCounts | None = None  # counts of the clients' requests, set by `close`

    @override
    async def reply(self, messages: Sequence[OpenAIMessage], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        asking = asyncio.run_coroutine_threadsafe(self._episode.reply(tuple(messages), tools), self._loop)
        return await asyncio.wrap_future(asking)

    @property
    @override
    def base_url(self) -> str:
        return self._open()[0]

    @property
    @override
    def api_key(self) -> str:
        return self._open()[1]

    def close(self) -> None:
        """Ends the key. Called in the event loop that serves it."""
        self._closed = True
        if self._served is not None:
            self.requests = self._endpoint.requests(self._served[1])
            self._endpoint.close(self._served[1])

    def _open(self) -> tuple[str, str]:
        async def opened() -> tuple[str, str]:
            if self._closed:
                raise RuntimeError("this trajectory has ended; nothing serves it any more")
            if self._served is None:
                self._served = self._endpoint.open(self._episode)
            return self._served

        opening = asyncio.run_coroutine_threadsafe(opened(), self._loop)
        try:
            return opening.result(_OPENING_LIMIT)
        except TimeoutError:
            raise RuntimeError(f"the run's event loop opened no URL within {_OPENING_LIMIT:g} s") from None
