"""Turns completions into trajectories: each becomes a row of its prompt followed by one turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rl_megatron.columns import TokenIds
from rl_megatron.types import Chain, Completion, FinishReason, Prompt, RolloutGroup, StopReason, Trajectory, Turn

STOPS: Mapping[FinishReason, StopReason] = {"stop": "done", "length": "length", "abort": "abandoned"}
"""Why a trajectory of one turn ended, by how the turn did."""


def single_turns(
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str] | None = None,
    rewards: Sequence[float] | None = None,
) -> RolloutGroup:
    """A group with a trajectory for each completion. Without scores texts are empty and rewards 0."""
    before = np.array(prompt.token_ids, np.int32)  # once: it is a Python loop
    count = len(completions)
    parts = zip(completions, texts or ("",) * count, rewards or (0.0,) * count, strict=True)
    return RolloutGroup(prompt=prompt, trajectories=tuple(_trajectory(before, *part) for part in parts))


def _trajectory(prompt: TokenIds, completion: Completion, text: str, reward: float) -> Trajectory:
    turn = Turn(
        start=len(prompt),
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        spans=completion.spans,
        text=text,
    )
    tokens = np.concatenate((prompt, completion.token_ids))
    chain = Chain(token_ids=tokens, turns=(turn,), routes=completion.routes)
    return Trajectory(chains=(chain,), reward=reward, stop=STOPS[completion.finish_reason])
