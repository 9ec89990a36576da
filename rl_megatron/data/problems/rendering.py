"""Renders problems by their templates and tokenizes them, with a bound on their length."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from rl_megatron.chat_templates import bounded_rendering, prompt_tokens
from rl_megatron.config.sections.data import FileKeys
from rl_megatron.data.problems.records import Record, missing_field
from rl_megatron.errors import DataError
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_AT_ONCE = 1000  # prompts that a tokenizer gets in one call
_MOST_CHARACTERS = 100  # per token, on average over a prompt
_to_json = json.JSONEncoder(ensure_ascii=False).encode
_EQUAL = "fields {!r} and {!r} are equal, so nothing says which is better; remove the row"
MOST_MARGIN = 10_000
"""Largest size of a pair's margin: beside it a score of float32 still has three digits after the point."""

_LIST = (list, type(None))

OnLongPrompt = Literal["fail", "drop"]
LimitKeys = tuple[str, str]
"""The keys of the most tokens of a prompt, and of what to do with a longer one."""
SAMPLED: LimitKeys = ("rollout.max_prompt_tokens", "rollout.on_long_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt before tokenization. ``place`` says in errors where it comes from."""

    id: str
    place: str
    text: str
    answer: str
    raw: str  # as the data has it, without templates
    rejected: Sequence[str] = ()  # a worse answer, in data of pairs
    margin: float = 0.0  # of a pair
    meta: Mapping[str, Any] = field(default_factory=dict)


def fields_of(data: FileKeys) -> tuple[str, ...]:
    """The fields of texts that each row must have."""
    if data.messages_field is not None:
        return ()
    pairs = () if data.rejected_field is None else (data.rejected_field,)
    return data.prompt_field, data.answer_field, *pairs


def rendered(record: Record, path: Path, line: int, data: FileKeys, tokenizer: PreTrainedTokenizerBase) -> Problem:
    """The problem in a row of a file, with its templates. Raises DataError as `check_pair` does, and where the
    tokenizer's template fails."""
    check_pair(record, f"{path}:{line}", data)
    question, answer, *rejected = record.texts
    text = data.prompt_template.replace("{prompt}", question)
    if data.chat_template:
        chat = [{"role": "user", "content": text}]
        try:
            with bounded_rendering():
                text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise DataError(
                f"{path}:{line}: the tokenizer's chat template fails at it: {type(error).__name__}: {error!s:.500}; "
                "fix the model's chat_template.jinja, or set chat_template=false"
            ) from error
    return Problem(
        id=f"{path.stem}:{line}",
        place=f"{path}:{line}",
        text=text,
        raw=question,
        answer=answer,
        rejected=rejected,
        margin=_margin(record, f"{path}:{line}", data),
        meta=record.others,
    )


def check_pair(record: Record, place: str, data: FileKeys) -> None:
    """Raises DataError for a pair of equals, for one whose answers are no texts, and for a bad margin."""
    _margin(record, place, data)
    if data.rejected_field is None or data.messages_field is not None:
        return
    for name in (data.answer_field, data.rejected_field):
        if isinstance(record.others.get(name), list | dict):
            raise DataError(
                f"{place}: field {name!r} is {_start_of(record.others[name])}; an answer is a text. If it is a "
                "conversation, name it in messages_field, and the worse one in rejected_field"
            )
    _, answer, rejected = record.texts
    if answer == rejected:
        raise DataError(f"{place}: {_EQUAL.format(data.answer_field, data.rejected_field)}")


def _margin(record: Record, place: str, data: FileKeys) -> float:
    """The number in the field of margins; 0 without a field. Raises DataError for anything else there."""
    if data.margin_field is None:
        return 0.0
    try:
        value = record.at(data.margin_field)
    except KeyError:
        raise DataError(f"{place}: {missing_field(data.margin_field, record.others)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST_MARGIN <= value <= MOST_MARGIN:
        raise DataError(
            f"{place}: field {data.margin_field!r} is {_start_of(value)}; it must be a finite number, from "
            f"-{MOST_MARGIN} to {MOST_MARGIN}"
        )
    return float(value)


def conversation(record: Record, path: Path, line: int, data: FileKeys) -> Problem:
    """The conversation in a row of a file, or the pair of them. Raises as `conversation_text`, which it has."""
    place = f"{path}:{line}"
    text = conversation_text(record, place, data, in_structs=path.suffix == ".parquet")
    margin = _margin(record, place, data)
    return Problem(
        id=f"{path.stem}:{line}", place=place, text=text, answer="", raw=text, margin=margin, meta=record.others
    )


def conversation_text(record: Record, place: str, data: FileKeys, *, in_structs: bool) -> str:
    """Messages and tools in JSON; ``in_structs``: lists come from Arrow's structs, where each row has the keys of all,
    null where it lacks them, and are left without these.

    Raises DataError that names the ``place`` for a row without messages of which one is the assistant's, and as
    `check_pair` does.
    """
    assert data.messages_field is not None
    found = dict[str, Any]()
    check_pair(record, place, data)
    for name in filter(None, (data.messages_field, data.rejected_field, data.tools_field)):
        try:
            value = found[name] = record.at(name)
        except KeyError:
            raise DataError(f"{place}: {missing_field(name, record.others)}") from None
        if isinstance(value, str) and value.startswith("["):
            try:
                found[name] = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: field {name!r} is text that begins a list, and not JSON: {error}") from error
        elif in_structs:
            found[name] = _without_null_keys(value)
        if not isinstance(found[name], _LIST) or not all(isinstance(one, dict) for one in found[name] or ()):
            raise DataError(f"{place}: field {name!r} is {_start_of(value)}; it must be a list of objects")
    whole = {"messages": found[data.messages_field], "tools": found.get(data.tools_field or "") or []}
    if data.rejected_field is not None:
        whole["rejected"] = found[data.rejected_field]
    for name in filter(None, (data.messages_field, data.rejected_field)):
        if not any(one.get("role") == "assistant" for one in found[name] or ()):
            raise DataError(f"{place}: field {name!r} has no message of the role 'assistant' to train on")
        if name == data.rejected_field and found[name] == found[data.messages_field]:
            raise DataError(f"{place}: {_EQUAL.format(data.messages_field, data.rejected_field)}")
    text = _to_json(whole)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: its messages hold a lone surrogate, which is not valid text") from error
    return text


def _without_null_keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_null_keys(inner) for key, inner in value.items() if inner is not None}
    return [_without_null_keys(inner) for inner in value] if isinstance(value, list) else value


def _start_of(value: object) -> str:
    """The start of a bad value, for errors."""
    return f"{value!r:.80}"


def unrendered(conversations: Sequence[Problem]) -> list[Prompt]:
    """The conversations as prompts without tokens, which whoever trains on them makes of ``text``."""
    return [
        Prompt(id=one.id, text=one.text, token_ids=(), answer="", question=one.raw, margin=one.margin, meta=one.meta)
        for one in conversations
    ]


def tokenized(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    add_special_tokens: bool,
    max_prompt_tokens: int,
    on_long_prompt: OnLongPrompt,
    keys: LimitKeys,
) -> list[Prompt]:
    """The prompts in their order. One that is too long raises DataError, or is dropped with a warning."""
    prompts: list[Prompt] = []
    long: list[tuple[Problem, str]] = []
    for problem, ids in _encoded(problems, tokenizer, add_special_tokens, max_prompt_tokens * _MOST_CHARACTERS):
        prompt = _prompt(problem, ids, max_prompt_tokens)
        if isinstance(prompt, str):
            long.append((problem, prompt))
        else:
            prompts.append(prompt)
    if long and (on_long_prompt == "fail" or not prompts):
        problem, length = long[0]
        raise DataError(
            f"{problem.place}: the prompt has {length}, {keys[0]}={max_prompt_tokens} "
            f"({len(long)} of {len(problems)} prompts are too long); raise it"
            + (f" or set {keys[1]}=drop" if prompts else "")
        )
    if long:
        logger.warning(
            "dropped %d of %d prompts with more than %s=%d tokens; the first is %s with %s",
            *(len(long), len(problems), keys[0], max_prompt_tokens, long[0][0].place, long[0][1]),
        )
    return prompts


def tokenized_one(
    problem: Problem, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool, max_prompt_tokens: int
) -> Prompt | str:
    """The prompt, or its length if that is too much."""
    ((_, ids),) = _encoded([problem], tokenizer, add_special_tokens, max_prompt_tokens * _MOST_CHARACTERS)
    return _prompt(problem, ids, max_prompt_tokens)


def _prompt(problem: Problem, ids: Sequence[int] | None, max_prompt_tokens: int) -> Prompt | str:
    if ids is None or len(ids) > max_prompt_tokens:
        return f"{len(problem.text)} characters" if ids is None else f"{len(ids)} tokens"
    return Prompt(
        id=problem.id,
        text=problem.text,
        token_ids=tuple(ids),
        answer=problem.answer,
        question=problem.raw,
        rejected=tuple(problem.rejected),
        margin=problem.margin,
        meta=problem.meta,
    )


def _encoded(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool, most_characters: int
) -> Iterator[tuple[Problem, list[int] | None]]:
    """Each problem with its tokens, or with None if it has too many characters to fit. Encodes few at a time, because
    a tokenizer's own records take 100 bytes a token while they exist."""
    for start in range(0, len(problems), _AT_ONCE):
        part = problems[start : start + _AT_ONCE]
        texts = [p.text for p in part if len(p.text) <= most_characters]
        encoded = iter(prompt_tokens(tokenizer, texts, begins=add_special_tokens))
        for problem in part:
            yield problem, next(encoded) if len(problem.text) <= most_characters else None
