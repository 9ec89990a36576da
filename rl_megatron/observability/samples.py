"""Writes and reads sample completions of a run: runs/<name>/samples.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path

from rl_megatron.errors import DataError
from rl_megatron.observability.files import JsonlFile, JsonRow, read_jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One completion as text, with its reward at ``step``."""

    step: int
    prompt: str
    completion: str
    answer: str
    reward: float


class SamplesWriter:
    """Appends to ``folder``/samples.jsonl. Controller process only."""

    def __init__(self, folder: Path) -> None:
        self._file = JsonlFile(folder / "samples.jsonl")

    def write(self, rows: Iterable[SampleRow]) -> None:
        """Rows are on disk when this returns. Raises ValueError for a reward that is not finite."""
        self._file.append(asdict(row) for row in rows)

    def truncate_after(self, step: int) -> int:
        """Prepare a resume from ``step``: remove later rows and a torn last line. Returns how many rows went."""
        return self._file.truncate_after(step)

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def read_samples(path: Path) -> list[SampleRow]:
    """All rows in file order. Raises DataError that names the file for a row with other fields."""
    return [_sample(path, row) for row in read_jsonl(path)]


def _sample(path: Path, row: JsonRow) -> SampleRow:
    match row:
        case {
            "step": int(step),
            "prompt": str(prompt),
            "completion": str(completion),
            "answer": str(answer),
            "reward": float(reward) | int(reward),
        }:
            return SampleRow(step=step, prompt=prompt, completion=completion, answer=answer, reward=reward)
    fields = ", ".join(field.name for field in dataclass_fields(SampleRow))
    raise DataError(f"{path}: a row of step {row['step']} has the fields {', '.join(row)}; a sample has {fields}")
