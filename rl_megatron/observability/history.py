"""Reads a run's folder: its rows, resolved configuration and samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl_megatron.errors import DataError
from rl_megatron.observability.files import JsonRow, read_jsonl
from rl_megatron.observability.samples import SampleRow, read_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. ``config`` is flat: ``learner.ep`` -> the value as YAML text."""

    label: str
    warm_start: Sequence[JsonRow]
    rl: Sequence[JsonRow]
    config: Mapping[str, str]
    samples: Sequence[SampleRow]

    def numbers(self, name: str, *, phase: str = "rl") -> list[float]:
        """The recorded values of a metric in step order, without nulls."""
        rows = self.rl if phase == "rl" else self.warm_start
        return [value for row in rows if (value := number(row, name)) is not None]

    @property
    def success_reward(self) -> float:
        """The reward from which a completion counts as right."""
        return float(self.config.get("eval.success_reward", "1"))


def number(row: JsonRow, name: str) -> float | None:
    """The value, or None if it is missing or was not finite."""
    value = row.get(name)
    return value if isinstance(value, int | float) else None


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Each folder's run, labelled by its name, and by its parents' names if names repeat.

    Raises DataError for a folder without metrics.jsonl or config.yaml, with no rows, or with lines that are not rows.
    """
    if not folders:
        raise DataError("no run folder is given; give one or more, for example runs/<name>")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DataError(f"the same run folder is given twice: {', '.join(map(str, folders))}; give each once")
    return [_load(folder, label) for folder, label in zip(folders, _labels(folders), strict=True)]


def _load(folder: Path, label: str) -> Run:
    for name in ("metrics.jsonl", "config.yaml"):
        if not (folder / name).is_file():
            raise DataError(f"{folder}: it has no {name}; give run folders, for example runs/<name>")
    rows = read_jsonl(folder / "metrics.jsonl")
    if not rows:
        raise DataError(f"{folder / 'metrics.jsonl'}: no step is recorded yet; wait for the run's first row")
    samples = folder / "samples.jsonl"
    return Run(
        label=label,
        warm_start=[row for row in rows if row.get("phase") == "warm_start"],
        rl=[row for row in rows if row.get("phase") == "rl"],
        config=_config(folder / "config.yaml"),
        samples=read_samples(samples) if samples.is_file() else [],  # log.samples_per_step=0 writes none
    )


_UNSHOWN = "slurm.environment."  # a job's variables may hold services' keys, and reports are shared


def _labels(folders: Sequence[Path]) -> list[str]:
    parts = [folder.resolve().parts for folder in folders]
    depth = next(d for d in range(1, max(map(len, parts)) + 1) if len({p[-d:] for p in parts}) == len(parts))
    return ["/".join(p[-depth:]) for p in parts]


def _config(path: Path) -> dict[str, str]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{path}: not a configuration: the top is {type(raw).__name__}, not a mapping")
    return dict(_flat(raw, ""))


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{name}.{key}" if name else str(key))]
    if name.startswith(_UNSHOWN):
        return [(name, "(not shown)")]
    return [(name, value if isinstance(value, str) else json.dumps(value, default=str))]
