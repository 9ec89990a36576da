"""What an environment answers and is given: four async methods, or one function of your own that is given a model.

Messages are OpenAI's: mappings with ``role`` and ``content``, and ``tool_calls`` or ``tool_call_id`` where tools are
called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

from rl_megatron.types import FinishReason, Prompt, StopReason

OpenAIMessage = Mapping[str, Any]


class AgentFailed(Exception):
    """What a program that leads a trajectory raised: perhaps that it was refused a turn, which its words do not tell.

    An agent's function that has another program ask for turns raises it; a trajectory that a limit ended keeps its end.
    """


class LimitReached(Exception):
    """A trajectory may have no further turn; the argument says which limit it reached.

    Raises ValueError for what is no reason.
    """

    def __init__(self, stop: StopReason) -> None:
        if stop not in (reasons := get_args(StopReason)):
            raise ValueError(f"LimitReached({stop!r:.80}): a trajectory ends by one of {', '.join(reasons)}")
        super().__init__(stop)
        self.stop = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the model reads next: a text, which is a user's message, or messages."""

    said: str | Sequence[OpenAIMessage]
    tools: Sequence[Mapping[str, Any]] = ()  # OpenAI's schemas of functions, in a chat template; of the first only
    state: str | None = None  # a name of where it is, equal for equal states; None: the tokens of what is said are it

    @property
    def messages(self) -> tuple[OpenAIMessage, ...]:
        """The messages to append."""
        return ({"role": "user", "content": self.said},) if isinstance(self.said, str) else tuple(self.said)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said in one turn."""

    text: str  # decoded without special tokens
    message: OpenAIMessage  # the assistant's, as it stands in the history; with tool_calls by environment.tool_parser
    finish_reason: FinishReason
    bad_call: str | None = None  # why a call in it cannot be read; then the message has no calls and all of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStep:
    """An environment's answer to a turn. Without an observation the trajectory has ended."""

    observation: Observation | None = None
    reward: float | None = None  # of this turn; a trajectory's reward is the sum of them, or what ``score`` gives
    metrics: Mapping[str, float] = field(default_factory=dict)  # added up over a trajectory's turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A trajectory that has ended, as ``score`` sees it."""

    task: Prompt
    messages: Sequence[OpenAIMessage]
    replies: Sequence[Reply]
    stop: StopReason


class Environment(Protocol):
    """One trajectory's environment: an object is made for each. It runs in a thread and an event loop of its own."""

    async def start(self, task: Prompt, seed: int) -> Observation:
        """What the model reads first. Equal seeds shall give equal trajectories."""
        ...

    async def step(self, reply: Reply) -> EnvironmentStep:
        """Answer a turn. A tool that fails is an observation for the model; an exception is the environment's fault."""
        ...

    async def score(self, transcript: Transcript) -> float:
        """The trajectory's reward. It is not called if any step gave one."""
        ...

    async def close(self) -> None:
        """Release everything. Always called, however the trajectory ended."""
        ...


class HasDemonstration(Protocol):
    """What a class of environments may have for a warm start."""

    def demonstration(self, task: Prompt, seed: int) -> Sequence[str]:
        """Texts of one right trajectory after the prompt, which is the task's text whatever ``start`` says: the model's
        first, then an observation, and so on in turns. A supervised step trains on the model's alone."""
        ...


class AgentModelClient(Protocol):
    """What a function of your own is given: ``async def solve(task, model, **options) -> float``, or
    an EnvironmentStep with a reward and metrics.

    Turns that clients ask for at ``base_url``, which is on loopback, are the trajectory's as those of `reply` are.
    """

    @property
    def base_url(self) -> str:
        """The model's URL for clients of OpenAI's chat completions, until the function returns."""
        ...

    @property
    def api_key(self) -> str:
        """The key of this trajectory at ``base_url``; worth nothing after its end."""
        ...

    async def reply(self, messages: Sequence[OpenAIMessage], tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
        """The model's next turn after these messages.

        Raises LimitReached once the trajectory may have no further turn; a function that does not catch it gets the
        reward 0.
        """
        ...
