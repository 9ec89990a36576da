"""Small runs whose rewards rise: of recipes in short, and of each family of models that has no other run here."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import pytest

from rl_megatron.models.tiny import TOKENIZER_SIZE, TinySizes, make_tiny_model
from rl_megatron.observability.history import read_samples
from tests.e2e.processes import REWARDS, Place
from tests.family_models import save_model
from tests.learns.run import MOST_BEFORE, learned

SELDOM = ("warm_start.check_every=100", "eval.every=15")  # they measure, and change no weight
GUESS = (
    *("--config", "guess", "learner.ep=1", "learner.threads=1", "log.sinks=[]", "warm_start.steps=50"),
    *("warm_start.check_every=50", "train.steps=4", "eval.every=0", "data.num_eval=32"),
)
FAMILIES = (
    *("glm4_moe_lite", "olmoe", "qwen3_5_moe_stacked", "qwen3_next"),
    *("deepseek_v32", "glm_moe_dsa", "kimi_k25", "hy_v3"),
)
EVEN_SHARE = '''
def even_share(prompt, completions, texts):
    """The share of a completion's tokens whose number is even: half of a random model's."""
    return [sum(token % 2 == 0 for token in c.token_ids) / max(1, len(c.token_ids)) for c in completions]
'''
KEYS = (
    *("reward.function=my_rewards:even_share", "warm_start.steps=0", "eval.every=0", "checkpoint.every=0"),
    *("rollout.prompts_per_step=8", "rollout.group_size=8", "rollout.max_new_tokens=8", "learner.ep=1"),
    *("train.steps=8", "train.learning_rate=0.03", "train.lr_decay=none"),
)


def test_a_model_that_answers_at_once_learns_to_use_the_calculator(place: Place) -> None:
    """One seed of tests/learns/run.py, with a quarter of its steps, on one rank."""
    found = learned(place.call_in_fork, place, "learner.ep=1", *SELDOM, seed=0, steps=15)
    assert found.before <= MOST_BEFORE
    assert found.after >= 0.9


def test_rewards_of_turns_raise_the_reward_from_the_first_steps_on(place: Place) -> None:
    """The recipe of the game of guesses: half of its warm start, and four steps of 150."""
    run = place.fork_alone("guess", *GUESS).finish()
    rows = [row for row in run.rows() if row["phase"] == "rl" and row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert 1 < row["environment/turns_mean"] <= 4, row
        assert row["environment/own/found"] <= row["environment/own/kept"] <= row["environment/own/guesses"], row
        assert row["environment/own/guesses"] <= row["environment/turns_mean"], row
        assert row["environment/own/found"] < row["reward/mean"] < 1, row  # found ones get 1, others what they settled
        assert row["mismatch/logprob_abs_max"] < 1e-4, row
        assert row["grad_norm"] > 0, row
    samples = [row for row in read_samples(run.folder / "samples.jsonl") if len(row.turns) > 1]
    assert samples
    for row in samples:
        assert "".join(turn.sampled for turn in row.turns) == row.completion
        assert row.turns[0].read == ""
        assert all(turn.read.strip() for turn in row.turns[1:])  # the environment's answers
    rewards = [row["reward/mean"] for row in rows]
    assert rewards[3] > rewards[0] + 0.2, rewards  # with train.learning_rate=1e-9 it gains 0.03


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_run_samples_gets_better(name: str, place: Place) -> None:
    """And the engine samples from what the learner trains."""
    (place.folder / "my_rewards.py").write_text(REWARDS + EVEN_SHARE)
    run = place.fork(name, *KEYS, f"model.path={saved(name, place)}").finish()
    rows = [row for row in run.rows() if row["step"]]
    rewards = [row["reward/mean"] for row in rows]
    print(f"{name}: {rewards[0]:.2f} to {rewards[-1]:.2f}")
    assert statistics.fmean(rewards[-2:]) > statistics.fmean(rewards[:2]) + 0.1  # 0.02 is chance
    assert all(row["mismatch/logprob_abs_mean"] < 1e-4 for row in rows)


def saved(name: str, place: Place) -> Path:
    """The family's random model, with a tokenizer."""
    folder = place.folder / f"model-{name}"
    save_model(name, folder, vocab_size=TOKENIZER_SIZE, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1)
    known = make_tiny_model(TinySizes(), place.cache, 0)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(known / file, folder / file)
    return folder
