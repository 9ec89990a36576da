"""Measure requests per second of our adapters beside each engine's own benchmark client, on the same server.

    python -m bench.engines [--engine vllm sglang] [--requests 256] [--concurrency 64] [--repeats 3] [--json FILE]

Both send prompts of 16 tokens for 32 new ones and keep the same number of requests in flight; they take turns after one
warm-up each. Ours requests log-probs and versions, which the engines' clients do not: `vllm bench serve` streams text
from /v1/completions, `sglang.bench_serving` streams from /generate with prompts as token ids. Engines are those that
`make test-engines` installs.

Then tokens per second of the embedded engine beside each server's, the model and the requests being the same: the
engine in one process with all threads, the server as a run starts it. The model is the tiny one that servers get: two
heads of 32.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

from bench.results import parse, write
from launcher.servers.engines import SERVERS
from launcher.servers.pool import ServerPool
from rl_megatron.config.io import load_config
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.http import Server
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import GenerationRequest, SamplingParams
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.routes.mirror import Mirror

REPO = Path(__file__).resolve().parents[1]
PROMPT_TOKENS, NEW_TOKENS = 16, 32
LIMIT_SECONDS = 900.0
_SIZES = ("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(NEW_TOKENS))
# What `vllm bench serve` runs; the command itself asks for the distribution's name, which is another on CPUs.
_VLLM_BENCH_SERVE = (
    "from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser as P; "
    "p = P(); serve.add_cli_args(p); serve.main(p.parse_args())"
)
CLIENTS: Mapping[str, tuple[str, ...]] = {
    "vllm": (
        *("-c", _VLLM_BENCH_SERVE, "--backend", "vllm", "--endpoint", "/v1/completions"),
        *("--model", "policy", "--dataset-name", "random", "--ignore-eos", "--temperature", "1", "--save-result"),
        *("--base-url", "{url}", "--tokenizer", "{model}", "--num-prompts", "{requests}"),
        *("--max-concurrency", "{concurrency}", "--result-filename", "{result}", "--disable-tqdm", *_SIZES),
    ),
    "sglang": (
        *("-m", "sglang.bench_serving", "--backend", "sglang", "--tokenize-prompt", "--dataset-name", "random-ids"),
        *("--base-url", "{url}", "--model", "{model}", "--num-prompts", "{requests}", "--random-range-ratio", "1"),
        *("--max-concurrency", "{concurrency}", "--output-file", "{result}", "--disable-tqdm", *_SIZES),
    ),
}
"""Arguments of each engine's own client, which writes JSON with ``request_throughput`` into a file."""


def main() -> None:
    """Measure the chosen engines and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=SERVERS, default=sorted(SERVERS))
    for name, value in (("requests", 256), ("concurrency", 64), ("repeats", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parse(parser)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(TinySizes(num_heads=2, num_kv_heads=2, head_dim=32), Path(folder), seed=0)
        rows = [asyncio.run(measure(engine, model, Path(folder), args)) for engine in args.engine]
    print(f"{args.requests} requests, {args.concurrency} in flight; medians of {args.repeats}, after a warm-up")
    print(f"{'engine':7} {'own client, requests/s':>22} {'ours':>7} {'ratio':>6}   {'tokens/s':>8} {'embedded':>9}")
    for row in rows:
        print("{engine:7} {theirs:22.1f} {ours:7.1f} {ratio:6.2f}   {tokens:8,.0f} {embedded:9,.0f}".format(**row))
    write(args, rows)


async def measure(name: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, str | float]:
    """One engine's row; the three take turns."""
    tokens = args.requests * NEW_TOKENS
    local = embedded(model, args.concurrency)
    async with serving(name, model, folder, args.concurrency) as engine:
        (server,) = engine.servers
        client = own_client(name, server, model, folder / f"{name}.json", args)
        turns = []
        for turn in range(args.repeats + 1):
            requests = prompts(args.requests, turn)
            ours = args.requests / await seconds_of(engine, requests)
            theirs = await asyncio.to_thread(client)
            started = time.perf_counter()
            local.generate(requests)
            turns.append((ours, theirs, tokens / (time.perf_counter() - started)))
    ours, theirs, there = (median(column) for column in zip(*turns[1:], strict=True))
    row = {"ours": ours, "theirs": theirs, "ratio": ours / theirs, "tokens": ours * NEW_TOKENS, "embedded": there}
    return {"engine": name, **row}


def prompts(count: int, turn: int) -> list[GenerationRequest]:
    """Random prompts, different in each turn, so that no cache has them."""
    chosen = random.Random(turn)
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=NEW_TOKENS, stop_token_ids=(), seed=turn)
    return [
        GenerationRequest(
            id=str(number),
            token_ids=tuple(chosen.randrange(256) for _ in range(PROMPT_TOKENS)),
            num_completions=1,
            params=params,
        )
        for number in range(count)
    ]


async def seconds_of(engine: ServerEngine, requests: Sequence[GenerationRequest]) -> float:
    """Time our adapter; the engine's own limit keeps as many requests in flight as the other client does."""
    started = time.perf_counter()
    await asyncio.gather(*(engine.generate(request) for request in requests))
    return time.perf_counter() - started


def own_client(name: str, server: Server, model: Path, result: Path, args: argparse.Namespace) -> Callable[[], float]:
    """Run the engine's own benchmark client; return its requests per second."""
    told = {"url": server.url, "model": model, "result": result, **vars(args)}
    command = [str(interpreter(name)), *(word.format(**told) for word in CLIENTS[name])]
    environment = {**os.environ, "OPENAI_API_KEY": server.token or "", "HF_HUB_OFFLINE": "1"}

    def run() -> float:
        result.unlink(missing_ok=True)
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_SECONDS,
            cwd=result.parent,
        )
        if done.returncode or not result.is_file():
            raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        said = json.loads(result.read_text().splitlines()[-1])
        return float(said["request_throughput"])

    return run


def interpreter(name: str) -> Path:
    """Where ``make test-engines`` installs an engine."""
    return REPO / ".engines" / name / "bin" / "python"


@contextlib.asynccontextmanager
async def serving(name: str, model: Path, folder: Path, concurrency: int) -> AsyncIterator[ServerEngine]:
    """A server as a run starts it, with the model's weights."""
    config = load_config(
        "tiny_cpu",
        [
            *(f"rollout={name}", f"rollout.python={interpreter(name)}", f"rollout.slots={concurrency}"),
            *(f"rollout.max_prompt_tokens={PROMPT_TOKENS}", f"rollout.max_new_tokens={NEW_TOKENS}"),
            *(f"rollout.server.max_concurrent_groups={concurrency}", "rollout.group_size=1"),  # each request a group
            *("algorithm.advantage_mean=batch", "algorithm.advantage_std=batch"),
        ],
    )
    path, tensors = folder / f"{name}-weights" / "model.safetensors", load_file(model / "model.safetensors")
    shape = read_shape(model)
    servers = ServerPool(config, SERVERS[name](shape), model, folder, shape)
    async with servers.running(path) as engine:
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        Mirror.make(path, shapes, torch.float32, model / "config.json")
        mirror = Mirror(path, shapes, torch.float32)
        for key, tensor in tensors.items():
            mirror.tensors[key].copy_(tensor)
        mirror.serve(1)
        await engine.weights.load(path, 1)
        await engine.weights.commit(1)
        yield engine


def embedded(model: Path, slots: int) -> LocalEngine:
    """The engine of the learner's processes with the same weights."""
    engine = LocalEngine(
        read_shape(model), slots=slots, dtype=torch.float32, device="cpu", max_length=PROMPT_TOKENS + NEW_TOKENS
    )
    for name, tensor in load_file(model / "model.safetensors").items():
        engine.tensors[name].copy_(tensor)
    return engine


if __name__ == "__main__":
    main()
