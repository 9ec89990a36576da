"""Bounds the time in which a model's chat template renders, for its loops are the model's own; begins its text once;
sets its variables."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jinja2 import TemplateError, TemplateRuntimeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TemplateValue = bool | int | float | str
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template raises as it renders, and who applies it where of several none is called default."""
SECONDS = 5.0
"""Of processor time; templates take milliseconds, so that a busy machine or a stopped process ends none."""
_BETWEEN_LOOKS = 0.5  # seconds
_TURNS = 100  # of a loop, in the first of which CPython raises what another thread has it raise


class _Late(BaseException):
    """Raised in a thread whose template takes too long; no template can catch it."""


def begun_once(ids: Sequence[int], bos: int | None) -> Sequence[int]:
    """The tokens of a text without the ``bos`` that the tokenizer put before the template's own."""
    return ids[1:] if list(ids[:2]) == [bos, bos] else ids


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, begins: bool) -> list[list[int]]:
    """Tokens of each text; if they begin rows with what the tokenizer puts in front of every text, and without what it
    puts behind (``add_eos_token``), which would end a prompt."""
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=begins)["input_ids"] if texts else []
    if not begins:
        return encoded
    known, plain = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
    room = len(known) - len(plain)
    behind = next((room - at for at in range(room + 1) if known[at : at + len(plain)] == plain), 0)
    return [ids[: len(ids) - behind] for ids in encoded]


def setting(variables: Mapping[str, TemplateValue], template: str, *, unless_given: bool = False) -> str:
    """The template, which sets the ``variables``; ``unless_given`` those that who applies it does not."""
    values = {
        name: f"{name} if {name} is defined else {_literal(value)}" if unless_given else _literal(value)
        for name, value in variables.items()
    }
    return "".join(f"{{% set {name} = {value} %}}" for name, value in values.items()) + template


def _literal(value: TemplateValue) -> str:
    """As Jinja reads it: numbers, true and false as in JSON; a text in quotes, without what Jinja would unescape."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
    return json.dumps(value)


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Have what this thread renders end after `SECONDS`. Raises TemplateRuntimeError then. It is not entered twice.

    One operation of C, as a power of great numbers, is not interrupted.
    """
    thread, watch = threading.get_ident(), _watch
    try:
        watch.begin(thread)
        try:
            yield
        except _Late:
            raise
        except BaseException:
            watch.end(thread)
            raise
        else:
            watch.end(thread)
    except _Late:
        raise TemplateRuntimeError(
            f"it did not end within {SECONDS:g} s of processor time; the model's chat template may loop without end"
        ) from None


class _Watch:
    """The threads that render, and one that looks at their processor time while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._looking = False

    def begin(self, thread: int) -> None:
        """Watch the calling thread."""
        with self._lock:
            self._until[thread] = time.thread_time() + SECONDS
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="chat-templates", daemon=True).start()

    def end(self, thread: int) -> None:
        """Watch the calling thread no longer: the watch raises nothing in it after this. Raises `_Late` if it did.

        To take an exception back by PyThreadState_SetAsyncExc would have CPython 3.11 look for one at each call from
        then on, and for ever at the first call under a profiler.
        """
        with self._lock:
            raised = self._until.pop(thread, None) is None
        if raised:
            for _ in range(_TURNS):
                time.sleep(0)
            raise _Late  # it was raised inside, and code of a template's filters swallowed it

    def _look(self) -> None:
        pause = threading.Event()
        while not pause.wait(_BETWEEN_LOOKS):
            with self._lock:
                self._looking = bool(self._until)
                if not self._looking:
                    return
                for thread, until in list(self._until.items()):
                    if time.clock_gettime(time.pthread_getcpuclockid(thread)) > until:
                        del self._until[thread]
                        _raise_late(thread)


def _raise_late(thread: int) -> None:
    """Raise `_Late` in another thread at its next instruction of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Late))


def _begin_anew() -> None:
    """A child has only the thread that forked it, and a lock as it was then."""
    global _watch
    _watch = _Watch()


_watch = _Watch()
os.register_at_fork(after_in_child=_begin_anew)
