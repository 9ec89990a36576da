"""Words the schema's errors: the key as a user writes it, the value, what is allowed, and the nearest keys."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rl_megatron.config.removed import Removed, describe_replacement, removed_key
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import quote_start, truncate
from rl_megatron.section import Section

_MOST_KEY = 80  # characters of a key
_NAME = "<name>"  # the part of a key that stands for the user's names of a mapping's entries
_MOST_KEYS = 10  # keys of a section that are all listed; otherwise only the nearest
_ELSEWHERE = {"job": "algorithms, distillation too, are of job=rl, as algorithm=gkd (docs/sft.md)"}
"""For each key, where to find choices that are not its values."""


class _Tree(dict[str, "_Tree"]):
    """Names, each with those under it."""


class _Place(NamedTuple):
    """The place of an error; ``variants`` are the sections, by tag, if the tag has not chosen one of them."""

    key: str
    section: type[Section] | None
    variants: Mapping[str, type[Section]]
    others: Mapping[str, type[Section]]  # the sections, by tag, that could stand in place of this one

    @property
    def shown(self) -> str:
        """The key, cut to what fits a line."""
        return truncate(self.key, _MOST_KEY)


def explain_errors(errors: Sequence[ErrorDetails]) -> list[str]:
    """Returns one line for each bad key and for each broken rule between keys."""
    lines: list[str] = []
    allowed: dict[str, list[str]] = {}  # key=value -> what each alternative of the key's type allows
    for error in errors:
        place = _locate(error["loc"])
        if error["type"] == "value_error":
            lines += str(error["ctx"]["error"]).splitlines()
        elif (line := _structural(error, place)) is not None:
            lines.append(line)
        elif isinstance(error["input"], Mapping) and error["msg"][0].islower():  # a rule within a section
            lines.append(f"{place.shown}.{error['msg']}")
        elif text := describe_replacement(place.key, error["input"]):
            allowed[f"{place.shown}={quote_start(error['input'])}"] = [text]
        else:
            texts = allowed.setdefault(f"{place.shown}={quote_start(error['input'])}", [])
            texts.append(_allowed(error))
    return lines + [f"{shown}: must be {' or '.join(texts)}" for shown, texts in allowed.items()]


def closest_key(given: str, names: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the nearest of ``names``; empty if none is near."""
    return did_you_mean(difflib.get_close_matches(given, list(names), n=1))


def did_you_mean(names: Sequence[str]) -> str:
    """``" (did you mean 'x' or 'y'?)"``; empty if there are no names."""
    return f" (did you mean {' or '.join(map(repr, names))}?)" if names else ""


def is_removed_key(key: str) -> bool:
    """True if no section has the key. Entries of a mapping of single values, such as options, are never removed."""
    if removed_key(key) is not None:
        return True
    below = _tree()
    for part in key.split("."):
        if not below:
            return False
        inner = below.get(part, below.get(_NAME))
        if inner is None:
            return True
        below = inner
    return False


def section_expected(key: str, value: object) -> str:
    """The line for a single value where a section with keys of its own belongs."""
    place, shown = _locate(key.split(".")), truncate(key, _MOST_KEY)
    keys = _keys_of(place, "") if place.key == key else ""  # otherwise inside a section with a tag that ``key`` lacks
    return f"{shown}={quote_start(value)}: a section, not one value; set {shown}.<key>=<value>{keys}"


def _structural(error: ErrorDetails, place: _Place) -> str | None:
    """The line for a key that is unknown, missing or of the wrong kind; None if the value itself is wrong."""
    match error["type"]:
        case "extra_forbidden":
            given, name = f"{place.shown}={quote_start(error['input'])}", place.key.rpartition(".")[2]
            if row := removed_key(place.key):
                return f"{given}: no such key; {row.advice}"
            keys = _keys_of(place, name)
            return _key_of_other_variant(place, given) or f"{given}: no such key{_near_key(place)}{keys}"
        case "literal_error" if error["loc"][-1] == "[key]":  # a mapping with names that the package declares
            names = re.findall(r"'([^']*)'", error["ctx"]["expected"])
            return f"{place.shown}: no such key{closest_key(error['input'], names)}; keys: {', '.join(names)}"
        case "missing":
            return f"{place.shown}: required, but not given; add {place.shown}=<value>"
        case "model_type" | "model_attributes_type":
            return section_expected(place.key, error["input"])
        case "tuple_type" if (found := _switch(error["input"], place)) is not None:
            return f"{place.shown}={quote_start(error['input'])}: a list now; {found.advice}"
        case "dict_type":
            to_set = f"set {place.shown}.<name>=<value>, or {place.shown}.<name>.<key>=<value>"
            return f"{place.shown}={quote_start(error['input'])}: a section of names, not one value; {to_set}"
        case "union_tag_not_found":
            tag = error["ctx"]["discriminator"].strip("'")
            return f"{place.shown}.{tag}: required, but not given; one of: {', '.join(place.variants)}"
        case "union_tag_invalid":
            tag, choice = error["ctx"]["discriminator"].strip("'"), error["ctx"]["tag"]
            near = closest_key(choice, place.variants)
            return (
                f"{place.shown}.{tag}={quote_start(choice)}: no such choice{near}; one of: {', '.join(place.variants)}"
            )
    return None


def _switch(given: object, place: _Place) -> Removed | None:
    """The row of the first of the switches that a list has replaced, where a section of them is given."""
    return removed_key(f"{place.key}.{next(iter(given))}") if isinstance(given, Mapping) and given else None


def _allowed(error: ErrorDetails) -> str:
    """The allowed values in words, to follow "must be"."""
    match error["type"]:
        case "string_pattern_mismatch":
            return f"text that matches {error['ctx']['pattern']}"
        case "string_too_long":
            return f"text of at most {error['ctx']['max_length']} characters"
        case "string_too_short":
            return "text that is not empty"
        case "too_short":
            return f"at least {error['ctx']['min_length']} of them"
        case "too_long":
            return f"at most {error['ctx']['max_length']} of them"
        case "int_parsing_size":
            return "a valid integer of 64 bits"
        case "path_type":
            return "a path, as text"
        case "tuple_type":
            return "a list, for example [0, 1]"
    text = re.sub(r"^(Input|String|Value) should (be )?", "", error["msg"]).split(", unable to ")[0]
    if error["type"] == "string_type":
        return f"{text}; on the command line, quotes inside quotes make it one, as in \"'1'\""
    if error["type"] == "literal_error":
        near = closest_key(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
        elsewhere = _ELSEWHERE.get(".".join(map(str, error["loc"])))
        return text + (near or (f"; {elsewhere}" if elsewhere else ""))
    return text


def _key_of_other_variant(place: _Place, given: str) -> str | None:
    """The line for a key of another variant of the section; None if no variant has it."""
    name = place.key.rpartition(".")[2]
    elsewhere = any(name in section.model_fields for section in place.others.values())
    return f"{given}: {place.section.instead}" if place.section and elsewhere else None


def _near_key(place: _Place) -> str:
    """Suggestions for an unknown key: its name in other sections, or near names in its own section, or in any."""
    section, dot, name = place.key.rpartition(".")
    known: dict[str, list[str]] = {}  # last part -> whole keys
    for key in every_key():
        if key != place.key:  # another variant of the section may have it
            known.setdefault(key.rpartition(".")[2], []).append(key)
    if name not in known and place.section:
        beside = difflib.get_close_matches(name, place.section.model_fields, n=1)
        if beside:
            return did_you_mean([section + dot + beside[0]])
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    found = known[nearest[0]] if nearest else []
    return did_you_mean([key for key in found if _NAME not in key] or found)


def _keys_of(place: _Place, name: str) -> str:
    """The keys of the section, or if there are many, those nearest to ``name``."""
    if place.section is None:
        return ""
    names = list(place.section.model_fields)
    if len(names) <= _MOST_KEYS:
        return f"; keys: {', '.join(names)}"
    near = difflib.get_close_matches(name, names, n=5, cutoff=0.4) if name else []
    return f"; near: {', '.join(near)}" if near else f"; all {len(names)} keys are in docs/configuration.md"


@functools.cache
def every_key() -> Sequence[str]:
    """Every dotted key and section; entries of mappings are under ``<name>``."""
    return tuple(dict.fromkeys(_dotted(RunConfig)))


@functools.cache
def _tree() -> _Tree:
    """Every key, nested by its parts."""
    top = _Tree()
    for key in every_key():
        below = top
        for part in key.split("."):
            below = below.setdefault(part, _Tree())
    return top


def _dotted(section: type[Section], above: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield above + name
        inner, variants = _inside(field)
        named = f"{name}.{_NAME}" if get_origin(field.annotation) is Mapping else name
        for below in (inner, *variants.values()):
            if below is not None:
                yield from _dotted(below, f"{above}{named}.")


def _locate(loc: Iterable[int | str]) -> _Place:
    """The key and the section of pydantic's location, which also contains the tags of unions."""
    keys: list[str] = []
    section: type[Section] | None = RunConfig
    variants: Mapping[str, type[Section]] = {}
    others: Mapping[str, type[Section]] = {}
    is_name = False  # ``part`` is the name of a mapping's entry
    for part in map(str, loc):
        if is_name:
            keys.append(part)
            is_name = False
            continue
        if part in variants:
            section, others, variants = variants[part], {t: s for t, s in variants.items() if t != part}, {}
            continue
        if section is None:
            break  # an alternative of a union of single values
        if part != "[key]":  # "[key]" follows the mapping that it belongs to
            keys.append(part)
        if part in section.model_fields:
            field = section.model_fields[part]
            (section, variants), others = _inside(field), {}
            is_name = get_origin(field.annotation) is Mapping
    return _Place(".".join(keys), section, variants, others)


def _inside(field: FieldInfo) -> tuple[type[Section] | None, Mapping[str, type[Section]]]:
    """The section that a field holds, or None and its variants; (None, {}) for a single value."""
    kinds, tag = (field.annotation, *get_args(field.annotation)), field.discriminator
    for kind in kinds:
        for note in getattr(kind, "__metadata__", ()):  # a mapping's values are alternatives
            if isinstance(note, FieldInfo) and note.discriminator is not None:
                kinds, tag = get_args(kind.__origin__), note.discriminator
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    if isinstance(tag, str):
        return None, {get_args(s.model_fields[tag].annotation)[0]: s for s in sections}
    return (sections[0] if sections else None), {}
