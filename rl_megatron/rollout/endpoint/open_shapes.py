"""Requests and answers of a model that is served to evaluation tools: OpenAI's completions and chat completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from rl_megatron.rollout.endpoint.served import RequestRefused
from rl_megatron.rollout.endpoint.shapes import Count
from rl_megatron.types import Completion

MOST_PROMPTS, MOST_SAMPLES = 1024, 128
_NEUTRAL: Mapping[str, Sequence[object]] = {  # of keys that change what is sampled, and are not read here
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "stream": (None, False),
    "stream_options": (None,),
    "tools": (None, []),
    "chat_template_kwargs": (None, {}),
    "response_format": (None, {"type": "text"}),
}


class OpenRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of requests have. Other keys are refused, as an answer without their effect would be another."""

    model: str = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_SAMPLES)] = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    best_of: int | None = None
    suffix: str | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    user: Any = None  # this and the next change no answer anywhere
    metadata: Any = None
    store: Any = None

    @property
    def most(self) -> int | None:
        """Most tokens of an answer; None: the request names none."""
        given = [count for count in (self.max_tokens, self.max_completion_tokens) if count is not None]
        return min(given, default=None)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer; they are not part of it."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probs of tokens are asked for."""
        return False

    def check(self) -> None:
        """Raise RequestRefused for what this server does not do, with the reason."""
        for key, neutral in _NEUTRAL.items():
            if (given := getattr(self, key)) not in neutral:
                raise RequestRefused(400, f"{key}={given!r:.100} is not supported here; leave it out")
        if self.stops and self.wants_logprobs:
            raise RequestRefused(400, "logprobs with stop: a text may end inside a token; leave one of them out")


class CompletionRequest(OpenRequest, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | list[int]]  # a text, texts, tokens or several prompts' tokens
    echo: bool = False
    logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probs are asked for."""
        return self.logprobs is not None

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Each prompt, as text or tokens. Raises RequestRefused where kinds are mixed."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [one for one in self.prompt if isinstance(one, int)]
        several = [one for one in self.prompt if not isinstance(one, int)]
        if tokens and several:
            raise RequestRefused(400, "prompt: tokens beside texts or lists; give one kind")
        return several or [tokens]

    def check(self) -> None:
        """Raise RequestRefused, as other requests do, and for log-probs that no engine tells."""
        super().check()
        if not 1 <= len(self.prompts) <= MOST_PROMPTS or not all(self.prompts):
            raise RequestRefused(400, f"prompt: give 1 to {MOST_PROMPTS} prompts, none of them empty")
        if self.logprobs is not None and not 0 <= self.logprobs <= 1:
            raise RequestRefused(400, f"logprobs={self.logprobs}: give 0, or 1 for the most likely token beside each")
        if self.logprobs == 1 and self.temperature > 0 and self.most != 0:
            raise RequestRefused(
                400, "logprobs=1 with temperature above 0: engines tell the sampled token's alone; give logprobs=0"
            )
        if self.echo and self.stops:
            raise RequestRefused(400, "echo with stop: the prompt is no answer; leave one of them out")


class OpenChatRequest(OpenRequest, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probs are asked for."""
        return bool(self.logprobs)

    def check(self) -> None:
        """Raise RequestRefused, as other requests do, and for other tokens' log-probs."""
        super().check()
        if self.top_logprobs:
            raise RequestRefused(400, "top_logprobs: engines tell the sampled token's alone; leave it out")
        if not self.messages or not all(isinstance(one.get("role"), str) for one in self.messages):
            raise RequestRefused(400, "messages: give at least one, each with a role")


class ScoredToken(NamedTuple):
    """A token of a prompt after its first, with the log-probs, in nats at temperature 1, of it and the most likely."""

    logprob: float
    best: int
    best_logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """One answer to one prompt. ``text`` ends before a stop text."""

    prompt: Sequence[int]
    prompt_text: str
    completion: Completion | None  # None: nothing was sampled, because max_tokens is 0
    text: str
    stopped: bool  # by a stop text
    scored: Sequence[ScoredToken] = ()  # of an echoed prompt

    @property
    def finish_reason(self) -> str:
        """As OpenAI names it."""
        return "stop" if self.stopped or (self.completion and self.completion.finish_reason == "stop") else "length"

    @property
    def tokens(self) -> list[tuple[int, float]]:
        """The sampled tokens with their log-probs."""
        if self.completion is None:
            return []
        return list(zip(self.completion.token_ids.tolist(), self.completion.logprobs.tolist(), strict=True))


class TokenTexts:
    """The text of each token, as answers name it."""

    def __init__(self, decode: Any) -> None:
        self._decode, self._known = decode, dict[int, str]()

    def __call__(self, token: int) -> str:
        """The text of a token alone."""
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]


def completion_body(
    request: CompletionRequest, answers: Sequence[Continued], name: str, names: TokenTexts
) -> dict[str, Any]:
    """The answer of /v1/completions; choices are in the order of prompts, then of samples."""
    choices = []
    for index, one in enumerate(answers):
        choice: dict[str, Any] = {
            "index": index,
            "text": (one.prompt_text if request.echo else "") + one.text,
            "finish_reason": one.finish_reason,
            "logprobs": _logprobs(request, one, names) if request.logprobs is not None else None,
        }
        choices.append(choice)
    return {**_head(name, "text_completion", request.model), "choices": choices, "usage": _usage(answers, request.n)}


def _logprobs(request: CompletionRequest, one: Continued, names: TokenTexts) -> dict[str, Any]:
    ids, logprobs, best = list[int](), list[float | None](), list[dict[str, float] | None]()
    if request.echo:
        ids += one.prompt
        logprobs += [None, *(token.logprob for token in one.scored)]
        best += [None, *({names(t.best): t.best_logprob} for t in one.scored)]
        for at, token in enumerate(one.scored, 1):
            told = best[at]
            if told is not None:
                told.setdefault(names(one.prompt[at]), token.logprob)
    for token_id, logprob in one.tokens:
        ids.append(token_id)
        logprobs.append(logprob)
        best.append({names(token_id): logprob})
    texts, offsets, at = [names(token_id) for token_id in ids], list[int](), 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    told_best = best if request.logprobs else None
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": told_best, "text_offset": offsets}


def chat_body(request: OpenChatRequest, answers: Sequence[Continued], name: str, names: TokenTexts) -> dict[str, Any]:
    """The answer of /v1/chat/completions."""
    choices = []
    for index, one in enumerate(answers):
        content = [{"token": names(token), "logprob": logprob, "top_logprobs": []} for token, logprob in one.tokens]
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": one.text},
                "finish_reason": one.finish_reason,
                "logprobs": {"content": content} if request.logprobs else None,
            }
        )
    return {**_head(name, "chat.completion", request.model), "choices": choices, "usage": _usage(answers, request.n)}


def _head(name: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model or "policy"}


def _usage(answers: Sequence[Continued], samples: int) -> dict[str, int]:
    prompt, sampled = sum(len(one.prompt) for one in answers[::samples]), sum(len(one.tokens) for one in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
