"""A WeightSync into engine servers: no version is served before its log-probs were the learner's on a fixed probe.

A server may keep weights in a layout of its kernels' own, where no hash can follow. What it samples from is the check:
a few prompts are continued with the new weights, and the learner scores the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from rl_megatron.data.packing import pack
from rl_megatron.data.samples import to_samples
from rl_megatron.errors import ReplicasLost, SyncError
from rl_megatron.interfaces import Scorer, WeightSync
from rl_megatron.types import (
    Completion,
    GenerationRequest,
    ParallelDims,
    Prompt,
    RolloutGroup,
    SamplingParams,
    WeightUpdate,
)

logger = logging.getLogger(__name__)

_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 16, 28, 4
_TIES = 2  # prompts in which a router may hold two experts so near that rounding chooses: seen at a gap of 6e-8
PROBE_LENGTH = _PROMPT_TOKENS + _NEW_TOKENS


class Replicas(Protocol):
    """The engine servers, as a weight sync sees them. ``only`` names one of them: what it is asked, and nobody else."""

    def stale(self, name: str) -> bool:
        """Whether it answers, but does not serve."""
        ...

    async def load(self, path: Path, version: int, *, only: str | None = None) -> None:
        """Every replica holds the mirror file's weights; none serves them. Raises SyncError."""
        ...

    async def sample_everywhere(
        self, requests: Sequence[GenerationRequest], *, only: str | None = None
    ) -> Mapping[str, list[list[Completion]]]:
        """By each replica with the weights it holds; by its name."""
        ...

    async def commit(self, version: int, *, only: str | None = None) -> None:
        """Serve the weights that were loaded."""
        ...

    def refuse(self) -> None:
        """Serve nothing until other weights are loaded and committed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The same prompts at every push: token ids all over the vocabulary, so that most experts see some."""

    requests: tuple[GenerationRequest, ...]
    greedy: tuple[GenerationRequest, ...]  # the same, with the most likely tokens: what equal weights answer alike
    tolerance: float  # nats

    @classmethod
    def make(cls, *, vocab_size: int, max_length: int, temperature: float, tolerance: float) -> Probe:
        """Prompts that fit into ``max_length`` tokens with what is sampled."""
        chosen = random.Random(0)
        length = min(_PROMPT_TOKENS, max_length - _NEW_TOKENS)
        params = SamplingParams(
            temperature=temperature, top_p=1.0, max_new_tokens=_NEW_TOKENS, stop_token_ids=(), seed=0
        )
        requests = tuple(
            GenerationRequest(
                id=f"probe {i}",
                token_ids=tuple(chosen.randrange(vocab_size) for _ in range(length)),
                num_completions=1,
                params=params,
            )
            for i in range(_PROMPTS)
        )
        likeliest = replace(params, temperature=0.0)
        greedy = tuple(replace(r, id=f"greedy {r.id}", params=likeliest) for r in requests)
        return cls(requests=requests, greedy=greedy, tolerance=tolerance)


class ServedWeights:
    """See interfaces.WeightSync. ``inner`` moves the learner's weights into the mirror file ``path``."""

    def __init__(
        self, *, inner: WeightSync, path: Path, replicas: Replicas, learner: Scorer, dims: ParallelDims, probe: Probe
    ) -> None:
        self._inner, self._path, self._replicas = inner, path, replicas
        self._learner, self._dims, self._probe = learner, dims, probe
        self._lock = asyncio.Lock()  # the mirror holds one version
        self._served: tuple[int, list[list[Completion]]] | None = None  # the version, what it answers to probe.greedy

    async def push(self, version: int) -> WeightUpdate:
        """See interfaces.WeightSync. Raises SyncError where what a replica holds is not what the learner has."""
        started = time.perf_counter()
        async with self._lock:
            self._served = None
            moved = await self._inner.push(version)
            try:
                verify_seconds, replicas = await self._serve(version)
            except BaseException:
                self._replicas.refuse()
                raise
        return replace(
            moved,
            num_bytes=moved.num_bytes + replicas * self._path.stat().st_size,
            seconds=time.perf_counter() - started,
            verify_seconds=moved.verify_seconds + verify_seconds,
        )

    async def _serve(self, version: int) -> tuple[float, int]:
        """Load, verify and commit, again where all replicas died of it; how long the probe took, on how many."""
        while True:
            try:
                wrong, verify_seconds, answers = await self._load(version)
                if wrong:
                    raise SyncError(
                        f"version {version} arrived wrong, and is not served:\n  {wrong}\n  the engine loads this "
                        "model's weights wrongly, or it computes with another precision"
                    )
                await self._replicas.commit(version)
            except ReplicasLost as error:
                logger.warning("%s\nloaded again as soon as a server is back", error)
                continue
            self._served = version, answers[0]
            return verify_seconds, len(answers)

    async def _load(self, version: int) -> tuple[str, float, list[list[list[Completion]]]]:
        """What the probe found wrong, a line for each replica; how long it took; each one's greedy answers."""
        await self._replicas.load(self._path, version)
        loaded = time.perf_counter()
        sampled = await self._replicas.sample_everywhere([*self._probe.requests, *self._probe.greedy])
        lines = [
            f"{name}: {found}"
            for name, answers in sampled.items()
            if (found := await self._differing(answers[: len(self._probe.requests)]))
        ]
        greedy = [answers[len(self._probe.requests) :] for answers in sampled.values()]
        return "\n  ".join(lines), time.perf_counter() - loaded, greedy

    async def refit(self, name: str) -> None:
        """Have a stale replica serve what the others do, or did. Raises SyncError where it does not hold it then.

        It must answer as a replica did that the learner itself compared: the learner may have moved on. Where nothing
        is served, or a push was faster, this does nothing.
        """
        async with self._lock:
            if self._served is None or not self._replicas.stale(name):
                return
            version, expected = self._served
            await self._replicas.load(self._path, version, only=name)
            answers = (await self._replicas.sample_everywhere(self._probe.greedy, only=name))[name]
            gaps = [_gap(mine, its) for (mine,), (its,) in zip(expected, answers, strict=True)]
            if found := self._excess(gaps, "those of a replica that was verified"):
                raise SyncError(f"version {version} arrived wrong at {name}, and is not served there: {found}")
            await self._replicas.commit(version, only=name)

    async def export(self, folder: Path) -> None:
        """See interfaces.WeightSync."""
        await self._inner.export(folder)

    async def _differing(self, completions: Sequence[Sequence[Completion]]) -> str:
        """How far the engine's log-probs are from the learner's, where that is more than the probe tolerates."""
        groups = [_group(r, c) for r, (c,) in zip(self._probe.requests, completions, strict=True)]
        batch = pack(to_samples(groups), dims=self._dims, max_tokens=len(groups) * PROBE_LENGTH)
        scores = await self._learner.score(batch)
        gaps = [
            float(((score - samples.rollout_logprobs).abs() * samples.mask)[start:stop].max())
            for row, row_scores in zip(batch.micro_batches, scores, strict=True)
            for samples, score in zip(row, row_scores, strict=True)
            for start, stop in pairwise(samples.cu_seqlens.tolist())
        ]
        return self._excess(gaps, "the learner's")

    def _excess(self, gaps: Sequence[float], whose: str) -> str:
        """What is to say of gaps of log-probs, one a prompt; nothing where they are tolerated."""
        over = [gap for gap in gaps if not gap <= self._probe.tolerance]  # NaN too
        found = (
            f"log-probs of the probe are up to {max(over, default=0.0):.3g} nats from {whose}, in {len(over)} of "
            f"{len(gaps)} prompts; rollout.server.probe_tolerance is {self._probe.tolerance:g}"
        )
        if 0 < len(over) <= _TIES:
            logger.info("taken for near ties between experts: %s", found)
        return found if len(over) > _TIES else ""


def _gap(one: Completion, other: Completion) -> float:
    """Greatest difference of two greedy completions' log-probs, up to where they choose otherwise, in nats."""
    gaps = []
    for mine, its, a, b in zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True):
        gaps.append(abs(a - b))
        if mine != its:
            break
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)


def _group(request: GenerationRequest, completion: Completion) -> RolloutGroup:
    prompt = Prompt(id=request.id, text="", token_ids=request.token_ids, answer="")
    return RolloutGroup(prompt=prompt, completions=(completion,), texts=("",), rewards=(0.0,))
