"""The interface of an environment: four async methods, or one custom function that gets a model.

Messages are OpenAI's: mappings with ``role`` and ``content``, and ``tool_calls`` or ``tool_call_id`` if tools are
called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

from rl_megatron.types import FinishReason, Prompt, StopReason

OpenAIMessage = Mapping[str, Any]


class AgentFailed(Exception):
    """A failure of a program that leads a trajectory; a rejected turn may be its cause, which its text does not show.

    An agent's function raises it if another program requests turns. A trajectory ended by a limit keeps its end.
    """


class LimitReached(Exception):
    """A trajectory cannot have another turn; the argument names the limit that it reached.

    Raises ValueError if the argument is not a stop reason.
    """

    def __init__(self, stop: StopReason) -> None:
        if stop not in (reasons := get_args(StopReason)):
            raise ValueError(f"LimitReached({stop!r:.80}): a trajectory ends by one of {', '.join(reasons)}")
        super().__init__(stop)
        self.stop = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The model's next input: a text, which is a user's message, or messages."""

    content: str | Sequence[OpenAIMessage]
    tools: Sequence[Mapping[str, Any]] = ()  # OpenAI's schemas of functions, in a chat template; of the first only
    state: str | None = None  # optional state id: equal ids mean equal states; None: the tokens shown so far are the id

    def __new__(cls, **values: object) -> Observation:
        """Raises TypeError that names the new field for the former one."""
        if "said" in values:
            raise TypeError("Observation has no field said; the field's name is now content")
        return object.__new__(cls)

    @property
    def messages(self) -> tuple[OpenAIMessage, ...]:
        """The messages to append."""
        return ({"role": "user", "content": self.content},) if isinstance(self.content, str) else tuple(self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The model's reply in one turn."""

    text: str  # decoded without special tokens
    message: OpenAIMessage  # the assistant's, as in the history; with tool_calls by environment.tool_parser
    finish_reason: FinishReason
    bad_call: str | None = None  # reason that a call is unreadable; then the message has no calls and all of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentStep:
    """An environment's answer to a turn. Without an observation the trajectory has ended."""

    observation: Observation | None = None
    reward: float | None = None  # this turn's reward; a trajectory's reward is their sum, or the value of ``score``
    metrics: Mapping[str, float] = field(default_factory=dict)  # added up over a trajectory's turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A trajectory that has ended, the argument of ``score``."""

    task: Prompt
    messages: Sequence[OpenAIMessage]
    replies: Sequence[Reply]
    stop: StopReason


class Environment(Protocol):
    """One trajectory's environment: each trajectory has its own object, thread and event loop."""

    async def start(self, task: Prompt, seed: int) -> Observation:
        """Returns the model's first input. Equal seeds must give equal trajectories."""
        ...

    async def step(self, reply: Reply) -> EnvironmentStep:
        """Answers a turn. A tool's failure is an observation for the model; an exception is the environment's fault."""
        ...

    async def score(self, transcript: Transcript) -> float:
        """Returns the trajectory's reward. It is not called if any step gave one."""
        ...

    async def close(self) -> None:
        """Releases everything. It is always called, after any end of the trajectory."""
        ...


class HasDemonstration(Protocol):
    """The optional method of a class of environments for a warm start."""

    def demonstration(self, task: Prompt, seed: int) -> Sequence[str]:
        """Returns texts of one correct trajectory: the model's first, then an observation, and so on in turns. They
        follow the prompt, the task's text for any ``start``. A supervised step trains only on the model's."""
        ...


class AgentModelClient(Protocol):
    """The argument ``model`` of a custom function: ``async def solve(task, model, **options) -> float``, or
    an EnvironmentStep with a reward and metrics.

    Turns that clients request at ``base_url``, which is on loopback, are the trajectory's, like those of `reply`.
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
        """Returns the model's next turn after these messages.

        Raises LimitReached if the trajectory cannot have another turn; a function that does not catch it gets the
        reward 0.
        """
        ...
