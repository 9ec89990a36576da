"""Where the ranks of the kit run: on the GPU, or in CI on pretended ones; and the figures for the table at the end."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
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

    def run(self, worlds: Sequence[World]) -> None:
        """Run the ranks of one world after the other, in processes that have not used CUDA; fails if one does."""
        if self.pretended:
            run_worlds(worlds)
            return
        spawn = multiprocessing.get_context("spawn")
        for world in worlds:
            ranks = [spawn.Process(target=world.main, args=(rank, *world.arguments)) for rank in range(world.size)]
            for process in ranks:
                process.start()
            until = time.monotonic() + LIMIT
            for process in ranks:
                process.join(max(0.0, until - time.monotonic()))
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
            assert codes == [0] * world.size, f"{world.main.__name__}: {codes}; None has not ended in {LIMIT:g} s"

    def seen(self, folder: Path, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
        """What one process for each call wrote to seen.json, by the call's name.

        A call is ``main`` and its arguments after rank and folder, a new one in ``folder`` for each.
        """
        for name in calls:
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.run([World(main=m, size=1, arguments=(folder / name, *rest)) for name, (m, *rest) in calls.items()])
        return {name: json.loads((folder / name / "seen.json").read_text()) for name in calls}

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
