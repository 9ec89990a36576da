"""Ends thinking that is too long by a text that the model did not sample (ScaleRL, arXiv:2510.13786).

A completion that is still thinking after this many tokens is requested again with its tokens and the text, so any
engine can do it. The place of the text follows from the tokens and the request's name; nothing is kept of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from typing_extensions import override

from rl_megatron.agents.conversation.templates import encode_text
from rl_megatron.columns import TokenIds, blank, one_after_the_other
from rl_megatron.config.run import RunConfig
from rl_megatron.engines.answers import join_continuation
from rl_megatron.errors import task_group
from rl_megatron.feature import Generate, SamplerHooks, StepHooks, declared_columns
from rl_megatron.features.interrupt.feature import InterruptSection, interrupt_section
from rl_megatron.interfaces import RunComponents
from rl_megatron.observability.recorder import Row
from rl_megatron.seeds import text_seed
from rl_megatron.types import Completion, GenerationRequest, RolloutGroup, Span, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

THINKING_ENDS = "</think>"
"""The text that ends thinking."""


def make_step_hooks(config: RunConfig, roles: RunComponents) -> Interrupted | None:
    """Returns the hooks that count interrupted completions; None without ``rollout.interrupt.earliest``."""
    return Interrupted() if interrupt_section(config.rollout).earliest else None


class Interrupted(StepHooks):
    """Counts the completions of a step that have two turns."""

    @override
    def group_row(self, groups: Sequence[RolloutGroup]) -> Row:
        turns = [len(one.turns) for group in groups for one in group.trajectories]
        return {"response/interrupted_fraction": sum(count > 1 for count in turns) / len(turns)}


def make_sampler_hooks(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ThinkingBudget | None:
    """Returns the hooks of ``rollout.interrupt``; None without ``earliest``. Warns of a text that does not fit."""
    section, most = interrupt_section(config.rollout), config.rollout.max_new_tokens
    if not section.earliest:
        return None
    text, ends = (encode_text(tokenizer, one) for one in (section.text, THINKING_ENDS))
    latest = section.between(most)[1]
    if latest + len(text) >= most:
        logger.warning(
            "rollout.interrupt.text has %d tokens, which do not fit behind token %d of rollout.max_new_tokens=%d: such "
            "completions are not interrupted",
            *(len(text), latest, most),
        )
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return ThinkingBudget(section=section, token_ids=text, ends=ends, decode=decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget(SamplerHooks):
    """The text's tokens, and the time to insert them; ``decode`` is without special tokens.

    ``_continuation``, ``_whole`` and ``_split_turns`` decode texts that may be long, in a thread.
    """

    section: InterruptSection
    token_ids: TokenIds  # tokens of the text
    ends: TokenIds  # tokens of the end of thinking
    decode: Callable[[Sequence[int]], str]

    @override
    async def generated(
        self, request: GenerationRequest, generate: Generate, keep: Callable[[Completion], None]
    ) -> tuple[Completion, ...] | None:
        if (place := self._place(request)) is None:
            return None
        before = replace(request, params=replace(request.params, max_new_tokens=place))
        is_behind = request.partial is not None and len(request.partial.token_ids) > place
        first = await generate(request if is_behind else before)

        async def continued(number: int, sampled: Completion) -> Completion:
            rest = await asyncio.to_thread(self._continuation, request, place, sampled, number)
            if rest is None:
                return sampled
            keep(sampled)  # a checkpoint holds this part of it
            (more,) = await generate(rest)
            return await asyncio.to_thread(self._whole, sampled, more)

        async with task_group() as tasks:
            running = [tasks.create_task(continued(*one)) for one in enumerate(first)]
        return tuple(task.result() for task in running)

    @override
    async def grouped(
        self, request: GenerationRequest, group: RolloutGroup, completions: Sequence[Completion]
    ) -> RolloutGroup:
        place = self._place(request)
        return group if place is None else await asyncio.to_thread(self._split_turns, group, completions, place)

    def _place(self, request: GenerationRequest) -> int | None:
        """Returns the number of sampled tokens before the text, one for a group. None if no token would follow it, or
        if the completions are not trained on."""
        most = request.params.max_new_tokens
        first, last = self.section.between(most)
        name = request.prefix_group or request.id
        at = first + text_seed(f"interruption of {name}") % (last - first + 1)
        fits = at + len(self.token_ids) < most
        return at if fits and request.exact_logprobs else None

    def _continuation(
        self, request: GenerationRequest, place: int, completion: Completion, number: int
    ) -> GenerationRequest | None:
        """Returns the request that continues the completion ``number`` of its group, at most as long in all; None if it
        has ended."""
        if completion.finish_reason != "length" or len(completion.token_ids) != place:
            return None
        tail = np.concatenate((completion.token_ids, self._given(completion.token_ids)))
        params = request.params
        return replace(
            request,
            id=f"{request.id}, behind token {place} of {number}",
            token_ids=(*request.token_ids, *tail.tolist()),
            num_completions=1,
            partial=None,
            start_version=completion.spans[0].version,
            skips_queue=True,
            params=replace(
                params,
                max_new_tokens=params.max_new_tokens - len(tail),
                seed=text_seed(f"{params.seed} {number} behind {place}"),
            ),
        )

    def _whole(self, completion: Completion, more: Completion) -> Completion:
        """Joins the completion up to its place, the text if it was inserted, and ``more``; its log-probs are 0."""
        if not len(more.token_ids):
            return replace(completion, finish_reason=more.finish_reason)
        given, columns = self._given(completion.token_ids), dict(completion.columns)
        for name, column in columns.items():  # the next request computes the text's positions; none of it was sampled
            if declared_columns()[name].of == "sampled":
                columns[name] = one_after_the_other([column, blank(column, len(given))])
        before = replace(
            completion,
            token_ids=np.concatenate((completion.token_ids, given)),
            logprobs=np.concatenate((completion.logprobs, np.zeros(len(given), np.float32))),
            columns=columns,
        )
        return replace(join_continuation(before, more), continued=False)

    def _split_turns(self, group: RolloutGroup, completions: Sequence[Completion], place: int) -> RolloutGroup:
        """Returns the group with two turns of each interrupted completion, the text between them."""
        parts = zip(group.trajectories, completions, strict=True)
        return replace(group, trajectories=tuple(self._split(one, completion, place) for one, completion in parts))

    def _split(self, trajectory: Trajectory, completion: Completion, place: int) -> Trajectory:
        behind = place + len(self.token_ids)
        text, said = completion.token_ids[place:behind], completion.logprobs[place:behind]
        if len(completion.token_ids) <= behind or not np.array_equal(text, self.token_ids) or said.any():
            return trajectory
        ((chain,), (turn,)) = trajectory.chains, trajectory.turns
        older = [span for span in turn.spans if span.start <= behind]
        first = Turn(
            start=turn.start,
            logprobs=completion.logprobs[:place],
            finish_reason="length",
            spans=tuple(span for span in turn.spans if span.start < place),
            text=self.decode(completion.token_ids[:place].tolist()),
        )
        second = Turn(
            start=turn.start + behind,
            logprobs=completion.logprobs[behind:],
            finish_reason=turn.finish_reason,
            spans=tuple(Span(max(one.start - behind, 0), one.version) for one in turn.spans[len(older) - 1 :]),
            text=self.decode(completion.token_ids[behind:].tolist()),
        )
        return replace(trajectory, chains=(replace(chain, turns=(first, second)),))

    def _given(self, sampled: TokenIds) -> TokenIds:
        return self.token_ids[: 0 if self._thought(sampled) else None]

    def _thought(self, sampled: TokenIds) -> bool:
        """True if its thinking has ended."""
        count = len(self.ends)  # one special token is not decoded
        if 0 < count <= len(sampled) and (sliding_window_view(sampled, count) == self.ends).all(1).any():
            return True
        return THINKING_ENDS in self.decode(sampled.tolist())
