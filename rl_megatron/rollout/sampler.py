"""Turns prompts into RolloutGroups: requests completions, decodes and scores them, and handles failed rewards.

Runs in the controller process. A mixture's prompts are sampled as their source says: in the source's own environment,
or like the run's. The timeline has the time of each request.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from typing_extensions import override

from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.data.samples import single_turns, split_into_steps
from rl_megatron.errors import PoisonPrompt, RewardError, task_group
from rl_megatron.feature import SamplerHooks
from rl_megatron.interfaces import RewardFunction, RolloutEngine
from rl_megatron.observability.timeline import FreeLanes
from rl_megatron.rewards.scoring import distinct_errors, score
from rl_megatron.rollout.policy_sampler import EvalRequest, PolicySampler, Tell
from rl_megatron.rollout.stream import Draw, GroupResult, drop_reason, sampled_tokens
from rl_megatron.seeds import text_seed
from rl_megatron.types import Completion, GenerationRequest, Prompt, RolloutGroup, SamplingParams

logger = logging.getLogger(__name__)

_IN_FLIGHT = FreeLanes("sampling", "request")


async def traced_generate(
    engine: RolloutEngine, request: GenerationRequest, decode: Callable[[Sequence[int]], str]
) -> tuple[Completion, ...]:
    """Returns completions by ``engine``, each cut at its first stop text. Engines cut them too, except when they
    continue a completion. Raises the engine's errors."""
    with _IN_FLIGHT.during("generate", request=request.id) as span:
        completions = tuple(await engine.generate(request))
        span.say(**_span_details(completions))
    stop, begun = request.params.stop, request.partial is not None
    joined = [begun or one.continued or len(one.spans) > 1 for one in completions] if stop else []
    if any(joined):
        return await asyncio.to_thread(
            lambda: tuple(
                _cut(one, stop, decode) if late else one for one, late in zip(completions, joined, strict=True)
            )
        )
    return completions


def _cut(completion: Completion, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> Completion:
    """Cuts the completion at the token that completes a stop text. An engine that continues a partial completion sees
    only the part that it samples itself."""
    tokens = completion.token_ids.tolist()

    def has_text(count: int) -> bool:
        text = decode(tokens[:count])
        return any(one in text for one in stop)

    if not has_text(len(tokens)):
        return completion
    count = bisect_left(range(len(tokens)), True, key=has_text)
    cut = len(tokens) - count
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        finish_reason="stop",
        spans=tuple(span for span in completion.spans if span.start < count),
        columns={name: column[: len(column) - cut] for name, column in completion.columns.items()},
    )


def _span_details(completions: Sequence[Completion]) -> dict[str, int]:
    """Returns values for the timeline: the number of tokens, and the oldest and newest version that sampled them."""
    versions = [span.version for one in completions for span in one.spans]
    tokens = sum(len(one.token_ids) for one in completions)
    return {"tokens": tokens} | ({"oldest": min(versions), "newest": max(versions)} if versions else {})


_SCORING = FreeLanes("sampling", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSampler(PolicySampler):
    """A source of groups over an engine. Seeds are functions of the run's seed and the name of `Draw`, so that a group
    repeats exactly."""

    reward_function: RewardFunction
    decode: Callable[[Sequence[int]], str]
    reward: RewardSection
    source_rewards: Mapping[str, RewardSection] = field(
        default_factory=dict
    )  # source -> its section, if not ``reward``
    greedy_baseline: bool = False  # each group also gets a greedy completion
    columns: tuple[str, ...] = ()  # columns to request with completions that are trained on
    hooks: tuple[SamplerHooks, ...] = ()  # the hooks of features
    demonstrate: Callable[[Prompt], Completion] | None = None  # returns a group's demonstration, which is not sampled
    one_request_each: bool = False  # send every completion of a group as its own request
    sampled: dict[str, Completion] = field(default_factory=dict)  # request id -> completion of an unscored group

    @override
    async def groups(self, drawn: Sequence[Draw]) -> list[GroupResult]:
        """Samples and scores ``group_size`` completions of each prompt, then greedy ones, then demonstrations.

        Raises RewardError that names the prompt if a reward fails and ``reward.on_error`` is ``fail``.
        """
        section = self.rollout
        params = self.params(
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            router_noise=section.router_noise,
        )
        named = [(one.prompt, one.name()) for one in drawn]
        partials = {f"{name}: {one.prompt.id}": one.partials for one, (_, name) in zip(drawn, named, strict=True)}
        limit = section.completion_timeout_seconds
        answered = await self._run(named, section.group_size, params, partials, columns=self.columns, max_seconds=limit)
        if self.greedy_baseline:
            asked = [i for i, one in enumerate(answered) if one.reason != "poison"]
            named = [(drawn[i].prompt, drawn[i].name(", greedy")) for i in asked]
            params = self.params(temperature=0.0)
            for i, greedy in zip(asked, await self._run(named, 1, params, max_seconds=limit), strict=True):
                answered[i] = _attach_greedy(answered[i], greedy)
        if self.demonstrate is not None:
            async with task_group() as tasks:
                running = [tasks.create_task(self._with_demonstration(one, self.demonstrate)) for one in answered]
            answered = [task.result() for task in running]
        return [one if one.group is None else await self._split_steps(one, one.group) for one in answered]

    async def _with_demonstration(
        self, sampled: GroupResult, demonstrate: Callable[[Prompt], Completion]
    ) -> GroupResult:
        """Returns the sampled group with the scored demonstration, or without a group if the latter was dropped."""
        if sampled.group is None:
            return sampled
        prompt = sampled.group.prompt
        shown = await self._scored(prompt, (await asyncio.to_thread(demonstrate, prompt),), None)
        if shown.group is None:
            tokens = sampled_tokens(sampled.group)
            return replace(sampled, group=None, reason=shown.reason, demonstrated=shown.scored, left_out_tokens=tokens)
        return replace(sampled, group=replace(sampled.group, demonstration=shown.group), demonstrated=shown.scored)

    async def _split_steps(self, answered: GroupResult, group: RolloutGroup) -> GroupResult:
        """Returns the result with the turns that the reward distinguished."""
        if not any(one.steps for one in answered.scored):
            return answered
        return replace(answered, group=await asyncio.to_thread(split_into_steps, group, answered.scored, self.decode))

    @override
    async def collect_partials(self) -> None:
        """Makes the engine report the tokens that its running requests have sampled."""
        await self.engine.collect_partials()

    @override
    def partial_completion(self, drawn: Draw) -> tuple[Completion | None, ...]:
        """Returns the partial completions, or an empty tuple, for example if a group is one request."""
        names = [_part(f"{drawn.name()}: {drawn.prompt.id}", i) for i in range(self.rollout.group_size)]
        before = drawn.partials or (None,) * len(names)
        known = [
            self.sampled.get(name) or self.engine.partial_completion(name) or one
            for name, one in zip(names, before, strict=True)
        ]
        return tuple(known) if any(one is not None for one in known) else ()

    @override
    async def sample_eval(self, request: EvalRequest) -> list[GroupResult]:
        """Samples like `PolicySampler.held_out`, and scores the completions."""
        places, names = self.healthy_prompts(request), list(_distinct_purposes(request.purpose, request.prompts))
        named = [(request.prompts[place], names[place]) for place in places]
        answered = await self._run(
            named, request.samples, request.params, ahead=True, exact_logprobs=False, tell=request.on_progress
        )
        return self.among_poison(request, places, answered)

    async def _run(
        self,
        named: Sequence[tuple[Prompt, str]],
        count: int,
        params: SamplingParams,
        partials: Mapping[str, Sequence[Completion | None]] | None = None,
        *,
        columns: tuple[str, ...] = (),
        exact_logprobs: bool = True,
        ahead: bool = False,
        max_seconds: float | None = None,
        tell: Tell | None = None,
    ) -> list[GroupResult]:
        """Returns a group of each prompt. ``named`` has the prompt and its request's name. ``partials``: request id ->
        partial completions, if separate requests are allowed."""
        async with task_group() as tasks:
            running = []
            for prompt, name in named:
                request = replace(
                    self._request(prompt, name, count, params),
                    columns=columns,
                    exact_logprobs=exact_logprobs,
                    skips_queue=ahead,
                    max_seconds=max_seconds,
                )
                running.append(tasks.create_task(self._group(prompt, request, partials)))
                if tell is not None:
                    running[-1].add_done_callback(lambda _: tell(count))
        return [task.result() for task in running]

    def _request(self, prompt: Prompt, purpose: str, count: int, params: SamplingParams) -> GenerationRequest:
        return GenerationRequest(
            id=f"{purpose}: {prompt.id}",
            token_ids=prompt.token_ids,
            num_completions=count,
            params=replace(params, seed=text_seed(f"{self.seed}\n{purpose}\n{prompt.id}")),
        )

    def _texts(self, completions: Sequence[Completion]) -> tuple[str, ...]:
        return tuple(self.decode(completion.token_ids.tolist()) for completion in completions)

    async def _group(
        self, prompt: Prompt, request: GenerationRequest, partials: Mapping[str, Sequence[Completion | None]] | None
    ) -> GroupResult:
        try:
            return await self._sampled(prompt, request, partials)
        except PoisonPrompt as error:
            logger.error("prompt %r is dropped: %s", prompt.id, error)
            return GroupResult(group=None, reason="poison", problem=str(error))

    async def _sampled(
        self, prompt: Prompt, request: GenerationRequest, partials: Mapping[str, Sequence[Completion | None]] | None
    ) -> GroupResult:
        if partials is None or not (self.one_request_each or (self.rollout.served and partials[request.id])):
            return await self._scored(prompt, await self._generated(request), request)
        before = partials[request.id] or (None,) * request.num_completions
        parts = [_single_request(request, i, one) for i, one in enumerate(before)]
        try:
            async with task_group() as tasks:
                running = [tasks.create_task(self._completion(part)) for part in parts]
            return await self._scored(prompt, tuple(task.result() for task in running), request)
        finally:
            for part in parts:
                self.sampled.pop(part.id, None)

    async def _completion(self, request: GenerationRequest) -> Completion:
        (completion,) = await self._generated(request)
        self.sampled[request.id] = completion
        return completion

    async def _generated(self, request: GenerationRequest) -> tuple[Completion, ...]:
        def keep(completion: Completion) -> None:
            if request.prefix_group is not None:
                self.sampled[request.id] = completion

        generate = partial(traced_generate, self.engine, decode=self.decode)
        for hooks in self.hooks:
            if (found := await hooks.generated(request, generate, keep)) is not None:
                return found
        return await generate(request)

    async def _scored(
        self, prompt: Prompt, completions: tuple[Completion, ...], request: GenerationRequest | None
    ) -> GroupResult:
        """Scores completions. ``request`` is theirs, or None for a demonstration."""
        section = self.source_rewards.get(prompt.source, self.reward)
        texts = await asyncio.to_thread(self._texts, completions)  # decoding long ones would block the event loop
        with _SCORING.during("reward", prompt=prompt.id):
            scored = await score(self.reward_function, prompt, completions, texts, limit=section.timeout_seconds)
        on_error = section.on_error
        if told := distinct_errors(scored):
            function = ", ".join(section.functions.values())
            message = f"reward {function!r} of prompt {prompt.id!r}: {'; '.join(told)}"
            if on_error == "fail":
                raise RewardError(f"{message}; fix it, or set reward.on_error to drop or to a number")
            logger.warning("%s", message)
            if on_error == "drop":
                tokens = sum(len(one.logprobs) for one in completions)
                return GroupResult(group=None, reason="reward_error", scored=scored, left_out_tokens=tokens)
        rewards = tuple(one.total if one.error is None else float(on_error) for one in scored)
        parts = [
            {name: (value, section.parts[name].weight) for name, value in one.parts.items() if one.error is None}
            for one in scored
        ]
        group = single_turns(prompt, completions, texts, rewards, parts)
        if request is not None:
            for hooks in self.hooks:
                group = await hooks.grouped(request, group, completions)
        return GroupResult(group=group, rewards=rewards, scored=scored)


def _part(name: str, place: int) -> str:
    return f"{name}, completion {place}"


def _single_request(request: GenerationRequest, place: int, partial: Completion | None) -> GenerationRequest:
    """Returns the request for the completion at ``place`` in its group, with its own seed."""
    return replace(
        request,
        id=_part(request.id, place),
        num_completions=1,
        params=replace(request.params, seed=text_seed(f"{request.params.seed} {place}")),
        partial=partial,
        prefix_group=request.id,
    )


def _attach_greedy(sampled: GroupResult, greedy: GroupResult) -> GroupResult:
    """Returns the sampled group with the greedy completion, or without a group if either was dropped."""
    if sampled.group is None or greedy.group is None:
        reason, problem = drop_reason((one.reason, one.problem) for one in (sampled, greedy))
        tokens = sum(
            one.left_out_tokens if one.group is None else sampled_tokens(one.group) for one in (sampled, greedy)
        )
        return GroupResult(
            group=None,
            reason=reason,
            problem=problem,
            scored=sampled.scored,
            greedy=greedy.scored,
            left_out_tokens=tokens,
        )
    return replace(sampled, group=replace(sampled.group, greedy=greedy.group), greedy=greedy.scored)


def _distinct_purposes(purpose: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yields a purpose for each prompt, a new one for each repetition: equal seeds would give equal completions."""
    seen = Counter[str]()
    for prompt in prompts:
        seen[prompt.id] += 1
        yield purpose if seen[prompt.id] == 1 else f"{purpose}, time {seen[prompt.id]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSampler(PolicySampler):
    """Samples each source's prompts with the source's own sampler, or the ``default`` one. Several prompts in one call
    are sampled source by source, because an engine in the learner's processes samples one batch at a time. In a run
    with servers each prompt has its own call."""

    default: PolicySampler
    source_samplers: Mapping[str, PolicySampler]  # samplers of sources that have their own, by source

    @override
    def with_engine(self, engine: RolloutEngine) -> Self:
        own = {name: sampler.with_engine(engine) for name, sampler in self.source_samplers.items()}
        return replace(self, engine=engine, default=self.default.with_engine(engine), source_samplers=own)

    @override
    async def groups(self, drawn: Sequence[Draw]) -> list[GroupResult]:
        found = dict[int, GroupResult]()
        for sampler, places in self._parts([one.prompt for one in drawn]):
            part = await sampler.groups([drawn[place] for place in places])
            found |= dict(zip(places, part, strict=True))
        return [found[place] for place in range(len(drawn))]

    @override
    async def collect_partials(self) -> None:
        for sampler in (self.default, *self.source_samplers.values()):
            await sampler.collect_partials()

    @override
    def partial_completion(self, drawn: Draw) -> tuple[Completion | None, ...]:
        return self._of(drawn.prompt).partial_completion(drawn)

    @override
    async def sample_eval(self, request: EvalRequest) -> list[GroupResult]:
        """Samples like `PolicySampler.held_out`. The limit of poison applies to each source's prompts."""
        found = dict[int, GroupResult]()
        for sampler, places in self._parts(request.prompts):
            part = await sampler.sample_eval(replace(request, prompts=[request.prompts[place] for place in places]))
            found |= dict(zip(places, part, strict=True))
        return [found[place] for place in range(len(request.prompts))]

    @override
    async def wait_closed(self) -> None:
        for sampler in (self.default, *self.source_samplers.values()):
            await sampler.wait_closed()

    def _of(self, prompt: Prompt) -> PolicySampler:
        return self.source_samplers.get(prompt.source, self.default)

    def _parts(self, prompts: Sequence[Prompt]) -> list[tuple[PolicySampler, list[int]]]:
        """Returns each sampler with the places of its prompts. The first prompt's sampler is first."""
        places = dict[int, tuple[PolicySampler, list[int]]]()
        for place, prompt in enumerate(prompts):
            sampler = self._of(prompt)
            places.setdefault(id(sampler), (sampler, []))[1].append(place)
        return list(places.values())
