"""Rows of NeMo-Gym against a resources server that it ships, and against servers that fail and lie."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nemo_gym_sessions as example
import pytest
from json_server import MOST_BYTES
from write_tasks import run

from rl_megatron.agents.conversation.written import ChatTemplate
from rl_megatron.agents.parsers import hermes
from rl_megatron.agents.source import RequestBatcher
from rl_megatron.errors import ConfigError, EnvironmentFailure
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Prompt, Trajectory
from tests.completions import drawn
from tests.environments.served import INTERPRETERS, interpreter, serving
from tests.scripted_engine import Scripted, sampler, trajectories

EXAMPLES = "lib/python3.12/site-packages/resources_servers/example_session_state_mgmt/data/example.jsonl"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": ""}
ROW = {"responses_create_params": {"input": "Add.", "tools": [ADD]}, "expected": 3}
SHOWS_TOOLS = (
    "{% for m in messages %}{{ m.content }}{% if loop.first %}{% for one in tools or [] %} {{ one.function.name }}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(interpreter("nemo-gym"), "nemo_gym_served:app", tmp_path_factory.mktemp("nemo_gym") / "log") as url:
        yield url


def prompt(row: Mapping[str, Any], id: str = "p") -> Prompt:
    return Prompt(id=id, text="Add.", token_ids=(1,), answer="", meta={"nemo_gym": row})


def played(engine: Scripted, url: str, prompts: Sequence[Prompt], **section: Any) -> list[Trajectory]:
    ours = sampler(
        RequestBatcher(engine), function="nemo_gym_sessions:NemoGym", options={"url": url}, group_size=1, **section
    )
    rollout = ours.rollout.model_copy(update={"max_new_tokens": 300, "max_prompt_tokens": 200})
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SHOWS_TOOLS
    ours = replace(ours, rollout=rollout, template=ChatTemplate(tokenizer), parser=hermes)
    return trajectories(asyncio.run(ours.groups(drawn(prompts))))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def counting(text: str) -> str:
    """Adds both numbers of the task in one turn, then reads the counter, then says that."""
    if '{"success":true}' not in text:
        _, first, _, _, second, *_ = text.split()
        return call("increment_counter", count=int(first)) + call("increment_counter", count=int(second))
    return "done" if re.search(r'{"count":\d', text) else call("get_counter_value")


def test_calls_change_each_trajectorys_session_and_the_server_verifies(server: str, tmp_path: Path) -> None:
    (examples,) = (INTERPRETERS / "nemo-gym").glob(EXAMPLES)
    run(tmp_path, "nemo_gym_sessions:tasks", [f"path={examples}", "held_out=1"])
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert rows[0]["question"] == "add 1 then add 2 then get the count"
    assert len((tmp_path / "eval.jsonl").read_text().splitlines()) == 1
    tasks = [prompt(row["nemo_gym"], id=f"p{i}") for i, row in enumerate(rows)]
    both = played(Scripted(counting), server, tasks)
    assert [(one.reward, one.stop, len(one.turns)) for one in both] == [(1.0, "done", 3)] * len(rows)
    assert {one.metrics["own/tool_calls"] for one in both} == {3.0}
    wrong = played(
        Scripted(lambda text: call("increment_counter", count=99) if "}" not in text else "6"), server, tasks
    )
    assert {one.reward for one in wrong} == {0.0}
    late = played(Scripted(counting), server, tasks[:1], max_turns=1)
    assert [(one.reward, one.stop) for one in late] == [(1.0, "turns")]  # it has added all, and is verified


def test_calls_that_fail_are_read(server: str) -> None:
    row = {
        "responses_create_params": {"input": "add", "tools": [{**ADD, "name": "increment_counter"}]},
        "initial_count": 0,
        "expected_count": 0,
    }
    engine = Scripted(
        lambda text: "so" if "detail" in text else call("increment_counter", count="x") + call("verify", response={})
    )
    (one,) = played(engine, server, [prompt(row)])
    assert (one.reward, one.metrics["own/tool_errors"], one.metrics["own/tool_calls"]) == (1.0, 2.0, 2.0)
    read = bytes(token for token in engine.asked[-1].token_ids if token < 256).decode()
    assert "should be a valid integer" in read
    assert "error: there is no tool 'verify'; there are increment_counter" in read


Answers = Mapping[str, tuple[int, bytes]]
FINE = {"/seed_session": (200, b"{}"), "/add": (200, b"3"), "/verify": (200, b'{"reward": 0.5}')}


@contextmanager
def answering(answers: Answers, hang: Callable[[str], bool] = lambda path: False) -> Iterator[tuple[str, list[Any]]]:
    """A server of fixed answers, and what it was asked."""
    asked, ended = list[Any](), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            if hang(self.path):
                ended.wait(30)
                return
            status, said = answers[self.path]
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_address[1]}", asked
        finally:
            ended.set()
            served.shutdown()
            thread.join()


def test_the_server_gets_the_row_and_the_transcript() -> None:
    given = {"instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "?"}]}]}
    row = {"responses_create_params": {**given, "tools": [ADD]}, "expected": 3}
    says = {0: "<think>\nhm\n</think>\n" + call("add", n=1) * 2, 1: "<tool_call>{</tool_call>", 2: "3"}
    with answering(FINE) as (url, asked):
        engine = Scripted(lambda text: says[len(engine.asked) - 1])
        (one,) = played(engine, url, [prompt(row)])
    assert (one.reward, len(one.turns)) == (0.5, 3)
    assert bytes(engine.asked[0].token_ids).decode() == "Be brief. add?"
    begun, first, second, (path, body) = asked
    assert (begun, first, second, path) == (("/seed_session", row), ("/add", {"n": 1}), ("/add", {"n": 1}), "/verify")
    assert {key: value for key, value in body.items() if key != "response"} == row
    assert body["response"]["incomplete_details"] is None
    output = body["response"]["output"]
    assert [(item["type"], item.get("call_id")) for item in output] == [
        *(("reasoning", None), ("function_call", "call_0"), ("function_call", "call_1")),
        *(("function_call_output", "call_0"), ("function_call_output", "call_1"), ("message", None), ("message", None)),
        ("message", None),
    ]
    assert output[0]["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert (output[1]["name"], json.loads(output[1]["arguments"]), output[3]["output"]) == ("add", {"n": 1}, "3")
    assert [item["role"] for item in output[5:]] == ["assistant", "user", "assistant"]
    assert output[6]["content"].startswith("error: a call is no JSON")
    assert output[7]["content"] == [{"type": "output_text", "text": "3", "annotations": []}]


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/seed_session": (500, b'"broken"')}, "start raised ServerFailed: POST .*/seed_session: status 500.*broken"),
        ({"/seed_session": (302, b"{}")}, "/seed_session: status 302"),
        ({"/seed_session": (200, b'{"mcp": {}}')}, "its tools are called over MCP"),
        ({"/add": (200, b"x" * (MOST_BYTES + 1))}, "step raised ServerFailed: .*/add: the answer is longer than"),
        ({"/verify": (422, b'{"detail": "no"}')}, "score raised ServerFailed: .*/verify: status 422.*detail"),
        ({"/verify": (200, b"[" * 100_000)}, "/verify: status 200, and not the object"),
        ({"/verify": (200, b'{"reward": "1"}')}, "/verify: its reward is '1'; it must be a number"),
        ({"/verify": (200, b'{"reward": true}')}, "/verify: its reward is True"),
        ({"/verify": (200, b"{}")}, "/verify: its reward is None"),
        ({"/verify": (200, b'{"reward": NaN}')}, "score returned nan, which is no finite number"),
    ],
)
def test_a_server_that_fails_or_lies_is_named(answers: Answers, said: str) -> None:
    says = Scripted(lambda text: call("add", n=1) if text == "Add. add" else "3")
    with (
        answering({**FINE, **answers}) as (url, _),
        pytest.raises(EnvironmentFailure, match=f"'nemo_gym_sessions:NemoGym'.*{said}"),
    ):
        played(says, url, [prompt(ROW)])


@pytest.mark.parametrize("path", ["/seed_session", "/add", "/verify"])
def test_a_server_that_hangs_is_given_up(path: str) -> None:
    says = Scripted(lambda text: call("add", n=1) if text == "Add. add" else "3")
    limit = r"did not end within environment.step_seconds=0\.3"
    with answering(FINE, lambda asked: asked == path) as (url, _), pytest.raises(EnvironmentFailure, match=limit):
        played(says, url, [prompt(ROW)], step_seconds=0.3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input": [{"type": "function_call", "name": "add"}]}, "input has a function_call of the role None; messages"),
        ({"input": [{"role": "assistant", "content": "a"}]}, "input has a message of the role assistant"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content that is no text"),
        ({"input": []}, "input is empty"),
        ({"input": "a", "tools": [{**ADD, "name": "verify"}]}, "which is no function of a server"),
        ({"input": "a", "tools": [{**ADD, "name": "../add"}]}, "which is no function of a server"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "which is no function of a server"),
        ({}, "KeyError: 'input'"),
    ],
)
def test_rows_that_cannot_be_played_are_refused(given: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    row = {"responses_create_params": given}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n{json.dumps(row)}\n")
    with pytest.raises(ConfigError, match=f"rows.jsonl, line 2: .*{said}"):
        example.tasks(path=str(tmp_path / "rows.jsonl"), held_out=1)
    with pytest.raises(EnvironmentFailure, match=f"prompt 'p': nemo_gym: .*{said}"):
        played(Scripted(str), "http://127.0.0.1:1", [prompt(row)])


def test_a_line_ends_where_json_lines_end_alone(tmp_path: Path) -> None:
    row = {"responses_create_params": {"input": "one\u2028two\x85three"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row, ensure_ascii=False)}\n" * 2, encoding="utf-8")
    train, _ = example.tasks(path=str(tmp_path / "rows.jsonl"), held_out=1)
    assert [one["question"] for one in train] == ["one\u2028two\x85three"]


def test_files_and_servers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n")
    with pytest.raises(ConfigError, match=r"has 1 rows; held_out=1 must be from 1 to 0"):
        example.tasks(path=str(tmp_path / "rows.jsonl"), held_out=1)
    with pytest.raises(ConfigError, match=r"no_such\.jsonl.*No such file"):
        example.tasks(path="no_such.jsonl", held_out=1)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7 is not on loopback"):
        example.NemoGym("http://10.0.0.7")
