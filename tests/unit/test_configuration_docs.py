"""docs/configuration.md matches the schema, key by key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rl_megatron.config.docs import _Described, _section, render
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import ArithmeticRunData, CurriculumSection, FileRunData, HubRunData, MixtureData
from rl_megatron.section import EntryName, Section

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "configuration.md"
ROW = re.compile(r"^\| `([\w.]+)` \| (.+?) \| (?:`(.*)`|required) \|(?: (.*?) ?\|)?$", re.MULTILINE)


class Named(Section):
    """A mapping with two lines under it."""

    names: Mapping[EntryName, str] = Field(default_factory=dict)
    """Values by name, with
    ``more`` below."""


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a config."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def test_the_page_is_current() -> None:
    command = "python -m rl_megatron.config.docs > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == render(), f"run {command}"


def test_every_key_is_there_with_its_default(tmp_path: Path) -> None:
    shown = {key: default for key, _, default, _ in ROW.findall(render()) if not key.startswith("data.")}
    assert sorted(shown) == sorted(k for k, _ in flat(RunConfig().model_dump()) if not k.startswith("data."))
    empty = tmp_path / "empty.yaml"
    empty.touch()
    for key, default in shown.items():
        assert load_config(str(empty), [f"{key}={default}"]) == RunConfig(), key


def test_all_kinds_of_data_are_there() -> None:
    keys = [key for key, *_ in ROW.findall(render()) if key.startswith("data.")]
    kinds = (ArithmeticRunData, FileRunData, HubRunData, MixtureData)
    single = [f"data.{name}" for kind in kinds for name in kind.model_fields if name not in {"sources", "curriculum"}]
    assert [key for key in keys if not key.startswith("data.curriculum.")] == single
    assert [key for key in keys if key not in single] == [
        f"data.curriculum.{key}" for key in CurriculumSection.model_fields
    ]
    assert {f"`data.sources.<name>.{key}`" for key in ("digits", "train", "weight", "reward")} <= set(
        re.findall(r"^\| (`[^`]+`)", render(), re.MULTILINE)
    )


def test_every_key_whose_name_does_not_say_it_has_a_meaning() -> None:
    silent = [key for key, _, _, meaning in ROW.findall(render()) if not meaning]
    assert [key for key in silent if not key.startswith("model.tiny.") and key != "data.type"] == []


def test_values_are_said_in_words() -> None:
    kinds = {key: kind for key, kind, *_ in ROW.findall(render())}
    assert kinds["data.digits"] == "integer ≥ 1, ≤ 6"
    assert kinds["rollout.top_p"] == "number > 0, ≤ 1"
    assert kinds["learner.etp"] == "integer ≥ 1 or `null`"
    assert kinds["reward.on_error"] == "`fail`, `drop` or number"
    assert kinds["learner.device"] == "`cpu`, `cuda`"
    assert kinds["model.path"] == "path or `null`"


def test_the_row_of_a_mapping_is_one_line() -> None:
    schema = Named.model_json_schema(schema_generator=_Described)
    page = "".join(_section("made", schema, {}))
    assert "| `made.names.<name>` | text | not there | Values by name, with `more` below. |\n" in page
