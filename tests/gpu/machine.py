"""Where the ranks of the kit run: on the GPU, or in CI on pretended ones; and the figures for the table at the end."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.distributed.pretended.ranks import World, run_worlds

LIMIT = 90.0  # seconds that the processes of a world may take
REPO = Path(__file__).parents[2]


@dataclass(slots=True)
class Machine:
    """``pretended``: the GPU is a pretended one, so sizes are small, and the command line trains on the CPU."""

    pretended: bool = False

    def run(self, worlds: Sequence[World], at_once: int = 1) -> None:
        """Run the ranks of so many worlds, then those of the next, in processes that have not used CUDA. Fails if one
        of them does."""
        if self.pretended:
            run_worlds(worlds)
            return
        wrong = [line for first in range(0, len(worlds), at_once) for line in _run(worlds[first : first + at_once])]
        assert not wrong, "\n".join(wrong)

    def seen(
        self, folder: Path, calls: Mapping[str, tuple[Any, ...]], *, together: bool = False
    ) -> dict[str, dict[str, Any]]:
        """What one process for each call wrote to seen.json, by the call's name. A call is ``main`` and its arguments
        after rank and folder, a new one in ``folder`` for each. ``together``: the calls need nothing of each other and
        measure nothing, so three run at once for four cores."""
        at_once = max(1, len(os.sched_getaffinity(0)) * 3 // 4) if together else 1
        self.run(_worlds(folder, calls), at_once)
        return {name: json.loads((folder / name / "seen.json").read_text()) for name in calls}

    def tried(self, folder: Path, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, dict[str, Any] | str]:
        """As `seen` with ``together``, but a call that fails has its last words there."""
        with contextlib.suppress(AssertionError):
            self.seen(folder, calls, together=True)
        out: dict[str, dict[str, Any] | str] = {}
        for name in calls:
            said, words = folder / name / "seen.json", folder / name / "error.txt"
            failed = words.read_text() if words.exists() else "it ended without a word"
            out[name] = json.loads(said.read_text()) if said.exists() else failed
        return out

    def command(self, *arguments: str, folder: Path, environment: Mapping[str, str] = {}, seconds: float = 60) -> str:
        """What ``python ARGUMENTS`` of the kit's interpreter prints in ``folder``; fails with its output."""
        paths = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        return done.stdout


def _worlds(folder: Path, calls: Mapping[str, tuple[Any, ...]]) -> list[World]:
    for name in calls:
        (folder / name).mkdir(parents=True, exist_ok=True)
    return [World(main=_told, size=1, arguments=(main, folder / n, *rest)) for n, (main, *rest) in calls.items()]


def _told(rank: int, main: Callable[..., None], folder: Path, *rest: Any) -> None:
    """Run a call, and keep what it raises in its folder."""
    try:
        main(rank, folder, *rest)
    except BaseException:
        (folder / "error.txt").write_text(traceback.format_exc())
        raise


def _run(worlds: Sequence[World]) -> list[str]:
    """Run these at once. Returns lines about those that failed."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [[spawn.Process(target=w.main, args=(rank, *w.arguments)) for rank in range(w.size)] for w in worlds]
    processes = [process for some in ranks for process in some]
    for process in processes:
        process.start()
    until = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [[process.exitcode for process in some] for some in ranks]
    for process in processes:
        process.kill()
    pairs = zip(worlds, codes, strict=True)
    return [
        f"{w.main.__name__}{w.arguments}: {found}; None has not ended in {LIMIT:g} s"
        for w, found in pairs
        if any(code != 0 for code in found)
    ]


MACHINE = Machine()
NOTES: list[tuple[str, str]] = []
"""What was measured, and the figure with its unit."""


@cache
def figures() -> Path:
    """The file that has figures as soon as they are measured: ``FIGURES`` of the environment, else a new one."""
    given = os.environ.get("FIGURES")
    return Path(given) if given else Path(tempfile.mkdtemp(prefix="test-gpu-")) / "figures.md"


def note(what: str, figure: str) -> None:
    """Keep a figure for the table, and in the file."""
    with figures().open("a") as file:
        file.write(f"| {what} | {figure} |\n")
    NOTES.append((what, figure))


def table() -> str:
    """The figures in Markdown, for docs/benchmarks.md."""
    return "| what | figure |\n|---|---|\n" + "".join(f"| {what} | {figure} |\n" for what, figure in NOTES)


def versions() -> list[str]:
    """The GPU, its driver, Python, torch and what else decides a figure."""
    import torch

    gpu, driver = "a pretended GPU", "no driver"
    if torch.cuda.is_available():
        try:
            gpu = torch.cuda.get_device_name(0)
        except RuntimeError as error:  # of CUDA, after a GPU has failed
            gpu = f"a GPU that does not answer ({str(error).splitlines()[0]})"
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split()
        except (OSError, subprocess.TimeoutExpired):
            answer = []
        driver = f"driver {answer[0] if answer else 'unknown'}"
    python = ".".join(map(str, sys.version_info[:3]))
    return [gpu, driver, f"torch {torch.__version__}, CUDA {torch.version.cuda}", f"Python {python}"]
