"""Runs that differ in the seed alone are one arm: one line with a band over seeds, one colour, one row of a mean."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_megatron.observability.history import Floats, Run
from rl_megatron.observability.intervals import t_quantile

LEAST_FOR_INTERVAL = 4
"""Seeds from which on a band is the interval of the mean; with fewer it goes from the least to the greatest."""
_MOST_KEYS = 3  # in a name
_SEED = re.compile(r"[-_./= ]+(s(eed)?)?[-_./= ]*\d*$")  # how a run's name ends before its seed, or a part of that
_NAMING = ("run.", "seed", "model.cache_dir", "log.", "checkpoint.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One or more runs, in the order of their seeds. ``style`` is an index into charts.styles."""

    label: str
    style: int
    runs: Sequence[Run]


def group_runs(runs: Sequence[Run], names: Sequence[str] | None = None) -> list[Arm]:
    """The arms in the order of their first runs. ``names`` gives each run's arm, as a study does.

    Without names, runs of equal configurations are one arm if their seeds are all different: if not, somebody wants to
    compare them.
    """
    groups: dict[str, list[Run]] = {}
    for i, run in enumerate(runs):
        key = {k: v for k, v in run.config.items() if not k.startswith(_NAMING)}
        groups.setdefault(names[i] if names else json.dumps(key, sort_keys=True), []).append(run)
    if names:
        found = list(groups.items())
    else:
        apart = [
            [group] if len({run.config.get("seed") for run in group}) == len(group) else [[run] for run in group]
            for group in groups.values()
        ]
        alone = sorted((group for each in apart for group in each), key=lambda group: runs.index(group[0]))
        found = list(zip(_labels(alone), alone, strict=True))
    arms = []
    for style, (label, group) in enumerate(found):
        seeds = f" ({len(group)} seeds)" if len(group) > 1 else ""
        arms.append(Arm(label=label + seeds, style=style, runs=sorted(group, key=_seed)))
    return arms


def over_seeds(runs: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats, Floats, Floats]:
    """Each x where some of the runs have a value, their mean there and its band, NaN where one run alone has a value.

    ``runs`` have x and values."""
    x = np.unique(np.concatenate([at[~np.isnan(y)] for at, y in runs]))
    values = np.full((len(runs), len(x)), math.nan)
    for row, (at, y) in zip(values, runs, strict=True):
        row[np.searchsorted(x, at[~np.isnan(y)])] = y[~np.isnan(y)]
    count = (~np.isnan(values)).sum(0)
    mean, low, high = np.nansum(values, 0) / count, np.nanmin(values, 0), np.nanmax(values, 0)
    low[count == 1] = high[count == 1] = math.nan
    squares = np.nansum((values - mean) ** 2, 0)
    for n in range(LEAST_FOR_INTERVAL, len(runs) + 1):
        of_n = count == n
        half = t_quantile(n - 1) * np.sqrt(squares[of_n] / (n - 1) / n)
        low[of_n], high[of_n] = mean[of_n] - half, mean[of_n] + half
    return x, mean, low, high


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Keys whose values differ between the runs, except the run's name and folder, with each run's value."""
    keys = {key: None for run in runs for key in run.config if not key.startswith("run.")}
    rows = {key: [run.config.get(key, "-") for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """By the keys that differ between arms, if they are few; else by what the names of an arm's runs begin with.

    Where these are alike: by a few keys that tell all arms apart, or else by the first run of each.
    """
    if all(len(group) == 1 for group in groups):
        return [group[0].label for group in groups]
    keys = {k: v for k, v in differing([group[0] for group in groups]).items() if not k.startswith(_NAMING)}
    if 0 < len(keys) <= _MOST_KEYS:
        return _texts(keys)
    starts = [_SEED.sub("", _start([run.label for run in group])) for group in groups]
    if len(set(starts)) == len(starts) and all(starts):
        return starts
    return _texts(_telling(keys)) or [group[0].label for group in groups]


def _telling(keys: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Up to `_MOST_KEYS` keys by whose values all arms differ, each the one that tells most apart; or none."""
    found: dict[str, Sequence[str]] = {}
    apart = 1
    while keys and apart < len(next(iter(keys.values()))):
        counts = {key: len(set(zip(*found.values(), values, strict=True))) for key, values in keys.items()}
        key = max(counts, key=counts.__getitem__)
        if len(found) == _MOST_KEYS or counts[key] == apart:
            return {}
        found[key], apart = keys[key], counts[key]
    return found


def _start(texts: Sequence[str]) -> str:
    """What all begin with."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in alike)


def _texts(keys: Mapping[str, Sequence[str]]) -> list[str]:
    """The keys and an arm's values of them, for each arm."""
    names = [key.rpartition(".")[2] for key in keys]
    each = zip(*keys.values(), strict=True)
    return [" ".join(f"{name}={value}" for name, value in zip(names, one, strict=True)) for one in each]


def _seed(run: Run) -> tuple[int, str]:
    text = run.config.get("seed", "")
    return (int(text) if text.isdigit() else 0, run.label)
