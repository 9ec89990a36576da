"""Keys, values and commands that are no longer there are answered by one table."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.__main__ import _COMMANDS, app
from rl_megatron.config.errors import has_gone
from rl_megatron.config.io import load_config
from rl_megatron.config.removed import COMMANDS, REMOVED, VALUES, is_removed, removed_key, without_removed
from rl_megatron.config.resume import flat
from rl_megatron.errors import ConfigError


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_answered_with_what_to_do(key: str) -> None:
    named = key.replace("*", "one")
    assert has_gone(named)
    row = removed_key(named)
    assert row is not None
    assert row.name is None or not has_gone(row.name)
    mixture = ["data.type=mixture", "data.sources.one.type=arithmetic"] if key.startswith("data.sources.") else []
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", [*mixture, f"{named}=0.123456"])
    assert row.advice in str(caught.value) or "one value, without keys" in str(caught.value)


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_dropped_where_it_says_what_happens_now(key: str) -> None:
    """As in config.yaml of an older version's run, which names every key."""
    named = key.replace("*", "one")
    for value in REMOVED[key].fixed:
        tree: dict[str, object] = {"kept": 1}
        inner = tree
        *sections, leaf = named.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})  # type: ignore[assignment]
        inner[leaf] = value
        assert not any(found == named for found, _ in flat(without_removed(tree)))
        assert is_removed(named, value)
    assert not is_removed(named, "another")


@pytest.mark.parametrize(("key", "value"), VALUES)
def test_a_removed_value_is_answered_with_another(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="must be ") as caught:
        load_config("tiny_cpu", [f"{key}={value}"])
    assert f"{key}={value!r}: must be {VALUES[key, value]}" in str(caught.value)


def test_a_removed_command_is_answered_with_what_to_do() -> None:
    assert not COMMANDS.keys() & _COMMANDS.keys()
    for name, advice in COMMANDS.items():
        result = CliRunner().invoke(app, [name, "x"])
        assert result.exit_code == 2
        assert advice.split()[0] in result.output


def test_the_configuration_of_a_run_of_0_3_0_loads() -> None:
    """config_0.3.0.yaml is the config.yaml that 0.3.0 wrote for its default run, every key of that version in it."""
    written = Path(__file__).with_name("config_0.3.0.yaml")
    assert load_config(str(written), []) == load_config("tiny_cpu", [])
    with pytest.raises(ConfigError, match=r"weights\.verify=False: no such key; receivers compare"):
        load_config(str(written), ["weights.verify=false"])
