"""Answers of engines: unfit ones, those in parts, and how they are decoded."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import math
import pickle
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.answers import drawn, loaded_sglang, loaded_vllm, of_sglang, of_vllm
from launcher.servers.engines import SERVERS
from rl_megatron.engines import answers
from rl_megatron.engines.answers import (
    SampledColumns,
    TopLogprobs,
    completion_problem,
    continuation_request,
    fix_finish_reason,
    join_continuation,
    make_spans,
)
from rl_megatron.engines.http import AttemptFailed, Server
from rl_megatron.engines.replicas import ReplicaSet
from rl_megatron.engines.requests import RequestRetrier
from rl_megatron.engines.sglang import adapter as sglang
from rl_megatron.engines.sglang.adapter import SGLangAdapter
from rl_megatron.engines.vllm import adapter as vllm
from rl_megatron.engines.vllm.adapter import _NEEDED, VLLMAdapter
from rl_megatron.errors import CorruptionError, EngineError
from rl_megatron.models.named import NAMED
from rl_megatron.types import Completion, GenerationRequest, SamplingParams
from rl_megatron.weights.checks.compare import ReportReader
from rl_megatron.weights.checks.reports import REPORT_FORM, ChecksumReport, packed_report
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
            attempts = RequestRetrier(ADAPTERS[engine], replicas, vocab_size=10)
            try:
                return await attempts.sample(REQUEST, replicas.all[0])
            finally:
                await server.close()

    return asyncio.run(run())


@pytest.mark.parametrize("engine", ADAPTERS)
def test_a_good_answer_is_taken(engine: str) -> None:
    (taken,) = ask(engine, good(engine))
    assert plain(taken) == ([5, 6], [-1.0, -2.0], "stop", ((0, 4),), {})


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
def test_bad_tokens_and_log_probs_name_server_and_prompt(engine: str, which: int, value: object, said: str) -> None:
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

    server.post_sampling = sampled
    with pytest.raises(EngineError, match="routes"):
        asyncio.run(ADAPTERS[engine].generate(server, replace(REQUEST, columns=("routes",)), "x"))


@pytest.mark.parametrize("engine", ADAPTERS)
def test_scores_that_are_not_of_the_text_are_named(engine: str) -> None:
    said: Any = {"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}
    if engine == "sglang":
        said = {"meta_info": {"input_token_logprobs": [[None, 1, None]]}}
    server: Any = type("Once", (), {"url": "http://h", "salt": None, "priorities": False})()

    async def sampled(path: str, body: object, read: Callable[[bytes], object]) -> object:
        return read(json.dumps(said).encode())

    server.post_sampling = sampled
    with pytest.raises(AttemptFailed, match="http://h"):
        asyncio.run(ADAPTERS[engine].score(server, [1, 2]))


def test_a_completion_longer_than_asked_for_or_without_its_log_probs_is_none() -> None:
    for logprobs in ((-1.0, 0.001, 0.0), (-1000.0, 0.01, 0.0)):
        assert completion_problem(completion((1,) * 3, logprobs), REQUEST, vocab_size=10) is None
    assert completion_problem(completion(()), REQUEST, vocab_size=10) is None
    assert (
        completion_problem(completion((1,) * 4), REQUEST, vocab_size=10)
        == "it has 4 tokens, but at most 3 were requested"
    )
    assert completion_problem(completion((1,) * 3, (0.0,)), REQUEST, vocab_size=10) == "it has 1 log-probs for 3 tokens"


def test_a_completion_that_was_cut_before_its_limit_is_none() -> None:
    """SGLang ends one at the size of its cache as if it had all tokens that were asked for."""
    told = [completion_problem(completion((1,) * n, finish="length"), REQUEST, vocab_size=10) for n in (0, 2, 3)]
    assert [one and one.split(":")[0] for one in told] == [
        "it was cut after 0 tokens, but 3 were requested",
        "it was cut after 2 tokens, but 3 were requested",
        None,
    ]
    for finish in ("stop", "abort"):  # an abort's rest is asked for, or its time was over
        assert completion_problem(completion((1,) * 2, finish=finish), REQUEST, vocab_size=10) is None


@pytest.mark.parametrize(
    ("starts", "taken"),
    [([0], True), ([0, 2], True), ([], False), ([1], False), ([0, 0], False), ([0, 2, 1], False), ([0, 3], False)],
)
def test_versions_begin_at_tokens_that_ascend(starts: list[int], taken: bool) -> None:
    done = completion((1,) * 3, spans=[(start, number) for number, start in enumerate(starts)])
    problem = completion_problem(done, REQUEST, vocab_size=10)
    assert problem == (None if taken else f"its weight versions begin at tokens {starts} of 3; they must ascend from 0")


def test_neighbouring_parts_of_one_version_are_one_span() -> None:
    assert make_spans([(0, 1), (2, 2), (4, 2), (5, 1)]) == ((0, 1), (2, 2), (5, 1))


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


# A completion that updates interrupted: when it is complete, and how its parts are joined.
def test_routes_of_a_completion_in_two_parts_are_those_that_chose_its_tokens() -> None:
    def part(tokens: int, positions: int, expert: int) -> Completion:
        routes = np.full((positions, 1, 2), expert, np.uint8)
        return completion((5,) * tokens, spans=((0, 1),), columns={"routes": routes})

    whole = join_continuation(part(2, 4, 0), part(3, 7, 9))  # a prompt of 3 tokens
    assert whole.columns["routes"].tolist() == [[[0, 0]]] * 4 + [[[9, 9]]] * 3
    assert (
        join_continuation(whole, completion((), finish="abort", spans=((0, 2),))).columns["routes"]
        is whole.columns["routes"]
    )


def test_a_completion_in_parts_keeps_what_each_version_sampled() -> None:
    parts = [
        completion((1, 2), (-1.0, -2.0), spans=((0, 3),)),
        completion((), spans=((0, 4),)),
        completion((3, 4, 5), (-3.0, -4.0, -5.0), spans=((0, 3), (2, 5))),
        completion((6,), (-6.0,), spans=((0, 7),), finish="length"),
    ]
    whole = functools.reduce(join_continuation, parts)
    logprobs = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert plain(whole) == ([1, 2, 3, 4, 5, 6], logprobs, "length", ((0, 3), (4, 5), (5, 7)), {})


@pytest.mark.parametrize("cuts", [(1, 1, 1), (0, 5, 2), (7,), (3, 4)])
def test_a_completion_that_is_continued_keeps_its_budget(cuts: tuple[int, ...]) -> None:
    """Whatever number of servers samples its parts, it has no more tokens than were asked for."""
    asked = replace(REQUEST, params=replace(PARAMS, max_new_tokens=7))
    whole = completion((), spans=((0, 0),), finish="abort")
    for number, tokens in enumerate(cuts):
        rest = continuation_request(asked, whole, place=0)
        assert len(rest.token_ids) - len(asked.token_ids) == len(whole.token_ids)
        assert rest.params.max_new_tokens == 7 - len(whole.token_ids)
        end = "length" if tokens == rest.params.max_new_tokens else "abort"
        whole = join_continuation(whole, completion([5] * tokens, [-1.0] * tokens, spans=((0, number),), finish=end))
    assert completion_problem(whole, asked, vocab_size=9) is None
    more = join_continuation(whole, completion([5] * 8, [-1.0] * 8, spans=((0, 9),), finish="length"))
    assert "at most 7 were requested" in str(completion_problem(more, asked, vocab_size=9))


@pytest.mark.parametrize(("tokens", "finish"), [((3,), "abort"), ((), "abort"), ((9,), "stop"), ((3, 4), "length")])
def test_what_was_ended_at_its_end_has_nothing_left(tokens: tuple[int, ...], finish: str) -> None:
    params = replace(PARAMS, max_new_tokens=2, stop_token_ids=(9,))
    cut = completion(tokens, finish="abort", spans=((0, 1),))
    assert fix_finish_reason(cut, replace(REQUEST, params=params)).finish_reason == finish


# Answers decoded by their type hold what `json.loads` finds in them, and break where it says that they break.
Columns = Callable[[bytes], tuple[Any, Any]]
READ: dict[str, Callable[[bytes], list[SampledColumns]]] = {"vllm": vllm.read_sampled, "sglang": sglang.read_sampled}
MADE = {"vllm": of_vllm, "sglang": of_sglang}
LOADED: dict[str, Columns] = {"vllm": loaded_vllm, "sglang": loaded_sglang}
ENGINES = pytest.mark.parametrize("engine", READ)


def equal(engine: str, text: bytes) -> SampledColumns:
    """What ``engine``'s answer holds; its columns equal those by `json.loads`, to the bit."""
    (found,) = READ[engine](text)
    ids, logprobs = LOADED[engine](text)
    assert (found.token_ids.dtype, found.logprobs.dtype) == (np.int32, np.float32)
    assert np.array_equal(found.token_ids, ids)
    assert found.logprobs.tobytes() == logprobs.tobytes()
    return found


@ENGINES
@pytest.mark.parametrize("tokens", [1, 2, 5000])
def test_columns_are_those_of_json_loads(engine: str, tokens: int) -> None:
    found = equal(engine, MADE[engine](tokens))
    assert [(span.start, span.version) for span in found.spans] == [(0, "7"), (tokens // 2, "8")]
    assert (found.finish_reason, found.routes) == ("length", None)


@ENGINES
@pytest.mark.parametrize(
    "value", ["-0.0", "0", "-3", "-1e-7", "-1.5E+2", "-0.1234567890123456789", "-Infinity", "Infinity"]
)
def test_numbers_are_read_as_json_loads_reads_them(engine: str, value: str) -> None:
    text, first = MADE[engine](3).decode(), repr(drawn(3)[1][0])
    assert first in text
    assert equal(engine, text.replace(first, value).encode()).logprobs[0] == np.float32(value)


@pytest.mark.parametrize("ids", ["[7,2147483647,0]", "[ 7 , 8,9 ]", "[-1,8,9]", "[7]", "[]", "null"])
def test_token_ids_are_those_of_json_loads_however_they_are_written(ids: str) -> None:
    (found,) = vllm.read_sampled(with_token_ids(ids))
    assert found.token_ids.dtype == np.int32
    assert found.token_ids.tolist() == (json.loads(ids) or [])


@pytest.mark.parametrize(
    "ids", ["[7,2147483648]", "[4294967297]", "[1e3,5.5]", f"[{10**30}]", '["7"]', "[7,null]", "7"]
)
def test_what_is_no_token_id_is_a_value_error(ids: str) -> None:
    with pytest.raises(ValueError, match=r"token.ids"):
        vllm.read_sampled(with_token_ids(ids))


@pytest.mark.parametrize("ids", ["[7,,8]", "[7,]", "[,7]", "[7 8]"])
def test_token_ids_that_are_no_json_are_refused_as_json_loads_does(ids: str) -> None:
    text = with_token_ids(ids)
    with pytest.raises(ValueError, match="column") as theirs:
        json.loads(text)
    with pytest.raises(ValueError, match="column") as ours:
        vllm.read_sampled(text)
    assert str(ours.value) == str(theirs.value)


def with_token_ids(ids: str) -> bytes:
    """An answer of vLLM's with other token ids."""
    return of_vllm(3).decode().replace(json.dumps(drawn(3)[0], separators=(",", ":")), ids, 1).encode()


@ENGINES
def test_fields_that_are_not_read_may_hold_anything(engine: str) -> None:
    answer = json.loads(MADE[engine](4))
    strange = {'},{"token_id":': ['"]}\\', "\u2028\U0001f600", None, [[[]]], {"logprob": "none"}], "index": True}
    for place in (answer, answer["choices"][0]) if engine == "vllm" else (answer[0], answer[0]["meta_info"]):
        place["another"] = strange
    if engine == "vllm":
        answer["choices"][0]["logprobs"]["content"][1]["token"] = strange
    else:
        answer[0]["meta_info"]["output_token_logprobs"][1][2] = strange
    for text in (json.dumps(answer), json.dumps(answer, indent=1, ensure_ascii=False)):
        equal(engine, text.encode())


@ENGINES
def test_an_answer_that_breaks_off_anywhere_raises_what_json_loads_raises(engine: str) -> None:
    text = MADE[engine](3)
    for end in range(len(text)):
        with pytest.raises(ValueError, match="line 1 column") as theirs:
            json.loads(text[:end])
        with pytest.raises(type(theirs.value)) as ours:
            READ[engine](text[:end])
        assert str(ours.value) == str(theirs.value)


@ENGINES
@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe\x00", b'{"choices": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000, b"<html>502</html>"]
)
def test_what_is_no_json_is_a_value_error(engine: str, text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        READ[engine](text)


def test_scores_are_those_of_json_loads() -> None:
    said = [None, {"7": {"logprob": -1.5, "rank": 3, "decoded_token": None}, "9": {"logprob": -0.5}}, None]
    text = json.dumps({"choices": [], "prompt_logprobs": said}).encode()
    assert vllm.read_scored(text) == [{"7": -1.5, "9": -0.5}, {}]
    tokens = [[None, 5, None], [-0.25, 6, None], [None, 7, None], [-1, 8, "text"]]
    assert sglang.read_scored(json.dumps({"meta_info": {"input_token_logprobs": tokens}}).encode()) == [-0.25, -1.0]


TEXT = [5, 9, 7]
JUDGED = {
    "vllm": {
        "prompt_logprobs": [
            None,
            {"9": {"logprob": -3.5}, "2": {"logprob": -0.5}, "4": {"logprob": -0.25}},
            {"7": {"logprob": -0.125}, "3": {"logprob": -2.5}},
        ]
    },
    "sglang": {
        "meta_info": {
            "input_token_logprobs": [[None, 5, None], [-3.5, 9, None], [-0.125, 7, None]],
            "input_top_logprobs": [None, [[-0.25, 4, None], [-0.5, 2, None]], [[-0.125, 7, None], [-2.5, 3, None]]],
        }
    },
}


def judged(engine: str, answer: object, top: int = 2) -> TopLogprobs:
    text = json.dumps(answer).encode()
    if engine == "vllm":
        return vllm.read_judged(text, text=TEXT, top=top)
    return sglang.read_judged(text, length=len(TEXT), top=top)


@ENGINES
def test_a_judged_text_has_its_tokens_and_the_most_probable_ones_the_first_first(engine: str) -> None:
    said = judged(engine, JUDGED[engine])
    assert said.logprobs.tolist() == [-3.5, -0.125]
    assert said.top_ids.tolist() == [[4, 2], [7, 3]]
    assert said.top_logprobs.tolist() == [[-0.25, -0.5], [-0.125, -2.5]]


@ENGINES
def test_a_judged_text_without_probable_tokens_has_the_log_probs_alone(engine: str) -> None:
    plain: Any = json.loads(json.dumps(JUDGED[engine]))
    if engine == "sglang":
        del plain["meta_info"]["input_top_logprobs"]
    said = judged(engine, plain, top=0)
    assert said.logprobs.tolist() == [-3.5, -0.125]
    assert said.top_ids.shape == said.top_logprobs.shape == (2, 0)


@ENGINES
def test_a_judged_text_of_other_tokens_or_fewer_is_no_answer(engine: str) -> None:
    with pytest.raises(ValueError, match=r"were asked for"):
        judged(engine, JUDGED[engine], top=4)
    short: Any = json.loads(json.dumps(JUDGED[engine]))
    (short if engine == "vllm" else short["meta_info"]).popitem()
    with pytest.raises(ValueError, match=r"missing required field|2 log-probs and 0 places of 2"):
        judged(engine, short)
    if engine == "vllm":
        with pytest.raises(ValueError, match="token 1 of the text"):
            vllm.read_judged(json.dumps(JUDGED[engine]).encode(), text=[5, 8, 7], top=2)


class Judging(Server):
    """A server that judges ``TEXT``."""

    def __init__(self, engine: str) -> None:
        super().__init__("http://localhost:1", token=None, timeout_seconds=1.0)
        self.said = json.dumps(JUDGED[engine]).encode()

    async def _ask(self, *_: object) -> bytes:
        return self.said


@ENGINES
def test_a_judged_text_is_decoded_beside_the_event_loop(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32,768 tokens with 64 others each it takes seconds."""
    threads, decoder = list[threading.Thread](), answers._decoder

    def watched(form: type) -> Any:
        threads.append(threading.current_thread())
        return decoder(form)

    monkeypatch.setattr(answers, "_decoder", watched)
    said = asyncio.run(SERVERS[engine](NAMED["qwen3-30b-a3b"]).score_top(Judging(engine), TEXT, 2))
    assert said.top_ids.tolist() == [[4, 2], [7, 3]]
    assert threads
    assert threading.main_thread() not in threads


class Reporting(Server):
    """A server, each of whose ranks reports: over HTTP of vLLM, in the files that an order names of SGLang."""

    def __init__(self, reports: Sequence[ChecksumReport]) -> None:
        super().__init__("http://localhost:1", token=None, timeout_seconds=1.0)
        self.reports, self.paused, self.sent = reports, True, list[str]()
        self.spoilt: Callable[[dict[str, Any]], object] = len  # by what is wrong with the first rank's answer

    async def _ask(self, method: str, path: str, body: Any, *_: object) -> bytes:
        if path == "/server_info":
            return json.dumps({"tp_size": len(self.reports)}).encode()
        if path == "/update_weights_from_tensor":
            order = json.loads(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))[0][0])
            for rank, text in enumerate(self._said(order["known"])):
                Path(f"{order['answer']}.{rank}").write_text(text)
        if path == "/collective_rpc":
            return f'{{"results": [[{",".join(self._said(body["args"][2]))}], []]}}'.encode()
        return b"{}"

    def _said(self, known: Sequence[str]) -> list[str]:
        said = [packed_report(one, known) for one in self.reports]
        self.spoilt(said[0])
        self.sent = [json.dumps(one) for one in said]
        return self.sent


@ENGINES
def test_reports_are_decoded_off_the_event_loop(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model it takes long, and all servers report at once."""
    whole = ((0, 2), (0, 3))
    reports = [
        ChecksumReport(rows=[("w13", "gate", whole, 2**64 - 1)], seconds=0.5, read=[("up", whole, 0)], window=7),
        ChecksumReport(rows=[("norm", "norm", ((0, 3),), 5)], seconds=2.0, read=[]),
    ]
    threads, decoded = list[threading.Thread](), ReportReader.read

    def watched(reader: ReportReader, text: bytes) -> ChecksumReport:
        threads.append(threading.current_thread())
        return decoded(reader, text)

    monkeypatch.setattr(ReportReader, "read", watched)
    held = SERVERS[engine](NAMED["qwen3-30b-a3b"]).rank_reports
    assert asyncio.run(held(Reporting(reports), tmp_path / "model.safetensors")) == reports
    assert len(threads) == len(reports)
    assert threading.main_thread() not in threads


WHOLE = ((0, 2), (0, 3))
ONE = ChecksumReport(
    rows=[("w13", "gate", WHOLE, 2**64 - 1), ("w2", "down", WHOLE, 3)], seconds=0.5, read=[("up", WHOLE, 7)]
)


def to(column: str, **values: object) -> Callable[[dict[str, Any]], object]:
    return lambda said: said[column].update(values)


@ENGINES
@pytest.mark.parametrize(
    ("spoilt", "problem"),
    [
        (
            lambda said: said.update(seconds="long"),
            r"Expected `float`, got `str` - at `\$\.seconds`; the server needs the trainer's version of rl_megatron",
        ),
        (
            lambda said: said.update(rows=[["w13", "gate", WHOLE, 9]]),
            r"Expected `object`, got `array` - at `\$\.rows`; the server needs the trainer's version of rl_megatron",
        ),
        (to("rows", places=[["w13", "gate", [[0, 2], "all"]]]), r"rows: Expected `array`, got `str` - at `\$\[0\]\["),
        (to("rows", places=[["w13", "gate", WHOLE], ["w2", "up", WHOLE]]), "rows: its boxes have digest [0-9a-f]{64}"),
        (to("read", places=[["up", [[0, 2], [0, 4]]]]), "read: its boxes have digest [0-9a-f]{64}, but it says"),
        (to("rows", sums="AAAAAAAAAAA="), "rows: 8 bytes of checksums for 2 boxes, not 8 for each"),
        (lambda said: said["rows"].pop("places"), "rows: it names no boxes, and those of digest [0-9a-f]{64} are not "),
    ],
)
def test_reports_of_another_form_are_an_error_that_names_the_part(
    engine: str, tmp_path: Path, spoilt: Callable[[dict[str, Any]], object], problem: str
) -> None:
    server = Reporting([ONE])
    server.spoilt = spoilt
    with pytest.raises(EngineError, match=f"another form: {problem}"):
        asyncio.run(SERVERS[engine](NAMED["qwen3-30b-a3b"]).rank_reports(server, tmp_path / "model.safetensors"))


@ENGINES
async def test_boxes_are_named_once_and_then_by_their_digest(engine: str, tmp_path: Path) -> None:
    """Names and boxes are nine tenths of a report on a model of 235B parameters, and the same at every push."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(9) for expert in range(9)]
    rows = [(f"model.layers.{i % 9}.mlp.experts.w13_weight", n, ((0, 1536), (0, 4096)), i) for i, n in enumerate(names)]
    reports = [
        ChecksumReport(rows=rows, seconds=0.0),
        ChecksumReport(rows=rows[1:], seconds=0.0, read=[row[1:] for row in rows]),
    ]
    other = [*rows[:-1], (*rows[-1][:2], ((0, 1536), (0, 4097)), 5)]
    adapter, path = SERVERS[engine](NAMED["qwen3-30b-a3b"]), tmp_path / "model.safetensors"
    assert [set(one.rows) for one in await adapter.rank_reports(Reporting(reports), path)] == [set(rows), set(rows[1:])]
    restarted = Reporting([replace(one, rows=list(reversed(one.rows))) for one in reports])
    found = await adapter.rank_reports(restarted, path)
    assert [set(one.rows) for one in found] == [set(rows), set(rows[1:])]
    assert [set(one.read) for one in found] == [set(), set(reports[1].read)]
    assert not any(name in text for text in restarted.sent for name in names)
    changed = Reporting([replace(reports[0], rows=other)])
    (found_other,) = await adapter.rank_reports(changed, path)
    assert set(found_other.rows) == set(other)
    assert all(name in changed.sent[0] for name in names)


@ENGINES
async def test_equal_columns_of_reports_are_one_object_for_all_servers(engine: str, tmp_path: Path) -> None:
    """So they are compared once."""
    adapter, out = SERVERS[engine](NAMED["qwen3-30b-a3b"]), list[list[ChecksumReport]]()
    for numbers in ((2**64 - 1, 5), (2**64 - 1, 6)):
        reports = [replace(ONE, rows=[("w13", "gate", WHOLE, n)], seconds=float(n)) for n in numbers]
        out.append(await adapter.rank_reports(Reporting(reports), tmp_path / "model.safetensors"))
        assert out[-1] == reports
    first, second = out
    assert first[0].rows is second[0].rows
    assert first[1].rows is not second[1].rows
    assert first[0].read is first[1].read is second[1].read


def test_a_shared_column_is_gone_with_the_last_report_that_has_it() -> None:
    reader, text = ReportReader(), json.dumps(packed_report(ONE, ())).encode()
    first, second = reader.read(text), reader.read(text)
    there = len(reader._columns)
    del first
    assert len(reader._columns) == there
    del second
    assert not reader._columns


def test_a_loaders_error_names_its_rank(tmp_path: Path) -> None:
    server = Reporting([ONE])
    server.spoilt = lambda said: said.update(error="w13 is not there")
    with pytest.raises(CorruptionError, match=r"^rank 0: w13 is not there$"):
        asyncio.run(SERVERS["sglang"](NAMED["qwen3-30b-a3b"]).rank_reports(server, tmp_path / "model.safetensors"))


@pytest.mark.parametrize(("reports", "told"), [({"reports": REPORT_FORM}, 0), ({"reports": "0"}, 1), ({}, 1)])
def test_a_server_of_vllm_that_reports_weights_in_another_form_is_refused(reports: dict[str, str], told: int) -> None:
    """As one with another version of this package: it would be found at the first push."""

    class Told(Server):
        async def get(self, path: str) -> Any:
            return {"paths": dict.fromkeys(_NEEDED), "data": [{"max_model_len": 9}], "version": "0.32.0"}

        async def text(self, path: str) -> str:
            return "vllm:prompt_tokens_total 1.0"

        async def post(self, path: str, body: object = None, *, params: Any = None) -> Any:
            return {"results": [{"logprobs_mode": "processed_logprobs", **reports}]}

    described = asyncio.run(
        SERVERS["vllm"](NAMED["qwen3-30b-a3b"]).describe(Told("http://a:1", token=None, timeout_seconds=1.0))
    )
    said = "its rl_megatron reports weights in another form; start it with the trainer's version"
    assert described.problems == (said,) * told
