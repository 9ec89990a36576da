"""The table of rules: each kind of row and of condition, with the lines that the checker gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel, Field

from rl_megatron.config.docs import render
from rl_megatron.config.io import load_config
from rl_megatron.config.rules import RULES
from rl_megatron.feature import feature_rules
from rl_megatron.rules import (
    SET,
    TEXT,
    UNSET,
    Above,
    Below,
    CheckFunction,
    Excludes,
    Has,
    Needs,
    Not,
    On,
    OneOf,
    ReadIf,
    Rule,
    broken,
    found_keys,
)
from tests.small_models import TINY_MOE

REPO = Path(__file__).resolve().parents[2]
LINES = ("Iterator[str]", "list[str]", "Iterator[tuple[str, str]]")


class Entry(BaseModel):
    size: int = 1
    most: int = 4
    label: str | None = None


class Lora(BaseModel):
    rank: int | None = None
    alpha: float = 2.0


class Config(BaseModel):
    engine: str = "local"
    steps: int = 10
    rate: float = 0.5
    lora: Lora = Lora()
    entry: Entry | None = None
    entries: Mapping[str, Entry] = Field(default_factory=dict)
    names: tuple[Entry, ...] = ()

    @property
    def served(self) -> bool:
        return self.engine != "local"

    @property
    def by_section(self) -> dict[str, Entry]:
        return {f"entries.{name}.own": one for name, one in self.entries.items()}

    @property
    def asks(self) -> str | None:
        return f"steps={self.steps} of {self.engine}" if self.steps > 10 else None


def lines(rule: Rule, **given: object) -> list[str]:
    return broken([rule], Config.model_validate(given))


def refuses(condition: On, **given: object) -> bool:
    return bool(lines(Excludes(one=condition, why="why", fix="fix"), **given))


@pytest.mark.parametrize(
    ("test", "broken_by", "kept_by"),
    [
        (20, 20, 10),
        (Not(20), 10, 20),
        (OneOf((20, 30)), 30, 10),
        (Above(20), 21, 20),
        (Below(20), 19, 20),
        (Above("rate"), 1, 0),
        (Below("rate"), 0, 1),
    ],
)
def test_a_test_of_a_value(test: object, broken_by: int, kept_by: int) -> None:
    assert refuses(On("steps", test), steps=broken_by)
    assert not refuses(On("steps", test), steps=kept_by)


def test_null_is_unset_and_neither_above_nor_below_a_number() -> None:
    rank = {"lora": {"rank": 0}}
    assert refuses(On("lora.rank", UNSET))
    assert not refuses(On("lora.rank", UNSET), **rank)
    assert refuses(On("lora.rank"), **rank)
    assert not refuses(On("lora.rank", SET))
    assert not any(refuses(On("lora.rank", test)) for test in (Above(-1), Below(1)))
    assert refuses(On("entry.size", UNSET))  # of a section that is null
    assert not refuses(On("entry.size", 1))
    assert not refuses(On("nothing.size", UNSET))  # of a section that this configuration does not have


def test_choices_that_exclude_each_other_are_named_with_their_values_the_reason_and_the_fix() -> None:
    rule = Excludes(one=On("engine", "vllm"), other=(On("lora.rank"), On("steps", Above(5))), why="no", fix="set it")
    assert lines(rule, engine="vllm", lora={"rank": 8}) == ["engine=vllm with lora.rank=8 and steps=10: no; set it"]
    assert not lines(rule, engine="vllm", lora={"rank": 8}, steps=5)
    assert not lines(rule, engine="sglang", lora={"rank": 8})
    limit = Excludes(one=On("steps", Below("lora.rank")), why="w", fix="f")
    assert lines(limit, lora={"rank": 80}) == ["steps=10 with lora.rank=80: w; f"]


def test_a_choice_needs_all_of_its_others_and_names_those_that_it_lacks() -> None:
    rule = Needs(when=On("engine", "vllm"), all=(On("lora.rank"), On("steps", Above(5))), why="no", fix="set it")
    assert lines(rule, engine="vllm") == ["engine=vllm with lora.rank=null: no; set it"]
    assert lines(rule, engine="vllm", steps=1) == ["engine=vllm with lora.rank=null and steps=1: no; set it"]
    assert not lines(rule, engine="vllm", lora={"rank": 8})
    assert not lines(rule)
    of_any = Needs(when=On("engine", "vllm"), all=On("entries.*.label"), why="no", fix="set it")
    assert lines(of_any, engine="vllm") == ["engine=vllm with no entries.*.label: no; set it"]
    assert not lines(of_any, engine="vllm", entries={"a": {}, "b": {"label": "x"}})


def test_each_entry_of_a_mapping_or_list_is_a_line_and_conditions_of_a_row_are_of_the_same_entry() -> None:
    rule = Excludes(one=On("entries.*.size", Above("entries.*.most")), other=On("entries.*.label"), why="w", fix="f")
    entries = {"a": {"size": 5}, "b": {"label": "x"}, "c": {"size": 6, "label": "y"}, "d": {"size": 7, "label": "z"}}
    assert lines(rule, entries=entries) == [
        "entries.c.size=6 with entries.c.most=4 and entries.c.label=y: w; f",
        "entries.d.size=7 with entries.d.most=4 and entries.d.label=z: w; f",
    ]
    in_list = Excludes(one=On("names.*.size", 5), other=On("names", Has(Entry(size=7))), why="w", fix="f")
    assert lines(in_list, names=[{"size": 7}, {"size": 5}]) == ["names.1.size=5 with names={size: 7}: w; f"]
    assert not lines(in_list, names=[{}, {"size": 5}])
    needs = Needs(when=On("entries.*.size", Above(4)), all=On("entries.*.label"), why="w", fix="f")
    assert lines(needs, entries=entries) == ["entries.a.size=5 with entries.a.label=null: w; f"]


def test_entries_that_are_named_by_their_sections() -> None:
    rule = Excludes(one=On("by_section@size", 5), other=On("by_section@label", UNSET), why="w", fix="f")
    found = lines(rule, entries={"a": {"size": 5}, "b": {"size": 5, "label": "x"}})
    assert found == ["entries.a.own.size=5 with entries.a.own.label=null: w; f"]


def test_what_is_derived_from_a_key_is_named_by_the_key() -> None:
    served = On("served", True, shown="engine")
    assert lines(Excludes(one=served, why="w", fix="f"), engine="vllm") == ["engine=vllm: w; f"]
    assert lines(Needs(when=On("steps"), all=served, why="w", fix="f")) == ["steps=10 with engine=local: w; f"]
    asks = Excludes(one=On("asks", SET, TEXT), other=served, why="w", fix="f")
    assert lines(asks, engine="vllm", steps=11) == ["steps=11 of vllm with engine=vllm: w; f"]
    assert not lines(asks, engine="vllm")


def test_a_set_key_that_nothing_reads_is_named_with_its_default_and_once() -> None:
    unread: list[Rule] = [
        ReadIf(keys=("lora", "rate"), any_of=(On("engine", "vllm"), On("steps", Above(10))), why="nothing reads it"),
        ReadIf(keys=("lora.alpha",), any_of=(On("lora.rank"),), why="nothing adapts"),
    ]
    given = Config(rate=2.0, lora=Lora(alpha=0.25))
    because = "does nothing: with engine=local and steps=10 nothing reads it; leave it out, or set it to its default,"
    assert broken(unread, given) == [f"lora.alpha=0.25 {because} 2", f"rate=2 {because} 0.5"]
    assert broken(unread, Config(rate=2.0, lora=Lora(alpha=0.25), steps=11)) == [
        "lora.alpha=0.25 does nothing: with lora.rank=null nothing adapts; leave it out, or set it to its default, 2"
    ]
    assert not broken(unread, Config(rate=2.0, lora=Lora(rank=8), engine="vllm"))
    assert not broken(unread, Config())  # a default is not set
    each = ReadIf(keys=("entries.*.most", "by_section@size"), any_of=(On("entries.*.label"),), why="nothing labels")
    entries = {"a": Entry(most=8), "b": Entry(most=8, size=3, label="x")}
    assert [one.split(" ")[0] for one in broken([each], Config(entries=entries))] == ["entries.a.most=8"]


def test_a_function_is_a_row_and_equal_lines_are_one() -> None:
    def problems(config: Config) -> Iterator[str]:
        yield f"steps={config.steps}"

    assert broken([CheckFunction(problems), CheckFunction(problems)], Config()) == ["steps=10"]


def test_rows_are_checked_where_they_say_and_see_the_shape_of_the_model() -> None:
    @dataclass
    class Shape:
        num_experts: int

    of_shape = Needs(when=On("steps"), all=On("shape.num_experts", Above(0)), why="w", fix="f", where="shape")
    rules = [of_shape, Excludes(one=On("steps"), why="of a job", fix="f", where="job")]
    assert broken(rules, Config()) == []
    assert broken(rules, Config(), "shape", Shape(0)) == ["steps=10 with shape.num_experts=0: w; f"]
    assert broken(rules, Config(), "shape", Shape(4)) == []
    assert broken(rules, Config(), "job") == ["steps=10: of a job; f"]
    plain = SimpleNamespace(steps=10)  # any object with these attributes is a configuration
    assert broken([of_shape], plain, "shape", Shape(0)) == ["steps=10 with shape.num_experts=0: w; f"]


def conditions(rule: Rule) -> Iterator[On]:
    for name in ("one", "other", "when", "all", "any_of"):
        given = getattr(rule, name, ())
        yield from (given,) if isinstance(given, On) else given


def paths(rule: Rule) -> Iterator[str]:
    yield from getattr(rule, "keys", ())
    for one in conditions(rule):
        yield one.key
        yield from (path for path in (one.shown, getattr(one.test, "limit", None)) if isinstance(path, str))


def test_each_path_of_a_row_is_of_a_configuration() -> None:
    """A path that no configuration has would match nothing, so its row would never refuse anything."""
    keys = ["data.type=mixture", "data.sources.a.type=files", "data.sources.a.train=t", "data.sources.a.eval=e"]
    environment = ["data.sources.a.environment.function=calculator", "data.sources.a.environment.template=plain"]
    teacher = ["algorithm=gkd", "algorithm.kl.teachers.t.path=tests"]
    sets = ["eval.sets.a.samples=1", "eval.sets.a.reward.function=length"]
    configs = [
        load_config("tiny_cpu", ["algorithm.routing_replay=r3"]),
        load_config("tiny_cpu", ["data=mixture", *keys[1:], "warm_start.steps=0", *environment]),
        load_config(
            "tiny_cpu", ["data=mixture", *keys[1:], "warm_start.steps=0", "data.sources.a.reward.function=length"]
        ),
        load_config("tiny_cpu", [*teacher, *sets]),
    ]
    shape = TINY_MOE
    wrong = {
        path
        for rule in (*RULES, *feature_rules())
        for path in paths(rule)
        if path != TEXT and not any([*found_keys(_Root(config, shape), path, {})] for config in configs)
    }
    assert not wrong


def test_the_page_of_keys_has_the_rows_that_name_each_alone() -> None:
    lines = render().splitlines()
    for key, said in (
        ("model.name", "Needs `model.path`."),
        ("eval.at_once", "Not with `eval.mode=blocking`."),
        ("train.lr_min", "Read with `train.lr_decay ≠ none`."),
        ("checkpoint.every", "`=0` not with `checkpoint.keep_best > 0`."),
        ("weights.push", "`=adapters` needs `learner.lora.rank`, `rollout.engine=vllm or sglang`."),
        ("eval.sets.<name>.min_p", "`> 0` not with `rollout.server.draft_tokens > 0`."),
        ("reward.steps", "Read with `algorithm.credit=turn`."),
    ):
        (line,) = {line for line in lines if line.startswith(f"| `{key}` |")}
        assert said in line, line


def test_few_functions_word_a_problem_beside_the_rows() -> None:
    """Of the files with problems of keys, a function counts that words one itself: it returns lines and has a formatted
    text, or in preflight calls ``problem``. One that only collects what others find does not, and no row does."""
    found = list[str]()
    config = [REPO / "rl_megatron" / "config" / f"{name}.py" for name in ("checks", "reads", "learner_checks", "rules")]
    for path in (*config, *sorted((REPO / "launcher" / "preflight").glob("*.py"))):
        for one in ast.walk(ast.parse(path.read_text())):
            if isinstance(one, ast.FunctionDef):
                parts = [*ast.walk(one)]
                lines = one.returns is not None and ast.unparse(one.returns) in LINES
                words = any(isinstance(part, ast.JoinedStr) for part in parts)
                calls = any(isinstance(part, ast.Name) and part.id == "problem" for part in parts)
                if (lines and words) if path in config else calls:
                    found.append(f"{path.stem}.{one.name}")
    assert "checks.problems_of_batches" in found
    assert "sizes.size_problems" in found
    assert len(found) <= 90, found


class _Root:
    """A configuration beside a model's shape, as the checker sees both."""

    def __init__(self, config: object, shape: object) -> None:
        self._config, self.shape = config, shape

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)
