"""A WeightSync into engine servers: no version is served before its log-probs were the learner's on a fixed probe.

A server may keep weights in a layout of its kernels' own, where no hash can follow. What it samples from is the check:
a few prompts are continued with the new weights, and the learner scores the same tokens.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from rl_megatron.data.packing import pack
from rl_megatron.data.samples import to_samples
from rl_megatron.errors import SyncError
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
    """The engine servers, as a weight sync sees them."""

    async def load(self, path: Path, version: int) -> None:
        """Every replica holds the mirror file's weights; none serves them. Raises SyncError."""
        ...

    async def sample_everywhere(self, requests: Sequence[GenerationRequest]) -> Mapping[str, list[list[Completion]]]:
        """By each replica with the weights it holds; by its name."""
        ...

    async def commit(self, version: int) -> None:
        """Serve the weights that were loaded."""
        ...

    def refuse(self) -> None:
        """Serve nothing until other weights are loaded and committed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The same prompts at every push: token ids all over the vocabulary, so that most experts see some."""

    requests: tuple[GenerationRequest, ...]
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
        return cls(requests=requests, tolerance=tolerance)


class ServedWeights:
    """See interfaces.WeightSync. ``inner`` moves the learner's weights into the mirror file ``path``."""

    def __init__(
        self, *, inner: WeightSync, path: Path, replicas: Replicas, learner: Scorer, dims: ParallelDims, probe: Probe
    ) -> None:
        self._inner, self._path, self._replicas = inner, path, replicas
        self._learner, self._dims, self._probe = learner, dims, probe

    async def push(self, version: int) -> WeightUpdate:
        """See interfaces.WeightSync. Raises SyncError where what a replica holds is not what the learner has."""
        started = time.perf_counter()
        moved = await self._inner.push(version)
        try:
            wrong, verify_seconds, replicas = await self._load(version)
            if wrong:
                raise SyncError(
                    f"version {version} arrived wrong, and is not served:\n  {wrong}\n  the engine loads this model's "
                    "weights wrongly, or it computes with another precision"
                )
            await self._replicas.commit(version)
        except BaseException:
            self._replicas.refuse()
            raise
        return replace(
            moved,
            num_bytes=moved.num_bytes + replicas * self._path.stat().st_size,
            seconds=time.perf_counter() - started,
            verify_seconds=moved.verify_seconds + verify_seconds,
        )

    async def _load(self, version: int) -> tuple[str, float, int]:
        """What the probe found wrong, a line for each replica; how long the probe took, on how many."""
        await self._replicas.load(self._path, version)
        loaded = time.perf_counter()
        sampled = await self._replicas.sample_everywhere(self._probe.requests)
        lines = [f"{name}: {found}" for name, answers in sampled.items() if (found := await self._differing(answers))]
        return "\n  ".join(lines), time.perf_counter() - loaded, len(sampled)

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
        over = [gap for gap in gaps if not gap <= self._probe.tolerance]  # NaN too
        found = (
            f"log-probs of the probe are up to {max(over, default=0.0):.3g} nats from the learner's, in {len(over)} of "
            f"{len(groups)} prompts; rollout.server.probe_tolerance is {self._probe.tolerance:g}"
        )
        if 0 < len(over) <= _TIES:
            logger.info("taken for near ties between experts: %s", found)
        return found if len(over) > _TIES else ""


def _group(request: GenerationRequest, completion: Completion) -> RolloutGroup:
    prompt = Prompt(id=request.id, text="", token_ids=request.token_ids, answer="")
    return RolloutGroup(prompt=prompt, completions=(completion,), texts=("",), rewards=(0.0,))
