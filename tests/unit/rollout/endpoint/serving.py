"""An endpoint in a thread of its own, over an engine that says given texts."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai

from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.agents.endpoint.server import Endpoint
from rl_megatron.agents.episode import Episode, PlaySetting, TrajectoryPlace
from rl_megatron.agents.parsers import PARSERS
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.errors import EngineError
from rl_megatron.types import Completion, GenerationRequest, Prompt, SamplingParams, Span
from tests.unit.rollout.conversation.families import FAMILIES, tokenizer_of

CALLS = (
    '<think>\nAdd.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 22}}\n</tool_call>'
)
ASK = [{"role": "user", "content": "1 + 22?"}]
TOKENIZER = tokenizer_of("qwen3")
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


class Saying:
    """An engine that says texts in turn, and waits for ``go`` before each answer."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.asked = list(texts), list[GenerationRequest]()
        self.go = threading.Event()
        self.go.set()

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.asked.append(request)
        text = self.texts[(len(self.asked) - 1) % len(self.texts)]
        while not self.go.is_set():
            await asyncio.sleep(0)
        if text == "fail":
            raise EngineError("no server is left")
        ids = [*TOKENIZER(text)["input_ids"], STOP]
        most = request.params.max_new_tokens
        return [
            Completion(
                token_ids=np.array(ids[:most], np.int32),
                logprobs=np.linspace(-2, -1, len(ids[:most]), dtype=np.float32),
                finish_reason="stop" if len(ids) <= most else "length",
                spans=(Span(0, 5),),
            )
        ]


def episode(engine: Any, name: str = "one", **changes: Any) -> Episode:
    """One of Qwen3's template and Hermes's calls, whose prompts have 1,000 tokens at most, and rows 3,000 more."""
    params = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 200, "stop_token_ids": (STOP,), "seed": 7}
    setting = PlaySetting(
        engine=engine,
        section=EnvironmentSection(max_turns=99, max_tokens=3000, min_turn_tokens=1),
        params=SamplingParams(**params),
        template=ChatTemplate(TOKENIZER, options=FAMILIES["qwen3"].options),
        parser=PARSERS["hermes"],
        max_prompt_tokens=1000,
        vocab_size=len(TOKENIZER),
    )
    task = Prompt(id=name, text="", token_ids=(1,), answer="")
    return Episode(replace(setting, **changes), TrajectoryPlace(task=task, name="step 1", number=0, seed=7))


class Serving:
    """An endpoint in the event loop of a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.endpoint = Endpoint()

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def turns(self, engine: Any, name: str = "one", **changes: Any) -> Episode:
        async def made() -> Episode:
            return episode(engine, name, **changes)

        return self.do(made())

    def open(self, turns: Episode) -> tuple[str, str]:
        async def opened() -> tuple[str, str]:
            return self.endpoint.open(turns)

        return self.do(opened())

    def close(self, key: str) -> None:
        async def closed() -> None:
            self.endpoint.close(key)

        self.do(closed())


def client_of(served: tuple[str, str], **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=served[0], api_key=served[1], **options)


def trained(turns: Episode) -> list[list[int]]:
    return [row.token_ids[turn.start : turn.stop].tolist() for row in turns.chains() for turn in row.turns]


def post(
    served: tuple[str, str],
    body: bytes | None,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    **headers: str,
) -> tuple[int, Any]:
    parts = urlsplit(served[0])
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    sent = {"Authorization": f"Bearer {served[1]}", **{key.replace("_", "-"): value for key, value in headers.items()}}
    connection.request(method, path, body, {key: value for key, value in sent.items() if value})
    answer = connection.getresponse()
    try:
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
