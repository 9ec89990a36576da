"""The rehearsal's table: what was predicted, what was measured, and the bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.rehearsal.rehearsed import FirstAttempt
from launcher.rehearsal.sizes import FAR
from launcher.rehearsal.spent import planned, spent
from launcher.rehearsal.survey import Surveyed
from rl_megatron.config.run import RunConfig
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.estimates import TOO_MUCH, Estimate, estimate
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.memory import footprints

_SHORT = 0.1  # seconds: latency, which no prediction has


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """A line of the table; None is unknown. ``least``: the bound is a lower one."""

    what: str
    unit: str
    measured: float | None
    predicted: float | None = None
    bound: float | None = None
    least: bool = False

    @property
    def verdict(self) -> str:
        """In words: whether the bound holds, and whether it is near the prediction."""
        if self.measured is None:
            return "not measured"
        if self.bound is not None and (self.measured < self.bound if self.least else self.measured > self.bound):
            return "OUT OF BOUND"
        if self.predicted is None:
            return "ok" if self.bound is not None else ""
        if not self.predicted:
            return f"{self.measured:.3g} more than predicted" if self.measured else "as predicted"
        if self.unit == "s" and self.measured - self.predicted < _SHORT:
            return "as predicted"
        times = self.predicted / self.measured if self.least and self.measured else self.measured / self.predicted
        return f"{times:.1f} times worse than predicted" if times > FAR else "as predicted"


def lines_of_survey(config: RunConfig, found: Surveyed) -> Iterator[TableLine]:
    """Of every node and link: the slowest."""
    speeds, on_gpus = config.slurm.speeds, config.learner.device != "cpu"
    count = len(found.answers) + len(found.failures.keys() - found.answers.keys())
    sound = count - len(found.failures)
    yield TableLine(what="nodes without a fault", unit="", measured=sound, predicted=count, bound=count, least=True)
    flops = [link["flops"] / 1e12 for link in found.links() if "flops" in link]
    peak = speeds.tflops if on_gpus else None
    yield TableLine(what="matrix products", unit="TFLOP/s", measured=_least(flops), predicted=peak, least=True)
    for how in ("write", "read"):
        rates = [each[how] / GB for answer in found.answers.values() for each in answer["disks"].values()]
        yield TableLine(
            what=f"disk, {how}", unit="GB/s", measured=_least(rates), predicted=speeds.storage_node, least=True
        )
    pairs = [rate / GB for rate in found.pairs().values()]
    if pairs:
        yield TableLine(what="between nodes", unit="GB/s", measured=_least(pairs), predicted=speeds.nic, least=True)
    for kind, groups in found.groups().items():
        near = all(len({found.by_process[rank] for rank in group}) == 1 for group in groups)
        near_speed = speeds.nvlink if on_gpus else speeds.memory
        yield TableLine(
            what=f"{kind} group of {len(next(iter(groups)))}, {'in a node' if near else 'over nodes'}",
            unit="GB/s",
            measured=_least([rate / GB for rate in groups.values()]),
            predicted=near_speed if near else speeds.nic,
            least=True,
        )


def lines_of_run(
    config: RunConfig,
    inside: RunConfig,
    shape: ModelShape,
    rows: Sequence[Mapping[str, Any]],
    started: FirstAttempt | None,
    resumed: float | None,
) -> Iterator[TableLine]:
    """Of the run ``inside``, by its own metrics: ``rows`` of its steps, the last one after the resume.

    Shares of a step that bound something are of one of ``config``'s batch.
    """
    guess = estimate(inside, shape)
    times = _times(estimate(config, shape), guess, config.completions_per_step / inside.completions_per_step)
    row = rows[1] if len(rows) > 1 else {}  # the first step also compiles and allocates
    yield TableLine(what="start to the first step", unit="s", measured=None if started is None else started.ready)
    yield _memory(config, shape, [r["memory/peak"] for r in rows if "memory/peak" in r])
    step = _number(row, "seconds/step")
    yield TableLine(what="step, with its checkpoint", unit="s", measured=step, predicted=_step(guess, times))
    made = None if step is None else float(row["tokens/train"]) / step
    yield TableLine(what="trained tokens", unit="tokens/s", measured=made)
    yield from _hours(inside, guess, row)
    yield from _push(guess, row, step and times * step)
    yield from _save(config, guess, row, step, times)
    limit = config.learner.timeout_seconds
    noticed = None if started is None else started.noticed
    yield TableLine(what="killed rank to the run's end", unit="s", measured=noticed, bound=limit)
    yield TableLine(what="resume to its first step", unit="s", measured=resumed)


def _hours(config: RunConfig, guess: Estimate, row: Mapping[str, Any]) -> Iterator[TableLine]:
    """Of a step: hours of each role, its checkpoint's left out, and tokens."""
    if not row:
        return
    alone = float(row["seconds/step"]) - float(row.get("seconds/checkpoint") or 0.0)
    found = spent(config, [{**row, "seconds/step": alone}])
    by_plan = None if guess.step is None or guess.step.predicted is None else planned(config, guess.step.predicted, 1)
    for role, hours in found.hours.items():
        yield TableLine(
            what=f"{found.unit}-hours of a step, {role}",
            unit="h",
            measured=hours,
            predicted=None if by_plan is None else by_plan.hours[role],
        )
    for what, tokens in (("trained", found.trained), ("sampled", found.sampled)):
        yield TableLine(
            what=f"tokens {what} in a step",
            unit="",
            measured=tokens,
            predicted=None if by_plan is None else (by_plan.trained if what == "trained" else by_plan.sampled),
        )


def _times(own: Estimate, guess: Estimate, batches: float) -> float:
    """How many times as long a step of the run takes as one of its rehearsal: as predicted, else in proportion to their
    ``batches``."""
    of_both = [None if each.step is None else each.step.predicted for each in (own, guess)]
    whole, part = (None if each is None else each.step.seconds for each in of_both)
    return whole / part if whole and part else batches


def _step(guess: Estimate, times: float) -> float | None:
    """Seconds that the user stated, of a step of the run; or predicted ones, and a checkpoint's if each step of a
    rehearsal waits for it."""
    if guess.step is None or (guess.step.predicted is None and not guess.step.stated):
        return None
    return guess.step.seconds / times if guess.step.stated else guess.step.seconds + guess.save.held


def _memory(config: RunConfig, shape: ModelShape, peaks: Sequence[float]) -> TableLine:
    on_gpus = config.learner.device != "cpu"
    most = max((each.total for each in footprints(config, shape)), default=0.0) / GB if on_gpus else None
    return TableLine(
        what="memory of the fullest rank",
        unit="GB",
        measured=max(peaks) / GB if peaks else None,
        predicted=most,
        bound=config.slurm.gpu_memory_gb if on_gpus else None,
    )


def _push(guess: Estimate, row: Mapping[str, Any], step: float | None) -> Iterator[TableLine]:
    """Bytes are bound by the plan's, where they go from ranks to ranks: nothing is sent twice."""
    yield TableLine(
        what="push of weights",
        unit="s",
        measured=_number(row, "seconds/weights"),
        predicted=guess.push.seconds or None,
        bound=step and TOO_MUCH * step,
    )
    total = sum(hop.total for hop in guess.push.hops) / GB
    moved = _number(row, "weights/bytes")
    yield TableLine(
        what=f"bytes of a push ({row.get('weights/route', guess.push.route.transport)})",
        unit="GB",
        measured=None if moved is None else moved / GB,
        predicted=total if guess.push.hops else None,
    )


def _save(
    config: RunConfig, guess: Estimate, row: Mapping[str, Any], step: float | None, times: float
) -> Iterator[TableLine]:
    """Seconds are bound by what one checkpoint in ``checkpoint.every`` steps may take."""
    every = config.checkpoint.every
    seconds, written = _number(row, "checkpoint/write_seconds"), _number(row, "checkpoint/bytes")
    held = _number(row, "seconds/checkpoint")
    alone = None if step is None or held is None else times * (step - held)
    yield TableLine(
        what="checkpoint",
        unit="s",
        measured=seconds,
        predicted=guess.save.seconds,
        bound=TOO_MUCH * alone * every if alone is not None and every else None,
    )
    yield TableLine(
        what="bytes of a checkpoint",
        unit="GB",
        measured=None if written is None else written / GB,
        predicted=guess.save.total / GB,
    )


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return None if value is None else float(value)


def _least(rates: Sequence[float]) -> float | None:
    return min(rates, default=None)
