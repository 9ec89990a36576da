"""Checks that the files of problems exist, that their first rows have the configured fields, and that none of those
that are held out is trained on."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.preflight.subject import Found, Subject, note, problem, unchecked
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, data_sources, name_of
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.data.problems.conversations import conversation_text
from rl_megatron.data.problems.files import files_in, local_files, read_records
from rl_megatron.data.problems.leaks import ListedTexts, leaked, leaks_named, spaced
from rl_megatron.data.problems.prompts import check_template
from rl_megatron.data.problems.records import Record, listed
from rl_megatron.data.problems.rendering import check_pair, fields_of
from rl_megatron.errors import ConfigError, DataError, RLMegatronError
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.final_number import final_number, is_formula
from rl_megatron.rewards.registry import REWARDS

ROWS = 1000
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
    config, (named, _) = subject.config, subject.config.prompt_limit_keys
    trained, held_out = _Texts(), dict[str, _Texts]()
    for key, data in data_sources(config.data).items():
        if isinstance(data, FileKeys):
            compared = _compared(config, config.source_rewards.get(name_of(key)))
            into = {"train": trained, "eval": held_out.setdefault(key, _Texts())}
            yield from _of(key, data, into, named, compared=compared, learns=not config.kind.samples)
    for key, data in config.eval.data_of_sets.items():
        if isinstance(data, FileKeys):
            compared = _compared(config, config.own_rewards.get(key.removesuffix(".data")))
            into = {"eval": held_out.setdefault(key, _Texts())}
            yield from _of(key, data, into, named, compared=compared, learns=False)
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
    limit: str,
    *,
    compared: Collection[RewardFunction],
    learns: bool,
) -> Iterator[Found]:
    """What is wrong in these files of ``data``, by the names of their keys; their problems go ``into`` the texts of
    that name. ``limit``: the key of most tokens. ``compared``: the rewards that compare completions with the answers;
    ``learns``: answers are learnt."""
    try:
        data = local_files(data, section, into)
    except RLMegatronError as error:
        yield problem(str(error))
        return
    longer = []
    for name, found in into.items():
        path, key = getattr(data, name), f"{section}.{name}"
        most = min(ROWS, data.max_eval or ROWS) if name == "eval" else ROWS
        try:
            first, *others = files_in(path, key)
            rows = read_records(first, fields_of(data), key=key, limit=most)
            with_nulls = _add(rows, first, data, found)
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
    yield unchecked(f"whether prompts fit in {limit}")


def _odd_answers(
    rows: Sequence[Record], data: FileKeys, compared: Collection[RewardFunction], learns: bool
) -> Iterator[str]:
    """Of answers that are read otherwise than their file may mean them, the line and what is done with them."""
    if data.messages_field is not None:
        return
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


def _add(rows: Sequence[Record], file: Path, data: FileKeys, found: _Texts) -> list[str]:
    """The places of rows of JSON lines with a null argument. Raises DataError that names all bad rows."""
    bad, with_nulls = list[str](), list[str]()
    for line, row in enumerate(rows, 1):
        place = f"{file}:{line}"
        try:
            if data.messages_field is not None:
                in_structs = file.suffix == ".parquet"
                found.add(place, text := conversation_text(row, place, data, in_structs=in_structs))
                if not in_structs and _has_null_argument(text):
                    with_nulls.append(place)
            else:
                check_pair(row, place, data)
                found.add(place, row.texts[0])
        except DataError as error:
            bad.append(str(error))
    if bad:
        raise DataError(listed(bad))
    return with_nulls


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
