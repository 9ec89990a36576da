"""Record, in every Python process of a run, which files hold a sample or a weight box, for bench.walk.

It is copied as ``sitecustomize.py`` to the front of PYTHONPATH, so it works for trees without bench, and it imports
only the standard library. Each line written is a JSON list: time in ns (of the machine, for all processes), process,
rank or null, file, function, call or return, and the ids of the generation requests held.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SAMPLE = {
    *("Prompt", "GenerationRequest", "Completion", "Turn", "TokenSequence", "Trajectory"),
    *("RolloutGroup", "RolloutBatch", "Draw", "GroupResult", "_Scored", "Samples", "ScoredSamples", "Batch"),
    *("PackedMicroBatch", "LossInputs"),
}
BOX = {"Tensor", "Parameter", "WeightUpdate"}  # and every class of rl_megatron.weights
_DEEP, _FIRST = 4, 4  # how far into containers, and at how many of their elements, is looked
_START = 0  # RESUME's argument where a generator or a coroutine begins

_tree = os.environ.get("WALK_TREE", "")
_rooms = (f"{_tree}/rl_megatron/", f"{_tree}/launcher/")
_boxes = os.environ.get("WALK_OF") == "box"
_known: dict[CodeType, tuple[str, tuple[str, ...], bytes | None] | None] = {}
_out: dict[str, Any] = {"pid": None, "file": None, "last": None, "rank": None}


def _carries(value: object) -> bool:
    kind = type(value)
    if _boxes:
        return kind.__name__ in BOX or kind.__module__.startswith("rl_megatron.weights")
    return kind.__name__ in SAMPLE and kind.__module__.startswith(("rl_megatron", "launcher"))


def _carriers(value: object, deep: int = _DEEP) -> Iterator[object]:
    if _carries(value):
        yield value
    elif deep and isinstance(value, (tuple, list, dict)):
        for one in list(value.values() if isinstance(value, dict) else value[:_FIRST])[:_FIRST]:
            yield from _carriers(one, deep - 1)


def _about(code: CodeType) -> tuple[str, tuple[str, ...], bytes | None] | None:
    """A function's file, its parameters, and its instructions where it can be resumed; None outside the packages."""
    if code not in _known:
        found = None
        if code.co_filename.startswith(_rooms):
            flags = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
            stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
            count = code.co_argcount + code.co_kwonlyargcount + stars
            resumable = code.co_code if code.co_flags & flags else None
            found = code.co_filename[len(_tree) + 1 :], code.co_varnames[:count], resumable
        _known[code] = found
    return _known[code]


def _hook(frame: FrameType, event: str, value: object) -> None:
    about = _about(frame.f_code) if event in ("call", "return") else None
    if about is None:
        return
    file, names, resumable = about
    if event == "return":
        found = list(_carriers(value))
    elif resumable is not None and resumable[frame.f_lasti + 1] != _START:
        return
    else:
        given = frame.f_locals
        if "connection" in given and "self" not in given and isinstance(given.get("rank"), int):  # a rank's own start
            _out["rank"] = given["rank"]
        own = given.get("self")
        data = hasattr(type(own), "__dataclass_fields__")  # a view of the object itself is no stop
        found = [c for n in names if not (n == "self" and data) for c in _carriers(given.get(n))]
    if found:
        ids = sorted({c.id for c in found if type(c).__name__ == "GenerationRequest"})  # type: ignore[attr-defined]
        _note(file, frame.f_code.co_name, event, ids)


def _note(file: str, function: str, event: str, ids: list[str]) -> None:
    if _out["pid"] != os.getpid():  # a fork has a file of its own
        path = Path(os.environ["WALK_OUT"], f"{os.getpid()}.jsonl")
        _out.update(pid=os.getpid(), file=path.open("ab", buffering=0), last=None)
    if _out["last"] == (file, function, event, ids):
        return
    _out["last"] = file, function, event, ids
    line = [time.monotonic_ns(), os.getpid(), _out["rank"], file, function, event, ids]
    _out["file"].write(json.dumps(line).encode() + b"\n")


if _tree:
    threading.setprofile(_hook)
    sys.setprofile(_hook)
