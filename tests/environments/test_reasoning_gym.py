"""reasoning-gym's problems, written to files, and its own scores of replies, against the package asked directly."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym_problems import EXECUTING, ReasoningGym
from write_tasks import run

from rl_megatron.agents.source import RequestBatcher
from rl_megatron.environments.protocol import EnvironmentStep, Reply
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.types import Prompt
from tests.completions import drawn
from tests.scripted_engine import Scripted, sampler, trajectories

package = pytest.importorskip("reasoning_gym", reason="make test-all PART=environments installs it, on Python 3.11")
NAMES = ("leg_counting", "family_relationships", "time_intervals")
CHAIN = ("name=chain_sum", "size=6", "held_out=4", "seed=5", "min_terms=2", "max_terms=3")


def written(folder: Path, *keys: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    run(folder, "reasoning_gym_problems:tasks", keys)
    train, held_out = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("train.jsonl", "eval.jsonl")
    )
    return train, held_out


def task(row: Mapping[str, Any]) -> Prompt:
    return Prompt(id="row", text=row["question"], token_ids=(1,), answer=row["answer"], meta=row)


def stepped(row: Mapping[str, Any], text: str, **options: Any) -> EnvironmentStep:
    async def play() -> EnvironmentStep:
        environment = ReasoningGym(**options)
        await environment.start(task(row), seed=0)
        message = {"role": "assistant", "content": text}
        return await environment.step(Reply(text=text, message=message, finish_reason="stop"))

    return asyncio.run(play())


def test_the_files_have_the_problems_of_disjoint_seeds(tmp_path: Path) -> None:
    train, held_out = written(tmp_path, *CHAIN)
    whole = package.create_dataset("chain_sum", seed=5, size=10, min_terms=2, max_terms=3)
    expected = [(entry["question"], entry["answer"]) for entry in whole]
    assert [(row["question"], row["answer"]) for row in (*train, *held_out)] == expected
    assert (len(train), len(held_out)) == (6, 4)


@pytest.mark.parametrize("name", NAMES)
def test_replies_get_the_packages_own_score(name: str, tmp_path: Path) -> None:
    (row, *_), _ = written(tmp_path, f"name={name}", "size=2", "held_out=1", "seed=3")
    dataset = package.create_dataset(name, seed=3, size=2)
    right = str(dataset[0]["answer"])
    answers = (right, "0", f"about {right}, I think", "(")
    steps = [stepped(row, f"<answer>7 7</answer> so <answer>{answer}</answer>") for answer in answers]
    assert [step.reward for step in steps] == [dataset.score_answer(answer, dataset[0]) for answer in answers]
    assert (stepped(row, right).reward, stepped(row, right, tag="").reward) == (
        dataset.score_answer(None, dataset[0]),
        dataset.score_answer(right, dataset[0]),
    )
    assert {step.observation for step in steps} == {None}


def test_a_trajectory_is_the_problem_and_one_turn(tmp_path: Path) -> None:
    train, _ = written(tmp_path, *CHAIN)
    right = train[0]["answer"]
    ours = sampler(
        RequestBatcher(Scripted(lambda text: right)),
        function="reasoning_gym_problems:ReasoningGym",
        options={"tag": ""},
    )
    longer = replace(ours, rollout=ours.rollout.model_copy(update={"max_prompt_tokens": 200}))
    (one, *_) = trajectories(asyncio.run(longer.groups(drawn([task(train[0])]))))
    assert (one.reward, one.stop, len(one.turns), one.metrics["own/answered"]) == (1.0, "done", 1, 1.0)


def test_rows_of_another_version_and_of_another_source_are_refused(tmp_path: Path) -> None:
    (row, *_), _ = written(tmp_path, *CHAIN)
    with pytest.raises(DataError, match=r"makes another problem of .*'index': 0.* write the tasks again"):
        stepped({**row, "question": "1 + 1?"}, "2")
    with pytest.raises(DataError, match="prompt 'row' has no field 'reasoning_gym'; write tasks"):
        stepped({"question": "1 + 1?", "answer": "2"}, "2")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("name=countdown",), "scorer of name='countdown' executes replies as Python"),
        (("name=chain_sums",), "refuses name='chain_sums'"),
        (("name=chain_sum", "min_terms=9", "max_terms=2"), "refuses name='chain_sum'.*AssertionError"),
        ((), "missing 1 required keyword-only argument: 'name'"),
        (("chain_sum",), "'chain_sum': write it as KEY=VALUE"),
        (("name=[",), "its value is no YAML"),
    ],
)
def test_keys_that_it_does_not_take_are_refused(keys: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, *keys)
    assert not list(tmp_path.iterdir())


def test_files_that_exist_stay(tmp_path: Path) -> None:
    written(tmp_path, *CHAIN)
    with pytest.raises(ConfigError, match=r"train.jsonl, .*eval.jsonl: is there already"):
        written(tmp_path, *CHAIN)


def test_the_data_sets_whose_scorers_execute_replies_are_those_that_are_refused() -> None:
    found = set()
    for name, (made, _) in package.factory.DATASETS.items():
        methods, text = ["score_answer"], ""
        for method in methods:
            source = inspect.getsource(getattr(made, method))
            text += source
            methods += [
                one for one in re.findall(r"self\.(\w+)\(", source) if one not in methods and hasattr(made, one)
            ]
        if re.search(r"(?<![\w.])(eval|exec)\((?!entry)|parse_expr\(", text):
            found.add(name)
    assert found == EXECUTING
