"""A feature from another package: one file and its entry point; what Megatron is given by shipped options."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_megatron import feature
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.feature import Feature, Keywords
from rl_megatron.learner import keywords as module
from rl_megatron.weights.layouts.learner import Elements, Rank
from tests.small_models import TINY_MOE
from tests.unit.options.given import CONF, RECIPES, STORED, cases, keywords
from tools.planner.terms import memory

REPO = Path(__file__).parents[3]
FILE = '''
from rl_megatron.feature import Feature
from rl_megatron.feature import Keywords
from rl_megatron.section import NonNegative, Section


class ResidualKeys(Section):
    residual_copies: NonNegative = 0
    """Copies in float32 of what runs past the layers."""


def problems(learner, shape):
    if learner.residual_copies and learner.pp > 1:
        yield f"learner.residual_copies={learner.residual_copies} with learner.pp={learner.pp}; set learner.pp=1"


def megatron(learner, shape):
    return Keywords(model={"fp32_residual_connection": learner.residual_copies > 0})


def memory(learner, shape, rank, terms):
    return {**terms, "residual": 4.0 * sum(rank.inputs) * learner.residual_copies}


FEATURE = Feature(
    name="residual",
    active=lambda learner: learner.residual_copies > 0,
    keys={"learner": ResidualKeys},
    problems=problems,
    megatron=megatron,
    memory=memory,
    changes={"residual": "lower learner.residual_copies"},
    metrics=(("residual/copies", "", "copies in float32 of what runs past the layers"),),
)
'''
SAYS = """
import json
import pickle
from rl_megatron.config.docs import render
from rl_megatron.config.io import load_config
from rl_megatron.config.resume import fixed
from rl_megatron.errors import ConfigError
from rl_megatron.feature import features
from rl_megatron.models.named import NAMED
from rl_megatron.observability.metrics import documented
from tools.planner.memory import check_memory, footprints

GIVEN = ["model.path=/models/given", "learner.residual_copies=3", "learner.pp=1"]

def refused(keys, look=lambda config: None):
    try:
        look(load_config("qwen3_30b_a3b", [*GIVEN, *keys]))
    except ConfigError as error:
        return str(error)

shape = NAMED["qwen3-30b-a3b"]
config = load_config("qwen3_30b_a3b", GIVEN)
assert pickle.loads(pickle.dumps(config)) == config  # as ranks are sent it
print(json.dumps({
    "listed": list(features())[-1],
    "documented": [line for line in render().splitlines() if "residual_copies" in line],
    "row": documented("residual/copies").meaning,
    "last key": list(config.model_dump()["learner"])[-1],
    "fixed": fixed(config).get("learner.residual_copies"),
    "refused": refused(["learner.pp=2"]),
    "misspelled": refused(["learner.residual_copied=1"]),
    "keyword": features()["residual"].megatron(config.learner, shape).model,
    "bytes": footprints(config, shape)[0].terms["residual"],
    "advice": refused(["learner.residual_copies=1000"], lambda c: check_memory(c, shape)),
}))
"""


def package(folder: Path, text: str) -> Path:
    """A folder to put on PYTHONPATH, as an installer leaves a package of one file."""
    (folder / "residual_feature.py").write_text(text)
    told = folder / "residual_feature-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: residual-feature\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[rl_megatron.features]\nresidual = residual_feature:FEATURE\n")
    return folder


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{folder}:{REPO}", "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Feature:
    spec = importlib.util.spec_from_file_location("residual_feature", package(tmp_path, FILE) / "residual_feature.py")
    assert spec is not None
    assert spec.loader is not None
    loaded: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    monkeypatch.setattr(feature, "features", lambda: {"residual": loaded.FEATURE})
    found: Feature = loaded.FEATURE
    return found


def test_megatron_is_given_its_keyword_beside_the_others(residual: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = feature.with_features("learner")(LearnerSection).model_validate({"residual_copies": 1})
    given = keywords(TINY_MOE, learner, installed=False)["DecoderConfig"]
    assert given.pop("fp32_residual_connection") is True
    monkeypatch.setattr(feature, "features", dict)
    assert given == keywords(TINY_MOE, LearnerSection(), installed=False)["DecoderConfig"]


def test_keywords_and_keys_of_others_are_refused(residual: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = replace(residual, megatron=lambda *_: Keywords(model={"bf16": True}))
    monkeypatch.setattr(feature, "features", lambda: {"residual": twice})
    with pytest.raises(ConfigError, match="'residual' gives megatron-core bf16, which is given already; drop one"):
        module.keywords(LearnerSection(), TINY_MOE)
    section = feature.with_features("learner")(LearnerSection)
    with pytest.raises(ConfigError, match=r"the feature 'residual' brings learner\.residual_copies, which is there"):
        feature.with_features("learner")(section)


def test_bytes_without_advice_are_refused(residual: Feature, monkeypatch: pytest.MonkeyPatch) -> None:
    more = replace(residual, memory=lambda learner, shape, rank, terms: {**terms, "more": 1.0})
    monkeypatch.setattr(feature, "features", lambda: {"residual": more})
    none = Elements(dense=0, experts=0)
    rank = Rank(
        stage=0,
        parameters=none,
        trained_parameters=none,
        matrices=none,
        tokens=1,
        layers=(),
        inputs=(),
        longest=1,
        largest=1,
    )
    with pytest.raises(ConfigError, match="'residual' holds bytes for 'more', which its `changes` do not have"):
        memory(LearnerSection(), TINY_MOE, rank)


# Megatron is given, and a GPU must hold, what it was and did before: every recipe in conf/ and many layouts beside.
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
