"""Which layers a learner uses."""

from __future__ import annotations

import pytest

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.named import NAMED
from rl_megatron.options.implementation import uses_transformer_engine


@pytest.mark.parametrize(
    ("given", "fused"), [({"cp": 2}, False), ({"cp": 1}, True), ({"cp": 2, "dtype": "bfloat16"}, True)]
)
def test_auto_takes_transformer_engines_where_they_have_an_attention_kernel(
    given: dict[str, object], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # it is installed
    learner = LearnerSection.model_validate({"device": "cuda", **given})
    assert uses_transformer_engine(learner, NAMED["qwen3-30b-a3b"]) is fused
