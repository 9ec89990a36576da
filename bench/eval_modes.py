"""Measure what evaluating costs training that has servers: seconds of a step with each `eval.mode`, and without.

    python -m bench.eval_modes [--steps 40] [--rounds 4] [--json FILE]

Servers and learner of `bench.streaming`, which sleep for each token, so that no core is short; the project's own
stream, sampler, served engine, pushes, update and evaluations. Lengths are heavy (1 : 8). Each tenth version is
measured on a set whose samples are as many as those of two steps, so a fifth more is sampled. *room* is the share of
their slots' time that training leaves to servers; with none, a fifth is the least that evaluating can cost. *few* is
beside, with `FEW` requests at once; *own* is the share of an evaluation's tokens that are of its own version.

In a round all modes run at once, each with a process and servers of its own, so that what else the machine does meets
all of them; *busy* is how many of the machine's cores were in use meanwhile, by whatever: figures hold where some are
left. A round takes 3.1 s a step, four of them 10 minutes; rows are printed as each room of a round ends. The last rows
are means over rounds, with Student's interval.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import torch

from bench.results import parse, write
from bench.streaming import Learns, config_of, measured, servers
from bench.streaming_model import GROUP, MEAN, MOST, PROMPTS, SERVERS, TOKEN_SECONDS, TRAIN_TOKEN, WARM
from rl_megatron.config.sections.eval import EvalSection, EvalSetSection
from rl_megatron.evaluation.sets import EvalSet
from rl_megatron.observability.intervals import mean_interval
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.training.evaluation import BackgroundEvaluator, Evaluator
from rl_megatron.types import Prompt

EVERY, PROBLEMS = 10, 2 * PROMPTS * GROUP
BAR = 0.05  # of a step's seconds without evaluations
MODES = ("none", "blocking", "background", "few")
FEW = 4  # requests at once, of 16 slots


@dataclass(slots=True)
class Evaluating:
    """Evaluates after pushes, as `training.jobs.rl` does."""

    mode: str  # few: background, with `FEW` requests at once
    last: int  # the version of the last step
    rows: list[Any] = field(default_factory=list)
    beside: BackgroundEvaluator | None = None

    async def __call__(self, sampler: RolloutSampler, version: int) -> None:
        """Begin or make what is due; at the last version wait for what is under way."""
        if self.mode == "none" or not version:
            return
        if self.beside is None:
            problems = [Prompt(id=f"held {n}", text="", token_ids=(1,), answer="") for n in range(PROBLEMS)]
            one = EvalSet(name=None, prompts=problems, section=EvalSetSection(), temperature=0.0)
            evaluation = Evaluator(sampler=sampler, sets=[one], section=EvalSection(every=EVERY), last_step=0)
            recorder: Any = SimpleNamespace(write=AsyncMock(side_effect=self.rows.append))
            few = FEW if self.mode == "few" else None
            self.beside = BackgroundEvaluator(evaluation=evaluation, recorder=recorder, max_requests=few)
        if version == self.last:
            await self.beside.finish(version)
        elif version % EVERY == 0 and self.mode != "blocking":
            self.beside.begin(version)
        elif version % EVERY == 0:
            self.rows.append(await self.beside.evaluation.row(version, pushed=version))


def measure(urls: list[str], mode: str, room: float, steps: int) -> dict[str, Any]:
    """Seconds of a step, in a process of its own."""
    torch.set_num_threads(1)
    step = PROMPTS * GROUP * MEAN * TRAIN_TOKEN / (1 - room)
    k = math.ceil(MOST * MEAN * TOKEN_SECONDS / step)
    prompts = [Prompt(id=f"{n}", text="", token_ids=(1,), answer="") for n in range(PROMPTS * (WARM + steps + k + 1))]
    policy = Learns(TRAIN_TOKEN / (1 - room))
    evaluating = Evaluating(mode, last=WARM + steps - 1)
    found = asyncio.run(measured(urls, config_of(k), steps, prompts, policy=policy, pushed=evaluating))
    own = [row["eval/current_version_fraction"] for row in evaluating.rows]
    return {
        "mode": mode,
        "seconds": found.seconds,
        "over_floor": found.seconds * steps / (sum(found.lengths) * TRAIN_TOKEN / (1 - room)),
        "evaluations": len(own),
        "own": statistics.mean(own) if own else None,
    }


def at_once(pool: ProcessPoolExecutor, urls: dict[str, list[str]], room: float, steps: int) -> list[dict[str, Any]]:
    """A row for each mode of ``urls``; the first is without evaluations, and costs are over it."""
    began, before = time.monotonic(), _core_seconds()
    runs = [pool.submit(measure, mine, mode, room, steps) for mode, mine in urls.items()]
    rows = [run.result() for run in runs]
    busy = (_core_seconds() - before) / (time.monotonic() - began)
    return [{**row, "cost": row["over_floor"] / rows[0]["over_floor"] - 1, "busy": busy} for row in rows]


def _core_seconds() -> float:
    """In which the machine's cores were in use since it started, by anyone (proc_stat(5))."""
    user, nice, system, _idle, _waits, *others = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def summary(mode: str, room: float, costs: Sequence[float]) -> dict[str, Any]:
    """The mean cost over rounds; *met* where it is at most the bar, which blocking is not held to."""
    found = mean_interval(costs)
    row = {"room": room, "mode": mode, "rounds": found.count, "cost": found.value, "low": found.low, "high": found.high}
    return row if mode == "blocking" else {**row, "bar": BAR, "met": found.value <= BAR}


def told(row: dict[str, Any]) -> None:
    """Print it, at once."""
    print(" ".join(f"{n}={v:.3f}" if isinstance(v, float) else f"{n}={v}" for n, v in row.items()), flush=True)


def main() -> None:
    """Print a row for each round, room and mode as it ends, and then means with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="that figures count")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--room", type=float, nargs="+", default=[0.5, 0.0])
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=["background", "few"], help="against none")
    args = parse(parser)
    modes, rows = ("none", *args.modes), list[dict[str, Any]]()
    with contextlib.ExitStack() as held:
        urls = {mode: held.enter_context(servers("heavy", SERVERS)) for mode in modes}
        pool = held.enter_context(ProcessPoolExecutor(len(modes), mp_context=multiprocessing.get_context("spawn")))
        for number, room in itertools.product(range(1, args.rounds + 1), args.room):
            for row in at_once(pool, urls, room, args.steps):
                rows.append({"round": number, "room": room, **row})
                told(rows[-1])
    for room in args.room:
        for mode in args.modes:
            costs = [row["cost"] for row in rows if (row["room"], row["mode"]) == (room, mode)]
            told(summary(mode, room, costs))
    write(args, rows)


if __name__ == "__main__":
    main()
