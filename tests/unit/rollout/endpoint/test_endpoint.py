"""The openai client and plain HTTP at the endpoint, whose turns take what it says; who gets in, and what is refused."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from rl_megatron.agents.conversation.templates import PlainText, decode_text
from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.agents.endpoint.server import Endpoint, OpenConversation
from rl_megatron.agents.episode import Episode, EpisodeSettings, TrajectoryKey
from rl_megatron.agents.parsers import PARSERS
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.errors import EngineError
from rl_megatron.types import Completion, GenerationRequest, Prompt, SamplingParams, Span, Trajectory
from tests.unit.rollout.conversation.families import FAMILIES, TOOLS, tokenizer_of


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    one = Serving()
    yield one
    one.do(one.endpoint.stop())
    one.loop.call_soon_threadsafe(one.loop.stop)


def test_calls_at_once_and_their_results_are_one_row_of_the_sampled_tokens(serving: Serving) -> None:
    engine = Saying(CALLS, "The sum is 23.")
    turns = serving.turns(engine)
    client = client_of(serving.open(turns))
    asked = {"model": "policy", "messages": [*ASK], "tools": TOOLS}
    first = client.chat.completions.create(**asked, max_tokens=180)
    message = first.choices[0].message
    assert [call.function.arguments for call in message.tool_calls or ()] == ['{"a": 1}', '{"a": 22}']
    assert (first.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert message.reasoning_content == "Add."  # type: ignore[attr-defined]
    asked["messages"].append(message)
    for call in message.tool_calls or ():
        asked["messages"].append({"role": "tool", "tool_call_id": call.id, "content": "23"})
    second = client.chat.completions.create(**asked, max_completion_tokens=100)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("The sum is 23.", "stop")
    (row,) = turns.chains()
    sampled = [[*TOKENIZER(text)["input_ids"], STOP] for text in engine.texts]
    assert trained(turns) == sampled
    assert tuple(row.token_ids[: row.turns[1].start].tolist()) == engine.asked[1].token_ids
    assert [one.params.max_new_tokens for one in engine.asked] == [180, 100]
    assert second.usage.prompt_tokens == len(engine.asked[1].token_ids)
    assert second.usage.completion_tokens == len(sampled[1])


def test_streams_have_the_whole_message_and_its_usage(serving: Serving) -> None:
    turns = serving.turns(Saying(CALLS))
    client = client_of(serving.open(turns))
    with client.chat.completions.stream(
        model="policy", messages=ASK, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or ()
    assert [call.function.arguments for call in calls] == ['{"a": 1}', '{"a": 22}']
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens == len(trained(turns)[0])


async def test_the_async_client_leads_many_conversations_at_once_that_never_mix(serving: Serving) -> None:
    many = [serving.turns(Saying(f"I am {place}.", f"Still {place}."), f"c{place}") for place in range(8)]
    served = [serving.open(turns) for turns in many]

    async def lead(one: tuple[str, str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=one[0], api_key=one[1]) as client:
            messages: list[Any] = [*ASK]
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
            return [messages[1].content, messages[3].content]

    said = await asyncio.gather(*map(lead, served))
    assert said == [[f"I am {place}.", f"Still {place}."] for place in range(8)]
    for place, turns in enumerate(many):
        assert [decode_text(TOKENIZER, np.array(ids)) for ids in trained(turns)] == said[place]


@pytest.fixture
def dropping(serving: Serving) -> Iterator[Callable[[str], str]]:
    """Stands before a server, and drops its first answer."""
    dropped = list[bytes]()

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            to = http.client.HTTPConnection(*target)
            to.request("POST", self.path, body, dict(self.headers))
            answer = to.getresponse()
            text = answer.read()
            to.close()
            if not dropped:
                dropped.append(text)
                self.close_connection = True
                return
            assert json.loads(text) == json.loads(dropped[0]) | {"created": json.loads(text)["created"]}
            self.send_response(answer.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    target: tuple[str, int] = ("", 0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def before(base_url: str) -> str:
        nonlocal target
        parts = urlsplit(base_url)
        target = (str(parts.hostname), parts.port or 0)
        return f"http://127.0.0.1:{server.server_port}{parts.path}"

    yield before
    server.shutdown()
    server.server_close()


def test_a_dropped_answer_asked_for_again_is_the_same_turn(serving: Serving, dropping: Callable[[str], str]) -> None:
    engine = Saying("first", "second")
    turns = serving.turns(engine)
    base_url, key = serving.open(turns)
    answer = client_of((dropping(base_url), key)).chat.completions.create(model="policy", messages=ASK)
    assert answer.choices[0].message.content == "first"
    assert (len(engine.asked), len(trained(turns))) == (1, 1)
    assert serving.endpoint.requests(key).retried == 1
    again = client_of((base_url, key)).chat.completions.create(model="policy", messages=ASK)
    assert again.choices[0].message.content == "second"  # another request, though equal: its count of retries is 0
    assert len(turns.chains()) == 2


def test_equal_requests_at_once_are_turns_of_their_own(serving: Serving) -> None:
    engine, turns, served = serving.start("one", "two", "three")
    requests = serving.endpoint.requests(served[1])
    engine.go.clear()
    said = said_at_once(engine, served, lambda: len(turns._turn._waiters or ()) + requests.retried >= 2)
    assert said == {"one", "two", "three"}
    assert len(trained(turns)) == 3


def test_equal_requests_get_the_turns_whose_clients_went_away_each_one(serving: Serving) -> None:
    engine, turns, served = serving.start("one", "two", "three")
    line = serving.line(served)
    engine.go.clear()
    leave(served, line, 2)
    said = said_at_once(engine, served, lambda: len(line.sampling) == 3 and line.requests.retried == 2)
    assert said == {"one", "two", "three"}
    assert len(engine.asked) == len(trained(turns)) == 3


@pytest.mark.parametrize("sampled", [False, True])
def test_clients_that_time_out_on_equal_requests_get_turns_of_their_own(serving: Serving, sampled: bool) -> None:
    engine, turns, served = serving.start("fail", "one", "two", "three")
    line = serving.line(served)
    engine.go.clear()
    leave(served, line, 1, x_stainless_retry_count="0")
    engine.go.set()
    until(lambda: not line.left)  # it failed, and is nobody's answer
    engine.go.clear()
    leave(served, line, 3, x_stainless_retry_count="0")
    if sampled:
        engine.go.set()
        until(lambda: line.requests.answered == 3)
    else:
        leave(served, line, 3, x_stainless_retry_count="1")
    retried = 3 if sampled else 6
    said = said_at_once(engine, served, lambda: line.requests.retried == retried, x_stainless_retry_count="2")
    assert said == {"one", "two", "three"}
    assert len(engine.asked) == 1 + len(trained(turns)) == 4
    last = post(served, BODY, x_stainless_retry_count="3")[1]  # no client has gone
    assert last["choices"][0]["message"]["content"] == "three"


def said_at_once(engine: Saying, served: tuple[str, str], ready: Callable[[], bool], **headers: str) -> set[str]:
    """What three equal requests are answered, of an engine that goes on once it is ``ready``."""
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(post, served, BODY, **headers) for _ in range(3)]
        until(ready)
        engine.go.set()
        return {one.result()[1]["choices"][0]["message"]["content"] for one in asking}


def leave(served: tuple[str, str], line: OpenConversation, clients: int, **headers: str) -> None:
    """Ask, all at once, and go away before the answer."""
    parts = urlsplit(served[0])
    gone = [http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30) for _ in range(clients)]
    sent = {"Authorization": f"Bearer {served[1]}", **{key.replace("_", "-"): value for key, value in headers.items()}}
    for one in gone:
        one.request("POST", "/v1/chat/completions", BODY, sent)
    until(lambda: len(line.sampling) == clients and not line.left)
    for one in gone:
        one.close()
    until(lambda: sum(map(len, line.left.values())) == clients)


def until(so: Callable[[], bool]) -> None:
    late = time.monotonic() + 20
    while not so():
        assert time.monotonic() < late
        time.sleep(0.001)


def test_a_conversation_that_ends_gives_up_all_equal_requests_at_once(serving: Serving) -> None:
    """As of the best of n: each is a turn of its own, and all but the first wait for the turn before theirs."""
    engine, turns, served = serving.start("one", "two", "three")
    engine.go.clear()
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(post, served, BODY, x_stainless_retry_count="0") for _ in range(3)]
        until(lambda: engine.asked and len(turns._turn._waiters or ()) >= 2)
        serving.close(served[1])
        engine.go.set()
        assert [one.result()[0] for one in asking] == [410] * 3
    assert len(engine.asked) == 1


def test_an_engine_that_fails_is_said_and_not_tried_again(serving: Serving) -> None:
    engine = Saying("fail", "well")
    client = client_of(serving.open(serving.turns(engine)))
    with pytest.raises(openai.InternalServerError, match="no server is left"):
        client.chat.completions.create(model="policy", messages=ASK)
    assert len(engine.asked) == 1
    assert client.chat.completions.create(model="policy", messages=ASK).choices[0].message.content == "well"


async def test_turns_are_in_the_order_of_sampling_whatever_rows_they_are_in() -> None:
    turns = episode(Saying("begun", "helped", "read", "answered"))
    begun = await turns.complete([5, 6], None)
    await turns.complete([7], None)
    await turns.reply(ASK, ())
    await turns.complete([5, 6, *begun.token_ids.tolist(), 8], None)
    one = Trajectory(chains=turns.chains((0.0, 0.1, None)), reward=1.0)
    assert [[turn.text for turn in row.turns] for row in one.chains] == [["read"], ["begun", "answered"], ["helped"]]
    assert [turn.text for turn in one.turns] == ["begun", "helped", "read", "answered"]
    assert [turn.reward for turn in one.turns] == [0.0, 0.1, None, None]


def test_tokens_in_are_rows_by_prefix(serving: Serving) -> None:
    engine, turns, served = serving.start("abc", "de", "f")

    def ask(token_ids: list[int], **params: Any) -> list[int]:
        given = {"temperature": 1.0, "logprobs": 1, "skip_special_tokens": False, **params}
        body = json.dumps({"model": "policy", "token_ids": token_ids, "sampling_params": given}).encode()
        status, answer = post(served, body, "/inference/v1/generate")
        assert status == 200, answer
        (choice,) = answer["choices"]
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{one}" for one in choice["token_ids"]]
        np.testing.assert_allclose([one["logprob"] for one in content], np.linspace(-2, -1, len(content)), atol=1e-6)
        return choice["token_ids"]

    first = ask([5, 6, 7], stop_token_ids=[STOP])
    second, third = ask([5, 6, 7, *first, 8, 9], max_tokens=50), ask([5, 6])
    rows = turns.chains()
    assert [row.token_ids.tolist() for row in rows] == [[5, 6, 7, *first, 8, 9, *second], [5, 6, *third]]
    assert [[(turn.start, turn.stop) for turn in row.turns] for row in rows] == [
        [(3, 3 + len(first)), (5 + len(first), len(rows[0].token_ids))],
        [(2, 2 + len(third))],
    ]
    bad = json.dumps({"token_ids": [1], "sampling_params": {"stop_token_ids": [3]}}).encode()
    assert post(served, bad, "/inference/v1/generate")[0] == 400
    for foreign in ([5, len(TOKENIZER)], []):  # which an engine would fail on
        asked = len(engine.asked)
        status, answer = post(served, json.dumps({"token_ids": foreign}).encode(), "/inference/v1/generate")
        assert (status, len(engine.asked), turns.failed) == (400, asked, None)
        assert f"ids in [0, {len(TOKENIZER)}) are needed, got {foreign}" in answer["error"]["message"]
    assert asdict(serving.endpoint.requests(served[1])) == {"answered": 3, "retried": 0, "refused": 3}


def test_what_is_trained_on_is_what_the_tiny_model_sampled(
    serving: Serving, make_engine: Callable[[int], LocalEngine], theirs: Qwen3MoeForCausalLM
) -> None:
    """Its log-probs are transformers' of the whole row, with what the client said between turns."""
    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({chr(97 + i): i for i in range(41)}, "a")))
    letters.backend_tokenizer.pre_tokenizer = Split("", "isolated")
    letters.backend_tokenizer.decoder = Fuse()
    local = make_engine(4)

    class InProcess:
        async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
            return local.generate([request])[0]

    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=10, stop_token_ids=(), seed=1)
    turns = serving.turns(InProcess(), template=PlainText(letters), parser=None, params=params)
    client = client_of(serving.open(turns))
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    for said in ("abc", "de", "f"):
        cut = client.chat.completions.create(model="policy", messages=messages, max_tokens=9).choices[0]
        assert cut.finish_reason == "length"  # at the client's own limit, so that others may follow
        messages += [cut.message, {"role": "user", "content": said}]
    (row,) = turns.chains()
    assert [turn.stop - turn.start for turn in row.turns] == [9, 9, 9]
    with torch.no_grad():
        scores = theirs(torch.tensor(row.token_ids[None].astype(np.int64))).logits[0].double().log_softmax(-1)
    for turn in row.turns:
        places = range(turn.start, turn.stop)
        expected = [float(scores[at - 1, row.token_ids[at]]) for at in places]
        np.testing.assert_allclose(turn.logprobs, expected, atol=1e-4)


# An endpoint in a thread of its own, over an engine that says given texts.
CALLS = (
    '<think>\nAdd.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 22}}\n</tool_call>'
)
ASK = [{"role": "user", "content": "1 + 22?"}]
BODY = json.dumps({"messages": ASK}).encode()
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
        ids, most = [*TOKENIZER(text)["input_ids"], STOP], request.params.max_new_tokens
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
    setting = EpisodeSettings(
        engine=engine,
        section=EnvironmentSection(max_turns=99, max_tokens=3000, min_turn_tokens=1),
        params=SamplingParams(**params),
        template=ChatTemplate(TOKENIZER, options=FAMILIES["qwen3"].options),
        parser=PARSERS["hermes"],
        max_prompt_tokens=1000,
        vocab_size=len(TOKENIZER),
    )
    task = Prompt(id=name, text="", token_ids=(1,), answer="")
    return Episode(replace(setting, **changes), TrajectoryKey(task=task, name="step 1", number=0, seed=7))


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

    def start(self, *texts: str) -> tuple[Saying, Episode, tuple[str, str]]:
        """An engine that says the texts, a conversation over it, and its address and key."""
        turns = self.turns(engine := Saying(*texts))
        return engine, turns, self.open(turns)

    def line(self, served: tuple[str, str]) -> OpenConversation:
        return self.endpoint._keys.line({b"authorization": f"Bearer {served[1]}".encode()})

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
