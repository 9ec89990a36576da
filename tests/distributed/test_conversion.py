"""Checkpoints that others write are converted, and what mbridge loads of a folder is what we do."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.megatron import must_have_config, newest_checkpoint
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import run_ranks
from tests.family_models import MODELS, save_model
from tools.convert.verify import verify

SAVED = {  # the metadata by which megatron-core 0.16 names tensors; None is its default
    "stacked": None,
    "layers_apart": {"non_homogeneous_layers": True},
    "experts_apart": {"singleton_local_shards": True},
}


def make_gpt(shape: ModelShape) -> Any:
    """A model of megatron-core's own layers, experts one by one, with the vocabulary padded as Megatron-LM does."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from rl_megatron.learner.model.build import make_config

    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")  # of dense layers, here by mistake
    return GPTModel(
        config=make_config(shape, LearnerSection()),
        transformer_layer_spec=spec,
        vocab_size=-(-shape.vocab_size // 128) * 128,
        max_sequence_length=shape.max_positions,
        position_embedding_type="none",
    )


def fill(model: Any, hf: Path, shape: ModelShape) -> None:
    """Load the Hugging Face folder's numbers by name."""
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout

    layout = replace(megatron_layout(shape), vocab_multiple=128)
    tensors = {name: torch.empty(size) for name, size in layout.local_shapes(0).items()}
    read_boxes(HFFolder(hf), hf_layout(shape), layout, 0, tensors)
    named = {
        re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name).replace(
            "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
        ): tensor
        for name, tensor in tensors.items()
    }
    lacking = model.load_state_dict(named, strict=False)
    assert not lacking.unexpected_keys
    missing = [key for key in lacking.missing_keys if not key.endswith("_extra_state")]
    assert not missing, missing


def save_as_others(model: Any, root: Path, metadata: dict[str, bool] | None) -> None:
    """As Megatron-LM, with what Megatron-Bridge adds."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    step = root / "iter_0000012"
    step.mkdir(parents=True)
    whole = {
        "args": Namespace(num_layers=2, save=Path("/nowhere")),
        "checkpoint_version": 3.0,
        "iteration": 12,
        "opt_param_scheduler": {"max_lr": 1e-5},
        "rng_state": ShardedObject("rng_state", [{"random_rng_state": 1}], (1, 1), (0, 0)),
        "model": model.sharded_state_dict(metadata=metadata),
    }
    dist_checkpointing.save(whole, str(step), content_metadata=metadata)
    (root / "latest_checkpointed_iteration.txt").write_text("12")
    (step / "run_config.yaml").write_text("model:\n  _target_: Provider\n  hf_model_id: Qwen/Qwen3-30B-A3B\n")
    for path in (step / "train_state.pt", root / "latest_train_state.pt"):
        torch.save({"step": torch.tensor(12, dtype=torch.int32)}, path)


def foreign_main(rank: int, hf: Path, folder: Path) -> None:
    """Save a model of megatron-core's as others do, convert each to Hugging Face and one back, and load that."""
    torch.set_num_threads(1)
    from megatron.core import dist_checkpointing

    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here
    from rl_megatron.learner import world

    shape = read_shape(hf)
    world.init_process_groups(LearnerSection(), rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=1)
    model, other = make_gpt(shape), make_gpt(shape)
    fill(model, hf, shape)
    for kind, metadata in SAVED.items():
        save_as_others(model, folder / kind, metadata)
        newest = newest_checkpoint(folder / kind)
        convert.megatron_to_hf(newest, folder / f"{kind}_hf", config=hf)
        assert list(verify(newest, against=folder / f"{kind}_hf", config=hf)) == []
    convert.hf_to_megatron(folder / "stacked_hf", folder / "back")
    found = dist_checkpointing.load(
        other.sharded_state_dict(), str(folder / "back"), strict="log_all"
    )  # no _extra_state
    other.load_state_dict(found, strict=False)
    for name, tensor in model.named_parameters():
        rows = shape.vocab_size if "embedding" in name or "output_layer" in name else len(tensor)
        assert torch.equal(other.get_parameter(name)[:rows], tensor[:rows]), name
    world.destroy_process_groups()


def test_folders_of_megatron_lm_and_megatron_bridge_convert_to_hugging_face_and_back(tmp_path: Path) -> None:
    hf = make_tiny_model(TinySizes(), tmp_path / "models", seed=7)
    run_ranks(foreign_main, 1, hf, tmp_path)
    original = load_file(hf / "model.safetensors")
    for kind in SAVED:
        found = load_file(tmp_path / f"{kind}_hf" / "model.safetensors")
        assert found.keys() == original.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in original.items()), kind
    with pytest.raises(ConfigError, match=r"give --config with the Hugging Face folder of Qwen/Qwen3-30B-A3B, as its"):
        must_have_config(newest_checkpoint(tmp_path / "experts_apart"))


# What mbridge, another converter, loads into a model is what our tables put there, to the bit.
BRIDGED: dict[str, dict[str, int]] = {"one": {}, "tp2-ep2": {"tp": 2, "ep": 2}}
NAMES = {"mistral": "llama"}  # whose names and shapes it has; mbridge knows only those
COVERED = [name for name, (kind, _) in MODELS.items() if kind in {"qwen2", "qwen3", "qwen3_moe", "llama", "mistral"}]
COVERED += ["mixtral", "glm4_moe", "glm4_moe_air"]


def bridge_of(folder: Path, kind: str) -> Any:
    """mbridge's for the model in ``folder``, helped over what transformers 5 renamed."""
    from mbridge.core import auto_bridge
    from mbridge.core.parallel_states import ParallelStates
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    config.rope_theta = config.rope_parameters["rope_theta"]
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    theirs = auto_bridge._MODEL_REGISTRY[NAMES.get(kind, kind)]
    own = {"_DIRECT_MAPPING": dict(theirs._DIRECT_MAPPING)}  # a tied model writes into it, for every class
    parallel = ParallelStates.get_parallel_state()
    if not hasattr(config, "num_experts_per_tok"):
        parallel.ep_size = 1  # a dense model beside others in one set of groups
    bridge = type(theirs.__name__, (theirs,), own)(config, dtype=torch.float32, parallel_states=parallel)
    bridge.make_vocab_size_divisible_by, bridge.vocab_size = parallel.tp_size, config.vocab_size
    bridge.padded_vocab_size = config.vocab_size + config.vocab_size % parallel.tp_size
    return bridge


def bridged_main(rank: int, options: dict[str, int], root: Path) -> None:
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here
    from rl_megatron.learner import world
    from rl_megatron.learner.model.build import build_chunks, make_config
    from rl_megatron.learner.parameters import global_parameters
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts import layout
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout

    layout.VOCAB_MULTIPLE = 1  # mbridge pads no vocabulary; in this process alone
    sparse = LearnerSection.model_validate(options)
    dense = LearnerSection.model_validate({**options, "ep": 1})
    world.init_process_groups(sparse, rank=rank, rendezvous=f"file://{root}/rendezvous{len(options)}", seed=1)
    for name in COVERED:
        kind, _ = MODELS[name]
        shape = read_shape(root / name)
        learner = sparse if shape.num_experts else dense
        chunks = build_chunks(shape, learner, make_config(shape, learner))
        with torch.no_grad():
            bridge_of(root / name, kind).load_weights(chunks, str(root / name))
        layout = replace(megatron_layout(shape, learner.dims), vocab_multiple=1)
        ours = {name: torch.full(size, torch.nan) for name, size in layout.local_shapes(rank).items()}
        read_boxes(HFFolder(root / name), hf_layout(shape), layout, rank, ours)
        theirs = {name: tensor.data for name, tensor in global_parameters(chunks)}
        assert ours.keys() == theirs.keys()
        differ = [parameter for parameter in ours if not torch.equal(ours[parameter], theirs[parameter])]
        assert not differ, f"{name}: {differ}"
    world.destroy_process_groups()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name in COVERED:
        save_model(name, root / name)
    return root


@pytest.mark.parametrize("layout", BRIDGED)
def test_the_weights_are_those_that_mbridge_loads(layout: str, models: Path) -> None:
    options = BRIDGED[layout]
    run_ranks(bridged_main, options.get("tp", 1), options, models)
