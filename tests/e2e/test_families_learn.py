"""A small run of each family that has no other run here: what it samples gets better, and the engine samples from what
the learner trains."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import pytest

from rl_megatron.models.tiny import TOKENIZER_SIZE, TinySizes, make_tiny_model
from tests.e2e.processes import REWARDS, Place
from tests.family_models import save_model

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


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_run_samples_gets_better(name: str, place: Place) -> None:
    (place.folder / "my_rewards.py").write_text(REWARDS + EVEN_SHARE)
    run = place.fork(name, *KEYS, f"model.path={saved(name, place)}").finish()
    rows = [row for row in run.rows() if row["step"]]
    rewards = [row["reward/mean"] for row in rows]
    print(f"{name}: {rewards[0]:.2f} to {rewards[-1]:.2f}")
    assert statistics.fmean(rewards[-2:]) > statistics.fmean(rewards[:2]) + 0.1  # 0.02 is chance
    assert all(row["mismatch/logprob_abs_p99"] < 1e-4 for row in rows)


def saved(name: str, place: Place) -> Path:
    """The family's random model, with a tokenizer."""
    folder = place.folder / f"model-{name}"
    save_model(name, folder, vocab_size=TOKENIZER_SIZE, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1)
    known = make_tiny_model(TinySizes(), place.cache, 0)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(known / file, folder / file)
    return folder
