"""Where every prompt is that a run drew: on its way, trained on in one step, or dropped for a reason.

``runs/<name>/ledger.jsonl`` has a line for each prompt that a step trained on, or found dropped. A resume cuts the file
back to its checkpoint's step, and compares its end with the checkpoint's, and where that differs each line before it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rl_megatron.errors import CheckpointError
from rl_megatron.observability.files import JsonlFile, JsonRow, rows_from
from rl_megatron.rollout.batch import Reason, Waiting
from rl_megatron.types import Trajectory

logger = logging.getLogger(__name__)

Whereabouts = Literal["queued", "in_flight", "buffered", "left_out"]
"""Of a prompt without a line: not sent yet, being sampled or scored, scored, or dropped since the last step."""
_BEFORE: Mapping[Whereabouts, Whereabouts | None] = {
    "queued": None,
    "in_flight": "queued",
    "buffered": "in_flight",
    "left_out": "in_flight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The prompts that have a line, for checkpoints."""

    trained: int = 0
    dropped: Mapping[Reason, int] = field(default_factory=dict)
    digest: str = "0" * 64  # XOR of the SHA-256 of "<ordinal> <step, or why it was dropped>" of each
    whole: bool = True  # whether the file has them all: it was not lost
    end: str = ""  # JsonlFile.end; of older versions empty


class Ledger:
    """Follows each prompt of a Stream, and asserts what must be so; ``path`` is its file, if it has one."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else JsonlFile(path)
        self._open: dict[int, Whereabouts] = {}
        self._trained, self._dropped, self._digest, self._whole = 0, Counter[Reason](), 0, True

    def move(self, ordinals: Iterable[int], to: Whereabouts) -> None:
        """Note where these prompts are now; each goes queued, in_flight, and then buffered or left_out."""
        for ordinal in ordinals:
            assert self._open.get(ordinal) == _BEFORE[to], (ordinal, self._open.get(ordinal), to)
            self._open[ordinal] = to

    def end(self, trained: Sequence[Waiting], dropped: Sequence[Waiting], lines: Sequence[JsonRow]) -> None:
        """Note the prompts that a step trains on, and those that were dropped since the one before; ``lines`` are their
        `lines_of`, which `write` writes."""
        for one in trained:
            assert self._open.pop(one.drawn.ordinal) == "buffered", one.drawn
        for one in dropped:
            assert self._open.pop(one.drawn.ordinal) == "left_out", one.drawn
        self._count(lines)

    def write(self, lines: Sequence[JsonRow]) -> None:
        """Append the lines of prompts that have ended, durably. Called in a thread, after `end`, and one at a time."""
        if self._file is not None:
            self._file.append(lines)

    def check(self, drawn: int) -> None:
        """Find every prompt drawn in one place."""
        ended = self._trained + self._dropped.total()
        assert len(self._open) + ended == drawn, (len(self._open), self._trained, self._dropped, drawn)

    def row(self) -> dict[str, int]:
        """The metrics ``ledger/…``."""
        now = Counter(self._open.values())
        counts = {
            "queued": now["queued"],
            "in_flight": now["in_flight"],
            "buffered": now["buffered"],
            "trained": self._trained,
            "dropped": self._dropped.total() + now["left_out"],
        }
        return {f"ledger/{name}": count for name, count in {"drawn": sum(counts.values()), **counts}.items()}

    def state(self) -> LedgerState:
        """What ``restore`` continues from."""
        dropped, digest = dict(self._dropped), f"{self._digest:064x}"
        end = "" if self._file is None else self._file.end()
        return LedgerState(trained=self._trained, dropped=dropped, digest=digest, whole=self._whole, end=end)

    def restore(self, state: LedgerState, step: int, waiting: Sequence[Waiting], left_out: Sequence[Waiting]) -> None:
        """Continue after ``step``, and cut the file back to it. Prompts without an answer are queued.

        Raises CheckpointError if the lines up to ``step`` are not those of the checkpoint.
        """
        self._open = {one.drawn.ordinal: _whereabouts(one) for one in (*waiting, *left_out)}
        self._trained, self._dropped, self._digest = state.trained, Counter(state.dropped), int(state.digest, 16)
        self._whole = state.whole
        if self._file is not None:
            self._cut(self._file, state, step)

    def _cut(self, file: JsonlFile, state: LedgerState, step: int) -> None:
        file.truncate_after(step)
        if not file.path.exists():
            if self._trained or self._dropped:
                self._whole = False
                logger.warning("%s is gone: it will have the prompts of steps after %d alone", file.path, step)
            return
        if not state.whole or file.end() == state.end:
            return
        there = Ledger()
        there._count(rows_from(file.path))
        if there.state() != replace(state, end=""):
            raise CheckpointError(
                f"{file.path}: its {there._trained} prompts trained on and {there._dropped.total()} dropped up to step "
                f"{step} are not the {state.trained} and {sum(state.dropped.values())} of the checkpoint; restore the "
                "file, or remove it to resume without its lines"
            )

    def _count(self, rows: Iterable[JsonRow]) -> None:
        for row in rows:
            ended = row["step"] if row["state"] == "trained" else row["reason"]
            self._digest ^= int(hashlib.sha256(f"{row['ordinal']} {ended}".encode()).hexdigest(), 16)
            if row["state"] == "trained":
                self._trained += 1
            else:
                self._dropped[row["reason"]] += 1  # type: ignore[index]


def _whereabouts(one: Waiting) -> Whereabouts:
    if one.answered is None:
        return "queued"
    return "buffered" if one.answered.group is not None else "left_out"


def lines_of(step: int, places: Sequence[Waiting]) -> list[JsonRow]:
    """The lines of prompts that end with ``step``; visits every turn."""
    return [_line(step, one) for one in places]


def _line(step: int, one: Waiting) -> JsonRow:
    """A line of the file; ``spans`` are of each completion or trajectory.

    ``failed`` counts completions whose reward failed, and trajectories whose environment did, those that others
    replaced (environment.spare) too.
    """
    assert one.answered is not None
    group, reason = one.answered.group, one.answered.reason
    return {
        "step": step,
        "ordinal": one.drawn.ordinal,
        "prompt": one.drawn.prompt.id,
        "state": "dropped" if group is None else "trained",
        "reason": reason,
        "birth": one.birth,
        "failed": sum(scored.error is not None for scored in one.answered.scored),
        "spans": "" if group is None else ", ".join(map(_spans, group.trajectories)),
    }


def _spans(trajectory: Trajectory) -> str:
    """Where another version goes on, as <first token>:<version>, counted over the sampled tokens of all turns."""
    found, sampled, last = list[str](), 0, None
    for turn in trajectory.turns:
        for span in turn.spans:
            if span.version != last:
                found.append(f"{sampled + span.start}:{span.version}")
                last = span.version
        sampled += len(turn.logprobs)
    return " ".join(found)
