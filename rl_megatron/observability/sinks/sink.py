"""The interface of a sink of metrics, and the thread that keeps a sink from delaying or ending a run."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from rl_megatron.entries import declared, describe_entry, load_entry
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.files import write_atomically
from rl_megatron.observability.files import JsonRow

logger = logging.getLogger(__name__)

GROUP = "rl_megatron.sinks"
MAX_ROWS = 256  # rows that wait for one sink
MAX_FAILURES = 3  # rows in a row that a sink cannot take
SLOW_SECONDS = 60.0  # one call; then a warning
CLOSE_SECONDS = 30.0  # all sinks together, for their last rows: before a job's time limit each second counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings:
    """The settings of a run's sinks."""

    folder: Path  # the run's; its name is the run's name
    argument: str = ""  # the text after the colon of an entry of log.sinks
    project: str = "rl_megatron"  # log.project
    is_fresh: bool = True  # the run begins, or starts over; False: it resumes
    needs_differences: bool = True  # groups of equal rewards give no gradient
    dtype: str = "float32"  # the learner's data type
    environment: Mapping[str, str]  # variables of the controller's process


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run. A stopped run can resume; ``message`` is the error of a failed one."""

    state: Literal["finished", "stopped", "failed"]
    message: str = ""


class MetricSink:
    """Base class of sinks. Only the controller has sinks, each in a thread of its own, which makes all calls in order.

    A method may raise any exception, and may take as long as it needs: training continues. A sink that raises in `open`
    or for three rows in a row gets no further rows.
    """

    def __init__(self, settings: SinkSettings) -> None:
        """Checks the settings. It must not write or start anything, because ``--check`` creates sinks, too.

        Raises ConfigError for a wrong argument or a missing package.
        """

    def open(self) -> None:
        """Begins, and imports slow packages. Nothing else is called if it raises."""

    def log(self, row: JsonRow) -> None:
        """Sends one row of metrics.jsonl, which is on disk. A later row of the same phase and step replaces it."""
        raise NotImplementedError

    def close(self, end: RunEnd) -> None:
        """Sends the rest. All sinks together have 30 seconds for their waiting rows and this."""

    def abandon(self) -> None:
        """Makes a sink that did not close in time release what keeps Python from exiting. Called in another thread."""


class Sinks:
    """The sinks of a run. Controller process only."""

    def __init__(self, names: Sequence[str], settings: SinkSettings) -> None:
        """Starts a thread for each entry of ``log.sinks``. Raises ConfigError as `make_sink` does."""
        made = [(name, make_sink(name, settings)) for name in names]
        self._threads = [_SinkThread(name, sink) for name, sink in made]
        self.end = RunEnd(state="stopped")

    def log(self, row: JsonRow) -> None:
        """Gives every sink a copy of a row, and waits for none. One thread at a time."""
        for each in self._threads:
            each.log(dict(row))

    def close(self) -> None:
        """Tells every sink the run's ``end``, and waits up to 30 seconds until all are closed. Raises nothing."""
        for each in self._threads:
            each.finish(self.end)
        deadline = time.monotonic() + CLOSE_SECONDS
        for each in self._threads:
            each.join(max(0.0, deadline - time.monotonic()))


def make_sink(name: str, settings: SinkSettings) -> MetricSink:
    """Creates the sink of an entry of ``log.sinks``, ``name`` or ``name:argument``, and opens nothing.

    Raises ConfigError that lists the known sinks if there is no such sink, and what the sink raises.
    """
    name, _, argument = name.partition(":")
    known = declared("sink", GROUP, own=True)
    if name not in known:
        raise ConfigError(f"log.sinks={name!r:.80}: there is no such sink; use one of: {', '.join(known)}")
    create = load_entry("sink", known[name])
    try:
        sink: MetricSink = create(replace(settings, argument=argument))
    except RLMegatronError:
        raise
    except Exception as error:  # a package of the user's may raise anything
        raise ConfigError(f"{describe_entry('sink', known[name])} cannot be created: {error!r:.500}") from error
    return sink


class MissingPackageError(ConfigError):
    """A sink's package is not installed on this machine."""


def need_package(package: str, sink: str) -> None:
    """Raises MissingPackageError with pip's command if a package of this project's extra ``sink`` is not installed."""
    if sys.modules.get(package) is None and find_spec(package) is None:
        raise MissingPackageError(
            f"log.sinks={sink} needs the package {package}, which is not installed; "
            f"install it with `pip install 'rl-megatron[{sink}]'` or remove {sink} from log.sinks"
        )


def need_no_argument(sink: str, settings: SinkSettings) -> None:
    """Raises ConfigError if an entry of ``log.sinks`` has an argument."""
    if settings.argument:
        raise ConfigError(f"log.sinks={sink}:{settings.argument:.80}: this sink has no argument; write {sink}")


def tagged_numbers(row: JsonRow) -> tuple[dict[str, float], int]:
    """Returns the numbers of a row by their tags, and their x: the step.

    A warm start has its own x and tags that begin with ``warm_start/``, because its steps are not those of the job.
    """
    warm = row["phase"] == "warm_start"
    numbers = {n: v for n, v in row.items() if isinstance(v, int | float) and not (warm and n == "step")}
    if not warm:
        return numbers, int(numbers["step"])
    tags = {n if n.startswith("warm_start/") else f"warm_start/{n}": v for n, v in numbers.items()}
    return tags, int(tags.get("warm_start/step", 0))


def kept_id(path: Path, *, fresh: bool) -> str | None:
    """Returns the id that `keep_id` wrote for a run that resumes. None in a copy of its folder with another name.

    An id that an older version wrote has no name, and counts.
    """
    if fresh or not path.exists():
        return None
    identity, _, name = path.read_text().strip().partition(" ")
    return identity if name in ("", path.parent.name) else None


def keep_id(path: Path, identity: str) -> None:
    """Writes the id of a run elsewhere into its folder, with the folder's name. Raises OSError without the folder."""
    write_atomically(path, f"{identity} {path.parent.name}\n".encode())


class _SinkThread:
    """A sink with its queue and its daemon thread, which does not keep Python from exiting."""

    def __init__(self, name: str, sink: MetricSink) -> None:
        self._name, self._sink = name, sink
        self._queue = SimpleQueue[JsonRow | RunEnd]()
        self._num_dropped = self._num_failed = 0  # rows: for lack of room, and by exceptions
        self._call_began: float | None = None  # None: no call is running
        self._is_slow = self._is_off = False
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def log(self, row: JsonRow) -> None:
        waiting, began = self._queue.qsize(), self._call_began
        if is_full := waiting >= MAX_ROWS:
            self._num_dropped += 1
        else:
            self._queue.put(row)
        if not self._is_slow and (is_full or (began is not None and time.monotonic() - began > SLOW_SECONDS)):
            self._is_slow = True
            logger.warning(
                "log.sinks: %s is too slow: %d rows wait, and rows above %d are dropped; metrics.jsonl has all rows",
                *(self._name, waiting, MAX_ROWS),
            )

    def finish(self, end: RunEnd) -> None:
        self._queue.put(end)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn_of_loss(max(0, self._queue.qsize() - 1), f"it did not close in {CLOSE_SECONDS:g} s")
            leaving = threading.Thread(target=self._try, args=(self._sink.abandon,), daemon=True)
            leaving.start()
            leaving.join(1.0)
        elif not self._is_off:
            self._warn_of_loss(0)

    def _warn_of_loss(self, num_waiting: int, reason: str = "") -> None:
        if reason or self._num_dropped or self._num_failed:
            logger.warning(
                "log.sinks: %s lacks rows: %d not sent, %d dropped, %d failed%s; metrics.jsonl has all rows",
                *(self._name, num_waiting, self._num_dropped, self._num_failed, reason and f" ({reason})"),
            )

    def _run(self) -> None:
        is_open, failures = self._try(self._sink.open, must=True), 0
        while not isinstance(item := self._queue.get(), RunEnd):
            if not self._is_off:
                taken = self._try(partial(self._sink.log, item), must=failures + 1 == MAX_FAILURES)
                failures = 0 if taken else failures + 1
                self._num_failed += not taken
        if is_open:
            self._try(partial(self._sink.close, item), must=not self._is_off)

    def _try(self, call: Callable[[], None], *, must: bool = False) -> bool:
        """Makes one call. Returns whether it raised nothing; otherwise, if it ``must`` not raise, the sink is off."""
        self._call_began = time.monotonic()
        try:
            call()
        except BaseException as error:  # noqa: BLE001  also SystemExit of a package: it would end this thread alone
            self._is_off |= must
            logger.log(
                logging.WARNING if must else logging.INFO,
                "log.sinks: %s %s (%s: %.500s); training continues, and metrics.jsonl has all rows",
                *(self._name, "is switched off" if must else "failed", type(error).__name__, error),
            )
            return False
        finally:
            self._call_began = None
        return True
