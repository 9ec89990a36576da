"""Megatron is given, and a GPU must hold, what it was and did before: every recipe in conf/ and many layouts beside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.options.given import CONF, RECIPES, STORED, cases

BEFORE: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))


def test_every_recipe_is_among_the_cases() -> None:
    assert sorted(RECIPES) == sorted(path.stem for path in CONF.glob("*.yaml"))


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return {name: json.loads(json.dumps(value)) for name, value in cases()}


def test_the_cases_are_those_that_are_stored(now: dict[str, Any]) -> None:
    assert now.keys() == BEFORE.keys()


@pytest.mark.parametrize("name", BEFORE)
def test_keywords_bytes_and_refusals_are_those_of_before(name: str, now: dict[str, Any]) -> None:
    assert now[name] == BEFORE[name]
