"""Measure how far sampling and training overlap: seconds of a step beside max(train, rollout), and beside k = 0.

    python -m bench.streaming [--steps 100] [--json FILE]

Two servers that sleep for each token answer over HTTP; the project's own Stream, sampler, served engine, pushes and
update ask them, and the learner sleeps for each token of a backward pass. *heavy*: lengths 1 : 8, lognormal (sigma 1.0)
and cut at eight times their mean; *equal*: all alike. Rollout is the time of the trained tokens with every slot busy,
and train is as long: the floor. k is the least that the rule wants: seconds of the longest completion over those of a
step. *simulated* are the same lengths, and the row's own mean seconds of a push, in a model of events
(bench/streaming_model.py). Synchronous steps vary less: a third of the steps counts. Speeds are a token's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import math
import multiprocessing
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench.results import parse, write
from bench.streaming_model import (
    GROUP,
    MEAN,
    MOST,
    PROMPTS,
    SERVERS,
    SLOTS,
    TOKEN_SECONDS,
    TRAIN_TOKEN,
    WARM,
    Model,
    length,
)
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.engine_token import VARIABLE, AuthMiddleware
from rl_megatron.engines.http import Server
from rl_megatron.engines.local import adapter as wire
from rl_megatron.engines.local.adapter import EmbeddedAdapter
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.named import NAMED
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.rollout.stream import Ledger, RolloutBatch, RolloutStream
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import (
    Batch,
    Completion,
    Loss,
    Metric,
    Prompt,
    RewardResult,
    RolloutGroup,
    Scores,
    Span,
    StepResult,
    Want,
)
from rl_megatron.weights.checks.reports import ChecksumReport, packed_report

TRAIN = PROMPTS * GROUP * MEAN * TRAIN_TOKEN
BARS = {"over_floor": 1.10, "speed_up": 1.8, "equal": 1.0, "simulator": 0.05}
TOKEN = "of-this-bench"


class Sleeping:
    """A server whose tokens take `TOKEN_SECONDS` each, in `SLOTS` slots."""

    def __init__(self, kind: str) -> None:
        self._kind, self._version, self._made = kind, 0, 0
        self._slots, self._runs = asyncio.Semaphore(SLOTS), asyncio.Event()
        self._runs.set()

    def application(self) -> Starlette:
        """The paths that the adapter asks."""
        empty = ("pause", "resume", "load", "held", "abort")
        routes = [
            Route("/health", self._empty),
            Route("/tokens", self._tokens),
            Route("/generate", self._generate, methods=["POST"]),
        ]
        routes += [Route(f"/{name}", getattr(self, f"_{name}"), methods=["POST"]) for name in empty]
        return Starlette(routes=routes, middleware=[Middleware(AuthMiddleware)])

    async def _empty(self, _: Request) -> Response:
        return Response()

    _abort = _empty

    async def _tokens(self, _: Request) -> Response:
        return JSONResponse(self._made)

    async def _pause(self, _: Request) -> Response:
        self._runs.clear()
        return Response()

    async def _resume(self, _: Request) -> Response:
        self._runs.set()
        return Response()

    async def _load(self, asked: Request) -> Response:
        body = await asked.json()
        self._version = body.get("version", self._version)  # a question for what is held has none
        return JSONResponse(packed_report(ChecksumReport(rows=[], seconds=0.0), body["known"]))

    _held = _load

    async def _generate(self, asked: Request) -> Response:
        _, request = wire.decode_request(await asked.json())
        made = await asyncio.gather(*(self._one(request.params.seed, n) for n in range(request.num_completions)))
        return JSONResponse(wire.encode_completions(made))

    async def _one(self, seed: int, number: int) -> Completion:
        tokens = length(self._kind, seed, number)
        async with self._slots:
            await self._runs.wait()
            version = self._version
            await asyncio.sleep(tokens * TOKEN_SECONDS)
            await self._runs.wait()
        self._made += tokens
        return Completion(
            token_ids=np.zeros(tokens, np.int32),
            logprobs=np.full(tokens, -1.0, np.float32),
            finish_reason="stop",
            spans=(Span(0, version),),
        )


def serve(kind: str, port: int) -> None:
    """Serve in a process of its own."""

    async def run() -> None:
        config = uvicorn.Config(Sleeping(kind).application(), port=port, log_level="error", access_log=False)
        await uvicorn.Server(config).serve()

    asyncio.run(run())


@contextlib.contextmanager
def servers(kind: str, count: int = SERVERS) -> Iterator[list[str]]:
    """URLs of servers that are ready."""
    os.environ[VARIABLE] = TOKEN
    spawned, ports = multiprocessing.get_context("spawn"), []
    for _ in range(count):
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            ports.append(held.getsockname()[1])
    processes = [spawned.Process(target=serve, args=(kind, port), daemon=True) for port in ports]
    for process in processes:
        process.start()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url in urls:
            _wait_for(url)
        yield urls
    finally:
        for process in processes:
            process.terminate()
            process.join(10)


def _wait_for(url: str) -> None:
    ends = time.monotonic() + 300
    while time.monotonic() < ends:
        with contextlib.suppress(httpx2.TransportError):
            httpx2.get(f"{url}/health")
            return
    raise TimeoutError(f"{url} is not ready after 300 s")


class Counted:
    """Every reward is 0 or 1 by the place: a group's differ."""

    async def __call__(self, prompt: Prompt, completions: list[Completion], texts: list[str]) -> list[RewardResult]:
        """Half of the places."""
        return [RewardResult(total=float(place % 2), parts={}) for place in range(len(completions))]


class Learns:
    """A policy whose backward pass takes so many seconds for each token."""

    def __init__(self, token_seconds: float = TRAIN_TOKEN) -> None:
        self._token_seconds = token_seconds

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        """At once."""
        return {
            what: [[torch.full_like(m.rollout_logprobs, -1) for m in row] for row in batch.micro_batches]
            for what in want
        }

    async def backward(self, batch: Batch, loss: Loss) -> dict[str, Metric[float]]:
        """Sleep."""
        await asyncio.sleep(batch.samples.mask.sum().item() * self._token_seconds)
        return {"loss": Metric(value=0.0)}

    async def step(self, learning_rate: float) -> StepResult:
        """Nothing."""
        return StepResult(grad_norm=1.0)

    async def free_step(self) -> None:
        """Nothing."""


def config_of(k: int) -> RunConfig:
    """What the update and the stream read."""
    rollout = {
        "engine": "vllm",
        "prompts_per_step": PROMPTS,
        "group_size": GROUP,
        "max_prompt_tokens": 2,
        "max_new_tokens": MOST * MEAN,
    }
    train = {"minibatches": 1, "max_staleness": k}
    learner = {"max_tokens_per_micro_batch": 512}
    return RunConfig.model_validate({"rollout": rollout, "train": train, "learner": learner})


async def trained(stream: RolloutStream, update: PolicyUpdate, step: int) -> RolloutBatch:
    """As `training.jobs.rl` trains on a step's batch."""
    batch = await stream.take(step)
    await update(batch.groups, step, Stopwatch())
    return batch


class Found(NamedTuple):
    """Of the steps after `WARM`."""

    seconds: float  # of a step, mean
    push: float  # seconds of a push, mean
    lengths: list[int]  # that were trained on


async def measured(
    urls: list[str],
    config: RunConfig,
    steps: int,
    prompts: list[Prompt],
    *,
    policy: Any = None,
    pushed: Callable[[RolloutSampler, int], Awaitable[None]] | None = None,
) -> Found:
    """Run ``steps`` steps after `WARM` others; ``pushed`` is awaited after each push."""
    adapter, k = EmbeddedAdapter(NAMED["qwen3-30b-a3b"]), config.train.max_staleness
    clients = [Server(url, token=TOKEN, timeout_seconds=60) for url in urls]
    engine = ServerEngine(adapter, clients, ServerSection(), max_length=4096, vocab_size=100)
    sampler = RolloutSampler(
        engine=engine,
        reward_function=Counted(),
        decode=lambda _: "",
        rollout=config.rollout,
        reward=RewardSection(),
        stop_token_ids=(0,),
        seed=0,
        one_request_each=config.one_by_one,
    )
    policy = policy or Learns()
    roles: Any = RunComponents(learners={"policy": policy}, frozen_models={}, engine=engine, weight_sync=policy)
    update = PolicyUpdate(config=config, roles=roles, attention_cost=0.0)

    def teaches(groups: Sequence[RolloutGroup]) -> list[bool]:
        return [True] * len(groups)

    stream = RolloutStream(
        prompts=PromptStream(prompts, seed=0),
        source=sampler,
        section=config.rollout,
        max_staleness=k,
        last_step=WARM + steps + k,
        teaches=teaches,
        ledger=Ledger(),
    )
    lengths, pushing, began = [], 0.0, 0.0
    try:
        for version in range(WARM + steps):
            if version == WARM:
                began, pushing = time.perf_counter(), 0.0
            pushes = time.perf_counter()
            await engine.weights.load(Path("none"), version)
            await engine.weights.commit(version)
            pushing += time.perf_counter() - pushes
            if version:
                stream.on_push(version)
            if pushed is not None:
                await pushed(sampler, version)
            batch = await trained(stream, update, version + 1)
            if version >= WARM:
                lengths += [one.num_sampled for group in batch.groups for one in group.trajectories]
        return Found((time.perf_counter() - began) / steps, pushing / steps, lengths)
    finally:
        await stream.close()
        await engine.close()


def request_seeds(prompts: list[Prompt]) -> list[int]:
    """Seeds of the requests for prompts, in the order drawn."""
    out = []
    for ordinal, prompt in enumerate(PromptStream(prompts, seed=0).next_prompts(len(prompts))):
        purpose = f"step {1 + ordinal // PROMPTS}"
        digest = hashlib.sha256(f"0\n{purpose}\n{prompt.id}".encode()).digest()
        out.append(int.from_bytes(digest[:8], "little") >> 1)
    return out


def main() -> None:
    """Print a row for each kind of lengths and k, with the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="that figures count; of synchronous ones, a third")
    parser.add_argument("--lengths", nargs="+", choices=["heavy", "equal"], default=["heavy", "equal"])
    args = parse(parser)
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for kind in args.lengths:
        least = math.ceil((MOST if kind == "heavy" else 1) * MEAN * TOKEN_SECONDS / TRAIN)  # rollout is as long
        count = PROMPTS * (WARM + args.steps + least + 1)
        prompts = [Prompt(id=f"{n}", text="", token_ids=(1,), answer="") for n in range(count)]
        with servers(kind) as urls:
            rows += [measure(kind, urls, k, args.steps if k else -(-args.steps // 3), prompts) for k in (0, least)]
        told(rows)
    write(args, rows)


def measure(kind: str, urls: list[str], k: int, steps: int, prompts: list[Prompt]) -> dict[str, object]:
    """One row."""
    seconds, push, lengths = asyncio.run(measured(urls, config_of(k), steps, prompts))
    said = Model(kind, k, request_seeds(prompts), push=push).seconds(steps)
    return {
        "lengths": kind,
        "k": k,
        "seconds": seconds,
        "push": push,
        "over_floor": seconds * steps / (sum(lengths) * TRAIN_TOKEN),
        "simulated": said,
        "simulator_error": said / seconds - 1,
        "mean_length": sum(lengths) / len(lengths),
    }


def told(rows: list[dict[str, Any]]) -> None:
    """Print the rows of one kind of lengths, which get what compares them, and the bars."""
    kind = rows[-1]["lengths"]
    mine = [row for row in rows if row["lengths"] == kind]
    synchronous = mine[0]["over_floor"]
    for row in mine:
        row["speed_up"] = synchronous / row["over_floor"]
        row["bar"] = bars(kind, row["k"])
        print(" ".join(f"{n}={v:.3f}" if isinstance(v, float) else f"{n}={v}" for n, v in row.items()), flush=True)


def bars(kind: str, k: int) -> str:
    """The bars of a row."""
    own = (
        f"over_floor <= {BARS['over_floor']}, speed_up >= {BARS['speed_up']}" if kind == "heavy" else "speed_up >= 1.0"
    )
    return f"{own if k else 'none but'} simulator_error within {BARS['simulator']}"


if __name__ == "__main__":
    main()
