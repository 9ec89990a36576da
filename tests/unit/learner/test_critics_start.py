"""What a critic starts from, on a rank that holds it beside the policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from launcher.preflight.model_files import check
from launcher.preflight.subject import Subject
from launcher.wire.greetings import Setup
from launcher.worker.models import RankModels
from rl_megatron.config.io import load_config
from rl_megatron.errors import WeightError
from rl_megatron.models.tiny import TinySizes, make_tiny_model


@contextlib.contextmanager
def rank_of(policy: Path, folder: Path, *keys: str) -> Iterator[RankModels]:
    """The only rank of a run with a critic."""
    folder.mkdir()
    config, threads = load_config("tiny_cpu", ["algorithm=ppo", "learner.ep=1", *keys]), torch.get_num_threads()
    rendezvous = f"file://{folder}/rendezvous"
    rank = RankModels(
        Setup(config=config, model_folder=policy, run_folder=folder, rendezvous=rendezvous, role="learner"), 0, None
    )
    try:
        yield rank
    finally:
        rank.close()
        torch.set_num_threads(threads)


def test_only_the_output_layer_of_its_folder_is_left_out(tmp_path: Path) -> None:
    policy, deep = (make_tiny_model(TinySizes(num_layers=n), tmp_path, seed=0) for n in (1, 2))
    with rank_of(policy, tmp_path / "run", f"model.path={policy}") as rank:
        rank.start_from("critic", policy)
        with pytest.raises(WeightError, match=r"critic has no tensor for \d+ of its tensors, as 'decoder.layers.1."):
            rank.start_from("critic", deep)


def test_a_critic_of_another_optimizer_takes_a_checkpoints_weights_and_a_preflight_its_sizes(tmp_path: Path) -> None:
    policy, shards = make_tiny_model(TinySizes(num_layers=1), tmp_path, seed=0), tmp_path / "critic"
    with rank_of(policy, tmp_path / "run", f"model.path={policy}") as rank:
        rank.start_from("critic", policy)
        for value in rank._learners["critic"].value_weight.values():
            value.fill_(0.5)
        rank._learners["critic"].adopt()
        wanted = {name: t.clone() for name, t in rank._learners["critic"].tensors.items()}
        shards.mkdir()
        rank.save("critic", shards)
        rank.durable("critic")
    for model, refused in ((policy, False), (make_tiny_model(TinySizes(), tmp_path, seed=0), True)):
        keys = ("algorithm=ppo", "learner.ep=1", f"model.path={model}", f"algorithm.critic.path={shards}")
        found = [one.text for one in check(Subject(load_config("tiny_cpu", keys), for_job=False))]
        assert any("is no checkpoint of a critic of the policy's sizes" in one for one in found) == refused, found
    with rank_of(policy, tmp_path / "then", f"model.path={policy}", "algorithm.critic.optimizer.name=muon") as rank:
        rank.start_from("critic", shards)
        critic = rank._learners["critic"]
        assert all(bool((value == 0.5).all()) for value in critic.value_weight.values())
        assert all(torch.equal(critic.tensors[name], tensor) for name, tensor in wanted.items())
