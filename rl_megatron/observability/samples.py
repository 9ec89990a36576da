"""Writes and reads sample completions of a run: runs/<name>/samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def latest_samples(path: Path) -> Iterator[SampleRow]:
    """The rows, the last one first; a file that is not there has none. Reads no more of the file than is asked for.

    Raises DataError as `read_samples`.
    """
    if path.exists():
        yield from (_sample(path, row) for row in from_the_end(path))


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
