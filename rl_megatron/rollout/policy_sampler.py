"""The interface of a source of groups for evaluations: it samples held-out problems by a set's parameters.

Also an engine that samples in the background of training, which has priority.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, Self

from typing_extensions import override

from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.errors import EngineError
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.rollout.stream import POISON_SHARE, GroupResult, GroupSource
from rl_megatron.types import Completion, GenerationRequest, Prompt, SamplingParams

Tell = Callable[[int], None]
"""Called with the number of samples that have just been scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """A request for ``samples`` of each of a set's prompts. ``purpose`` names the set. Seeds depend on it."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    purpose: str = "evaluation"
    samples: int = 1
    on_progress: Tell | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySampler(GroupSource):
    """A GroupSource that also samples held-out problems. Seeds are functions of ``seed``."""

    engine: RolloutEngine
    rollout: RolloutSection
    stop_token_ids: tuple[int, ...]
    seed: int
    dropped_prompts: dict[str, str] = field(
        default_factory=dict
    )  # "<set>: <prompt id>" -> problem of a poison held-out prompt

    def params(
        self,
        *,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_new_tokens: int | None = None,
        router_noise: float = 0.0,
    ) -> SamplingParams:
        """Returns the parameters of a completion or a turn, with the run's stop tokens and texts. The default of
        ``max_new_tokens`` is rollout.max_new_tokens."""
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            max_new_tokens=max_new_tokens or self.rollout.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            stop=self.rollout.stop,
            seed=self.seed,
            router_noise=router_noise,
        )

    def with_engine(self, engine: RolloutEngine) -> Self:
        """Returns a copy that samples from ``engine``."""
        return replace(self, engine=engine)

    @abstractmethod
    async def sample_eval(self, request: EvalRequest) -> list[GroupResult]:
        """Samples not to train on: log-probs may be of another distribution.

        Poison prompts are not requested again. Raises the errors of `groups`, and EngineError if more than 1 % of the
        prompts, and more than one, are poison.
        """

    async def wait_closed(self) -> None:
        """Waits until resources of failed samples are released. Runs and evaluations call it at their end."""

    def healthy_prompts(self, request: EvalRequest) -> list[int]:
        """Returns the places of the prompts that are not known as poison."""
        known = self.dropped_prompts
        return [i for i, prompt in enumerate(request.prompts) if f"{request.purpose}: {prompt.id}" not in known]

    def among_poison(
        self, request: EvalRequest, places: Sequence[int], answered: Sequence[GroupResult]
    ) -> list[GroupResult]:
        """Returns the results of the prompts at ``places``, and poison for the others. Raises EngineError."""
        prompts, purpose = request.prompts, request.purpose
        found = dict(zip(places, answered, strict=True))
        for place, one in found.items():
            if one.reason == "poison":
                self.dropped_prompts[f"{purpose}: {prompts[place].id}"] = one.problem
        poison = [
            said for prompt in prompts if (said := self.dropped_prompts.get(f"{purpose}: {prompt.id}")) is not None
        ]
        if len(poison) > max(1, POISON_SHARE * len(prompts)):
            raise EngineError(
                f"{len(poison)} of {len(prompts)} held-out prompts ended servers or were refused, so an accuracy "
                f"would say nothing of the weights: read the servers' logs; the last one's error: {poison[-1]}"
            )
        return [found.get(place, GroupResult(group=None, reason="poison")) for place in range(len(prompts))]


LOWEST_PRIORITY: Final = 1 << 30
"""A ``birth`` after all versions that a run can have."""


class LowPriorityEngine(RolloutEngine):
    """Forwards requests as the youngest, which engines with priorities sample last. At most ``limit`` are in flight
    together (None: no limit). The others wait here, where they take no slot of a server."""

    def __init__(self, engine: RolloutEngine, limit: int | None) -> None:
        self._engine, self._free = engine, nullcontext() if limit is None else asyncio.Semaphore(limit)

    @override
    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Generates with the engine, once fewer requests are in flight."""
        async with self._free:
            return await self._engine.generate(replace(request, start_version=LOWEST_PRIORITY))

    @override
    def partial_completion(self, request_id: str) -> Completion | None:
        """Returns the engine's partial completion."""
        return self._engine.partial_completion(request_id)

    @override
    async def collect_partials(self) -> None:
        """Interrupts the engine."""
        await self._engine.collect_partials()
