"""The file of a study: a base configuration, axes of overrides, seeds, a budget and the evaluation; and its cells.

Each cell has a checked configuration and the name of its run folder. A study cannot use metrics that runs of its
cells' configurations never record.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from rl_megatron.config import yaml_text
from rl_megatron.config.errors import closest_key
from rl_megatron.config.io import load_config
from rl_megatron.config.resume import flat
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import MixtureData
from rl_megatron.config.sections.eval import EvalSetSection
from rl_megatron.config.sections.jobs import JobKind
from rl_megatron.errors import ConfigError, quote_start
from rl_megatron.feature import features
from rl_megatron.observability.metrics import ENVIRONMENTS, SAMPLING, describe_unknown, documented
from rl_megatron.placement.ranks import ranks_by_role
from rl_megatron.section import Finite, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from rl_megatron.weights.layouts.families import read_shape

Level = str | list[str] | dict[str, str | list[str]]
"""One level of an axis: an override, several, or ``{label: override or several}``."""


class Budget(Section):
    """The limits on the cells' use of this machine and of time. A cell that they stop is saved."""

    cells_at_once: Positive | None = None
    """Cells side by side; null: as many as this machine's cores allow, or one on GPUs."""
    cell_minutes: PositiveFloat | None = None
    """Longest time of one cell, all its starts together; null: none."""
    minutes: PositiveFloat | None = None
    """Longest time of one ``experiment run``; null: none."""


class Outcome(Section):
    """The metric of metrics.jsonl that is compared and fitted, over a measure of compute."""

    metric: str = "eval/accuracy"
    """Metric that is compared between arms and fitted."""
    last: Positive = 1
    """A run's result is the mean of this many last values of the metric; it has none if one of them is not finite."""
    compute: Literal["steps", "tokens", "device_seconds", "flops"] = "steps"
    """The compute C of a fit: RL steps, tokens sampled, seconds times learner processes, or FLOPs of training."""
    from_compute: NonNegativeFloat = 0.0
    """Values at less compute are left out of fits."""

    @property
    def limits(self) -> tuple[float, float] | None:
        """The lowest and highest values of the metric; None: it has no limits."""
        return (0.0, 1.0) if self.metric == "eval/accuracy" else None


class Study(Section):
    """A study: every combination of its axes is an arm, and an arm has a cell, which is a run, for each seed."""

    base: str = "tiny_cpu"
    """A configuration under conf/, or a YAML file in the folder of the study's file."""
    overrides: Sequence[str] = ()
    """Overrides of all cells, as on the command line."""
    axes: dict[str, Annotated[list[Level], Field(min_length=1)]] = Field(default_factory=dict)
    """Name of an axis -> its levels: an override, a list of them, or ``label: override(s)``."""
    combine: Literal["product", "zip"] = "product"
    """product: every level with every level of the others; zip: the first levels together, then the second ones."""
    seeds: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = (0, 1, 2)
    """Seeds of each arm."""
    paired: bool = True
    """True if arms share seeds, so that a difference is taken seed by seed; otherwise each arm has separate seeds."""
    reference: str | None = None
    """The arm with which others are compared; null: the first."""
    contrasts: dict[str, Annotated[dict[str, Finite], Field(min_length=1)]] = Field(default_factory=dict)
    """Further differences: name -> the weight of each arm in a sum over arms, for example 1 and -1."""
    budget: Budget = Budget()
    evaluation: Outcome = Outcome()
    folder: Path | None = None
    """Folder of the cells' run folders; null: runs/<name of the study's file>."""

    def with_outcome(self, metric: str | None, last: int | None) -> Study:
        """Returns the study with another metric, or with the mean of another number of values; None: the file's.

        Raises ConfigError for a metric that is not documented.
        """
        if metric is not None and documented(metric) is None:
            raise ConfigError(f"--metric {metric}: {describe_unknown(metric)}")
        given = {key: value for key, value in (("metric", metric), ("last", last)) if value is not None}
        return self.model_copy(update={"evaluation": self.evaluation.model_copy(update=given)})


def read_study(path: Path, more: Sequence[str] = ()) -> Study:
    """Reads a study's YAML file, finds its folder and its base, and adds ``more`` overrides after the file's.

    Raises one ConfigError for all problems.
    """
    try:
        tree = yaml_text.read(path)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {quote_start(tree)}; a study's file is a mapping, `key: value` a line")
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
    """Returns a report's path within its study's folder: the folder itself without arguments, or under ``outcomes/``.

    The name has all arguments, and a hash of overrides that cannot be part of a file's name.
    """
    parts = [metric.replace("/", "-")] if metric else []
    parts += [f"last={last}"] if last is not None else []
    given = ",".join(overrides)
    named = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", given)[:120]
    if named != given or "," in "".join(overrides):
        named += f"-{hashlib.sha256(repr(list(overrides)).encode()).hexdigest()[:8]}"
    parts += [named] if named else []
    return Path("outcomes", ",".join(parts)) if parts else Path()


def axis_levels(axis: Sequence[Level]) -> list[tuple[str, list[str]]]:
    """Returns an axis's labels, each with its overrides."""
    return [_labeled(level) for level in axis]


def _labeled(level: Level) -> tuple[str, list[str]]:
    if isinstance(level, dict):
        ((label, given),) = level.items()
        return label, [given] if isinstance(given, str) else list(given)
    given = [level] if isinstance(level, str) else list(level)
    return " ".join(_short(each) for each in given), given


def _short(override: str) -> str:
    """Returns the choice of a group, for example ``gspo``; otherwise the key's last part with its value."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value}" if "." in key else value


def _problems(study: Study) -> list[str]:
    found = []
    for name, axis in study.axes.items():
        found += [
            f"axes.{name}: {quote_start(level)}: must be one label with its overrides, so give each label a line "
            "of its own"
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
        for key in dict.fromkeys(each.partition("=")[0] for _, given in axis_levels(axis) for each in given):
            if key in keys:
                found.append(f"axes.{name} and axes.{keys[key]} both set {key}, so one would hide the other")
            keys[key] = name
    places = {
        "overrides": study.overrides,
        **{f"axes.{n}": [o for _, g in axis_levels(a) for o in g] for n, a in study.axes.items()},
    }
    for place, given in places.items():
        found += [f"{place}: {each}: {why}" for each in given if (why := _RESERVED.get(each.partition("=")[0]))]
    if len(set(study.seeds)) < len(study.seeds):
        found.append(f"seeds={list(study.seeds)}: a seed is given twice; its runs would be one run")
    return found


_RESERVED: Mapping[str, str] = {
    "seed": "the study gives each cell its seed; name them in `seeds`",
    "run.name": "a cell's folder is named by its configuration; remove it",
    "run.dir": "cells are in the study's folder; set `folder`",
}


_OVERRIDES = "a list of overrides, for example [train.steps=60]"
_WANTED: Mapping[str, str] = {
    "too_short": "at least one",
    "tuple_type": "a list, for example [0, 1]",
    "list_type": "a list of levels, for example [algorithm=grpo, label: algorithm=gspo]",
    "sequence_str": _OVERRIDES,
    "is_instance_of": _OVERRIDES,
    "dict_type": "a mapping, `name: value` a line",
    "model_type": "a mapping, `key: value` a line",
    "path_type": "a path, as text",
}


def _line(path: Path, error: ErrorDetails) -> str:
    """Returns one line: file, key, value, and the allowed values."""
    parts = [str(part) for part in error["loc"] if part not in {"str", "list[str]", "dict[str,union[str,list[str]]]"}]
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        section: Any = Study
        for part in parts[:-1]:
            section = section.model_fields[part].annotation
        keys = list(section.model_fields)
        near = closest_key(parts[-1], keys)
        return f"{path}: {key}={quote_start(error['input'])}: no such key{near}; keys: {', '.join(keys)}"
    if parts[:1] == ["axes"] and len(parts) > 2:
        wanted = "an override as text, a list of them, or one label with its override(s)"
        return f"{path}: {'.'.join(parts[:3])}: {quote_start(error['input'])}: must be {wanted}"
    text = _WANTED.get(error["type"]) or error["msg"].removeprefix("Input should ").removeprefix("be ")
    return f"{path}: {key}={quote_start(error['input'])}: must be {text}"


_OF_ENTRY = re.compile(r"(eval|source)/([^/]+)/([^/]+).*")
_OF_PAIRS, _OF_TEXT = ("eval/preference_accuracy", "eval/preference_margin"), ("eval/perplexity",)
_HELD_OUT = ("eval/accuracy", "eval/loss", *_OF_PAIRS, *_OF_TEXT)
_SAMPLED = {name for name, *_ in (*SAMPLING, *ENVIRONMENTS)}


def never_recorded(study: Study, config: RunConfig) -> list[str]:
    """Returns a line for the metric, and for the measure of compute, if a run of ``config`` never records it."""
    metric = study.evaluation.metric
    found = [f"evaluation.metric={metric}: {why}" for why in _missing_metric_reasons(metric, config)]
    if study.evaluation.compute == "tokens" and not config.kind.samples:
        found.append(
            f"evaluation.compute=tokens: job={config.job} samples no tokens; take steps, device_seconds or flops"
        )
    return found


def recorded_by_none(study: Study, configs: Sequence[RunConfig]) -> list[str]:
    """Returns a line if the study's metric is a critic's or of experts, and none of ``configs`` records it. One arm
    that records it is enough."""
    metric = study.evaluation.metric
    lacking = {_lacking(metric, config) for config in configs}
    if not lacking or None in lacking:
        return []
    return [f"evaluation.metric={metric}: no cell records it: {'; '.join(sorted(filter(None, lacking)))}"]


def _lacking(metric: str, config: RunConfig) -> str | None:
    """Returns why a run does not record a metric of a critic or of experts; None if it does, and for other metrics."""
    room, _, name = metric.partition("/")
    if room == "critic":
        section = config.algorithm
        if section.critic.backbone == "policy" and name == "grad_norm":
            return f"algorithm.critic.backbone=policy trains it in the policy's own steps; take {name}"
        if config.kind.samples and (section.needs_critic or section.is_own_critic):
            return None
        return f"job={config.job} with algorithm.credit={section.credit} has no critic; take algorithm=ppo"
    if room != "moe":
        return None
    if (dense := _dense(config.model.path, config.learner.model)) is not None:
        return f"model.path={config.model.path}: model_type={dense!r} has no experts"
    found = documented(metric)
    known = [one.recorded[found.name] for one in features().values() if found and found.name in one.recorded]
    return next((f"{on.unmatched(config, {})}; {fix}" for on, fix in known if not any(on.matches(config, {}))), None)


@cache
def _dense(folder: Path | None, family: str | None) -> str | None:
    """Returns the family of a model without experts; None for others, and for a folder that cannot be read, which the
    run's checks report."""
    try:
        shape = None if folder is None else read_shape(folder, family)
    except ConfigError:
        return None
    return shape.family if shape is not None and not shape.num_experts else None


def _missing_metric_reasons(metric: str, config: RunConfig) -> Iterator[str]:
    kind, found = config.kind, documented(metric)
    held_out, name = _held_out(kind), found.name if found else metric
    sampled = name in _SAMPLED or name == "tokens/rollout" or name.startswith(("reward/", "source/", "eval/<name>/"))
    if (sampled and name != "source/<name>/epoch" and not kind.samples) or (name in _HELD_OUT and name not in held_out):
        yield f"job={config.job} never records it; of held-out data it records {' and '.join(held_out)}"
    elif match := _OF_ENTRY.fullmatch(metric):
        room, name, figure = match.groups()
        yield from _missing_entry_reasons(room, name, figure, config)


def _held_out(kind: JobKind) -> tuple[str, ...]:
    """Returns the metrics of held-out data, without those of ``eval.sets``."""
    if kind.samples:
        return ("eval/accuracy",)
    return ("eval/loss", *(_OF_PAIRS if kind.rows != "answers" else _OF_TEXT))


def _missing_entry_reasons(room: str, name: str, figure: str, config: RunConfig) -> Iterator[str]:
    """Yields why a run never records a metric of an evaluation set or of a source."""
    sets = config.eval.sets
    sources = config.data.sources if isinstance(config.data, MixtureData) else {}
    key, entries = ("eval.sets", list(sets)) if room == "eval" else ("data.sources", list(sources))
    if name not in entries:
        yield f"{key} has no {name}; it has {', '.join(entries) or 'none'}"
    elif room == "eval" and "_at_" in figure and figure not in (figures := _figures(sets[name])):
        yield f"eval.sets.{name} gives {', '.join(figures)}; take one of these, or set its samples or pass_at"


def _figures(one: EvalSetSection) -> list[str]:
    whole = ("mean", "maj") if one.samples > 1 else ("mean",)
    return [*(f"{figure}_at_{one.samples}" for figure in whole), *(f"pass_at_{k}" for k in one.pass_at)]


_MOST_CELLS = 10_000
_MOST_LINES = 20  # the most lines of an error
_ANYWHERE = ("run.", "log.", "checkpoint.", "slurm.", "model.cache_dir")  # keys that change no number of a run
_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a study; cells of an ``arm`` differ only in the seed."""

    arm: str
    seed: int
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.config.run.dir / str(self.config.run.name)

    @property
    def name(self) -> str:
        """The run's name: arm and seed, readable, and the digest of its configuration."""
        return str(self.config.run.name)

    @property
    def processes(self) -> int:
        """The number of processes with a shard of a model: the learner's, and those of separate roles."""
        return sum(ranks_by_role(self.config).values())


def study_arms(study: Study) -> dict[str, list[str]]:
    """Returns each arm's overrides by its name, which joins its levels' labels. Raises ConfigError for equal names."""
    axes = [axis_levels(axis) for axis in study.axes.values()]
    rows = itertools.product(*axes) if study.combine == "product" or not axes else zip(*axes, strict=True)
    arms: dict[str, list[str]] = {}
    for row in itertools.islice(rows, _MOST_CELLS + 1):
        name = " ".join(label for label, _ in row) or "base"
        if name in arms:
            raise ConfigError(
                f"two arms are named {name!r}; add labels to their levels, for example `low: train.learning_rate=1e-6`"
            )
        arms[name] = [override for _, given in row for override in given]
    return arms


def study_cells(study: Study) -> list[Cell]:
    """Returns all cells, the first seed of every arm first, so that a stopped study has results of each arm.

    Raises one ConfigError that names the cells with an invalid configuration, or with one that never records the
    study's metric, and the reasons. It also names a metric of a critic or of experts that no cell records, two cells of
    one configuration, and missing arms.
    """
    arms = study_arms(study)
    if len(arms) * len(study.seeds) > _MOST_CELLS:
        raise ConfigError(f"the study has more than {_MOST_CELLS} cells; give it fewer levels or seeds")
    cells, refused = list[Cell](), dict[str, list[str]]()
    for seed in study.seeds:
        for arm, overrides in arms.items():
            own = seed if study.paired else seed + _first_seed(overrides)
            try:
                cells.append(_cell(study, arm, own, [*study.overrides, *overrides]))
            except ConfigError as error:
                for line in str(error).splitlines():
                    refused.setdefault(line, []).append(f"{arm} seed={own}")
    lines = [f"{_listed(names)}: {line}" for line, names in refused.items()]
    if documented(metric := study.evaluation.metric) is None:
        lines.append(f"evaluation.metric={metric}: {describe_unknown(metric)}")
    if not lines:
        lines = [*_equal(cells), *_unknown(study, arms), *recorded_by_none(study, [cell.config for cell in cells])]
    if lines:
        more = [f"... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        raise ConfigError("\n".join([*lines[:_MOST_LINES], *more]))
    return cells


def config_digest(config: RunConfig) -> str:
    """Returns ten hexadecimal digits of the values that differ from the defaults, so a new key does not change them.

    Keys that change no number of a run are left out: its name and folder, logs, checkpoints, the cluster's.
    """
    defaults = dict(flat(RunConfig().model_dump(mode="json")))
    values = numeric_values(config.model_dump(mode="json"))
    changed = sorted((k, v) for k, v in values if defaults.get(k, ...) != v)
    return hashlib.sha256(json.dumps(changed).encode()).hexdigest()[:_DIGITS]


def numeric_values(tree: Any) -> Iterator[tuple[str, Any]]:
    """Returns the keys and JSON values of a whole configuration that may change a run's numbers."""
    return ((key, value) for key, value in flat(tree) if not key.startswith(_ANYWHERE))


def _first_seed(overrides: Sequence[str]) -> int:
    """Returns the first seed, below 2**30, of an arm that shares none. It follows only from the arm's overrides, so
    other arms and seeds do not change it. Among 5 seeds for each of 100 arms, equal ones have a chance of 1 in 24,000.
    """
    return int(hashlib.sha256(json.dumps(sorted(overrides)).encode()).hexdigest()[:8], 16) >> 2


def _cell(study: Study, arm: str, seed: int, overrides: Sequence[str]) -> Cell:
    config = load_config(study.base, [*overrides, f"seed={seed}"])
    if config.written_epochs is not None:  # the last step is known only after the data is read
        raise ConfigError(
            f"{config.job}.epochs={config.written_epochs:g}: a study knows by train.steps whether a cell is done; set "
            f"that instead, and {config.job}.epochs=null"
        )
    if problems := never_recorded(study, config):
        raise ConfigError("\n".join(problems))
    assert study.folder is not None
    found = sorted(study.folder.glob(f"*-{config_digest(config)}"))  # also a folder made when the arm had another label
    readable = re.sub(r"[^A-Za-z0-9._=]+", "-", f"{arm}-s{seed}").replace("=", "-").strip("._-")[:120]
    name = found[0].name if found else f"{readable}-{config_digest(config)}"
    run = config.run.model_copy(update={"dir": study.folder, "name": name})
    return Cell(arm=arm, seed=seed, config=config.model_copy(update={"run": run}))


def _equal(cells: Sequence[Cell]) -> list[str]:
    seen: dict[str, Cell] = {}
    found = []
    for cell in cells:
        other = seen.setdefault(cell.name.rpartition("-")[2], cell)
        if other is not cell:
            found.append(
                f"{other.arm} seed={other.seed} and {cell.arm} seed={cell.seed} are one configuration; "
                "a level changes nothing"
            )
    return found


def _unknown(study: Study, arms: Mapping[str, object]) -> list[str]:
    named = {"reference": [study.reference] if study.reference else []}
    named |= {f"contrasts.{name}": list(weights) for name, weights in study.contrasts.items()}
    return [
        f"{place}: {arm!r} is no arm; arms: {', '.join(arms)}"
        for place, given in named.items()
        for arm in given
        if arm not in arms
    ]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
