"""What a critic starts from, on a rank that holds it beside the policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from launcher.wire.setup import Setup
from launcher.worker.models import RankModels
from rl_megatron.config.io import load_config
from rl_megatron.config.run import TinyModelSection
from rl_megatron.errors import WeightError
from rl_megatron.models.tiny import make_tiny_model


def test_only_the_output_layer_of_its_folder_is_left_out(tmp_path: Path) -> None:
    policy, deep = (make_tiny_model(TinyModelSection(num_layers=n), tmp_path, seed=0) for n in (1, 2))
    config = load_config("tiny_cpu", ["algorithm=ppo", "learner.ep=1", f"model.path={policy}"])
    rendezvous, threads = f"file://{tmp_path}/rendezvous", torch.get_num_threads()
    setup = Setup(config=config, model_folder=policy, run_folder=tmp_path, rendezvous=rendezvous, role="learner")
    rank = RankModels(setup, 0, None)
    try:
        rank.start_from("critic", policy)
        with pytest.raises(WeightError, match=r"the critic has no tensor for \d+ of its tensors, as .decoder"):
            rank.start_from("critic", deep)
    finally:
        rank.close()
        torch.set_num_threads(threads)
