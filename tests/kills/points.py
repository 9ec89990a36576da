"""Kills a run at a named call of its own code, which is as it always is: a fork wraps the call before the run begins.

A `Point` in a fork (tests/e2e/forked.py) sends SIGKILL to the controller itself, so that nothing is cleaned up:
the servers and ranks are left to their guards, as after ``kill -9``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.rollout.stream import Ledger
from rl_megatron.training.update import PolicyUpdate

KILLED, TRAINED = "killed.jsonl", "trained.jsonl"


@dataclass(frozen=True, kw_only=True)
class Point:
    """The moment at which a run is killed: before or ``after`` the ``nth`` call of a function in its process. ``call``
    is module:function, as the caller knows it. ``torn``: the ledger loses its last bytes first, as when the kill comes
    in the middle of a write."""

    name: str
    call: str
    nth: int = 1
    after: bool = False
    torn: bool = False


@dataclass(frozen=True, kw_only=True)
class After:
    """A kill ``seconds`` after the run made its ledger, which it does once servers and ranks are there."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Witness:
    """What a fork does before its run begins: it arms the ``point``, if there is one, and notes in ``folder`` what the
    learner is given to train on (`TRAINED`), and where the kill found the run (`KILLED`)."""

    folder: Path
    point: Point | After | None = None

    def __call__(self) -> None:
        self._note_what_is_trained()
        ledgers = self._ledgers()
        if isinstance(self.point, Point):
            at(self.point, functools.partial(self._die, ledgers))

    def _note_what_is_trained(self) -> None:
        trained = PolicyUpdate.__call__

        async def noting(update: PolicyUpdate, groups: Any, step: int, watch: Any) -> Any:
            _append(self.folder / TRAINED, {"step": step, "prompts": [group.prompt.id for group in groups]})
            return await trained(update, groups, step, watch)

        setattr(PolicyUpdate, "__call__", noting)  # noqa: B010  an assignment is none of mypy's

    def _ledgers(self) -> list[Ledger]:
        """The run's own ledger, once it is made."""
        made, init = list[Ledger](), Ledger.__init__

        def remembering(ledger: Ledger, path: Path | None = None) -> None:
            init(ledger, path)
            if path is None:
                return
            made.append(ledger)
            if isinstance(self.point, After):
                timer = threading.Timer(self.point.seconds, self._die, [made])
                timer.daemon = True
                timer.start()

        setattr(Ledger, "__init__", remembering)  # noqa: B010
        return made

    def _die(self, ledgers: list[Ledger]) -> None:
        assert self.point is not None
        counts = ledgers[0].row() if ledgers else {}
        if isinstance(self.point, Point) and self.point.torn:
            (path,) = self.folder.glob("runs/*/ledger.jsonl")
            os.truncate(path, path.stat().st_size - 7)
        _append(self.folder / KILLED, {"point": self.point.name, **counts})
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # in a thread the signal may take a moment


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def function_of(call: str) -> tuple[Any, str, Callable[..., Any]]:
    """What a point's ``call`` names: its module or class, its name there, and itself. Raises AttributeError."""
    module, _, names = call.partition(":")
    *path, name = names.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    return owner, name, getattr(owner, name)


def ctrl_c_at(point: Point) -> None:
    """Send SIGINT to this process and those that it starts, as a terminal does, at the point."""
    at(point, lambda: os.killpg(os.getpgrp(), signal.SIGINT))


def at(point: Point, act: Callable[[], None]) -> None:
    """Have the point's function count its calls and ``act``."""
    (owner, name, real), calls = function_of(point.call), 0

    def now() -> bool:
        nonlocal calls
        calls += 1
        return calls == point.nth

    def begin() -> bool:
        """Whether this call's end is the moment."""
        moment = now()
        if moment and not point.after:
            act()
        return moment and point.after

    if inspect.iscoroutinefunction(real):

        @functools.wraps(real)
        async def waiting(*given: Any, **named: Any) -> Any:
            chosen = begin()
            result = await real(*given, **named)
            if chosen:
                act()
            return result

        setattr(owner, name, waiting)
    else:

        @functools.wraps(real)
        def calling(*given: Any, **named: Any) -> Any:
            chosen, result = begin(), real(*given, **named)
            if chosen:
                act()
            return result

        setattr(owner, name, calling)
