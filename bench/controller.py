"""Measure what a step costs the controller: CPU, the longest callback of its event loop, and bytes to the ranks.

    python -m bench.controller [--positions 4700000] [--ranks 384] [--growth]

The update is the real one (GRPO, a pass for log-probs and two minibatches), and so are the calls and streams. The ranks
are streams of one other process, which takes each message as a rank does, and answers with made-up log-probs. Today's
way beside it sends every rank its micro-batches as they are, pickled, at each pass. CPU is that of the controller's
process alone, and a callback's that of its thread: the machine may be busy with other work.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from typing_extensions import override

from bench.controller_threads import StandIn
from bench.results import parse, write
from bench.samples import rollouts
from launcher import wire
from launcher.controller.group import Failure, WorkerGroup, WorkerHandle
from launcher.controller.roles import BatchCalls, LearnerGroup
from launcher.processes import limits
from rl_megatron.config.run import RunConfig
from rl_megatron.data.rows import RankRows
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import Batch, Loss, Metric, ParallelDims, RolloutGroup, StepResult, Want

BAR_SECONDS, BAR_CALLBACK, BAR_BYTES = 1.0, 0.020, 1.05
TP, PP = 4, 4
LONGEST = 32_768
"""Positions of a micro-batch, and of the longest sequence."""


class StandIns:
    """The other process: answers for every rank. The last stage has the lengths from the rank that got the share."""

    def __init__(self) -> None:
        self._lengths: defaultdict[int, SimpleQueue[list[int]]] = defaultdict(SimpleQueue)
        self._making = threading.Lock()

    def serve(self, stream: Connection, rank: int) -> None:
        """Be one rank until the controller closes; answers ``count`` with the bytes that came since."""
        held, dims, came = RankRows(), ParallelDims(), 0
        while True:
            try:
                message = wire.receive(stream)
            except (EOFError, OSError):
                return
            pickled, buffers = message
            came += 2 * 4 + 8 * len(buffers) + len(pickled) + sum(len(b) for b in buffers)
            name, arguments = wire.unpack(message)
            answer: object = None
            if name == "layout":
                (dims,) = arguments
                held.forget()
            elif name in ("score", "backward"):
                answer = self._passed(rank, dims, name, held, arguments[1])
                if isinstance(arguments[0], tuple):  # of passes
                    answer = [(answer, 0.0) for _ in arguments[0]]
            elif name == "step":
                answer = StepResult(grad_norm=1.0)
            elif name == "free_step":
                held.forget()
            elif name == "count":
                answer, came = came, 0
            wire.send(stream, wire.pack(("ok", answer, None)))
            if name == "close":
                stream.close()
                return

    def _passed(self, rank: int, dims: ParallelDims, name: str, held: RankRows, given: Any) -> object:
        d, stage = dims.dp_rank(rank), rank // (dims.tp * dims.cp * dims.dp)
        with self._making:
            lengths = self._lengths[d]
        first = rank % dims.tp == 0
        if first and stage == 0:
            taken = held.micro_batches(given) if isinstance(given, np.ndarray) else given
            lengths.put([len(m.input_ids) for m in taken])
        if not first or stage < dims.pp - 1:
            return None
        sizes = lengths.get()
        if name == "backward":
            return {"loss": Metric(value=1.0)}
        return {"logprobs": [-torch.rand(size) for size in sizes]}


class Pickled(LearnerGroup):
    """Today's way: each rank gets its data-parallel rank's micro-batches at each pass."""

    def __init__(self, group: WorkerGroup, dims: ParallelDims, calls: BatchCalls) -> None:
        super().__init__(group, "policy", calls)
        self._dims = dims

    @override
    async def score(self, batch: Batch, want: frozenset[Want]) -> Any:
        answers = await self._all("score", batch, want)
        rows = {self._dims.dp_rank(rank): answer for rank, answer in enumerate(answers) if answer is not None}
        return {what: [rows[d][what] for d in range(self._dims.dp)] for what in want}

    @override
    async def backward(self, batch: Batch, loss: Loss) -> Any:
        answers = await self._all("backward", batch, loss, batch.num_tokens, batch.num_sequences)
        return next(answer for answer in answers if answer is not None)

    async def _all(self, name: str, batch: Batch, *rest: Any) -> list[Any]:
        rows = [tuple(row) for row in batch.micro_batches]
        shares = {w.rank: (self.role, rows[self._dims.dp_rank(w.rank)], *rest) for w in self._group.workers}
        return await self._group.call(name, shares)


@dataclass
class Longest:
    """The most CPU seconds of one callback, and which it was."""

    seconds: float = 0.0
    what: str = ""

    @contextmanager
    def watching(self) -> Any:
        """Measure every callback of the event loop."""
        run = asyncio.events.Handle._run

        def timed(handle: Any) -> None:
            began = time.thread_time()
            run(handle)
            taken = time.thread_time() - began
            if taken > self.seconds:
                self.seconds, self.what = taken, repr(handle)

        with patch.object(asyncio.events.Handle, "_run", timed):
            yield


def config_of(dims: ParallelDims) -> RunConfig:
    """GRPO with two minibatches; only what an update reads."""
    config = RunConfig.model_validate({"algorithm": {"old_logprobs": "learner"}, "train": {"minibatches": 2}})
    learner = config.learner.model_copy(
        update={
            "tp": dims.tp,
            "pp": dims.pp,
            "dp": dims.dp,
            "ep": 1,
            "etp": 1,
            "max_tokens_per_micro_batch": LONGEST + 1024,
        }
    )
    return config.model_copy(update={"learner": learner})


def columns_of(groups: Sequence[RolloutGroup]) -> int:
    """Bytes of a step's columns: tokens and the engine's log-probs, and the learner's of all positions."""
    rows = [chain for group in groups for one in group.trajectories for chain in one.chains]
    tokens = sum(len(row.token_ids) for row in rows)
    sampled = sum(len(turn.logprobs) for row in rows for turn in row.turns)
    return 4 * tokens + 4 * sampled + 4 * (tokens - len(rows))


async def step(streams: Sequence[Connection], groups: Sequence[RolloutGroup], *, pickled: bool) -> dict[str, Any]:
    """One row: the second of two equal steps."""
    dims = ParallelDims(tp=TP, pp=PP, dp=len(streams) // (TP * PP))
    failure = Failure()
    group = WorkerGroup([WorkerHandle(StandIn(r, one), failure, None) for r, one in enumerate(streams)], failure)
    await group.call_all("layout", dims)
    calls = BatchCalls(group, dims)
    policy = Pickled(group, dims, calls) if pickled else LearnerGroup(group, "policy", calls)
    unused: Any = None
    roles = RunComponents(learners={"policy": policy}, frozen_models={}, engine=unused, weight_sync=unused)
    update = PolicyUpdate(config=config_of(dims), roles=roles, attention_cost=1e-5)
    assert update.config.learner.dims == dims
    longest = Longest()
    for number in (1, 2):
        await group.call_all("count")
        longest.seconds = 0.0
        cpu, wall = time.process_time(), time.perf_counter()
        with longest.watching():
            row = await update(groups, number, Stopwatch())
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        came = sum(await group.call_all("count"))
    assert row["grad_norm"] == 1.0
    await group.close()
    await asyncio.gather(*(worker.stop() for worker in group.workers))
    return {
        "way": "pickled" if pickled else "columns",
        "ranks": len(streams),
        "positions": row["tokens/train"],
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "callback_seconds": longest.seconds,
        "callback": longest.what[:150],
        "bytes": came,
        "columns": columns_of(groups),
    }


def answer(streams: Sequence[Connection], others: Sequence[Connection]) -> None:
    """Be the ranks, each by a thread, until the controller closes."""
    for stream in others:
        stream.close()
    torch.set_num_threads(1)
    ranks = StandIns()
    threads = [threading.Thread(target=ranks.serve, args=(stream, rank)) for rank, stream in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(ranks: int, groups: Sequence[RolloutGroup], *, pickled: bool = False) -> dict[str, Any]:
    """Start ranks, make two steps, and print the second's row."""
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(ranks)), strict=True)
    child = multiprocessing.get_context("fork").Process(target=answer, args=(theirs, ours), daemon=True)
    child.start()
    for stream in theirs:
        stream.close()
    row = asyncio.run(step(ours, groups, pickled=pickled))
    for stream in ours:
        stream.close()
    child.kill()
    child.join()
    row["x"] = row["bytes"] / row["columns"]
    bars = {"cpu_seconds": BAR_SECONDS, "callback_seconds": BAR_CALLBACK, "x": BAR_BYTES}
    row["missed"] = " ".join(name for name, bar in bars.items() if row[name] > bar)
    told = f"missed: {row['missed']}  " if row["missed"] else ""
    print(
        f"{row['way']:8} {ranks:6} {row['positions']:>10,} {row['cpu_seconds']:8.3f} {row['wall_seconds']:8.2f} "
        f"{1e3 * row['callback_seconds']:9.1f} {row['bytes'] / 1e6:10.2f} {row['x']:8.3f}  "
        f"{told}{row['callback']}",
        flush=True,
    )
    return row


def scored(sequences: int, positions: int) -> list[RolloutGroup]:
    """Rollouts with rewards of 0 and 1."""
    chance = np.random.default_rng(1)
    return [
        replace(group, trajectories=tuple(replace(one, reward=float(chance.integers(2))) for one in group.trajectories))
        for group in rollouts(sequences, positions)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4_700_000)
    parser.add_argument("--ranks", type=int, default=384)
    parser.add_argument("--growth", action="store_true", help="also other numbers of ranks and of positions")
    args = parse(parser)
    limits.raise_open_files()
    torch.set_num_threads(1)
    mean = 1147  # positions of a sequence
    print(f"bars: {BAR_SECONDS} s of CPU, {1e3 * BAR_CALLBACK:g} ms a callback, bytes {BAR_BYTES} x the columns")
    print(f"{'way':8} {'ranks':>6} {'positions':>10} {'CPU s':>8} {'wall s':>8} {'call. ms':>9} {'MB':>10} {'x':>8}")
    groups = scored(args.positions // mean // 16 * 16, args.positions)
    gc.freeze()  # as `LoopWatch.begin`
    rows = [measure(args.ranks, groups), measure(args.ranks, groups, pickled=True)]
    if args.growth:
        rows += [measure(ranks, groups) for ranks in (16, 64, 256, 1024)]
        for positions in (50_000, 500_000, 5_000_000):
            rows.append(measure(args.ranks, scored(max(positions // mean // 16, 1) * 16, positions)))
    bars = {"bar_seconds": BAR_SECONDS, "bar_callback_seconds": BAR_CALLBACK, "bar_bytes": BAR_BYTES}
    write(args, [{**row, **bars} for row in rows])


if __name__ == "__main__":
    main()
