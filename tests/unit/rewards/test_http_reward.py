"""The HTTP reward against a real server on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.errors import ConfigError, RewardError
from rl_megatron.rewards import http
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.types import Prompt, RewardResult
from tests.completions import completion

Answer = tuple[int, bytes]
PROMPT = Prompt(id="train:7", text="2+2=", token_ids=(1,), answer="4", meta={"level": "easy"})
DONE = completion((1, 2, 3), finish="length")


class Server(ThreadingHTTPServer):
    """Answers with the next of ``answers``, if there are any, or ``answer(body, number)``, which counts from 0."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.asked = threading.Lock(), list[tuple[str, dict[str, Any]]]()
        self.authorized, self.answers = list[str | None](), list[Answer]()
        self.answer: Callable[[dict[str, Any], int], Answer] = lambda body, number: (
            200,
            json.dumps({"rewards": [float(len(c["text"])) for c in body["completions"]]}).encode(),
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score?v=2"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append((self.path, body))
            self.server.authorized.append(self.headers["Authorization"])
        answers = self.server.answers
        status, answer = answers.pop(0) if answers else self.server.answer(body, number)
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join(5)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_WAIT", 0.001)


def score(url: str, *texts: str, options: Mapping[str, float] | None = None) -> list[float]:
    section = RewardSection(function=url, http={"timeout_seconds": 60.0, **(options or {})})
    return [one.total for one in asyncio.run(resolve_reward(section)(PROMPT, [DONE] * len(texts), texts))]


def test_the_server_is_asked_as_documented_and_its_numbers_are_the_rewards(server: Server) -> None:
    assert score(server.url, "four", "", "\ud800é") == [4.0, 0.0, 2.0]
    path, body = server.asked[0]
    assert path == "/score?v=2"
    assert body["completions"][0] == {"text": "four", "num_tokens": 3, "finish_reason": "length"}
    rest = {key: value for key, value in body.items() if key != "completions"}
    assert rest == {"prompt_id": "train:7", "prompt": "2+2=", "answer": "4", "meta": {"level": "easy"}}
    server.answer = lambda body, number: (200, b'{"rewards": [1, null], "model": "m"}')
    first, second = score(server.url, "a", "b")
    assert first == 1.0
    assert math.isnan(second)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_status_that_may_pass_is_tried_again(server: Server, status: int) -> None:
    server.answer = lambda body, number: (status, b"busy") if number < 2 else (200, b'{"rewards": [0.5]}')
    assert score(server.url, "a") == [0.5]
    assert len(server.asked) == 3
    server.answer = lambda body, number: (status, b"busy")
    with pytest.raises(RewardError, match=f"'train:7': status {status}: 'busy'; attempts made: 4"):
        score(server.url, "a")
    assert len(server.asked) == 7


def test_an_answer_that_is_too_long_is_tried_again_on_a_status_that_may_pass(server: Server) -> None:
    answers = (503, b"x" * (1 << 21)), (200, b'{"rewards": [0.5]}')
    server.answer = lambda body, number: answers[number]
    assert score(server.url, "a") == [0.5]


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (404, b"nothing here", "status 404: 'nothing here'"),
        (302, b"", "status 302"),
        (200, b"<html>", "not JSON: '<html>'"),
        (200, b"[" * 100_000, "not JSON"),
        (200, b"[1.0]", "it must be"),
        (200, b'{"reward": [1.0]}', "it must be"),
        (200, b'{"rewards": [1.0, 2.0]}', "the answer holds 2 rewards for 1 completions"),
        (200, b'{"rewards": ["1"]}', r"rewards\[0\] is '1'; it must be a number or null"),
        (200, b'{"rewards": [true]}', r"rewards\[0\] is True"),
        (200, b'{"rewards": [1' + b"0" * 400 + b"]}", "too large"),
        (200, b" " * (1 << 20) + b"{}", "longer than 1048576 bytes"),
    ],
)
def test_a_bad_answer_is_named_and_not_asked_again(server: Server, status: int, answer: bytes, message: str) -> None:
    server.answer = lambda body, number: (status, answer)
    with pytest.raises(RewardError, match=f"127.0.0.1.*'train:7'.*{message}"):
        score(server.url, "a")
    assert len(server.asked) == 1


def test_a_server_that_does_not_answer_in_time_is_left(server: Server) -> None:
    release = threading.Event()
    server.answer = lambda body, number: (release.wait(10), (200, b'{"rewards": [1]}'))[1]
    with pytest.raises(RewardError, match=r"no answer within reward.http.timeout_seconds=0.05; attempts made: 4"):
        score(server.url, "a", options={"timeout_seconds": 0.05})
    release.set()


def raw(
    serve: Callable[[socket.socket, threading.Event], None], *, times: int
) -> Iterator[tuple[str, threading.Event]]:
    """A server that does ``serve`` with each of ``times`` connections; the event is set once all are closed."""
    closed = threading.Event()

    def work() -> None:
        for _ in range(times):
            with listening.accept()[0] as connection:
                connection.recv(1 << 16)
                serve(connection, closed)
        closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/", closed
        thread.join(30)


def test_a_server_that_drips_is_left_and_its_connection_closed() -> None:
    def drip(connection: socket.socket, closed: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        with contextlib.suppress(OSError):  # the other end closed
            while not closed.wait(0.01):
                connection.sendall(b" ")

    threads = set(threading.enumerate())
    for url, closed in raw(drip, times=4):
        with pytest.raises(RewardError, match=r"no answer within reward.http.timeout_seconds=0.2; attempts made: 4"):
            score(url, "a", options={"timeout_seconds": 0.2})
        assert closed.wait(30)
    assert [t for t in threading.enumerate() if t not in threads and t.name == "reward"] == []


def test_a_broken_answer_is_asked_for_again_and_a_server_named_after_all_attempts() -> None:
    answers = iter([(50, b'{"rewards": [1'), (16, b'{"rewards": [1]}')])

    def serve(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % next(answers))

    for url, _ in raw(serve, times=2):
        assert score(url, "a") == [1.0]
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(RewardError, match=r"ConnectError.*attempts made: 4"):
            score(f"http://127.0.0.1:{held.getsockname()[1]}", "a")


async def test_no_more_requests_are_in_flight_than_allowed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    together, most, full = 0, 0, threading.Barrier(3)

    def answer(body: dict[str, Any], number: int) -> Answer:
        nonlocal together, most
        with server.lock:
            together += 1
            most = max(most, together)
        full.wait(10)  # passes only while three are here
        with server.lock:
            together -= 1
        full.wait(10)
        return 200, b'{"rewards": [1]}'

    server.answer = answer
    monkeypatch.setattr("rl_megatron.rewards.http._SLOTS", 3)
    reward = resolve_reward(server.url)
    assert (await asyncio.gather(*(reward(PROMPT, [DONE], ["a"]) for _ in range(9)))) == [[RewardResult(total=1.0)]] * 9
    assert most == 3


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://", "it names no host"),
        ("http://h:port/", "write it as http://host:port/path"),
        ("http://a b/", "white space"),
    ],
)
def test_a_url_that_cannot_be_asked_is_refused_at_the_start(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(url)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("https://me:hunter2@h/", "user name and password"),
        ("https://hunter2@h/", "user name and password"),
        ("http://h/score?token=hunter2", "token="),
        ("http://h/score?model=x&api_key=hunter2", "api_key="),
        ("http://h/score?X-Amz-Signature=hunter2", "X-Amz-Signature="),
        ("http://h/score#access_token=hunter2", "access_token="),
    ],
)
@pytest.mark.parametrize("key", ["reward.function", "reward.parts.judge.function", "eval.sets.hard.reward.function"])
def test_a_secret_in_an_address_is_refused_before_a_file_has_it(key: str, url: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", [f"{key}={url}"])
    assert str(error.value).startswith(f"reward.function: the address has {named}, and the configuration is in a file")
    assert "name a function of yours (module:function)" in str(error.value)
    with pytest.raises(ValueError, match="the address has") as direct:
        resolve_reward(url)
    assert "hunter2" not in f"{error.value}{direct.value}"


@pytest.mark.parametrize("query", ["model=judge", "keys=3", "author=me", "tokens=4"])
def test_other_parameters_of_an_address_are_taken(query: str) -> None:
    load_config("tiny_cpu", [f"reward.function=http://h/score?{query}"])
