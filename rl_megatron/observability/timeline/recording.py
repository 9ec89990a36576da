"""Writes a run's timeline while it runs, from a thread, so that the event loop does not wait for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rl_megatron.observability.timeline import spans
from rl_megatron.observability.timeline.spans import KeptSpan
from rl_megatron.observability.timeline.trace import MOST_BYTES, TraceFile

logger = logging.getLogger(__name__)


class Timeline:
    """A run's timeline, in ``folder``. Controller process only. Where it cannot write, it warns and ends no run."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._file, self._failed = TraceFile(folder, most_bytes), False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timeline")
        self._writing: Future[None] | None = None

    def step(self, row: Mapping[str, object], times: tuple[int, int] | None) -> None:
        """Keep the step of a row of metrics as a span, if its ``times`` are known, and begin to write what there is."""
        if times is not None:
            warm = row.get("phase") == "warm_start"
            name = f"warm start step {row.get('warm_start/step')}" if warm else f"step {row.get('step')}"
            spans.keep(spans.STEPS, name, *times)
        if self._writing is None or self._writing.done():  # else the next step writes these, too
            self._writing = self._thread.submit(self._write, *spans.taken())

    def flush(self) -> Future[None]:
        """Write all that there is now; the future is done once readers see it."""
        self._writing = self._thread.submit(self._write, *spans.taken())
        return self._writing

    def close(self) -> None:
        """Write what is left, and end the file."""
        if self._writing is not None:
            self._writing.result()
        self._thread.shutdown()
        self._write(*spans.taken())
        try:
            self._file.close()
        except Exception as error:  # noqa: BLE001  `_warn` logs it
            self._warn(error)

    def _write(self, kept: Sequence[KeptSpan], lost: int) -> None:
        if self._failed or not kept:
            return
        if lost:
            logger.warning("the timeline lacks %d spans: memory holds %d between two writes", lost, spans.MOST)
        try:
            self._file.append(kept)
        except Exception as error:  # noqa: BLE001  `_warn` logs it
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Nothing is written any more. A fault of our own has its traceback."""
        self._failed, ours = True, not isinstance(error, OSError)
        what = f"{type(error).__name__}: {error}" if ours else str(error)
        logger.warning("the timeline ends here: %s", what, exc_info=ours)
