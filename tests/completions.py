"""Completions and trajectories of several turns written as plain numbers, and prompts as a batch draws them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rl_megatron.columns import ColumnData, Ragged
from rl_megatron.data.samples import STOPS
from rl_megatron.rollout.stream import Draw
from rl_megatron.types import Completion, FinishReason, Prompt, RolloutGroup, Span, TokenSequence, Trajectory, Turn


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


def columns_of(one: Completion | TokenSequence) -> dict[str, object]:
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


def drawn(prompts: Sequence[Prompt], batch: int = 1) -> list[Draw]:
    """The prompts as the ``batch``-th batch of their number draws them."""
    ids, first = [prompt.id for prompt in prompts], (batch - 1) * len(prompts)
    return [
        Draw(ordinal=first + i, prompt=prompt, batch=batch, time=1 + ids[:i].count(prompt.id))
        for i, prompt in enumerate(prompts)
    ]


# Trajectories of several turns, as one row or as a row for each turn, whose context repeats the turns before.
def trajectory(
    turns: Sequence[int],
    *,
    rewards: Sequence[float | None] | None = None,
    total: float | None = None,
    finish: FinishReason = "stop",
    seed: int = 0,
    vocabulary: int = 12,
) -> Trajectory:
    """One row: two tokens of a prompt, then each turn behind three tokens of context, the first behind the prompt.
    ``turns`` are numbers of sampled tokens; without a ``total`` it is the sum of the ``rewards`` of turns."""
    rng = random.Random(seed)
    tokens, found = [1, 2], list[Turn]()
    given = rewards or [None] * len(turns)
    for number, (length, reward) in enumerate(zip(turns, given, strict=True)):
        tokens += [rng.randrange(vocabulary) for _ in range(3 if number else 0)]
        said = [rng.randrange(vocabulary) for _ in range(length)]
        found.append(
            Turn(
                start=len(tokens),
                logprobs=np.array([-2.5 + 0.4 * rng.random() for _ in said], np.float32),
                finish_reason=finish if number == len(turns) - 1 else "stop",
                spans=(Span(0, 2),),
                text="",
                reward=reward,
            )
        )
        tokens += said
    row = TokenSequence(token_ids=np.array(tokens, np.int32), turns=tuple(found))
    reward = sum(r or 0.0 for r in given) if total is None else total
    return Trajectory(chains=(row,), reward=reward, stop=STOPS[finish])


def branched(one: Trajectory) -> Trajectory:
    """The same turns, each the end of a row of its own."""
    (row,) = one.chains
    rows = [TokenSequence(token_ids=row.token_ids[: turn.stop].copy(), turns=(turn,)) for turn in row.turns]
    return replace(one, chains=tuple(rows))


def group(name: str, trajectories: Sequence[Trajectory]) -> RolloutGroup:
    prompt = Prompt(id=name, text=name, token_ids=(1, 2), answer="")
    return RolloutGroup(prompt=prompt, trajectories=tuple(trajectories))


def groups(seed: int, *, sizes: Sequence[int] = (3, 4, 2)) -> list[RolloutGroup]:
    """Ragged groups of trajectories of one to four turns with rewards; some are cut."""
    rng = random.Random(seed)

    def one() -> Trajectory:
        turns = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        rewards = [rng.choice([None, 0.0, 0.25, 1.0]) for _ in turns]
        total = sum(r or 0.0 for r in rewards) + rng.choice([0.0, 1.0])
        finish: FinishReason = "length" if rng.random() < 0.2 else "stop"
        return trajectory(turns, rewards=rewards, total=total, finish=finish, seed=rng.randrange(2**20))

    return [group(f"p{number}", [one() for _ in range(size)]) for number, size in enumerate(sizes)]
