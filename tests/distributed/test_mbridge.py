"""What mbridge, another converter, loads into a model is what our tables put there, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import run_ranks
from tests.family_models import MODELS, save_model

LAYOUTS: dict[str, dict[str, int]] = {"one": {}, "tp2-ep2": {"tp": 2, "ep": 2}}
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


def rank_main(rank: int, options: dict[str, int], root: Path) -> None:
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here
    from rl_megatron.learner import world
    from rl_megatron.learner.model.build import build_chunks, make_config
    from rl_megatron.learner.naming import global_parameters
    from rl_megatron.options import option
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout

    option.VOCAB_MULTIPLE = 1  # mbridge pads no vocabulary; in this process alone
    sparse = LearnerSection.model_validate(options)
    dense = LearnerSection.model_validate({**options, "ep": 1})
    world.join(sparse, rank=rank, rendezvous=f"file://{root}/rendezvous{len(options)}", seed=1)
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
    world.leave()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name in COVERED:
        save_model(name, root / name)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_are_those_that_mbridge_loads(layout: str, models: Path) -> None:
    options = LAYOUTS[layout]
    run_ranks(rank_main, options.get("tp", 1), options, models)
