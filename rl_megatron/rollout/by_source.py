"""Samples the prompts of a mixture, each as its source says: in an environment of its own, or as the run does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from typing_extensions import override

from rl_megatron.interfaces import RolloutEngine
from rl_megatron.rollout.batch import Answered, Drawn
from rl_megatron.rollout.policy_sampler import HeldOut, PolicySampler
from rl_megatron.types import Completion, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerBySource(PolicySampler):
    """Has each source's own sampler, or the ``usual`` one, sample its prompts. Of several prompts at once it asks one
    source after the other, as an engine in the learner's processes samples one batch at a time; for a run with servers
    each prompt is asked by itself."""

    usual: PolicySampler
    own: Mapping[str, PolicySampler]  # by source

    @override
    def over(self, engine: RolloutEngine) -> Self:
        own = {name: sampler.over(engine) for name, sampler in self.own.items()}
        return replace(self, engine=engine, usual=self.usual.over(engine), own=own)

    @override
    async def groups(self, drawn: Sequence[Drawn]) -> list[Answered]:
        found = dict[int, Answered]()
        for sampler, places in self._parts([one.prompt for one in drawn]):
            part = await sampler.groups([drawn[place] for place in places])
            found |= dict(zip(places, part, strict=True))
        return [found[place] for place in range(len(drawn))]

    @override
    async def interrupt(self) -> None:
        for sampler in (self.usual, *self.own.values()):
            await sampler.interrupt()

    @override
    def so_far(self, drawn: Drawn) -> tuple[Completion | None, ...]:
        return self._of(drawn.prompt).so_far(drawn)

    @override
    async def held_out(self, asked: HeldOut) -> list[Answered]:
        """As `PolicySampler.held_out`; the share that may be poison is that of each source's prompts."""
        found = dict[int, Answered]()
        for sampler, places in self._parts(asked.prompts):
            part = await sampler.held_out(replace(asked, prompts=[asked.prompts[place] for place in places]))
            found |= dict(zip(places, part, strict=True))
        return [found[place] for place in range(len(asked.prompts))]

    @override
    async def closed(self) -> None:
        for sampler in (self.usual, *self.own.values()):
            await sampler.closed()

    def _of(self, prompt: Prompt) -> PolicySampler:
        return self.own.get(prompt.source, self.usual)

    def _parts(self, prompts: Sequence[Prompt]) -> list[tuple[PolicySampler, list[int]]]:
        """Each sampler with the places of its prompts, the first prompt's first."""
        places = dict[int, tuple[PolicySampler, list[int]]]()
        for place, prompt in enumerate(prompts):
            sampler = self._of(prompt)
            places.setdefault(id(sampler), (sampler, []))[1].append(place)
        return list(places.values())
