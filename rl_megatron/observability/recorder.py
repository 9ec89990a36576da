"""Sends a run's rows and samples to metrics.jsonl and sinks, samples.jsonl and the display."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rl_megatron.observability import timeline
from rl_megatron.observability.files import JsonlFile, JsonRow, JsonValue, from_the_end
from rl_megatron.observability.history import SampleRow, SamplesWriter, SampleTurn
from rl_megatron.observability.metrics import checked_row
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.sinks.sink import Sinks
from rl_megatron.observability.timeline import Timeline
from rl_megatron.types import Prompt, RolloutGroup, Trajectory

if TYPE_CHECKING:
    from rl_megatron.config.sections.jobs import LogSection


logger = logging.getLogger(__name__)


class MetricsWriter:
    """Records rows in ``folder``/metrics.jsonl, then gives them to ``sinks``. Controller process only; one thread at a
    time."""

    def __init__(self, folder: Path, sinks: Sinks | None = None) -> None:
        self._file, self._sinks = JsonlFile(folder / "metrics.jsonl"), sinks

    def write(self, row: Mapping[str, JsonValue], *, again: bool = False) -> dict[str, JsonValue]:
        """Appends one row durably, with ``again`` in place of the last one if that has the same phase and step.
        Returns the row as written. Raises ValueError as `checked_row` does."""
        out = checked_row(row)
        if again:
            self._remove(out)
        self._file.append([out])
        if self._sinks is not None:
            self._sinks.log(out)
        return out

    def truncate_after(self, step: int, *, warm_start_step: int | None = None) -> int:
        """Prepares a resume from ``step``: removes later rows and a torn last line. Returns the number of rows removed.

        ``step=-1`` clears the file; ``warm_start_step`` is given for a checkpoint inside the warm start. Sinks keep
        later rows: TensorBoard hides them from the next row on.
        """
        if warm_start_step is not None:
            return self._file.truncate_after(warm_start_step, "warm_start/step")
        return self._file.truncate_after(step, late=_is_background)

    def has_evaluation(self, step: int) -> bool:
        """True if a row of this RL step has figures of an evaluation."""
        for row in from_the_end(self._file.path) if self._file.path.exists() else ():
            if row["step"] == step and any(name.startswith("eval/") for name in row):
                return True
            if int(str(row["step"])) < step and not _is_background(row):
                return False
        return False

    def _remove(self, written: JsonRow) -> None:
        """Removes the row of that phase and step; rows of other phases at the step stay."""
        axis = "warm_start/step" if written["phase"] == "warm_start" else "step"
        place = {name: written[name] for name in ("phase", axis)}
        last, also = int(str(written[axis])), place.items()
        self._file.truncate_after(last, axis, late=_is_background, also=lambda row: also <= row.items())

    def close(self) -> None:
        """Closes metrics.jsonl, and no sink. Raises OSError that names it."""
        self._file.close()


def _is_background(row: JsonRow) -> bool:
    """True if the row is of an evaluation during later steps, so that it may follow their rows."""
    return row.get("phase") == "eval"


IDLE_STEPS = 5
_PER_GROUP = 4  # completions in samples.jsonl
Row = dict[str, JsonValue]
"""One row of metrics.jsonl; docs/metrics.md lists the names."""


class Recorder:
    """Records everything of a run. ``process`` is in every row that this process makes. Controller process only."""

    def __init__(
        self,
        folder: Path,
        log: LogSection,
        progress: Progress,
        process: Mapping[str, JsonValue] | None = None,
        *,
        before_row: Callable[[], None] = lambda: None,
        is_taught: bool = False,
        decode: Callable[[list[int]], str] | None = None,
        sinks: Sinks | None = None,
    ) -> None:
        """``before_row`` is called before each row is written, in the rows' thread; `write` raises its errors.
        ``is_taught``: texts, a teacher's distribution or right answers are learned from, whatever the advantages.
        ``decode`` gives the text that a model read between turns; without it samples have no turns. ``sinks`` get each
        row once it is on disk, and their owner closes them."""
        self._metrics = MetricsWriter(folder, sinks)
        self._samples, self._timeline = SamplesWriter(folder), Timeline(folder)
        self._per_step, self._decode = log.samples_per_step, decode
        self._idle_steps, self._warned = 0, is_taught  # latest steps in a row without a gradient
        self._still_steps, self._warned_still = 0, False  # latest steps with a gradient of exactly 0
        self._file = folder / "samples.jsonl"
        self.progress, self._process, self._before_row = progress, process or {}, before_row
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")  # one, so that rows keep their order

    async def write(self, row: Mapping[str, JsonValue], *, again: bool = False) -> Row:
        """Records and shows one row of metrics, ``again`` as in MetricsWriter. Returns it as written, once it is on
        disk; the event loop does not wait for that. Warns once if several steps in a row had no gradient."""
        times, Stopwatch.latest = Stopwatch.latest, None
        self._timeline.step(row, times)
        of_process = {} if again else self._process  # otherwise the row keeps the step's process
        write = partial(self._write, {**row, **of_process}, again=again)
        written = await asyncio.get_running_loop().run_in_executor(self._thread, write)
        self.progress.step(written)
        equal = row.get("groups/zero_advantage_fraction")
        if equal is None:
            return written
        advantages = row.get("advantage/mean"), row.get("advantage/std")  # a critic's differ in equal groups, too
        self._idle_steps = self._idle_steps + 1 if equal == 1 and not any(advantages) else 0
        if self._idle_steps == IDLE_STEPS and not self._warned:
            self._warned = True
            logger.warning(
                "all advantages were 0 for %d steps, for example because all rewards of a group are equal, so the "
                "policy learns nothing. Read completions and rewards in %s. Check the reward, the prompt template "
                "(data.prompt_template, data.chat_template) and whether completions are truncated "
                "(rollout.max_new_tokens). A model that solves no problem needs a warm start "
                "(warm_start.steps); a model that solves all of them needs harder problems",
                IDLE_STEPS,
                self._file,
            )
        still = equal != 1 and row.get("grad_norm") == 0
        self._still_steps = self._still_steps + 1 if still else 0
        if self._still_steps == IDLE_STEPS and not self._warned_still:
            self._warned_still = True
            logger.warning(
                "the gradient norm was exactly 0 for %d steps although rewards differed, so the policy learns nothing. "
                "Perhaps it gives each sampled token a probability of 1. Resume from an earlier checkpoint with a "
                "lower train.learning_rate",
                IDLE_STEPS,
            )
        return written

    def _write(self, row: Row, *, again: bool) -> Row:
        self._before_row()
        return self._metrics.write(row, again=again)

    def write_samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Records the first four completions of the first ``log.samples_per_step`` groups."""
        self._samples.write(
            SampleRow(
                step=step,
                prompt=_prompt_text(group.prompt),
                completion="".join(turn.text for turn in trajectory.turns),
                answer=group.prompt.answer,
                reward=trajectory.reward,
                turns=tuple(self._turns(trajectory)),
            )
            for group in groups[: self._per_step]
            for trajectory in group.trajectories[:_PER_GROUP]
        )

    def _turns(self, trajectory: Trajectory) -> Iterator[SampleTurn]:
        """Yields the turns of a trajectory with several, each with the text since the previous turn of its sequence."""
        if self._decode is None or len(trajectory.turns) < 2:
            return
        for number, chain in enumerate(trajectory.chains):
            place = 0 if number else chain.turns[0].start  # the prompt is in the first row
            for turn in chain.turns:
                yield SampleTurn(read=self._decode(chain.token_ids[place : turn.start].tolist()), sampled=turn.text)
                place = turn.stop

    def truncate_after(self, step: int, *, warm_start_step: int | None = None) -> None:
        """Prepares a resume from ``step``: removes later records, as MetricsWriter does."""
        self._metrics.truncate_after(step, warm_start_step=warm_start_step)
        self._samples.truncate_after(step)

    def has_evaluation(self, step: int) -> bool:
        """True if metrics.jsonl has figures of an evaluation at this RL step."""
        return self._metrics.has_evaluation(step)

    def close(self) -> None:
        """Flushes and releases each file, even if another cannot be written. Raises OSError that names one."""
        self._thread.shutdown()  # a row may still be written for a caller that was canceled
        with ExitStack() as last_first:
            for each in (self._timeline, self._samples, self._metrics):
                last_first.callback(each.close)


class Stopwatch:
    """Seconds per phase of one step: ``with watch("train"): …``, then ``row()``."""

    latest: ClassVar[tuple[int, int] | None] = None  # when the latest row's step began and ended; the timeline takes it

    def __init__(self) -> None:
        self._began = timeline.now()
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._beside = frozenset[str]()
        self._noted: dict[str, float] = {}
        self._at_peak = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time inside to ``seconds/<phase>``, and to the timeline."""
        began = timeline.now()
        try:
            yield
        finally:
            ended = timeline.now()
            timeline.keep(timeline.PHASES, phase, began, ended)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + (ended - began) / 1e9

    def share(self, began: int, seconds: Mapping[str, float]) -> None:
        """Adds the time since ``began``, of `timeline.now`, to phases one after the other, in proportion to the
        ``seconds`` that each took."""
        ended, whole = timeline.now(), math.fsum(seconds.values())
        place, passed = began, 0.0
        for phase, part in seconds.items():
            passed += part
            until = began + round((ended - began) * passed / whole) if whole else ended
            timeline.keep(timeline.PHASES, phase, place, until)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + (until - place) / 1e9
            place = until

    def count(self, phase: str, tokens: int, *, in_background: bool = False) -> None:
        """Records how many tokens ``phase`` processed, for ``tokens_per_second/<phase>``: over its own seconds, or over
        the step's if it ran ``in_background`` the other phases."""
        self._tokens[phase] = tokens
        self._beside = self._beside | {phase} if in_background else self._beside - {phase}

    def note(self, name: str, value: float) -> None:
        """Records the metric ``name`` of something that ended in this step."""
        self._noted[name] = value

    def add_peak_seconds(self, seconds: float) -> None:
        """Adds seconds that training would take GPUs at their peak, for ``mfu/train``."""
        self._at_peak += seconds

    def row(self) -> dict[str, float]:
        """Returns metrics of all phases so far, and ``seconds/step`` since the stopwatch started."""
        began, ended = Stopwatch.latest = self._began, timeline.now()
        whole = (ended - began) / 1e9
        spent = self._seconds | dict.fromkeys(self._beside, whole)
        rates = {
            f"tokens_per_second/{name}": count / spent[name] for name, count in self._tokens.items() if spent.get(name)
        }
        seconds = {f"seconds/{phase}": value for phase, value in self._seconds.items()}
        took = self._seconds.get("train")
        shares = {"mfu/train": self._at_peak / took} if self._at_peak and took else {}
        return {**seconds, **rates, **self._noted, **shares, "seconds/step": whole}


def _prompt_text(prompt: Prompt) -> str:
    """Returns a prompt as samples show it: its text, or its messages with their roles, and calls of tools as JSON."""
    return "\n\n".join(map(_message_text, prompt.messages)) or prompt.text


def _message_text(message: Mapping[str, Any]) -> str:
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if message.get("tool_calls") else ""
    said = "\n".join(filter(None, (message.get("content"), calls)))
    return f"{message['role']}: {said}"
