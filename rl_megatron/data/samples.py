"""Turns completions into trajectories, and these or supervised targets into ragged Samples; gathers sequences of them.

A completion becomes a row of its prompt followed by one turn, or by one for each step that a reward tells apart.

Tokens are shifted here and nowhere else: a sequence of L tokens becomes L - 1 (input, target) positions.
The whole batch takes a few array operations; nothing here makes a tensor per sequence.
Letters: S sequences, N positions of all of them, L tokens of one.

Written pairs of answers become rows too: to learn from one against the other, or to score the whole of each.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cmp_to_key
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from rl_megatron.chat_templates import strip_second_bos
from rl_megatron.columns import ColumnData, LogProbs, Ragged, TokenIds, blank, one_after_the_other
from rl_megatron.data.problems.rows import beyond_embedding
from rl_megatron.errors import DataError, EngineError
from rl_megatron.feature import declared_columns
from rl_megatron.types import (
    Batch,
    Completion,
    FinishReason,
    Prompt,
    RewardResult,
    RolloutGroup,
    Samples,
    Span,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
_CONTEXT = 8  # tokens that are decoded before those that are counted: some decoders drop what a text begins with

STOPS: Mapping[FinishReason, StopReason] = {"stop": "done", "length": "length", "abort": "abandoned"}
"""How a turn ended -> why its trajectory, of one turn, did."""


def single_turns(
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str] | None = None,
    rewards: Sequence[float] | None = None,
    parts: Sequence[Mapping[str, tuple[float, float]]] | None = None,
) -> RolloutGroup:
    """Returns a group with a trajectory for each completion. Without scores texts are empty, rewards 0, of no parts."""
    before = np.array(prompt.token_ids, np.int32)  # made once: it is a Python loop
    count = len(completions)
    each = zip(completions, texts or ("",) * count, rewards or (0.0,) * count, parts or ({},) * count, strict=True)
    of = f"prompt {prompt.id!r}: "
    return RolloutGroup(prompt=prompt, trajectories=tuple(_trajectory(of, before, *one) for one in each))


def make_turn(start: int, completion: Completion, text: str) -> Turn:
    """Returns the completion as the turn with its first token at place ``start`` of its row."""
    return Turn(
        start=start,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        spans=completion.spans,
        text=text,
    )


def columns_of_request(completion: Completion, end: int, *, after: int = 0, of: str = "") -> dict[str, ColumnData]:
    """Returns the completion's columns at the positions of a row that its request computed first. ``end`` is the number
    of tokens of its prompt and completion, ``after`` that of the row before, whose last token this request computed.

    Raises EngineError with a text that begins with ``of`` for a column that does not fit.
    """
    have, found = max(after - 1, 0), dict[str, ColumnData]()
    for name, column in completion.columns.items():
        sampled = declared_columns()[name].of == "sampled"
        positions = len(completion.token_ids) if sampled else end - 1
        if len(column) != positions:
            raise EngineError(
                f"{of}a completion's {name} have {len(column)} entries, but its prompt and completion have {end} "
                f"tokens, and there must be {positions}: one of each {'sampled token' if sampled else 'but the last'}"
            )
        first = end - 1 - positions  # the position of the column's first entry
        parts = [blank(column, first - have), column] if first > have else [column[have - first :]]
        found[name] = one_after_the_other(parts) if after or len(parts) > 1 else parts[0]  # holds no other position
    return found


def columns_of_row(requests: Sequence[Mapping[str, ColumnData]], length: int) -> dict[str, ColumnData]:
    """Returns the columns of a row's first ``length`` tokens but the last, which all its requests have. Each has those
    of `columns_of_request`."""
    names = [name for name in requests[0] if all(name in one for one in requests)]
    return {name: one_after_the_other([one[name] for one in requests])[: length - 1] for name in names}


def _trajectory(
    of: str,
    prompt: TokenIds,
    completion: Completion,
    text: str,
    reward: float,
    parts: Mapping[str, tuple[float, float]],
) -> Trajectory:
    turn = make_turn(len(prompt), completion, text)
    tokens = np.concatenate((prompt, completion.token_ids))
    columns = columns_of_request(completion, len(tokens), of=of)
    chain = TokenSequence(token_ids=tokens, turns=(turn,), columns=columns)
    return Trajectory(chains=(chain,), reward=reward, stop=STOPS[completion.finish_reason], parts=parts)


def split_into_steps(group: RolloutGroup, scored: Sequence[RewardResult], decode: Decode) -> RolloutGroup:
    """Returns the group with a turn for each step of its completions, which have one turn.

    A step ends with the token that has its last character. Several that end within one token are one step, with the sum
    of their rewards. The text after the last step belongs to it.
    """
    parts = zip(group.trajectories, scored, strict=True)
    return replace(
        group,
        trajectories=tuple(_cut(one, its, decode) if its.steps and its.error is None else one for one, its in parts),
    )


def _cut(one: Trajectory, scored: RewardResult, decode: Decode) -> Trajectory:
    ((chain,), (turn,)) = one.chains, one.turns
    ends = char_ends_to_tokens(
        chain.token_ids[turn.start : turn.stop].tolist(), [end for end, _ in scored.steps], decode
    )
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
    """Returns the spans of the tokens from ``start`` to ``end``, counted from ``start``."""
    first = [span for span in spans if span.start <= start][-1]
    return (Span(0, first.version), *(Span(s.start - start, s.version) for s in spans if start < s.start < end))


def char_ends_to_tokens(token_ids: Sequence[int], ends: Sequence[int], decode: Decode) -> list[int]:
    """Returns how many tokens have at least each of the ascending ``ends`` in characters of the text; at least 1.

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


def tokens_after_prompt(one: Trajectory) -> int:
    """Returns the number of tokens after the first row's prompt, sampled and observed, which environment.max_tokens
    counts. A later row counts after its longest common beginning with one before it."""
    known = _known_beginnings(one)
    prompts = [row.turns[0].start for row in one.chains]
    before = [prompts[0], *map(min, known[1:], prompts[1:])]  # a row may sample again what one before it did
    return sum(len(row.token_ids) for row in one.chains) - sum(before)


def _known_beginnings(one: Trajectory) -> list[int]:
    """Returns how many tokens each row begins with in common with one before it. In the order of their tokens,
    neighbors have most in common. So the last row is compared with its two, and taken out, and so on."""
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
    """Returns the number of tokens that both begin with."""
    length = min(len(one), len(other))
    differ = np.append(one[:length] != other[:length], True)
    return int(differ.argmax())


def _compared(one: TokenIds, other: TokenIds) -> int:
    """Returns a number below 0 if ``one`` precedes ``other`` by tokens, above 0 if it follows; copies neither."""
    at = _common(one, other)
    return int(one[at]) - int(other[at]) if at < min(len(one), len(other)) else len(one) - len(other)


def with_demonstrations(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Returns the groups, in which demonstrations are trajectories like the sampled ones, after them: to be compared
    and trained on."""
    return [
        group
        if (shown := group.demonstration) is None
        else replace(group, trajectories=(*group.trajectories, *shown.trajectories), demonstration=None)
        for group in groups
    ]


def to_samples(
    groups: Sequence[RolloutGroup],
    *,
    columns: Collection[str] | None = None,
    groups_of: bool = False,
    turns_of: bool = False,
    demonstrated: bool = False,
) -> Samples:
    """Returns every row of every trajectory, in the order of ``groups``; only turns are masked in.

    Advantages are 0, and ``old_logprobs`` are the engine's, until the update replaces them. ``trajectory_of`` is there
    where a trajectory has several rows, ``group_of`` with ``groups_of``, and ``turn_of`` with ``turns_of``.
    ``demonstrated``, with its flag, marks rows that have turns without spans. Of the columns that engines returned for
    tokens there are only ``columns``; None: all that rows have. Raises DataError for a row without a sampled token, and
    for a column that some rows lack or that does not fit its row.
    """
    rows = [(group.prompt.id, row) for group in groups for one in group.trajectories for row in one.chains]
    ids, tokens = [prompt for prompt, _ in rows], [row.token_ids for _, row in rows]
    turns = [[(turn.start, turn.logprobs) for turn in row.turns] for _, row in rows]
    samples = join_rows(ids, tokens, turns)
    each = [len(one.chains) for group in groups for one in group.trajectories]
    in_groups = [sum(len(one.chains) for one in group.trajectories) for group in groups]
    return replace(
        samples,
        extra=_joined_columns(rows, columns),
        group_of=_numbered(in_groups) if groups_of else None,
        trajectory_of=_numbered(each) if any(count != 1 for count in each) else None,
        turn_of=_turns_of(turns, samples.cu_seqlens) if turns_of else None,
        demonstrated=_demonstrated([row for _, row in rows], samples.cu_seqlens) if demonstrated else None,
    )


def _joined_columns(
    rows: Sequence[tuple[str, TokenSequence]], wanted: Collection[str] | None
) -> dict[str, Tensor | Ragged]:
    """Returns the ``wanted`` columns that rows have, of all rows in order; the rows have their prompts' ids."""
    found = {name: None for _, row in rows for name in row.columns if wanted is None or name in wanted}
    return {name: _joined_column(name, rows) for name in found}


def _joined_column(name: str, rows: Sequence[tuple[str, TokenSequence]]) -> Tensor | Ragged:
    first = next(row.columns[name] for _, row in rows if name in row.columns)
    inner = None if isinstance(first, Ragged) else first.shape[1:]
    if inner is None and declared_columns()[name].layers is not None:
        raise DataError(f"{name} must have the decoder's layers as their second dimension; a ragged column has none")
    for prompt, row in rows:
        if (column := row.columns.get(name)) is None:
            raise DataError(f"prompt {prompt!r}: a completion has no {name}, but others of its batch have")
        length = len(row.token_ids)
        shape = (len(column),) if isinstance(column, Ragged) else column.shape
        wanted = (length - 1, *(inner or ()))
        if shape != wanted:
            raise DataError(
                f"prompt {prompt!r}: its {name} have shape {shape}; it must be {wanted}, for each of {length} tokens "
                "but the last"
            )
    whole = one_after_the_other([row.columns[name] for _, row in rows])
    if isinstance(whole, Ragged):
        return Ragged(torch.from_numpy(whole.values), torch.from_numpy(whole.counts))
    return torch.from_numpy(whole)


def _numbered(counts: Sequence[int]) -> Tensor:
    """Returns 0 ``counts[0]`` times, 1 ``counts[1]`` times, …"""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))


def _demonstrated(rows: Sequence[TokenSequence], cu_seqlens: Tensor) -> Tensor:
    """Returns the positions of rows that no version sampled, [N] bool."""
    return torch.tensor([not row.turns[0].spans for row in rows]).repeat_interleave(cu_seqlens.diff())


def _turns_of(turns: Sequence[Sequence[tuple[int, LogProbs]]], cu_seqlens: Tensor) -> Tensor:
    out = np.zeros(int(cu_seqlens[-1]), np.int32)
    for first, of_row in zip(cu_seqlens.tolist(), turns, strict=False):
        for number, (start, said) in enumerate(of_row):
            out[first + start - 1 : first + start - 1 + len(said)] = number
    return torch.from_numpy(out)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SupervisedRow:
    """Tokens [L] int32 of the prompt ``id``, and the turns in them to learn: first token, and the token after. The
    better answer of a pair has the ``margin`` that is wanted between the scores of both."""

    id: str
    token_ids: TokenIds
    turns: tuple[tuple[int, int], ...]
    margin: float = 0.0


EndTokens = Mapping[str, int | None]
"""The token after answers that are learned, by the source of their prompts; None: the tokenizer has none for it."""


def supervised_rows(
    prompts: Sequence[Prompt], targets: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerBase, ends: EndTokens
) -> list[SupervisedRow]:
    """Returns each prompt followed by its target's texts.

    The first text is the model's, the next is read, and so on in turns. The model's end with the token of the prompt's
    source, and only they are learned. Raises DataError if there is none.
    """
    texts = [text for target in targets for text in target]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    rows = []
    for prompt, target in zip(prompts, targets, strict=True):
        if (end := ends[prompt.source]) is None:
            raise DataError(
                "the tokenizer has none of the tokens that end sampling, so a model would not learn to stop; give the "
                "id of one that it has as eos_token_id in generation_config.json"
            )
        row, said = list(prompt.token_ids), list[tuple[int, int]]()
        for number in range(len(target)):
            ids = next(encoded)
            if number % 2 == 0:
                ids = [*ids, end]
                said.append((len(row), len(row) + len(ids)))
            row += ids
        rows.append(SupervisedRow(id=prompt.id, token_ids=np.array(row, np.int32), turns=tuple(said)))
    return rows


def answer_end_token(tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]) -> int | None:
    """Returns the one of ``stop_token_ids`` after an answer that is learned. It is the tokenizer's ``eos_token``, else
    the first that is a token of it; None if there is none."""
    if tokenizer.eos_token_id in stop_token_ids:
        return int(tokenizer.eos_token_id)
    known = set(tokenizer.get_vocab().values())
    return next((one for one in stop_token_ids if one in known), None)


def warn_if_end_changed(then: EndTokens, now: EndTokens) -> None:
    """Logs the sources with learned answers and turns that end with another token than before a resume. Checkpoints of
    older versions do not tell, so none is logged."""
    for source, token in now.items():
        if source in then and then[source] != token:
            logger.warning(
                "what is learned%s ends with the token %s from here on, and ended with %s before this resume, so a "
                "model learns two ends: the tokenizer, its chat template or eos_token_id of generation_config.json "
                "changed, or the version, whose choice docs/sft.md tells",
                *(f" of data.sources.{source}" if source else "", token, then[source]),
            )


def supervised_samples(rows: Sequence[SupervisedRow]) -> Samples:
    """Returns the samples of supervised rows: advantages of their turns' tokens are 1, and log-probs 0. Raises
    DataError for a row without a turn or that begins with one."""
    turns = [[(start, np.zeros(stop - start, np.float32)) for start, stop in row.turns] for row in rows]
    samples = join_rows([row.id for row in rows], [row.token_ids for row in rows], turns)
    return replace(samples, advantages=samples.mask.float())


def check_tokens(rows: Iterable[SupervisedRow], vocab_size: int) -> None:
    """Raises DataError for a row with a token that an embedding of ``vocab_size`` rows lacks. Engines refuse such a
    token; for rows that no engine reads, the learner would take zeros for it."""
    for row in rows:
        if (most := int(row.token_ids.max())) >= vocab_size:
            raise DataError(f"prompt {row.id!r} {beyond_embedding(most, vocab_size)}")


def check_ends(rows: Iterable[SupervisedRow], stop_token_ids: Sequence[int]) -> None:
    """Raises DataError for a row with a turn that continues after one of ``stop_token_ids``, where no model would."""
    for row in rows:
        for start, stop in row.turns:
            within = row.token_ids[start : stop - 1]
            found = within[np.isin(within, stop_token_ids)]
            if len(found):
                raise DataError(
                    f"prompt {row.id!r}: its answer contains the text of a token that ends sampling (id {found[0]}), "
                    "and a model would learn to continue past it; remove that text, an end is added to each answer"
                )


def gather_rows(cu_seqlens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns positions of the sequences ``indices`` [K], concatenated, and the boundaries [K + 1] between them."""
    starts, lengths = cu_seqlens[:-1][indices], cu_seqlens.diff()[indices]
    bounds = torch.zeros(len(indices) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=bounds[1:])
    total = int(bounds[-1])
    return torch.repeat_interleave(starts - bounds[:-1], lengths, output_size=total) + torch.arange(total), bounds


def tokens_per_sequence(mask: Tensor, cu_seqlens: Tensor) -> NDArray[np.int64]:
    """Returns the number of masked-in positions of each sequence, [S]."""
    bounds = cu_seqlens.numpy()
    out = np.zeros(len(bounds) - 1, np.int64)
    some = np.flatnonzero(np.diff(bounds))  # `reduceat` gives an empty segment the next one's first
    if len(some):
        out[some] = np.add.reduceat(mask.numpy().view(np.uint8), bounds[:-1][some], dtype=np.int64)
    return out


def picked(column: Tensor | Ragged, positions: Tensor) -> Tensor | Ragged:
    """Returns a copy of the ``positions`` [K] int64 of the column, in that order."""
    if not isinstance(column, Ragged):
        return column.index_select(0, positions)
    bounds = torch.zeros(len(column) + 1, dtype=torch.int64)
    torch.cumsum(column.counts, 0, out=bounds[1:])
    return Ragged(column.values[gather_rows(bounds, positions)[0]], column.counts[positions])


def concatenated(parts: Sequence[Tensor | Ragged]) -> Tensor | Ragged:
    """Returns the positions of all parts of one column."""
    if isinstance(parts[0], Ragged):
        return Ragged(*(torch.cat([getattr(one, of) for one in parts]) for of in ("values", "counts")))
    return torch.cat([one for one in parts if not isinstance(one, Ragged)])


def split(column: Tensor | Ragged, lengths: Sequence[int]) -> Sequence[Tensor | Ragged]:
    """Splits the column into parts of these ``lengths``; views."""
    if not isinstance(column, Ragged):
        return torch.split(column, list(lengths))
    counts = column.counts.split(lengths)
    values = column.values.split([int(one.sum()) for one in counts])
    return [Ragged(*one) for one in zip(values, counts, strict=True)]


def make_samples(columns: Mapping[str, Tensor | Ragged], cu_seqlens: Tensor, **of_sequences: Any) -> Samples:
    """Returns the samples of columns: the inverse of ``Samples.every_column``."""
    own: dict[str, Any] = {name: column for name, column in columns.items() if name in _FIELDS}
    extra = {name: column for name, column in columns.items() if name not in _FIELDS}
    return Samples(**own, **of_sequences, extra=extra, cu_seqlens=cu_seqlens)


_FIELDS = frozenset(Samples.__slots__)


def select(samples: Samples, indices: Tensor) -> Samples:
    """Returns a copy of the sequences ``indices`` [K] int64 of ``samples``, in that order."""
    rows, cu_seqlens = gather_rows(samples.cu_seqlens, indices)
    columns = {name: picked(column, rows) for name, column in samples.every_column.items()}
    groups, trajectories = (None if ids is None else ids[indices] for ids in (samples.group_of, samples.trajectory_of))
    return make_samples(columns, cu_seqlens, group_of=groups, trajectory_of=trajectories)


def dense_column(extra: Mapping[str, Tensor | Ragged], name: str) -> Tensor | None:
    """Returns the extra column of the name, [N, …], which is not ragged; None if there is none."""
    column = extra.get(name)
    assert not isinstance(column, Ragged)
    return column


def drop_columns(samples: Samples, names: Collection[str]) -> Samples:
    """Returns the samples without these of their extra columns; themselves where they have none of them."""
    if not any(name in samples.extra for name in names):
        return samples
    return replace(samples, extra={name: column for name, column in samples.extra.items() if name not in names})


def drop_layer_columns(samples: Samples) -> Samples:
    """Returns the samples without columns of the policy's own layers, which other models cannot read."""
    return drop_columns(samples, [name for name in samples.extra if declared_columns()[name].layers is not None])


def append_last_targets(samples: Samples) -> tuple[Samples, Tensor]:
    """Appends each sequence's last target as one more input; also returns these positions, [N + S] bool.

    A critic's value there is the value of the whole sequence. They are not masked in, and their targets are 0.
    """
    cu_seqlens = samples.cu_seqlens + torch.arange(len(samples.cu_seqlens))
    is_last = torch.zeros(int(cu_seqlens[-1]), dtype=torch.bool)
    is_last[cu_seqlens[1:] - 1] = True
    input_ids = torch.empty(len(is_last), dtype=torch.int64)
    input_ids[~is_last] = samples.input_ids
    input_ids[is_last] = samples.targets[samples.cu_seqlens[1:] - 1]
    targets, mask = torch.zeros_like(input_ids), torch.zeros_like(is_last)
    targets[~is_last], mask[~is_last] = samples.targets, samples.mask
    zeros = torch.zeros(len(is_last))
    longer = Samples(
        input_ids=input_ids,
        targets=targets,
        mask=mask,
        advantages=zeros,
        rollout_logprobs=zeros,
        old_logprobs=zeros,
        cu_seqlens=cu_seqlens,
    )
    return longer, is_last


def unit_members(units: NDArray[np.int64], unit: int) -> NDArray[np.int64]:
    """Returns the sequences [K * unit] of ``units`` [K], each of ``unit`` neighboring sequences."""
    return (units[:, None] * unit + np.arange(unit)).reshape(-1)


def split_by_id(ids: Tensor, limit: int, seed: int) -> list[NDArray[np.int64]]:
    """Splits sequences into at most ``limit`` shuffled parts: those of equal ``ids`` [S], of a trajectory or of a
    group, are neighbors in one part."""
    counts = np.unique(ids.numpy(), return_counts=True)[1]
    sequences = np.split(np.argsort(ids.numpy(), kind="stable"), np.cumsum(counts)[:-1])
    parts = split_minibatches(len(counts), min(limit, len(counts)), seed)
    return [np.concatenate([sequences[one] for one in part]) for part in parts]


def split_minibatches(count: int, num: int, seed: int, *, unit: int = 1) -> list[NDArray[np.int64]]:
    """Splits ``count`` sequences into ``num`` shuffled parts; their counts of units differ by at most one."""
    units = count // unit
    if not 1 <= num <= units:
        what = "sequences" if unit == 1 else "pairs"
        raise DataError(f"cannot split {units} {what} into {num} minibatches; set train.minibatches to at most {units}")
    order = np.random.default_rng(seed).permutation(units)
    return [unit_members(part, unit) for part in np.array_split(order, num)]


def join_rows(ids: Sequence[str], rows: Sequence[TokenIds], turns: Sequence[Sequence[tuple[int, LogProbs]]]) -> Samples:
    """Joins rows. Each row's ``turns`` are (first token, log-probs); ``ids`` are the prompts', for errors."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths - 1)))
    total = int(cu_seqlens[-1])
    mask, logprobs = np.zeros(total, np.bool_), np.zeros(total, np.float32)
    for prompt, length, first, of_row in zip(ids, lengths.tolist(), cu_seqlens.tolist(), turns, strict=False):
        if not of_row or not all(1 <= start < start + len(said) <= length for start, said in of_row):
            bounds = [(start, start + len(said)) for start, said in of_row]
            raise DataError(
                f"prompt {prompt!r}: sampled tokens are {bounds} in a row of {length}; a sequence needs at least one "
                "prompt token and one sampled token"
            )
        for start, said in of_row:
            begin = first + start - 1  # position that has the turn's first token as target
            mask[begin : begin + len(said)] = True
            logprobs[begin : begin + len(said)] = said
    return Samples(
        input_ids=torch.from_numpy(np.concatenate([row[:-1] for row in rows], dtype=np.int64)),
        targets=torch.from_numpy(np.concatenate([row[1:] for row in rows], dtype=np.int64)),
        mask=torch.from_numpy(mask),
        advantages=torch.zeros(total),
        rollout_logprobs=torch.from_numpy(logprobs),
        old_logprobs=torch.from_numpy(logprobs.copy()),
        cu_seqlens=torch.from_numpy(cu_seqlens),
    )


class MicroBatches(Sequence[Sequence[Samples]]):
    """Micro-batches [D][M], each gathered from the samples when it is read; the rest is as in `Batch`."""

    def __init__(
        self, samples: Samples, sequences: Sequence[Sequence[Tensor]], spare: int, *, last_tokens: bool = False
    ) -> None:
        self._rows = [_Row(samples, row, spare, last_tokens) for row in sequences]

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, d: Any) -> Any:
        return self._rows[d]


def for_pass(batch: Batch, *, replays: bool, last_tokens: bool) -> Batch:
    """Returns the batch as a pass takes it; the arguments are those of `interfaces.ForwardPass`."""
    samples = batch.samples if replays else drop_layer_columns(batch.samples)
    rows = MicroBatches(samples, batch.sequences, batch.spare, last_tokens=last_tokens)
    return replace(batch, samples=samples, micro_batches=rows, appends_last_targets=last_tokens)


def micro_batch_for_pass(micro_batch: Samples, *, replays: bool, last_tokens: bool) -> Samples:
    """Does `for_pass` for one micro-batch; one with positions to pad with stays as it is."""
    seen = micro_batch if replays else drop_layer_columns(micro_batch)
    padded = int(seen.cu_seqlens[-1]) < len(seen.input_ids)
    return append_last_targets(seen)[0] if last_tokens and not padded else seen


def computed_lengths(batch: Batch) -> list[list[NDArray[np.int64]]]:
    """Returns the positions of every sequence that ranks compute, by micro-batch [D][M], including empty ones."""
    lengths = batch.samples.cu_seqlens.diff().numpy() + batch.appends_last_targets
    return [[lengths[ids.numpy()] if len(ids) else np.ones(1, np.int64) for ids in row] for row in batch.sequences]


KEPT = ("input_ids", "targets")
"""Columns that positions without a sequence have of the first sequence's; so they have the extra ones."""


class _Row(Sequence[Samples]):
    """The micro-batches [M] of one data-parallel rank."""

    def __init__(self, samples: Samples, sequences: Sequence[Tensor], spare: int, last_tokens: bool) -> None:
        self._samples, self._sequences, self._spare, self._last_tokens = samples, sequences, spare, last_tokens

    @override
    def __len__(self) -> int:
        return len(self._sequences)

    @override
    def __getitem__(self, m: Any) -> Any:
        if isinstance(m, slice):
            return _Row(self._samples, self._sequences[m], self._spare, self._last_tokens)
        ids = self._sequences[m]
        found = select(self._samples, ids) if len(ids) else _placeholder(self._samples, self._spare)
        return micro_batch_for_pass(found, replays=True, last_tokens=self._last_tokens)


def _placeholder(samples: Samples, spare: int) -> Samples:
    """Returns a sequence of one position with nothing masked in, for a rank without work to join the collectives.

    After it are up to ``spare`` - 1 positions that no sequence has. Padding by one token many times would all go to the
    same experts. They have the first positions' tokens and extra columns.
    """
    first = torch.arange(len(samples.input_ids))[:spare]
    some = {name: picked(column, first) for name, column in samples.every_column.items()}
    zeros = {name: torch.zeros_like(column[:spare]) for name, column in samples.columns.items() if name not in KEPT}
    return make_samples(some | zeros, torch.tensor([0, 1]))


Pair = tuple[SupervisedRow, SupervisedRow]
"""The rows of the better and of the worse answer."""


def answer_pairs(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, ends: EndTokens) -> list[Pair]:
    """Returns each prompt with either answer. The tokens of the answer are learned, and the one of ``ends`` after them.
    Raises as `supervised_rows`."""
    better, worse = (
        supervised_rows(prompts, [(text,) for text in texts], tokenizer, ends)
        for texts in ([one.answer for one in prompts], [one.rejected[0] for one in prompts])
    )
    return list(zip(better, worse, strict=True))


def scored_pairs(
    prompts: Sequence[Prompt],
    texts: Sequence[tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool,
) -> list[Pair]:
    """Returns the whole ``texts`` of each prompt's pair, to score at their last tokens, with the prompt's margin."""
    flat = [text for pair in texts for text in pair]
    encoded = iter(tokenizer(flat, add_special_tokens=add_special_tokens)["input_ids"] if flat else [])
    made = []
    for prompt in prompts:
        better, worse = (
            scored_row(prompt.id, strip_second_bos(next(encoded), tokenizer.bos_token_id)) for _ in range(2)
        )
        made.append((replace(better, margin=prompt.margin), worse))
    return made


def scored_row(name: str, ids: Sequence[int]) -> SupervisedRow:
    """Returns the text of the tokens ``ids``, masked in at the last one.

    A position has its token as input and the next as target, so one more token puts the last among the inputs.
    """
    if not ids:
        raise DataError(f"prompt {name!r}: a text of its pair has no token to score")
    return SupervisedRow(id=name, token_ids=np.array([*ids, ids[-1]], np.int32), turns=((len(ids), len(ids) + 1),))


def set_margins(rows: Sequence[SupervisedRow]) -> Samples:
    """Returns `supervised_samples` with ``returns``: a row's margin where its first learned token is predicted, and 0
    elsewhere. That token is the only one of a row that is scored."""
    samples = supervised_samples(rows)
    returns = torch.zeros(len(samples.targets))
    returns[_first_learned(samples)] = torch.tensor([row.margin for row in rows])
    return replace(samples, returns=returns)


def mismatched(samples: Samples, limit: int) -> Samples:
    """Returns each sequence's prompt with the answer of the sequence before it, the first with the last one's, as TRL
    estimates KTO's KL. An answer begins with the first learned token. Positions from ``limit`` on are left out."""
    starts, first, stops = samples.cu_seqlens[:-1], _first_learned(samples), samples.cu_seqlens[1:]
    heads, begins = first - starts, first.roll(1)
    lengths = (heads + stops.roll(1) - begins).clamp(max=limit)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    offset = torch.arange(int(cu_seqlens[-1])) - cu_seqlens[of]
    own, other = starts[of] + offset, begins[of] + offset - heads[of]
    reads, says = torch.where(offset <= heads[of], own, other), torch.where(offset < heads[of], own, other)
    mask, zeros = samples.mask[says] & (offset >= heads[of]), torch.zeros(len(of))
    return Samples(
        input_ids=samples.input_ids[reads],
        targets=samples.targets[says],
        mask=mask,
        advantages=mask.float(),
        rollout_logprobs=zeros,
        old_logprobs=zeros,
        cu_seqlens=cu_seqlens,
    )


def _first_learned(samples: Samples) -> Tensor:
    """Returns the position [S] of each sequence where its first learned token is predicted."""
    learned = samples.mask.nonzero().flatten()
    return learned[torch.searchsorted(learned, samples.cu_seqlens[:-1])]
