"""Computes the seconds for which training waits for evaluations. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import ArithmeticData, DataSection, FileData, data_sources
from rl_megatron.config.sections.eval import EvalSetSection, RunData
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.hardware import Gpu
from rl_megatron.scaling.memory import weights_served
from rl_megatron.scaling.rl_step import rollout_seconds, server_shape, servers_on_a_gpu
from rl_megatron.scaling.rollouts import lengths_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """A run's evaluations, for which training waits ``seconds`` in all of its ``steps``; those of the sets in
    ``unknown``, each with why, are left out."""

    seconds: float
    steps: int
    completions: int  # of all evaluations
    unknown: tuple[str, ...] = ()

    @property
    def seconds_a_step(self) -> float:
        """Seconds for which training waits, shared out over all steps."""
        return self.seconds / max(1, self.steps)

    def lines(self) -> Iterator[str]:
        """Lines to show below a step's seconds."""
        if self.seconds:
            yield (
                f"  evaluations take {self.seconds_a_step:,.1f} s a step more in the mean: {self.completions:,} "
                f"completions in {self.steps:,} steps, for which training waits (eval.mode=blocking)"
            )
        for why in self.unknown:
            yield f"  seconds of evaluations are not predicted of {why}"


def evaluation_cost(config: RunConfig, shape: ModelShape, gpu: Gpu) -> Evaluations:
    """What `rollout_seconds` are for each set, times how often it is due; none where training goes on meanwhile.

    A set with a ``max_new_tokens`` of its own has completions of half of it in the mean.
    """
    steps, server = config.train.steps, config.rollout.server
    seconds, completions, unknown = 0.0, 0, list[str]()
    served = server_shape(config, server, weights_served(config, shape), shape, gpu)
    for name, one in (config.eval.sets or {"": EvalSetSection()}).items():
        times = sum(one.due(step, every=config.eval.every, last=step == steps) for step in range(steps + 1))
        if config.eval.mode != "blocking" or not times:
            continue
        key = f"eval.sets.{name}" if name else "eval"
        if one.environment is not None:
            unknown.append(f"{key}.environment.function={one.environment.function}: its turns wait for each other")
            continue
        if not (problems := _problems(config, one)):
            unknown.append(f"{key}, whose problems are not counted: set max_eval of its data, or a set's limit")
            continue
        rollout = config.rollout.model_copy(update={"prompts_per_step": problems, "group_size": one.samples})
        mean, most = config.slurm.speeds.mean_tokens, config.rollout.max_new_tokens
        if one.max_new_tokens is not None:
            mean, most = None, one.max_new_tokens
        once = rollout_seconds(
            config.model_copy(update={"rollout": rollout}),
            shape,
            served,
            gpu,
            lengths_of(mean or most / 2, most),
            replicas=server.count,
            prompt=config.rollout.max_prompt_tokens / 2,
            concurrency=server.concurrency,
            sharing=servers_on_a_gpu(config),
        )
        seconds += times * once.alone
        completions += times * problems * one.samples
    return Evaluations(seconds=seconds, steps=steps, completions=completions, unknown=tuple(unknown))


def _problems(config: RunConfig, one: EvalSetSection) -> int | None:
    """The problems of a set; None where neither keys nor a file here say."""
    data: DataSection = config.data if isinstance(one.data, RunData) else one.data
    known = [_of_source(source) for source in data_sources(data).values()]
    most = inf if one.limit is None else one.limit
    held = min(most, sum(inf if count is None else count for count in known))
    return None if held == inf else int(held)


def _of_source(source: object) -> int | None:
    if isinstance(source, ArithmeticData):
        return source.num_eval
    most = getattr(source, "max_eval", None)
    if not isinstance(source, FileData) or source.eval.suffix != ".jsonl" or not source.eval.is_file():
        return most
    rows = _rows(source.eval)
    return most if rows is None else rows if most is None else min(most, rows)


def _rows(path: Path) -> int | None:
    """Lines that are not empty; None of a file that cannot be read, which the run's checks report."""
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError:
        return None
