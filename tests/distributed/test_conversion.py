"""Converted checkpoints in megatron's own hands: loaded and saved by learners in several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.config import LearnerSection, TinyModelSection
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.weights import convert
from tests.distributed.ranks import run_ranks

LAYOUTS = {"tp2-ep2": {"tp": 2, "ep": 2}, "pp2-ep2": {"pp": 2, "ep": 2}, "tp2-etp2": {"tp": 2}}


def rank_main(rank: int, learner: LearnerSection, hf: Path, folder: Path) -> None:
    """One rank: megatron's loader must give what the boxes of the Hugging Face folder give; then save."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_critic, make_policy
    from rl_megatron.weights.layout import Layout
    from rl_megatron.weights.safetensors_io import Checkpoint, read_boxes
    from rl_megatron.weights.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE

    shape = ModelShape.from_folder(hf)
    device = world.join(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=1)
    policy, critic = make_policy(shape, learner, device, temperature=1.0), make_critic(shape, learner, device)
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=shape, dims=learner.dims, vocab_multiple=learner.vocab_multiple)
    wanted = {name: torch.empty(size) for name, size in layout.local_shapes(rank).items()}
    read_boxes(Checkpoint(hf), Layout(table=HF_QWEN3_MOE, shape=shape), layout, rank, wanted)
    for megatron in (policy, critic):
        megatron.load_weights(folder / "megatron")
        for name, tensor in megatron.tensors.items():
            assert torch.equal(tensor, wanted[name]), name
    assert policy.tensors.keys() == wanted.keys()
    policy.save(folder / "saved")
    world.leave()


@pytest.mark.parametrize(("name", "tied"), [*((name, False) for name in LAYOUTS), ("pp2-ep2", True)])
def test_megatron_loads_and_saves_what_the_tools_wrote_and_read(name: str, tied: bool, tmp_path: Path) -> None:
    hf = make_tiny_model(TinyModelSection(tie_embeddings=tied), tmp_path / "models", seed=6)
    convert.hf_to_megatron(hf, tmp_path / "megatron")
    (tmp_path / "saved").mkdir()
    learner = LearnerSection.model_validate(LAYOUTS[name])
    run_ranks(rank_main, learner.dims.world_size, learner, hf, tmp_path)
    convert.megatron_to_hf(tmp_path / "saved", tmp_path / "back", config=hf)
    found, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", hf))
    assert found.keys() == original.keys()
    for tensor in original:
        assert torch.equal(found[tensor], original[tensor]), tensor
