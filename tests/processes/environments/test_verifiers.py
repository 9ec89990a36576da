"""Environments of both generations of the verifiers package, in interpreters of their own, and processes that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import verifiers_episodes as adapter
import verifiers_worker

from rl_megatron.agents.source import EnvironmentSampler, RequestBatcher
from rl_megatron.environments.protocol import AgentFailed
from rl_megatron.environments.registry import Agent
from rl_megatron.errors import ConfigError, EnvironmentFailure
from rl_megatron.types import Prompt, Trajectory
from tests.completions import drawn
from tests.environments.served import EXAMPLES, PACKAGES, interpreter
from tests.scripted_engine import Scripted, sampler, trajectories

LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}
GENERATIONS = [("verifiers-0.1", "twice_first", {"problems": 5}), ("verifiers", "twice_second", LOCAL)]


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}:{EXAMPLES}")


def prompt(which: dict[str, Any]) -> Prompt:
    return Prompt(id="p", text="0+1=", token_ids=(1,), answer="1", meta={"verifiers": which})


def source(engine: Any, python: str, **section: Any) -> EnvironmentSampler:
    agent = Agent(partial(adapter.play, python=python))
    return sampler(engine, agent, function="verifiers_episodes:play", group_size=2, **section)


def played(ours: EnvironmentSampler, prompts: Sequence[Prompt]) -> list[Trajectory]:
    return trajectories(asyncio.run(ours.groups(drawn(prompts))))


def fake(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("name", "id", "args"), GENERATIONS)
def test_an_environments_turns_and_rewards_are_the_trajectorys(name: str, id: str, args: dict[str, Any]) -> None:
    python, engine = interpreter(name), Scripted(lambda text: "2" if "sure?" in text else "7")
    train, held_out = map(list, adapter.tasks(python=python, id=id, size=2, held_out=1, args=args))
    assert [row["question"] for row in (*train, *held_out)] == ["0+1=", "1+1=", "2+1="]
    found = played(source(RequestBatcher(engine), python), [prompt(row["verifiers"]) for row in train])
    assert [one.reward for one in found] == [0.0, 0.0, 1.0, 1.0]  # it answers 2 in the end
    for one in found:
        (row,) = one.chains
        assert [turn.text for turn in one.turns] == ["7", "2"]
        sampled = [row.token_ids[turn.start : turn.stop].tolist() for turn in row.turns]
        assert all(ids in engine.sampled.values() for ids in sampled)
    if name == "verifiers-0.1":
        assert {(one.metrics["own/right"], one.metrics["own/num_turns"]) for one in found} == {(0, 2), (1, 2)}


def test_what_the_package_raises_is_named_and_a_limit_ends_a_trajectory() -> None:
    python = interpreter("verifiers-0.1")
    with pytest.raises(ConfigError, match=r"verifiers in .*no_such_thing"):
        adapter.tasks(python=python, id="no_such_thing", size=2, held_out=1)
    with pytest.raises(ConfigError, match="twice_first has 4 tasks, fewer than size=4 and held_out=1"):
        adapter.tasks(python=python, id="twice_first", size=4, held_out=1)
    ours = source(RequestBatcher(Scripted(lambda text: "1")), python, max_turns=1)
    one, _ = played(ours, [prompt({"id": "twice_first", "args": {}, "index": 0})])
    assert (one.stop, one.reward, len(one.turns)) == ("turns", 0.0, 1)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo broken >&2; exit 3", "ended with status 3; it said last: broken"),
        ("read line; echo no JSON; exec sleep 60", "ended with status -9"),
        ("read line; echo '{\"call\": 99}'; exec sleep 60", "ended with status -9"),
        ("read line; echo '{\"call\": 0}'; exec sleep 60", "returned None, which is no finite number"),
        ('read line; echo \'{"call": 0, "reward": NaN}\'; exec sleep 60', "returned nan, which is no finite number"),
    ],
)
def test_a_process_that_dies_or_lies_is_named(script: str, said: str, tmp_path: Path) -> None:
    ours = source(Scripted(lambda text: "1"), fake(tmp_path, script))
    single = sampler(Scripted(lambda text: "1"), ours.factory, function="verifiers_episodes:play", group_size=1)
    with pytest.raises(EnvironmentFailure, match=f"'verifiers_episodes:play': prompt 'p'.*{said}"):
        played(single, [prompt({"id": "any", "args": {}, "index": 0})])


def test_a_process_outlives_the_trajectory_that_started_it(tmp_path: Path) -> None:
    python = fake(tmp_path, 'n=0; while read line; do echo "{\\"call\\": $n, \\"reward\\": 1}"; n=$((n+1)); done')
    ours = source(Scripted(lambda text: "1"), python)
    for _ in range(2):
        (one,) = asyncio.run(ours.groups(drawn([prompt({"id": "any", "args": {}, "index": 0})])))
        assert one.reason == "nothing_sampled"  # the script asks for no turn
    made = adapter._running[python]
    assert next(made._numbers) == 4
    assert not made.ended.is_set()
    assert made._process is not None
    made._process.kill()


async def test_what_a_process_writes_beside_its_answers_takes_no_room(tmp_path: Path) -> None:
    def in_files() -> int:
        return sum(one.stat().st_size for one in Path("/proc/self/fd").iterdir() if one.is_file())  # deleted ones, too

    much = "head -c 4000000 /dev/zero | tr '\\0' x >&2"
    script = f"read line; {much}; echo '{{\"call\": 0}}'; read line; echo bye >&2; exit 3"
    made, before = adapter.Interpreter(fake(tmp_path, script)), in_files()
    assert await asyncio.wait_for(made.ask({}), 30.0) == {"call": 0}
    assert in_files() - before < 1_000_000
    with pytest.raises(adapter.InterpreterFailed, match=r"status 3; it said last: x{900,1000}bye$"):
        await asyncio.wait_for(made.ask({}), 30.0)


async def test_a_process_that_leaves_others_is_named_before_they_end(tmp_path: Path) -> None:
    left = tmp_path / "left"
    made = adapter.Interpreter(fake(tmp_path, f"sleep 60 >&2 & echo $! >{left}; read line; echo broken >&2; exit 3"))
    with pytest.raises(adapter.InterpreterFailed, match="ended with status 3; it said last: broken"):
        await asyncio.wait_for(made.ask({}), 30.0)
    os.kill(int(left.read_text()), signal.SIGKILL)


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/no/python did not start; it said last: .*No such file"):
        adapter.tasks(python="/no/python", id="any", size=1, held_out=1)


def test_a_process_that_hangs_is_given_up_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_CANCEL_LIMIT", 0.01)
    python = fake(tmp_path, "exec sleep 60")
    adapter.interpreter_of(python)  # or its start may take all of the time
    with pytest.raises(EnvironmentFailure, match=r"did not end within environment.seconds=0\.2"):
        played(
            source(Scripted(lambda text: "1"), python, seconds=0.2, step_seconds=0.1),
            [prompt({"id": "a", "args": {}, "index": 0})],
        )
    hung = adapter._running[python]
    assert hung.ended.wait(10)
    assert adapter.interpreter_of(python) is not hung


def test_a_process_that_reads_nothing_is_killed_whatever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_CANCEL_LIMIT", 0.01)
    made = adapter.Interpreter(fake(tmp_path, "exec sleep 60"))
    long = {"args": "a" * (1 << 20)}  # more than a pipe holds

    def write() -> None:
        with pytest.raises(adapter.InterpreterFailed, match="ended with status -9"):
            asyncio.run(made.ask(long))

    writing = threading.Thread(target=write, daemon=True)

    async def cancel() -> None:
        asking = asyncio.ensure_future(made.ask({}))
        await asyncio.sleep(0)
        writing.start()
        while not made._lock.locked():
            await asyncio.sleep(0.001)
        asking.cancel()

    threading.Thread(target=lambda: asyncio.run(cancel()), daemon=True).start()
    assert made.ended.wait(20.0)
    writing.join()


async def test_a_call_that_is_cancelled_before_it_begins_is_answered() -> None:
    made, call = adapter.Interpreter(sys.executable), {"id": "a", "args": {}, "count": 1}
    assert made._process is not None
    process = made._process
    process.send_signal(signal.SIGSTOP)
    early = asyncio.ensure_future(made.ask(call))
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.wait({early})
    process.send_signal(signal.SIGCONT)
    with pytest.raises(AgentFailed, match="No module named 'verifiers'"):
        await asyncio.wait_for(made.ask(call), 30.0)
    left = set(made._waiting)
    process.kill()
    assert not left  # else it is killed after the limit, with the calls of other trajectories


def test_a_reward_that_is_no_json_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        async def play(self, index: int, base_url: str, key: str) -> dict[str, Any]:
            return {"reward": np.float32(1), "metrics": {}}

    monkeypatch.setattr(verifiers_worker, "loaded", lambda *given: Made())
    call = {"call": 0, "id": "a", "args": {}, "index": 0, "base_url": "", "api_key": "k"}
    said = asyncio.run(verifiers_worker.answered(call))
    assert said == {"error": "TypeError: Object of type float32 is not JSON serializable"}
