"""Mixtures of sources: order, resume, ids, rewards of each source, and what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.preflight.checks import preflight
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.resume import fixed
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import source_weights
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.data.samples import single_turns
from rl_megatron.errors import CheckpointError, ConfigError, DataError
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.rollout.stream import Draw, GroupResult, PendingPrompt, RolloutBatch
from rl_megatron.training.jobs.rl import source_row
from rl_megatron.types import Completion, Prompt, Span
from tests.completions import completion
from tests.documents import blocks
from tests.unit.data.test_prompts import byte_tokenizer

REPO = Path(__file__).resolve().parents[3]


def of(name: str, count: int) -> list[Prompt]:
    return [Prompt(id=f"{name}/{i}", text="", token_ids=(i,), answer="", source=name) for i in range(count)]


LED = ("data.sources.sums.environment.function=calculator", "warm_start.steps=0")
MIXED = [*of("a", 5), *of("b", 3)]
WEIGHTS = {"a": 3.0, "b": 1.0}


def mixture(prompts: Sequence[Prompt] = MIXED, **weights: float) -> PromptStream:
    return PromptStream(prompts, seed=7, weights=weights or WEIGHTS)


def shuffled(name: str, count: int, epoch: int) -> list[str]:
    return [f"{name}/{i}" for i in np.random.default_rng([7, epoch]).permutation(count)]


def test_sources_follow_each_other_by_weight_and_each_has_epochs_of_its_own() -> None:
    """3 : 1 by hand: the first prompt of a is due at 4/3, of b at 4, the next of a at 8/3 and 4, after b in no tie."""
    taken = [prompt.id for prompt in mixture().next_prompts(16)]
    a, b = ([id_ for id_ in taken if id_.startswith(name)] for name in "ab")
    assert "".join(id_[0] for id_ in taken) == "aaab" * 4
    assert a == [*shuffled("a", 5, 0), *shuffled("a", 5, 1), *shuffled("a", 5, 2)][:12]
    assert b == [*shuffled("b", 3, 0), *shuffled("b", 3, 1)][:4]
    alone = PromptStream(of("a", 5), seed=7).next_prompts(23)
    assert mixture(of("a", 5), a=0.5).next_prompts(23) == alone
    assert [p.id for p in alone[:10]] == [*shuffled("a", 5, 0), *shuffled("a", 5, 1)]


def test_other_weights_count_anew_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    before = mixture()
    seen, after = [prompt.id for prompt in before.next_prompts(6)], mixture(a=1.0, b=1.0)
    with caplog.at_level(logging.WARNING):
        after.restore(before.state())
    assert "the weights of data.sources were {'a': 3.0, 'b': 1.0} and are {'a': 1.0, 'b': 1.0}: after 6" in caplog.text
    taken = [prompt.id for prompt in after.next_prompts(6)]
    assert "".join(id_[0] for id_ in taken) == "ababab"
    a = [id_ for id_ in seen + taken if id_.startswith("a")]  # a source goes on where it was
    assert a == [*shuffled("a", 5, 0), *shuffled("a", 5, 1)][: len(a)]


def test_another_file_of_a_source_is_refused() -> None:
    state = mixture().state()
    other = [*of("a", 5), *of("b", 2), replace(MIXED[-1], answer="4")]
    with pytest.raises(CheckpointError, match=r"^data\.sources\.b: the checkpoint was made with 3 training prompts of"):
        mixture(other).restore(state)
    with pytest.raises(CheckpointError, match=r"made with the sources a, b, but the data has a$"):
        mixture(of("a", 5), a=1.0).restore(state)
    with pytest.raises(CheckpointError, match="made with one source of prompts"):
        mixture().restore(PromptStream(MIXED, seed=7).state())
    stream = mixture()
    for prompt in MIXED[:4]:
        stream.exclude(prompt)
    assert [prompt.id for prompt in stream.next_prompts(8)][:4] == ["a/4"] * 3 + [shuffled("b", 3, 0)[0]]
    with pytest.raises(DataError, match="no prompts of source 'a' are left to train on: none of 5 can be sampled"):
        stream.exclude(MIXED[4])


def written(folder: Path, **rows: Sequence[str]) -> None:
    for name, questions in rows.items():
        lines = (json.dumps({"question": one, "answer": "4"}) for one in questions)
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mixture of a file, with a reward of its own, and generated sums; the working directory is its folder."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, math=["2+2?", "1+3?"], held=["5-1?"])
    path = tmp_path / "mixed.yaml"
    path.write_text(
        "defaults: [tiny_cpu]\n"
        "data:\n"
        "  type: mixture\n"
        "  sources:\n"
        "    math: {type: files, train: math.jsonl, eval: held.jsonl, weight: 3, reward: {function: final_number}}\n"
        "    sums: {type: arithmetic, digits: 1, num_eval: 4}\n"
    )
    return path


def loaded(path: Path, *overrides: str) -> RunConfig:
    return load_config(str(path), list(overrides))


def test_prompts_have_their_source_and_its_name_in_their_ids(yaml: Path) -> None:
    config = loaded(yaml)
    form = RowForm(tokenizer=byte_tokenizer(), max_tokens=99, on_long_prompt="fail")
    train, held_out = load_prompts(config.data, form, seed=config.seed)
    assert [p.id for p in train[:2]] == ["math/math:1", "math/math:2"]
    assert {p.source for p in train[2:]} == {"sums"}
    assert all(p.id == f"sums/{p.text[:-1]}" for p in train[2:])
    assert [p.source for p in held_out] == ["math", *["sums"] * 4]


def test_a_mixture_is_saved_checked_and_its_weights_may_change(yaml: Path, tmp_path: Path) -> None:
    config = loaded(yaml, "data.sources.sums.weight=0.5")
    save_resolved(config, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml"), []) == config
    keys = fixed(config)
    assert "data.sources.math.train" in keys
    assert not any(key.endswith(".weight") and key.startswith("data") for key in keys)
    found = preflight(config)
    found.raise_problems()
    assert "reward 'final_number' gives 1 for the answer itself" in found.describe()
    assert "reward 'exact_match' gives 1 for the answer itself" in found.describe()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.sources.math.weight=0"], "data.sources.math.weight=0: must be greater than 0"),
        (["data.sources.math.weight=-1"], "data.sources.math.weight=-1: must be greater than 0"),
        (["data.sources.a/b.type=arithmetic"], "data.sources.a/b='a/b': must be text that matches ^[a-z][a-z0-9_]*$"),
        (["data.sources.math.type=file"], "data.sources.math.type='file': no such choice (did you mean 'files'?)"),
        (["data.sources.math.digits=2"], "data.sources.math.digits=2: a source with type=files reads problems"),
        (["data.sources.math.wait=2"], "data.sources.math.wait=2: no such key (did you mean"),
        (["data.sources.math.max_eval=x"], "data.sources.math.max_eval='x': must be"),
        (["data.sources.files.weight=1"], "files.type: required, but not given; one of: arithmetic, files, hub"),
        (["data.sources.math.fields.rejected=bad"], "math.fields.rejected=bad: job=rl does not read it, job=dpo or jo"),
        (["data.digits=2"], "data.digits=2: data.type=mixture has these keys in each of data.sources"),
        (["data.sources.math.reward.length.max_tokens=5"], "data.sources.math.reward.length.max_tokens=5 does nothing"),
        (
            ["data.sources.sums.reward.function=length", "reward.timeout_seconds=5"],
            "reward.timeout_seconds=5 does nothing: every source of data.sources has its own reward or env",
        ),
        (
            [
                *("data.sources.sums.reward.function=length", "reward.timeout_seconds=5"),
                *("eval.sets.own.data.type=arithmetic", "eval.sets.own.reward.function=length"),
            ],
            "every source of data.sources and every set of eval.sets with its own data has its own reward",
        ),
        (["data.sources.sums.environment.max_turns=1"], "data.sources.sums.environment.function=null: a source's"),
        ([*LED, "warm_start.steps=2"], "data.sources.sums.environment.function=calculator with warm_start.steps=2: a"),
        ([*LED, "data.sources.sums.reward.function=length"], "function=calculator with data.sources.sums.reward={func"),
        ([*LED, "algorithm.overlong_buffer=2", "algorithm.overlong_factor=1"], "length, which differs by source"),
        (
            [*LED, "data.sources.math.environment.function=guess", "data.sources.math.chat_template=true"],
            "data.sources.math.environment.function=guess with data.sources.math.chat_template=true: the environment",
        ),
    ],
)
def test_what_a_mixture_refuses(yaml: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(yaml, *overrides)
    assert said in str(error.value)


def test_the_runs_reward_judges_a_set_with_its_own_data(yaml: Path) -> None:
    """Its prompts are of no source, so the sources' rewards are not theirs."""
    keys = ("data.sources.sums.reward.function=exact_match", "reward.function=final_number")
    config = loaded(yaml, *keys, "eval.sets.other.data.type=arithmetic")
    judge = resolve_rewards(config.reward, config.own_rewards)
    numbers = {"token_ids": np.array([1], np.int32), "logprobs": np.zeros(1, np.float32)}
    said = Completion(**numbers, finish_reason="stop", spans=(Span(0, 0),))  # type: ignore[arg-type]
    (scored,) = asyncio.run(judge(Prompt(id="x", text="4+1=", token_ids=(1,), answer="5"), [said], ["It is 5"]))
    assert scored.total == 1


def test_the_mixture_of_the_documents(tmp_path: Path) -> None:
    (text,) = [one.text for one in blocks(REPO / "docs" / "data.md", "yaml") if "sources" in one.text]
    path = tmp_path / "mixed.yaml"
    path.write_text(text)
    assert source_weights(loaded(path).data) == {"math": 3.0, "sums": 1.0}


def test_two_sources_of_one_name_and_none_are_refused(yaml: Path) -> None:
    text = yaml.read_text()
    yaml.write_text(text.replace("    sums:", "    math:"))
    with pytest.raises(ConfigError, match=r"math.* given twice|twice"):
        loaded(yaml)
    yaml.write_text(text[: text.index("sources:")] + "sources: {}\n")
    with pytest.raises(ConfigError, match=r"data\.sources={}: must"):
        loaded(yaml)


def test_preflight_names_the_sources_files_and_unknown_rewards(yaml: Path) -> None:
    wrong = ("data.sources.math.train=nowhere.jsonl", "data.sources.sums.reward.function=nope")
    with pytest.raises(ConfigError) as error:
        preflight(loaded(yaml, *wrong)).raise_problems()
    found = str(error.value)
    assert "data.sources.math.train=nowhere.jsonl: no such file" in found
    assert "data.sources.sums.reward.function='nope' is unknown" in found


class Engine:
    """Every completion has one token."""

    async def generate(self, request: Any) -> list[Completion]:
        return [completion((1,))] * request.num_completions


def test_metrics_of_a_source() -> None:
    """Of a two groups with rewards 0, 1 and 1, 1, of b one that was dropped: all by hand."""

    def place(ordinal: int, prompt: Prompt, rewards: tuple[float, ...], *, kept: bool = True) -> PendingPrompt:
        group = single_turns(prompt, [completion([1] * (ordinal + 1))] * len(rewards), rewards=rewards)
        answered = GroupResult(group=group if kept else None, reason=None if kept else "equal_rewards", rewards=rewards)
        drawn = Draw(ordinal=ordinal, prompt=prompt, batch=1)
        return PendingPrompt(drawn=drawn, birth=0, due=1, answered=answered)

    places = (place(0, MIXED[0], (0.0, 1.0)), place(1, MIXED[1], (1.0, 1.0)))
    places = (*places, place(2, MIXED[5], (0.0, 0.0), kept=False))
    batch = replace(RolloutBatch.from_results([one.answered for one in places if one.answered]), places=places)
    prompts = mixture()
    prompts.next_prompts(8)
    assert source_row(RunConfig(), batch, prompts.epochs()) == {
        "source/a/share": 1.0,
        "source/a/epoch": 1 + 1 / 5,
        "source/a/reward": 0.75,
        "source/a/zero_advantage": 0.5,
        "source/b/share": 0.0,
        "source/b/epoch": 2 / 3,
    }
    epochs = PromptStream(MIXED, seed=7).epochs()
    assert source_row(RunConfig(), batch, epochs) == {}
