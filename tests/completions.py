"""Completions written as plain numbers, and read back as such; and prompts as a batch draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rl_megatron.columns import ColumnData, Ragged
from rl_megatron.data.trajectories import STOPS
from rl_megatron.rollout.batch import Drawn
from rl_megatron.types import Chain, Completion, FinishReason, Prompt, RolloutGroup, Span


def completion(
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    finish: FinishReason = "stop",
    spans: Sequence[tuple[int, int]] = ((0, 0),),
    columns: Mapping[str, ColumnData] | None = None,
) -> Completion:
    """Build a completion; without ``logprobs`` each log-prob is -0.5."""
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array([-0.5] * len(tokens) if logprobs is None else logprobs, np.float32),
        finish_reason=finish,
        spans=tuple(Span(*span) for span in spans),
        columns=columns or {},
    )


def plain(one: Completion) -> tuple[object, ...]:
    """All fields of the completion, for comparison."""
    return one.token_ids.tolist(), one.logprobs.tolist(), one.finish_reason, one.spans, columns_of(one)


def columns_of(one: Completion | Chain) -> dict[str, object]:
    """The columns of a completion or row as plain numbers with their dtypes."""
    arrays = {name: (c.values, c.counts) if isinstance(c, Ragged) else (c,) for name, c in one.columns.items()}
    return {name: [(str(array.dtype), array.tolist()) for array in its] for name, its in arrays.items()}


def finished(group: RolloutGroup, reasons: Sequence[FinishReason]) -> RolloutGroup:
    """The same single turns, ended so."""
    ended = [
        replace(one, chains=(replace(row, turns=(replace(row.turns[0], finish_reason=reason),)),), stop=STOPS[reason])
        for one, reason in zip(group.trajectories, reasons, strict=True)
        for row in one.chains
    ]
    return replace(group, trajectories=tuple(ended))


def drawn(prompts: Sequence[Prompt], batch: int = 1) -> list[Drawn]:
    """The prompts as the ``batch``-th batch of their number draws them."""
    ids, first = [prompt.id for prompt in prompts], (batch - 1) * len(prompts)
    return [
        Drawn(ordinal=first + i, prompt=prompt, batch=batch, time=1 + ids[:i].count(prompt.id))
        for i, prompt in enumerate(prompts)
    ]
