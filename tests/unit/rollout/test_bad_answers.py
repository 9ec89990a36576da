"""Answers of engines that are unfit for training: after retries, the error names the server and the prompt."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rl_megatron.errors import EngineError
from rl_megatron.models.named import NAMED
from rl_megatron.rollout.servers.answers import problem_of
from rl_megatron.rollout.servers.attempts import Attempts
from rl_megatron.rollout.servers.http import AttemptFailed, Server
from rl_megatron.rollout.servers.replicas import ReplicaSet
from rl_megatron.rollout.servers.sglang.adapter import SGLangAdapter
from rl_megatron.rollout.servers.vllm.adapter import VLLMAdapter
from rl_megatron.types import Completion, GenerationRequest, SamplingParams
from tests.completions import completion, plain

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=3, stop_token_ids=(), seed=0)
REQUEST = GenerationRequest(id="step 1: train:7", token_ids=(1, 2), num_completions=1, params=PARAMS)
SHAPE = replace(NAMED["qwen3-30b-a3b"], vocab_size=10)
ADAPTERS = {"vllm": VLLMAdapter(SHAPE), "sglang": SGLangAdapter(SHAPE)}


def good(engine: str) -> Any:
    label = ADAPTERS[engine].labels.verified(4)
    if engine == "sglang":
        meta = {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]], "weight_version": label}
        return [{"meta_info": {**meta, "finish_reason": {"type": "stop"}}}]
    choice = {"index": 0, "token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}}
    return {"choices": [{**choice, "weight_versions": [{"version": label, "start": 0}], "finish_reason": "stop"}]}


def tokens(answer: Any, engine: str) -> Any:
    """Where token ids or log-probs stand: setters of the second token's."""
    if engine == "sglang":
        pair = answer[0]["meta_info"]["output_token_logprobs"][1]
        return lambda value: pair.__setitem__(1, value), lambda value: pair.__setitem__(0, value)
    choice = answer["choices"][0]
    return (
        lambda value: choice["token_ids"].__setitem__(1, value),
        lambda value: choice["logprobs"]["content"][1].__setitem__("logprob", value),
    )


def ask(engine: str, answer: object) -> list[Completion]:
    """What the adapter's engine gives where its one server answers this."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        text = json.dumps(answer).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        writer.close()

    async def run() -> list[Completion]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            server = Server(url, token=None, timeout_seconds=30.0)
            replicas = ReplicaSet(engine, [server])
            attempts = Attempts(ADAPTERS[engine], replicas, vocab_size=10)
            try:
                return await attempts.sampled(REQUEST, replicas.all[0])
            finally:
                await server.close()

    return asyncio.run(run())


@pytest.mark.parametrize("engine", ADAPTERS)
def test_a_good_answer_is_taken(engine: str) -> None:
    (taken,) = ask(engine, good(engine))
    assert plain(taken) == ([5, 6], [-1.0, -2.0], "stop", ((0, 4),), None)


@pytest.mark.parametrize("engine", ADAPTERS)
@pytest.mark.parametrize(
    ("which", "value", "said"),
    [
        (1, math.nan, "token 1 has log-prob nan, which no sampled token can have"),
        (1, -math.inf, "token 1 has log-prob -inf"),
        (1, math.inf, "token 1 has log-prob inf"),
        (1, -9999.0, "token 1 has log-prob -9999.0"),  # how vLLM spells it
        (1, 0.5, "token 1 has log-prob 0.5"),
        (1, None, "Expected `float`, got `null` - at `$"),  # what orjson makes of NaN
        (0, 10, "token 1 has id 10, but the vocabulary has 10"),
        (0, -1, "token 1 has id -1"),
        (0, 2**31, "its answer has another form: token ids must be below 2147483648"),
        (0, "x" * 9999, "its answer has another form: Expected `int`, got `str` - at `$"),
    ],
)
def test_what_is_no_token_or_no_log_prob_names_server_and_prompt(
    engine: str, which: int, value: object, said: str
) -> None:
    answer = good(engine)
    tokens(answer, engine)[which](value)
    with pytest.raises(EngineError) as caught:
        ask(engine, answer)
    assert re.match(r"request 'step 1: train:7': http://127\.0\.0\.1:\d+(/[\w/]+)?: ", str(caught.value))
    assert said in str(caught.value)
    assert str(caught.value).endswith("; attempts made: 4")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("engine", ADAPTERS)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: {},
        lambda answer: [],
        lambda answer: None,
        lambda answer: 3,
        lambda answer: json.loads(json.dumps(answer).replace('"stop"', '"repetition"')),
        lambda answer: json.loads(json.dumps(answer).replace('"finish_reason"', '"finish"')),
    ],
)
def test_an_answer_of_another_form_is_named(engine: str, spoil: Callable[[Any], object]) -> None:
    answer = spoil(good(engine))
    if engine == "sglang" and answer == []:
        answer = [{}]  # none at all is a number that the engine's caller counts
    with pytest.raises(EngineError, match="its answer has another form"):
        ask(engine, answer)


@pytest.mark.parametrize("engine", ADAPTERS)
@pytest.mark.parametrize(
    "routes",
    [
        "!",
        "AAA=",
        "k05VTVBZAQB2AHsnZGVzY3InOiAnPGk4JywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDk5OTk5OTk5OTk5OTk5LCksIH0K",
    ],
)
def test_routes_that_are_no_array_are_named(engine: str, routes: str) -> None:
    answer = good(engine)
    (answer["choices"][0] if engine == "vllm" else answer[0]["meta_info"])["routed_experts"] = routes
    server: Any = type("Once", (), {"salt": None, "priorities": False})()

    async def sampled(path: str, body: object, read: Callable[[bytes], object]) -> object:
        return read(json.dumps(answer).encode())

    server.sampled = sampled
    with pytest.raises(EngineError, match="routes"):
        asyncio.run(ADAPTERS[engine].generate(server, replace(REQUEST, routes=True), "x"))


@pytest.mark.parametrize("engine", ADAPTERS)
def test_scores_that_are_not_of_the_text_are_named(engine: str) -> None:
    said: Any = {"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}
    if engine == "sglang":
        said = {"meta_info": {"input_token_logprobs": [[None, 1, None]]}}
    server: Any = type("Once", (), {"url": "http://h", "salt": None, "priorities": False})()

    async def sampled(path: str, body: object, read: Callable[[bytes], object]) -> object:
        return read(json.dumps(said).encode())

    server.sampled = sampled
    with pytest.raises(AttemptFailed, match="http://h"):
        asyncio.run(ADAPTERS[engine].score(server, [1, 2]))


def test_a_completion_longer_than_asked_for_or_without_its_log_probs_is_none() -> None:
    done = completion((1,) * 3, (-1.0, 0.001, 0.0))
    assert problem_of(done, REQUEST, vocab_size=10) is None
    assert problem_of(completion(()), REQUEST, vocab_size=10) is None
    longer = completion((1,) * 4)
    assert problem_of(longer, REQUEST, vocab_size=10) == "it has 4 tokens, but at most 3 were requested"
    lacking = completion((1,) * 3, (0.0,))
    assert problem_of(lacking, REQUEST, vocab_size=10) == "it has 1 log-probs for 3 tokens"


def test_a_completion_that_was_cut_before_its_limit_is_none() -> None:
    """SGLang ends one at the size of its cache as if it had all tokens that were asked for."""
    told = [problem_of(completion((1,) * n, finish="length"), REQUEST, vocab_size=10) for n in (0, 2, 3)]
    assert [one and one.split(":")[0] for one in told] == [
        "it was cut after 0 tokens, but 3 were requested",
        "it was cut after 2 tokens, but 3 were requested",
        None,
    ]
    for finish in ("stop", "abort"):  # an abort's rest is asked for, or its time was over
        assert problem_of(completion((1,) * 2, finish=finish), REQUEST, vocab_size=10) is None


@pytest.mark.parametrize(
    ("starts", "taken"),
    [([0], True), ([0, 2], True), ([], False), ([1], False), ([0, 0], False), ([0, 2, 1], False), ([0, 3], False)],
)
def test_versions_begin_at_tokens_that_ascend(starts: list[int], taken: bool) -> None:
    done = completion((1,) * 3, spans=[(start, number) for number, start in enumerate(starts)])
    problem = problem_of(done, REQUEST, vocab_size=10)
    assert problem == (None if taken else f"its weight versions begin at tokens {starts} of 3; they must ascend from 0")


@pytest.mark.parametrize("engine", ADAPTERS)
def test_weights_that_were_vouched_for_meanwhile_are_one_version(engine: str) -> None:
    answer, labels = good(engine), ADAPTERS[engine].labels
    spans = [{"version": labels.candidate(4), "start": 0}, {"version": labels.verified(4), "start": 1}]
    (answer["choices"][0] if engine == "vllm" else answer[0]["meta_info"])["weight_versions"] = spans
    (taken,) = ask(engine, answer)
    assert taken.spans == ((0, 4),)


@pytest.mark.parametrize("engine", ADAPTERS)
def test_a_completion_that_was_aborted_before_its_first_token_is_taken(engine: str) -> None:
    answer = good(engine)
    if engine == "vllm":  # which labels tokens alone
        nothing = {"token_ids": [], "logprobs": {"content": []}, "weight_versions": None, "finish_reason": "abort"}
        answer["choices"][0] |= nothing
    else:
        answer[0]["meta_info"] |= {"output_token_logprobs": [], "finish_reason": {"type": "abort"}}
    (taken,) = ask(engine, answer)
    assert (len(taken.token_ids), taken.finish_reason) == (0, "abort")
