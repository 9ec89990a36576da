"""Generates docs/configuration.md from the schema: ``python -m rl_megatron.config.docs > docs/configuration.md``."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema
from typing_extensions import override

from rl_megatron.config.errors import every_key
from rl_megatron.config.rules import RULES
from rl_megatron.config.run import RunConfig
from rl_megatron.feature import feature_rules
from rl_megatron.rules import TEXT, Above, Below, Condition, Excludes, Needs, Not, On, OneOf, ReadIf, as_given
from rl_megatron.section import MAX_INTEGER, Section

Schema = Mapping[str, Any]  # a JSON schema, as pydantic makes it
Cells = tuple[str, ...]

_HEAD = """\
# Configuration

Every key with its default, generated from `rl_megatron/config/` (CONTRIBUTING.md says how).

A run's configuration is a file of `conf/` (`--config tiny_cpu`, or your own `--config my/run.yaml`), which holds only
what differs from the defaults below, changed by the overrides on the command line:

<!-- not run: minutes; the command is parsed and its configuration loaded -->
```sh
rl-megatron train algorithm=cispo learner.tp=2 train.steps=50
```

- `section.key=value` sets one key.
- `group=name` replaces a whole section by `conf/<group>/<name>.yaml`; the files of `conf/rollout/` start with
  `defaults: [_section_]` and change only the keys that they name. A group's file may set keys of other sections too, in
  `beside:`, as `algorithm=dapo` sets `rollout.dynamic_sampling`. Such a key wins over configuration files, and
  `section.key=value` wins over it. It stays when a later override chooses another row, or replaces its section by a
  file that lacks the key: over a file with `{algorithm: scalerl}`, `data=gsm8k` keeps `data.curriculum.retire_above`.
- `defaults: [base, {algorithm: gspo}]` in a YAML file starts from other files.
- A key that is set and that nothing would read is refused with the reason. Three settings instead unset keys of
  files below or of earlier overrides that they make useless: `model.path` unsets `model.tiny` and `model.cache_dir`,
  `warm_start.steps=0` the rest of `warm_start`, a number of epochs `train.steps`.
- Files are YAML 1.2: `3e-4` is a number, `off` and `no` are text, a key that is given twice is an error. Aliases
  (`*name`) are refused: write the value out. Keys of `slurm` that are text take a number as it is written, as
  `slurm.account=00123`.
- `null` means "not given".

One error names everything that is wrong: each key, its value, what is allowed and the nearest key. A run writes its
configuration, defaults included, to `runs/<name>/config.yaml`, which is a valid configuration itself.
"""
_WORDS = {"integer": "integer", "number": "number", "boolean": "`true` or `false`", "string": "text", "null": "`null`"}


class _Described(GenerateJsonSchema):
    """Adds the line under each key, which is read here alone: pydantic would read all at each start of a program."""

    @override
    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        found = super().model_schema(schema)
        for key, meaning in _meanings(schema["cls"]).items():
            if key in found["properties"]:
                found["properties"][key]["description"] = meaning
        return found


def render() -> str:
    """The page, with a table for each section."""
    schema = RunConfig.model_json_schema(schema_generator=_Described)
    sections = dict.fromkeys(_section("", schema, schema["$defs"]))  # each once, also of several kinds of data
    return f"{_HEAD}{''.join(sections)}"


def _section(name: str, section: Schema, definitions: Mapping[str, Schema]) -> Iterator[str]:
    """A heading, the section's description and its single-valued keys; then the sections inside it."""
    rows: list[Cells] = []
    inner: list[tuple[str, Schema]] = []
    for key, field in section["properties"].items():
        full = f"{name}.{key}" if name else key
        if "$ref" in field:
            inner.append((full, definitions[_target(field)]))
        elif "patternProperties" in field:  # a mapping from names of the user's to sections, or to values
            for value in field["patternProperties"].values():
                if "$ref" in value or "oneOf" in value:
                    choices = value.get("oneOf", [value])
                    inner += [(f"{full}.<name>", definitions[_target(choice)]) for choice in choices]
                else:
                    rows.append((f"`{full}.<name>`", _kind(value), "not there", _meaning(field)))
        elif "propertyNames" in field:  # a mapping of names of ours
            about, *told = re.split(r"\n *([a-z_, ]+): ", field["description"])
            meaning = {
                one: text for names, text in zip(told[::2], told[1::2], strict=True) for one in names.split(", ")
            }
            rows.append((f"`{full}`", "mapping", "below", _meaning({"description": about})))
            for one, value in field["default"].items():
                given = {**field["additionalProperties"], "default": value, "description": meaning[one]}
                rows.append(_row(f"{full}.{one}", given, required=False))
        elif "oneOf" in field:
            inner += [(full, definitions[_target(choice)]) for choice in field["oneOf"]]
        else:
            rows.append(_row(full, field, required=key in section.get("required", ())))
    tag = section["properties"].get("type", {}).get("const")
    title = f"`{name}`" + (f" with `type: {tag}`" if tag else "") if name else "The run"
    yield f"\n## {title}\n\n{_meaning(section)}\n"
    if rows:
        yield "\n" + _table(("key", "value", "default", "meaning"), rows)
    for full, section_inside in inner:
        yield from _section(full, section_inside, definitions)


def _meanings(section: type) -> dict[str, str]:
    """Returns the text under each key of a section and of its bases; the last declaration of a key counts."""
    found: dict[str, str] = {}
    for one in (one for one in reversed(section.__mro__) if issubclass(one, Section) and one is not Section):
        (written,) = ast.parse(inspect.getsource(one)).body
        assert isinstance(written, ast.ClassDef)
        for key, behind in pairwise([*written.body, ast.Pass()]):
            if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name):
                found.pop(key.target.id, None)
                match behind:
                    case ast.Expr(value=ast.Constant(value=str() as text)):
                        found[key.target.id] = text
    return found


def _table(head: Cells, rows: Sequence[Cells]) -> str:
    """A table in Markdown, without its last column if that is empty."""
    width = len(head) if any(row[-1] for row in rows) else len(head) - 1
    lines = [head[:width], ("---",) * width, *[row[:width] for row in rows]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("|  |\n", "| |\n")


def _row(key: str, field: Schema, *, required: bool) -> Cells:
    default = "required" if required else f"`{_plain(field['default'])}`"
    return f"`{key}`", _kind(field), default, " ".join((_meaning(field), *_rules_of(key))).strip()


def _rules_of(key: str) -> Iterator[str]:
    """Yields sentences from the table of rules on one key: what each value needs, excludes or is read with."""
    said = dict[str, dict[str, None]]()
    for rule in (*RULES, *feature_rules()):
        sides = list[tuple[Condition, Condition, str]]()
        match rule:
            case Excludes(one=one, other=other):
                sides = [(one, other, "not with"), (other, one, "not with")]
            case Needs(when=one, all=other):
                sides = [(one, other, "needs")]
            case ReadIf(keys=keys, any_of=any_of) if key in keys and all(map(_is_of_key, any_of)):
                said.setdefault("Read with", {})[" or ".join(map(_condition, any_of))] = None
        for ours, theirs, how in sides:
            own, others = _conditions(ours), _conditions(theirs)
            if [key] == [_key(one) for one in own] and others and all(map(_is_of_key, (*own, *others))):
                value = _condition(own[0]).strip("`").removeprefix(key).strip()
                together = " and ".join(dict.fromkeys(map(_condition, others)))
                said.setdefault(f"`{value}` {how}" if value else how.capitalize(), {})[together] = None
    yield from (f"{how} {', '.join(each)}." for how, each in said.items())


def _conditions(condition: Condition) -> tuple[On, ...]:
    return (condition,) if isinstance(condition, On) else condition


def _is_of_key(condition: On) -> bool:
    """True for a condition on the value of one key, not on a property that follows from several."""
    return condition.shown in (None, TEXT) and _key(condition) in every_key()


def _key(condition: On) -> str:
    """The key that a condition is of, as the page writes it."""
    return re.sub(r"^\w+s@", "environment.", condition.key).replace("*", "<name>")


def _condition(condition: On) -> str:
    """A condition as code."""
    match condition.test:
        case Not(value=None):
            said = ""
        case Not(value=value):
            said = f" ≠ {as_given(value)}"
        case OneOf(values=values):
            said = f"={' or '.join(map(as_given, values))}"
        case Above(limit=limit):
            said = f" > {limit}"
        case Below(limit=limit):
            said = f" < {limit}"
        case value:
            said = f"={as_given(value)}"
    return f"`{_key(condition)}{said}`"


def _meaning(described: Schema) -> str:
    """Returns the text under a key or a section on one line."""
    return " ".join(described.get("description", "").split()).replace("``", "`")


def _kind(field: Schema) -> str:
    """Returns the allowed values of a key in words."""
    if "anyOf" in field:
        return " or ".join(_kind(choice) for choice in field["anyOf"])
    if "$ref" in field:
        return "section"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("format") == "path":
        return "path"
    if field["type"] == "array":
        return f"list of {_kind(field['items'])}"
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    limits = ", ".join(f"{s} {field[name]}" for name, s in signs if field.get(name, MAX_INTEGER) != MAX_INTEGER)
    return f"{_WORDS[field['type']]} {limits}".strip()


def _plain(value: object) -> str:
    """A default as a user writes it on a command line; a text of several lines is quoted."""
    return value if isinstance(value, str) and "\n" not in value else json.dumps(value)


def _target(reference: Schema) -> str:
    return str(reference["$ref"]).rsplit("/", 1)[-1]


if __name__ == "__main__":
    print(render(), end="")
