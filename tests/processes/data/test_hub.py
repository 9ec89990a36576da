"""Data sets of the hub: read from its cache at a pinned commit; mixtures of sources over processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.errors import ConfigError
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.rollout.stream import Draw
from tests.unit.data.test_mixture import Engine, of

COMMIT = "0123456789abcdef" * 2 + "01234567"
KEYS = ["data.type=hub", "data.repo=org/sums", "data.train=data/train.jsonl", "data.eval=data/test.jsonl"]
IN_A_SET = ("repo=org/sums", "eval=a.jsonl", "revision=main")
READ = """
import json, sys
from rl_megatron.config.io import load_config
from rl_megatron.data.problems.prompts import first_problem, load_held_out, load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.errors import RLMegatronError
from tests.unit.data.test_prompts import byte_tokenizer

form = RowForm(tokenizer=byte_tokenizer(), max_tokens=99, on_long_prompt="fail")

def read(config):
    sets = config.eval.data_of_sets
    train, held_out = load_prompts(config.data, form, seed=0, on_leak="fail", sets=sets)
    said = [[one.text for one in train], [one.text for one in held_out], first_problem(config.data, "data").answer]
    for one in sets.values():
        said.append([one.text for one in load_held_out(one, form, seed=0)])
    return said

for keys in json.loads(sys.argv[1]):
    try:
        print(json.dumps(read(load_config("tiny_cpu", keys))))
    except RLMegatronError as error:
        print(json.dumps(str(error)))
"""


def read(home: Path, *runs: list[str]) -> list[Any]:
    """Texts or the error of each run's keys, in a process of its own: the hub's library reads where its cache is when
    it is imported."""
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", READ, json.dumps([[*KEYS, *keys] for keys in runs])]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_files_are_those_of_the_commit_in_the_cache_and_others_are_named(tmp_path: Path) -> None:
    """The cache has two commits, as the hub's library lays them out."""
    for commit, answer in ((COMMIT, "4"), (COMMIT[::-1], "5")):
        folder = tmp_path / "hub" / "datasets--org--sums" / "snapshots" / commit / "data"
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text(f'{{"question": "2+2=", "answer": "{answer}"}}\n')
        (folder / "test.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    keys = {"type": "hub", "repo": "org/sums", "revision": COMMIT[::-1], "eval": "data/test.jsonl"}
    keys |= {"train": "data/none.jsonl"}  # never read
    set_keys = [f"eval.sets.more.data.{name}={value}" for name, value in keys.items()]
    pinned = f"data.revision={COMMIT}"
    found, with_set, leak, missing = read(
        tmp_path,
        [pinned],
        [pinned, *set_keys],
        [pinned, *set_keys, "eval.sets.more.data.eval=data/train.jsonl", f"eval.sets.more.{pinned}"],
        [pinned, "data.train=data/other.jsonl"],
    )
    assert found == [["2+2="], ["1+1="], "4"]
    assert with_set == [*found, ["1+1="]]
    assert "train.jsonl:1: trained on, but held out in " in leak
    assert "train.jsonl:1 (eval.sets.more.data)" in leak
    assert missing.startswith(
        f"data.train=data/other.jsonl: not in the hub's cache here, and not to be had from org/sums at {COMMIT}"
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["data.revision=main"], "revision='main': a branch or a tag can move before a run is resumed or repeated"),
        ([f"data.revision={COMMIT[:12]}"], "give the commit that it is at now, 40 hexadecimal digits"),
        ([f"data.revision={COMMIT}", "data.repo=sums"], "data.repo='sums': must be text that matches"),
        (["data.digits=2"], "data.digits=2: data.type=hub reads files of data.repo"),
        ([], "data.revision: required, but not given"),
        (
            [f"data.revision={COMMIT}", *(f"eval.sets.x.data.{key}" for key in ("type=hub", *IN_A_SET))],
            "revision='main': a branch or a tag can move",
        ),
    ],
)
def test_what_is_no_pinned_data_set_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", [*KEYS, *keys])
    assert said in str(error.value)


# Mixtures of sources: order, resume, ids, rewards of each source, and what is refused.
def test_a_prompt_is_scored_by_its_sources_reward_and_its_limits() -> None:
    own = {"b": RewardSection(function="math_verify"), "c": RewardSection(function="tests.never:here", on_error=-2.0)}
    sections = {name: one for name, one in own.items() if name != "c"}

    async def fails(*_: object) -> list[Any]:
        raise KeyError("price")

    function = resolve_rewards(RewardSection(), sections)
    function._own["c"] = fails  # type: ignore[attr-defined]
    sampler = RolloutSampler(
        engine=cast(Any, Engine()),
        reward_function=function,
        decode=lambda _: r"\frac{1}{2}",
        rollout=RolloutSection(group_size=2, max_new_tokens=9),
        reward=RewardSection(),
        stop_token_ids=(),
        seed=0,
        source_rewards=own,
    )
    prompts = [replace(one, answer="0.5") for name in "abc" for one in of(name, 1)]
    drawn = [Draw(ordinal=i, prompt=prompt, batch=1) for i, prompt in enumerate(prompts)]
    answered = asyncio.run(sampler.groups(drawn))
    assert [one.rewards for one in answered] == [(0.0, 0.0), (1.0, 1.0), (-2.0, -2.0)]
