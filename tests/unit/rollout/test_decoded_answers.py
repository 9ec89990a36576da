"""Answers decoded by their type hold what `json.loads` finds in them, and break where it says that they break."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.answers import drawn, loaded_sglang, loaded_vllm, of_sglang, of_vllm
from launcher.servers.engines import SERVERS
from rl_megatron.errors import CorruptionError, EngineError
from rl_megatron.models.named import NAMED
from rl_megatron.rollout.servers import decoding
from rl_megatron.rollout.servers.decoding import Judged, SampledColumns, shared_lists
from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.servers.sglang import answer as sglang
from rl_megatron.rollout.servers.vllm import answer as vllm
from rl_megatron.weights.checks.reports import Report

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
    text = MADE[engine](3).decode()
    first = repr(drawn(3)[1][0])
    assert first in text
    found = equal(engine, text.replace(first, value).encode())
    assert found.logprobs[0] == np.float32(value)


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
    text = of_vllm(3).decode()
    return text.replace(json.dumps(drawn(3)[0], separators=(",", ":")), ids, 1).encode()


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


def judged(engine: str, answer: object, top: int = 2) -> Judged:
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
    threads, decoder = list[threading.Thread](), decoding._decoder

    def watched(form: type) -> Any:
        threads.append(threading.current_thread())
        return decoder(form)

    monkeypatch.setattr(decoding, "_decoder", watched)
    said = asyncio.run(SERVERS[engine](NAMED["qwen3-30b-a3b"]).judge(Judging(engine), TEXT, 2))
    assert said.top_ids.tolist() == [[4, 2], [7, 3]]
    assert threads
    assert threading.main_thread() not in threads


class Reporting(Server):
    """A server, each of whose ranks reports: over HTTP of vLLM, in the files that an order names of SGLang."""

    def __init__(self, reports: Sequence[Report]) -> None:
        super().__init__("http://localhost:1", token=None, timeout_seconds=1.0)
        self.said, self.paused = [one.to_json() for one in reports], True

    async def _ask(self, method: str, path: str, body: Any, *_: object) -> bytes:
        if path == "/server_info":
            return json.dumps({"tp_size": len(self.said)}).encode()
        if path == "/update_weights_from_tensor":
            order = json.loads(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))[0][0])
            for rank, one in enumerate(self.said):
                Path(f"{order['answer']}.{rank}").write_text(json.dumps(one))
        return json.dumps({"results": [self.said] * 2}).encode()


@ENGINES
def test_what_ranks_report_is_decoded_beside_the_event_loop(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model it takes long, and all servers report at once."""
    whole = ((0, 2), (0, 3))
    reports = [
        Report(rows=[("w13", "gate", whole, 2**64 - 1)], seconds=0.5, read=[("up", whole, 0)], window=7),
        Report(rows=[("norm", "norm", ((0, 3),), 5)], seconds=2.0, read=[]),
    ]
    forms, decoder = list[object](), decoding._decoder

    def watched(form: type) -> Any:
        assert form is not Report or threading.current_thread() is not threading.main_thread()
        forms.append(form)
        return decoder(form)

    monkeypatch.setattr(decoding, "_decoder", watched)
    held = SERVERS[engine](NAMED["qwen3-30b-a3b"]).held
    assert asyncio.run(held(Reporting(reports), tmp_path / "model.safetensors")) == reports
    assert forms.count(Report) == len(reports)


@ENGINES
def test_reports_of_another_form_are_an_error_that_names_the_part(engine: str, tmp_path: Path) -> None:
    server = Reporting([Report(rows=(), seconds=0.0)])
    server.said[0]["seconds"] = "long"
    with pytest.raises(EngineError, match=r"another form: Expected `float`, got `str` - at `\$\.seconds`"):
        asyncio.run(SERVERS[engine](NAMED["qwen3-30b-a3b"]).held(server, tmp_path / "model.safetensors"))


@ENGINES
def test_equal_lists_of_reports_are_decoded_once_for_all_servers(engine: str, tmp_path: Path) -> None:
    """A report on a model of 235B parameters takes a server's rank 4 MB, and a replica's most of two seconds."""
    whole = ((0, 2), (0, 3))

    async def held(*numbers: int) -> list[Report]:
        reports = [
            Report(rows=[("w13", "gate", whole, n)], seconds=float(i), read=[("up", whole, 7)])
            for i, n in enumerate(numbers)
        ]
        found = await SERVERS[engine](NAMED["qwen3-30b-a3b"]).held(Reporting(reports), tmp_path / "model.safetensors")
        assert found == reports
        return found

    async def all_held() -> tuple[list[Report], list[Report]]:
        return await held(2**64 - 1, 5), await held(2**64 - 1, 6)

    first, second = asyncio.run(all_held())
    assert first[0].rows is second[0].rows
    assert first[1].rows is not second[1].rows
    assert first[0].read is first[1].read is second[1].read
    server = Reporting([Report(rows=(), seconds=0.0)])
    server.said[0]["rows"] = [["w13", "gate", [[0, 2], [0, 3]], "one"]]
    with pytest.raises(EngineError, match=r"another form: rows: Expected `int`, got `str` - at `\$\[0\]\[3\]`"):
        asyncio.run(SERVERS[engine](NAMED["qwen3-30b-a3b"]).held(server, tmp_path / "model.safetensors"))


def test_a_shared_list_is_gone_with_the_last_answer_that_has_it() -> None:
    _, first = shared_lists(b'{"rows": [8, 9]}', {"rows": list[int]})
    rest, second = shared_lists(b'{"rows": [8, 9], "seconds": 1}', {"rows": list[int]})
    assert json.loads(rest) == {"rows": [], "seconds": 1}
    there = list(decoding._shared.values())
    assert there.count([8, 9]) == 1
    there.clear()
    del first
    assert [8, 9] in decoding._shared.values()
    del second
    assert [8, 9] not in decoding._shared.values()


def test_a_loaders_error_names_its_rank(tmp_path: Path) -> None:
    server = Reporting([Report(rows=(), seconds=0.0)] * 2)
    server.said[1] = {"error": "w13 is not there"}
    with pytest.raises(CorruptionError, match=r"^rank 1: w13 is not there$"):
        asyncio.run(SERVERS["sglang"](NAMED["qwen3-30b-a3b"]).held(server, tmp_path / "model.safetensors"))
