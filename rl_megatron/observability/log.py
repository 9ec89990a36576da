"""Writes the run log, runs/<name>/log.txt: log lines of all processes of a run, each with role and rank."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, get_args

from rl_megatron.errors import RLMegatronError
from rl_megatron.files import add_path_to_errors
from rl_megatron.observability.files import text_at_end

logger = logging.getLogger(__name__)

Outcome = Literal["began", "finished", "stopped", "interrupted", "failed"]
OURS = ("rl_megatron", "launcher")
_OURS = re.compile(rf"\S+ ([\d:]{{8}}),\d+ ([A-Z]+) *\[([^\]]+)\] (?:{'|'.join(OURS)})[\w.]*: (.*)")
_WARNINGS = ("WARNING", "ERROR", "CRITICAL")
_LINE = 300
_RECORD = re.compile(r"^[\d-]{10} [\d:]{8},\d+ [A-Z]+ *", re.MULTILINE)  # the start of a record, of one line or more
_OUTCOME = re.compile(rf"\[controller\] \S+: the run (?:was )?({'|'.join(get_args(Outcome))})(?:: (.*))?\n", re.DOTALL)


@contextmanager
def run_log(folder: Path, *, role: str, rank: int | None = None) -> Iterator[None]:
    """Sends this process's logging and Python warnings to ``folder``/log.txt while the context is open; the folder
    exists.

    Every process of a run appends to this file. Our loggers write from INFO up, and to stderr from WARNING up; other
    libraries' loggers write from WARNING up, and not to stderr.
    """
    who = role if rank is None else f"{role} {rank}"
    file = _File(folder / "log.txt", mode="a", encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s [{who}] %(name)s: %(message)s"))
    console = _Stderr(logging.WARNING)
    console.setFormatter(logging.Formatter(f"%(levelname)s [{who}] %(message)s"))
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in OURS]
    levels = [logger.level for logger in ours]
    root.addHandler(file)
    for logger in ours:
        logger.addHandler(console)
        logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, level in zip(ours, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(console)
        root.removeHandler(file)
        file.close()


def log_outcome(outcome: Outcome, why: str = "") -> None:
    """Logs that a run began or ended, for `read_outcome`. The controller calls it within `run_log`."""
    verb = "was interrupted" if outcome == "interrupted" else outcome
    logger.info("the run %s%s", verb, f": {why}" if why else "")


@contextmanager
def log_failures() -> Iterator[None]:
    """Logs that a run began, and the error that ends it, which is raised again."""
    log_outcome("began")
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        log_outcome("interrupted")
        raise
    except RLMegatronError as error:
        log_outcome("failed", str(error))
        raise
    except BaseException as error:
        logger.info("the error that ends the run", exc_info=True)
        log_outcome("failed", f"{type(error).__name__}: {error}")
        raise


def read_outcome(folder: Path) -> tuple[Outcome, str] | None:
    """Returns the last outcome in the last 256 KiB of ``folder``/log.txt, and its reason. It is ``began`` while the run
    is alive or if it was killed, also if it began before these lines. None if there is no such file."""
    try:
        records = _RECORD.split(text_at_end(folder / "log.txt"))
    except OSError:
        return None
    found = [match for record in records if (match := _OUTCOME.fullmatch(record))]
    return (cast(Outcome, found[-1][1]), found[-1][2] or "") if found else ("began", "")


def last_warnings(folder: Path) -> list[str]:
    """Returns the last three warnings and errors of this package in the last 256 KiB of ``folder``/log.txt, one a line.

    Other libraries' are left out. Empty if there is no such file.
    """
    return [text for level, text in _ours(folder) if level in _WARNINGS][-3:]


def last_line(folder: Path) -> str | None:
    """Returns the last line there of this package, of any level, or None; not that the run began."""
    return next((text for _, text in reversed(_ours(folder)) if not text.endswith(": the run began")), None)


def _ours(folder: Path) -> list[tuple[str, str]]:
    """Returns level and text of each line at the end of the file."""
    try:
        text = text_at_end(folder / "log.txt")
    except OSError:
        return []
    found = [match.groups() for line in text.splitlines() if (match := _OURS.fullmatch(line))]
    return [(level, f"{at} {who}: {_shortened(message)}") for at, level, who, message in found]


def _shortened(message: str) -> str:
    return message if len(message) <= _LINE else f"{message[: _LINE - 1]}…"


class _File(logging.FileHandler):
    """Reports once on stderr that it cannot write, for example on a full disk, and raises nothing."""

    said = False

    def handle(self, record: logging.LogRecord) -> bool:
        """Writes a record; may wait for a thread that writes to the file, too."""
        with add_path_to_errors(Path(self.baseFilename)):
            return super().handle(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        if not self.said:
            self.said = True
            print(f"{self.baseFilename} lacks a line that could not be written: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        try:
            super().close()
        except OSError:
            self.handleError(logging.makeLogRecord({}))


class _Stderr(logging.Handler):
    """Looks stderr up at each line: the live display replaces it, to print above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # stderr is closed or cannot show the text: the file has the line
            self.handleError(record)
