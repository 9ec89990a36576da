"""Measure what evaluating costs training with servers of its own: seconds of a step with each `eval.mode`, and without.

    python -m bench.eval_modes [--steps 40] [--json FILE]

Servers and learner of `bench.streaming`, which sleep for each token, so that no core is short; the project's own
stream, sampler, served engine, pushes, update and evaluations. Lengths are heavy (1 : 8). Each tenth version is
measured on a set whose samples are as many as those of two steps, so a fifth more is sampled. *room* is the share of
their slots' time that training leaves to servers; with none, a fifth is the least that evaluating can cost. *few* is
beside, with `FEW` requests at once; *pinned* has a third server, which samples for evaluations alone; *own* is the
share of an evaluation's tokens that are of its own version.
Modes take turns for ``--rounds``.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.results import parse, write
from bench.streaming import TOKEN, Learns, config_of, measured, servers
from bench.streaming_model import GROUP, MEAN, MOST, PROMPTS, SERVERS, TOKEN_SECONDS, TRAIN_TOKEN, WARM
from rl_megatron.config.sections.eval import EvalSection, EvalSetSection
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.evaluation.sets import ProblemSet
from rl_megatron.models.named import NAMED
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.rollout.servers.embedded.adapter import EmbeddedAdapter
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.http import Server
from rl_megatron.training.beside import EvaluationBeside
from rl_megatron.training.evaluation import Evaluation
from rl_megatron.types import Prompt

EVERY, PROBLEMS = 10, 2 * PROMPTS * GROUP
BAR = 0.05  # of a step's seconds without evaluations
MODES = ("none", "blocking", "beside", "few", "pinned")
FEW = 4  # requests at once, of 16 slots


class Pins:
    """A server of evaluations alone, which loads nothing, as those of training."""

    def __init__(self, url: str) -> None:
        client = Server(url, token=TOKEN, timeout_seconds=60)
        adapter = EmbeddedAdapter(NAMED["qwen3-30b-a3b"])
        self.engine = ServedEngine(adapter, [client], ServerSection(), max_length=4096, vocab_size=100)
        self.serving = 1

    async def pin(self, version: int, held: Callable[[], None]) -> bool:
        """Load and serve it."""
        held()
        await self.engine.weights.load(Path("none"), version)
        await self.engine.weights.commit(version)
        return True

    async def lost(self) -> None:
        """It does not die."""
        await asyncio.Event().wait()


@dataclass(slots=True)
class Evaluating:
    """Evaluates after pushes, as `training.group_job` does."""

    mode: str  # few: beside, with `FEW` requests at once
    url: str  # of the server that pinned has
    last: int  # the version of the last step
    rows: list[Any] = field(default_factory=list)
    beside: EvaluationBeside | None = None
    pins: Pins | None = None

    async def __call__(self, sampler: RolloutSampler, version: int) -> None:
        """Begin or make what is due; at the last version wait for what is under way."""
        if self.mode == "none" or not version:
            return
        if self.beside is None:
            problems = [Prompt(id=f"held {n}", text="", token_ids=(1,), answer="") for n in range(PROBLEMS)]
            one = ProblemSet(name=None, prompts=problems, section=EvalSetSection(), temperature=0.0)
            evaluation = Evaluation(sampler=sampler, sets=[one], section=EvalSection(every=EVERY), last_step=0)
            recorder: Any = SimpleNamespace(write=self.rows.append)
            few = FEW if self.mode == "few" else None
            self.pins = Pins(self.url) if self.mode == "pinned" else None
            self.beside = EvaluationBeside(evaluation=evaluation, recorder=recorder, at_once=few, pinned=self.pins)
        if version == self.last:
            await self.beside.finish(version)
            if self.pins is not None:
                await self.pins.engine.close()
        elif version % EVERY == 0 and self.mode != "blocking":
            await self.beside.begin(version)
        elif version % EVERY == 0:
            self.rows.append(await self.beside.evaluation.row(version, pushed=version))


def measure(urls: list[str], mode: str, room: float, steps: int) -> dict[str, Any]:
    """Seconds of a step."""
    step = PROMPTS * GROUP * MEAN * TRAIN_TOKEN / (1 - room)
    k = math.ceil(MOST * MEAN * TOKEN_SECONDS / step)
    prompts = [Prompt(id=f"{n}", text="", token_ids=(1,), answer="") for n in range(PROMPTS * (WARM + steps + k + 1))]
    *urls, apart = urls
    evaluating = Evaluating(mode, url=apart, last=WARM + steps - 1)
    policy = Learns(TRAIN_TOKEN / (1 - room))
    found = asyncio.run(measured(urls, config_of(k, waves=False), steps, prompts, policy=policy, pushed=evaluating))
    own = [row["eval/own_version_fraction"] for row in evaluating.rows]
    tokens = sum(found.lengths)
    return {
        "seconds": found.seconds,
        "over_floor": found.seconds * steps / (tokens * TRAIN_TOKEN / (1 - room)),
        "evaluations": len(own),
        "own": statistics.mean(own) if own else None,
    }


def main() -> None:
    """Print a row for each room and mode, with the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="that figures count")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--room", type=float, nargs="+", default=[0.5, 0.0])
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:], help="beside none")
    args = parse(parser)
    modes = ("none", *args.modes)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with servers("heavy", SERVERS + 1) as urls:
        for room in args.room:
            rounds = [[measure(urls, mode, room, args.steps) for mode in modes] for _ in range(args.rounds)]
            for place, mode in enumerate(modes):
                mine = [each[place] for each in rounds]
                costs = [each[place]["over_floor"] / each[0]["over_floor"] - 1 for each in rounds]
                row = {"room": room, "mode": mode, "seconds": statistics.mean(one["seconds"] for one in mine)}
                row |= {"evaluations": sum(one["evaluations"] for one in mine), "own": mine[-1]["own"]}
                row |= {"cost": statistics.mean(costs), "costs": costs} if place else {}
                row |= {"bar": BAR, "met": row["cost"] <= BAR} if mode != "blocking" else {}
                rows.append(row)
                told = (f"{n}={v:.3f}" if isinstance(v, float) else f"{n}={v}" for n, v in row.items())
                print(" ".join(told), flush=True)
    write(args, rows)


if __name__ == "__main__":
    main()
