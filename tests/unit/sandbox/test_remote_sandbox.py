"""A server that runs programs: what it is sent, what it may answer, and where it may be. The server is a real one."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.reward import SandboxSection
from rl_megatron.errors import ConfigError, SandboxError
from rl_megatron.sandbox.executors import Sandbox
from tests.unit.rewards.test_http_reward import Server, server

__all__ = ["server"]  # the fixture
DONE = {"ended": "done", "exit": 0, "stdout": "3\n", "stderr": "", "seconds": 0.1}


def run(server: Server, **keys: Any) -> Any:
    return asyncio.run(Sandbox(SandboxSection(type="remote", url=server.url, **keys)).run("print(1+2)", stdin="in"))


def test_it_posts_the_program_with_its_limits_and_token(server: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("t0ken\n")
    server.answers = [(200, json.dumps(DONE).encode())]
    ran = run(server, token_file=token, seconds=2.0)
    assert (ran.ended, ran.exit, ran.stdout) == ("done", 0, "3\n")
    ((_, body),) = server.asked
    assert server.authorized == ["Bearer t0ken"]
    assert body == {
        "argv": None,
        "stdin": base64.b64encode(b"in").decode(),
        "files": {"main.py": base64.b64encode(b"print(1+2)").decode()},
        "limits": {
            "seconds": 2.0,
            "cpu_seconds": 2.0,
            "memory_bytes": 1 << 30,
            "processes": 16,
            "output_bytes": 1 << 16,
            "files_bytes": 1 << 26,
        },
    }


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those between attempts, which take no time."""
    seconds = list[float]()

    async def sleep(each: float) -> None:
        seconds.append(each)

    monkeypatch.setattr("rl_megatron.http.client.asyncio.sleep", sleep)
    return seconds


def test_a_busy_server_is_asked_again(server: Server, waits: list[float]) -> None:
    server.answers = [(503, b"busy"), (429, b""), (200, json.dumps(DONE).encode())]
    assert run(server).stdout == "3\n"
    assert waits == [0.5, 1.0]
    server.answers = [(500, b"broken")] * 7
    with pytest.raises(SandboxError, match=r"status 500: 'broken'; attempts made: 7"):
        run(server)
    assert waits[2:] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_server_that_is_away_is_waited_for(waits: list[float]) -> None:
    with Server() as one:
        url = one.url
    section = SandboxSection(type="remote", url=url)
    with pytest.raises(SandboxError, match=r"ConnectError.*attempts made: 7"):
        asyncio.run(Sandbox(section).run("print(1+2)"))
    assert sum(waits) == 31.5


@pytest.mark.parametrize("refusal", [401, 403])
def test_a_token_that_rotates_is_read_for_each_attempt(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("old")
    steps = ["", "new"]  # who rotates it truncates the file, then writes

    async def sleep(seconds: float) -> None:
        token.write_text(steps.pop(0))

    monkeypatch.setattr("rl_megatron.http.client.asyncio.sleep", sleep)
    server.answers = [(refusal, b"who?"), (200, json.dumps(DONE).encode())]
    assert run(server, token_file=token).stdout == "3\n"
    assert server.authorized == ["Bearer old", "Bearer new"]
    monkeypatch.setattr("rl_megatron.sandbox.executors._RETRIES", 0)
    server.answers = [(refusal, b"who?")]
    refused = f"{server.url}: status {refusal}: 'who?'; it refuses the token of sandbox.token_file={token}: "
    with pytest.raises(SandboxError, match=f"{re.escape(refused)}.*made: 1"):
        run(server, token_file=token)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"no", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no JSON object"),
        ({"ended": "fine"}, "must be one of done, time"),
        ({"exit": None}, "exit is None with ended=done"),
        ({"exit": True}, "exit is True with ended=done"),
        ({"ended": "time"}, "exit is 0 with ended=time"),
        ({"stdout": 1}, "must be texts"),
        ({"stderr": "x" * 70_000}, "at most 65536 characters"),
        ({"seconds": float("nan")}, "seconds is nan"),
        (b'"' + b"x" * (1 << 20) + b'"', "the answer is longer than"),
    ],
)
def test_an_answer_of_another_form_is_named(server: Server, answer: bytes | dict[str, Any], said: str) -> None:
    whole = answer if isinstance(answer, bytes) else json.dumps({**DONE, **answer}).encode()
    server.answers = [(200, whole)]
    with pytest.raises(SandboxError, match=said):
        run(server)
    assert len(server.asked) == 1


def test_an_answer_that_is_too_long_is_refused_whatever_its_status(server: Server) -> None:
    server.answers = [(500, b"x" * (1 << 20))]
    with pytest.raises(SandboxError, match="the answer is longer than"):
        run(server)
    assert len(server.asked) == 1


def test_a_refusal_without_a_token_is_not_repeated(server: Server) -> None:
    server.answers = [(401, b"who?")]
    with pytest.raises(SandboxError, match="status 401: 'who"):
        run(server)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"type": "remote", "url": "http://elsewhere/run"}, "in the clear"),
        ({"type": "remote", "url": "http://127.0.0.1.evil.org/run"}, "in the clear"),
        ({"type": "remote", "url": "https://me:secret@elsewhere/run"}, "password.*sandbox.token_file"),
        ({"type": "remote", "url": "https://elsewhere/run?key=x"}, "the address has key=, and"),
        ({"type": "remote", "url": "file:///etc/passwd"}, "write it as https"),
    ],
)
def test_addresses_that_do_not_fit_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SandboxSection(**keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["type=remote"], r"type=remote with sandbox\.url=null: the run posts programs to a server; set its address"),
        (["url=https://elsewhere/run"], "url=https://elsewhere/run does nothing: with sandbox.type=subprocess"),
        (["type=remote", "url=https://elsewhere/run", "allow_unfenced=true"], "allow_unfenced=true does nothing: with"),
        (["token_file=/tmp/x"], "token_file=/tmp/x does nothing: with sandbox.type=subprocess programs run"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", ["reward.function=tests", *(f"sandbox.{key}" for key in keys)])


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t")
    path.chmod(0o644)
    keys = SandboxSection(type="remote", url="https://elsewhere/run", token_file=path)
    with pytest.raises(ConfigError, match="others can read it"):
        Sandbox(keys)
    path.chmod(0o600)
    Sandbox(keys)
    path.write_text("two\nlines")
    with pytest.raises(ConfigError, match="holds no token"):
        Sandbox(keys)
