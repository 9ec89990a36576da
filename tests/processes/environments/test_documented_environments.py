"""The environment and the function of docs/environments.md lead trajectories, as they stand there."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from pathlib import Path

import psutil
import pytest

from rl_megatron.agents.source import Waves
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.environments.registry import resolve_environment
from rl_megatron.errors import ConfigError
from rl_megatron.types import Prompt
from tests.completions import drawn
from tests.scripted_engine import Scripted, sampler, trajectories

TEXT = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
TASK = Prompt(id="p", text="6*7=", token_ids=(1,), answer="42")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_env.py").write_text("\n".join(BLOCKS))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_env", raising=False)


@pytest.mark.usefixtures("written")
def test_the_environment() -> None:
    ours = sampler(Waves(Scripted(lambda text: "1")), function="my_env:Guess", options={"most": 1}, max_turns=2)
    played = trajectories(asyncio.run(ours.groups(drawn([TASK] * 4))))
    assert {(one.reward, one.stop, len(one.turns)) for one in played} == {(1.0, "done", 1), (0.0, "turns", 2)}
    assert {one.metrics["own/wrong"] for one in played if not one.reward} == {2.0}
    assert {one.turns[0].reward for one in played if one.reward} == {1.0}


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("text", "limit", "ended"),
    [("a+", 20.0, ("done", 1.0)), ("b", 20.0, ("done", 0.0)), ("(a+)+b", 0.5, ("environment_error", -1.0))],
)
async def test_what_would_keep_the_lock_is_given_up(text: str, limit: float, ended: tuple[str, float]) -> None:
    """(a+)+b tries all 2^39 ways to part 40 letters; its process is gone when the group is there."""
    ours = sampler(Scripted(lambda _: text), function="my_env:Matches", step_seconds=limit, on_error=-1.0)
    async with asyncio.timeout(30):
        played = trajectories(await ours.groups(drawn([TASK])))
        await ours.closed()
    assert {(one.stop, one.reward) for one in played} == {ended}
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # of another test
            assert "fullmatch" not in " ".join(one.cmdline())


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("name", ["solve", "ask"])
def test_the_function(name: str) -> None:
    ours = sampler(Waves(Scripted(lambda text: "42" if "sure" in text else "41")), function=f"my_env:{name}")
    assert {(one.reward, len(one.turns)) for one in trajectories(asyncio.run(ours.groups(drawn([TASK]))))} == {(1.0, 2)}


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"function": "kalkulator"}, "'kalkulator' is unknown; did you mean 'calculator'"),
        ({"function": "my_env:Gues"}, "'Gues' of my_env is not there; did you mean 'Guess'"),
        ({"function": "my_env:EnvironmentStep"}, "is a class without start, step, score, close; give it"),
        ({"function": "my_env:solve", "max_observation_tokens": 9}, "environment.max_observation_tokens=9: .* and has"),
        ({"function": "my_env:Guess", "options": {"lots": 3}}, "environment.options.lots: got an unexpected"),
        ({"function": "my_env:solve", "options": {"lots": 3}}, "environment.options.lots: got an unexpected"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_environment(EnvironmentSection(**given))
