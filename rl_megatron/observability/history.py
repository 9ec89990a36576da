"""Reads a run's folder: its rows, resolved configuration and samples. Writes the samples (samples.jsonl).

Rows of metrics are kept by column: a number takes 13 bytes, while in a dict for each row it takes about 120.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray

from rl_megatron.errors import DataError
from rl_megatron.files import parse
from rl_megatron.observability.files import (
    STEPS,
    JsonlFile,
    JsonRow,
    JsonValue,
    from_the_end,
    number,
    read_jsonl,
    rows_from,
    whole_rows,
)
from rl_megatron.observability.log import last_warnings
from rl_megatron.observability.metrics import with_current_names

_MOST_OF_STEP = 256  # rows that `samples_between` takes


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTurn:
    """The text that the model ``read`` since its last turn, such as a tool's answer, and its ``sampled`` text."""

    read: str
    sampled: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One completion as text, all that the model sampled in its turns, with its reward at ``step``."""

    step: int
    prompt: str
    completion: str
    answer: str
    reward: float
    turns: tuple[SampleTurn, ...] = ()  # empty for a single turn


class SamplesWriter:
    """Appends to ``folder``/samples.jsonl. Controller process only."""

    def __init__(self, folder: Path) -> None:
        self._file = JsonlFile(folder / "samples.jsonl")

    def write(self, rows: Iterable[SampleRow]) -> None:
        """Rows are on disk when this returns. Raises ValueError for a reward that is not finite."""
        self._file.append(_written(row) for row in rows)

    def truncate_after(self, step: int) -> int:
        """Prepares a resume from ``step``: removes later rows and a torn last line. Returns the number of rows."""
        return self._file.truncate_after(step)

    def close(self) -> None:
        """Releases the file."""
        self._file.close()


def read_samples(path: Path) -> list[SampleRow]:
    """Returns all rows in file order. Raises DataError that names the file for a row with other fields."""
    return [_sample(path, row) for row in read_jsonl(path)]


def samples_between(path: Path) -> list[SampleRow]:
    """Returns rows of the first step, of one from the middle of the file on, and of the last; 256 of each at most.
    Reads no more of the file, which may be long. Raises DataError like `read_samples`."""
    found: dict[object, Sequence[JsonRow]] = {}
    for rows in (rows_from(path), rows_from(path, 0.5)):
        for step, alike in islice(groupby(rows, lambda row: row["step"]), 1):
            found.setdefault(step, [*islice(alike, _MOST_OF_STEP)])
    for step, alike in islice(groupby(from_the_end(path), lambda row: row["step"]), 1):
        found[step] = [*islice(alike, _MOST_OF_STEP)][::-1]
    return [_sample(path, row) for rows in found.values() for row in rows]


def latest_samples(path: Path) -> Iterator[SampleRow]:
    """Yields the rows, the last one first; none if there is no file. Reads no more of the file than is needed. Raises
    DataError like `read_samples`."""
    if path.exists():
        yield from (_sample(path, row) for row in from_the_end(path))


def _written(row: SampleRow) -> dict[str, object]:
    fields, turns = asdict(row), [{"read": turn.read, "said": turn.sampled} for turn in row.turns]
    del fields["turns"]
    return {**fields, "turns": turns} if turns else fields


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
    raise DataError(f"{path}: a row of step {row['step']} has the fields {', '.join(row)}; expected {fields}")


def _turn(given: object) -> SampleTurn | None:
    match given:
        case {"read": str(read), "said": str(said)}:
            return SampleTurn(read=read, sampled=said)
    return None


class MetricColumns:
    """The numbers of the rows that were added, and NaN for other values, such as texts."""

    def __init__(self) -> None:
        self._num = 0
        self._columns: dict[str, tuple[array[int], array[float]]] = {}  # the rows that have a metric, and its values

    def __len__(self) -> int:
        return self._num

    @property
    def names(self) -> list[str]:
        """The names of all metrics, by their first row."""
        return list(self._columns)

    def values(self, name: str) -> NDArray[np.float64]:
        """Returns the values of a metric in each row; NaN if it is not a finite number, or the row lacks it."""
        found = np.full(self._num, math.nan)
        if name in self._columns:
            places, values = self._columns[name]
            found[np.array(places)] = np.array(values)
        return np.where(np.isfinite(found), found, math.nan)

    def recorded(self, name: str) -> NDArray[np.intp]:
        """Returns the indices of the rows that have a metric, ascending."""
        return np.unique(np.array(self._columns[name][0] if name in self._columns else [], np.intp))

    def rows(self, *names: str) -> list[JsonRow]:
        """Returns these metrics of each row, as far as it has them; None for values that are not finite numbers."""
        found = [dict[str, JsonValue]() for _ in range(self._num)]
        for name in names:
            values = self.values(name).tolist()
            for at in self.recorded(name).tolist():
                found[at][name] = None if math.isnan(values[at]) else values[at]
        return [*found]

    def append(self, row: JsonRow) -> None:
        """Adds a row."""
        self._num += 1
        self.put(self._num - 1, row)

    def put(self, at: int, row: JsonRow) -> None:
        """Adds these values to a row, in place of values of the same names."""
        for name, value in row.items():
            if name not in self._columns:
                self._columns[name] = array("i"), array("d")
            places, values = self._columns[name]
            places.append(at)
            try:
                values.append(cast("float", value))
            except (TypeError, OverflowError):
                values.append(math.nan)


Floats = NDArray[np.float64]
STEP_SPEED, WITH_GRADIENT = "tokens_per_second/step", "groups/with_gradient"
"""Figures that rows lack: sampled (or else trained) tokens over a whole step's seconds, and the share of groups that
have different rewards."""
STARTS = "starts.jsonl"
"""File of a run's folder: a row for each start of the run, with the step, the UTC time, and commits and versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRows:
    """The n rows of a run that have a metric, in the order of their places on a chart: rows of a warm start first."""

    x: Floats  # [n], the x of charts
    run: Run
    warm_start: NDArray[np.intp]  # indices of the run's rows
    rl: NDArray[np.intp]

    def values(self, name: str) -> Floats:
        """Returns the values of any metric in these rows, [n]; NaN if it is null, or not recorded."""
        of = self.run.warm_start.values(name)[self.warm_start], self.run.rl.values(name)[self.rl]
        return np.concatenate(of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. ``config`` is flat: ``learner.ep`` -> the value as YAML text."""

    label: str
    warm_start: MetricColumns
    rl: MetricColumns
    names: Sequence[str]  # names of all metrics in its rows, by their first row
    config: Mapping[str, str]
    samples: Sequence[SampleRow]  # completions of its first, a middle and its last step
    plan: Mapping[str, float] = field(default_factory=dict)  # the planner's values of metrics, by name
    warnings: Sequence[str] = ()  # the last ones of its log
    starts: Sequence[JsonRow] = ()

    @property
    def versions(self) -> Mapping[str, str]:
        """The version of each package and commit that the run started with, and each that it continued with."""
        found = dict[str, str]()
        last: JsonRow = {}
        for row in self.starts:
            for name in dict.fromkeys((*last, *row)):
                if name in ("step", "time") or last.get(name) == (now := row.get(name)):
                    continue
                text = "none" if now is None else str(now)
                found[name] = f"{found.get(name, 'none')}; from step {row['step']}: {text}" if last else text
            last = row
        return found

    def numbers(self, name: str, *, phase: str = "rl") -> list[float]:
        """Returns the recorded values of a metric in step order, without nulls."""
        values = (self.rl if phase == "rl" else self.warm_start).values(name)
        found: list[float] = values[~np.isnan(values)].tolist()
        return found

    def metric_rows(self, name: str, *, warm_start: bool) -> MetricRows:
        """Returns the rows with a metric. Metrics of the warm start have its rows, by their steps. Other metrics have
        rows of steps, and with ``warm_start`` before them the warm start's, at x in [-1, 0)."""
        first, rl = self.warm_start.recorded(name), self.rl.recorded(name)
        steps = _numbers_of(self.warm_start, "warm_start/step")
        if name.startswith("warm_start/"):
            return MetricRows(x=steps[first], run=self, warm_start=first, rl=rl[:0])
        first = first if warm_start else first[:0]
        x = steps[first] / (self.warm_steps + 1) - 1, _numbers_of(self.rl, "step")[rl]
        return MetricRows(x=np.concatenate(x), run=self, warm_start=first, rl=rl)

    @property
    def warm_steps(self) -> int:
        """The last step of the warm start."""
        return int(_numbers_of(self.warm_start, "warm_start/step").max(initial=0))

    @property
    def success_reward(self) -> float:
        """The reward from which a completion counts as right."""
        return float(self.config.get("eval.success_reward", "1"))


def load_runs(
    folders: Sequence[Path],
    left_out: Callable[[str], None] | None = None,
    each_row: Callable[[JsonRow], None] = lambda row: None,
) -> list[Run]:
    """Loads each folder's run, labeled by its name, and by its parents' names if names repeat. ``each_row`` is called
    with the rows of metrics as they are read.

    Raises DataError for a folder without config.yaml or rows in metrics.jsonl, or with lines that are not rows; and for
    an invalid plan, unless ``left_out`` takes the message.
    """
    if not folders:
        raise DataError("no run folder is given; give one or more, for example runs/<name>")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DataError(f"the same run folder is given twice: {', '.join(map(str, folders))}; give each once")
    return [_load(folder, label, left_out, each_row) for folder, label in zip(folders, _labels(folders), strict=True)]


def headline_figures(run: Run) -> dict[str, str]:
    """Returns headline figures by label; a dash for figures that the run has not recorded."""
    warm, rl = run.numbers("eval/accuracy", phase="warm_start"), run.numbers("eval/accuracy")
    first = run.rl.values("eval/accuracy")[run.rl.values("step") == 0]
    at_zero = first[~np.isnan(first)].tolist()
    seconds, tokens = sum(run.numbers("seconds/step")), sum(run.numbers("tokens/rollout"))
    all_seconds = seconds + sum(run.numbers("seconds/step", phase="warm_start"))
    minutes, rest = divmod(round(all_seconds), 60)
    last = int(_numbers_of(run.rl, "step")[-1]) if len(run.rl) else 0
    mismatch = run.numbers("mismatch/logprob_abs_mean")
    rewards = run.numbers("reward/mean")
    tail = rewards[-max(1, len(rewards) // 10) :]
    losses, ordered = run.numbers("eval/loss"), run.numbers("eval/preference_accuracy")
    trained = 0.0 if tokens else sum(run.numbers("tokens/train"))
    return {
        "name": run.label,
        "before": _share((warm or at_zero)[:1]),
        "warm": _share(warm[-1:]),
        "after": _share(rl[-1:]),
        "first_loss": number_text(losses[0]) if losses else "-",
        "loss": number_text(losses[-1]) if losses else "-",
        "ordered": _share(ordered[-1:]),
        "reward": number_text(sum(tail) / len(tail)) if tail else "-",
        "reward_steps": str(len(tail)),
        "steps": f"{last} of {run.config['train.steps']}" if _says_steps(run) else str(last),
        "time": f"{minutes} min {rest} s" if all_seconds else "-",
        "speed": f"{tokens / seconds:,.0f}" if seconds and tokens else "-",
        "trained": f"{trained / seconds:,.0f}" if seconds and trained else "-",
        "mismatch": number_text(sum(mismatch) / len(mismatch)) if mismatch else "-",
    }


def number_text(value: float) -> str:
    """Formats a number: four digits or more, thousands with a comma."""
    if value and (abs(value) < 1e-4 or abs(value) >= 1e7):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _says_steps(run: Run) -> bool:
    """True if the configuration gives the number of steps, and not that of passes over the data."""
    epochs = f"{run.config.get('job', '')}.epochs"
    return "train.steps" in run.config and run.config.get(epochs, "null") == "null"


def _share(values: Sequence[float]) -> str:
    return f"{100 * values[0]:.1f} %" if values else "-"


def _load(folder: Path, label: str, left_out: Callable[[str], None] | None, each_row: Callable[[JsonRow], None]) -> Run:
    metrics = folder / "metrics.jsonl"
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder}: it has no config.yaml; give run folders, for example runs/<name>")
    if not metrics.is_file() or next(rows_from(metrics), None) is None:
        raise DataError(f"{metrics}: no step is recorded yet; wait for the run's first row")
    samples = folder / "samples.jsonl"
    warm_start, rl = _steps(metrics, each_row)
    return Run(
        label=label,
        warm_start=warm_start,
        rl=rl,
        names=tuple(dict.fromkeys((*warm_start.names, *rl.names))),
        config=_config(folder / "config.yaml", (folder / "config.yaml").stat().st_mtime_ns),
        samples=samples_between(samples) if samples.is_file() else [],  # log.samples_per_step=0 writes none
        plan=_plan(folder / "plan.json", left_out),
        warnings=last_warnings(folder),
        starts=_starts(folder / STARTS, left_out),
    )


def _steps(metrics: Path, each_row: Callable[[JsonRow], None]) -> tuple[MetricColumns, MetricColumns]:
    """Returns the warm start's rows, and those of steps, each with the figures of its step's row of phase ``eval``,
    which is written when that evaluation has ended."""
    warm_start, rl, evaluated = MetricColumns(), MetricColumns(), dict[JsonValue, JsonRow]()
    for row in map(with_current_names, rows_from(metrics)):
        each_row(row)
        if row.get("phase") == "warm_start":
            warm_start.append(row)
        elif row.get("phase") in STEPS:
            rl.append(row)
        elif row.get("phase") == "eval":
            evaluated[row["step"]] = {name: value for name, value in row.items() if name.startswith("eval/")}
    for at, step in enumerate(rl.values("step").tolist() if evaluated else ()):
        if step in evaluated:
            rl.put(at, evaluated[step])
    seconds, tokens = rl.values("seconds/step"), rl.values("tokens/rollout")
    tokens = np.where(np.isnan(tokens), rl.values("tokens/train"), tokens)
    speed = tokens / np.where(seconds > 0, seconds, math.nan)
    for name, values in ((STEP_SPEED, speed), (WITH_GRADIENT, 1 - rl.values("groups/zero_advantage_fraction"))):
        for at in np.flatnonzero(~np.isnan(values)).tolist():
            rl.put(at, {name: float(values[at])})
    return warm_start, rl


def _numbers_of(rows: MetricColumns, name: str) -> Floats:
    """Returns the numbers of a column, with 0 in place of missing ones."""
    return np.nan_to_num(rows.values(name), nan=0.0)


def _starts(path: Path, left_out: Callable[[str], None] | None) -> list[JsonRow]:
    return whole_rows(path, left_out) if path.is_file() else []  # runs of older versions have none


def _plan(path: Path, left_out: Callable[[str], None] | None) -> dict[str, float]:
    """Returns the plan of a run on GPUs; other runs have no plan. ``left_out`` gets the message of a damaged one; if it
    is None, raises DataError."""
    try:
        found = parse(path.read_bytes()) if path.is_file() else {}
        if unknown := [f"{name} is {value!r:.80}" for name, value in found.items() if number(found, name) is None]:
            raise ValueError(f"{unknown[0]}, not a finite number")
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, AttributeError) as error:
        message = f"{path}: not a plan ({error}); remove it"
        if left_out is None:
            raise DataError(message) from error
        left_out(message)
        return {}


_UNSHOWN = "slurm.environment."  # a job's variables may hold keys, and reports are shared


def _labels(folders: Sequence[Path]) -> list[str]:
    parts = [folder.resolve().parts for folder in folders]
    depth = next(d for d in range(1, max(map(len, parts)) + 1) if len({p[-d:] for p in parts}) == len(parts))
    return ["/".join(p[-depth:]) for p in parts]


@lru_cache(64)  # it takes a tenth of a second, and the page of a running run needs it again and again
def _config(path: Path, changed: int) -> Mapping[str, str]:
    """Returns the flat configuration. ``changed``: nanoseconds, the file's modification time, for the cache."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        flat = _flat(raw, "")
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:  # !!int a, !!bool a, [[[...
        raise DataError(f"{path}: not YAML: {error!s:.500}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{path}: not a configuration: the top is {type(raw).__name__}, not a mapping")
    return dict(flat)


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{name}.{key}" if name else str(key))]
    if name.startswith(_UNSHOWN):
        return [(name, "(not shown)")]
    return [(name, value if isinstance(value, str) else json.dumps(value, default=str))]
