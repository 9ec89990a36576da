"""Writes and reads sample completions of a run: runs/<name>/samples.jsonl."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rl_megatron.errors import DataError
from rl_megatron.observability.files import JsonlFile, JsonRow, from_the_end, read_jsonl, rows_from
from rl_megatron.types import Prompt

_MOST_OF_STEP = 256  # rows that `samples_between` takes


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTurn:
    """What the model ``read`` since its turn before, such as a tool's answer, and what it ``said``."""

    read: str
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One completion as text, all that the model said in its turns, with its reward at ``step``."""

    step: int
    prompt: str
    completion: str
    answer: str
    reward: float
    turns: tuple[SampleTurn, ...] = ()  # if there are several


def prompt_text(prompt: Prompt) -> str:
    """A prompt as samples show it: its text, or of messages each one with its role, and calls of tools as JSON."""
    return "\n\n".join(map(_message_text, prompt.messages)) or prompt.text


def _message_text(message: Mapping[str, Any]) -> str:
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if message.get("tool_calls") else ""
    said = "\n".join(filter(None, (message.get("content"), calls)))
    return f"{message['role']}: {said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSearch:
    """Which samples are looked for; None: all. Lengths are characters of the completion."""

    text: str | None = None  # in prompt, completion, answer or what was read between turns, whatever its case
    least_reward: float | None = None
    most_reward: float | None = None
    least_length: int | None = None
    most_length: int | None = None
    step: int | None = None
    group: str | None = None  # `prompt_digest` the prompt, with ``step``

    def finds(self, row: SampleRow) -> bool:
        """Whether the row is one of them."""
        texts = (row.prompt, row.completion, row.answer, *(turn.read for turn in row.turns))
        return (
            (self.text is None or any(self.text.casefold() in text.casefold() for text in texts))
            and (self.least_reward is None or row.reward >= self.least_reward)
            and (self.most_reward is None or row.reward <= self.most_reward)
            and (self.least_length is None or len(row.completion) >= self.least_length)
            and (self.most_length is None or len(row.completion) <= self.most_length)
            and (self.step is None or row.step == self.step)
            and (self.group is None or prompt_digest(row.prompt) == self.group)
        )


def prompt_digest(prompt: str) -> str:
    """A short name of the completions of a step to one prompt, which may be too long for an address."""
    return hashlib.sha256(prompt.encode(errors="surrogatepass")).hexdigest()[:16]


class SamplesWriter:
    """Appends to ``folder``/samples.jsonl. Controller process only."""

    def __init__(self, folder: Path) -> None:
        self._file = JsonlFile(folder / "samples.jsonl")

    def write(self, rows: Iterable[SampleRow]) -> None:
        """Rows are on disk when this returns. Raises ValueError for a reward that is not finite."""
        self._file.append(_written(row) for row in rows)

    def truncate_after(self, step: int) -> int:
        """Prepare a resume from ``step``: remove later rows and a torn last line. Returns how many rows went."""
        return self._file.truncate_after(step)

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def read_samples(path: Path) -> list[SampleRow]:
    """All rows in file order. Raises DataError that names the file for a row with other fields."""
    return [_sample(path, row) for row in read_jsonl(path)]


def samples_between(path: Path) -> list[SampleRow]:
    """Those of the first step, of one at the middle of the file (from there on) and of the last; 256 of each at most.

    Reads no more of the file, which may be long. Raises DataError as `read_samples`.
    """
    found: dict[object, Sequence[JsonRow]] = {}
    for rows in (rows_from(path), rows_from(path, 0.5)):
        for step, alike in islice(groupby(rows, lambda row: row["step"]), 1):
            found.setdefault(step, [*islice(alike, _MOST_OF_STEP)])
    for step, alike in islice(groupby(from_the_end(path), lambda row: row["step"]), 1):
        found[step] = [*islice(alike, _MOST_OF_STEP)][::-1]
    return [_sample(path, row) for rows in found.values() for row in rows]


def search_samples(path: Path, search: SampleSearch, *, skip: int, limit: int) -> tuple[list[SampleRow], bool]:
    """At most ``limit`` samples after the first ``skip``, the latest first, and whether there are more.

    Reads no more of the file than that. Raises DataError as `read_samples`; a file that is not there has none.
    """
    if not path.exists():
        return [], False
    found = (sample for row in from_the_end(path) if search.finds(sample := _sample(path, row)))
    rows = list(islice(found, skip, skip + limit + 1))
    return rows[:limit], len(rows) > limit


def _written(row: SampleRow) -> dict[str, object]:
    fields = asdict(row)
    if not row.turns:
        del fields["turns"]
    return fields


def _sample(path: Path, row: JsonRow) -> SampleRow:
    match row:
        case {
            "step": int(step),
            "prompt": str(prompt),
            "completion": str(completion),
            "answer": str(answer),
            "reward": float(reward) | int(reward),
        }:
            found = SampleRow(step=step, prompt=prompt, completion=completion, answer=answer, reward=reward)
            given: object = row.get("turns", [])
            turns = [_turn(turn) for turn in given] if isinstance(given, list) else [None]
            if None not in turns:
                return replace(found, turns=tuple(turn for turn in turns if turn is not None))
    fields = ", ".join(field.name for field in dataclass_fields(SampleRow))
    raise DataError(f"{path}: a row of step {row['step']} has the fields {', '.join(row)}; a sample has {fields}")


def _turn(given: object) -> SampleTurn | None:
    match given:
        case {"read": str(read), "said": str(said)}:
            return SampleTurn(read=read, said=said)
    return None
