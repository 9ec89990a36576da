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
from rl_megatron.observability.files import JsonValue
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


class Spending:
    """Adds up what the steps of rows of metrics.jsonl took, which are not kept.

    Devices of a role are held by it all the time, but those that learner and engines share are the engines' while they
    sample (seconds/rollout). They are those of each row, which a resume may change; of rows of older versions, which
    have none, those of ``config``.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self._usual = config, functools.cache(functools.partial(devices, config))
        self._roles = functools.lru_cache(256)(_roles_of)
        self._hours, self._warm_start = dict[str, float](), dict[str, float]()
        self._steps, self._trained, self._sampled = 0, 0.0, 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row, if it is of a step."""
        if row.get("seconds/step") is None or row.get("phase") not in (*STEPS, "warm_start"):
            return
        if row["phase"] != "warm_start":
            self._steps += 1
            self._trained += float(row.get("tokens/train") or 0.0)
            self._sampled += float(row.get("tokens/rollout") or 0.0)
        named = {role: row[name] for name, role in self._roles(tuple(row)).items()}
        counts = {role: n for role, n in named.items() if isinstance(n, int)} or self._usual()
        into = self._warm_start if row["phase"] == "warm_start" else self._hours
        seconds, sampling = float(row["seconds/step"]), float(row.get("seconds/rollout") or 0.0)
        for role, each in _hours(self.config, counts, seconds, sampling).items():
            into[role] = into.get(role, 0.0) + each

    @property
    def cost(self) -> RunCost:
        """Of all rows that were added."""
        return RunCost(
            unit="core" if self.config.learner.device == "cpu" else "GPU",
            steps=self._steps,
            hours=dict(self._hours),
            trained=self._trained,
            sampled=self._sampled,
            warm_start=sum(self._warm_start.values()),
        )


def _roles_of(names: tuple[str, ...]) -> dict[str, str]:
    """The role of each of the metrics that counts its devices; asked once of rows of the same names."""
    return {name: name.removeprefix(_DEVICES) for name in names if name.startswith(_DEVICES)}


def spent(config: RunConfig, rows: Iterable[Mapping[str, Any]]) -> RunCost:
    """What the steps in ``rows`` took (`Spending`)."""
    spending = Spending(config)
    for row in rows:
        spending.add(row)
    return spending.cost


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

    memory/peak is of torch's allocator: without what engine servers on the same GPU, contexts and NCCL take. Seconds,
    mfu/train and the length that a completion is assumed to have are there if ``slurm.speeds.gpu`` names the GPUs.
    Raises ConfigError if the layout does not divide the model's sizes.
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
    if found is None:
        return {"memory/peak": max(held)}
    names = {"training": "train", "log-probs": "logprobs", "rollout": "rollout", "push": "weights"}
    seconds = {f"seconds/{name}": found.step.parts[part] for part, name in names.items() if part in found.step.parts}
    return {"memory/peak": max(held), "mfu/train": found.mfu, "response/length_mean": found.mean, **seconds}


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


def lines_of_spent(config: RunConfig, found: RunCost, guess: Estimate) -> Iterator[str]:
    """Lines to show at a run's end; none before its first step."""
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


class RunCosts:
    """`lines_of_spent` of a run, whose rows are added; why there are none, where they cannot be counted or its plan
    cannot be made: no fault in them ends a run."""

    def __init__(self, config: RunConfig | RLMegatronError) -> None:
        """An error says why the configuration cannot be read."""
        self._spending: Spending | str = _why(config) if isinstance(config, RLMegatronError) else Spending(config)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a row."""
        if isinstance(self._spending, Spending):
            try:
                self._spending.add(row)
            except Exception as error:  # noqa: BLE001  `_why` logs it
                self._spending = _why(error)

    def lines(self) -> list[str]:
        """Of the rows that were added."""
        if isinstance(self._spending, str):
            return [self._spending]
        try:
            config = self._spending.config
            return list(lines_of_spent(config, self._spending.cost, estimate(config, starting_shape(config))))
        except Exception as error:  # noqa: BLE001  `_why` logs it
            return [_why(error)]


def costs_of_run(folder: Path) -> RunCosts:
    """Those of a run's folder, which may still train."""
    try:
        return RunCosts(load_config(str(folder / "config.yaml"), []))
    except RLMegatronError as error:
        return RunCosts(error)


def _why(error: Exception) -> str:
    if isinstance(error, RLMegatronError):
        return f"the run's hours are not compared with a plan: {error}"
    logger.warning("the run's hours", exc_info=error)
    return f"the run's hours are not counted: {type(error).__name__}: {error}"


def _said(one: RunCost) -> str:
    roles = ", ".join(f"{role} {hours:,.3g}" for role, hours in one.hours.items())
    per = f", {one.trained / one.total:,.0f} trained a {one.unit}-hour" if one.total else ""
    tokens = f"{one.trained:,.0f} tokens trained, {one.sampled:,.0f} sampled{per}"
    return f"{one.total:,.3g} {one.unit}-hours ({roles}); {tokens}"
