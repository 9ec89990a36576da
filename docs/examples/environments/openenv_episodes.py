"""Environments that servers of the openenv-core package serve, a WebSocket connection a trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from json_server import MOST_BYTES, JsonServer, ServerFailed, check_url

from rl_megatron.environments.protocol import EnvironmentStep, Observation, OpenAIMessage, Reply, Transcript
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.types import Prompt

FIELD = "openenv"  # of a row: the arguments of its reset
_TASKS_LIMIT, _ROOM_LIMIT, _CLOSE_LIMIT = 60.0, 5.0, 1.0  # seconds; the second: until a full server has room
_LARGEST_SEED = 2**31 - 1
_MOST_SAID = 500  # characters of a server's message


class ActionRefused(Exception):
    """What the model wrote is no action of the environment; the text is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a reset or a step answered."""

    text: str
    reward: float | None
    done: bool


class OpenEnv:
    """An episode at ``url``, which is on loopback or behind TLS.

    The model reads the field ``observation`` of what the server answers, or all of it. Where actions have one text
    field, its reply is that; else it calls the tool ``act``, or writes a JSON object: without ``tool`` that alone.
    """

    def __init__(self, url: str, observation: str = "", tool: bool = True) -> None:
        self._tool = tool
        self._session = Session(check_url(url), observation)

    async def start(self, task: Prompt, seed: int) -> Observation:
        """The problem as the row has it, if its row names a seed; else what the server shows of the trajectory's.

        Raises DataError if the server shows another problem than the row has, and ServerFailed.
        """
        arguments = task.meta.get(FIELD)
        if not isinstance(arguments, Mapping):
            raise DataError(f"prompt {task.id!r} has no field {FIELD!r}; write tasks with write_tasks.py")
        await self._session.open()
        seen = await self._session.reset({"seed": seed % _LARGEST_SEED, **arguments})
        same = seen.text in task.text
        if "seed" in arguments and not same:
            raise DataError(
                f"prompt {task.id!r}: the server shows another problem at {dict(arguments)!r:.200} than the row has: "
                f"{seen.text!r:.200}; write the tasks again. An environment that does not heed its seed needs rows "
                "without one"
            )
        tools = self._session.actions.tools if self._tool else ()
        return Observation(content=(task.messages or task.text) if same else seen.text, tools=tools)

    async def step(self, reply: Reply) -> EnvironmentStep:
        """The server's answer to the action; of a reply that is none, why. Raises ServerFailed."""
        try:
            seen = await self._session.step(self._session.actions.read(reply))
        except ActionRefused as refused:
            return EnvironmentStep(observation=_answering(reply, f"error: {refused}"), metrics={"bad_actions": 1.0})
        shown = None if seen.done else _answering(reply, seen.text)
        return EnvironmentStep(observation=shown, reward=seen.reward, metrics={"bad_actions": 0.0})

    async def score(self, transcript: Transcript) -> float:
        """Of an episode that a limit ended before any reward: 0. Raises ServerFailed for one that ended by itself."""
        if transcript.stop == "done":
            raise ServerFailed("the server ended the episode without a reward")
        return 0.0

    async def close(self) -> None:
        """End the episode."""
        await self._session.close()


@dataclass(frozen=True, slots=True)
class ActionForm:
    """How replies become actions: by the JSON schema of the server's."""

    schema: Mapping[str, Any]

    @property
    def _fields(self) -> Mapping[str, Any]:
        fields = self.schema.get("properties")
        return {name: one for name, one in dict(fields or {}).items() if name != "metadata"}  # the base class's

    @property
    def text_field(self) -> str | None:
        """The only field, if it has text."""
        texts = [name for name, one in self._fields.items() if isinstance(one, Mapping) and one.get("type") == "string"]
        return texts[0] if len(self._fields) == len(texts) == 1 else None

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tool that makes an action; none where the reply is one."""
        if self.text_field is not None:
            return ()
        required = [name for name in self.schema.get("required") or () if name in self._fields]
        parameters = {**self.schema, "properties": dict(self._fields), "required": required}
        function = {"name": "act", "description": "Act in the environment.", "parameters": parameters}
        return ({"type": "function", "function": function},)

    def read(self, reply: Reply) -> Mapping[str, Any]:
        """The action; the server checks it against the schema. Raises ActionRefused."""
        calls, text = reply.message.get("tool_calls") or (), str(reply.message.get("content") or "").strip()
        if len(calls) > 1:
            raise ActionRefused(f"{len(calls)} calls in one turn; make one")
        if calls:
            call = calls[0]["function"]
            if call["name"] != "act":
                raise ActionRefused(f"there is no tool {call['name']!r:.80}; call 'act'")
            return dict(json.loads(call["arguments"]))
        if self.text_field is not None:
            return {self.text_field: text}
        written = text[text.find("{") : text.rfind("}") + 1]
        try:
            action = json.loads(written)
        except (ValueError, RecursionError) as error:
            fields = ", ".join(self._fields)
            raise ActionRefused(
                f"the reply has no JSON object with {fields} that can be read ({error!s:.80})"
            ) from error
        return dict(action)


class Session:
    """One connection to a server, and its episodes one after the other."""

    def __init__(self, url: str, observation: str) -> None:
        self._client = _websockets()
        self._url, self._shown = url, observation
        self._socket: Any = None
        self.actions = ActionForm({})

    async def open(self) -> None:
        """Read the schema of actions, and connect. Raises ServerFailed."""
        asked = JsonServer(self._url)
        try:
            schemas = await asked.ask_object("GET", "/schema")
        finally:
            await asked.close()
        if not isinstance(schemas.get("action"), dict):
            raise ServerFailed(f"{self._url}: GET /schema gives no schema of actions: {schemas!r:.200}")
        self.actions = ActionForm(schemas["action"])
        parts = urlsplit(self._url)
        try:
            self._socket = await self._client.connect(
                self._url.replace("http", "ws", 1) + "/ws",
                host=parts.hostname,  # so that it follows no redirect to another
                port=parts.port or (443 if parts.scheme == "https" else 80),
                max_size=MOST_BYTES,
                compression=None,
                proxy=None,
                open_timeout=None,
                ping_interval=None,
                close_timeout=_CLOSE_LIMIT,
            )
        except (OSError, ValueError, self._client.WebSocketException) as error:
            raise ServerFailed(f"{self._url}/ws: {type(error).__name__}: {error!s:.500}") from error

    async def reset(self, arguments: Mapping[str, Any]) -> Seen:
        """Begin an episode; a server that is full may have room within seconds. Raises ServerFailed."""
        until = asyncio.get_running_loop().time() + _ROOM_LIMIT
        while True:
            try:
                seen = await self._exchange("reset", arguments)
            except _Full as full:
                if asyncio.get_running_loop().time() > until:
                    raise ServerFailed(
                        f"{self._url}: {full}, for {_ROOM_LIMIT:g} s; give the server's create_app a "
                        "max_concurrent_envs of all trajectories that are under way at once"
                    ) from full
                await self.close()
                await asyncio.sleep(0.05)
                await self.open()
                continue
            except ActionRefused as refused:
                raise ServerFailed(f"{self._url}: reset with {dict(arguments)!r:.200}: {refused}") from refused
            if seen.done:
                raise ServerFailed(f"{self._url}: reset with {dict(arguments)!r:.200} gives an episode that has ended")
            return seen

    async def step(self, action: Mapping[str, Any]) -> Seen:
        """Act. Raises ActionRefused for what the schema does not allow, and ServerFailed."""
        return await self._exchange("step", action)

    async def close(self) -> None:
        """End the episode, whose room the server has again after that, and the connection."""
        if self._socket is not None:
            with contextlib.suppress(self._client.WebSocketException, OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_LIMIT):
                    await self._socket.send(json.dumps({"type": "close"}))
                    await self._socket.wait_closed()
            await self._socket.close()

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> Seen:
        try:
            with contextlib.suppress(self._client.ConnectionClosed):  # what it said before that is there to read
                await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
            said = await self._socket.recv()
        except self._client.WebSocketException as error:
            raise ServerFailed(f"{self._url}: the connection ended in a {kind}: {error!s:.{_MOST_SAID}}") from error
        except OSError as error:
            raise ServerFailed(f"{self._url}: {kind}: {type(error).__name__}: {error!s:.{_MOST_SAID}}") from error
        try:
            return self._read(json.loads(said))
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ServerFailed(f"{self._url}: {kind} answers what is no observation: {said!r:.200}") from error

    def _read(self, said: Mapping[str, Any]) -> Seen:
        data = said["data"]
        if said["type"] == "error":
            self._refuse(data)
        if said["type"] != "observation" or not isinstance(data["done"], bool):
            raise ValueError("no observation")
        seen, reward = data["observation"], data["reward"]
        if self._shown:
            if self._shown not in seen:
                raise ServerFailed(f"environment.options.observation={self._shown!r:.80}: it has {', '.join(seen)}")
            seen = {self._shown: seen[self._shown]}
        if reward is not None and not isinstance(reward, int | float):
            raise ValueError("no reward")
        one = next(iter(seen.values())) if len(seen) == 1 else seen
        text = one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
        return Seen(text=text, reward=None if reward is None else float(reward), done=data["done"])

    def _refuse(self, data: Mapping[str, Any]) -> None:
        said, code = f"{data.get('message')!s:.{_MOST_SAID}}", data.get("code")
        if code == "CAPACITY_REACHED":
            raise _Full(said)
        if code == "VALIDATION_ERROR":
            errors = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in data["errors"])
            raise ActionRefused(f"{errors:.{_MOST_SAID}}")
        raise ServerFailed(f"{self._url}: {code}: {said}")


class _Full(Exception):
    """The server serves as many episodes as it may."""


def tasks(
    *, url: str, size: int, held_out: int, seed: int = 0, observation: str = "", **arguments: Any
) -> tuple[Iterator[Mapping[str, Any]], Iterator[Mapping[str, Any]]]:
    """Rows of the episodes of ``size`` seeds from ``seed`` on, and of the ``held_out`` seeds after those.

    ``arguments`` go to each reset. Raises ConfigError with what failed.
    """
    address = check_url(url)

    async def shown() -> list[Mapping[str, Any]]:
        session, rows = Session(address, observation), list[Mapping[str, Any]]()
        try:
            async with asyncio.timeout(_TASKS_LIMIT):
                await session.open()
            for one in range(seed, seed + size + held_out):
                asked = {**arguments, "seed": one}
                async with asyncio.timeout(_TASKS_LIMIT):
                    seen = await session.reset(asked)
                rows.append({"question": seen.text, "answer": "(none)", FIELD: asked})
        finally:
            await session.close()
        return rows

    try:
        rows = asyncio.run(shown())
    except (ServerFailed, TimeoutError) as error:
        raise ConfigError(f"{error!s}" or f"{url}: no answer within {_TASKS_LIMIT:g} s") from error
    return iter(rows[:size]), iter(rows[size:])


def _answering(reply: Reply, text: str) -> Observation:
    """The text as the user's message, or as the result of each call."""
    calls: Sequence[OpenAIMessage] = reply.message.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
    return Observation(content=results or text)


def _websockets() -> Any:
    try:
        importlib.import_module("websockets.asyncio.client")
        return importlib.import_module("websockets")
    except ModuleNotFoundError as error:
        raise ConfigError("openenv: the package websockets is not installed; pip install websockets") from error
