"""A source of groups whose trajectories an environment or an agent leads. Runs in the controller process.

An engine that answers batch by batch samples turn k of all trajectories as one batch. The metrics ``environment/…`` of
a step's trajectories are computed here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from typing_extensions import override

from rl_megatron.agents.conversation.messages import normalize_messages
from rl_megatron.agents.conversation.templates import Template
from rl_megatron.agents.endpoint.server import Endpoint, RequestCounts
from rl_megatron.agents.episode import Episode, EpisodeSettings, PromptTooLong, TrajectoryKey
from rl_megatron.agents.parsers import Parser
from rl_megatron.agents.playing import EnvironmentCallError, EpisodeRunner, TrajectoryEnd
from rl_megatron.agents.threads import EpisodeThreads
from rl_megatron.columns import TokenIds
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.environments.protocol import OpenAIMessage
from rl_megatron.environments.registry import Agent, EnvironmentFactory
from rl_megatron.errors import DataError, EnvironmentFailure, PoisonPrompt, task_group
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.rollout.policy_sampler import EvalRequest, PolicySampler, Tell
from rl_megatron.rollout.stream import Draw, GroupResult, Reason, drop_reason
from rl_megatron.seeds import text_seed
from rl_megatron.types import (
    Completion,
    GenerationRequest,
    Prompt,
    RewardResult,
    RolloutGroup,
    SamplingParams,
    Trajectory,
)

logger = logging.getLogger(__name__)

SECONDS, CALLS, BAD_CALLS = "seconds", "tool_calls", "bad_calls"
"""Metrics of a trajectory: its seconds, its calls of tools, and its turns with one that cannot be parsed."""
BRANCHES, OWN, ENDPOINT = "branches/", "own/", "endpoint/"
"""The beginnings of names there: of why rows began, of its environment's own, and of what its clients asked for."""


def request_metrics(requests: RequestCounts) -> dict[str, float]:
    """Returns the metrics of a trajectory with these requests by its clients."""
    return {f"{ENDPOINT}answered": float(requests.answered), f"{ENDPOINT}refused": float(requests.refused)}


def environment_row(led: Sequence[Trajectory]) -> dict[str, float]:
    """Returns means and shares of trajectories that environments led."""
    turns = np.array([len(one.turns) for one in led])
    seconds = np.array([one.metrics[SECONDS] for one in led])
    named = sorted({name for one in led for name in one.metrics if name.startswith((BRANCHES, OWN))})
    served = [one.metrics for one in led if f"{ENDPOINT}answered" in one.metrics]
    asked = (f"{ENDPOINT}answered", f"{ENDPOINT}refused")
    return {
        "environment/turns_mean": float(turns.mean()),
        "environment/seconds_mean": float(seconds.mean()),
        "environment/tool_calls": sum(one.metrics[CALLS] for one in led) / len(led),
        "environment/bad_calls": sum(one.metrics[BAD_CALLS] for one in led) / len(led),
        **{f"environment/stop/{stop}": count / len(led) for stop, count in Counter(one.stop for one in led).items()},
        **{f"environment/{name}": sum(one.metrics.get(name, 0.0) for one in led) / len(led) for name in named},
        **{name: sum(one[name] for one in served) / len(served) for name in asked if served},
    }


PATIENCE = 0.25  # seconds without a further request after which a wave goes without those that are late

_Asked = tuple[str, GenerationRequest, asyncio.Future[Sequence[Completion]]]


class RequestBatcher(RolloutEngine):
    """Sends requests on together: once every pending trajectory waits for one, or the others are late, and the engine
    has answered the wave before.

    A wave is in the order of its requests' ids, so that equal ones are computed equally.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._under_way = 0
        self._waiting: list[_Asked] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Counts a trajectory that will ask."""
        self._under_way += 1

    def end(self) -> None:
        """Counts out a trajectory that asks no longer."""
        self._under_way -= 1
        self._consider()

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        answer: asyncio.Future[Sequence[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request.id, request, answer))
        self._consider()
        return await answer

    @override
    def partial_completion(self, request_id: str) -> Completion | None:
        return self._engine.partial_completion(request_id)

    @override
    async def collect_partials(self) -> None:
        await self._engine.collect_partials()

    def _consider(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting = [one for one in self._waiting if not one[2].done()]  # canceled ones are done
        if not self._waiting or self._running is not None:
            return
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= self._under_way:
            self._go()
        else:
            self._timer = loop.call_later(PATIENCE, self._go)

    def _go(self) -> None:
        self._timer = None
        wave, self._waiting = sorted(self._waiting, key=itemgetter(0)), []
        self._running = asyncio.ensure_future(self._sample(wave))

    async def _sample(self, wave: Sequence[_Asked]) -> None:
        found = await asyncio.gather(*(self._engine.generate(one) for _, one, _ in wave), return_exceptions=True)
        for (_, _, answer), result in zip(wave, found, strict=True):
            if answer.done():
                continue
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)
        self._running = None
        self._consider()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """A trajectory; or None, and why there is none to train on."""

    trajectory: Trajectory | None = None
    reason: Reason | None = None
    problem: str = ""  # also of an environment that failed in a trajectory that is kept
    timed_out: bool = False  # the problem is that it was
    dropped_tokens: int = 0  # sampled tokens, if there is no trajectory to train on

    @property
    def scored(self) -> RewardResult | None:
        """Its reward, or how its environment failed; None where there was nothing to score."""
        if self.reason == "environment_error" or (self.trajectory is not None and self.problem):
            return RewardResult(total=math.nan, error=self.problem, late=self.timed_out)
        return None if self.trajectory is None else RewardResult(total=self.trajectory.reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSampler(PolicySampler):
    """A source over an engine, with a seed for each turn. Seeds are functions of the run's seed and of what `Draw`
    names, so that a group repeats exactly as far as its environment does."""

    factory: EnvironmentFactory | Agent
    template: Template
    encode: Callable[[str], TokenIds]  # a text by itself
    section: EnvironmentSection
    vocab_size: int  # the model's
    parser: Parser | None = None
    columns: tuple[str, ...] = ()  # columns to request with turns that are trained on
    key: str = "environment"  # config key of the section, for messages
    threads: EpisodeThreads = field(init=False)
    endpoint: Endpoint = field(default_factory=Endpoint)
    closing: set[asyncio.Future[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "threads", EpisodeThreads(self.section.concurrency))

    @override
    async def groups(self, drawn: Sequence[Draw]) -> list[GroupResult]:
        """Returns ``group_size`` trajectories of each prompt, in the order of their numbers.

        Raises EnvironmentFailure that names task and turn if an environment fails and ``environment.on_error`` is
        ``fail``.
        """
        count, section = self.rollout.group_size, self.rollout
        members = [self._place(one.prompt, one.name(), i) for one in drawn for i in range(count)]
        params = self.params(
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            router_noise=section.router_noise,
        )
        played = await self._play(members, params)
        parts = (played[first : first + count] for first in range(0, len(played), count))
        return [_answered(one.prompt, part) for one, part in zip(drawn, parts, strict=True)]

    @override
    async def collect_partials(self) -> None:
        """Keeps no trajectory in progress: a resume starts them over."""

    @override
    def partial_completion(self, drawn: Draw) -> tuple[Completion | None, ...]:
        """Returns an empty tuple: a trajectory starts over, with the same seed."""
        return ()

    @override
    async def sample_eval(self, request: EvalRequest) -> list[GroupResult]:
        """Samples as `PolicySampler.held_out`, but trajectories."""
        places, prompts, samples = self.healthy_prompts(request), request.prompts, request.samples
        numbered = [(prompts[place], place * samples + i) for place in places for i in range(samples)]
        members = [self._place(prompt, request.purpose, number) for prompt, number in numbered]
        played = await self._play(members, request.params, ahead=True, exact_logprobs=False, tell=request.on_progress)
        parts = [played[first : first + samples] for first in range(0, len(played), samples)]
        answered = [_answered(prompts[place], part) for place, part in zip(places, parts, strict=True)]
        return self.among_poison(request, places, answered)

    @override
    async def wait_closed(self) -> None:
        """Waits until every environment is closed; each ``close`` has a time limit."""
        while self.closing:
            await asyncio.wait(set(self.closing))

    async def _play(
        self,
        members: Sequence[TrajectoryKey],
        params: SamplingParams,
        *,
        ahead: bool = False,
        exact_logprobs: bool = True,
        tell: Tell | None = None,
    ) -> list[EpisodeResult]:
        setting = EpisodeSettings(
            engine=self.engine,
            section=self.section,
            params=params,
            skips_queue=ahead,
            exact_logprobs=exact_logprobs,
            columns=self.columns if exact_logprobs else (),
            template=self.template,
            max_prompt_tokens=self.rollout.max_prompt_tokens,
            vocab_size=self.vocab_size,
            parser=self.parser,
        )
        async with task_group() as tasks:
            running = [tasks.create_task(self._play_one(setting, member)) for member in members]
            if tell is not None:
                for task in running:
                    task.add_done_callback(lambda _: tell(1))
        return [task.result() for task in running]

    def _place(self, task: Prompt, name: str, number: int) -> TrajectoryKey:
        seed = text_seed(f"{self.seed}\n{name}\n{task.id}\n{number}")
        return TrajectoryKey(task=task, name=name, number=number, seed=seed)

    async def _play_one(self, setting: EpisodeSettings, place: TrajectoryKey) -> EpisodeResult:
        with ExitStack() as asking:
            thread = await self.threads.take(lambda: self._begin(asking))
            playing = EpisodeRunner(
                episode=Episode(setting, place),
                task=place.task,
                seed=place.seed,
                section=self.section,
                truncate=self._cut,
                on_last_turn=asking.close,
                thread=thread,
                endpoint=self.endpoint,
            )
            waits, cut_off = True, False
            try:
                played = await self._ended(playing, place)
                waits = not played.problem  # a group waits for no environment that failed; `wait_closed` does
                return played
            except asyncio.CancelledError:
                cut_off = True
                raise
            finally:
                closing = asyncio.ensure_future(self._close(playing, place, cut_off=cut_off))
                self.closing.add(closing)
                closing.add_done_callback(self.closing.discard)
                if waits:
                    await _wait_closed(closing)

    def _begin(self, asking: ExitStack) -> None:
        """Counts a trajectory among those that will ask, until ``asking`` is closed."""
        if isinstance(self.engine, RequestBatcher):
            self.engine.begin()
            asking.callback(self.engine.end)

    async def _ended(self, playing: EpisodeRunner, place: TrajectoryKey) -> EpisodeResult:
        on_error, fault, late = self.section.on_error, "", False
        try:
            ended = await playing.run(self.factory)
            if ended.problem:
                logger.warning("environment %r: %s, %s", self.section.function, self._describe(place), ended.problem)
        except EnvironmentCallError as error:
            late = error.late
            fault = f"environment {self.section.function!r}: {self._describe(place)}, {error}"
            if on_error == "fail":
                advice = f"fix it, or set {self.key}.on_error to drop or to a number"
                raise EnvironmentFailure(f"{fault}; {advice}") from error
            logger.warning("%s", fault)
            if on_error == "drop":
                tokens = playing.episode.num_sampled
                return EpisodeResult(reason="environment_error", problem=fault, timed_out=late, dropped_tokens=tokens)
            ended = TrajectoryEnd(stop="environment_error", reward=float(on_error), metrics=playing.metrics)
        except PromptTooLong as error:
            if self.rollout.on_long_prompt == "fail":
                advice = "raise it, or set rollout.on_long_prompt=drop"
                raise DataError(f"{self._describe(place)}: {error}; {advice}") from error
            logger.warning("%s: %s; its group is dropped", self._describe(place), error)
            return EpisodeResult(reason="long_prompt", problem=str(error))
        except PoisonPrompt as error:
            logger.error("prompt %r is dropped: %s", place.task.id, error)
            return EpisodeResult(reason="poison", problem=str(error), dropped_tokens=playing.episode.num_sampled)
        chains = playing.episode.chains(ended.turn_rewards, playing.states)
        if not any(chain.turns for chain in chains):
            passed = f"{self.key}.seconds={self.section.seconds:g} passed before its first; raise it"
            why = passed if ended.stop == "seconds" else f"it ended as {ended.stop}"
            problem = fault or f"environment {self.section.function!r}: {self._describe(place)} has no turn: {why}"
            if not fault:
                logger.warning("%s", problem)
            return EpisodeResult(
                reason="environment_error" if fault else "nothing_sampled", problem=problem, timed_out=late
            )
        seconds = asyncio.get_running_loop().time() - playing.episode.began
        replies, branches = playing.episode.replies, playing.episode.conversation.branches()
        metrics = {
            SECONDS: seconds,
            CALLS: sum(len(one.message.get("tool_calls") or ()) for one in replies),
            BAD_CALLS: sum(one.bad_call is not None for one in replies),
            **{f"{BRANCHES}{why}": count for why, count in branches.items()},
            **{f"{OWN}{name}": value for name, value in ended.metrics.items()},
        }
        if playing.requests is not None:
            metrics |= request_metrics(playing.requests)
        trajectory = Trajectory(chains=chains, reward=ended.reward, stop=ended.stop, metrics=metrics)
        return EpisodeResult(trajectory=trajectory, problem=fault, timed_out=late)

    async def _close(self, playing: EpisodeRunner, place: TrajectoryKey, *, cut_off: bool) -> None:
        """Closes an environment. One that was ``cut_off``, as by a run's end, may have processes without a warning."""
        problem: str | None = "was cancelled while it closed"
        try:
            problem = await playing.close()
        finally:
            killed = await self.threads.give_back(playing.thread)
            if problem:
                logger.warning("environment %r: %s, %s", self.section.function, self._describe(place), problem)
            if killed:
                of = f"environment {self.section.function!r}: {self._describe(place)}"
                level, pids = logging.INFO if cut_off else logging.WARNING, ", ".join(map(str, killed))
                logger.log(level, "%s left processes running, which were killed: %s", of, pids)

    def _describe(self, place: TrajectoryKey) -> str:
        return f"prompt {place.task.id!r}, trajectory {place.number} of {place.name}"

    def _cut(self, message: OpenAIMessage) -> OpenAIMessage:
        """Returns the message, its text cut in the middle to ``max_observation_tokens``."""
        (shown,), most = normalize_messages((message,)), self.section.max_observation_tokens
        content = shown["content"]
        if len(content) <= most // 4:  # the shortest tokens are bytes of one character
            return message
        ids = self.encode(content)
        if len(ids) <= most:
            return message
        half = most // 2
        first, last = self.template.decode(ids[:half]), self.template.decode(ids[len(ids) - half :])
        return {**message, "content": f"{first}\n[{len(ids) - 2 * half} tokens cut]\n{last}"}


async def _wait_closed(closing: asyncio.Future[None]) -> None:
    """Waits even if it is canceled: closing has a limit, and the end of a run cuts off tasks that are not awaited."""
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait({closing})
        raise


def _answered(prompt: Prompt, played: Sequence[EpisodeResult]) -> GroupResult:
    """Returns the group of these trajectories, if none failed."""
    scored = tuple(one.scored for one in played if one.scored is not None)
    kept = tuple(one.trajectory for one in played if one.trajectory is not None)
    tokens = sum(one.dropped_tokens for one in played)
    if len(kept) < len(played):
        reason, problem = drop_reason((one.reason, one.problem) for one in played)
        tokens += sum(one.num_sampled for one in kept)
        return GroupResult(group=None, reason=reason, problem=problem, scored=scored, left_out_tokens=tokens)
    group = RolloutGroup(prompt=prompt, trajectories=kept)
    return GroupResult(group=group, rewards=group.rewards, scored=scored, left_out_tokens=tokens)
