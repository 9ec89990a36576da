"""Compares what a run measured with what is predicted of it, by phase and by term of memory. No torch.

What depends on the model's answers is the run's own: lengths, trained groups. What is predicted is seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.models.shape import ModelShape
from rl_megatron.placement.ranks import layout_said
from rl_megatron.scaling.hardware import Gpu
from rl_megatron.scaling.machines.calibration import Calibration
from rl_megatron.scaling.machines.embedded import decode_seconds
from rl_megatron.scaling.memory import fullest
from rl_megatron.scaling.rl_step import forward_seconds, learner_work, rl_step, score_seconds, unlike_run
from rl_megatron.scaling.rollouts import lengths_of
from rl_megatron.scaling.time import LearnerWork, step_terms
from rl_megatron.types import ParallelDims

WARM = 2
"""Steps that are left out: they compile kernels, and take memory from the system."""
LEAST = 3
"""Steps that a run must have recorded."""
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPart:
    """Seconds or bytes of one ``part``."""

    part: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """Of the run's steps ``first`` to ``last``: phases, the terms that training's prediction is made of, memory's terms
    with what is compared of them, and what cannot be compared, with reasons."""

    first: int
    last: int
    steps: int
    phases: Sequence[ComparedPart]
    training: Mapping[str, float]
    memory: Mapping[str, float]
    peak: ComparedPart | None
    notes: Sequence[str]


def check_run(config: RunConfig, shape: ModelShape, rows: Rows, gpu: Gpu, machine: Calibration | None) -> CheckedRun:
    """Compare the run whose metrics are ``rows``. ``machine`` is what ``gpu`` was calibrated by, None if it is of a
    data sheet.

    Raises DataError for a run with too few steps, ConfigError for one on other hardware than ``machine``.
    """
    if machine is not None:
        _same_hardware(config, machine)
    all_steps = [row for row in rows if row.get("phase") == "rl" and row.get("step")]
    steps, left_out = _of_layout(all_steps, layout_said(config))
    taken = steps[WARM:] if len(steps) > WARM + LEAST else steps[1:]
    took = _Taken.of(config, taken)
    if not took.sequences:
        raise DataError(
            f"steps {taken[0]['step']} to {taken[-1]['step']} trained on no group; there is nothing to compare"
        )
    notes = [*left_out, *_notes(config, machine, steps)]
    own = _as_trained(config, took)
    work, batches = learner_work(own, shape, gpu, took.positions), config.train.minibatches
    training = {name: s * batches * config.train.epochs for name, s in step_terms(work).items()}
    predicted = {"train": sum(training.values())}
    forward = forward_seconds(work, batches)
    predicted |= {
        "logprobs": score_seconds(own, work),
        "reference": forward,
        "values": forward,
        "critic": predicted["train"],
    }
    if (rollout := _rollout(own, shape, gpu, machine, took)) is not None:
        predicted["rollout"] = rollout
    phases = [
        ComparedPart(part=name, predicted=seconds, measured=took.seconds[name])
        for name, seconds in predicted.items()
        if took.seconds.get(name)
    ]
    if phases and config.train.max_staleness == 0 and "rollout" in predicted:
        of_learner = sum(each.predicted for each in phases)
        whole = sum(took.seconds.get(each.part, 0.0) for each in phases)
        phases.append(ComparedPart(part="these together", predicted=of_learner, measured=whole))
    held, peak = _memory(own, shape, machine, taken, work, notes)
    return CheckedRun(
        first=int(taken[0]["step"]),
        last=int(taken[-1]["step"]),
        steps=len(taken),
        phases=phases,
        training=training,
        memory=held,
        peak=peak,
        notes=notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """Of the steps in the median: seconds by phase; sequences of a step, their positions, lengths of completions; the
    share of proposals that was ``accepted``, where there are some."""

    seconds: Mapping[str, float]
    sequences: float
    positions: float
    completion: float
    longest: float
    accepted: float | None

    @classmethod
    def of(cls, config: RunConfig, rows: Rows) -> _Taken:
        names = sorted({name for row in rows for name in row if name.startswith("seconds/")})
        seconds = {name.removeprefix("seconds/"): _median(rows, name) for name in names}
        groups = _median(rows, "groups/trained") if any("groups/trained" in row for row in rows) else None
        each = config.trained_per_step / config.rollout.prompts_per_step
        sequences = config.trained_per_step if groups is None else groups * each
        trained = _median(rows, "tokens/train") / config.train.epochs
        return cls(
            seconds=seconds,
            sequences=sequences,
            positions=trained / sequences if sequences else 0.0,
            completion=_median(rows, "response/length_mean"),
            longest=_median(rows, "response/length_max"),
            accepted=_median(rows, "draft/acceptance") if any("draft/acceptance" in row for row in rows) else None,
        )

    @property
    def prompt(self) -> float:
        """Tokens of a prompt: L tokens make L - 1 positions."""
        return max(1.0, self.positions + 1 - self.completion)


def _median(rows: Rows, name: str) -> float:
    found = [float(row[name]) for row in rows if row.get(name) is not None]
    return median(found) if found else 0.0


def _of_layout(steps: Rows, now: str) -> tuple[Rows, list[str]]:
    """The steps since all are in the layout ``now``, with a note of those before; rows of older versions name none.

    Raises DataError if they are too few.
    """
    others = [at for at, row in enumerate(steps) if row.get("devices/layout", now) != now]
    since, where, notes = 0, "", list[str]()
    if others:
        last = steps[others[-1]]
        since, where = others[-1] + 1, f" in the layout of its config.yaml ({now})"
        then = last["devices/layout"]
        notes.append(f"steps up to {last['step']} are left out: their layout was {then}, and it is {now} now")
    if len(steps) - since < LEAST:
        raise DataError(
            f"metrics.jsonl has {len(steps) - since} steps of RL{where}; at least {LEAST} are needed, as the first "
            "compile"
        )
    return steps[since:], notes


def _same_hardware(config: RunConfig, machine: Calibration) -> None:
    """Raises ConfigError for a run that ``machine`` does not hold for."""
    learner = config.learner
    given: dict[str, str] = {"device": learner.device, "dtype": learner.dtype}
    if learner.device == "cpu" and learner.threads is not None:
        given["threads"] = str(learner.threads)
    for key, value in given.items():
        if str(getattr(machine, key)) != value:
            raise ConfigError(
                f"learner.{key}={value} in the run, and {key}={getattr(machine, key)} in the calibration of "
                f"{machine.name}; calibrate the machine that ran it with rl-megatron scale --calibrate FILE"
            )


def _notes(config: RunConfig, machine: Calibration | None, steps: Rows) -> Iterator[str]:
    if config.learner.device == "cpu" and config.learner.threads is None and machine is not None:
        yield f"learner.threads is not set: the ranks may have had other than the calibration's {machine.threads}"
    if config.train.max_staleness:
        yield "sampling overlaps training (train.max_staleness), so that each phase also waits: no sum is compared"
    for why in unlike_run(config):
        yield f"predicted seconds are of {why}"
    if any(row.get("steps/skipped") for row in steps):
        yield "some optimizer steps were skipped, and took less"
    if config.rollout.served and machine is not None:
        yield "servers' seconds are not calibrated: sampling is predicted from the engines' assumed shares"
    yield "a push is not compared: the plan predicts its bytes (rl-megatron plan --config), not what verifying takes"


def _as_trained(config: RunConfig, took: _Taken) -> RunConfig:
    """The configuration with as many prompts as had groups to train on, and as many proposals accepted."""
    prompts = max(1, round(took.sequences * config.rollout.prompts_per_step / config.trained_per_step))
    update: dict[str, object] = {"rollout": config.rollout.model_copy(update={"prompts_per_step": prompts})}
    if took.accepted is not None:
        speeds = config.slurm.speeds.model_copy(update={"draft_acceptance": took.accepted})
        update["slurm"] = config.slurm.model_copy(update={"speeds": speeds})
    return config.model_copy(update=update)


def _rollout(config: RunConfig, shape: ModelShape, gpu: Gpu, machine: Calibration | None, took: _Taken) -> float | None:
    """Seconds of sampling, with the lengths that the run had; None where nothing predicts them."""
    if not took.completion:
        return None
    lengths = lengths_of(round(took.completion, 1), max(took.completion, took.longest))
    if config.rollout.served:
        if config.rollout.server.addresses is not None or config.rollout.server.pp > 1:
            return None
        return rl_step(config, shape, gpu, lengths, prompt=took.prompt, push=0.0).parts["rollout"]
    if machine is None:
        return None
    ranks = config.learner.dims.world_size
    entry = machine.load(ranks).entry
    rows = min(config.rollout.slots, config.completions_per_step / ranks)
    seconds, before = 0.0, 0.0
    for i, length in enumerate(lengths):
        if length > before:
            active = max(1.0, rows * (len(lengths) - i) / len(lengths))
            token = decode_seconds(shape, gpu, entry, active, took.prompt + (before + length) / 2)
            seconds, before = seconds + (length - before) * token, length
    waves = max(1.0, config.completions_per_step / ranks / rows)
    prompts = LearnerWork(
        shape=shape,
        dims=ParallelDims(),
        gpu=gpu,
        tokens=config.rollout.prompts_per_step / ranks * took.prompt,
        length=took.prompt,
        micro_batches=1,
        precision="float32" if config.learner.dtype == "float32" else "bfloat16",
        natural=False,
        scored=True,
    )
    return seconds * waves + sum(step_terms(prompts).values())


def _memory(
    config: RunConfig,
    shape: ModelShape,
    machine: Calibration | None,
    rows: Rows,
    work: LearnerWork,
    notes: list[str],
) -> tuple[Mapping[str, float], ComparedPart | None]:
    """Terms of the fullest rank at the run's own micro-batches, and their sum beside the peak."""
    filled = config.learner.model_copy(update={"max_tokens_per_micro_batch": max(1, round(work.tokens))})
    terms = dict(fullest(config.model_copy(update={"learner": filled}), shape).terms)
    peaks = [float(row["memory/peak"]) for row in rows if row.get("memory/peak")]
    if config.learner.device == "cpu":
        terms["process"] = float(machine.load(config.learner.dims.world_size).curves.process_bytes) if machine else 0.0
        notes.append("of memory only the sum is measured: a rank's resident bytes, with what the heap keeps free")
    else:  # torch's allocator counts neither contexts nor other processes
        for term in ("reserved", "engine") if config.rollout.served else ("reserved",):
            terms.pop(term, None)
        notes.append("of memory only the sum is measured: torch's allocator, without contexts and servers")
    held = {term: value for term, value in terms.items() if value}
    if not peaks:
        notes.append("memory/peak is recorded with two ranks or more")
        return held, None
    return held, ComparedPart(part="peak", predicted=sum(held.values()), measured=max(peaks))
