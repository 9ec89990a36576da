"""Tiny models of sizes that engines' CPU kernels have, and real learner ranks that leave each in a mirror file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launcher.engines import mirror_path
from launcher.rank_models import Setup
from launcher.worker import Worker
from rl_megatron.config import RunConfig
from rl_megatron.config_io import load
from rl_megatron.models.tiny import byte_tokenizer
from tests.distributed.ranks import run_ranks
from tests.family_models import BASE, DENSE, MODELS

WORLD = 4
SHARED = "qwen3_moe"  # the family of `conftest.models`
SIZES: Mapping[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 32,
}
KERNELS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": None},
    "deepseek_v3": {  # a head's sizes are the model's own: vLLM's decoding kernel has no others
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-6,
        # Engines' tables end at this times the factor.
        "rope_parameters": {**MODELS["deepseek_v3"][1]["rope_parameters"], "original_max_position_embeddings": 128},
    },
}
"""What differs from `family_models.MODELS` beside `SIZES`."""
NOT_WRITTEN = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}}
"""Keys of the published config.json that transformers does not write, and engines read."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of a learner, and which of a family's models it holds: each has another, so that pushes differ."""

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    seed: int


LAYOUTS: Mapping[str, Layout] = {
    "tp2-ep2": Layout(sparse=("learner.tp=2", "learner.ep=2"), dense=("learner.tp=2", "learner.ep=1"), seed=1),
    "pp2-ep2": Layout(sparse=("learner.pp=2", "learner.ep=2"), dense=("learner.pp=2", "learner.ep=1"), seed=2),
}
"""Name -> layout; the version of its push is the seed."""


def save_model(name: str, folder: Path, seed: int) -> Path:
    """The folder of a family's model, with weights so wide that a wrong bias or route shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, differing = MODELS[name]
    sizes = {**BASE, **differing, **SIZES, **KERNELS[name]}
    config = AutoConfig.for_model(kind, **{key: value for key, value in sizes.items() if value is not None})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for key, value in model.state_dict().items():
            is_scale = key.endswith("norm.weight")
            value.normal_(1.0 if is_scale else 0.0, 0.1 if value.dim() == 1 else 0.5 * value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)  # vLLM does not start without
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **NOT_WRITTEN.get(name, {})}))
    return folder


def config_of(root: Path, name: str, layout: str) -> RunConfig:
    """A run whose learner has the layout, and whose servers read mirrors under ``root``."""
    chosen = LAYOUTS[layout]
    degrees = chosen.dense if name in DENSE else chosen.sparse
    return load(
        "tiny_cpu",
        [*degrees, "rollout=vllm", "learner.threads=1", f"rollout.server.weights_dir={root}", "weights.delta=false"],
    )


def mirror_of(root: Path, name: str, layout: str) -> Path:
    """The file that the learner's push wrote."""
    return mirror_path(config_of(root, name, layout), root / name / layout)


def push_all(root: Path, shared: Sequence[Path]) -> None:
    """Start ranks once; they hold each model (`folder_of`) in each layout in turn, and push it into its mirror."""
    for layout, folder in zip(LAYOUTS.values(), shared, strict=True):
        folder_of(root, SHARED, layout.seed).parent.mkdir(exist_ok=True)
        folder_of(root, SHARED, layout.seed).symlink_to(folder)
        for name in KERNELS:
            save_model(name, folder_of(root, name, layout.seed), layout.seed)
    run_ranks(_rank_main, WORLD, root)


def folder_of(root: Path, name: str, seed: int) -> Path:
    """Where a family's model of a seed lies."""
    return root / name / f"model-{seed}"


def _rank_main(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here: before its functions are bound

    for name in (SHARED, *KERNELS):
        for layout, chosen in LAYOUTS.items():
            config, run_folder = config_of(root, name, layout), root / name / layout
            run_folder.mkdir(exist_ok=True)
            if rank >= config.learner.dims.world_size:
                continue
            setup = Setup(
                config=config,
                model_folder=folder_of(root, name, chosen.seed),
                run_folder=run_folder,
                rendezvous=f"file://{run_folder}/rendezvous",
            )
            worker = Worker(setup, rank, None)
            pushed = worker.stage(chosen.seed)
            assert not isinstance(pushed, Exception), pushed
            worker.commit(chosen.seed)
            worker.close()
