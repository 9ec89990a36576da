"""A model served to evaluation tools, as an ASGI application: each request says how to sample."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rl_megatron.chat_templates import prompt_tokens
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.rollout.conversation.messages import MessagesRefused, tidied
from rl_megatron.rollout.conversation.rendering import ChatRenderer
from rl_megatron.rollout.conversation.templates import tokens_of_text
from rl_megatron.rollout.endpoint.bodies import ReceivePart, SendPart, method_of, read_body, read_request, respond
from rl_megatron.rollout.endpoint.open_shapes import (
    CompletionRequest,
    Continued,
    OpenChatRequest,
    OpenRequest,
    ScoredToken,
    TokenTexts,
    chat_body,
    completion_body,
)
from rl_megatron.rollout.endpoint.served import RequestRefused
from rl_megatron.rollout.endpoint.shapes import models, refused_body
from rl_megatron.seeds import text_seed
from rl_megatron.types import Completion, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 1024  # requests
_DEFAULT_TOKENS = 16  # OpenAI's, of /v1/completions
_METHODS = {"/v1/models": "GET", "/health": "GET", "/v1/completions": "POST", "/v1/chat/completions": "POST"}


class Generates(Protocol):
    """Samples completions."""

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """As `RolloutEngine.generate`."""
        ...


class ScoresPrompts(Protocol):
    """Says how likely the tokens of a text are."""

    async def score(self, token_ids: Sequence[int]) -> Sequence[ScoredToken]:
        """Of each token after the first. Raises EngineError."""
        ...


@dataclass(slots=True, kw_only=True)
class OpenApplication:
    """ASGI: one HTTP request a call, from whoever sends ``key``."""

    engine: Generates
    scorer: ScoresPrompts | None  # None: prompts are not echoed with log-probs
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    max_length: int  # most tokens of a prompt and its answer
    key: str
    start: str = field(default_factory=secrets.token_hex)  # in seeds of requests without one, so that no start repeats
    asked: int = 0
    running: int = 0
    renderer: ChatRenderer | None = None  # made for the first chat: a model without a chat template completes texts
    names: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        self.names = TokenTexts(self.tokenizer.decode)

    async def __call__(self, scope: Mapping[str, Any], receive: ReceivePart, send: SendPart) -> None:
        """Answer, or refuse with a status and OpenAI's form of an error."""
        status, body = 200, b""
        try:
            body = await self._answer(scope, receive)
        except RequestRefused as error:
            status, body = error.status, msgspec.json.encode(refused_body(error.status, str(error)))
        except EngineError as error:
            status, body = 502, msgspec.json.encode(refused_body(502, f"the engine failed: {error}"))
        except Exception as error:
            logger.exception("a request of %s", scope["path"])
            said = f"{type(error).__name__}, whose traceback is in the server's log.txt"
            status, body = 500, msgspec.json.encode(refused_body(500, said))
        await respond(send, status, {b"content-type": b"application/json"}, [body])

    async def _answer(self, scope: Mapping[str, Any], receive: ReceivePart) -> bytes:
        headers = dict(scope["headers"])
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self.key.encode()):
            raise RequestRefused(401, "send the server's key as Authorization: Bearer")
        path = method_of(scope, _METHODS)
        if path == "/health":
            return b'{"status":"ok"}'
        if path == "/v1/models":
            return msgspec.json.encode(models(self.max_length))
        if self.running >= MOST_AT_ONCE:
            raise RequestRefused(429, f"{self.running} requests are being answered; ask again later")
        self.running += 1
        try:
            body = await read_body(headers, receive)
            self.asked += 1
            return await (self._complete if path == "/v1/completions" else self._chat)(body, self.asked)
        finally:
            self.running -= 1

    async def _complete(self, body: bytes, name: int) -> bytes:
        request = read_request(body, CompletionRequest)
        request.check()
        most = _DEFAULT_TOKENS if request.most is None else request.most
        prompts = [self._tokens(prompt) for prompt in request.prompts]
        self._check_lengths(prompts, most)
        scored: Sequence[Sequence[ScoredToken]] = [()] * len(prompts)
        if request.echo and request.logprobs is not None:
            if self.scorer is None:
                raise RequestRefused(
                    400, "echo with logprobs: this engine does not score prompts here; serve with rollout=local"
                )
            scored = await asyncio.gather(*map(self.scorer.score, prompts))
        answers = await self._sample(request, prompts, most, name)
        told = [replace(one, scored=scored[at // request.n]) for at, one in enumerate(answers)]
        return msgspec.json.encode(completion_body(request, told, f"cmpl-{name}", self.names))

    async def _chat(self, body: bytes, name: int) -> bytes:
        request = read_request(body, OpenChatRequest)
        request.check()
        try:
            if self.renderer is None:
                self.renderer = ChatRenderer(self.tokenizer)
            ids = tokens_of_text(self.tokenizer, self.renderer.render(tidied(request.messages), ())).tolist()
        except (ConfigError, MessagesRefused) as error:
            raise RequestRefused(400, str(error)) from error
        most = max(0, self.max_length - len(ids)) if request.most is None else request.most
        self._check_lengths([ids], most)
        answers = await self._sample(request, [tuple(ids)], most, name)
        return msgspec.json.encode(chat_body(request, answers, f"chatcmpl-{name}", self.names))

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            if foreign := [token for token in prompt if not 0 <= token < len(self.tokenizer)]:
                raise RequestRefused(400, f"prompt: token {foreign[0]} is not in [0, {len(self.tokenizer)})")
            return tuple(prompt)
        return tuple(prompt_tokens(self.tokenizer, [prompt], begins=True)[0])

    def _check_lengths(self, prompts: Sequence[Sequence[int]], most: int) -> None:
        longest = max(map(len, prompts))
        if longest + most > self.max_length or not all(prompts):
            raise RequestRefused(
                400, f"a prompt of {longest} tokens and {most} more are over the model's {self.max_length}"
            )

    async def _sample(
        self, request: OpenRequest, prompts: Sequence[tuple[int, ...]], most: int, name: int
    ) -> list[Continued]:
        if most == 0:
            groups: list[Sequence[Completion | None]] = [[None] * request.n for _ in prompts]
        else:
            asked = [self._request(request, prompt, most, f"{name} {number}") for number, prompt in enumerate(prompts)]
            groups = [*await asyncio.gather(*map(self.engine.generate, asked))]
        return [
            self._continued(request, prompt, one)
            for prompt, group in zip(prompts, groups, strict=True)
            for one in group
        ]

    def _request(self, request: OpenRequest, prompt: tuple[int, ...], most: int, place: str) -> GenerationRequest:
        """``place``: the request's number, and the prompt's in it."""
        own = f"{self.start} {place}"
        seed = text_seed(own if request.seed is None else f"{request.seed} {place.partition(' ')[2]}")
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(0, request.top_k),
            min_p=request.min_p,
            max_new_tokens=most,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
        )
        return GenerationRequest(
            id=f"request {place}",
            token_ids=prompt,
            num_completions=request.n,
            params=params,
            exact_logprobs=False,
        )

    def _continued(self, request: OpenRequest, prompt: tuple[int, ...], one: Completion | None) -> Continued:
        ids = [] if one is None else one.token_ids.tolist()
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = str(self.tokenizer.decode(ids))
        cuts = [at for stop in request.stops if (at := text.find(stop)) >= 0]
        return Continued(
            prompt=prompt,
            prompt_text=str(self.tokenizer.decode(list(prompt))),
            completion=one,
            text=text[: min(cuts, default=len(text))],
            stopped=bool(cuts),
        )
