"""A conversation that is sampled from an engine: messages by the model's template, or tokens as they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from rl_megatron.columns import TokenIds
from rl_megatron.interfaces import RolloutEngine
from rl_megatron.rollout.conversation.conversation import Conversation
from rl_megatron.rollout.endpoint.served import RequestRefused, Served, ServedTurn
from rl_megatron.rollout.endpoint.tokens import TokenRows
from rl_megatron.rollout.parsers.parsed import Parser
from rl_megatron.seeds import text_seed
from rl_megatron.types import Chain, Completion, GenerationRequest, SamplingParams


class EngineTurns(Served):
    """Samples turns for the endpoint and keeps them to train on."""

    def __init__(
        self,
        engine: RolloutEngine,
        conversation: Conversation,
        *,
        name: str,
        parser: Parser,
        decode: Callable[[TokenIds], str],
        params: SamplingParams,
        max_length: int,
    ) -> None:
        """``name`` begins the ids of requests; ``decode`` gives a text with its special tokens.

        Each turn has ``params`` with a seed of its own and at most its ``max_new_tokens``.
        """
        self._engine, self._conversation, self._name = engine, conversation, name
        self._parser, self._decode, self._params, self._max_length = parser, decode, params, max_length
        self._rows = TokenRows()
        self._asked = 0

    @property
    @override
    def max_length(self) -> int:
        return self._max_length

    @property
    @override
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._params.stop_token_ids

    @override
    async def answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], max_tokens: int | None
    ) -> ServedTurn:
        asked = self._conversation.prompt_for(messages, tools)
        completion = await self._sample(asked.token_ids, max_tokens)
        ids = completion.token_ids
        ended = completion.finish_reason == "stop" and len(ids) and int(ids[-1]) in self._params.stop_token_ids
        message = self._parser(self._decode(ids[:-1] if ended else ids), tools).message
        self._conversation.add(asked, completion, message)
        return ServedTurn(
            message=message,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(asked.token_ids),
            completion_tokens=len(ids),
        )

    @override
    async def complete(self, token_ids: Sequence[int], max_tokens: int | None) -> Completion:
        prompt = np.array(token_ids, np.int32)
        completion = await self._sample(prompt, max_tokens)
        self._rows.add(prompt, completion, self._decode(completion.token_ids))
        return completion

    def chains(self) -> tuple[Chain, ...]:
        """The rows to train on."""
        return (*self._conversation.chains(), *self._rows.chains())

    async def _sample(self, token_ids: TokenIds, max_tokens: int | None) -> Completion:
        room = self._max_length - len(token_ids)
        if room < 1 or not len(token_ids):
            raise RequestRefused(
                400,
                f"the prompt has {len(token_ids)} tokens; at least 1 is needed, and with its answer at most "
                f"{self._max_length}",
            )
        turn, self._asked = self._asked, self._asked + 1
        most = self._params.max_new_tokens
        request = GenerationRequest(
            id=f"{self._name}, turn {turn}",
            token_ids=tuple(token_ids.tolist()),
            num_completions=1,
            params=replace(
                self._params,
                max_new_tokens=min(room, most if max_tokens is None else min(most, max_tokens)),
                seed=text_seed(f"{self._params.seed} {turn}"),
            ),
            group=self._name,
        )
        (completion,) = await self._engine.generate(request)
        return completion
