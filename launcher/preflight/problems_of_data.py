"""Checks that the files of problems exist, that their first rows have the configured fields, and that none of those
that are held out is trained on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.preflight.subject import Found, Subject, note, problem, unchecked
from rl_megatron.chat_templates import setting
from rl_megatron.config.environments import begun_by_messages
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, data_sources, name_of
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.data.problems.conversations import (
    bad_answer,
    check_pair,
    compared_text,
    conversation_text,
    messages_of,
)
from rl_megatron.data.problems.files import files_in, local_files, read_records
from rl_megatron.data.problems.leaks import ListedTexts, leaked, leaks_named, spaced
from rl_megatron.data.problems.prompts import check_template
from rl_megatron.data.problems.records import Record, listed
from rl_megatron.data.problems.rendering import fields_of
from rl_megatron.errors import ConfigError, DataError, RLMegatronError
from rl_megatron.interfaces import RewardFunction
from rl_megatron.json_text import parse
from rl_megatron.rewards.final_number import final_number, is_formula
from rl_megatron.rewards.registry import REWARDS
from rl_megatron.rollout.conversation.forms import FORMS
from rl_megatron.rollout.conversation.messages import MessagesRefused, tidied
from rl_megatron.types import Prompt
from rl_megatron.weights.formats.hf_folder import chat_template, special_tokens

if TYPE_CHECKING:
    from rl_megatron.rollout.conversation.rendering import ChatRenderer

ROWS = 1000
_SHOWN_ROWS = 100  # of them, that the chat template is asked to show: 2 s at most, where each has ten turns
_OF_SYSTEM = "name it in {key}.system_field"
_OF_ROWS: Mapping[str, str] = {
    "system": f"{_OF_SYSTEM}, with {{key}}.chat_template=true",
    "system_prompt": f"{_OF_SYSTEM}, with {{key}}.chat_template=true",
    "input": "write it into the text of the question",
}
_OF_CONVERSATIONS: Mapping[str, str] = {
    **dict.fromkeys(("system", "system_prompt"), _OF_SYSTEM),
    **dict.fromkeys(("tools", "functions"), "name it in {key}.tools_field"),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking"), "all rows have those of model.template_variables"),
}
"""What to do with fields of these names that no key reads: published data sets have parts of prompts there."""


@dataclass(slots=True)
class _Texts:
    """Problems of first rows, with where each is."""

    places: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, place: str, text: str) -> None:
        self.places.append(place)
        self.texts.append(spaced(text))

    def listed(self) -> ListedTexts:
        return ListedTexts(self.places, self.texts)


def check(subject: Subject) -> Iterator[Found]:
    """Reads the first rows of ``train`` and ``eval`` of each source, and of ``eval`` of each set, and yields why one
    cannot be read, and which of them are trained on and held out."""
    config = subject.config
    trained, held_out, template = _Texts(), dict[str, _Texts](), None
    try:
        template = _template(subject)
    except RLMegatronError as error:
        yield problem(str(error))
    except OSError:  # the check of the model's files tells it
        pass
    for key, data in data_sources(config.data).items():
        if isinstance(data, FileKeys):
            compared = _compared(config, config.source_rewards.get(name_of(key)))
            into = {"train": trained, "eval": held_out.setdefault(key, _Texts())}
            yield from _of(key, data, into, config, template, compared=compared, learns=not config.kind.samples)
    for key, data in config.eval.data_of_sets.items():
        if isinstance(data, FileKeys):
            compared = _compared(config, config.own_rewards.get(key.removesuffix(".data")))
            into = {"eval": held_out.setdefault(key, _Texts())}
            yield from _of(key, data, into, config, template, compared=compared, learns=False)
    if config.data.on_leak == "fail":
        texts = trained.listed()
        rows, places = leaked(texts, texts.hashes(), {key: theirs.listed() for key, theirs in held_out.items()})
        if len(rows):
            yield problem(leaks_named(texts, rows, places))


def _compared(config: RunConfig, own: RewardSection | None) -> set[RewardFunction]:
    """The built-in rewards, of ``own`` or the run's, that compare completions with answers."""
    if not config.kind.samples or config.environments:
        return set()
    return {REWARDS[name] for name in (own or config.reward).functions.values() if name in REWARDS}


def _of(
    section: str,
    data: FileKeys,
    into: Mapping[str, _Texts],
    config: RunConfig,
    template: ChatRenderer | None,
    *,
    compared: Collection[RewardFunction],
    learns: bool,
) -> Iterator[Found]:
    """What is wrong in these files of ``data``, by the names of their keys; their problems go ``into`` the texts of
    that name. ``compared``: the rewards that compare completions with the answers; ``learns``: answers are learnt."""
    try:
        data = local_files(data, section, into)
    except RLMegatronError as error:
        yield problem(str(error))
        return
    longer, lists = [], data.chat_template or section in begun_by_messages(config)
    for name, found in into.items():
        path, key = getattr(data, name), f"{section}.{name}"
        most = min(ROWS, data.max_eval or ROWS) if name == "eval" else ROWS
        try:
            first, *others = files_in(path, key)
            rows = read_records(first, fields_of(data), key=key, limit=most, lists=lists)
            of = data.of_held_out if name == "eval" else data
            with_nulls = _add(rows, first, of, found, config, template, without=_without_bad(config, name))
        except RLMegatronError as error:
            yield problem(str(error))
        else:
            for odd in _odd_answers(rows, data, compared, learns):
                yield note(f"{first}{odd.replace('{key}', section)}")
            for unread in _unread(rows, data, learns) if name == "train" else ():
                yield note(f"{first}: {unread.replace('{key}', section)}")
            longer += [str(path)] if others or len(rows) == ROWS else []
            if with_nulls:
                yield note(
                    f"{with_nulls[0]}: a call of a tool has null for an argument, as in {len(with_nulls)} of the first "
                    f"{len(rows)} rows: it is read as meant. If the file was written of a table of Arrow's, where each "
                    "call has the keys of other functions, leave these out or train on the parquet file"
                )
    if longer:
        yield unchecked(f"rows of {' and '.join(longer)} after the first {ROWS}")
    try:
        check_template(data, section)
    except ConfigError as error:
        yield problem(str(error))
    yield unchecked(f"whether prompts fit in {config.prompt_limit_keys[0]}")


def _odd_answers(
    rows: Sequence[Record], data: FileKeys, compared: Collection[RewardFunction], learns: bool
) -> Iterator[str]:
    """Of questions and answers that are read otherwise than their file may mean them, the line and what is done with
    them."""
    if data.messages_field is not None:
        return
    question, answer = (_list_in(text) for text in rows[0].texts[:2])
    if question and isinstance(question[0], dict) and data.prompt_field not in rows[0].others:
        yield (
            f":1: {{key}}.prompt_field={data.prompt_field!r} is the JSON text of a list, and the policy reads that; "
            "write messages as a list, which {key}.chat_template=true renders"
        )
    if answer and compared and data.answer_field not in rows[0].others:
        yield (
            f":1: {{key}}.answer_field={data.answer_field!r} is the JSON text of a list, and completions are compared "
            "with it; write one answer as text"
        )
    value, field_of = rows[0].others.get(data.answer_field), f"{{key}}.answer_field={data.answer_field}"
    kind = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else ""
    if kind and (compared or learns):
        what = "completions are compared with its JSON" if compared else "its JSON is learnt"
        advice = f"a field in it is named {field_of}.<field>" if isinstance(value, dict) else "write one answer as text"
        yield f":1: {{key}}.answer_field={data.answer_field!r} is {kind}, and {what}; {advice}"
    formulas = [line for line, row in enumerate(rows, 1) if final_number in compared and is_formula(row.texts[1])]
    if formulas and not kind:
        yield (
            f":{formulas[0]}: the answer is a formula, as of {len(formulas)} of the first {len(rows)} rows, and "
            "final_number compares its last number alone, 2 of \\frac{1}{2}; reward.function=math_verify reads it whole"
        )


def _list_in(text: str) -> list[object]:
    """The list of which a text is the JSON; empty if it is none."""
    try:
        found = parse(text) if text.startswith("[") else None
    except ValueError:
        return []
    return found if isinstance(found, list) else []


def _unread(rows: Sequence[Record], data: FileKeys, learns: bool) -> Iterator[str]:
    """Fields of rows to train on that look like a part of the prompt, and that no key reads, and what to do with each.
    Only what ``learns`` answers has the ``input`` of Alpaca's rows; where completions are sampled, a reward may read
    it."""
    known = _OF_ROWS if data.messages_field is None else _OF_CONVERSATIONS
    named = {str(field).partition(".")[0] for key, field in data if key.endswith("_field")}
    for name, advice in known.items():
        if name in named or (name == "input" and not learns):
            continue
        if count := sum(row.others.get(name) not in (None, "", [], {}, "[]") for row in rows):
            yield (
                f"{count} of the first {len(rows)} rows have a field {name!r}, which no key of {{key}} names, so the "
                f"policy does not read it; {advice}, if it should"
            )


def _add(
    rows: Sequence[Record],
    file: Path,
    data: FileKeys,
    found: _Texts,
    config: RunConfig,
    template: ChatRenderer | None,
    *,
    without: str | None,
) -> list[str]:
    """The places of rows of JSON lines with a null argument. Raises DataError that names all bad rows, and of
    conversations those without the form of the job's, or that the ``template`` does not show, unless these are left
    out. ``without`` as of `_without_bad`."""
    bad, with_nulls, talks = list[str](), list[str](), list[Prompt]()
    for line, row in enumerate(rows, 1):
        place = f"{file}:{line}"
        try:
            if data.messages_field is not None:
                in_structs = file.suffix == ".parquet"
                found.add(place, text := conversation_text(row, place, data, in_structs=in_structs))
                talks.append(Prompt(id=place, text=text, token_ids=(), answer=""))
                if not in_structs and _has_null_argument(text):
                    with_nulls.append(place)
            else:
                check_pair(row, place, data)
                messages = messages_of(row, place, data, in_structs=file.suffix == ".parquet")
                found.add(place, compared_text(messages, system=False))
                if template is not None and data.chat_template and line <= _SHOWN_ROWS:
                    template.render(tidied(messages), ())
            if without is not None and (why := bad_answer(row.others, "".join(row.texts[1:]))):
                bad.append(f"{place}: {why}, or {without}")
        except DataError as error:
            bad.append(str(error))
        except MessagesRefused as error:
            bad.append(f"{place}: {error}")
    if bad:
        raise DataError(listed(bad))
    if talks and config.written.on_refused == "fail":
        FORMS[config.job](talks)
        if template is not None:
            from rl_megatron.rollout.conversation.shown import check_shown

            check_shown(talks[:_SHOWN_ROWS], config.job, template)
    return with_nulls


def _without_bad(config: RunConfig, name: str) -> str | None:
    """How a run goes without the answers in the files ``name`` that are marked as bad; None where it learns none, or
    leaves them out."""
    if config.job == "sft" and config.sft.on_refused == "fail":
        return "leave such rows out with sft.on_refused=drop"
    demonstrated = config.environment.function is not None
    return "set warm_start.steps=0" if name == "train" and config.warm_start.steps and not demonstrated else None


def _template(subject: Subject) -> ChatRenderer | None:
    """The chat template of the model's folder, if it shows data; None for a tiny model's, and for several by name."""
    sources = {**data_sources(subject.config.data), **subject.config.eval.data_of_sets}.values()
    folder = subject.model_folder
    if folder is None or not any(
        isinstance(one, FileKeys) and (one.chat_template or one.messages_field) for one in sources
    ):
        return None
    if (source := chat_template(folder)) is None:
        return None
    from rl_megatron.rollout.conversation.rendering import ChatRenderer  # transformers takes half a second to import

    source = setting(subject.config.model.template_variables, source)
    now = {"strftime_now": datetime.now().astimezone().strftime}
    return ChatRenderer(_OfFolder(source, special_tokens(folder)), now)


@dataclass(frozen=True, slots=True)
class _OfFolder:
    """As of a folder's tokenizer, without it."""

    chat_template: str
    special_tokens_map: Mapping[str, str]


def _has_null_argument(text: str) -> bool:
    """Whether a call of a tool in the messages has null for an argument itself."""
    said = json.loads(text)
    for message in (*said["messages"], *said.get("rejected", ())):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": dict(values)}} if None in values.values():
                    return True
    return False
