"""YAML in and out, by YAML 1.2's core schema, not PyYAML's 1.1: ``3e-4`` is a number, ``off`` and ``no`` are text.

A number keeps its spelling for a key whose type is text, as an account 00123 or a version 12.10.

The reader bounds its input, so that no text makes it slow or large: it refuses aliases, deep nesting and long files. A
key is text and is given once.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from rl_megatron.errors import ConfigError

MAX_DEPTH = 16  # sections inside sections
MAX_FILE_BYTES = 1 << 18
_MAX_DIGITS = 4000  # digits of an integer; Python reads and writes 4300
_CORE_SCHEMA = {  # tag: spelling, first characters
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
}
_PREFIX = "tag:yaml.org,2002:"


def read(path: Path) -> object:
    """Returns a YAML file's content. Raises ConfigError that says why it cannot be read, without the file's name."""
    try:
        with path.open("rb") as stream:
            given = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # the second: NUL in its name
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(given) > MAX_FILE_BYTES:
        raise ConfigError(f"holds more than {MAX_FILE_BYTES} bytes; a configuration is far shorter")
    try:
        return copy.deepcopy(_file_of(given.decode()))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot be read: {_where(error)}") from error


def scalar(text: str) -> object:
    """Returns an override's value: quoted text, or otherwise the whole text as one plain YAML scalar.

    Never a list, a mapping or a comment, so that ``data.prompt_template={prompt} #`` needs no escapes.
    """
    if text[:1] not in {'"', "'"} and not any(re.fullmatch(spelling, text) for spelling, _ in _CORE_SCHEMA.values()):
        return text
    try:
        value = _parsed(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) else value


def text_problem(text: str) -> str | None:
    """Returns why a text cannot be a value, because it could not be saved or name a file; None if it can."""
    if "\0" in text:
        return "text must not contain a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "text must be UTF-8"
    return None


def write(tree: object) -> str:
    """Returns YAML that ``read`` reads back."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


@functools.lru_cache(maxsize=32)
def _file_of(text: str) -> object:
    """Caches ``_parsed``: the cells of a study, or a test's configurations, come from the same few files."""
    return _parsed(text)


def _parsed(text: str) -> object:
    """The parsed text. Raises YAMLError for any fault, and nothing else."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (ValueError, OverflowError) as error:  # an escape beyond Unicode
        raise yaml.YAMLError(str(error)) from error


def _where(error: Exception) -> str:
    """The fault and its place in the file, on one line."""
    mark = getattr(error, "problem_mark", None)
    at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    text = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"{at}{text:.300}"


class _Spelled:
    """A number that is printed as it is spelled in the file or the override, where Python would spell it otherwise."""

    spelling: str

    def __repr__(self) -> str:
        return self.spelling


class _SpelledInteger(_Spelled, int): ...


class _SpelledFloat(_Spelled, float): ...


class _Loader(yaml.SafeLoader):
    """Knows only the core schema's tags."""

    yaml_constructors: ClassVar = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_PREFIX) in {*_CORE_SCHEMA, "str", "seq", "map"}
    }
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            problem = f"*{event.anchor:.40} is an alias, which is refused; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels deep", problem_mark=mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix(_PREFIX)
        if isinstance(node, yaml.ScalarNode) and kind in _CORE_SCHEMA:
            if not re.fullmatch(_CORE_SCHEMA[kind][0], node.value):  # its tag is written out
                raise yaml.constructor.ConstructorError(None, None, f"not a value of !!{kind}", node.start_mark)
            if kind == "int" and len(node.value) > _MAX_DIGITS:
                problem = f"a number of more than {_MAX_DIGITS} digits"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        value = super().construct_object(node, deep)
        if kind in {"int", "float"} and str(value) != node.value:
            value = _SpelledInteger(value) if kind == "int" else _SpelledFloat(value)
            value.spelling = node.value
        return value

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text: str = super().construct_scalar(node)
        if problem := text_problem(text):
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        out: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in out:
                problem = f"key {key[:60]!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            out[key] = self.construct_object(value_node, deep=True)
        return out


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML folds these line ends in other styles, and reads a space in their place
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar(f"{_PREFIX}str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_multi_representer(int, _Dumper.represent_int)
_Dumper.add_multi_representer(float, _Dumper.represent_float)
_Loader.yaml_implicit_resolvers = {}
for _tag, (_spelling, _first) in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _tag, re.compile(rf"(?:{_spelling})\Z"), _first)
