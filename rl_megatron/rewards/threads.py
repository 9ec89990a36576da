"""Runs reward functions off the event loop: blocking ones in threads, the user's ``async`` ones on a separate loop.

Threads that compute in Python take turns with the event loop's thread, and many would starve it: with 64 it runs only
every half second (bench/reward_threads.py). So only a few threads compute at a time, and any number may wait.

Custom functions return numbers, or with ``reward.steps`` steps of completions, which are checked. Functions written
for TRL are called with its parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import operator
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set, Sized
from functools import cache
from itertools import islice, pairwise
from math import fsum
from typing import Any, SupportsIndex, TypeVar
from weakref import WeakKeyDictionary

from rl_megatron.errors import RewardError
from rl_megatron.files import parse
from rl_megatron.rewards.scoring import ABSTAINS, paused_while_queued
from rl_megatron.types import Completion, Prompt, RewardResult
from rl_megatron.user_code import describe_error

T = TypeVar("T")

MAX_COMPUTING_THREADS = 2  # threads: besides one that computes without Python's lock, one with it can run
_LOOK_SECONDS = 0.02
_COMPUTES = 0.1  # the share of a processor that a computing thread uses or waits for
_IDLE_LOOKS = 10  # looks after which an idle thread counts as waiting although another computes
_MOST_AT_ONCE = 64  # the most threads that are started between two looks, after all were seen to wait


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Runs ``call`` in its own thread, once fewer than ``MAX_COMPUTING_THREADS`` others compute. Exceptions that would
    end an event loop become a RewardError.

    A cancellation stops the waiting, not the thread, which no longer counts. It is a daemon, unlike the threads of
    ``asyncio.to_thread``: a reward that never returns must not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():  # canceled in the meantime
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None itself

    def work() -> None:
        try:
            outcome: tuple[T | None, Exception | None] = (call(), None)
        except BaseException as error:  # noqa: BLE001  raised again where it is awaited
            outcome = (None, _passable(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    thread = threading.Thread(target=work, name="reward", daemon=True)
    places = _places.setdefault(loop, _Places())
    try:
        with paused_while_queued():
            await places.enter(thread)
        return await future
    finally:
        places.leave(thread)


class _Places:
    """Admits threads of one event loop."""

    def __init__(self) -> None:
        self._running: dict[threading.Thread, _Use] = {}
        self._waiting: deque[tuple[threading.Thread, asyncio.Future[None]]] = deque()
        self._look: asyncio.TimerHandle | None = None
        self._places, self._enough = MAX_COMPUTING_THREADS, 1

    async def enter(self, thread: threading.Thread) -> None:
        """Starts the thread, after those that came before it."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((thread, admitted))
        self._admit()
        await admitted

    def leave(self, thread: threading.Thread) -> None:
        """Forgets a thread that has ended, or that no caller waits for."""
        self._running.pop(thread, None)
        self._admit()

    def _admit(self) -> None:
        computing = sum(use.idle < self._enough for use in self._running.values())
        while self._waiting and computing < self._places:
            thread, admitted = self._waiting.popleft()
            if admitted.done():  # canceled
                continue
            thread.start()
            self._running[thread] = _Use(thread)
            admitted.set_result(None)
            computing += 1
        if self._waiting and self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._measure)

    def _measure(self) -> None:
        self._look = None
        for use in self._running.values():
            use.look()
        active = any(not use.idle for use in self._running.values())
        self._enough = _IDLE_LOOKS if active else 1
        self._places = MAX_COMPUTING_THREADS if active else min(2 * self._places, _MOST_AT_ONCE)
        self._admit()


class _Use:
    """A thread's use of processors. It computes while it runs or waits for a processor, by the kernel's account.

    A thread that waits for Python's lock looks idle, too, but then another computes.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self.idle = 0  # number of idle looks in a row
        self._file = f"/proc/self/task/{thread.native_id}/schedstat"
        self._at, self._used = time.monotonic_ns(), 0

    def look(self) -> None:
        """Adds 1 to ``idle`` if the thread has not computed since the last look, otherwise sets it to 0."""
        now = time.monotonic_ns()
        try:
            with open(self._file) as file:
                used = sum(map(int, file.read().split()[:2]))  # nanoseconds on a processor, and in its queue
        except OSError:  # it has ended, or this kernel has no account: then no thread counts
            used = self._used
        self.idle = 0 if used - self._used >= _COMPUTES * (now - self._at) else self.idle + 1
        self._at, self._used = now, used


_places: WeakKeyDictionary[asyncio.AbstractEventLoop, _Places] = WeakKeyDictionary()


async def on_reward_loop(call: Callable[[], Coroutine[None, None, T]]) -> T:
    """Runs the coroutine of ``call`` on the event loop of a daemon thread that all ``async`` rewards share.

    A cancellation stops the waiting immediately and cancels the coroutine without waiting for its end. A coroutine that
    blocks or exits delays only other ``async`` rewards.
    """

    async def outcome() -> tuple[T | None, Exception | None]:
        try:
            return await call(), None
        except BaseException as error:  # noqa: BLE001  raised again where it is awaited
            return None, _passable(error)

    running = asyncio.run_coroutine_threadsafe(outcome(), _reward_loop())
    result, error = await asyncio.wrap_future(running)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T may be None itself


def _passable(error: BaseException) -> Exception:
    """Returns the error, or a RewardError if a future cannot hold it or if it would end the awaiting task."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RewardError(describe_error(error))


@cache
def _reward_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def turn() -> None:
        while not loop.is_closed():
            with contextlib.suppress(BaseException):  # the user's task may exit
                loop.run_forever()

    threading.Thread(target=turn, name="rewards' loop", daemon=True).start()
    return loop


class Plain:
    """Runs a plain function in a thread. Its exceptions become RewardErrors with their type and text."""

    def __init__(
        self, function: Callable[[Prompt, Sequence[Completion], Sequence[str]], object], *, steps: bool = False
    ) -> None:
        self._function, self._steps = function, steps

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[RewardResult]:
        """Calls the function in a daemon thread."""

        def call() -> Sequence[RewardResult]:
            try:
                return scored(self._function(prompt, completions, texts), texts, steps=self._steps)
            except BaseException as error:
                raise RewardError(describe_error(error)) from error

        return await run_in_daemon_thread(call)


class Async:
    """Runs an ``async`` function on a separate event loop. Its exceptions become RewardErrors, too."""

    def __init__(
        self,
        function: Callable[[Prompt, Sequence[Completion], Sequence[str]], Awaitable[object]],
        *,
        steps: bool = False,
    ) -> None:
        self._function, self._steps = function, steps

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[RewardResult]:
        """Awaits the function on the separate event loop."""

        async def call() -> Sequence[RewardResult]:
            try:
                return scored(await self._function(prompt, completions, texts), texts, steps=self._steps)
            except BaseException as error:
                raise RewardError(describe_error(error)) from error

        return await on_reward_loop(call)


def scored(given: object, texts: Sequence[str], *, steps: bool = False) -> tuple[RewardResult, ...]:
    """Checks that a function returned a number for each text (NaN and infinity count), or None to abstain; reads at
    most one more. With ``steps``, the (end, reward) pairs of a text's steps may replace a number, which is their sum.

    Raises RewardError that names the wrong value, and any exception of converting a value to float.
    """
    wanted, count = "it must return a list with one number for each completion", len(texts)
    wanted += ", or a list of its steps' (end, reward)" if steps else ""
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Iterable):
        raise RewardError(f"returned {_a(given)}; {wanted}")
    rewards = []
    for i, value in enumerate(islice(given, count + 1)):
        if isinstance(value, str | bytes):
            raise RewardError(f"returned {_a(value)} for completion {i}; {wanted}")
        if not isinstance(value, list | tuple):
            rewards.append(ABSTAINS if value is None else RewardResult(total=float(value)))
        elif steps:
            rewards.append(_step_results(value, i, texts))
        else:
            raise RewardError(
                f"returned {_a(value)} for completion {i}; {wanted}. Steps are read with reward.steps=true"
            )
    if len(rewards) != count:
        many = len(given) if isinstance(given, Sized) else f"more than {count}" if rewards[count:] else len(rewards)
        raise RewardError(f"returned {many} rewards for {count} completions; it must return one for each")
    return tuple(rewards)


def _step_results(given: Sequence[object], index: int, texts: Sequence[str]) -> RewardResult:
    found = []
    for step in given:
        if not isinstance(step, list | tuple) or len(step) != 2 or not isinstance(step[0], SupportsIndex):
            raise RewardError(f"returned {_a(step)} as a step of completion {index}; it must be (end, reward)")
        found.append((operator.index(step[0]), float(step[1])))
    length = len(texts[index]) if index < len(texts) else 0
    ends = [0, *(end for end, _ in found)]
    if not found or ends[-1] > length or any(a >= b for a, b in pairwise(ends)):
        raise RewardError(
            f"returned steps of completion {index} that end at {ends[1:]!s:.80}; there must be one at least, and ends "
            f"must ascend, from 1 to the {length} characters of its text"
        )
    return RewardResult(total=fsum(reward for _, reward in found), steps=tuple(found))


def _a(value: object) -> str:
    """Describes a value: None, or the type and the beginning of a text."""
    shown = f" {value[:40]!r}" if isinstance(value, str | bytes) else ""
    return "None" if value is None else f"a {type(value).__name__:.80}{shown}"


_GIVEN = ("prompts", "completions", "completion_ids")
_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")  # TRL's trainer passes these


def is_trl(function: Callable[..., object]) -> bool:
    """True if the function takes ``completions`` and the row's columns, but no ``texts``, as TRL calls it."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions written in C
        return False
    return "completions" in names and "texts" not in names and ("prompts" in names or names[0] == "completions")


def as_trl(function: Callable[..., Any]) -> Callable[[Prompt, Sequence[Completion], Sequence[str]], Any]:
    """Returns a function of prompt, completions and texts that calls ``function`` with TRL's keywords.

    Prompts and completions are texts, or lists of messages if the row's prompt is one. Each field of the row is a list
    of its value, once for each completion. The answer has the name ``answer``, or that of the one parameter that the
    row does not have. Raises RewardError for other parameters that have no value.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    named = {one.name: one.default is one.empty for one in parameters if one.kind.name[:3] != "VAR"}

    def call(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> Any:
        messages = _messages(prompt)
        said = [[{"role": "assistant", "content": text}] for text in texts] if messages else list(texts)
        asked = messages or prompt.question or prompt.text
        columns = {name: value for name, value in prompt.meta.items() if name not in _GIVEN}
        missing = [one for one, is_needed in named.items() if is_needed and one not in (*_GIVEN, *columns)]
        answer = "answer" if "answer" in missing or not missing else missing[0]
        if missing not in ([], [answer]) or answer in _TRAINER:
            missing = [one for one in missing if one != "answer"]
            raise RewardError(
                f"its parameters {', '.join(missing)} are not fields of the row, which has "
                f"{', '.join(sorted({*columns, 'answer'}))}; name these, or take prompt, completions, texts"
            )
        columns = {"answer": prompt.answer, **columns, **dict.fromkeys(missing, prompt.answer)}
        given = {name: [value] * len(texts) for name, value in columns.items()}
        given |= {"prompts": [asked] * len(texts), "completions": said}
        given["completion_ids"] = [completion.token_ids.tolist() for completion in completions]
        return function(**{name: value for name, value in given.items() if takes_all or name in named})

    return call


def _messages(prompt: Prompt) -> list[Any]:
    """Returns the messages of the row's prompt; empty if it is a text."""
    try:
        found = parse(prompt.question) if prompt.question.startswith("[{") else []
    except ValueError:
        return []
    is_messages = isinstance(found, list) and all(isinstance(one, dict) and "role" in one for one in found)
    return found if is_messages else []
