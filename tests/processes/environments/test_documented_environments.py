"""The environment and the function of docs/environments.md lead trajectories, as they stand there."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rl_megatron.agents.source import RequestBatcher
from rl_megatron.config.sections.reward import EnvironmentSection
from rl_megatron.environments.protocol import Reply
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
    (tmp_path / "my_env.py").write_text("\n".join((*BLOCKS, "def plain(task, model): ...")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_env", raising=False)


def calculates(text: str) -> str:
    return f"!{text.rpartition(':')[2]}" if ":" in text else "?6*7"


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("script", "reward", "stop", "bad"),
    [(calculates, 1.0, "done", 0.0), (lambda _: "?6+7", 0.0, "turns", 2.0), (lambda _: "?1234*7", 0.0, "turns", 2.0)],
)
def test_the_environment(script: Callable[[str], str], reward: float, stop: str, bad: float) -> None:
    ours = sampler(
        RequestBatcher(Scripted(script)), function="my_env:Calculator", options={"max_length": 4}, max_turns=2
    )
    played = trajectories(asyncio.run(ours.groups(drawn([TASK] * 4))))
    assert {(one.reward, one.stop, len(one.turns)) for one in played} == {(reward, stop, 2)}
    assert {one.metrics.get("own/bad_calls", 0.0) for one in played} == {bad}
    assert {one.turns[1].reward for one in played} == {1.0 if reward else None}


@pytest.mark.usefixtures("written")
async def test_its_demonstration_and_the_tool_of_a_chat_template() -> None:
    environment = importlib.import_module("my_env").Multiply()
    texts = [environment.demonstration(TASK, seed) for seed in (1, 3)]
    assert texts == [["!42"], ["?6*7", ":42", "!42"]]
    assert [tool["function"]["name"] for tool in (await environment.start(TASK, 0)).tools] == ["multiply"]
    for arguments, content in (('{"a": 6, "b": 7}', "42"), ('{"a": 6}', "error: KeyError('b')")):
        call = {"id": "c", "function": {"name": "multiply", "arguments": arguments}}
        step = await environment.step(Reply(text="", message={"tool_calls": [call]}, finish_reason="stop"))
        assert list(step.observation.messages) == [{"role": "tool", "tool_call_id": "c", "content": content}]
    ended = await environment.step(Reply(text="It is 42", message={}, finish_reason="stop"))
    assert (ended.reward, ended.observation) == (1.0, None)


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
        await ours.wait_closed()
    assert {(one.stop, one.reward) for one in played} == {ended}
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # of another test
            assert "fullmatch" not in " ".join(one.cmdline())


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("name", ["solve", "ask"])
def test_the_function(name: str) -> None:
    ours = sampler(RequestBatcher(Scripted(lambda text: "42" if "sure" in text else "41")), function=f"my_env:{name}")
    assert {(one.reward, len(one.turns)) for one in trajectories(asyncio.run(ours.groups(drawn([TASK]))))} == {(1.0, 2)}


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"function": "kalkulator"}, "'kalkulator' is unknown; did you mean 'calculator'"),
        ({"function": "my_env:Calculators"}, "'Calculators' of my_env is not there; did you mean 'Calculator'"),
        ({"function": "my_env:EnvironmentStep"}, "is a class without start, step, score, close; give it"),
        ({"function": "my_env:solve", "max_observation_tokens": 9}, "environment.max_observation_tokens=9: .* and has"),
        ({"function": "my_env:Calculator", "options": {"lots": 3}}, "environment.options.lots: got an unexpected"),
        ({"function": "my_env:plain"}, "it is a plain function; define it by `async def`"),
        ({"function": "my_env:solve", "options": {"lots": 3}}, "environment.options.lots: got an unexpected"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_environment(EnvironmentSection(**given))
