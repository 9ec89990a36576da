"""Who gets in, what is refused, and that neither costs a turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

from rl_megatron.rollout.endpoint import bodies, server
from tests.unit.rollout.endpoint.serving import ASK, Saying, Serving, client_of, post


def test_keys_and_bodies_that_are_refused_cost_no_turn(serving: Serving) -> None:
    engine = Saying("fine")
    turns = serving.turns(engine)
    served = url, key = serving.open(turns)
    good = json.dumps({"messages": ASK}).encode()
    for path in ("/health", "/v1/models", "/v1/chat/completions", "/docs"):
        assert post((url, ""), None, path, "GET", Authorization="")[0] == 401
        assert post((url, key[:-1] + ("0" if key[-1] != "0" else "1")), None, path, "GET")[0] == 401
    assert post(served, None, "/health", "GET") == (200, {"status": "ok"})
    assert post(served, None, "/v1/models", "GET")[1]["data"][0]["max_model_len"] == 4000
    assert post(served, good, "/v1/responses")[0] == 404
    assert post(served, None, "/v1/chat/completions", "GET")[0] == 405
    assert post(served, b" " * (33 * 2**20))[0] == 413
    wrong: list[bytes] = [good[:end] for end in range(0, len(good), 2)]
    wrong += [b"\xff\xfe", b"[]", b"null", b'{"messages": []}', b'{"messages": [1]}', b'{"messages": [{"role": 1}]}']
    wrong += [
        b'{"messages": [{"role": "user", "content": %s}]}' % (b"[" * deep + b"]" * deep) for deep in (2000, 10**6)
    ]
    wrong += [
        json.dumps({"messages": ASK, **given}).encode()
        for given in (
            {"n": 2},
            {"stop": ["\n"]},
            {"max_tokens": 0},
            {"tools": "add"},
            {"tool_choice": "required"},
            {"response_format": {"type": "json_object"}},
            {"logprobs": True},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": [{"role": "user", "content": "long " * 5000}]},
        )
    ]
    for body in wrong:
        status, answer = post(served, body)
        assert (status, bool(answer["error"]["message"])) == (400, True), body[:100]
    assert not engine.asked
    assert post(served, good)[0] == 200
    serving.close(key)
    assert post(served, good)[0] == 410
    with pytest.raises(openai.APIStatusError, match="has ended"):
        client_of(served).chat.completions.create(model="policy", messages=ASK)


def test_a_body_or_a_head_that_does_not_arrive_holds_nothing(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_BODY_SECONDS", 0.1)
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.1)
    engine = Saying("fine")
    served = url, key = serving.open(serving.turns(engine))
    parts = urlsplit(url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 99\r\n"
    for sent, answer in ((f'{head}\r\n{{"mess', b"HTTP/1.1 408 "), (head, b"")):
        with socket.create_connection((str(parts.hostname), parts.port), timeout=30) as slow:
            slow.sendall(sent.encode())
            assert slow.recv(13) == answer
    with socket.create_connection((str(parts.hostname), parts.port), timeout=30) as slow:  # after one that was in time
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        with slow.makefile("rb") as said:
            assert said.readline().startswith(b"HTTP/1.1 401 ")
            length = next(int(line.split()[1]) for line in said if line.lower().startswith(b"content-length"))
            assert said.readline() == b"\r\n"
            assert len(said.read(length)) == length
            slow.sendall(b"GET /health HTTP/1.1\r\nHo")
            assert said.read(1) == b""
    assert not engine.asked
    assert post(served, json.dumps({"messages": ASK}).encode())[0] == 200


def test_connections_that_say_nothing_use_up_no_files_and_keep_nobody_out(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a quarter of them one that asks nothing is closed, never one that is being answered."""
    engine = Saying("fine")
    served = url, _ = serving.open(serving.turns(engine))
    address = urlsplit(url).hostname, urlsplit(url).port
    engine.go.clear()
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        stack.callback(engine.go.set)
        answered = pool.submit(post, served, json.dumps({"messages": ASK}).encode())
        while not engine.asked:
            serving.do(asyncio.sleep(0))
        monkeypatch.setattr(resource, "getrlimit", lambda which: (16, 16))
        silent = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(40)]
        assert post(served, None, "/health", "GET") == (200, {"status": "ok"})
        ended = 0
        for stream in silent:
            stream.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                ended += stream.recv(1) == b""
        assert 38 <= ended < 40  # there are four: that of the turn, that of /health, and two of these
        engine.go.set()
        assert answered.result(30)[0] == 200


def test_what_can_be_read_but_is_too_deep_to_be_written_is_refused(serving: Serving) -> None:
    """The deepest that are read leave no room for the template, which writes them from deeper in the stack."""
    statuses = []
    for deep in range(940, 1000, 5):
        nested = b'{"a":' * deep + b"1" + b"}" * deep
        tool = b'{"type": "function", "function": {"name": "f", "parameters": %s}}' % nested
        body = b'{"messages": [{"role": "user", "content": "x"}], "tools": [%s]}' % tool
        served = serving.open(serving.turns(Saying("fine"), str(deep), max_prompt_tokens=100_000))
        statuses.append(post(served, body)[0])
    assert set(statuses) <= {200, 400}, statuses
