"""The file of a study: a base configuration, axes of overrides, seeds, a budget and what is evaluated."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from rl_megatron.config import yaml_text
from rl_megatron.config.errors import near_miss
from rl_megatron.errors import ConfigError, shorten
from rl_megatron.observability.metrics.table import documented
from rl_megatron.section import Finite, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

Level = str | list[str] | dict[str, str | list[str]]
"""One place on an axis: an override, several, or ``{label: override or several}``."""


class Budget(Section):
    """How much of this machine, and of time, the cells may use. A cell that is stopped by it is saved."""

    cells_at_once: Positive | None = None
    """Cells side by side; null: as many as this machine's cores allow, or one on GPUs."""
    cell_minutes: PositiveFloat | None = None
    """Longest time of one cell, all its starts together; null: none."""
    minutes: PositiveFloat | None = None
    """Longest time of one ``experiment run``; null: none."""


class Outcome(Section):
    """What is compared and fitted: a metric of metrics.jsonl, over a measure of compute."""

    metric: str = "eval/accuracy"
    """Metric that is compared between arms and fitted."""
    last: Positive = 1
    """A run's result is the mean of the metric's last so many values; it has none if one of them is not finite."""
    compute: Literal["steps", "tokens", "device_seconds", "flops"] = "steps"
    """The compute C of a fit: RL steps, tokens sampled, seconds times learner processes, or FLOPs of training."""
    from_compute: NonNegativeFloat = 0.0
    """Values at less compute are left out of fits."""

    @property
    def limits(self) -> tuple[float, float] | None:
        """What the metric cannot leave; None: anything is possible."""
        return (0.0, 1.0) if self.metric == "eval/accuracy" else None


class Study(Section):
    """A study: every combination of its axes is an arm, and an arm has a cell, which is a run, for each seed."""

    base: str = "tiny_cpu"
    """A configuration under conf/, or a YAML file beside the study's."""
    overrides: Sequence[str] = ()
    """Overrides of all cells, as on the command line."""
    axes: dict[str, Annotated[list[Level], Field(min_length=1)]] = Field(default_factory=dict)
    """By name, the levels of each axis: an override, a list of them, or ``label: override(s)``."""
    combine: Literal["product", "zip"] = "product"
    """product: every level with every level of the others; zip: the first levels together, then the second ones."""
    seeds: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = (0, 1, 2)
    """Seeds of each arm."""
    paired: bool = True
    """Whether arms share seeds, so that a difference is taken seed by seed; else each arm has seeds of its own."""
    reference: str | None = None
    """The arm with which others are compared; null: the first."""
    contrasts: dict[str, Annotated[dict[str, Finite], Field(min_length=1)]] = Field(default_factory=dict)
    """Further differences: by name, the weight of each arm in a sum over arms, as 1 and -1."""
    budget: Budget = Budget()
    evaluation: Outcome = Outcome()
    folder: Path | None = None
    """Folder of the cells' run folders; null: runs/<name of the study's file>."""

    def with_outcome(self, metric: str | None, last: int | None) -> Study:
        """The study that compares another metric, or the mean of another number of its values; None: the file's.

        Raises ConfigError for a metric that is not documented.
        """
        if metric is not None and documented(metric) is None:
            raise ConfigError(f"--metric {metric}: no such metric; docs/metrics.md lists them")
        given = {key: value for key, value in (("metric", metric), ("last", last)) if value is not None}
        return self.model_copy(update={"evaluation": self.evaluation.model_copy(update=given)})


def read_study(path: Path, more: Sequence[str] = ()) -> Study:
    """The study of a YAML file, with its folder and its base found, and with ``more`` overrides after the file's.

    Raises one ConfigError for all that is wrong.
    """
    try:
        tree = yaml_text.read(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {shorten(tree)}; a study's file is a mapping, `key: value` a line")
    try:
        study = Study.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_line(path, each) for each in error.errors()))) from error
    study = study.model_copy(update={"overrides": (*study.overrides, *more)})
    if problems := [f"{path}: {text}" for text in _problems(study)]:
        raise ConfigError("\n".join(problems))
    beside = Path(study.base).suffix in {".yaml", ".yml"}
    return study.model_copy(
        update={
            "base": str(path.parent / study.base) if beside else study.base,
            "folder": study.folder or Path("runs") / path.stem,
        }
    )


def outcome_folder(metric: str | None, last: int | None, overrides: Sequence[str]) -> Path:
    """Where a report lies in its study's folder: there if nothing else is asked for, or under ``outcomes/``.

    Its name has all that is asked for; a hash too, of overrides that no file could be named by.
    """
    parts = [metric.replace("/", "-")] if metric else []
    parts += [f"last={last}"] if last is not None else []
    given = ",".join(overrides)
    named = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", given)[:120]
    if named != given or "," in "".join(overrides):
        named += f"-{hashlib.sha256(repr(list(overrides)).encode()).hexdigest()[:8]}"
    parts += [named] if named else []
    return Path("outcomes", ",".join(parts)) if parts else Path()


def levels_of(axis: Sequence[Level]) -> list[tuple[str, list[str]]]:
    """An axis's labels, each with its overrides."""
    return [_labelled(level) for level in axis]


def _labelled(level: Level) -> tuple[str, list[str]]:
    if isinstance(level, dict):
        ((label, given),) = level.items()
        return label, [given] if isinstance(given, str) else list(given)
    given = [level] if isinstance(level, str) else list(level)
    return " ".join(_short(each) for each in given), given


def _short(override: str) -> str:
    """The choice of a group, as ``gspo``; else the key's last part with its value."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value}" if "." in key else value


def _problems(study: Study) -> list[str]:
    found = []
    for name, axis in study.axes.items():
        found += [
            f"axes.{name}: {shorten(level)}: must be one label with its overrides, so give each label a line of its own"
            for level in axis
            if isinstance(level, dict) and len(level) != 1
        ]
    if found:
        return found
    sizes = {name: len(axis) for name, axis in study.axes.items()}
    if study.combine == "zip" and len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in sizes.items())
        found.append(f"combine=zip: axes must have equally many levels; {listed}")
    keys: dict[str, str] = {}
    for name, axis in study.axes.items():
        for key in dict.fromkeys(each.partition("=")[0] for _, given in levels_of(axis) for each in given):
            if key in keys:
                found.append(f"axes.{name} and axes.{keys[key]} both set {key}, so one would hide the other")
            keys[key] = name
    places = {
        "overrides": study.overrides,
        **{f"axes.{n}": [o for _, g in levels_of(a) for o in g] for n, a in study.axes.items()},
    }
    for place, given in places.items():
        found += [f"{place}: {each}: {why}" for each in given if (why := _RESERVED.get(each.partition("=")[0]))]
    if len(set(study.seeds)) < len(study.seeds):
        found.append(f"seeds={list(study.seeds)}: a seed is given twice; its runs would be one run")
    if documented(metric := study.evaluation.metric) is None:
        found.append(f"evaluation.metric={metric}: no such metric; docs/metrics.md lists them")
    return found


_RESERVED: Mapping[str, str] = {
    "seed": "the study gives each cell its seed; name them in `seeds`",
    "run.name": "a cell's folder is named by its configuration; remove it",
    "run.dir": "cells are in the study's folder; set `folder`",
}


def _line(path: Path, error: ErrorDetails) -> str:
    """One line: file, key, value, and what is allowed."""
    parts = [str(part) for part in error["loc"] if part not in {"str", "list[str]", "dict[str,union[str,list[str]]]"}]
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        section: Any = Study
        for part in parts[:-1]:
            section = section.model_fields[part].annotation
        keys = list(section.model_fields)
        near = near_miss(parts[-1], keys)
        return f"{path}: {key}={shorten(error['input'])}: no such key{near}; keys: {', '.join(keys)}"
    if parts[:1] == ["axes"] and len(parts) > 2:
        wanted = "an override as text, a list of them, or one label with its override(s)"
        return f"{path}: {'.'.join(parts[:3])}: {shorten(error['input'])}: must be {wanted}"
    text = (
        "at least one"
        if error["type"] == "too_short"
        else error["msg"].removeprefix("Input should ").removeprefix("be ")
    )
    return f"{path}: {key}={shorten(error['input'])}: must be {text}"
