"""Measure what the HTTP endpoint of agents adds to a turn, and to sampling.

    python -m bench.endpoint [--turns 500] [--conversations 64] [--json FILE]

*Own time*: a client in a process of its own sends turns over one connection to an engine that answers at once. A
history has 8,000 tokens of Qwen3's template, and each turn adds a user's message. A conversation's first turn, which
encodes all of its history, does not count, but for the mean CPU time of the serving process. *Share*: conversations in
one process of their own, beside the same turns asked of the engine directly, which sleeps 10 ms for each token: sampled
tokens a second of both, each from before its first request to its last answer. All begin at once, so that they wait for
their process at each turn: a client that only writes and reads HTTP and JSON shows what the endpoint takes. The openai
client takes more CPU than the endpoint does; it also asks a server that sleeps as long and sends bytes that were ready
before, which is the most that any endpoint could give it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import http.client
import json
import multiprocessing
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import openai
from typing_extensions import override

from bench.results import parse, write
from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.agents.endpoint.server import Endpoint
from rl_megatron.agents.endpoint.shapes import chat_answer
from rl_megatron.agents.episode import Episode, EpisodeSettings, TrajectoryKey
from rl_megatron.agents.parsers import PARSERS
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.types import Completion, GenerationRequest, Prompt, SamplingParams, Span
from tests.unit.rollout.conversation.families import FAMILIES, tokenizer_of

HISTORY, PER_CONVERSATION = 8000, 51  # tokens before the turns that count; turns of one, the first left out
PROMPT, TOKENS, TOKEN_SECONDS, TURNS = 500, 128, 0.01, 6  # of the share: read first, sampled a turn, each takes, turns
LIMIT = 120.0  # seconds of a turn of the share
P50, P99, SHARE = 2.0, 10.0, 0.95  # bars: milliseconds, milliseconds, of the engine's tokens a second
Client = Callable[[Connection, Sequence[tuple[str, str]]], None]


class Timed:
    """An engine that answers ``tokens`` tokens a turn, and sleeps ``seconds`` for each."""

    def __init__(self, tokens: int, seconds: float) -> None:
        tokenizer = tokenizer_of("qwen3")
        self.stop: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        text = tokenizer("It is as I said before, and there is more to say. " * 40)["input_ids"]
        self._ids, self._seconds = np.array([*text[: tokens - 1], self.stop], np.int32), seconds
        self._logprobs = np.full(len(self._ids), -1.0, np.float32)

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """The same tokens for all."""
        if self._seconds:
            await asyncio.sleep(self._seconds * len(self._ids))
        spans = (Span(0, 1),)
        return [Completion(token_ids=self._ids, logprobs=self._logprobs, finish_reason="stop", spans=spans)]


def episode(engine: Timed, number: int) -> Episode:
    """A conversation of Qwen3's template with the parser of its calls."""
    setting = EpisodeSettings(
        engine=engine,  # type: ignore[arg-type]  # it is asked to generate alone
        section=EnvironmentSection(max_turns=1000, max_tokens=100_000),
        params=SamplingParams(
            temperature=1.0, top_p=1.0, max_new_tokens=1024, stop_token_ids=(engine.stop,), seed=number
        ),
        template=ChatTemplate(tokenizer_of("qwen3"), options=FAMILIES["qwen3"].options),
        parser=PARSERS["hermes"],
        max_prompt_tokens=100_000,
        vocab_size=len(tokenizer_of("qwen3")),
    )
    task = Prompt(id=str(number), text="", token_ids=(1,), answer="")
    return Episode(setting, TrajectoryKey(task=task, name="bench", number=number, seed=number))


@functools.cache
def said(tokens: int) -> str:
    """A text of so many tokens."""
    ids = tokenizer_of("qwen3")("The quick brown fox adds 12 and 30; " * tokens)["input_ids"]
    return str(tokenizer_of("qwen3").decode(ids[:tokens]))


def ask_in_turns(pipe: Connection, served: Sequence[tuple[str, str]]) -> None:
    """A client's process: seconds of each turn that counts."""
    seconds = []
    for base_url, key in served:
        parts, messages = urlsplit(base_url), [{"role": "user", "content": said(HISTORY)}]
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
        connection.connect()
        headers = {"Authorization": f"Bearer {key}"}
        for turn in range(PER_CONVERSATION):
            body = json.dumps({"model": "policy", "messages": messages})
            start = time.perf_counter()
            connection.request("POST", f"{parts.path}/chat/completions", body, headers)
            answer = connection.getresponse().read()
            if turn:
                seconds.append(time.perf_counter() - start)
            message = json.loads(answer)["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "And then?"}]
        connection.close()
    pipe.send(seconds)


def ask_at_once(pipe: Connection, served: Sequence[tuple[str, str]]) -> None:
    """A process of conversations of the openai client."""

    async def all_of() -> None:
        async with openai.AsyncOpenAI(base_url=served[0][0], api_key="none", timeout=LIMIT) as shared:
            await begin_together(pipe, [lead(shared.with_options(api_key=key)) for _, key in served])

    asyncio.run(all_of())


def ask_plainly(pipe: Connection, served: Sequence[tuple[str, str]]) -> None:
    """A process of conversations over bare connections."""
    asyncio.run(begin_together(pipe, [lead_plainly(*one) for one in served]))


async def begin_together(pipe: Connection, conversations: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Begin all once the pipe says so, and send their CPU seconds into it."""
    said(PROMPT)
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    used = time.process_time()
    await asyncio.gather(*conversations)
    pipe.send(time.process_time() - used)


def body_bytes(head: bytes) -> int:
    """The length of the body behind an HTTP head."""
    return int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])


async def lead_plainly(base_url: str, key: str) -> None:
    """One conversation of the share."""
    parts, messages = urlsplit(base_url), [{"role": "user", "content": said(PROMPT)}]
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\n"
    for _ in range(TURNS):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(LIMIT):
            answer = await reader.readexactly(body_bytes(await reader.readuntil(b"\r\n\r\n")))
        messages += [json.loads(answer)["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    writer.close()


async def lead(client: openai.AsyncOpenAI) -> None:
    """One conversation of the share."""
    messages: list[Any] = [{"role": "user", "content": said(PROMPT)}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "And then?"}]


async def own_times(turns: int) -> tuple[list[float], float]:
    """Seconds of turns whose engine takes none, and the mean CPU seconds of a turn in this process."""
    endpoint, engine = Endpoint(), Timed(20, 0.0)
    served = [endpoint.open(episode(engine, one)) for one in range(-(-turns // (PER_CONVERSATION - 1)))]
    pipe, process = started(ask_in_turns, served)
    used = time.process_time()
    seconds: list[float] = await asyncio.to_thread(pipe.recv)
    used = (time.process_time() - used) / (len(served) * PER_CONVERSATION)
    process.join()
    await endpoint.stop()
    return seconds, used


class Ready(asyncio.Protocol):
    """A server's connection that answers each request by the same bytes, as late as a turn's tokens take."""

    def __init__(self, answer: bytes) -> None:
        self._answer, self._request = answer, b""
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        self._request += data
        head, end, body = self._request.partition(b"\r\n\r\n")
        if end and len(body) == body_bytes(head):
            assert self._transport is not None
            self._request = b""
            asyncio.get_running_loop().call_later(TOKENS * TOKEN_SECONDS, self._transport.write, self._answer)


async def ready_answer() -> bytes:
    """What the endpoint answers to a turn of the share."""
    turn = await episode(Timed(TOKENS, 0.0), 0).answer([{"role": "user", "content": said(PROMPT)}], (), None)
    body = msgspec.json.encode(chat_answer(turn, "turn-1", "policy"))
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def led_through(client: Client, served: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Tokens a second of a client's conversations, and the CPU milliseconds of a turn here and in it."""
    turns = len(served) * TURNS
    pipe, process = started(client, served)
    await asyncio.to_thread(pipe.recv)
    start, used = time.perf_counter(), time.process_time()
    pipe.send("begin")
    theirs: float = await asyncio.to_thread(pipe.recv)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    process.join()
    return {"tokens": turns * TOKENS / seconds, "ms": used / turns * 1000, "client_ms": theirs / turns * 1000}


async def shares(conversations: int) -> dict[str, dict[str, float]]:
    """What `led_through` says of both clients at the endpoint and of openai's at `Ready`; ``share`` is of the tokens a
    second of the engine asked directly."""
    engine = Timed(TOKENS, TOKEN_SECONDS)
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=1024, stop_token_ids=(engine.stop,), seed=1)
    asked = GenerationRequest(id="0", token_ids=(1,) * PROMPT, num_completions=1, params=params, prefix_group="0")

    async def directly() -> None:
        for _ in range(TURNS):
            await engine.generate(asked)

    start = time.perf_counter()
    await asyncio.gather(*(directly() for _ in range(conversations)))
    direct = conversations * TURNS * TOKENS / (time.perf_counter() - start)
    found, endpoint = dict[str, dict[str, float]](), Endpoint()
    clients: dict[str, Client] = {"plain": ask_plainly, "openai": ask_at_once}
    for name, client in clients.items():
        served = [endpoint.open(episode(engine, one)) for one in range(conversations)]
        found[name] = await led_through(client, served)
    await endpoint.stop()
    answer = await ready_answer()
    async with await asyncio.get_running_loop().create_server(
        lambda: Ready(answer), "127.0.0.1", 0, backlog=1024
    ) as ready:
        port = ready.sockets[0].getsockname()[1]
        found["ready"] = await led_through(ask_at_once, [(f"http://127.0.0.1:{port}/v1", "none")] * conversations)
    return {name: {**one, "share": one["tokens"] / direct} for name, one in found.items()}


def started(target: Client, served: Sequence[tuple[str, str]]) -> tuple[Connection, Any]:
    """A process of its own, and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, served))
    process.start()
    theirs.close()
    return ours, process


def main() -> None:
    """Measure both and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--conversations", type=int, default=64)
    args = parse(parser)
    seconds, used = asyncio.run(own_times(args.turns))
    milliseconds = np.array(seconds) * 1000
    p50, p99 = (float(np.quantile(milliseconds, at)) for at in (0.5, 0.99))
    print(
        f"own time of {len(milliseconds)} turns: p50 {p50:.2f} ms (bar {P50:g}), p99 {p99:.2f} ms (bar {P99:g}), "
        f"mean CPU {used * 1000:.2f} ms"
    )
    found = asyncio.run(shares(args.conversations))
    plain, theirs, most = (found[name] for name in ("plain", "openai", "ready"))
    print(
        f"{args.conversations} conversations over HTTP: {plain['share']:.3f} of the engine's tokens a second "
        f"(bar {SHARE:g}); CPU a turn: {plain['ms']:.2f} ms of the endpoint's process, {plain['client_ms']:.2f} of the "
        "client's\n"
        f"of the openai client: {theirs['share']:.3f}, and {most['share']:.3f} at a server with ready answers; "
        f"CPU a turn: {theirs['ms']:.2f} and {theirs['client_ms']:.2f} ms"
    )
    row = {"p50_ms": p50, "p99_ms": p99, "cpu_ms": used * 1000}
    write(args, [row | {f"{name}_{key}": value for name, one in found.items() for key, value in one.items()}])


if __name__ == "__main__":
    main()
