"""Which layouts of a placement fit, each with the savings that take the least time, and why others do not."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Literal

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.options import table as options
from rl_megatron.options.option import BYTES
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.host_memory import copies_bytes, file_bytes, host_bytes
from rl_megatron.scaling.memory import RESERVED, Footprint, advice, fullest
from rl_megatron.scaling.parameters import rank_parameters
from rl_megatron.scaling.planner.layouts import CHANGES_TOGETHER, Timed, Wanted, learner_seconds, with_keys
from rl_megatron.scaling.rl_step import RlStep, rl_step

LayoutKeys = Mapping[str, object]
_OF_HOST = 0.8  # of a node's memory that the learner may take; processes, files in /dev/shm and caches have the rest
_PASSING = ("activations", "logits", "step", "weight push")  # terms beside what a GPU holds all the time


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A layout that fits: its configuration, the keys of it that differ, its step, and the fullest GPU."""

    config: RunConfig
    keys: LayoutKeys
    step: RlStep
    footprint: Footprint

    @property
    def learner(self) -> float:
        """Seconds of training and log-probs in a step."""
        return sum(self.step.parts.get(part, 0.0) for part in ("training", "log-probs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A layout that is not taken, with the reason and the next change.

    ``lacks`` is the memory that does not hold it: of GPUs, "state" if not even what stays there all the time, or of the
    host; empty if it is refused for something else. ``needs`` are the bytes of a GPU that lacks them.
    """

    keys: LayoutKeys
    seconds: float
    reason: str
    lacks: Literal["", "state", "GPUs", "host"] = ""
    needs: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A layout with some of the savings; ``seconds`` as `PlannedRun.learner`."""

    seconds: float
    saved: LayoutKeys
    config: RunConfig
    keys: LayoutKeys

    @property
    def on_host(self) -> object:
        """What the host's memory depends on."""
        return self.saved.get("learner.offload.optimizer"), self.config.checkpoint.async_save

    def more_than(self, other: _Trial) -> bool:
        """Whether it saves what the other does and more, with the same kind of layers."""
        same = self.saved.get("learner.layers") == other.saved.get("learner.layers")
        return same and self.saved.items() > other.saved.items()


@dataclass(slots=True, kw_only=True)
class PlacedLayouts:
    """A placement, whose servers take ``engines`` seconds for a step, and its layouts in the order of their seconds
    without ``savings``, of which the last are all.

    ``planned`` counts plans of memory; ``too_large`` are layouts that GPUs do not hold with any of the savings.
    """

    wanted: Wanted
    engines: float
    keys: LayoutKeys
    timed: Sequence[Timed]
    savings: Sequence[LayoutKeys]
    planned: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    too_large: list[tuple[int, ...]] = field(default_factory=list)

    def fastest(self, most: float) -> Iterator[PlannedRun]:
        """Plans whose steps may take less than ``most`` seconds, each with less of training and log-probs than the one
        before; the last is the best."""
        limit = self._learner_within(most)
        for seconds, keys in self.timed:
            if seconds >= limit:
                return
            if self._is_too_large(keys):
                continue
            found = self._fastest_of(keys, limit)
            if isinstance(found, PlannedRun):
                limit = found.learner
                yield found
            elif found is not None:
                self.rejected.append(found)
                if found.lacks in ("state", "GPUs"):
                    self.too_large.append(_room(keys))

    def smallest(self, most: float, least: float) -> Iterator[PlannedRun]:
        """Plans of less than ``least`` bytes whose steps take at most ``most`` seconds, each of less than the one
        before."""
        limit = self._learner_within(most)
        for seconds, keys in self.timed:
            if seconds > limit:
                return
            if self._is_too_large(keys) or self._least_of(keys) >= least:
                continue
            near = [trial for trial in self._trials(keys) if trial.seconds <= limit]
            for trial in near:
                if any(other.more_than(trial) for other in near):
                    continue
                found = self._planned(trial, least)
                if isinstance(found, Rejected) and found.lacks == "host" and (waits := self._without_copies(trial)):
                    found = self._planned(waits, least)
                if isinstance(found, PlannedRun) and found.step.seconds <= most and found.footprint.total < least:
                    least = found.footprint.total
                    yield found

    def _learner_within(self, most: float) -> float:
        """The most seconds of training and log-probs with which a step can take so many."""
        overlaps = "slurm.engines.nodes" in self.keys and self.wanted.goal != "step"
        return most if overlaps else most - self.engines

    def _is_too_large(self, keys: LayoutKeys) -> bool:
        room = _room(keys)
        return any(all(d <= other for d, other in zip(room, failed, strict=True)) for failed in self.too_large)

    def _least_of(self, keys: LayoutKeys) -> float:
        """Bytes of a GPU that no savings free: a stage's parameters and gradients in the mean, and what is reserved."""
        wanted, learner = self.wanted, with_keys(self.wanted.base, keys).learner
        each = BYTES[learner.dtype] + BYTES[learner.gradient_dtype]
        return each * sum(rank_parameters(wanted.shape, learner.dims)) + RESERVED * wanted.gpu.memory * GB

    def _trials(self, keys: LayoutKeys) -> list[_Trial]:
        """The layout with each of the savings, in their order."""
        out, base = list[_Trial](), with_keys(self.wanted.base, self.keys)
        for saved in self.savings:
            config = with_keys(base, {**keys, **saved})
            seconds = learner_seconds(self.wanted, config)
            out.append(_Trial(seconds=seconds, saved=saved, config=config, keys={**self.keys, **keys, **saved}))
        return out

    def _fastest_of(self, keys: LayoutKeys, limit: float) -> PlannedRun | Rejected | None:
        """The layout with the savings that take the least time; or why none fit: with those that a host lacks memory
        for, or else that need least of a GPU. None if they take ``limit``."""
        *_, last = trials = self._trials(keys)
        nearest = of_last = self._planned(last)
        if isinstance(of_last, Rejected) and of_last.lacks == "state":
            return of_last
        full = set[object]()  # what is kept in a host's memory that does not hold it
        queue = sorted(trials, key=lambda trial: trial.seconds)
        while queue:
            if (trial := queue.pop(0)).seconds >= limit:
                return None
            if trial.on_host not in full:
                found = of_last if trial is last else self._planned(trial)
                if isinstance(found, PlannedRun):
                    return found
                if found.lacks != "host":
                    if isinstance(nearest, Rejected) and nearest.lacks != "host" and found.needs < nearest.needs:
                        nearest = found
                    continue
                nearest = found
                full.add(trial.on_host)
            if waits := self._without_copies(trial):
                insort(queue, waits, key=lambda trial: trial.seconds)
        return nearest

    def _without_copies(self, trial: _Trial) -> _Trial | None:
        """The trial with checkpoints that training waits for; None where it does so, or the user's keys say not."""
        name = "checkpoint.async_save"
        if not trial.config.checkpoint.async_save or name in self.wanted.given:
            return None
        config = with_keys(trial.config, {name: False})
        return replace(trial, config=config, keys={**trial.keys, name: False})

    def _planned(self, trial: _Trial, least: float | None = None) -> PlannedRun | Rejected:
        """The plan of a layout with savings, or why there is none: an option refuses it, a degree does not divide, it
        does not fit, in less than ``least`` bytes of a GPU if that is given."""
        wanted, config = self.wanted, trial.config
        self.planned += 1
        refused = partial(Rejected, keys=trial.keys, seconds=trial.seconds)
        for reason in options.problems(config.learner, wanted.shape):
            return refused(reason=reason)
        try:
            footprint = fullest(config, wanted.shape)
        except ConfigError as error:
            return refused(reason=str(error).splitlines()[0])
        if footprint.total > (room := wanted.gpu.memory * GB):
            state = replace(footprint, terms={t: n for t, n in footprint.terms.items() if t not in _PASSING})
            if state.total > room:
                return refused(reason=self._too_much(config, state), lacks="state")
            return refused(reason=self._too_much(config, footprint), lacks="GPUs", needs=footprint.total)
        if least is not None and footprint.total >= least:
            return refused(reason=f"{footprint.total / GB:.0f} GB are not less than {least / GB:.0f}", lacks="GPUs")
        if reason := self._too_much_of_host(config):
            return refused(reason=reason, lacks="host")
        staleness = wanted.given.get("train.max_staleness")
        step = rl_step(
            config,
            wanted.shape,
            wanted.gpu,
            wanted.lengths,
            prompt=wanted.prompt,
            staleness=0 if wanted.goal == "step" else None if staleness is None else int(str(staleness)),
        )
        keys = dict(trial.keys)
        if step.staleness != wanted.base.train.max_staleness:
            keys["train.max_staleness"] = step.staleness
        return PlannedRun(config=with_keys(wanted.base, keys), keys=keys, step=step, footprint=footprint)

    def _too_much(self, config: RunConfig, footprint: Footprint) -> str:
        """``footprint`` has what passes hold, or lacks it."""
        largest, when = footprint.largest, f" while {footprint.phase}" if footprint.phase else ""
        when += "" if _PASSING[0] in footprint.terms else ", even without what passes hold"
        most = f"most of it {largest}, {footprint.terms[largest] / GB:.0f} GB"
        room = f"{footprint.total / GB:.0f} GB of {self.wanted.gpu.memory:g} on stage {footprint.stage}{when}"
        return f"{room}, {most}; {advice(config, largest, CHANGES_TOGETHER)}"

    def _too_much_of_host(self, config: RunConfig) -> str:
        """Why a node's memory does not hold what the learner has there; empty if it does."""
        shape, gpu = self.wanted.shape, self.wanted.gpu
        copied, written = copies_bytes(config, shape), file_bytes(config, shape)
        held = host_bytes(config, shape) + copied + written
        if held <= (room := gpu.host * GB * _OF_HOST):
            return ""
        return (
            f"{held / GB:.0f} GB of the host's memory for what the learner keeps off its GPUs, copies of what it saves "
            f"({copied / GB:.0f}, checkpoint.async_save) and the file of weights ({written / GB:.0f}), of "
            f"{room / GB:.0f} that a node's {gpu.host:g} leave beside all else; give more GPUs, or a file of "
            "the GPU with its host="
        )


def _room(keys: LayoutKeys) -> tuple[int, ...]:
    """What a layout's memory falls with: of two, that with the smaller numbers needs more."""
    falling = [int(str(keys[f"learner.{axis}"])) for axis in ("tp", "pp", "ep", "etp", "cp")]
    rising = [int(str(keys[f"learner.{key}"])) for key in ("vpp", "max_tokens_per_micro_batch")]
    return (*falling, *(-number for number in rising))
