"""``python -m tests.proof.run``: does every command of docs/proof.md still print what the page shows?

Each command runs in a process of its own, one after the other: pytest in the checkout, others in a folder that has its
documents alone. It ends with 1 where an output is stale, and prints the new output.
"""

from __future__ import annotations

import math
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.processes.environment import adopt_orphans
from tests.documents import blocks

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "proof.md"
LIMIT_SECONDS = 600.0  # by the clock, whatever runs beside
LEFT_SECONDS = 10.0  # what a command leaves has so long to end
SHOWN_BY_RUNNING = 120.0  # seconds of CPU; the page shows a stored run of what takes longer
TOLERANCE = 0.05  # of a figure, relative
COLUMNS = 110  # in which tables are printed
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
OWN_TIMES = re.compile(r" in [\d.]+ ?s\b.*| +\[ *\d+%\]$")  # of the run itself, and pytest's progress


@dataclass(frozen=True, slots=True)
class Claim:
    """A command of the page, what the page shows of its output, and the file that runs it."""

    command: str
    shown: str
    runner: str


def claims(page: Path = PAGE) -> Iterator[Claim]:
    """Every command that is run, with the block behind it. Raises ValueError for one without an output."""
    command = None
    for block in blocks(page, "sh", ""):
        if block.language == "sh":
            if command is not None:
                raise ValueError(f"{page}: no output is shown of {command.text.strip()!r}")
            command = block if block.mark.startswith("run by ") else None
        elif command is not None:
            yield Claim(command.text.strip(), block.text, command.mark.removeprefix("run by "))
            command = None
    if command is not None:
        raise ValueError(f"{page}: no output is shown of {command.text.strip()!r}")


def printed(command: str) -> str:
    """What the command writes to both streams, whatever its exit status; of one that takes too long only that."""
    words = shlex.split(command)
    program = Path(sys.executable).with_name(Path(words[0]).name)
    environment = os.environ | {"COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "docs").symlink_to(REPO / "docs")
        try:
            return subprocess.run(
                [str(program), *words[1:]],
                cwd=REPO if program.name == "pytest" else folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_SECONDS,
            ).stdout
        except subprocess.TimeoutExpired:
            return f"it did not end within {LIMIT_SECONDS:g} s"  # alone, so that nothing which is shown is there


def stale(shown: str, text: str) -> str | None:
    """The first shown line that ``text`` lacks where it is due; None if all are there. ``...`` stands for any lines."""
    lines = [_plain(line) for line in text.splitlines()]
    place, free = 0, False
    for line in shown.splitlines():
        if line.strip() == "...":
            free = True
            continue
        wanted = _plain(line)
        due = range(place, len(lines)) if free else range(place, min(place + 1, len(lines)))
        found = next((i for i in due if _equal(wanted, lines[i])), None)
        if found is None:
            return line
        place, free = found + 1, False
    return None if free or place == len(lines) else f"nothing behind line {place}"


def _plain(line: str) -> str:
    return " ".join(OWN_TIMES.sub("", line).split())


def _equal(one: str, other: str) -> bool:
    """Words are equal, and figures within the tolerance."""
    if FIGURE.sub("#", one) != FIGURE.sub("#", other):
        return False
    pairs = zip(FIGURE.findall(one), FIGURE.findall(other), strict=True)
    return all(math.isclose(_number(a), _number(b), rel_tol=TOLERANCE) for a, b in pairs)


def _number(figure: str) -> float:
    return float(figure.replace(",", "").rstrip("."))


def _seconds_of_cpu(apart: set[psutil.Process]) -> float:
    """That all processes which have ended here took: the same beside others, unlike the clock's. Waits for the children
    but those ``apart``, and kills what does not end: the kernel counts no process that nobody waits for, such as a fork
    server."""
    while left := set(psutil.Process().children()) - apart:
        for process in psutil.wait_procs(left, timeout=LEFT_SECONDS)[1]:
            process.kill()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run all; exits with 1 where one is stale."""
    old, apart = 0, set(psutil.Process().children())
    for claim in claims():
        began, text = _seconds_of_cpu(apart), printed(claim.command)
        missing, seconds = stale(claim.shown, text), _seconds_of_cpu(apart) - began
        long = seconds > SHOWN_BY_RUNNING
        print(f"{'STALE' if missing or long else 'holds'}  {seconds:3.0f} s of CPU  {claim.command}", flush=True)
        if missing:
            print(f"  not there: {missing}\n{text}", flush=True)
        if long:
            print(
                f"  over {SHOWN_BY_RUNNING:g} s: mark it as not run, and show a stored run with date and commit",
                flush=True,
            )
        old += bool(missing or long)
    sys.exit(1 if old else 0)


if __name__ == "__main__":
    adopt_orphans()  # of the commands, which have no parent that waits for them
    main()
