"""Turns completions into trajectories: each becomes a row of its prompt followed by one turn, or by one for each step
that a reward tells apart. Counts the tokens of trajectories of several rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cmp_to_key
from itertools import pairwise

import numpy as np

from rl_megatron.columns import ColumnData, TokenIds, blank, one_after_the_other
from rl_megatron.errors import DataError
from rl_megatron.feature import declared_columns
from rl_megatron.types import (
    Chain,
    Completion,
    FinishReason,
    Prompt,
    RolloutGroup,
    Scored,
    Span,
    StopReason,
    Trajectory,
    Turn,
)

Decode = Callable[[Sequence[int]], str]
_CONTEXT = 8  # tokens that are decoded before those that are counted: some decoders drop what a text begins with

STOPS: Mapping[FinishReason, StopReason] = {"stop": "done", "length": "length", "abort": "abandoned"}
"""Why a trajectory of one turn ended, by how the turn did."""


def single_turns(
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str] | None = None,
    rewards: Sequence[float] | None = None,
    parts: Sequence[Mapping[str, tuple[float, float]]] | None = None,
) -> RolloutGroup:
    """A group with a trajectory for each completion. Without scores texts are empty and rewards 0, of no parts."""
    before = np.array(prompt.token_ids, np.int32)  # once: it is a Python loop
    count = len(completions)
    each = zip(completions, texts or ("",) * count, rewards or (0.0,) * count, parts or ({},) * count, strict=True)
    of = f"prompt {prompt.id!r}: "
    return RolloutGroup(prompt=prompt, trajectories=tuple(_trajectory(of, before, *one) for one in each))


def turn_at(start: int, completion: Completion, text: str) -> Turn:
    """The completion as the turn whose first token has place ``start`` in its row."""
    return Turn(
        start=start,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        spans=completion.spans,
        text=text,
    )


def columns_of_row(requests: Sequence[tuple[int, Completion]], length: int, *, of: str = "") -> dict[str, ColumnData]:
    """The columns of a row's first ``length`` tokens but the last, those that all its ``requests`` have: the tokens
    of each one's prompt and completion, and the completion.

    A position has what the request said that computed it first: a turn's last token is an input of the next turn's.
    Raises DataError, whose text begins with ``of``, for a column that does not fit.
    """
    names = [name for name in requests[0][1].columns if all(name in one.columns for _, one in requests)]
    return {name: _column_of_row(name, requests, length, of) for name in names}


def _column_of_row(name: str, requests: Sequence[tuple[int, Completion]], length: int, of: str) -> ColumnData:
    parts, have, sampled = list[ColumnData](), 0, declared_columns()[name].of == "sampled"
    for end, completion in requests:
        column, stop = completion.columns[name], min(length, end) - 1
        positions = len(completion.token_ids) if sampled else end - 1
        if len(column) != positions:
            raise DataError(
                f"{of}a completion's {name} have {len(column)} entries, but its prompt and completion have {end} "
                f"tokens, and there must be {positions}: one of each {'sampled token' if sampled else 'but the last'}"
            )
        first = min(end - 1 - positions, stop)  # the position of the column's first entry
        if first > have:
            parts.append(blank(column, first - have))
            have = first
        parts.append(column[have - first : stop - first])
        have = stop
    return parts[0] if len(parts) == 1 else one_after_the_other(parts)


def _trajectory(
    of: str,
    prompt: TokenIds,
    completion: Completion,
    text: str,
    reward: float,
    parts: Mapping[str, tuple[float, float]],
) -> Trajectory:
    turn = turn_at(len(prompt), completion, text)
    tokens = np.concatenate((prompt, completion.token_ids))
    columns = columns_of_row([(len(tokens), completion)], len(tokens), of=of)
    chain = Chain(token_ids=tokens, turns=(turn,), columns=columns)
    return Trajectory(chains=(chain,), reward=reward, stop=STOPS[completion.finish_reason], parts=parts)


def in_steps(group: RolloutGroup, scored: Sequence[Scored], decode: Decode) -> RolloutGroup:
    """The group with a turn for each step of its completions, which have one turn.

    A step ends with the token that has its last character; several that end within one token are one step, of the sum
    of their rewards. What is after the last step belongs to it.
    """
    parts = zip(group.trajectories, scored, strict=True)
    return replace(
        group,
        trajectories=tuple(_cut(one, its, decode) if its.steps and its.error is None else one for one, its in parts),
    )


def _cut(one: Trajectory, scored: Scored, decode: Decode) -> Trajectory:
    ((chain,), (turn,)) = one.chains, one.turns
    ends = ends_in_tokens(chain.token_ids[turn.start : turn.stop].tolist(), [end for end, _ in scored.steps], decode)
    steps: list[tuple[int, int, float]] = []  # tokens, characters, reward
    for end, (chars, reward) in zip(ends, scored.steps, strict=True):
        reward += steps.pop()[2] if steps and steps[-1][0] == end else 0.0
        steps.append((end, chars, reward))
    steps[-1] = (len(turn.logprobs), len(turn.text), steps[-1][2])
    turns, start, said = [], 0, 0
    for end, chars, reward in steps:
        last = end == len(turn.logprobs)
        turns.append(
            Turn(
                start=turn.start + start,
                logprobs=turn.logprobs[start:end],
                finish_reason=turn.finish_reason if last else "stop",
                spans=_between(turn.spans, start, end),
                text=turn.text[said:chars],
                reward=reward,
            )
        )
        start, said = end, chars
    return replace(one, chains=(replace(chain, turns=tuple(turns)),))


def _between(spans: Sequence[Span], start: int, end: int) -> tuple[Span, ...]:
    """The spans of the tokens from ``start`` to ``end``, counted from ``start``."""
    first = [span for span in spans if span.start <= start][-1]
    return (Span(0, first.version), *(Span(s.start - start, s.version) for s in spans if start < s.start < end))


def ends_in_tokens(token_ids: Sequence[int], ends: Sequence[int], decode: Decode) -> list[int]:
    """How many tokens have at least so many characters of the text, for each of the ascending ``ends``; at least 1.

    Decodes pieces of about a step's length, not the text again for each.
    """
    found, at, chars = [], 0, 0  # `chars` characters in the first `at` tokens
    for end in ends:
        context = max(at - _CONTEXT, 0)
        before = chars - len(decode(token_ids[context:at]))

        def length(count: int, context: int = context, before: int = before) -> int:
            return before + len(decode(token_ids[context:count]))

        width = 1
        while at + width < len(token_ids) and length(at + width) < end:
            width *= 2
        most = min(at + width, len(token_ids))
        at += min(bisect_left(range(at, most), end, key=length), most - at)
        chars = length(at)
        found.append(at)
    return found


def tokens_behind_prompt(one: Trajectory) -> int:
    """Tokens after the first row's prompt, sampled and observed, which environment.max_tokens counts: of a later row
    those behind what it begins with in common with one before it."""
    known = _known_beginnings(one)
    prompts = [row.turns[0].start for row in one.chains]
    before = [prompts[0], *map(min, known[1:], prompts[1:])]  # a row may sample again what one before it did
    return sum(len(row.token_ids) for row in one.chains) - sum(before)


def _known_beginnings(one: Trajectory) -> list[int]:
    """How many tokens each row begins with in common with one before it. Of rows in the order of their tokens,
    neighbours have most in common: the last row is compared with its two, and taken out, and so on."""
    rows = [row.token_ids for row in one.chains]
    keys = [*map(cmp_to_key(_compared), rows)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    between = [0, *(_common(rows[a], rows[b]) for a, b in pairwise(order)), 0]  # each row and the one before it
    found = []
    for place in reversed(range(len(rows))):
        at = order.index(place)
        found.append(max(between[at : at + 2]))
        between[at : at + 2] = [min(between[at : at + 2])]
        del order[at]
    return found[::-1]


def _common(one: TokenIds, other: TokenIds) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = np.append(one[:length] != other[:length], True)
    return int(differ.argmax())


def _compared(one: TokenIds, other: TokenIds) -> int:
    """A number below 0 if ``one`` precedes ``other`` in the order of tokens, above 0 if it follows; copies neither."""
    at = _common(one, other)
    return int(one[at]) - int(other[at]) if at < min(len(one), len(other)) else len(one) - len(other)


def with_demonstrations(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """The groups, in which demonstrations are trajectories like the sampled ones, after them: what is compared and
    trained on."""
    return [
        group
        if (shown := group.demonstration) is None
        else replace(group, trajectories=(*group.trajectories, *shown.trajectories), demonstration=None)
        for group in groups
    ]
