"""The cells of a study: each one's checked configuration and the name of its run folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.config.io import load_config
from rl_megatron.config.resume import flat
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.experiments.outcomes import never_recorded, recorded_by_none
from rl_megatron.experiments.study import Study, levels_of
from rl_megatron.placement.ranks import ranks_by_role

_MOST_CELLS = 10_000
_MOST_LINES = 20  # of an error
_ANYWHERE = ("run.", "log.", "checkpoint.", "slurm.", "model.cache_dir")  # change no number of a run
_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a study; cells of an ``arm`` differ in the seed alone."""

    arm: str
    seed: int
    config: RunConfig

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.config.run.dir / str(self.config.run.name)

    @property
    def name(self) -> str:
        """Its run's name: arm and seed, readable, and the digest of its configuration."""
        return str(self.config.run.name)

    @property
    def processes(self) -> int:
        """Processes with a shard of a model: the learner's, and those of separate roles."""
        return sum(ranks_by_role(self.config).values())


def arms_of(study: Study) -> dict[str, list[str]]:
    """The overrides of each arm by its name, which is the labels of its levels. Raises ConfigError for equal names."""
    axes = [levels_of(axis) for axis in study.axes.values()]
    rows = itertools.product(*axes) if study.combine == "product" or not axes else zip(*axes, strict=True)
    arms: dict[str, list[str]] = {}
    for row in itertools.islice(rows, _MOST_CELLS + 1):
        name = " ".join(label for label, _ in row) or "base"
        if name in arms:
            raise ConfigError(f"two arms are named {name!r}; give their levels labels, as `label: override`")
        arms[name] = [override for _, given in row for override in given]
    return arms


def cells_of(study: Study) -> list[Cell]:
    """All cells, the first seed of every arm first, so that a study that is stopped has something of each.

    Raises one ConfigError that names the cells whose configuration is refused, or never records what the study
    compares, and why; also for a metric of a critic or of experts that no cell records, for two cells of one
    configuration, and for names of arms that are not there.
    """
    arms = arms_of(study)
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
    if not lines:
        lines = [
            *_equal(cells),
            *_unknown(study, arms),
            *recorded_by_none(study, [cell.config for cell in cells]),
        ]
    if lines:
        more = [f"... and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        raise ConfigError("\n".join([*lines[:_MOST_LINES], *more]))
    return cells


def config_digest(config: RunConfig) -> str:
    """Ten hexadecimal digits of the values that differ from the defaults, so that a new key does not change them.

    Keys that change no number of a run are left out: its name and folder, what it shows and saves, the cluster's.
    """
    defaults = dict(flat(RunConfig().model_dump(mode="json")))
    values = numbers_of(config.model_dump(mode="json"))
    changed = sorted((k, v) for k, v in values if defaults.get(k, ...) != v)
    return hashlib.sha256(json.dumps(changed).encode()).hexdigest()[:_DIGITS]


def numbers_of(tree: Any) -> Iterator[tuple[str, Any]]:
    """The keys of a whole configuration, as JSON values, that may change a run's numbers."""
    return ((key, value) for key, value in flat(tree) if not key.startswith(_ANYWHERE))


def _first_seed(overrides: Sequence[str]) -> int:
    """Where the seeds of an arm that shares none begin: below 2**30, by its overrides alone, so that no other arm or
    seed moves them. Seeds of 100 arms, 5 each, meet by a chance of 1 in 24,000.
    """
    return int(hashlib.sha256(json.dumps(sorted(overrides)).encode()).hexdigest()[:8], 16) >> 2


def _cell(study: Study, arm: str, seed: int, overrides: Sequence[str]) -> Cell:
    config = load_config(study.base, [*overrides, f"seed={seed}"])
    if config.written_epochs is not None:  # its end is known only once its data is read
        raise ConfigError(
            f"{config.job}.epochs={config.written_epochs:g}: a study knows by train.steps whether a cell is done; set "
            f"that instead, and {config.job}.epochs=null"
        )
    if problems := never_recorded(study, config):
        raise ConfigError("\n".join(problems))
    assert study.folder is not None
    found = sorted(study.folder.glob(f"*-{config_digest(config)}"))  # also of an arm that had another label then
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
