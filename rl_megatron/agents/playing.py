"""Leads one trajectory to its end: an environment's calls in a thread of their own, or an agent of the user's."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import SupportsFloat, TypeVar

from rl_megatron.agents.conversation.messages import UnsupportedMessages
from rl_megatron.agents.endpoint.server import Endpoint, RequestCounts
from rl_megatron.agents.episode import AgentModel, Episode, PromptTooLong
from rl_megatron.agents.threads import CallTimeout, LoopThread, UserCodeFailed
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.environments.protocol import (
    AgentFailed,
    Environment,
    EnvironmentStep,
    LimitReached,
    Observation,
    OpenAIMessage,
    Transcript,
)
from rl_megatron.environments.registry import Agent, EnvironmentFactory
from rl_megatron.errors import EngineError
from rl_megatron.interfaces import LARGEST_REWARD
from rl_megatron.types import Prompt, StopReason

T = TypeVar("T")
_CLOSE_SECONDS = 10.0  # then processes that the environment started are killed
_MOST_METRICS, _METRIC = 32, re.compile("[a-z][a-z0-9_]{0,60}")


class EnvironmentCallError(Exception):
    """The environment raised, was ``late`` or returned a wrong value; the text says in which call."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEnd:
    """The end of a trajectory; ``reward`` is finite. ``problem`` names what was given up at its time limit."""

    stop: StopReason
    reward: float
    turn_rewards: tuple[float | None, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class EpisodeRunner:
    """One trajectory in progress."""

    episode: Episode
    task: Prompt
    seed: int
    section: EnvironmentSection
    truncate: Callable[[OpenAIMessage], OpenAIMessage]  # returns what ``max_observation_tokens`` leaves of a message
    on_last_turn: Callable[[], None]  # called once, when it needs the engine no longer
    thread: LoopThread
    endpoint: Endpoint
    started: bool = False  # its environment may be there
    environment: Environment | None = None
    messages: list[OpenAIMessage] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    states: list[str | None] = field(default_factory=list)  # names of the states before turns; None for an unnamed one
    metrics: dict[str, float] = field(default_factory=dict)
    requests: RequestCounts | None = None  # counts of an agent's clients, if it has any

    async def run(self, factory: EnvironmentFactory | Agent) -> TrajectoryEnd:
        """Plays to the end, but for `close`. Raises EnvironmentCallError, and the engine's errors as
        `Episode.reply`."""
        try:
            if isinstance(factory, Agent):
                return await self._run_agent(factory)
            stop = await self._run_turns(factory)
        finally:
            self.on_last_turn()
        return TrajectoryEnd(
            stop=stop, reward=await self._reward(stop), turn_rewards=tuple(self.rewards), metrics=self.metrics
        )

    async def close(self) -> str | None:
        """Closes the environment. Returns what went wrong, if anything did."""
        if not self.started:
            return None

        async def close() -> None:  # runs after `start` in its thread, which may have created it only now
            if self.environment is not None:
                await self.environment.close()

        try:
            await self.thread.call(close, _CLOSE_SECONDS)
        except CallTimeout:
            return f"close did not end within {_CLOSE_SECONDS:g} s"
        except UserCodeFailed as error:
            return f"close {error}"
        return None

    async def _run_turns(self, factory: EnvironmentFactory) -> StopReason:
        async def start() -> Observation:
            self.environment = factory()
            return await self.environment.start(self.task, self.seed)

        self.started = True
        seen = await self._call("start", start)
        env = self.environment
        assert env is not None
        tools = self._observe(seen, "start").tools
        while True:
            self.states.append(seen.state)
            try:
                reply = await self.episode.reply(self.messages, tools)
            except LimitReached as limit:
                return limit.stop
            except UnsupportedMessages as error:
                raise self._fault("step" if self.episode.replies else "start", str(error)) from error
            self.messages.append(reply.message)
            if self.episode.stop is not None:  # the turn was cut, or has a bad call
                return self.episode.stop
            if reply.bad_call is not None:
                self.rewards.append(None)
                seen = self._observe(Observation(content=f"error: {reply.bad_call}", state=seen.state), "step")
                continue
            step = await self._call("step", lambda reply=reply: env.step(reply))  # type: ignore[misc]
            if not isinstance(step, EnvironmentStep):
                raise self._fault("step", f"returned a {type(step).__name__:.80}, which is no EnvironmentStep")
            self._count(step)
            if step.observation is None:
                return "done"
            seen = self._observe(step.observation, "step")

    async def _run_agent(self, agent: Agent) -> TrajectoryEnd:
        """Runs an agent that leads by itself; its calls of the model are served on this loop.

        If it raises because its client was refused a turn, the reason of the refusal counts. An error of the engine for
        its last request is raised however it ends. One that has sampled and does not end in time is scored as one that
        raises at the limit.
        """
        model = AgentModel(self.episode, self.endpoint)
        section, stop, reward, problem = self.section, "done", 0.0, ""
        given: EnvironmentStep | float = 0.0
        error: CallTimeout | UserCodeFailed | None = None
        try:
            given = await self.thread.call(
                lambda: agent.solve(self.task, model), section.seconds + section.step_seconds
            )
        except (CallTimeout, UserCodeFailed) as raised:
            error = raised
        finally:
            model.close()
            self.requests = model.requests
        refused = self._refused(error)
        if isinstance(refused, (EngineError, PromptTooLong)):
            raise refused from error
        if error is None:
            step = given if isinstance(given, EnvironmentStep) else EnvironmentStep(reward=given)
            reward = self._finite("the function", step.reward)
            self._count(step)
        elif isinstance(error, CallTimeout):
            late = f"did not end within environment.seconds={section.seconds:g} and step_seconds after that"
            fault = self._fault("the function", late, late=True)
            if not self.episode.replies and not self.episode.is_sampling:
                raise fault from error
            stop, problem = "seconds", str(fault) if self.episode.replies else ""
        elif refused is None:
            before = "" if self.episode.failed is None else f"; it had been refused a turn ({self.episode.failed})"
            raise self._fault("the function", f"{error}{before}") from error
        if isinstance(refused, LimitReached):
            stop = refused.stop
        stop = self.episode.stop or stop
        return TrajectoryEnd(stop=stop, reward=reward, metrics=self.metrics, problem=problem)  # type: ignore[arg-type]

    def _refused(self, error: CallTimeout | UserCodeFailed | None) -> BaseException | None:
        """Returns why a function that ended so got no turn, if it ended by that. An engine's failure always counts."""
        failed, cause = self.episode.failed, None if error is None else error.__cause__
        if isinstance(failed, EngineError):
            return failed
        if isinstance(cause, (EngineError, PromptTooLong, LimitReached)):
            return cause
        status = 400 if isinstance(failed, PromptTooLong) else 410
        return failed if isinstance(error, CallTimeout) or _is_refusal(cause, status) else None

    async def _reward(self, stop: StopReason) -> float:
        given = [reward for reward in self.rewards if reward is not None]
        if given:
            return self._finite("step", math.fsum(given))
        env, replies = self.environment, tuple(self.episode.replies)
        assert env is not None
        seen = Transcript(task=self.task, messages=tuple(self.messages), replies=replies, stop=stop)
        return self._finite("score", await self._call("score", lambda: env.score(seen)))

    async def _call(self, name: str, function: Callable[[], Awaitable[T]]) -> T:
        """Calls the environment, within the call's own time limit: the trajectory's ends at the next turn."""
        seconds = self.section.step_seconds
        try:
            return await self.thread.call(function, seconds)
        except CallTimeout as error:
            raise self._fault(name, f"did not end within environment.step_seconds={seconds:g}", late=True) from error
        except UserCodeFailed as error:
            is_sync = isinstance(error.__cause__, TypeError) and "'await' expression" in str(error)
            raise self._fault(name, "is not async; write async def" if is_sync else str(error)) from error

    def _observe(self, seen: object, name: str) -> Observation:
        if not isinstance(seen, Observation):
            raise self._fault(name, f"returned a {type(seen).__name__:.80}, not an Observation")
        try:
            messages = seen.messages
        except TypeError as error:
            raise self._fault(name, f"returned an Observation of {seen.content!r:.80}, which is not text") from error
        if not messages or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in messages):
            raise self._fault(name, "returned an Observation without messages, or with one that has no role")
        if not isinstance(seen.state, str | None):
            raise self._fault(name, f"returned an Observation of state {seen.state!r:.80}, which is not text")
        try:
            self.messages += [self.truncate(one) for one in messages]
        except UnsupportedMessages as error:
            raise self._fault(name, str(error)) from error
        return seen

    def _count(self, step: EnvironmentStep) -> None:
        self.rewards.append(None if step.reward is None else self._finite("step", step.reward))
        if not isinstance(step.metrics, Mapping):
            raise self._fault("step", f"returned the metrics {step.metrics!r:.80}, which are no mapping")
        for key, value in step.metrics.items():
            if key not in self.metrics and len(self.metrics) >= _MOST_METRICS:
                raise self._fault("step", f"returned more than {_MOST_METRICS} metrics")
            if not isinstance(key, str) or not _METRIC.fullmatch(key):
                raise self._fault("step", f"returned a metric {key!r:.80}; its name must be like {_METRIC.pattern}")
            self.metrics[key] = self.metrics.get(key, 0.0) + self._finite(f"step, metric {key!r:.80},", value)

    def _finite(self, name: str, given: object) -> float:
        value = math.nan
        if isinstance(given, SupportsFloat):
            with suppress(Exception):  # it may be of the user's own kind
                value = float(given)
        if not abs(value) <= LARGEST_REWARD:
            beyond = f" of at most {LARGEST_REWARD:g}" if math.isfinite(value) else ""
            raise self._fault(name, f"returned {given!r:.80}, which is no finite number{beyond}")
        return value

    def _fault(self, name: str, problem: str, *, late: bool = False) -> EnvironmentCallError:
        return EnvironmentCallError(f"turn {len(self.episode.replies)}: {name} {problem}", late=late)


def _is_refusal(error: BaseException | None, status: int, depth: int = 16) -> bool:
    """True if a client raises the error, or one that it was raised ``from``, at ``status``; of a group, each part.

    An error that was raised while a refusal was handled is another failure.
    """
    if error is None or not depth:
        return False
    if isinstance(error, BaseExceptionGroup):
        return all(_is_refusal(one, status, depth - 1) for one in error.exceptions)
    if isinstance(error, (AgentFailed, LimitReached, PromptTooLong)):
        return True
    with suppress(Exception):  # attributes of the user's own kind
        for one in (error, getattr(error, "response", None)):
            if status in (getattr(one, "status_code", None), getattr(one, "status", None)):
                return True
    return _is_refusal(error.__cause__, status, depth - 1)
