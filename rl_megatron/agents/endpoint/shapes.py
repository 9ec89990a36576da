"""Requests and answers as clients write and read them: OpenAI's chat completions, and vLLM's tokens in.

The endpoint asks a conversation for what is named here, and refuses requests by it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from rl_megatron.types import Completion, FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTurn:
    """One turn, for a client: its message as the client will send it back, and the counts of its usage."""

    message: Mapping[str, Any]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


class ConversationHandler(Protocol):
    """One conversation. Calls may be concurrent."""

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        ...

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of its turns, whatever a client asks for."""
        ...

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], max_tokens: int | None
    ) -> ServedTurn:
        """Samples the turn that follows ``messages``, of ``max_tokens`` at most.

        Raises RequestRejected, UnsupportedMessages and EngineError.
        """
        ...

    async def complete(self, token_ids: Sequence[int], max_tokens: int | None) -> Completion:
        """Samples what follows the tokens. Raises RequestRejected and EngineError."""
        ...


class RequestRejected(Exception):
    """A request that is not answered: its HTTP status, and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


Count = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct):
    """``stream_options`` of a request: whether usage follows the last part of a stream."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The body of /v1/chat/completions, as far as it is read."""

    messages: list[dict[str, Any]]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens of the answer; None: as many as the run allows."""
        given = [count for count in (self.max_tokens, self.max_completion_tokens) if count is not None]
        return min(given, default=None)

    def check(self) -> None:
        """Raises RequestRejected for what the endpoint cannot do, with the reason."""
        for refused, reason in (
            (self.n not in (None, 1), f"n={self.n}; a request samples one answer: send another for each"),
            (bool(self.stop), "stop: a text that ends turns would cut tokens after they were sampled; leave it out"),
            (bool(self.logprobs), "logprobs: they stay with the run; leave it out"),
            (
                self.tool_choice not in (None, "auto", "none"),
                f"tool_choice={self.tool_choice!r:.100}: the model chooses freely; leave it out, or send auto or none",
            ),
            (
                (self.response_format or {}).get("type", "text") != "text",
                "response_format: the model is sampled without a grammar; leave it out",
            ),
        ):
            if refused:
                raise RequestRejected(400, reason)


class TokenParams(msgspec.Struct):
    """``sampling_params`` of /inference/v1/generate."""

    max_tokens: Count | None = None
    stop_token_ids: list[TokenId] = []
    stop: str | list[str] | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None


class TokenRequest(msgspec.Struct):
    """The body of /inference/v1/generate."""

    token_ids: list[TokenId]
    sampling_params: TokenParams = msgspec.field(default_factory=TokenParams)
    model: str = ""
    stream: bool | None = None

    def check(self, stop_token_ids: Sequence[int]) -> None:
        """Raises RequestRejected for what the endpoint cannot do, with the reason."""
        params = self.sampling_params
        if params.n not in (None, 1) or params.stop or self.stream:
            raise RequestRejected(400, "n above 1, stop and stream: a request samples one answer; leave them out")
        if other := sorted(set(params.stop_token_ids) - set(stop_token_ids)):
            raise RequestRejected(
                400, f"stop_token_ids has {other}; the run's turns end with {sorted(stop_token_ids)} alone"
            )


def chat_answer(answer: ServedTurn, name: str, model: str) -> dict[str, Any]:
    """Returns the answer in one piece; ``name`` is its id."""
    choice = {"index": 0, "message": {"content": None, **answer.message}, "finish_reason": _reason(answer)}
    return {**_head(name, model, ""), "choices": [choice], "usage": _usage(answer)}


def chat_stream(answer: ServedTurn, name: str, model: str, *, usage: bool) -> Iterable[bytes]:
    """Yields the answer as events: the whole message, its end, and the usage if it was asked for."""
    delta = {"content": None, **answer.message}
    if calls := answer.message.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    head = _head(name, model, ".chunk") | ({"usage": None} if usage else {})
    for choice in (
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": _reason(answer)},
    ):
        yield _event({**head, "choices": [choice]})
    if usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def token_answer(completion: Completion, name: str) -> dict[str, Any]:
    """Returns sampled tokens with a log-prob each."""
    ids, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
    content = [
        {"token": f"token_id:{one}", "logprob": logprob, "top_logprobs": []}
        for one, logprob in zip(ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": _finish(completion.finish_reason),
        "logprobs": {"content": content},
    }
    return {"request_id": name, "choices": [choice]}


def models(max_length: int) -> dict[str, Any]:
    """Returns the answer of /v1/models: one model, the policy."""
    policy = {"id": "policy", "object": "model", "created": 0, "owned_by": "rl_megatron", "max_model_len": max_length}
    return {"object": "list", "data": [policy]}


def refused_body(status: int, reason: str) -> dict[str, Any]:
    """Returns the body of a request that is refused."""
    return {"error": {"message": reason, "type": "invalid_request_error", "param": None, "code": str(status)}}


def _head(name: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": f"chat.completion{kind}", "created": int(time.time()), "model": model or "policy"}


def _usage(answer: ServedTurn) -> Mapping[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _reason(answer: ServedTurn) -> str:
    return "tool_calls" if answer.message.get("tool_calls") else _finish(answer.finish_reason)


def _finish(reason: FinishReason) -> str:
    return "stop" if reason == "stop" else "length"  # a turn that was cut, for whatever reason


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
