"""Kernels and operators that ranks recorded, as events of the run's timeline.

A step that was profiled has a folder, ``profile/step_<number>`` in the run's, with a file of torch's profiler for each
rank and ``ranks.json``, which names their processes in the timeline and sets their clocks right.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.durable import write_atomically
from rl_megatron.errors import DataError
from rl_megatron.json_text import parse

FOLDER = "profile"
_RANKS = "ranks.json"
_OF_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
_OF_CPU = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A rank's file, and what its two clocks said at one time, in nanoseconds: that of spans, and since 1970."""

    file: Path
    monotonic: int
    wall: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKernels:
    """A rank's file. Its times since 1970 plus ``shift`` nanoseconds are the controller's; ``process`` is the rank's
    name in the timeline."""

    file: Path
    process: str
    shift: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvent:
    """A kernel or an operator: microseconds since 1970 by the controller's clock."""

    process: str
    thread: str
    name: str
    begin: int
    end: int


def folder_of(run: Path, step: int) -> Path:
    """The folder of a step that was profiled."""
    return run / FOLDER / f"step_{step:06d}"


def save(folder: Path, ranks: Sequence[RankKernels]) -> None:
    """Have `read_kernels` find the files of a step, which are in ``folder``."""
    said = [{"file": one.file.name, "process": one.process, "shift": one.shift} for one in ranks]
    write_atomically(folder / _RANKS, json.dumps(said, indent=1).encode(), private=True)


def read_kernels(run: Path) -> Iterator[KernelEvent]:
    """All that was recorded in a run's folder. Raises DataError naming a folder with files that are torn or others'."""
    for known in sorted((run / FOLDER).glob(f"*/{_RANKS}")):
        try:
            ranks = [
                RankKernels(file=known.parent / str(one["file"]), process=str(one["process"]), shift=int(one["shift"]))
                for one in parse(known.read_bytes())
            ]
            for rank in ranks:
                yield from _events(rank)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{known.parent}: not what a run recorded ({error!r}); remove the folder, it is no part of a resume"
            ) from error


def _events(rank: RankKernels) -> Iterator[KernelEvent]:
    with gzip.open(rank.file) as file:
        found: dict[str, Any] = parse(file.read())
    base = int(found["baseTimeNanoseconds"]) + rank.shift
    for event in found["traceEvents"]:
        kind = event.get("cat")
        if event["ph"] != "X" or kind not in _OF_GPU + _OF_CPU:
            continue
        of_gpu = kind in _OF_GPU
        begin = base + round(1000 * float(event["ts"]))
        yield KernelEvent(
            process=rank.process,
            thread=f"GPU {event['pid']}, stream {event['tid']}" if of_gpu else f"operators, thread {event['tid']}",
            name=str(event["name"]),
            begin=begin // 1000,  # whole ones, so that what was nested stays so
            end=(begin + round(1000 * float(event["dur"]))) // 1000,
        )
