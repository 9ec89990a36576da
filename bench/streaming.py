"""Measure how far sampling and training overlap: seconds of a step beside max(train, rollout), and beside k = 0.

    python -m bench.streaming [--steps 24] [--json FILE]

Two servers that sleep for each token answer over HTTP; the project's own Stream, sampler, served engine and pushes ask
them, and the learner sleeps. *heavy*: lengths 1 : 8, lognormal (sigma 1.0) and cut at eight times their mean; *equal*:
all alike. Rollout is the time of a step's tokens with every slot busy, train is as long. k is the least that the rule
wants: seconds of the longest completion over those of a step. *simulated* are the same lengths in a model of events,
which knows slots, lengths and the rule of admission, and nothing of the code.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import heapq
import math
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import httpx2
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bench.results import parse, write
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection, ServerSection
from rl_megatron.data.prompts import PromptStream
from rl_megatron.models.named import NAMED
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.rollout.servers.embedded import wire
from rl_megatron.rollout.servers.embedded.adapter import EmbeddedAdapter
from rl_megatron.rollout.servers.engine import ServedEngine
from rl_megatron.rollout.servers.engine_token import VARIABLE, EngineToken
from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.stream import Stream
from rl_megatron.types import Completion, Prompt, RolloutGroup, Scored, Span

PROMPTS, GROUP, SERVERS, SLOTS = 8, 4, 2, 8
MEAN, MOST, TOKEN_SECONDS = 50, 8, 0.005  # tokens, times the mean, of a token in a slot
TRAIN = PROMPTS * GROUP * MEAN * TOKEN_SECONDS / (SERVERS * SLOTS)
WARM = 8  # steps that no figure counts
BARS = {"over_floor": 1.10, "speed_up": 1.8, "equal": 1.0, "simulator": 0.05}
TOKEN = "of-this-bench"


def length(kind: str, seed: int, number: int) -> int:
    """Tokens of a completion: a function of its request's seed and its number."""
    if kind == "equal":
        return MEAN
    uniform = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:8], "little") / 2**64
    drawn = math.exp(NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9)) - 0.5) * MEAN * 1.02
    return round(min(max(drawn, 4), MOST * MEAN))


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
        return Starlette(routes=routes, middleware=[Middleware(EngineToken)])

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
        self._version = (await asked.json())["version"]
        return JSONResponse({"rows": [], "seconds": 0.0, "read": [], "window": 0})

    _held = _load

    async def _generate(self, asked: Request) -> Response:
        _, request = wire.request_of(await asked.json())
        made = await asyncio.gather(*(self._one(request.params.seed, n) for n in range(request.num_completions)))
        return JSONResponse(wire.answer_of(made))

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
def servers(kind: str) -> Iterator[list[str]]:
    """URLs of `SERVERS` servers that are ready."""
    os.environ[VARIABLE] = TOKEN
    spawned, ports = multiprocessing.get_context("spawn"), []
    for _ in range(SERVERS):
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
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        with contextlib.suppress(httpx2.TransportError):
            httpx2.get(f"{url}/health")
            return
    raise TimeoutError(f"{url} is not ready after 60 s")


class Counted:
    """Every reward is 0 or 1 by the place: a group's differ."""

    async def __call__(self, prompt: Prompt, completions: list[Completion], texts: list[str]) -> list[Scored]:
        """Half of the places."""
        return [Scored(total=float(place % 2), parts={}) for place in range(len(completions))]


async def measured(urls: list[str], k: int, steps: int, prompts: list[Prompt]) -> tuple[float, list[int]]:
    """Mean seconds of a step after `WARM`, and the lengths that were trained on."""
    section = RolloutSection(prompts_per_step=PROMPTS, group_size=GROUP, max_new_tokens=MOST * MEAN, engine="vllm")
    adapter = EmbeddedAdapter(NAMED["qwen3-30b-a3b"])
    clients = [Server(url, token=TOKEN, timeout_seconds=60) for url in urls]
    engine = ServedEngine(adapter, clients, ServerSection(), max_length=4096, vocab_size=100)
    sampler = RolloutSampler(
        engine=engine,
        reward_function=Counted(),
        decode=lambda _: "",
        rollout=section,
        reward=RewardSection(),
        stop_token_ids=(0,),
        seed=0,
    )

    def teaches(groups: list[RolloutGroup]) -> list[bool]:
        return [True] * len(groups)

    stream = Stream(
        prompts=PromptStream(prompts, seed=0), source=sampler, section=section, max_staleness=k, teaches=teaches
    )
    lengths, began = [], 0.0
    try:
        for version in range(WARM + steps):
            await engine.weights.load(Path("none"), version)
            await engine.weights.commit(version)
            if version:
                stream.pushed(version)
            if version == WARM:
                began = time.perf_counter()
            batch = await stream.take(version + 1)
            await asyncio.sleep(TRAIN)
            if version >= WARM:
                lengths += [one.num_sampled for group in batch.groups for one in group.trajectories]
        return (time.perf_counter() - began) / steps, lengths
    finally:
        await stream.close()
        await engine.close()


@dataclass(slots=True)
class Model:
    """The same run as events on a clock of its own. Letters as in rl_megatron/rollout/stream.py."""

    kind: str
    k: int
    seeds: list[int]  # of the request of each prompt, in the order drawn
    now: float = 0.0
    drawn: int = 0
    version: int = 0
    ahead: int = 0
    events: list[tuple[float, int, int]] = field(default_factory=list)  # when a completion ends, its group, server
    queues: list[list[tuple[float, int]]] = field(default_factory=lambda: [[] for _ in range(SERVERS)])
    busy: list[int] = field(default_factory=lambda: [0] * SERVERS)
    left: dict[int, int] = field(default_factory=dict)  # completions that groups wait for
    due: dict[int, int] = field(default_factory=dict)

    def admit(self) -> None:
        """Draw what the rule allows; each completion goes to the server with the fewest."""
        while self.drawn < (self.version + self.ahead + 1) * PROMPTS:
            group, self.drawn = self.drawn, self.drawn + 1
            self.left[group], self.due[group] = GROUP, self.version + self.k + 1
            for n in range(GROUP):
                server = min(range(SERVERS), key=lambda s: self.busy[s] + len(self.queues[s]))
                self.queues[server].append((length(self.kind, self.seeds[group], n) * TOKEN_SECONDS, group))
                self.start(server)

    def start(self, server: int) -> None:
        """Give free slots to those that wait."""
        while self.queues[server] and self.busy[server] < SLOTS:
            seconds, group = self.queues[server].pop(0)
            self.busy[server] += 1
            heapq.heappush(self.events, (self.now + seconds, group, server))

    def until(self, when: float) -> None:
        """Let everything happen that ends by ``when``."""
        while self.events and self.events[0][0] <= when:
            self.now, group, server = heapq.heappop(self.events)
            self.busy[server] -= 1
            self.left[group] -= 1
            self.start(server)
        self.now = max(self.now, when)

    def batch(self) -> list[int] | None:
        """The groups of the step after ``version``; None if it waits."""
        ready = sorted((self.due[g], g) for g, left in self.left.items() if not left)[:PROMPTS]
        rest = self.due.keys() - {group for _, group in ready}
        late = any(
            sum(self.due[g] <= step for g in rest) > (step - self.version - 1) * PROMPTS
            for step in range(self.version + 1, self.version + self.k + 2)
        )
        return None if len(ready) < PROMPTS or late else [group for _, group in ready]

    def seconds(self, steps: int) -> float:
        """Mean seconds of a step after `WARM`."""
        self.ahead, began, last, calm = min(1, self.k), 0.0, 0.0, 0
        for version in range(WARM + steps):
            self.version, asked = version, self.now
            began = self.now if version == WARM else began
            self.admit()
            while (batch := self.batch()) is None:
                self.until(self.events[0][0])
            for group in batch:
                del self.left[group], self.due[group]
            if version and self.k:
                calm = 0 if self.now - asked > 0.02 * (self.now - last) else calm + 1
                self.ahead = min(self.k, self.ahead + 1) if not calm else self.ahead
            last = self.now
            self.until(self.now + TRAIN)
        return (self.now - began) / steps


def request_seeds(prompts: list[Prompt]) -> list[int]:
    """Seeds of the requests for prompts, in the order drawn."""
    out = []
    for ordinal, prompt in enumerate(PromptStream(prompts, seed=0).take(len(prompts))):
        purpose = f"step {1 + ordinal // PROMPTS}"
        digest = hashlib.sha256(f"0\n{purpose}\n{prompt.id}".encode()).digest()
        out.append(int.from_bytes(digest[:8], "little") >> 1)
    return out


def main() -> None:
    """Print a row for each kind of lengths and k, with the bars that are missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="that figures count")
    args = parse(parser)
    rows: list[dict[str, object]] = []
    floor = TRAIN  # rollout is as long
    for kind in ("heavy", "equal"):
        least = math.ceil((MOST if kind == "heavy" else 1) * MEAN * TOKEN_SECONDS / floor)
        count = PROMPTS * (WARM + args.steps + least + 1)
        prompts = [Prompt(id=f"{n}", text="", token_ids=(1,), answer="") for n in range(count)]
        with servers(kind) as urls:
            synchronous = 0.0
            for k in (0, least):
                seconds, lengths = asyncio.run(measured(urls, k, args.steps, prompts))
                said = Model(kind, k, request_seeds(prompts)).seconds(args.steps)
                synchronous = synchronous or seconds
                rows.append(
                    {
                        "lengths": kind,
                        "k": k,
                        "seconds": round(seconds, 3),
                        "over_floor": round(seconds / floor, 3),
                        "speed_up": round(synchronous / seconds, 3),
                        "simulated": round(said, 3),
                        "simulator_error": round(said / seconds - 1, 4),
                        "mean_length": round(sum(lengths) / len(lengths), 1),
                        "bar": bars(kind, k),
                    }
                )
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    write(args, rows)


def bars(kind: str, k: int) -> str:
    """The bars of a row."""
    own = (
        f"over_floor <= {BARS['over_floor']}, speed_up >= {BARS['speed_up']}" if kind == "heavy" else "speed_up >= 1.0"
    )
    return f"{own if k else 'none but'} simulator_error within {BARS['simulator']}"


if __name__ == "__main__":
    main()
