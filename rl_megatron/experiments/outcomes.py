"""What a study asks of its cells that runs of their configuration never record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import MixtureData
from rl_megatron.config.sections.eval import EvalSetSection
from rl_megatron.config.sections.jobs import JobKind
from rl_megatron.errors import ConfigError
from rl_megatron.experiments.study import Study
from rl_megatron.observability.metrics.table import ENVIRONMENTS, SAMPLING, documented
from rl_megatron.weights.layouts.families import read_shape

_OF_ENTRY = re.compile(r"(eval|source)/([^/]+)/([^/]+).*")
_OF_PAIRS, _OF_TEXT = ("eval/preference_accuracy", "eval/preference_margin"), ("eval/perplexity",)
_HELD_OUT = ("eval/accuracy", "eval/loss", *_OF_PAIRS, *_OF_TEXT)
_SAMPLED = {name for name, *_ in (*SAMPLING, *ENVIRONMENTS)}


def never_recorded(study: Study, config: RunConfig) -> list[str]:
    """Returns a line for the metric, and for the measure of compute, if a run of ``config`` can have no value of it."""
    metric = study.evaluation.metric
    found = [f"evaluation.metric={metric}: {why}" for why in _why_never(metric, config)]
    if study.evaluation.compute == "tokens" and not config.kind.samples:
        found.append(
            f"evaluation.compute=tokens: job={config.job} samples no tokens; take steps, device_seconds or flops"
        )
    return found


def recorded_by_none(study: Study, configs: Sequence[RunConfig]) -> list[str]:
    """Returns a line if the study's metric is a critic's or of experts, and a run of none of ``configs`` records it: an
    arm without them may be beside one that has them."""
    metric = study.evaluation.metric
    lacking = {_lacking(metric, config) for config in configs}
    if not lacking or None in lacking:
        return []
    return [f"evaluation.metric={metric}: no cell records it: {'; '.join(sorted(filter(None, lacking)))}"]


def _lacking(metric: str, config: RunConfig) -> str | None:
    """What a run lacks to record a metric of a critic or of experts; None for what it has, and others."""
    room, _, name = metric.partition("/")
    if room == "critic":
        section = config.algorithm
        if section.critic.backbone == "policy" and name in ("grad_norm", "learning_rate"):
            return f"algorithm.critic.backbone=policy trains it in the policy's own steps; take {name}"
        if config.kind.samples and (section.needs_critic or section.is_own_critic):
            return None
        return f"job={config.job} with algorithm.credit={section.credit} has no critic; take algorithm=ppo"
    if room != "moe":
        return None
    if (dense := _dense(config.model.path, config.learner.model)) is not None:
        return f"model.path={config.model.path}: model_type={dense!r} has no experts"
    if name.endswith("_loss") and name not in config.learner.router.losses:
        return f"learner.router.{name}=0; set a coefficient"
    if name.startswith(("flips_update", "first_flip")) and not config.train.route_flips:
        return "train.route_flips=false; set it to true"
    if name == "rerouted_fraction" and config.algorithm.routing_replay == "off":
        return "algorithm.routing_replay=off; set r2 or r3"
    return None


@cache
def _dense(folder: Path | None, family: str | None) -> str | None:
    """The family of a model without experts; None for others, and for a folder that cannot be read, which the run's
    checks report."""
    try:
        shape = None if folder is None else read_shape(folder, family)
    except ConfigError:
        return None
    return shape.family if shape is not None and not shape.num_experts else None


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
    return ("eval/loss", *(_OF_PAIRS if kind.pairs or kind.labels else _OF_TEXT))


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
