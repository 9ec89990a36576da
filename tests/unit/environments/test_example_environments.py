"""The environments of docs/examples are loaded as a user's own are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.environments.registry import EnvironmentMaker, resolve_environment
from rl_megatron.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "environments"


@pytest.mark.parametrize(
    ("function", "option"),
    [
        ("nemo_gym_sessions:NemoGym", "url"),
        ("openenv_episodes:OpenEnv", "url"),
        ("reasoning_gym_problems:ReasoningGym", "tag"),
    ],
)
def test_an_example_is_an_environment_of_ones_own(function: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    made = resolve_environment(EnvironmentSection(function=function, options={option: "x"}))
    assert isinstance(made, EnvironmentMaker)
    assert made.options == {option: "x"}
    with pytest.raises(ConfigError, match=r"environment\.options\.other: "):
        resolve_environment(EnvironmentSection(function=function, options={option: "x", "other": "y"}))
