"""Reward models on ranks of their own, of two families and in several layouts: the scores are transformers' of the same
texts, which are read by each model's own tokenizer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from launcher.build.roles import load_reward_models
from launcher.hosts.local import LocalLauncher
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.rewards.classifiers.on_ranks import RewardModels
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.types import Prompt, Scored
from rl_megatron.weights.layouts.families import read_shape
from tests.completions import completion
from tests.distributed.test_plane import TINY

pytestmark = pytest.mark.usefixtures("forked_nursery")
PROMPT = Prompt(id="p", text="12+34=", token_ids=(1, 2), answer="46")
GROUPS = (
    ["46", "a much longer answer, of several words: 46", "", "4", "é 7"],
    ["one alone", "and a longer one: " + "0123456789" * 7],
)
MOST = 64  # tokens of a micro-batch, and so of what is read of a text
WEIGHTS = {"experts": 2.0, "dense": -0.5}
LAYOUTS = {
    "tensor and expert parallel; pipeline": ("experts.tp=2", "experts.ep=2", "dense.pp=2"),
    "data parallel with experts; context parallel": ("experts.dp=2", "experts.ep=2", "dense.cp=2"),
}


def classifiers(folder: Path, policy: Path) -> dict[str, Path]:
    """One of the policy's family, and a Llama of other sizes whose padding ends some texts."""
    torch.manual_seed(5)
    experts = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(policy, num_labels=1))
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = AutoTokenizer.from_pretrained(policy)
    (pad,) = tokens("4", add_special_tokens=False)["input_ids"]
    dense = LlamaForSequenceClassification(LlamaConfig(vocab_size=300, num_labels=1, pad_token_id=pad, **sizes))
    made = {"experts": experts, "dense": dense}
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    return {name: folder / name for name in made}


def config_of(policy: Path, folders: dict[str, Path], *layouts: str) -> RunConfig:
    keys = [f"reward_models.{name}.path={path}" for name, path in folders.items()]
    keys += [f"reward.parts.{name}.function=ranks:{name}" for name in folders]
    keys += [f"reward.parts.{name}.weight={WEIGHTS[name]}" for name in folders]
    keys += [f"roles.layouts.reward_{layout}" for layout in layouts]
    learner = ("learner.threads=1", "learner.ep=1", f"learner.max_tokens_per_micro_batch={MOST}")
    return load_config("tiny_cpu", [f"model.path={policy}", *learner, *keys])


async def scored(config: RunConfig, policy: Path, folder: Path) -> list[list[Scored]]:
    """What the run's reward says of all groups, which ask at once."""
    models = RewardModels(config.reward_models)
    reward = resolve_rewards(config.reward, config.own_rewards, config.sandbox, models)
    async with LocalLauncher(policy, folder).start(config) as roles:
        assert set(roles.models) == {"policy", "reward_experts", "reward_dense"}
        await load_reward_models(config, read_shape(policy), roles, models)
        asked = (reward(PROMPT, [completion((1,))] * len(texts), texts) for texts in GROUPS)
        return list(await asyncio.gather(*asked))


def by_transformers(folder: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    with torch.no_grad():
        return float(model(**tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")).logits)


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_scores_are_those_of_transformers_and_are_weighed(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    policy = make_tiny_model(TINY, tmp_path / "cache", seed=3)
    folders = classifiers(tmp_path, policy)
    found = asyncio.run(scored(config_of(policy, folders, *layouts), policy, tmp_path))
    for texts, group in zip(GROUPS, found, strict=True):
        for text, one in zip(texts, group, strict=True):
            wanted = {name: by_transformers(path, PROMPT.text + text) for name, path in folders.items()}
            assert one.parts == pytest.approx(wanted, abs=1e-4)
            assert one.total == pytest.approx(sum(WEIGHTS[name] * wanted[name] for name in wanted), abs=2e-4)
    assert len({round(one.total, 4) for group in found for one in group}) == 7
