"""Prompts of rows: their messages or conversations, rendered by templates, and tokenized with a bound on their length.

A conversation, with its tools, is one text in JSON, which the job that trains on it reads.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rl_megatron.chat_templates import TemplateFailed, TemplateUnbounded, prompt_tokens, template_texts
from rl_megatron.config.sections.data import TURNS_IN_TEXT, FileKeys
from rl_megatron.config.sections.teachers import (
    OTHER_COMPLETION_FIELD,
    OTHER_COMPLETION_TOKEN,
    TeacherSection,
    prompt_parts,
)
from rl_megatron.data.problems.leaks import ProblemKey, normalize_whitespace
from rl_megatron.data.problems.rows import (
    Record,
    beyond_embedding,
    bytes_field,
    drop_null_keys,
    equal_fields,
    has_bytes,
    missing_field,
    null_field,
    quote_value_start,
    unread_field,
)
from rl_megatron.errors import DataError
from rl_megatron.files import field_value, parse
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


_to_json = json.JSONEncoder(ensure_ascii=False).encode
_MOST_MARGIN = 10_000  # next to it, a score of float32 still has three digits after the point
_MESSAGE = {"role", "content"}  # objects with a role alone may be an answer: who does what
_SHAREGPT = {"from", "value"}
_RENAMED = "; from and value, of ShareGPT's form, are called role and content, human is user, and gpt assistant"
_SPEAKERS = ("human", "gpt", "user", "assistant", "system")  # an object of other senders is an answer
_OF_SYSTEM = ("system", "developer")
LABEL = "label"  # field of KTO's rows: whether the answer is desirable
_ROLES = (*_OF_SYSTEM, "user", "assistant", "tool", "function", "ipython", "observation")


def check_pair(record: Record, place: str, data: FileKeys) -> None:
    """Raises DataError for equal answers, for one that is not text, and as `read_margin`, `read_system_text` and
    `read_demonstration` do. Also for a lone answer that is a message, or a list of them."""
    read_margin(record, place, data)
    read_system_text(record, place, data)
    if data.fields["demonstration"] is not None:
        read_demonstration(record.others, place, data.fields["demonstration"])
    if data.fields["messages"] is not None:
        return
    for name in (data.answer_field, *filter(None, (data.fields["rejected"],))):
        value = record.others.get(name)
        is_talk = any(map(_is_message, value if isinstance(value, list) else [value]))
        if is_talk or (data.fields["rejected"] is not None and isinstance(value, list | dict)):
            raise DataError(
                f"{place}: field {name!r} is {quote_value_start(value)}; an answer is a text. If it is a "
                "conversation, name it "
                "in fields.messages, and a worse one in fields.rejected"
            )
    if data.fields["rejected"] is None:
        return
    _, answer, rejected = record.texts
    if answer == rejected:
        raise DataError(f"{place}: {equal_fields(data.answer_field, data.fields['rejected'])}")


def refuse_bad_answers(prompts: Iterable[Prompt]) -> None:
    """Raises DataError for one whose answer, or conversation, is not to be learned, as `bad_answer` says."""
    for prompt in prompts:
        if bad := bad_answer(prompt.meta, prompt.answer):
            raise DataError(f"prompt {prompt.id!r}: {bad}")


def bad_answer(row: Mapping[str, Any], answer: str) -> str | None:
    """Returns why the answer of a row, or its conversation, which has none, is not learned; None if it is. ``row``: its
    other fields."""
    if row.get(LABEL) is not False or answer == "false":  # there the label is the answer itself
        return None
    return (
        "field 'label' is false, which says of KTO's rows that the answer is bad, and a model would learn it; train on "
        "such rows with job=dpo dpo.loss=kto, keep the rows with true, or give the field another name if it says "
        "another thing"
    )


def is_desirable(prompt: Prompt) -> bool:
    """Returns the label of a row of one answer. Raises DataError that names the prompt for a row without one, or with
    another value than true and false (or 1 and 0)."""
    label = prompt.meta.get(LABEL)
    if isinstance(label, int) and label in (0, 1):
        return bool(label)
    found = (
        f"field {LABEL!r} is {quote_value_start(label)}" if LABEL in prompt.meta else missing_field(LABEL, prompt.meta)
    )
    raise DataError(f"prompt {prompt.id!r}: {found}; dpo.loss=kto reads there true of a desirable answer, else false")


def read_margin(record: Record, place: str, data: FileKeys) -> float:
    """Returns the number in the field of margins; 0 without a field. Raises DataError for anything else there."""
    if data.fields["margin"] is None:
        return 0.0
    value = _field_at(record.others, place, data.fields["margin"])
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST_MARGIN <= value <= _MOST_MARGIN:
        raise DataError(
            f"{place}: field {data.fields['margin']!r} is {quote_value_start(value)}; it must be a finite number, from "
            f"-{_MOST_MARGIN} to {_MOST_MARGIN}"
        )
    return float(value)


def read_demonstration(row: Mapping[str, Any], place: str, name: str) -> str:
    """Returns the text of a demonstration in a row. Raises DataError for anything else there."""
    value = _field_at(row, place, name)
    if not (isinstance(value, str) and value.strip()):
        raise DataError(
            f"{place}: field {name!r} is {quote_value_start(value)}; a demonstration is a text; remove the row"
        )
    return value


def read_system_text(record: Record, place: str, data: FileKeys) -> str:
    """Returns the text of the system's message in a row, empty without one. Raises DataError for another value."""
    if data.fields["system"] is None:
        return ""
    value = _field_at(record.others, place, data.fields["system"])
    if not isinstance(value, str | None):
        raise DataError(
            f"{place}: field {data.fields['system']!r} is {quote_value_start(value)}; a system's message is a text"
        )
    return value if value and value.strip() else ""


def read_messages(record: Record, place: str, data: FileKeys, *, in_structs: bool) -> tuple[Mapping[str, Any], ...]:
    """Returns the messages that a model answers: a row's list, also as JSON text with ``chat_template``, or its text as
    the user's. A message of the system's field comes first. ``in_structs`` is `conversation_text`'s.

    Raises DataError for a list that is not of messages with texts, and for a last one of the assistant or the system.
    """
    system = read_system_text(record, place, data)
    first = [{"role": "system", "content": system}] if system else []
    given = messages = record.others.get(data.prompt_field)
    if isinstance(given, list):
        messages = drop_null_keys(given) if in_structs else given
    elif data.chat_template:
        given = messages = _messages_in(record.texts[0])
    if not isinstance(messages, list):
        return (*first, {"role": "user", "content": record.texts[0]})
    if not messages:
        why = "a prompt has a user's message at least"
    elif wrong := next(
        (wrong for at, one in enumerate(messages, 1) if (wrong := _no_message(at, one, rendered=data.chat_template))),
        None,
    ):
        why = wrong
    elif (last := messages[-1])["role"] in ("assistant", *_OF_SYSTEM) or not (last["content"] or "").strip():
        why = "its last message is what the model answers: one of the user or of a tool, with a text"
    elif system and messages[0]["role"] in _OF_SYSTEM:
        why = f"and field {data.fields['system']!r} has a text of the system, too; keep one"
    else:
        return (*first, *messages)
    raise DataError(f"{place}: field {data.prompt_field!r} is {quote_value_start(given)}; {why}")


def conversation_text(record: Record, place: str, data: FileKeys, *, in_structs: bool) -> str:
    """Returns messages and tools in JSON, and the number of the ``first`` message after context alone, if there is any.

    ``in_structs``: lists come from Arrow's structs, where each row has the keys of all, null where it lacks them. Null
    keys are left out. Raises DataError that names the ``place`` for a row without a message of the assistant, and for
    two messages of the system. Also for messages that begin with those of the context, and as `check_pair` does.
    """
    assert data.fields["messages"] is not None
    check_pair(record, place, data)
    of_lists = (data.fields["messages"], data.fields["rejected"], data.fields["tools"], data.fields["context"])
    found = {name: _list_at(record, name, place, in_structs=in_structs) for name in of_lists if name is not None}
    before = list(found.get(data.fields["context"] or "", ()))
    if system := read_system_text(record, place, data):
        before.insert(0, {"role": "system", "content": system})
    where = f"{place}: field {data.fields['tools']!r}"
    whole = dict[str, Any](tools=[_with_parameters(one, where) for one in found.get(data.fields["tools"] or "", ())])
    for side, name in (("messages", data.fields["messages"]), ("rejected", data.fields["rejected"])):
        if name is None:
            continue
        if not any(one.get("role") == "assistant" for one in found[name]):
            shared = "" if not any(one.keys() >= _SHAREGPT for one in found[name]) else _RENAMED
            raise DataError(f"{place}: field {name!r} has no message of the role 'assistant' to train on{shared}")
        if (context := found.get(data.fields["context"] or "")) and found[name][: len(context)] == context:
            raise DataError(
                f"{place}: field {name!r} begins with the messages of {data.fields['context']!r}, so they would be "
                "there twice; leave fields.context out"
            )
        whole[side] = [*before, *found[name]]
        if system and whole[side][1].get("role") == "system":
            raise DataError(
                f"{place}: field {data.fields['system']!r} has a text, and the messages begin with the system's; "
                "keep one"
            )
    if data.fields["rejected"] is not None and found[data.fields["rejected"]] == found[data.fields["messages"]]:
        raise DataError(f"{place}: {equal_fields(data.fields['messages'], data.fields['rejected'])}")
    if before:
        whole["first"] = len(before)
    text = _to_json({"messages": whole.pop("messages"), **whole})  # checkpoints have digests of this order
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: its messages hold a lone surrogate, which is not valid text") from error
    return text


def _list_at(record: Record, name: str, place: str, *, in_structs: bool) -> list[dict[str, Any]]:
    """Returns the list of objects in a field, which may be its JSON text; empty where it is null. Raises DataError."""
    found = value = _field_at(record.others, place, name)
    if isinstance(value, str) and value.startswith("["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: field {name!r} is text that begins a list, and not JSON: {error}") from error
    elif in_structs:
        found = drop_null_keys(value)
    if not isinstance(found, list | None) or not all(isinstance(one, dict) for one in found or ()):
        advice = f". {TURNS_IN_TEXT}" if isinstance(value, str) and "\n\nHuman:" in value else ""
        raise DataError(f"{place}: field {name!r} is {quote_value_start(value)}; it must be a list of objects{advice}")
    return found or []


def _field_at(row: Mapping[str, Any], place: str, name: str) -> Any:
    """Returns the value of a field. Raises DataError where the row lacks it, or it has bytes that are not text."""
    try:
        value = field_value(row, name)
    except KeyError:
        raise DataError(f"{place}: {missing_field(name, row)}") from None
    if has_bytes(value):
        raise DataError(f"{place}: {bytes_field(name)}")
    return value


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return value.keys() >= _MESSAGE or (value.keys() >= _SHAREGPT and value["from"] in _SPEAKERS)


def _messages_in(text: str) -> list[Any] | None:
    """Returns the messages that a text has as JSON; None if it is another text."""
    try:
        found: Any = parse(text) if text.lstrip(" \t\r\n").startswith("[") else None
        text.encode() if found is None else _to_json(found).encode()
    except ValueError:  # not JSON, or half of a surrogate pair, which no text of a prompt can have
        return None
    is_chat = isinstance(found, list) and all(isinstance(one, dict) for one in found)
    return found if is_chat and any("role" in one or one.keys() >= _SHAREGPT for one in found) else None


def _no_message(at: int, one: object, *, rendered: bool) -> str | None:
    """Returns why item ``at`` (from 1) is not a message of text, or None. An environment may change roles."""
    if not isinstance(one, dict) or not isinstance(role := one.get("role"), str):
        shared = _RENAMED if isinstance(one, dict) and one.keys() >= _SHAREGPT else ""
        return f"item {at} must be a message, an object with role and content{shared}"
    if rendered and role not in _ROLES:
        return f"the role of message {at} is {role!r:.40} (allowed: {', '.join(_ROLES)})"
    content = one.get("content")
    calls = role == "assistant" and (one.get("tool_calls") or one.get("function_call"))
    if isinstance(content, str) or (content is None and calls):
        return None
    return f"the content of message {at} is {quote_value_start(content)}; it must be text"


def _with_parameters(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the tool with its parameters as an object. Some files have them as JSON text, because a column of Arrow
    has one schema for all. Raises DataError that begins with ``where``."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(text := function.get("parameters"), str):
        return tool
    try:
        parameters = parse(text)
    except ValueError:
        parameters = None
    if not isinstance(parameters, dict):
        raise DataError(
            f"{where} has a tool of parameters {quote_value_start(text)}; they must be an object, or its JSON text"
        )
    function = {**function, "parameters": parameters}
    return {**tool, "function": function} if "function" in tool else function


_AT_ONCE = 1000  # prompts that a tokenizer gets in one call
_RENDERED_TOGETHER = 100  # rows that a process with templates gets in one call
_MOST_CHARACTERS = 100  # characters per token, on average over a prompt
_to_sorted_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode
_OF_PROBLEM = ("prompt", "answer")  # whatever the fields are called
_CHANGED = ("assistant", "tool")  # templates leave out thinking, and quote results
_ASKS = {"role": "user"}
_PLACE = (
    f"\ue000{OTHER_COMPLETION_FIELD}\ue000"  # placeholder in a teacher's prompt, of a private use: it is in no text
)

OnLongPrompt = Literal["fail", "drop"]
LimitKeys = tuple[str, str]
"""The keys of the most tokens of a prompt, and of what to do with a longer one."""
SAMPLED: LimitKeys = ("rollout.max_prompt_tokens", "rollout.on_long_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """The form in which a row becomes a prompt. ``teachers``: name -> a teacher that reads its own prompt instead."""

    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    on_long_prompt: OnLongPrompt
    keys: LimitKeys = SAMPLED
    vocab_size: int = sys.maxsize  # rows of the model's embedding
    teachers: Mapping[str, TeacherSection] = field(default_factory=dict)


class PromptExcess(NamedTuple):
    """The reason why a prompt is dropped: its ``length`` in words, the ``key`` of the limit, and the limit."""

    length: str
    key: str
    limit: int

    def __str__(self) -> str:
        return f"{self.length}, {self.key}={self.limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt before tokenization. ``place`` says in errors where it comes from."""

    id: str
    place: str
    text: str
    answer: str
    raw: str  # text in the data, without templates; messages as JSON
    rejected: Sequence[str] = ()  # a worse answer, in data of pairs
    margin: float = 0.0  # margin of a pair
    messages: tuple[Mapping[str, Any], ...] = ()  # messages of a file's row; what is asked is the text of the last one
    meta: Mapping[str, Any] = field(default_factory=dict)
    form: str = "{prompt}"  # the template that `problem_template` returns

    @property
    def question_text(self) -> str:
        """The text of what is asked, without templates."""
        return str(self.messages[-1]["content"]) if self.messages else self.raw

    @property
    def begins(self) -> tuple[Mapping[str, Any], ...]:
        """The messages, the last with the text that a template made of it; none where they are a user's text."""
        is_text = len(self.messages) < 2 and all(one["role"] == "user" for one in self.messages)
        return () if is_text else (*self.messages[:-1], {**self.messages[-1], "content": self.text})

    def hashed(self, texts: int) -> str:
        """Returns the quickly read part of what is compared: as of `ProblemKey.hashed`."""
        return normalize_whitespace(
            *filter(None, (self.form.replace("{prompt}", self.question_text.strip()), self.answer)[:texts])
        )

    def compared(self, by: ProblemKey) -> str:
        """Returns the text that equal problems share. Null keys do not count, because parquet's messages lack them."""
        *before, last = self.messages or (_ASKS,)
        *chat, asks = (drop_null_keys(one) for one in (*before, {**last, "content": None}))
        answers = filter(None, (self.answer, *self.rejected)) if by.answers else ()
        fields = {name: _value_at(self.meta, name) for name in self.meta if by.fields is None}
        fields |= {name: _value_at(self.meta, name) for name in by.fields or ()}
        others = [*chat, *(one for one in (asks, drop_null_keys(fields)) if one not in (_ASKS, {}))]
        return normalize_whitespace(
            self.form.replace("{prompt}", self.question_text.strip()), *answers, *map(_to_sorted_json, others)
        )


def problem_template(data: FileKeys) -> str:
    """Returns the templates around a problem. The same text with other templates is another problem."""
    return f"\0 {data.prompt_template}" if data.chat_template else data.prompt_template


def _value_at(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field, null where the row lacks it."""
    try:
        return field_value(row, name)
    except KeyError:
        return None


def required_fields(data: FileKeys) -> tuple[str, ...]:
    """Returns the fields of texts that each row must have."""
    if data.fields["messages"] is not None:
        return ()
    pairs = () if data.fields["rejected"] is None else (data.fields["rejected"],)
    return data.prompt_field, data.answer_field, *pairs


def render_row(
    record: Record, path: Path, line: int, data: FileKeys, tokenizer: PreTrainedTokenizerBase | None
) -> Example:
    """Returns the problem in a row of a file, with its templates. Raises DataError as `check_pair` and `read_messages`
    do, and where the tokenizer's template fails."""
    (problem,) = rendered_rows([record], path, line, data, tokenizer)
    if isinstance(problem, DataError):
        raise problem
    return problem


def rendered_rows(
    records: Sequence[Record], path: Path, first: int, data: FileKeys, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[Example | DataError]:
    """Yields what `render_row` returns for each row from line ``first`` on: a problem, or the error of its row. Raises
    DataError for the first row that exceeds a limit of templates."""
    for start in range(0, len(records), _RENDERED_TOGETHER):
        part = records[start : start + _RENDERED_TOGETHER]
        made = [_before_template(record, path, line, data) for line, record in enumerate(part, first + start)]
        good = [one for one in made if isinstance(one, Example)] if data.chat_template else []
        texts = iter(_as_chats([(one.text, one.messages, one.place) for one in good], tokenizer))
        for one in made:
            if isinstance(one, DataError) or not data.chat_template:
                yield one
            else:
                text = next(texts)
                yield text if isinstance(text, DataError) else replace(one, text=text)


def read_problem(record: Record, path: Path, line: int, data: FileKeys) -> Example:
    """Returns the problem in a row of a file, without the tokenizer's template, or its conversation. Raises DataError
    as `check_pair`, `read_messages` and `conversation_text` do."""
    one = _before_template(record, path, line, data) if data.fields["messages"] is None else None
    if isinstance(one, DataError):
        raise one
    return conversation(record, path, line, data) if one is None else one


def _before_template(record: Record, path: Path, line: int, data: FileKeys) -> Example | DataError:
    place = f"{path}:{line}"
    try:
        check_pair(record, place, data)
        question, answer, *rejected = record.texts
        messages = read_messages(record, place, data, in_structs=path.suffix == ".parquet")
        margin = read_margin(record, place, data)
    except DataError as error:
        return error
    return Example(
        id=f"{path.stem}:{line}",
        place=place,
        text=data.prompt_template.replace("{prompt}", messages[-1]["content"]),
        raw=question,
        answer=answer,
        rejected=rejected,
        margin=margin,
        messages=messages,
        meta=record.others,
        form=problem_template(data),
    )


def conversation(record: Record, path: Path, line: int, data: FileKeys) -> Example:
    """Returns the conversation in a row of a file, or the pair of them. Raises as `conversation_text` does."""
    place = f"{path}:{line}"
    text = conversation_text(record, place, data, in_structs=path.suffix == ".parquet")
    margin = read_margin(record, place, data)
    return Example(
        id=f"{path.stem}:{line}", place=place, text=text, answer="", raw=text, margin=margin, meta=record.others
    )


def unrendered(conversations: Sequence[Example]) -> list[Prompt]:
    """Returns the conversations as prompts without tokens, which the job that trains on them makes of ``text``."""
    return [
        Prompt(id=one.id, text=one.text, token_ids=(), answer="", question=one.raw, margin=one.margin, meta=one.meta)
        for one in conversations
    ]


def _as_chat(text: str, messages: Sequence[Mapping[str, Any]], place: str, tokenizer: PreTrainedTokenizerBase) -> str:
    (shown,) = _as_chats([(text, messages, place)], tokenizer)
    if isinstance(shown, DataError):
        raise shown
    return shown


def _as_chats(
    questions: Sequence[tuple[str, Sequence[Mapping[str, Any]], str]], tokenizer: PreTrainedTokenizerBase | None
) -> list[str | DataError]:
    """Renders each chat, with the text as its last message's content, up to the start of the assistant's turn. Returns
    the error where rendering fails. A ``developer``'s is tried as the system's where the template does not
    write it, as in conversations. Raises DataError for the first that exceeds a limit of templates."""
    if not questions:
        return []
    assert tokenizer is not None
    chats = [[*map(dict, messages[:-1]), {**messages[-1], "content": text}] for text, messages, _ in questions]
    try:
        shown = _chat_texts(chats, [place for _, _, place in questions], tokenizer)
    except TemplateUnbounded as error:
        if len(questions) == 1:
            raise _failed(questions[0][2], error) from error
        return [_as_chats([one], tokenizer)[0] for one in questions]
    for at, chat in enumerate(chats):
        as_system = [{**one, "role": "system"} if one["role"] == "developer" else one for one in chat]
        if isinstance(shown[at], DataError) and as_system != chat:
            (shown[at],) = _chat_texts([as_system], [questions[at][2]], tokenizer)
    return shown


def _chat_texts(
    chats: Sequence[list[dict[str, Any]]], places: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[str | DataError]:
    """Returns what the chat template makes of each chat, or the error if it fails or omits a message."""
    texts = template_texts(tokenizer, chats, opened=True)
    return [_whole(*each) for each in zip(texts, chats, places, strict=True)]


def _whole(shown: str | TemplateFailed, chat: Sequence[Mapping[str, Any]], place: str) -> str | DataError:
    if isinstance(shown, TemplateFailed):
        return _failed(place, shown)
    for at, one in enumerate(chat, 1):
        if one["role"] not in _CHANGED and one["content"].strip() not in shown:
            return DataError(
                f"{place}: the tokenizer's chat template does not write message {at}, of the role {one['role']!r}, as "
                "it is; give it a role that the template shows there, or fix the model's chat_template.jinja"
            )
    return shown


def _failed(place: str, error: TemplateFailed) -> DataError:
    return DataError(
        f"{place}: the tokenizer's chat template fails at it: {error!s:.500}; "
        "fix the model's chat_template.jinja, or set chat_template=false"
    )


def prompt_fields(prompt: str) -> list[str]:
    """Returns the fields of a row that a teacher's prompt names, each once, besides the problem and its answer."""
    names = dict.fromkeys(name for _, name in prompt_parts(prompt) if name is not None)
    return [name for name in names if name not in (*_OF_PROBLEM, OTHER_COMPLETION_FIELD)]


def _with_fields(problem: Example, parts: Sequence[tuple[str, str | None]], key: str) -> str:
    """Fills the `prompt_parts` of a teacher's prompt with a problem. Raises DataError that names the place for a field
    that its row lacks, or that is null."""
    known = {
        **dict(zip(_OF_PROBLEM, (problem.question_text, problem.answer), strict=True)),
        OTHER_COMPLETION_FIELD: _PLACE,
    }

    def field_text(name: str) -> str:
        if name in known:
            return known[name]
        try:
            value = field_value(problem.meta, name)
        except KeyError:
            raise DataError(f"{problem.place}: {unread_field(name, problem.meta, key)}") from None
        if value is None:
            raise DataError(f"{problem.place}: {null_field(name, key)}")
        if has_bytes(value):
            raise DataError(f"{problem.place}: {bytes_field(name)}, for {key}")
        return value if isinstance(value, str) else _to_json(value)

    return "".join(text + ("" if name is None else field_text(name)) for text, name in parts)


def tokenize(problems: Sequence[Example], form: RowForm, *, chat: bool = False) -> list[Prompt]:
    """Returns the prompts in their order, ``chat``: their texts are chats. One that is too long, or has a teacher's
    prompt that is, raises DataError, or is dropped with a warning. Raises DataError for a field that a teacher's prompt
    lacks, and for a token that the model's embedding lacks."""
    prompts: list[Prompt] = []
    long: list[tuple[Example, PromptExcess]] = []
    for problem, prompt in zip(problems, _prompts(problems, form, chat), strict=True):
        if isinstance(prompt, PromptExcess):
            long.append((problem, prompt))
        else:
            prompts.append(prompt)
    if long and (form.on_long_prompt == "fail" or not prompts):
        problem, why = long[0]
        raise DataError(
            f"{problem.place}: the prompt has {why} ({len(long)} of {len(problems)} prompts are too long); raise it"
            + (f" or set {form.keys[1]}=drop" if prompts else "")
        )
    for key in dict.fromkeys(why.key for _, why in long):
        of_key = [(problem, why) for problem, why in long if why.key == key]
        logger.warning(
            "dropped %d of %d prompts with more than %s=%d tokens; the first is %s with %s",
            *(len(of_key), len(problems), key, of_key[0][1].limit, of_key[0][0].place, of_key[0][1].length),
        )
    return prompts


def tokenize_one(problem: Example, form: RowForm, *, chat: bool = False) -> Prompt | PromptExcess:
    """Returns the prompt, as `tokenize` makes it, or why it is too long."""
    return next(_prompts([problem], form, chat))


def _prompts(problems: Sequence[Example], form: RowForm, chat: bool) -> Iterator[Prompt | PromptExcess]:
    own = _encoded((problem.text for problem in problems), form.tokenizer, not chat, form.max_tokens, form.keys[0])
    theirs = {
        name: _encode_teacher_prompts(problems, form.tokenizer, name, one, chat) for name, one in form.teachers.items()
    }
    for problem, ids in zip(problems, own, strict=True):
        read_by = {name: next(of_teacher) for name, of_teacher in theirs.items()}
        for one in (ids, *read_by.values()):
            if not isinstance(one, PromptExcess) and (most := max(one, default=0)) >= form.vocab_size:
                raise DataError(f"{problem.place} {beyond_embedding(most, form.vocab_size)}")
        long = [one for one in (ids, *read_by.values()) if isinstance(one, PromptExcess)]
        if long or isinstance(ids, PromptExcess):
            yield long[0]
            continue
        yield Prompt(
            id=problem.id,
            text=problem.text,
            token_ids=ids,
            answer=problem.answer,
            question=problem.raw,
            rejected=tuple(problem.rejected),
            margin=problem.margin,
            meta=problem.meta,
            messages=() if chat else problem.begins,
            read_by={
                name: of_teacher for name, of_teacher in read_by.items() if not isinstance(of_teacher, PromptExcess)
            },
        )


def _encode_teacher_prompts(
    problems: Sequence[Example], tokenizer: PreTrainedTokenizerBase, name: str, teacher: TeacherSection, chat: bool
) -> Iterator[tuple[int, ...] | PromptExcess]:
    """Returns the prompt that a teacher reads in place of each problem's."""
    key = f"algorithm.kl.teachers.{name}"
    assert teacher.prompt is not None
    assert teacher.max_prompt_tokens is not None
    parts, most = prompt_parts(teacher.prompt), teacher.max_prompt_tokens

    def text(problem: Example) -> str:
        found = _with_fields(problem, parts, f"{key}.prompt")
        return _as_chat(found, problem.messages, problem.place, tokenizer) if chat else found

    limit = f"{key}.max_prompt_tokens"
    if not teacher.reads_another:
        return _encoded(map(text, problems), tokenizer, not chat, most, limit)
    firsts, lasts = tee(_split_template(text(problem), problem) for problem in problems)
    before = _encoded((first for first, _ in firsts), tokenizer, not chat, most, limit)
    behind = _encoded((last for _, last in lasts), tokenizer, False, most, limit)
    return (_split_around(*both, most, limit) for both in zip(before, behind, strict=True))


def _split_template(text: str, problem: Example) -> tuple[str, str]:
    """Returns the texts around the place of another completion. Raises DataError for a chat template without it."""
    if text.count(_PLACE) != 1:
        raise DataError(
            f"{problem.place}: a teacher's prompt has {{{OTHER_COMPLETION_FIELD}}} once, but the chat template writes "
            f"it {text.count(_PLACE)} times; fix the model's chat_template.jinja, or set chat_template=false"
        )
    before, _, behind = text.partition(_PLACE)
    return before, behind


def _split_around(
    before: tuple[int, ...] | PromptExcess, suffix: tuple[int, ...] | PromptExcess, limit: int, key: str
) -> tuple[int, ...] | PromptExcess:
    """Returns the tokens around another completion, with ``OTHER_COMPLETION_TOKEN``, which is not a token, between."""
    if isinstance(before, PromptExcess):
        return before
    if isinstance(suffix, PromptExcess):
        return suffix
    length = len(before) + len(suffix)
    return (
        (*before, OTHER_COMPLETION_TOKEN, *suffix) if length <= limit else PromptExcess(f"{length} tokens", key, limit)
    )


def _encoded(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, begins: bool, max_tokens: int, key: str
) -> Iterator[tuple[int, ...] | PromptExcess]:
    """Yields the tokens of each text. One of too many characters to fit is not encoded. Few of the others are encoded
    at a time, because a tokenizer's own records take 100 bytes a token while they exist."""
    left, most_characters = iter(texts), max_tokens * _MOST_CHARACTERS
    while part := list(islice(left, _AT_ONCE)):
        fit = [text for text in part if len(text) <= most_characters]
        encoded = iter(prompt_tokens(tokenizer, fit, begins=begins))
        for text in part:
            if len(text) > most_characters:
                yield PromptExcess(f"{len(text)} characters", key, max_tokens)
                continue
            ids = next(encoded)
            yield tuple(ids) if len(ids) <= max_tokens else PromptExcess(f"{len(ids)} tokens", key, max_tokens)
