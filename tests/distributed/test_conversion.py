"""Megatron itself loads and saves converted checkpoints, with learners in several layouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.config.run import TinyModelSection
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import run_ranks

LAYOUTS = {"tp2-ep2": {"tp": 2, "ep": 2}, "pp2-ep2": {"pp": 2, "ep": 2}, "tp2-etp2": {"tp": 2}}


def rank_main(rank: int, learner: LearnerSection, hf: Path, folder: Path) -> None:
    """One rank: megatron's loader must give what the boxes of the Hugging Face folder give; then save."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_critic, make_policy
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.layout import Layout
    from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE

    shape = read_shape(hf)
    device = world.join(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=1)
    policy, critic = make_policy(shape, learner, device, temperature=1.0), make_critic(shape, learner, device)
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=shape, dims=learner.dims, vocab_multiple=learner.vocab_multiple)
    wanted = {name: torch.empty(size) for name, size in layout.local_shapes(rank).items()}
    read_boxes(HFFolder(hf), Layout(table=HF_QWEN3_MOE, shape=shape), layout, rank, wanted)
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


def sequential_main(rank: int, hf: Path, folder: Path) -> None:
    """Megatron's own layers, experts one by one in modules of their own, filled by name and saved."""
    torch.set_num_threads(1)
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here
    from rl_megatron.learner import world
    from rl_megatron.learner.model.build import make_config
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout

    shape, learner = read_shape(hf), LearnerSection()
    world.join(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=1)
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")  # of dense layers, here by mistake
    model = GPTModel(
        config=make_config(shape, learner),
        transformer_layer_spec=spec,
        vocab_size=-(-shape.vocab_size // 8) * 8,
        max_sequence_length=shape.max_positions,
        position_embedding_type="none",
    )
    layout = megatron_layout(shape)
    tensors = {name: torch.empty(size) for name, size in layout.local_shapes(0).items()}
    read_boxes(HFFolder(hf), hf_layout(shape), layout, 0, tensors)
    named = {
        re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name): tensor
        for name, tensor in tensors.items()
    }
    named = {
        name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"): tensor
        for name, tensor in named.items()
    }
    lacking = model.load_state_dict(named, strict=False)
    assert not lacking.unexpected_keys
    missing = [key for key in lacking.missing_keys if not key.endswith("_extra_state")]
    assert not missing, missing
    dist_checkpointing.save(model.sharded_state_dict(), str(folder / "saved"))
    world.leave()


def test_experts_that_were_saved_one_by_one_convert_too(tmp_path: Path) -> None:
    hf = make_tiny_model(TinyModelSection(), tmp_path / "models", seed=7)
    (tmp_path / "saved").mkdir()
    run_ranks(sequential_main, 1, hf, tmp_path)
    convert.megatron_to_hf(tmp_path / "saved", tmp_path / "back", config=hf)
    found, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", hf))
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
