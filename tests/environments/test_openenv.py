"""Environments of openenv-core behind its own server, and servers that hang, lie and end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import openenv_episodes as example
import pytest
from write_tasks import run

from rl_megatron.agents.source import EnvironmentSampler, RequestBatcher
from rl_megatron.environments.protocol import Reply
from rl_megatron.errors import ConfigError, DataError, EnvironmentFailure
from rl_megatron.types import Prompt, Trajectory
from tests.completions import drawn
from tests.environments.served import interpreter, serving
from tests.scripted_engine import Scripted, sampler, trajectories

SCHEMA = {"action": {"properties": {"metadata": {"type": "object"}, "said": {"type": "string"}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(interpreter("openenv"), "openenv_served:app", tmp_path_factory.mktemp("openenv") / "log") as url:
        yield url


def prompt(text: str, **arguments: Any) -> Prompt:
    return Prompt(id="p", text=text, token_ids=(1,), answer="", meta={"openenv": arguments})


def source(engine: Scripted, url: str, *, group_size: int = 2, **section: Any) -> EnvironmentSampler:
    options = {"url": url, "tool": False, **section.pop("options", {})}  # plain texts show none
    return sampler(
        RequestBatcher(engine), function="openenv_episodes:OpenEnv", options=options, group_size=group_size, **section
    )


def played(ours: EnvironmentSampler, prompts: Sequence[Prompt]) -> list[Trajectory]:
    return trajectories(asyncio.run(ours.groups(drawn(prompts))))


def read_last(engine: Scripted) -> str:
    """The longest text that the model was given."""
    longest = max(engine.asked, key=lambda one: len(one.token_ids))
    return bytes(token for token in longest.token_ids if token < 256).decode()


def guessing(text: str) -> str:
    """No JSON at first, then 5, then 7."""
    if "JSON" not in text:
        return "5"
    return '{"guess":7}' if text.endswith("more") else '{"guess":5}'


def test_the_servers_observations_and_rewards_are_the_trajectorys(server: str, tmp_path: Path) -> None:
    keys = [f"url={server}/guess", "size=2", "held_out=1", "seed=17", "observation=hint", "least=0"]
    run(tmp_path, "openenv_episodes:tasks", keys)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert rows[0] == {"question": "0-9, 17?", "answer": "(none)", "openenv": {"least": 0, "seed": 17}}
    assert json.loads((tmp_path / "eval.jsonl").read_text())["openenv"]["seed"] == 19
    engine = Scripted(guessing)
    tasks = [prompt(f"Play: {row['question']}", **row["openenv"]) for row in rows]
    seven, other = played(
        source(engine, f"{server}/guess", group_size=1, options={"observation": "hint"}, max_turns=3), tasks
    )
    assert [turn.reward for turn in seven.turns] == [None, -0.25, 1.0]
    assert (seven.reward, seven.stop, seven.metrics["own/bad_actions"]) == (0.75, "done", 1.0)
    assert (other.reward, other.stop) == (-0.5, "turns")  # 8 is neither 5 nor 7
    (row,) = seven.chains
    sampled = [row.token_ids[turn.start : turn.stop].tolist() for turn in seven.turns]
    assert all(ids in engine.sampled.values() for ids in sampled)
    assert read_last(engine).startswith("Play: 0-9, 1")


def test_a_reply_is_the_action_where_that_is_a_text_and_a_full_server_is_waited_for(server: str) -> None:
    engine = Scripted(lambda text: "stop" if text.endswith("<one>") else " one ")
    both = played(source(engine, f"{server}/echo"), [prompt("say")])
    assert [(one.reward, [turn.reward for turn in one.turns]) for one in both] == [(7.0, [3.0, 4.0])] * 2


async def test_a_server_that_stays_full_is_named(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "_ROOM_LIMIT", 0.2)
    one = example.Session(f"{server}/echo", "")
    await one.open()
    await one.reset({})
    try:
        with pytest.raises(
            EnvironmentFailure, match=r"Server at capacity: 1/1 .*, for 0.2 s; give .* a max_concurrent"
        ):
            await source(Scripted(str), f"{server}/echo").groups(drawn([prompt("say")]))
    finally:
        await one.close()


def test_what_the_schema_refuses_is_read_and_all_of_an_observation_that_has_no_only_text(server: str) -> None:
    engine = Scripted(lambda text: '{"gues":7}')
    (one,) = played(source(engine, f"{server}/guess", group_size=1, max_turns=2), [prompt("")])
    assert (one.stop, one.reward, one.metrics["own/bad_actions"]) == ("turns", 0.0, 2.0)
    first, *_ = read_last(engine).split('{"gues"')
    assert set(json.loads(first)) == {"hint", "left"}
    assert "error: guess: Field required; gues: Extra inputs are not permitted" in read_last(engine)


@pytest.mark.parametrize(
    ("path", "says", "task", "said"),
    [
        ("guess", '{"guess":9}', prompt("0-9, 3?", seed=3), "EXECUTION_ERROR: far too much"),
        ("guess", "1", prompt("0-9, 4?", seed=3), "shows another problem at .*'seed': 3.* write the tasks again"),
        ("guess", "1", prompt("0-9, 3?", seed="x"), "reset with .*TypeError|EXECUTION_ERROR"),
        ("guess", "1", prompt("0-9, 3?", least=[1]), "EXECUTION_ERROR"),
        ("echo", "end", prompt("say"), "score raised ServerFailed: the server ended the episode without a reward"),
        ("none", "end", prompt("say"), "GET .*/none/schema: status 404"),
    ],
)
def test_what_the_server_does_not_do_is_named(server: str, path: str, says: str, task: Prompt, said: str) -> None:
    options = {"observation": "hint"} if path == "guess" else {}
    with pytest.raises(EnvironmentFailure, match=f"environment 'openenv_episodes:OpenEnv': prompt 'p'.*({said})"):
        played(source(Scripted(lambda text: says), f"{server}/{path}", options=options), [task])


@pytest.mark.parametrize("tool", [True, False])
def test_a_tool_that_plain_texts_do_not_show_is_refused_and_may_be_left_out(tool: bool) -> None:
    schema = json.dumps({"action": {"properties": {"guess": {"type": "integer"}, "sure": {"type": "boolean"}}}})

    def shows(connection: Any, request: Any) -> Any:
        return connection.respond(HTTPStatus.OK, schema) if request.path == "/schema" else None

    engine = Scripted(lambda text: '{"guess":7}')
    with lying(sends(data(reward=0.5, done=True)), shows) as url:
        ours = source(engine, url, group_size=1, options={"tool": tool})
        if tool:
            with pytest.raises(EnvironmentFailure, match=r"environment.template=plain shows no tools"):
                played(ours, [prompt("say")])
        else:
            assert [one.reward for one in played(ours, [prompt("say")])] == [0.5]


def test_a_row_without_the_field_is_refused() -> None:
    task = Prompt(id="p", text="say", token_ids=(1,), answer="")
    with pytest.raises(DataError, match="prompt 'p' has no field 'openenv'; write tasks"):
        asyncio.run(example.OpenEnv("http://127.0.0.1:1").start(task, 0))


CALL = {"id": "a", "type": "function", "function": {"name": "act", "arguments": '{"guess": 3}'}}


@pytest.mark.parametrize(
    ("message", "action"),
    [
        ({"content": 'I say ```json\n{"guess": {"a": 3}}```'}, {"guess": {"a": 3}}),
        ({"content": None, "tool_calls": [CALL]}, {"guess": 3}),
        ({"content": None, "tool_calls": [CALL, CALL]}, "2 calls in one turn; make one"),
        ({"content": "", "tool_calls": [{**CALL, "function": {"name": "go"}}]}, "there is no tool 'go'; call 'act'"),
        ({"content": "3"}, "the reply has no JSON object with guess, sure that can be read"),
        ({"content": "{" * 5000 + "}" * 5000}, "the reply has no JSON object with guess, sure"),
    ],
)
def test_replies_become_actions(message: Mapping[str, Any], action: object) -> None:
    schema = {"properties": {"guess": {"type": "integer"}, "sure": {}, "metadata": {}}, "required": ["guess"]}
    form = example.ActionForm(schema)
    ((tool,), reply) = (form.tools, Reply(text="", message=message, finish_reason="stop"))
    assert set(tool["function"]["parameters"]["properties"]) == {"guess", "sure"}
    if isinstance(action, str):
        with pytest.raises(example.ActionRefused, match=action):
            form.read(reply)
    else:
        assert form.read(reply) == action


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7 is not on loopback, and without TLS others"),
        ("http://127.0.0.1.example.com", "is not on loopback"),
        ("ftp://127.0.0.1", "write it as http://127.0.0.1:port or https://host"),
        ("http://127.0.0.1:9/?a=1", "write it as http"),
        ("service:game", "write it as http"),
        ("http://127.0.0.1:99999", "Port out of range"),
        ("http://me:secret@127.0.0.1", "^environment.options.url: remove user name"),
        ("http://127.0.0.1/a b", "white space"),
    ],
)
def test_a_server_whose_rewards_others_could_write_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        example.OpenEnv(url)
    assert "secret" not in str(refused.value)


@contextmanager
def lying(answers: Callable[[Any, str], Any], schema: Callable[[Any, Any], Any] | None = None) -> Iterator[str]:
    """A server whose ``answers(connection, kind)`` are awaited for each message."""
    from websockets.asyncio.server import serve

    def asked(connection: Any, request: Any) -> Any:
        if schema is not None:
            return schema(connection, request)
        return connection.respond(HTTPStatus.OK, json.dumps(SCHEMA)) if request.path == "/schema" else None

    async def handle(connection: Any) -> None:
        async for line in connection:
            kind = json.loads(line)["type"]
            if kind == "close":
                break
            await answers(connection, kind)

    ready, url, stopped = threading.Event(), list[str](), list[Callable[[], object]]()

    async def serving() -> None:
        until, loop = asyncio.Event(), asyncio.get_running_loop()
        stopped.append(lambda: loop.call_soon_threadsafe(until.set))
        async with serve(handle, "127.0.0.1", 0, process_request=asked, close_timeout=0.1) as server:
            url.append(f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}")
            ready.set()
            await until.wait()

    thread = threading.Thread(target=asyncio.run, args=(serving(),))
    thread.start()
    assert ready.wait(20)
    try:
        yield url[0]
    finally:
        stopped[0]()
        thread.join()


SHOWN = {"type": "observation", "data": {"observation": {"said": "say"}, "reward": None, "done": False}}


def sends(value: object, *, at: str = "step") -> Callable[[Any, str], Any]:
    async def answer(connection: Any, kind: str) -> None:
        await connection.send(json.dumps(SHOWN) if kind != at else value if type(value) is str else json.dumps(value))

    return answer


def data(**changed: Any) -> dict[str, Any]:
    return {**SHOWN, "data": {**SHOWN["data"], **changed}}  # type: ignore[dict-item]


async def hangs(connection: Any, kind: str) -> None:
    if kind == "step":
        await connection.wait_closed()
    await connection.send(json.dumps(SHOWN))


async def leaves(connection: Any, kind: str) -> None:
    await (connection.close() if kind == "step" else connection.send(json.dumps(SHOWN)))


def redirects(connection: Any, request: Any) -> Any:
    if request.path == "/schema":
        return connection.respond(HTTPStatus.OK, json.dumps(SCHEMA))
    answer = connection.respond(HTTPStatus.FOUND, "elsewhere")
    answer.headers["Location"] = "ws://127.0.0.2:9/ws"
    return answer


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (hangs, r"turn 1: step did not end within environment.step_seconds=0\.3"),
        (leaves, "the connection ended in a step: .*1000"),
        (sends("x" * (example.MOST_BYTES + 1)), "the connection ended in a step: .*1009.*limit"),
        (sends("no JSON"), "step answers what is no observation: 'no JSON'"),
        (sends([]), "step answers what is no observation"),
        (sends({"type": "observation"}), "step answers what is no observation"),
        (sends({**SHOWN, "type": "state"}), "step answers what is no observation"),
        (sends(data(observation=7)), "step answers what is no observation"),
        (sends(data(done="no")), "step answers what is no observation"),
        (sends(data(reward="1")), "step answers what is no observation"),
        (sends(data(reward=10**400)), "step answers what is no observation"),
        (sends("[" * 100_000), "step answers what is no observation"),
        (sends(data(reward=float("nan"))), "step returned nan, which is no finite number"),
        (sends(data(reward=float("inf"))), "step returned inf, which is no finite number"),
        (sends({"type": "error", "data": {"code": "X", "message": "so"}}), "X: so"),
        (sends(data(done=True), at="reset"), "reset with .* gives an episode that has ended"),
    ],
)
def test_a_server_that_hangs_lies_or_leaves_is_named(answers: Any, said: str) -> None:
    with lying(answers) as url, pytest.raises(EnvironmentFailure, match=said):
        played(
            source(Scripted(lambda text: "7"), url, group_size=1, step_seconds=0.3 if answers is hangs else 20),
            [prompt("say")],
        )


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (lambda connection, request: connection.respond(HTTPStatus.OK, "{}"), "gives no schema of actions"),
        (lambda connection, request: connection.respond(HTTPStatus.OK, "x" * (example.MOST_BYTES + 1)), "longer than"),
        (
            lambda connection, request: connection.respond(HTTPStatus.NOT_FOUND, ""),
            "status 404, and not the object that is due: ''",
        ),
        (redirects, "ServerFailed: .*/ws: .*(cross-origin redirect|Location|302)"),
    ],
)
def test_a_server_that_is_no_openenv_is_named(schema: Any, said: str) -> None:
    with lying(hangs, schema) as url, pytest.raises(EnvironmentFailure, match=said):
        played(source(Scripted(lambda text: "7"), url, group_size=1), [prompt("say")])


def test_nobody_listens_is_named() -> None:
    with pytest.raises(ConfigError, match=r"GET http://127\.0\.0\.1:1/schema: ConnectError"):
        example.tasks(url="http://127.0.0.1:1", size=1, held_out=1)
