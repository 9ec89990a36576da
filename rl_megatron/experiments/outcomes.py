"""What a study asks of its cells that runs of their configuration never record."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import MixtureData
from rl_megatron.config.sections.eval import EvalSetSection
from rl_megatron.config.sections.jobs import JobKind
from rl_megatron.experiments.study import Study
from rl_megatron.observability.metrics.environments import ENVIRONMENTS
from rl_megatron.observability.metrics.sampling import SAMPLING
from rl_megatron.observability.metrics.table import documented

_OF_ENTRY = re.compile(r"(eval|source)/([^/]+)/([^/]+).*")
_OF_PAIRS, _OF_TEXT = ("eval/preference_accuracy", "eval/preference_margin"), ("eval/perplexity",)
_HELD_OUT = ("eval/accuracy", "eval/loss", *_OF_PAIRS, *_OF_TEXT)
_SAMPLED = {name for name, _, _ in (*SAMPLING, *ENVIRONMENTS)}


def never_recorded(study: Study, config: RunConfig) -> list[str]:
    """A line for each metric, and the measure of compute, of which a run of ``config`` can have no value.

    ``collapse.metric`` counts where the file names it.
    """
    asked = {"evaluation.metric": study.evaluation.metric}
    if "metric" in study.collapse.model_fields_set:
        asked["collapse.metric"] = study.collapse.metric
    found = [f"{key}={metric}: {why}" for key, metric in asked.items() for why in _why_never(metric, config)]
    if study.evaluation.compute == "tokens" and not config.kind.samples:
        found.append(
            f"evaluation.compute=tokens: job={config.job} samples no tokens; take steps, device_seconds or flops"
        )
    return found


def _why_never(metric: str, config: RunConfig) -> Iterator[str]:
    kind, found = config.kind, documented(metric)
    held_out, name = _held_out(kind), found.name if found else metric
    sampled = name in _SAMPLED or name == "tokens/rollout" or name.startswith(("reward/", "source/", "eval/<name>/"))
    if (sampled and name != "source/<name>/epoch" and not kind.samples) or (name in _HELD_OUT and name not in held_out):
        yield f"job={config.job} never records it; of held-out data it records {' and '.join(held_out)}"
    elif match := _OF_ENTRY.fullmatch(metric):
        room, name, figure = match.groups()
        yield from _of_entry(room, name, figure, config)


def _held_out(kind: JobKind) -> tuple[str, ...]:
    """The metrics of held-out data, but those of ``eval.sets``."""
    if kind.samples:
        return ("eval/accuracy",)
    return ("eval/loss", *(_OF_PAIRS if kind.pairs else _OF_TEXT))


def _of_entry(room: str, name: str, figure: str, config: RunConfig) -> Iterator[str]:
    """Why not, of a metric that a set of problems or a source has."""
    sets = config.eval.sets
    sources = config.data.sources if isinstance(config.data, MixtureData) else {}
    key, entries = ("eval.sets", list(sets)) if room == "eval" else ("data.sources", list(sources))
    if name not in entries:
        yield f"{key} has no {name}; it has {', '.join(entries) or 'none'}"
    elif room == "eval" and "_at_" in figure and figure not in (figures := _figures(sets[name])):
        yield f"eval.sets.{name} gives {', '.join(figures)}; take one of these, or set its samples or pass_at"


def _figures(one: EvalSetSection) -> list[str]:
    whole = ("mean", "maj") if one.samples > 1 else ("mean",)
    return [
        *(f"{figure}_at_{one.samples}" for figure in whole),
        *(f"{figure}_at_{k}" for k in one.pass_at for figure in ("pass", "all")),
    ]
