"""The errors that cross packages. Each message has the value, the allowed ones and what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from asyncio import Event, TaskGroup

T = TypeVar("T")

GB = 1e9  # bytes
_MOST_SHOWN = 60  # characters of a value
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class RLMegatronError(Exception):
    """Base of every error that is the user's to read; the command line prints it without a traceback."""


class StopRequested(RLMegatronError):
    """A stop was requested before the first step, so there is nothing to save."""


class ConfigError(RLMegatronError, ValueError):
    """A config that cannot run; names every bad key, its value and what is allowed."""


class DataError(RLMegatronError, ValueError):
    """A data file that cannot be used; names the file and the line."""


class RewardError(RLMegatronError):
    """A reward that raised, was late or was not finite; names the prompt id."""


class EnvironmentFailure(RLMegatronError):
    """An environment that raised, was late or gave an invalid answer; names the prompt id and the turn."""


class SandboxError(RLMegatronError):
    """A program of a model that could not be run, or that this machine cannot isolate; says why."""


class EngineError(RLMegatronError):
    """A generation request that an engine cannot serve; names the request id."""


class PoisonPrompt(EngineError):
    """A prompt that no engine survives, or that several refuse; names the request id."""


class CheckpointError(RLMegatronError):
    """A checkpoint that is torn, missing or of another run; names the file."""


class WorkerFailure(RLMegatronError):
    """A worker process ended or raised; carries its rank and traceback."""


class WeightError(RLMegatronError):
    """Weights that do not fit: a missing, unknown or misshapen tensor; names it."""


class SyncError(RLMegatronError):
    """A weight version that did not arrive whole, so it is not served; names version, ranks and what was awaited."""


class AllReplicasLost(SyncError):
    """All engine servers with the new weights died; the weights can be loaded again once a server is back."""


class CorruptionError(SyncError):
    """Weights that a receiver holds otherwise than they were sent; names tensor, box and both ranks.

    The processes are in step and only the data is wrong: a retry of the same sync repairs it.
    """


def quote_start(value: object) -> str:
    """Returns the value's repr, cut to fit a line of a message."""
    return truncate(repr(value), _MOST_SHOWN)


def truncate(text: str, limit: int) -> str:
    """Returns the text, or its start with dots at the end, at most ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def gigabytes(*counts: float) -> list[str]:
    """Returns numbers of bytes as ``1.2 GB``, with decimals until no two of them, and no number and 0, look alike."""
    for digits in range(1, 10):
        texts = [f"{count / GB:,.{digits}f} GB" for count in counts]
        if len({f"{0:.{digits}f} GB", *texts}) == len({0.0, *counts}):
            break
    return texts


def download_hint(folder: Path) -> str:
    """Returns how to download a model, if ``folder`` looks like a name on the hub and is not a folder; or empty."""
    name = str(folder)
    if folder.exists() or not _HUB_NAME.fullmatch(name):
        return ""
    return f"; to download a model of the hub: hf download {name} --local-dir {folder.name}"


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Context of tasks. The first failure ends the other tasks and is raised as itself: callers catch its type."""
    import asyncio  # not at the top: quick commands do not need it

    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed


async def wait_or_stop(stop: Event, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``. If ``stop`` is set first, cancels ``work``, waits for its end and raises
    StopRequested."""
    import asyncio

    task, asked = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            raise StopRequested("stopped before the first step")
        return task.result()
    finally:
        asked.cancel()
        task.cancel()
        await asyncio.wait({task, asked})
        if not task.cancelled():
            task.exception()  # marks an error of the canceled work as retrieved
