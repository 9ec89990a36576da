"""Rows of NeMo-Gym, whose tools and rewards a resources server of its own gives over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from json_server import JsonServer, ServerFailed, check_url

from rl_megatron.environments.protocol import EnvironmentStep, Observation, OpenAIMessage, Reply, Transcript
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.types import Prompt

FIELD = "nemo_gym"  # of a row: the row of NeMo-Gym as it is
_OWN_ROUTES = frozenset({"seed_session", "verify", "aggregate_metrics", "mcp"})


class NemoGym:
    """A session at the resources server ``url``, which is on loopback or behind TLS.

    Calls of the row's tools are requests to it; a reply without a call ends the trajectory, and the server verifies
    what was said, however it ended.
    """

    def __init__(self, url: str) -> None:
        self._url = check_url(url)
        self._server: JsonServer | None = None
        self._row: Mapping[str, Any] = {}
        self._tools: frozenset[str] = frozenset()

    async def start(self, task: Prompt, seed: int) -> Observation:
        """The messages and tools of the row. Raises DataError for what it has besides, and ServerFailed."""
        row = task.meta.get(FIELD)
        if not isinstance(row, Mapping):
            raise DataError(f"prompt {task.id!r} has no field {FIELD!r}; write tasks with write_tasks.py")
        try:
            messages, tools = _messages(row["responses_create_params"]), _tools(row["responses_create_params"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"prompt {task.id!r}: {FIELD}: {type(error).__name__}: {error!s:.300}") from error
        self._row, self._tools = row, frozenset(tool["function"]["name"] for tool in tools)
        self._server = JsonServer(self._url)
        begun = await self._server.ask_object("POST", "/seed_session", dict(row))
        if "mcp" in begun:
            raise ServerFailed(f"{self._url}: its tools are called over MCP; only those that are routes can be")
        return Observation(content=messages, tools=tools)

    async def step(self, reply: Reply) -> EnvironmentStep:
        """What each call answers, also that it failed; without a call the end. Raises ServerFailed."""
        calls = reply.message.get("tool_calls") or ()
        if not calls:
            return EnvironmentStep()
        assert self._server is not None
        results, failed = list[OpenAIMessage](), 0
        for call in calls:
            name = call["function"]["name"]
            if name in self._tools:
                status, said = await self._server.ask("POST", f"/{name}", json.loads(call["function"]["arguments"]))
            else:
                status, said = 404, f"error: there is no tool {name!r:.80}; there are {', '.join(sorted(self._tools))}"
            failed += status != 200
            results.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        return EnvironmentStep(
            observation=Observation(content=results),
            metrics={"tool_calls": float(len(calls)), "tool_errors": float(failed)},
        )

    async def score(self, transcript: Transcript) -> float:
        """The server's reward for the transcript. Raises ServerFailed."""
        if self._server is None:
            raise ServerFailed(f"{self._url}: no session was begun")
        given = self._row["responses_create_params"]
        begun = len(_messages(given))
        response = {
            "id": "response",
            "created_at": 0,
            "model": "policy",
            "object": "response",
            "output": _output(transcript.messages[begun:]),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],  # which the row has
            "incomplete_details": None if transcript.stop == "done" else {"reason": "max_output_tokens"},
        }
        said = await self._server.ask_object("POST", "/verify", {**self._row, "response": response})
        reward = said.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ServerFailed(f"{self._url}/verify: its reward is {reward!r:.80}; it must be a number")
        return reward

    async def close(self) -> None:
        """Close the connection."""
        if self._server is not None:
            await self._server.close()


def tasks(*, path: str, held_out: int) -> tuple[Iterator[Mapping[str, Any]], Iterator[Mapping[str, Any]]]:
    """Rows of a file of NeMo-Gym, and the last ``held_out`` of them.

    Raises ConfigError that names a line with what cannot be played.
    """
    rows = list[Mapping[str, Any]]()
    try:
        lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"path={path!r:.200}: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            given = row["responses_create_params"]
            messages, _ = _messages(given), _tools(given)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: {type(error).__name__}: {error!s:.300}") from error
        question = "\n".join(str(one["content"]) for one in messages)
        rows.append({"question": question, "answer": "(none)", FIELD: row})
    if not 0 < held_out < len(rows):
        raise ConfigError(f"{path} has {len(rows)} rows; held_out={held_out} must be from 1 to {len(rows) - 1}")
    return iter(rows[: len(rows) - held_out]), iter(rows[len(rows) - held_out :])


def _messages(given: Mapping[str, Any]) -> list[OpenAIMessage]:
    """What the model reads first. Raises ValueError for items that are no messages of text."""
    begins, asked = given.get("instructions"), given["input"]
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    said: list[OpenAIMessage] = [{"role": "system", "content": begins}] if begins else []
    for item in items:
        role, kind = item.get("role"), item.get("type", "message")
        if kind != "message" or role not in ("system", "developer", "user"):
            raise ValueError(f"input has a {kind} of the role {role}; messages of system, developer and user alone")
        said.append({"role": "system" if role == "developer" else role, "content": _text(item["content"])})
    if not said:
        raise ValueError("input is empty")
    return said


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("input has content that is no text")
    return "".join(map(str, texts))


def _tools(given: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The tools as chat templates have them. Raises ValueError for those that are no functions of the server."""
    found = []
    for tool in given.get("tools") or ():
        if tool.get("type") != "function" or not str(tool.get("name")).isidentifier() or tool["name"] in _OWN_ROUTES:
            raise ValueError(f"tools has {tool!r:.200}, which is no function of a server")
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    return tuple(found)


def _output(messages: Sequence[OpenAIMessage]) -> list[Mapping[str, Any]]:
    """The items of a response. Ids of calls are numbers in order, as the same call may be made twice."""
    items, called, answered = list[Mapping[str, Any]](), count(), count()
    for place, message in enumerate(messages):
        text = message.get("content") or ""
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": f"call_{next(answered)}", "output": text})
            continue
        if message["role"] != "assistant":  # why a call cannot be read
            items.append({"type": "message", "role": "user", "content": text})
            continue
        if thought := message.get("reasoning_content"):
            summary = [{"type": "summary_text", "text": thought}]
            items.append({"type": "reasoning", "id": f"reasoning_{place}", "summary": summary})
        calls = message.get("tool_calls") or ()
        if text or not calls:
            content = [{"type": "output_text", "text": text, "annotations": list[str]()}]
            items.append(
                {
                    "type": "message",
                    "id": f"message_{place}",
                    "role": "assistant",
                    "status": "completed",
                    "content": content,
                }
            )
        items += [{"type": "function_call", "call_id": f"call_{next(called)}", **call["function"]} for call in calls]
    return items
