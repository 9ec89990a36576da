"""Writes report.html: one self-contained page that shows a run or compares several, without external scripts.

uPlot draws the charts. An x is a step or, in [-1, 0), a place in the warm start, which is drawn a fifth as wide as the
chart. Runs that differ only in the seed are one arm: one line with a band over seeds, one color, one row of a mean.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.utils import htmlsafe_json_dumps

from rl_megatron.errors import DataError
from rl_megatron.feature import Curve
from rl_megatron.files import write_atomically
from rl_megatron.observability.card import make_card
from rl_megatron.observability.charts import (
    DOTTED,
    LEAST_EQUAL,
    MAX_POINTS,
    Chart,
    Series,
    averaged,
    equal_lines,
    json_numbers,
    readable_unit,
    stacked_bars,
    styles,
    unchanged_value,
)
from rl_megatron.observability.files import JsonRow, number
from rl_megatron.observability.history import (
    STEP_SPEED,
    WITH_GRADIENT,
    Floats,
    Run,
    SampleRow,
    headline_figures,
    latest_samples,
    load_runs,
    number_text,
)
from rl_megatron.observability.intervals import mean_interval, t_quantile
from rl_megatron.observability.metrics import METRICS, PHASE_SECONDS, documented
from rl_megatron.observability.verdicts import Verdict

LEAST_FOR_INTERVAL = 4
"""Seeds from which on a band is the interval of the mean; with fewer it goes from the least to the greatest."""
_MOST_KEYS = 3  # keys in an arm's name
_SEED = re.compile(r"[-_./= ]+(s(eed)?)?[-_./= ]*\d*$")  # the end of a run's name before its seed, or a part of it
_NAMING = ("run.", "seed", "model.cache_dir", "log.", "checkpoint.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One or more runs, in the order of their seeds. ``style`` is an index into charts.styles."""

    label: str
    style: int
    runs: Sequence[Run]


def group_runs(runs: Sequence[Run], names: Sequence[str] | None = None) -> list[Arm]:
    """Returns the arms in the order of their first runs. ``names`` gives each run's arm, for example in a study.

    Without names, runs of equal configurations are one arm if their seeds are all different; otherwise each is an arm,
    to compare them.
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


def seed_mean(runs: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns each x at which runs have a value, their mean there and its band, which is NaN if only one run has it.

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
    """Returns keys with values that differ between the runs, except the run's name and folder, and each run's value."""
    keys = {key: None for run in runs for key in run.config if not key.startswith("run.")}
    rows = {key: [run.config.get(key, "-") for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Labels arms by the keys that differ between them, if these are few; otherwise by the start of its runs' names.

    If these starts are alike, it labels by a few keys that tell all arms apart, or by the first run of each.
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
    """Returns at most `_MOST_KEYS` keys that tell all arms apart, each the one that tells most apart; or none."""
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
    """Returns the common beginning of all texts."""
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in alike)


def _texts(keys: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns for each arm the keys with its values."""
    names = [key.rpartition(".")[2] for key in keys]
    each = zip(*keys.values(), strict=True)
    return [" ".join(f"{name}={value}" for name, value in zip(names, one, strict=True)) for one in each]


def _seed(run: Run) -> tuple[int, str]:
    text = run.config.get("seed", "")
    return (int(text) if text.isdigit() else 0, run.label)


_PHASES = "seconds/<name>"
_DERIVED = {
    WITH_GRADIENT: ("", Curve("Policy", "Groups with a gradient", metric=WITH_GRADIENT, limits=(0.0, 1.0),
                              others=("groups/all_correct", "groups/none_correct"))),
    STEP_SPEED: ("tokens/s", Curve("Speed", "Whole step: tokens/s", metric=STEP_SPEED)),
}  # fmt: skip
"""Unit and curve of each figure that rows lack."""
_CURVES = [*(curve for _, curve in _DERIVED.values()), *(m.curve for m in METRICS.values() if m.curve)]
_SECTIONS = {
    "Evaluation": ("Evaluation",),
    "Health": ("Health",),
    "Speed": ("Speed",),
    "Everything else": ("Headlines", "Policy", "Optimization"),
}
"""The folded sections of the page, and the sections of their curves."""
MAX_OPEN = 15
_OPEN = (
    *("reward/mean", "eval/accuracy", "eval/loss", "eval/preference_accuracy", "response/length_mean", "entropy"),
    *(WITH_GRADIENT, "kl/reference", "clip_fraction", "ratio/mean", "mismatch/logprob_abs_mean", "grad_norm", "loss"),
    *("preference/accuracy", "preference/margin", "reward_model/score_mean", "critic/explained_variance"),
    *(_PHASES, "seconds/step", STEP_SPEED, "staleness/mean", "idle/learner_fraction", "idle/engine_fraction"),
    *("mfu/train", "memory/peak", "environment/turns_mean", "eval/<name>/mean_at_<k>", "kl/old_policy"),
    *("response/truncated_fraction", "tokens_per_second/rollout", "tokens_per_second/train", "warm_start/loss"),
)
"""Metrics of the charts that are open: the first of them that a run has, in this order."""
_OTHER_BASELINES = ("none", "greedy", "batch", "moving", "tracked")
_ALWAYS = ("reward/mean", "eval/accuracy", "eval/loss", "loss")  # drawn also if they do not change
MAX_BANDS = 3  # more single runs than this and their shaded bands hide the lines
SAMPLES_PER_STEP = 4
_LAST_ROWS = 4  # rows over which the report averages idle time
_MOST_SOURCES = 24  # sources of a mixture that have charts, six each
_MOST_TEXT = 20_000  # characters of a sample's prompt, or of the text sampled or read in a turn
_MOST_TURNS = 10 * _MOST_TEXT  # characters sampled in all turns of a sample, and as many that are read in them
_MOST_SEARCHED = 5_000_000  # bytes of the page that have samples to search
_FIGURES = (
    *(("after", "After RL"), ("before", "Accuracy before"), ("warm", "After warm start"), ("loss", "Held-out loss")),
    *(("ordered", "Pairs in order"), ("reward", "Reward, mean of {}"), ("steps", "Steps"), ("time", "Time")),
    *(("speed", "Sampled tokens/s, whole step"), ("trained", "Trained tokens/s, whole step")),
    ("mismatch", "Log-prob mismatch, mean"),
)
"""The headline figures in their order, with their titles."""
_AGE = re.compile(r"staleness/share/v([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A part of the page besides the runs' own curves: notes, a table that can be copied, charts."""

    title: str
    notes: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    styles: Sequence[int | None] = ()  # the styles of rows that are arms
    charts: Sequence[Chart] = ()

    @property
    def markdown(self) -> str:
        """The table's text."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


class CostCounter(Protocol):
    """Counts the costs of a run."""

    def add(self, row: JsonRow) -> None:
        """Counts a row of its metrics."""
        ...

    def lines(self) -> Sequence[str]:
        """Returns the lines to show for all rows that were added."""
        ...


def write_report(
    run_folders: Sequence[Path],
    out: Path,
    left_out: Callable[[str], None] | None = None,
    *,
    costs: CostCounter | None = None,
    note: str = "",
    needs_differences: bool = True,
    on_verdicts: Callable[[Sequence[Verdict]], None] = lambda verdicts: None,
    again: float | None = None,
) -> Path:
    """Writes the page to ``out`` atomically and returns it. The run may still be running. ``costs`` are of one run, and
    get its rows as they are read, once. ``note`` is a sentence about samples, ``needs_differences`` as in `read_run`.
    ``on_verdicts`` gets the verdicts on a single run. ``again``: seconds until the page of a running run is written
    again; an open page then loads itself.

    Raises DataError that names a missing or invalid folder, file or line. Errors of a plan, which a run's figures do
    not need, go to ``left_out`` if it is given, and the page lacks the plan.
    """
    runs = load_runs(run_folders, left_out) if costs is None else load_runs(run_folders, left_out, costs.add)
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared"
    return write_page(
        group_runs(runs),
        out,
        title=title,
        spent=costs.lines() if costs else (),
        searched=_searched(run_folders[0], runs[0], left_out) if len(runs) == 1 else None,
        note=note,
        needs_differences=needs_differences,
        on_verdicts=on_verdicts,
        again=again,
    )


def write_page(
    arms: Sequence[Arm],
    out: Path,
    *,
    title: str,
    panels: Sequence[Panel] = (),
    spent: Sequence[str] = (),
    searched: str | None = None,
    note: str = "",
    needs_differences: bool = True,
    on_verdicts: Callable[[Sequence[Verdict]], None] = lambda verdicts: None,
    again: float | None = None,
) -> Path:
    """Writes the page about these arms, in their colors: ``panels``, the curves and a run's cost. ``searched`` has the
    samples of a run that the page's script searches, as JSON without markup. ``note`` is a sentence about samples.
    ``needs_differences`` as in `read_run`, of one run, and ``on_verdicts`` gets its verdicts."""
    runs = [run for arm in arms for run in arm.runs]
    differences = {} if len(runs) == 1 else differing(runs)
    opened, sections, unchanged = _sections(arms)
    titles = {c.metric: c.title for c in (*opened, *(c for _, charts in sections for c in charts))}
    card = make_card(runs[0], titles, needs_differences=needs_differences) if len(runs) == 1 else []
    on_verdicts([line.verdict for line in card])
    rows = _rows(arms, differences)
    page = template().render(
        title=title,
        runs=rows,
        figures=_figures(rows),
        arms=[{"label": arm.label, "style": arm.style} for arm in arms],
        means=_means(arms),
        seed_bands=_band_note(arms),
        panels=panels,
        idle=_idle(runs[0]) if len(runs) == 1 else "",
        spent=spent,
        plan_card=make_plan_card(runs[0]) if len(runs) == 1 else None,
        card=card,
        warnings=runs[0].warnings if len(runs) == 1 else (),
        opened=opened,
        sections=sections,
        unchanged=unchanged,
        axes=_axes(arms),
        samples=[(arm.runs[0].label, arm.style, _samples(arm.runs[0])) for arm in arms if arm.runs[0].samples],
        searched=searched,
        note=note,
        again=again,
        now=time.time(),
        styles=styles(len(arms)),
        config=list(runs[0].config.items()) if len(runs) == 1 else [],
        versions=list(runs[0].versions.items()) if len(runs) == 1 else [],
        other_versions=_other_versions(runs),
        differences=list(differences),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.encode("utf-8", errors="replace"))  # a completion may hold a lone surrogate
    return out


@functools.cache
def template() -> Template:
    """Returns the page's template, compiled once: the page of a running run is written again and again."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["by_its_ends"] = _shorten
    environment.filters["utc"] = lambda seconds: time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    return environment.get_template("report.html.j2")


def arms_chart(curve: Curve, arms: Sequence[Arm]) -> Chart | None:
    """Returns the chart of a metric, a line for each arm; None if no run has the metric."""
    several = any(len(arm.runs) > 1 for arm in arms)
    lines = [line for arm in arms for line in _lines(curve, arm, len(arms), several=several)]
    if not lines:
        return None
    title = curve.title + ("" if several or len(arms) > MAX_BANDS else curve.band)
    metric, warm = documented(curve.metric), {run.warm_steps for arm in arms for run in arm.runs if run.warm_start}
    unit, series = readable_unit(metric.unit if metric else _DERIVED.get(curve.metric, ("",))[0], lines)
    return Chart(
        title=title,
        unit=unit,
        series=series,
        axis="warm-start step" if curve.metric.startswith("warm_start/") else "step",
        limits=curve.limits,
        warm=max(warm) if len(warm) == 1 else 0,
        log=curve.metric.endswith("grad_norm"),
        note=equal_lines(lines) if len(arms) > 1 else "",
        metric=curve.metric,
    )


def _axes(arms: Sequence[Arm]) -> dict[int, dict[str, list[float | None]]]:
    """Returns for each arm's style some steps, with the tokens sampled (or else trained) and the hours since the warm
    start until each of them; for several runs their means."""
    found = {}
    for arm in arms:
        rows = [run.rl for run in arm.runs]
        steps = [each.values("step") for each in rows]
        seconds = [np.nan_to_num(each.values("seconds/step")) for each in rows]
        tokens = [np.nan_to_num(each.values(STEP_SPEED)) * s for each, s in zip(rows, seconds, strict=True)]
        x, *values = (
            seed_mean([(x, np.cumsum(y)) for x, y in zip(steps, ys, strict=True)])[i]
            for ys, i in ((seconds, 0), (seconds, 1), (tokens, 1))
        )
        kept = np.unique(np.linspace(0, len(x) - 1, MAX_POINTS).astype(int)) if len(x) else slice(0)
        hours, tokens_until = values[0] / 3600, values[1]
        named = (("step", x), ("hours", hours), ("tokens", tokens_until))
        found[arm.style] = {name: json_numbers(each[kept], 9) for name, each in named}
    return found


def _rows(arms: Sequence[Arm], differences: Mapping[str, Sequence[str]]) -> list[dict[str, object]]:
    """Returns a row a run: headline figures, its arm's style and the values of keys that differ. The best is marked."""
    ends = {id(run): values[-1] for arm in arms for run in arm.runs if (values := run.numbers("eval/accuracy"))}
    best, rows = max(ends.values(), default=None), list[dict[str, object]]()
    for arm in arms:
        for run in arm.runs:
            keys = [values[len(rows)] for values in differences.values()]
            is_best = best is not None and ends.get(id(run)) == best
            rows.append(
                {**headline_figures(run), "style": arm.style, "keys": keys, "best": is_best, "moved": _moved(run)}
            )
    return rows


def _figures(rows: Sequence[Mapping[str, object]]) -> list[tuple[str, str]]:
    """Returns name and title of each headline figure that a run has."""
    counts = {str(row["reward_steps"]) for row in rows}
    last = f"last {counts.pop()} steps" if len(counts) == 1 else "last tenth of steps"
    last = last.replace("last 1 steps", "last 1 step")
    return [(key, title.format(last)) for key, title in _FIGURES if any(row[key] != "-" for row in rows)]


def _other_versions(runs: Sequence[Run]) -> str:
    """Returns the packages and commits that differ between runs that have recorded theirs; empty if none does."""
    all_of = [run.versions for run in runs if run.starts]
    found = {name: list(dict.fromkeys(of.get(name, "none") for of in all_of)) for of in all_of for name in of}
    return "; ".join(f"{name} {', '.join(values)}" for name, values in found.items() if len(values) > 1)


def _moved(run: Run) -> str:
    """Compares the last held-out loss, or else accuracy, with that before the first step. Returns better, worse or
    level."""
    before, values = run.numbers("eval/accuracy", phase="warm_start"), run.numbers("eval/accuracy")
    gained = values[-1] - [*before[-1:], values[0]][0] if values else 0.0
    if losses := run.numbers("eval/loss"):
        gained = losses[0] - losses[-1]
    return "better" if gained > 0 else "worse" if gained < 0 else "level"


def _means(arms: Sequence[Arm]) -> list[tuple[str, int, str, str]]:
    """Returns label, style, number of seeds and final accuracy of each arm if an arm has several runs."""
    rows = []
    for arm in arms:
        ends = [values[-1] for run in arm.runs if (values := run.numbers("eval/accuracy"))]
        text = "-"
        if ends:
            found = mean_interval(ends)
            half = "" if found.high is None else f" ± {100 * (found.high - found.value):.1f}"
            text = f"{100 * found.value:.1f}{half} %"
        rows.append((arm.label, arm.style, str(len(ends)), text))
    return rows if any(len(arm.runs) > 1 for arm in arms) else []


def _band_note(arms: Sequence[Arm]) -> str:
    if all(len(arm.runs) == 1 for arm in arms):
        return "" if len(arms) <= MAX_BANDS else "A point of a long line is the mean of several steps."
    return (
        "A line is the mean of the runs of an arm that have a value at that step. Its band is the mean's 95 % interval "
        f"(Student's t), or with fewer than {LEAST_FOR_INTERVAL} runs goes from the least value to the greatest."
    )


def _sections(arms: Sequence[Arm]) -> tuple[list[Chart], list[tuple[str, list[Chart]]], str]:
    """Returns the open charts, those of each folded section, and the names of charts that are hidden since their lines
    do not change, are straight, or equal an earlier chart's."""
    by_metric = {curve.metric: _charts([curve], arms) for curve in _CURVES}
    by_metric[_PHASES] = [chart for arm in arms if (chart := _phases(arm.runs[0], named=len(arms) > 1))]
    hidden, drawn = list[str](), dict[bytes, str]()

    def changing(metric: str) -> list[Chart]:
        found = []
        for chart in by_metric.pop(metric, []):
            lines = b"".join(line.x.tobytes() + line.y.tobytes() for line in chart.series)
            if metric not in _ALWAYS and (value := unchanged_value(chart)) is not None:
                hidden.append(f"{chart.title} ({value})")
            elif "<" not in metric and (other := drawn.setdefault(lines, chart.title)) != chart.title:
                hidden.append(f"{chart.title} (as {other})")
            else:
                found.append(chart)
        return found

    opened = list[Chart]()
    is_alone = len(arms) == len(arms[0].runs) == 1
    for metric in (name for name in _OPEN if is_alone or name != _PHASES):
        charts, space = changing(metric), MAX_OPEN - len(opened)
        opened += charts[:space]
        by_metric[metric] = charts[space:]
    sections = {name: list[Chart]() for name in _SECTIONS}
    for name, parts in _SECTIONS.items():
        for curve in _CURVES:
            sections[name] += changing(curve.metric) if curve.section in parts else []
    sections["Speed"] += changing(_PHASES)
    sections["Health"] += [c for arm in arms if (c := _staleness(arm.runs[0], named=len(arms) > 1))]
    return opened, [(name, charts) for name, charts in sections.items() if charts], ", ".join(hidden)


def _charts(curves: Sequence[Curve], arms: Sequence[Arm]) -> list[Chart]:
    runs = [run for arm in arms for run in arm.runs]
    if any(_equal_groups_count(run.config) for run in runs):
        names = {
            "Groups with a gradient": "Groups with different rewards",
            "Groups without a gradient": "Groups with equal rewards",
        }
        curves = [replace(curve, title=names.get(curve.title, curve.title)) for curve in curves]
    every = [each for given in curves for each in _named(given, runs) if len(runs) > 1 or not each.compared]
    return [chart for curve in every if (chart := arms_chart(curve, arms)) is not None]


def _equal_groups_count(config: Mapping[str, str]) -> bool:
    """True if groups of equal rewards give a gradient, too: by a critic, or a baseline that is not the group's."""
    return config.get("algorithm.credit") == "gae" or config.get("algorithm.advantage_mean") in _OTHER_BASELINES


def _named(curve: Curve, runs: Sequence[Run]) -> list[Curve]:
    """Returns the curve, or one for each recorded name and number in place of its ``<name>`` and ``<k>``. Of many
    sources of a mixture it keeps those with the most training."""
    if "<name>" not in curve.metric:
        return [curve]
    recorded = dict.fromkeys(name for run in runs for name in run.names)
    names = [m for m in recorded if (metric := documented(m)) and metric.name == curve.metric]
    of = ""
    if curve.metric.startswith("source/") and len(names) > _MOST_SOURCES:
        of = f" ({_MOST_SOURCES} most trained of {len(names):,})"
        names = sorted(names, key=lambda metric: _groups(metric, runs), reverse=True)[:_MOST_SOURCES]
    family = re.compile(re.escape(curve.metric).replace("<name>", "(.+)").replace("<k>", "([0-9]+)"))

    def filled(text: str, metric: str) -> str:
        found = family.fullmatch(metric)
        for place, given in zip(("<name>", "<k>"), found.groups() if found else (), strict=False):
            text = text.replace(place, given)
        return text

    return [replace(curve, metric=metric, title=filled(curve.title, metric) + of) for metric in names]


def _groups(metric: str, runs: Sequence[Run]) -> float:
    """Returns the number of groups of the metric's source that the runs have trained on."""
    share = f"{metric.rpartition('/')[0]}/share"
    each = (run.rl.values("groups/trained") * run.rl.values(share) for run in runs)
    return math.fsum(value for one in each for value in one[~np.isnan(one)].tolist())


def _lines(curve: Curve, arm: Arm, num_arms: int, *, several: bool) -> list[Series]:
    """Returns an arm's line; for a run alone on the page also ``others`` and the plan. ``several``: an arm has several
    runs."""
    found = [run.metric_rows(curve.metric, warm_start=curve.warm_start and not several) for run in arm.runs]
    rows, alone, lines = found[0], num_arms == 1 and not several, list[Series]()
    x, y = rows.x, rows.values(curve.metric)
    for place, other in enumerate(curve.others if alone else ()):
        lines.append(Series(name=other, style=arm.style + DOTTED + place, x=x, y=rows.values(other)))
    if (planned := arm.runs[0].plan.get(curve.metric)) is not None and alone:
        lines.append(Series(name="plan", style=arm.style + DOTTED, x=x, y=np.full(len(x), planned)))
    low = high = None
    each = 1
    if len(found) > 1:
        x, y, low, high = seed_mean([(one.x, one.values(curve.metric)) for one in found])
    elif num_arms > MAX_BANDS:
        x, y, each = averaged(x, y)
    elif not several and curve.spread is not None:
        low, high = _spread_band(y, rows.values(curve.spread))
    name = curve.metric if alone else arm.label
    lines.append(Series(name=name, style=arm.style, x=x, y=y, low=low, high=high, each=each))
    return [line for line in lines if not np.isnan(line.y).all()]


def _spread_band(mean: Floats, std: Floats) -> tuple[Floats, Floats]:
    """Returns mean - std and mean + std, within the two values of a reward that has only two, for example 0 and 1.

    Values a and b have a variance of (mean - a)(b - mean), so mean² + std² lies on a straight line over the mean.
    """
    known = np.isfinite(mean) & np.isfinite(std)
    least, greatest = -math.inf, math.inf
    if len(np.unique(mean[known])) >= LEAST_EQUAL:
        square = mean[known] ** 2 + std[known] ** 2
        (slope, start), residuals, *_ = np.polyfit(mean[known], square, 1, full=True)
        if residuals.sum() <= 1e-12 * (1 + square @ square) and slope**2 + 4 * start > 0:
            half = math.sqrt(slope**2 / 4 + start)
            least, greatest = slope / 2 - half, slope / 2 + half
    return np.maximum(mean - std, least), np.minimum(mean + std, greatest)


def _phases(run: Run, *, named: bool) -> Chart | None:
    """Returns the chart of a step's time by phase; ``other`` is the remainder."""
    rows = np.flatnonzero(~np.isnan(run.rl.values("seconds/step")))
    whole, steps, *phases = (
        np.nan_to_num(run.rl.values(name)[rows], nan=0.0)
        for name in ("seconds/step", "step", *(f"seconds/{phase}" for phase in PHASE_SECONDS))
    )
    parts = [*zip(PHASE_SECONDS, phases, strict=True), ("other", np.maximum(whole - sum(phases), 0.0))]
    title = "Step time by phase" + (f": {run.label}" if named else "")
    return (
        replace(stacked_bars(title, "s", steps, parts), metric="seconds/step")
        if any(seconds.any() for _, seconds in parts)
        else None
    )


def _idle(run: Run) -> str:
    """Describes the idle time of learner and engines in the last steps; empty if it is not known."""
    last = (run.rl.values(f"idle/{who}_fraction")[-_LAST_ROWS:] for who in ("learner", "engine"))
    learner, engine = (values[~np.isnan(values)].tolist() for values in last)
    said = [f"the learner waited for groups for {100 * fmean(learner):.0f} % of the time"] if learner else []
    said += [f"{100 * fmean(engine):.0f} % of the servers' slots were unused"] if engine else []
    return f"Mean of the last {len(learner)} rows: {', '.join(said)}." if said else ""


def _staleness(run: Run, *, named: bool) -> Chart | None:
    """Charts the run's completions by pushes since their oldest token, if some were sampled before the last push."""
    shares = {int(found[1]): name for name in run.names if (found := _AGE.fullmatch(name))}
    groups = np.nan_to_num(run.rl.values("groups/trained"), nan=0.0)
    rows = {age: np.intersect1d(run.rl.recorded(name), np.flatnonzero(groups)) for age, name in shares.items()}
    last = max((age for age, own in rows.items() if len(own)), default=0)
    if last == 0:
        return None
    weights = np.zeros(last + 1)
    for age, own in rows.items():
        if len(own):
            weights[age] = sum((groups[own] * np.nan_to_num(run.rl.values(shares[age])[own], nan=0.0)).tolist())
    title = "Completions by staleness" + (f": {run.label}" if named else "")
    bars = Series(name="completions", style=0, x=np.arange(last + 1.0), y=100 * weights / weights.sum())
    return Chart(title=title, unit="% by pushes", series=[bars], axis="staleness", bars=True)


def _samples(run: Run) -> list[tuple[int, list[tuple[SampleRow, bool]]]]:
    """Returns samples of the run's steps, of as many prompts as possible, each marked as right or wrong."""
    by_step: dict[int, list[SampleRow]] = {}
    for sample in run.samples:
        by_step.setdefault(sample.step, []).append(sample)
    shown = {step: _interleave_prompts(rows)[:SAMPLES_PER_STEP] for step, rows in by_step.items()}
    return [(step, [(s, s.reward >= run.success_reward) for s in rows]) for step, rows in shown.items()]


def _interleave_prompts(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """Sorts rows: the first of each prompt, then the second of each, and so on."""
    seen, turns = Counter[str](), list[int]()
    for row in rows:
        turns.append(seen[row.prompt])
        seen[row.prompt] += 1
    return [row for _, row in sorted(zip(turns, rows, strict=True), key=lambda pair: pair[0])]


def _searched(folder: Path, run: Run, left_out: Callable[[str], None] | None) -> str | None:
    """Returns the run's latest samples as JSON, as many as fit, or None. A prompt is there once for all its samples."""
    prompts, texts, rows = dict[str, int](), list[str](), list[str]()
    left = _MOST_SEARCHED
    try:
        for sample in latest_samples(folder / "samples.jsonl"):
            place = prompts.setdefault(sample.prompt, len(prompts))
            new = [htmlsafe_json_dumps(_shorten(sample.prompt))] if place == len(texts) else []
            row = htmlsafe_json_dumps(_row_to_search(sample, place, right=sample.reward >= run.success_reward))
            left -= sum(map(len, (row, *new))) + 2  # all of it is ASCII
            if left < 0:
                break
            texts += new
            rows.append(row)
    except DataError as error:
        if left_out is None:
            raise
        left_out(str(error))
    if not rows:
        return None
    return f'{{"prompts":[{",".join(texts)}],"rows":[{",".join(rows)}]}}'


def _row_to_search(sample: SampleRow, prompt: int, *, right: bool) -> list[object]:
    """Returns the row in the order in which page.js reads it; a turn is the text that was read and the sampled text."""
    most = min(_MOST_TEXT, _MOST_TURNS // max(1, len(sample.turns)))
    turns = [[_shorten(turn.read, most), _shorten(turn.sampled, most)] for turn in sample.turns]
    turns = turns or [["", _shorten(sample.completion)]]
    return [sample.step, prompt, _shorten(sample.answer), sample.reward, right, len(sample.completion), turns]


def _shorten(text: str, limit: int = _MOST_TEXT) -> str:
    """Returns the text, or the beginning and the end of a long one."""
    if (left_out := len(text) - limit) <= 0:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {left_out:,} characters left out, which samples.jsonl has …\n{text[len(text) - half :]}"


_WARM, _LEAST = 2, 3
"""Steps after a start that are left out, since they compile kernels and take memory; and the least steps after them."""
_PARTS = {
    "train": ("seconds/train", 1.0, "s"),
    "log-probs": ("seconds/logprobs", 1.0, "s"),
    "rollout": ("seconds/rollout", 1.0, "s"),
    "push": ("seconds/weights", 1.0, "s"),
    "memory": ("memory/peak", 1e9, "GB"),
    "length of a completion": ("response/length_mean", 1.0, "tokens"),
}
"""Name -> the metric, which plan.json has too, its divisor, and the unit."""


def make_plan_card(run: Run) -> Panel | None:
    """Compares the plan with the run's steps since its last start, which wrote the plan. None if a plan predicts no
    seconds, or if the run has too few steps."""
    if "seconds/train" not in run.plan:
        return None
    start = number(run.starts[-1], "step") if run.starts else None
    steps = run.rl.values("step")
    places = np.flatnonzero(steps > (start or 0))[_WARM:]
    if len(places) < _LEAST:
        return None
    rows = []
    for name, (metric, unit, unit_name) in _PARTS.items():
        values = run.rl.values(metric)[places]
        values = values[~np.isnan(values)] / unit
        if (predicted := run.plan.get(metric)) is None or not values.any():
            continue
        predicted, measured = predicted / unit, float(values.max() if name == "memory" else np.median(values))
        texts = (f"{number_text(each)} {unit_name}" for each in (predicted, measured))
        rows.append((name, *texts, f"{predicted / measured:.2f}"))
    notes = [
        f"Medians of steps {steps[places[0]]:.0f} to {steps[places[-1]]:.0f}; of memory the most. The length of a "
        "completion is assumed by the plan (slurm.speeds.mean_tokens), and seconds follow it."
    ]
    if run.config.get("train.max_staleness", "0") != "0":
        notes.append("Sampling overlaps training (train.max_staleness): a measured phase also waits for others.")
    columns = ("", "Predicted", "Measured", "Predicted / measured")
    return Panel(title="Predicted and measured", notes=notes, columns=columns, rows=rows)
