"""A set of problems in an environment of its own, beside a run without one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.build.model import starting_folder
from launcher.preflight.own_code import check
from launcher.preflight.subject import PreflightContext
from rl_megatron.config.beside import message_prompt_keys
from rl_megatron.config.io import load_config
from rl_megatron.environments.protocol import EnvironmentStep, Observation, Reply, Transcript
from rl_megatron.errors import ConfigError
from rl_megatron.evaluation.results import read_results
from rl_megatron.evaluation.sets import EvalSetSamples
from rl_megatron.types import Prompt
from tests.unit.launcher.commands import status_of

KEYS = ("data.num_eval=12", "rollout.max_new_tokens=6", "warm_start.steps=0", f"reward.function={__name__}:right")
ODD = (f"function={__name__}:Odd", "template=plain", "max_turns=2", "max_tokens=20", "min_turn_tokens=2")
SET = ("limit=8", "samples=4", "temperature=1.0", "max_new_tokens=5", "pass_at=2")
OWN = tuple(f"eval.sets.odd.{key}" for key in (*SET, *(f"environment.{one}" for one in ODD)))


class Odd:
    """Two turns, which are right where the sum of their bytes is odd."""

    async def start(self, task: Prompt, seed: int) -> Observation:
        return Observation(content=task.text)

    async def step(self, reply: Reply) -> EnvironmentStep:
        return EnvironmentStep(observation=Observation(content=f"{len(reply.text)}:"))

    async def score(self, transcript: Transcript) -> float:
        return float(sum(sum(reply.text.encode()) for reply in transcript.replies) % 2)

    async def close(self) -> None:
        return None


class Fails(Odd):
    """Makes a file, which only its slow end removes."""

    async def start(self, task: Prompt, seed: int) -> Observation:
        self.file = Path(f"held-{seed}")
        self.file.touch()
        return await super().start(task, seed)

    async def score(self, transcript: Transcript) -> float:
        raise RuntimeError("the judge is down")

    async def close(self) -> None:
        await asyncio.sleep(0.3)
        self.file.rename(self.file.with_suffix(".gone"))


def right(prompt: Prompt, completions: Sequence[object], texts: Sequence[str]) -> list[float]:
    return [1.0 for _ in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return starting_folder(load_config("tiny_cpu", [f"model.cache_dir={tmp_path_factory.mktemp('models')}"]))


def evaluated(model: Path, name: str, *keys: str) -> dict[str, EvalSetSamples]:
    assert status_of("eval", str(model), "--name", name, *KEYS, *keys) == 0
    return {
        of: replace(one.measured, seconds=0.0) for of, one in read_results(Path("eval") / f"{name}.json").sets.items()
    }


def test_figures_are_those_of_its_configuration(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of_set = evaluated(model, "set", "eval.sets.single.limit=8", *OWN)
    keys = [key for key in KEYS if not key.startswith("reward")]
    whole = [*(f"environment.{key}" for key in ODD), *(f"eval.sets.odd.{key}" for key in SET)]
    monkeypatch.setattr(f"{__name__}.KEYS", keys)
    assert of_set["odd"] == evaluated(model, "whole", *whole)["odd"]
    assert 0 < sum(of_set["odd"].right) < 32
    assert 5 < of_set["odd"].length <= 10  # of two turns
    assert of_set["single"].right == (1,) * 8


def test_samples_without_a_turn_are_shown_beside_the_figures(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = ("eval.sets.single.limit=8", "eval.sets.odd.environment.seconds=1e-6")
    assert evaluated(model, "late", *OWN, *keys)["odd"].errors == 32
    shown = capsys.readouterr().out
    assert re.search(r"odd .*mean@4 .*0\.0000.* 32 of 32 ", shown)
    assert re.search(r"single .*mean@1 .*1\.0000.* 0 of 8 ", shown)
    log = (tmp_path / "eval" / "log.txt").read_text()
    assert "has no turn: eval.sets.odd.environment.seconds=1e-06 passed before its first; raise it" in log


def test_failed_ones_are_closed_before_it_ends(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fails = (f"eval.sets.odd.environment.function={__name__}:Fails", "eval.sets.odd.environment.on_error=0.0")
    assert evaluated(model, "set", *OWN, *fails)["odd"].errors == 32
    assert len(list(tmp_path.glob("held-*.gone"))) == len(list(tmp_path.glob("held-*"))) == 32


def test_the_preflight_finds_it_and_names_its_key(model: Path) -> None:
    keys = [*KEYS, *OWN, f"model.path={model}"]
    said = [one.text for one in check(PreflightContext(load_config("tiny_cpu", keys), for_job=False))]
    assert said[0] == f"environment '{__name__}:Odd' makes environments"
    assert said[1].startswith(f"reward '{__name__}:right' gives 1")
    config = load_config("tiny_cpu", [*keys, "eval.sets.odd.environment.function=odd"])
    found = [one.text for one in check(PreflightContext(config, for_job=False)) if one.kind == "problem"]
    assert [text.partition(";")[0] for text in found] == ["eval.sets.odd.environment.function='odd' is unknown"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["eval.sets.other.environment.max_turns=3"], "eval.sets.other.environment without a function: name one"),
        (["eval.sets.odd.reward.function=length"], "eval.sets.odd.reward with eval.sets.odd.environment: the env"),
        (["eval.sets.odd.environment.min_turn_tokens=99"], "eval.sets.odd.environment.min_turn_tokens=99 with"),
        (["eval.sets.odd.environment.thinking=keep"], "template=plain with eval.sets.odd.environment.thinking=keep"),
        (
            ["eval.sets.odd.data.type=files", "eval.sets.odd.data.eval=x", "eval.sets.odd.data.chat_template=true"],
            r"eval.sets.odd.environment.function=.* with eval.sets.odd.data.chat_template=true: the environment",
        ),
        (
            ["rollout.server.replicas=1", "eval.mode=background", "eval.at_once=4"],
            "eval.at_once=4 and eval.sets.odd.environment.function=",
        ),
    ],
)
def test_what_it_is_not_combined_with_is_refused_by_its_key(more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("tiny_cpu", [*KEYS, *OWN, *more])


def test_engines_have_room_for_its_trajectories() -> None:
    assert load_config("tiny_cpu", [*KEYS, *OWN, "eval.sets.odd.environment.max_tokens=70"]).longest_completion == 70
    assert load_config("tiny_cpu", [*KEYS, *OWN]).max_sampled == 6


CHAT, PLAIN = (("environment.function=calculator", f"environment.template={one}") for one in ("chat", "plain"))
OWN_FILES = ("eval.sets.odd.data.type=files", "eval.sets.odd.data.eval=odd.jsonl")


@pytest.mark.parametrize(
    ("keys", "begun"),
    [
        ((), set()),
        (PLAIN, set()),
        (CHAT, {"data"}),
        ((*CHAT, *OWN_FILES), {"data", "eval.sets.odd.data"}),
        ((*CHAT, *OWN_FILES, *(f"eval.sets.odd.{key}" for key in PLAIN)), {"data"}),
        ((*CHAT, *(f"eval.sets.odd.{key}" for key in PLAIN)), set()),  # it would lose earlier messages of one data
        ((*OWN_FILES, *(f"eval.sets.odd.{key}" for key in CHAT)), {"eval.sets.odd.data"}),
        ((*CHAT, *OWN_FILES, *(f"eval.sets.plain.{key}" for key in PLAIN)), {"eval.sets.odd.data"}),
        ((*CHAT, *(f"eval.sets.a.{key}" for key in PLAIN), *OWN_FILES), {"eval.sets.odd.data"}),
    ],
)
def test_prompts_may_be_lists_where_all_readers_begin_with_messages(keys: tuple[str, ...], begun: set[str]) -> None:
    files = ("data.type=files", "data.train=a.jsonl", "data.eval=b.jsonl", "warm_start.steps=0")
    assert message_prompt_keys(load_config("tiny_cpu", [*files, *keys])) == begun
