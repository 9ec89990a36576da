"""What the endpoint asks of a conversation that it serves, and how requests are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_megatron.types import Completion, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTurn:
    """One turn, for a client: its message as the client will send it back, and the counts of its usage."""

    message: Mapping[str, Any]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    waited: float  # seconds for the turn before it, and for the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTokens:
    """One turn, for a client that asks by tokens."""

    completion: Completion
    waited: float  # as of a `ServedTurn`


class Served(Protocol):
    """One conversation. Calls may come at once."""

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        ...

    @property
    def params(self) -> SamplingParams:
        """What its turns are sampled with, whatever a client asks for."""
        ...

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], max_tokens: int | None
    ) -> ServedTurn:
        """Sample the turn that follows ``messages``, of ``max_tokens`` at most.

        Raises RequestRefused, MessagesRefused and EngineError.
        """
        ...

    async def complete(self, token_ids: Sequence[int], max_tokens: int | None) -> ServedTokens:
        """Sample what follows the tokens. Raises RequestRefused and EngineError."""
        ...


class RequestRefused(Exception):
    """A request that is not answered: its HTTP status, and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
