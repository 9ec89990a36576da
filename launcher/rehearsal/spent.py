"""What a run has spent, by its own metrics: GPU-hours by role and tokens, beside those of the plan."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.build.model import starting_shape
from launcher.hosts.sites import visible_gpus
from launcher.hosts.threads import threads_per_worker
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.files import JsonValue, rows_from
from rl_megatron.observability.metrics.table import STEPS
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import layout_said, ranks_by_role
from rl_megatron.placement.seats import seats_here
from rl_megatron.scaling.estimates import Estimate, Predicted, estimate, gpus_by_role
from rl_megatron.scaling.memory import footprints

logger = logging.getLogger(__name__)

ENGINES = "engines"
_DEVICES = "devices/"
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Hours of ``unit`` (GPU or core) that each role held, and tokens that were trained on and sampled."""

    unit: str
    steps: int
    hours: Mapping[str, float]
    trained: float
    sampled: float
    warm_start: float = 0.0  # hours of all roles in the steps of a warm start, which no plan has, nor ``hours``

    @property
    def total(self) -> float:
        """Hours of all roles."""
        return sum(self.hours.values())

    def each(self) -> RunCost:
        """Of a step in the mean."""
        n = max(1, self.steps)
        hours = {role: held / n for role, held in self.hours.items()}
        return RunCost(unit=self.unit, steps=1, hours=hours, trained=self.trained / n, sampled=self.sampled / n)


def spent(config: RunConfig, rows: Iterable[Mapping[str, Any]]) -> RunCost:
    """What the steps in ``rows`` of metrics.jsonl took, which are read once and not kept.

    Devices of a role are held by it all the time, but those that learner and engines share are the engines' while they
    sample (seconds/rollout). They are those of each row, which a resume may change; of rows of older versions, which
    have none, those of ``config``.
    """
    usual = functools.cache(functools.partial(devices, config))
    hours, warm_start = dict[str, float](), dict[str, float]()
    steps, trained, sampled = 0, 0.0, 0.0
    for row in rows:
        if row.get("seconds/step") is None or row.get("phase") not in (*STEPS, "warm_start"):
            continue
        if row["phase"] != "warm_start":
            steps += 1
            trained += float(row.get("tokens/train") or 0.0)
            sampled += float(row.get("tokens/rollout") or 0.0)
        held = {name.removeprefix(_DEVICES): n for name, n in row.items() if name.startswith(_DEVICES)}
        counts = {role: n for role, n in held.items() if isinstance(n, int)} or usual()
        into = warm_start if row["phase"] == "warm_start" else hours
        seconds, sampling = float(row["seconds/step"]), float(row.get("seconds/rollout") or 0.0)
        for role, each in _hours(config, counts, seconds, sampling).items():
            into[role] = into.get(role, 0.0) + each
    unit = "core" if config.learner.device == "cpu" else "GPU"
    before = sum(warm_start.values())
    return RunCost(unit=unit, steps=steps, hours=hours, trained=trained, sampled=sampled, warm_start=before)


def planned(config: RunConfig, found: Predicted, steps: int) -> RunCost:
    """What ``steps`` steps take by the plan."""
    completions = config.completions_per_step * steps
    return RunCost(
        unit="GPU",
        steps=steps,
        hours=_hours(config, devices(config), found.step.seconds * steps, found.step.parts["rollout"] * steps),
        trained=found.step.tokens * steps * config.train.epochs,
        sampled=completions * found.mean,
    )


def planned_metrics(config: RunConfig, shape: ModelShape, guess: Estimate) -> dict[str, float]:
    """What the plan says of metrics of a run on GPUs, by their names; nothing of one on CPUs.

    memory/peak is of torch's allocator: without what engine servers on the same GPU, contexts and NCCL take. mfu/train
    is there if ``slurm.speeds.gpu`` names the GPUs. Raises ConfigError if the layout does not divide the model's sizes.
    """
    if config.learner.device == "cpu":
        return {}
    apart = {"reserved", "engine"} if config.rollout.served else {"reserved"}
    held = [
        sum(taken for term, taken in one.terms.items() if term not in apart)
        for one in footprints(config, shape)
        if one.role == LEARNER
    ]
    found = guess.step.predicted if guess.step is not None else None
    return {"memory/peak": max(held)} | ({} if found is None else {"mfu/train": found.mfu})


def recorded(config: RunConfig) -> dict[str, JsonValue]:
    """What each row says of devices, which it has taken and which a resume may change: those of each role, and the
    layout."""
    try:
        held = devices(config)
    except RLMegatronError as error:
        logger.warning("metrics.jsonl does not say the devices of the run: %s", error)
        held = {}
    return {**{f"{_DEVICES}{role}": count for role, count in held.items()}, f"{_DEVICES}layout": layout_said(config)}


def _hours(config: RunConfig, count: Mapping[str, int], seconds: float, sampling: float) -> dict[str, float]:
    """Hours of devices by role, of ``seconds`` in all of which ``sampling`` were rollouts."""
    held = {role: number * seconds / _HOUR for role, number in count.items()}
    if ENGINES not in held and config.kind.samples and config.rollout.server.addresses is None:
        held[ENGINES] = held[LEARNER] * sampling / seconds if seconds else 0.0
        held[LEARNER] -= held[ENGINES]
    return held


def devices(config: RunConfig) -> dict[str, int]:
    """GPUs of each role that has some of its own, or on CPUs the cores that its ranks compute with.

    On one machine servers that share GPUs with ranks add those that only they have to the learner's. Raises ConfigError
    if the machine has too few GPUs.
    """
    held = ranks_by_role(config)
    if config.learner.device == "cpu":
        return {role: ranks * threads_per_worker(config) for role, ranks in held.items()}
    if config.run.launcher == "slurm" or (config.run.launcher == "ray" and "SLURM_JOB_ID" in os.environ):
        return gpus_by_role(config)
    seats = () if not config.kind.samples else seats_here(config, len(visible_gpus()))
    sampling, training = {gpu for seat in seats for gpu in seat.gpus}, set(range(sum(held.values())))
    if sampling - training:
        whose = LEARNER if sampling & training else ENGINES
        held[whose] = held.get(whose, 0) + len(sampling - training)
    return held


def lines_of_spent(config: RunConfig, rows: Iterable[Mapping[str, Any]], guess: Estimate) -> Iterator[str]:
    """Lines to show at a run's end; none before its first step."""
    found = spent(config, rows)
    if not found.steps:
        return
    yield f"spent in {found.steps:,} {'step' if found.steps == 1 else 'steps'}: {_said(found)}"
    if found.warm_start:
        yield f"  before them the warm start: {found.warm_start:,.3g} {found.unit}-hours"
    step = guess.step
    if step is None or step.predicted is None:
        why = step.why if step is not None else "no plan knows the seconds of steps on CPUs"
        yield f"  beside no plan: {why}"
        return
    plan = planned(config, step.predicted, found.steps)
    yield f"  planned: {_said(plan)}"
    if found.trained and found.total:
        rate = found.total / found.trained / (plan.total / plan.trained)
        yield f"  a trained token took {rate:.2f} times the planned {found.unit}-hours"


def costs_of_run(folder: Path) -> list[str]:
    """`lines_of_spent` of a run's folder, which may still train; why there are none, where its plan cannot be made."""
    try:
        config = load_config(str(folder / "config.yaml"), [])
        return costs(config, folder)
    except RLMegatronError as error:
        return [f"the run's hours are not compared with a plan: {error}"]


def costs(config: RunConfig, folder: Path) -> list[str]:
    """As `costs_of_run`, of a known configuration; no fault in them ends a run."""
    try:
        metrics = folder / "metrics.jsonl"
        rows = rows_from(metrics) if metrics.is_file() else ()
        return list(lines_of_spent(config, rows, estimate(config, starting_shape(config))))
    except RLMegatronError as error:
        return [f"the run's hours are not compared with a plan: {error}"]
    except Exception as error:
        logger.warning("the run's hours", exc_info=True)
        return [f"the run's hours are not counted: {type(error).__name__}: {error}"]


def _said(one: RunCost) -> str:
    roles = ", ".join(f"{role} {hours:,.3g}" for role, hours in one.hours.items())
    per = f", {one.trained / one.total:,.0f} trained a {one.unit}-hour" if one.total else ""
    tokens = f"{one.trained:,.0f} tokens trained, {one.sampled:,.0f} sampled{per}"
    return f"{one.total:,.3g} {one.unit}-hours ({roles}); {tokens}"
