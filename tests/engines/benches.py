"""The engines under test, each behind the same few calls; transformers' forward is the oracle of every log-prob."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from launcher.processes.guards import Sites
from launcher.servers.engines import SERVERS
from launcher.servers.pool import ServerPool
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.engines.local.engine import LocalEngine
from rl_megatron.features.quantize.encoding import ENCODINGS
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import (
    Batch,
    Completion,
    GenerationRequest,
    ParallelDims,
    SamplingParams,
    Scores,
    Want,
    WeightUpdate,
)
from rl_megatron.weights.checks.reports import ChecksumReport
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.learner import job_shape
from rl_megatron.weights.push.sync import ServedWeights
from rl_megatron.weights.push.trust import Probe, Probed, PushVerifier
from rl_megatron.weights.routes.delivery import FileDelivery
from rl_megatron.weights.routes.mirror import Mirror

REPO = Path(__file__).resolve().parents[2]
MAX_LENGTH = 2048
LENGTHS = ("rollout.max_prompt_tokens=100", "rollout.max_new_tokens=1948")
NEW = (400, 400, 1900, 1900, 1900)
"""Tokens to sample, an attempt each, of a request that is to be met between its first token and its last: where the
machine is busy, a server has sampled hundreds before one is known."""
RETURN_ROUTES = ("local", "sglang")  # on CPUs
T = TypeVar("T")
Probes = Literal["auto", "always"]
LAST_WORDS = 3000  # characters of a server's log beside a failure
Change = Callable[[dict[str, Tensor]], None]


def interpreter(engine: str) -> Path:
    """Where ``make test-engines`` installs an engine, or ``python -m tests.engines.newest`` its newest release."""
    return Path(os.environ.get("RL_MEGATRON_ENGINES", REPO / ".engines")) / engine / "bin" / "python"


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a tiny model's folder."""
    return load_file(folder / "model.safetensors")


@cache
def _forward(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(folder: Path, token_ids: Sequence[int]) -> Tensor:
    """Transformers' logits [L, V] of a sequence."""
    logits: Tensor = _forward(folder)(torch.tensor([list(token_ids)])).logits[0].float()
    return logits


def logprobs_of(
    folder: Path, prompt: Sequence[int], said: Completion, temperature: float, part: slice = slice(None)
) -> Tensor:
    """Transformers' log-probs of what was sampled behind a prompt; near ties between experts fall as ``part`` says."""

    def compute() -> Tensor:
        logits = logits_of(folder, [*prompt, *said.token_ids])[len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(list(said.token_ids))[:, None])[:, 0]

    return nearest([_forward(folder)], compute, torch.tensor(said.logprobs), part)


def logprobs_over_kept(old: Path, new: Path, prompt: Sequence[int], said: Completion, cut: int) -> Tensor:
    """Transformers' log-probs of what was sampled, where from token ``cut`` on ``new`` weights went on over keys and
    values of the ``old`` ones: these had computed all tokens but the last that they sampled."""
    ids = torch.tensor([[*prompt, *said.token_ids]])
    first = len(prompt) + cut - 1

    @torch.no_grad()
    def compute() -> Tensor:
        before = _forward(old)(ids[:, :first], use_cache=True)
        after = _forward(new)(ids[:, first:], past_key_values=before.past_key_values, use_cache=True)
        logits = torch.cat((before.logits, after.logits), 1)[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]

    return nearest([_forward(old), _forward(new)], compute, torch.tensor(said.logprobs), slice(cut, None))


@torch.no_grad()
def routes_of(folder: Path, token_ids: Sequence[int]) -> Tensor:
    """The experts [L, layers, k] that transformers' routers choose for a sequence, a token's sorted."""
    model = _forward(folder)
    logits = model(torch.tensor([list(token_ids)]), output_router_logits=True).router_logits
    return torch.stack([x.topk(model.config.num_experts_per_tok).indices.sort(-1).values for x in logits], 1)


def request(
    prompt: Sequence[int] = range(30, 50), *, n: int = 1, new: int = 16, temperature: float = 1.0, **options: Any
) -> GenerationRequest:
    """A request that nothing but its length ends, unless ``options`` of SamplingParams say so."""
    params = {"top_p": 1.0, "stop_token_ids": (), "seed": 1} | options
    sampling = SamplingParams(temperature=temperature, max_new_tokens=new, **params)
    return GenerationRequest(id="test", token_ids=tuple(prompt), num_completions=n, params=sampling)


class Bench(Protocol):
    """An engine, and a way to load a folder's weights into it."""

    name: str
    renormalizes_top_p: bool

    def push(self, folder: Path, version: int) -> None:
        """Serve the folder's weights as ``version``."""
        ...

    def generate(self, *requests: GenerationRequest) -> list[Sequence[Completion]]:
        """Answers to concurrent requests."""
        ...


class LocalBench:
    """The engine inside the learner's processes."""

    name = "local"
    renormalizes_top_p = True

    def __init__(self, shape: ModelShape) -> None:
        self._engine = LocalEngine(shape, slots=64, dtype=torch.float32, device="cpu", max_length=512)

    def push(self, folder: Path, version: int) -> None:
        for name, tensor in weights_of(folder).items():
            self._engine.tensors[name].copy_(tensor)
        self._engine.serve(version)

    def generate(self, *requests: GenerationRequest) -> list[Sequence[Completion]]:
        return list(self._engine.generate(requests))


@dataclass(kw_only=True)
class FolderSync:
    """A WeightSync whose learner is a folder: writes its tensors into the mirror, ``change``d where a test says so."""

    mirror: Mirror
    folder: Path = Path()
    change: Change = field(default=lambda tensors: None)
    after: Callable[[], None] = field(default=lambda: None)
    reports: Sequence[ChecksumReport] = ()

    async def push(self, version: int) -> WeightUpdate:
        self.mirror.withdraw()
        tensors = weights_of(self.folder)
        self.change(tensors)
        for name, tensor in tensors.items():
            self.mirror.tensors[name].copy_(tensor)
        self.mirror.serve(version)
        self.reports = [self.mirror.sums()]
        self.after()
        return WeightUpdate(version=version, num_bytes=self.mirror.num_bytes, seconds=0.0)

    async def sums(self) -> Sequence[ChecksumReport]:
        return self.reports

    async def export(self, folder: Path) -> None:
        raise NotImplementedError

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        rows = batch.micro_batches
        return {"logprobs": [[self._scores(m.input_ids, m.targets, m.cu_seqlens) for m in row] for row in rows]}

    def _scores(self, inputs: Tensor, targets: Tensor, bounds: Tensor) -> Tensor:
        out = [
            logits_of(self.folder, inputs[a:b].tolist()).log_softmax(-1).gather(1, targets[a:b, None])[:, 0]
            for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        return torch.cat(out)


class ServedBench:
    """Engine servers, started as a run starts them."""

    def __init__(
        self,
        name: str,
        engine: ServerEngine,
        sync: FolderSync,
        path: Path,
        runner: asyncio.Runner,
        probes: Probes,
        tolerance: float,
    ) -> None:
        self.name, self.engine, self.sync, self.path, self._runner = name, engine, sync, path, runner
        self.vocab_size = engine._vocab_size
        self.renormalizes_top_p = engine.adapter.renormalizes_top_p
        self._probes, self._tolerance = probes, tolerance
        self.weights = self.weights_of(engine)
        self.refit = self.weights.refit

    def weights_of(self, engine: ServerEngine) -> ServedWeights:
        """A sync into ``engine``, which may be another over the same servers."""
        trust = self.trust_of(engine.weights)
        return ServedWeights(learner=self.sync, delivery=self.file(engine), trust=trust, servers=engine.weights)

    def trust_of(self, servers: Probed) -> PushVerifier:
        """Probes what ``servers`` sample or score."""
        probe = Probe.make(
            vocab_size=self.vocab_size, max_length=MAX_LENGTH, temperature=1.0, tolerance=self._tolerance
        )
        return PushVerifier(
            path=self.path, servers=servers, learner=self.sync, dims=ParallelDims(), probe=probe, probes=self._probes
        )

    def file(self, engine: ServerEngine) -> FileDelivery:
        """Through the mirror."""
        return FileDelivery(learner=self.sync, path=self.path, servers=engine.weights)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(900):
                return await work

        return self._runner.run(limited())

    async def sampling(self, *running: asyncio.Task[Any]) -> None:
        """Until every server has told thrice that it made tokens, behind prompts so, or one of the requests is over."""
        for server in self.engine.servers:
            told = {await self.engine.adapter.tokens(server)}
            while len(told) <= 3 and not any(task.done() for task in running):
                told.add(await self.engine.adapter.tokens(server))

    def push(self, folder: Path, version: int, change: Change | None = None) -> None:
        self.sync.folder, self.sync.change = folder, change or (lambda tensors: None)
        self.run(self.weights.push(version))

    def generate(self, *requests: GenerationRequest) -> list[Sequence[Completion]]:
        async def all_of() -> list[Sequence[Completion]]:
            engine: RolloutEngine = self.engine
            return list(await asyncio.gather(*(engine.generate(r) for r in requests)))

        return self.run(all_of())


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none if it has ended, as some child of a server or of a test before may have by now."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # or a zombie
        return []


def config_of(engine: str, *, routes: bool = True, more: Sequence[str] = (), **keys: object) -> RunConfig:
    """A run's configuration with servers of ``engine``; keys of ``rollout.server`` by name, and ``more``."""
    given = [*more, *(f"rollout.server.{key}={value}" for key, value in keys.items())]
    python = [] if "addresses" in keys else [f"rollout.python={interpreter(engine)}"]
    replay = ["algorithm.routing_replay=r3"] if routes and engine in RETURN_ROUTES else []
    return load_config("tiny_cpu", [f"rollout={engine}", "rollout.slots=64", *python, *LENGTHS, *given, *replay])


def spare_a_core() -> None:
    """Have all servers that run leave a core to this process.

    Linux shares cores between sessions, and lets a server's have all of them for seconds: with two other busy processes
    a test that wants to meet a request of a second heard of it when it was over, 21 times of 22; of 60 so, never.
    Not for servers of several processes, which wait for each other by spinning: one core makes them crawl.
    """
    cores = os.sched_getaffinity(0)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # some end meanwhile
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores - {min(cores)} or cores)


@contextlib.contextmanager
def served(
    engine: str,
    model: Path,
    folder: Path,
    *,
    dtype: str | None = None,
    quantization: str = "none",
    draft_tokens: int = 0,
    tolerance: float = 1e-4,
    probes: Probes = "always",
    sites: Sequence[Sites] | None = None,
    more: Sequence[str] = (),
    **keys: object,
) -> Iterator[ServedBench]:
    """Servers of ``engine`` for the length of a with block, at ``sites`` or here, for a learner of ``dtype``; ``more``
    keys are of the whole configuration.

    ``quantization`` and SGLang's ``draft_tokens`` are refused in a configuration for CPUs, whose kernels for them are
    few; ``tolerance`` is the probe's.
    """
    path = folder / "weights" / "model.safetensors"
    shapes: Mapping[str, tuple[int, ...]] = {n: tuple(t.shape) for n, t in weights_of(model).items()}
    config = config_of(engine, more=more, **keys)
    if dtype is not None:
        config = config.model_copy(update={"learner": config.learner.model_copy(update={"dtype": dtype})})
    if quantization != "none" or draft_tokens:
        keys = {"quantization": quantization, "draft_tokens": draft_tokens}
        server = config.rollout.server.model_copy(update=keys)
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": server})})
    shape = job_shape(config, read_shape(model))
    kind, held = ENCODINGS[quantization], getattr(torch, dtype or "float32")
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        servers = ServerPool(config, SERVERS[engine](shape), model, folder, shape, sites)
        try:
            running = runner.run(stack.enter_async_context(servers.running(path)))
            Mirror.make(path, shapes, held, model / "config.json", kind)
            mirror = Mirror(path, shapes, held, kind)
            bench = ServedBench(engine, running, FolderSync(mirror=mirror), path, runner, probes, tolerance)
            servers.refit = lambda url: bench.refit(url)
            yield bench
        except Exception as error:
            for log in folder.glob("*.log"):
                error.add_note(f"{log.name} ends:\n{log.read_text(errors='replace')[-LAST_WORDS:]}")
            raise
        finally:
            runner.run(stack.aclose())


# Near ties between experts: where two router logits are equal but for rounding, an engine may choose either.
NEAR = 1e-4  # of logits of some tenths; in 1,500 completions SGLang once chose the other expert, at a gap of 5e-7
CLOSE = 2e-5  # nats: where both choose the same experts, log-probs of an engine and of transformers differ by 1e-6
GAIN = 0.95  # the other side of a tie is the engine's if the sum of all distances falls below this part of itself

Tie = tuple[int, int]
"""The number of a router's call, and the row of its logits."""


def nearest(models: Sequence[Any], compute: Callable[[], Tensor], said: Tensor, part: slice = slice(None)) -> Tensor:
    """What ``compute`` gives by ``models``, with near ties broken, one after the other, so that ``part`` of it comes
    nearest to ``said``."""

    def broken(flipped: Sequence[Tie]) -> tuple[float, Tensor, list[Tie]]:
        """The sum of distances, what was computed, and the near ties that this met."""
        ties: list[Tie] = []
        with _routing(models, flipped, ties):
            found = compute()
        return float((found[part] - said[part]).abs().sum()), found, ties

    flipped: tuple[Tie, ...] = ()
    total, found, ties = broken(flipped)
    while len(found[part]) and (found[part] - said[part]).abs().max() > CLOSE:
        others = [((*flipped, tie), *broken((*flipped, tie))) for tie in ties if tie not in flipped]
        best = min(others, key=lambda other: other[1], default=None)
        if best is None or best[1] > GAIN * total:
            break
        flipped, total, found, ties = best
    return found


@contextmanager
def _routing(models: Sequence[Any], flipped: Sequence[Tie], ties: list[Tie]) -> Iterator[None]:
    """Add the near ties that routers meet to ``ties``; have those that are ``flipped`` choose the other expert."""
    calls = iter(range(10**6))

    def routed(router: Any, given: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = out
        call, k = next(calls), chosen.shape[-1]
        best = logits.topk(k + 1, -1)
        near = best.values[:, k - 1] - best.values[:, k] < NEAR
        ties.extend((call, int(row)) for row in near.nonzero())
        chosen = chosen.clone()
        for row in (row for number, row in flipped if number == call):
            chosen[row] = torch.where(chosen[row] == best.indices[row, k - 1], best.indices[row, k], chosen[row])
        return logits, weights, chosen

    with ExitStack() as stack:
        for model in dict.fromkeys(models):
            for module in model.modules():
                if type(module).__name__ == "Qwen3MoeTopKRouter":
                    stack.enter_context(module.register_forward_hook(routed))
        yield
