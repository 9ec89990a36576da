"""Runs environments of the verifiers package in the interpreter that has it, as verifiers_episodes.py asks on standard
input: a line of JSON for each call, and one for each answer. Of this project it imports nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from typing import Any


class FirstApi:
    """An environment of ``verifiers.load_environment``, up to 0.1."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        import verifiers

        self._made = verifiers.load_environment(name, **args)
        self._rows = self._made.get_dataset()

    def tasks(self, count: int) -> list[dict[str, str]]:
        """The first ``count`` tasks, or all."""
        rows = self._rows.select(range(min(count, len(self._rows)))).to_list()
        return [{"question": _text(row["prompt"]), "answer": str(row.get("answer") or "")} for row in rows]

    async def play(self, index: int, base_url: str, key: str) -> dict[str, Any]:
        """Reward and metrics of a task; ``key``: the environment variable with the model's key."""
        from verifiers.types import ClientConfig

        client = ClientConfig(api_base_url=base_url, api_key_var=key, max_retries=2)
        played = await self._made.run_rollout(self._rows[index], client, "policy", {})
        if played.get("error"):
            raise RuntimeError(str(played["error"])[:1000])
        return {"reward": played["reward"], "metrics": played.get("metrics") or {}}


class SecondApi:
    """An ``Env`` of ``verifiers.v1``, from 0.2 on; ``args`` are its configuration, without the task set's id."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        config = {**args, "taskset": {**args.get("taskset", {}), "id": name}}
        self._made = load_environment(resolve_env_config(config))
        self._tasks: list[Any] = []
        self._coming = iter(self._made.taskset)
        self._serving: contextlib.AsyncExitStack | None = None
        self._opening = asyncio.Lock()

    def tasks(self, count: int) -> list[dict[str, str]]:
        """The first ``count`` tasks, or all."""
        self._read(count)
        return [{"question": _text(one.data.prompt), "answer": ""} for one in self._tasks[:count]]

    async def play(self, index: int, base_url: str, key: str) -> dict[str, Any]:
        """Reward and metrics of a task; ``key``: the environment variable with the model's key."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        async with self._opening:
            if self._serving is None:
                self._serving = contextlib.AsyncExitStack()
                await self._serving.enter_async_context(self._made.serving())
        self._read(index + 1)
        client = EvalClientConfig(base_url=base_url, api_key_var=key)
        episode = await self._made.run_episode(self._tasks[index], ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(str(error) for error in errors)[:1000])
        if len(episode.traces) != 1:
            raise RuntimeError(f"{len(episode.traces)} agents played in one episode; one alone can be trained")
        return {"reward": episode.traces[0].reward, "metrics": episode.traces[0].metrics}

    def _read(self, count: int) -> None:
        while len(self._tasks) < count and (one := next(self._coming, None)) is not None:
            self._tasks.append(one)


@functools.cache
def loaded(name: str, args: str) -> FirstApi | SecondApi:
    """The environment, made once."""
    import verifiers

    return (FirstApi if hasattr(verifiers, "load_environment") else SecondApi)(name, json.loads(args))


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    parts = (one["content"] if isinstance(one, dict) else one.content for one in prompt or ())
    return "\n".join(part for part in parts if isinstance(part, str))


async def answered(asked: dict[str, Any]) -> dict[str, Any]:
    """What one call gets."""
    key = f"RL_MEGATRON_KEY_{asked['call']}"
    try:
        made = loaded(asked["id"], json.dumps(asked["args"], sort_keys=True))
        if "count" in asked:
            return {"tasks": made.tasks(asked["count"])}
        os.environ[key] = asked["api_key"]
        said = await made.play(asked["index"], asked["base_url"], key)
        json.dumps(said)  # raises here for what is no JSON
        return said
    except BaseException as error:  # noqa: BLE001  of the user's code
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    finally:
        os.environ.pop(key, None)


async def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what environments print is no answer
    lines, running = asyncio.StreamReader(limit=1 << 24), dict[int, asyncio.Task[dict[str, Any]]]()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    def answer(call: int, task: asyncio.Task[dict[str, Any]]) -> None:
        said = {"error": "CancelledError"} if task.cancelled() else task.result()  # before it began
        running.pop(call, None)
        answers.write(json.dumps({"call": call, **said}) + "\n")
        answers.flush()

    while line := await lines.readline():
        asked = json.loads(line)
        if "cancel" in asked:
            if (task := running.get(asked["cancel"])) is not None:
                task.cancel()
        else:
            task = running[asked["call"]] = asyncio.create_task(answered(asked))
            task.add_done_callback(functools.partial(answer, asked["call"]))
    os._exit(0)  # whatever still runs


if __name__ == "__main__":
    del sys.path[0]  # its own folder, where a file has the package's name
    asyncio.run(main())
