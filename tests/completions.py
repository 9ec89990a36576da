"""Completions written as plain numbers, and read back as such."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_megatron.types import Completion, FinishReason, Prompt, RolloutGroup, Routes, Span


def completion(
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    finish: FinishReason = "stop",
    spans: Sequence[tuple[int, int]] = ((0, 0),),
    routes: Routes | None = None,
) -> Completion:
    """Without ``logprobs`` each is -0.5."""
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array([-0.5] * len(tokens) if logprobs is None else logprobs, np.float32),
        finish_reason=finish,
        spans=tuple(Span(*span) for span in spans),
        routes=routes,
    )


def plain(one: Completion) -> tuple[object, ...]:
    """All that it holds, to be compared."""
    return one.token_ids.tolist(), one.logprobs.tolist(), one.finish_reason, one.spans, one.routes


def group(
    prompt: Prompt,
    completions: Sequence[Completion],
    rewards: Sequence[float] | None = None,
    texts: Sequence[str] | None = None,
) -> RolloutGroup:
    """Without them, rewards are 0 and texts empty."""
    count = len(completions)
    return RolloutGroup(
        prompt=prompt,
        completions=tuple(completions),
        texts=("",) * count if texts is None else tuple(texts),
        rewards=(0.0,) * count if rewards is None else tuple(rewards),
    )
