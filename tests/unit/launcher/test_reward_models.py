"""Reward models on ranks: which configurations and folders are refused, and the ranks and nodes that they take."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from launcher.preflight.model_files import check
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.placement.ranks import beside, ranks_by_role
from rl_megatron.rewards.classifiers.on_ranks import RewardModels, scored_here
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.rewards.scoring import score
from rl_megatron.types import Prompt
from tests.completions import completion

JUDGE = ("reward.function=ranks:judge", "reward_models.judge.path=tests")


def loaded(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", list(keys))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder with the config.json of a classifier with one label."""
    folder = tmp_path_factory.mktemp("judge")
    shutil.copytree(make_tiny_model(TinySizes(), folder, 0), folder / "scores")
    return scoring(folder / "scores")


def scoring(folder: Path, **keys: object) -> Path:
    """``folder``, as a classifier's, with other ``keys`` in its config.json."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForSequenceClassification"], "id2label": {"0": "score"}, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copied(judge: Path, to: Path, **keys: object) -> Path:
    shutil.copytree(judge, to / "copy")
    return scoring(to / "copy", **keys)


def problems(path: Path, *keys: str) -> list[str]:
    config = loaded(*JUDGE, f"reward_models.judge.path={path}", *keys)
    return [found.text for found in check(Subject(config, for_job=False)) if found.kind == "problem"]


def resolved(path: Path, *keys: str) -> None:
    config = loaded(*JUDGE, f"reward_models.judge.path={path}", *keys)
    resolve_rewards(config.reward, {}, None, RewardModels(config.reward_models))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (JUDGE[:1], "reward.function=ranks:judge: reward_models has none; give reward_models.judge.path"),
        (JUDGE[1:], "reward_models.judge: no reward asks it; set reward.function=ranks:judge"),
        ((*JUDGE, "reward_models.other.path=tests"), "reward_models.other: no reward asks it"),
        ((*JUDGE, "reward.model.label=good"), "reward.model.label=good does nothing"),
        ((*JUDGE, "reward.model.device=cuda"), "reward.model.device=cuda does nothing"),
        ((*JUDGE, "roles.layouts.reward_jugde.tp=2"), "has this role; allowed: reward_judge"),
        ((*JUDGE, "roles.layouts.reward_judge.vpp=2"), "roles.layouts.reward_judge.vpp=2 needs a pipeline"),
        (
            (*JUDGE, "eval.sets.long.max_new_tokens=9000"),
            "score of rollout.max_prompt_tokens=16 and eval.sets.long.max_new_tokens=9000; raise the first, or set "
            "reward.model.max_tokens=8192",
        ),
        (("job=sft", "reward_models.judge.path=tests"), "job=sft does not read it"),
    ],
)
def test_what_does_not_fit_is_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(*keys)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "keys",
    [
        ("eval.sets.long.reward.function=math_verify",),
        ("eval.sets.long.environment.function=calculator", "eval.sets.long.environment.max_tokens=9000"),
        ("reward.model.max_tokens=8192",),
        ("eval.sets.long.reward.function=ranks:judge", "eval.sets.long.reward.model.max_tokens=8192"),
    ],
)
def test_a_set_of_long_completions_is_taken_where_no_model_reads_more_than_a_micro_batch(keys: tuple[str, ...]) -> None:
    loaded(*JUDGE, "eval.sets.long.max_new_tokens=9000", *keys)


class Lengths:
    """Scores a text by the number of its tokens."""

    max_tokens = 20

    async def __call__(self, texts: Sequence[Sequence[int]], /) -> list[float]:
        return [float(len(text)) for text in texts]


@pytest.mark.parametrize("chat", ["true", "false"])
def test_a_text_longer_than_a_micro_batch_is_cut_and_the_log_says_so_once(
    judge: Path, chat: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By what a chat template adds, here, or by a tokenizer unlike the policy's."""
    config = loaded(*JUDGE, f"reward_models.judge.path={judge}", f"reward.model.chat_template={chat}")
    models = RewardModels(config.reward_models)
    models.loaded["judge"] = Lengths()
    reward = resolve_rewards(config.reward, {}, None, models)
    prompt, texts = Prompt(id="p", text="12+34=", token_ids=(1, 2), answer="46"), ["46", "a longer answer: 46"]
    scored = [asyncio.run(score(reward, prompt, [completion((1,))] * 2, texts, limit=60.0)) for _ in range(2)]
    assert [one.total for group in scored for one in group] == [20.0 if chat == "true" else 8.0, 20.0] * 2
    (said,) = [line.getMessage() for line in caplog.records]
    assert "reads the last learner.max_tokens_per_micro_batch=20, and so of all" in said


def test_each_has_ranks_and_nodes_of_its_own_and_sets_may_ask_another() -> None:
    keys = ("reward_models.other.path=tests", "eval.sets.sums.reward.function=ranks:other")
    config = loaded(*JUDGE, *keys, "roles.layouts.reward_judge.tp=4", "reward.model.max_tokens=8")
    assert ranks_by_role(config) == {"learner": 2, "reward_judge": 4, "reward_other": 2}
    assert beside(config) == {"reward_judge": 2, "reward_other": 1}


def test_a_command_without_ranks_has_them_in_its_own_process() -> None:
    config = loaded(
        "reward_models.judge.path=tests", "reward.parts.judge.function=ranks:judge", "reward.parts.format=2"
    )
    assert scored_here(config.reward, config.reward_models).functions == {"judge": "hf:tests", "format": "format"}
    config = loaded(*JUDGE)
    assert scored_here(config.reward, config.reward_models).function == "hf:tests"


def test_a_folder_that_ranks_can_score_with_is_taken(judge: Path) -> None:
    assert problems(judge) == []
    resolved(judge)


def test_a_folder_that_ranks_cannot_score_with_is_refused_before_the_run(judge: Path, tmp_path: Path) -> None:
    key = "reward_models.judge.path="
    policy = make_tiny_model(TinySizes(), tmp_path, 0)
    (said,) = problems(policy)
    assert re.match(f"{key}.* is no sequence classifier, so it has no score", said)
    for number, (model_type, why) in enumerate([("gpt2", "model_type='gpt2' is not supported"), (None, "supported")]):
        (said,) = problems(copied(judge, tmp_path / str(number), model_type=model_type))
        assert why in said
    (said,) = problems(judge, "roles.layouts.reward_judge.ep=16")
    assert f"{key}{judge}: roles.layouts.reward_judge: ep = 16 does not divide" in said
    (said,) = problems(copied(judge, tmp_path / "small", vocab_size=128))
    assert "its tokenizer has a token 258, and its embedding 128 rows; give the tokenizer" in said
    bare = copied(judge, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert f"{key}{bare}: it has no tokenizer" in problems(bare)[0]


def test_what_transformers_knows_of_a_folder_is_refused_as_the_reward_is_found(judge: Path, tmp_path: Path) -> None:
    two = copied(judge, tmp_path, id2label={"0": "bad", "1": "good"})
    with pytest.raises(ConfigError, match="has 2 labels, and ranks score by one alone"):
        resolved(two)
    plain = copied(judge, tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    resolved(judge, "reward.model.chat_template=true")
    with pytest.raises(ConfigError, match=r"chat_template=true, but the tokenizer of .* has no chat template"):
        resolved(plain, "reward.model.chat_template=true")
    with pytest.raises(ConfigError, match=r"reward\.function=ranks:judge: reward_models has none; give one"):
        resolve_rewards(loaded(*JUDGE).reward, {})
