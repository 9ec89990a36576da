"""What megatron-core is given and what a GPU must hold, of every recipe and of a spread of the learner's keys.

`given.json` beside it was written by the code before options had a room of their own; where a change of a recipe or of
a default is meant, write it again and read the difference: ``python -m tests.unit.options.given``.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.learner import optimizer, trained
from rl_megatron.learner.heads import ValueHead
from rl_megatron.learner.model import build
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape, Rope, Router
from tests.small_models import TINY_MOE
from tests.unit.launcher.test_memory import QWEN_30B
from tests.unit.launcher.test_memory import RECIPES as LARGE
from tools.planner.memory import footprints

STORED = Path(__file__).with_name("given.json")
CONF = Path(__file__).parents[3] / "conf"
FILES = ["data.train=train.jsonl", "data.eval=test.jsonl"]
RECIPES: Mapping[str, list[str]] = {  # what is the user's to give
    **{name: [*FILES, "model.path=/models/given"] for name in LARGE},
    "calculator": [],
    "distill_tiny": [],
    "guess": [],
    "gsm8k_tiny": FILES,
    "dpo_tiny": [],
    "reward_tiny": [],
    "sft_tiny": [],
    "tiny_cpu": [],
}
LATENT = replace(NAMED["deepseek-v3"], num_layers=4, dense_layers=1)
SHAPES: Mapping[str, ModelShape] = {
    **NAMED,
    "tiny": TINY_MOE,
    "dense": replace(TINY_MOE, family="qwen3", num_experts=0, experts_per_token=0, expert_width=0, dense_width=96),
    "biases, windows, sinks": replace(
        TINY_MOE,
        family="gpt_oss",
        qk_norm=None,
        sinks=True,
        windows=(128, 0, 128, 0),
        expert_bias=True,
        qkv_bias=True,
        out_bias=True,
        clamped_swiglu=7.0,
        router=Router(logit_bias=True),
        rope=Rope(kind="yarn", factor=32.0, original_positions=4096, truncate=False, attention_factor=1.35),
    ),
    "shared expert, half of a head turns": replace(
        TINY_MOE,
        family="glm4_moe",
        dense_layers=1,
        dense_width=96,
        shared_width=32,
        rope=Rope(dim=8),
        router=Router(score="sigmoid", selection_bias=True, scaling=2.5),
    ),
    "norm over all heads": replace(TINY_MOE, family="minimax_m2", qk_norm="all"),
    "softmax of all experts": replace(TINY_MOE, family="mixtral", normalize_top_k=False, tie_embeddings=True),
    "sigmoid of one expert": replace(TINY_MOE, experts_per_token=1, router=Router(score="sigmoid")),
    "best experts of groups": replace(LATENT, router=replace(LATENT.router, group_score="max")),
    "latent, other norms": replace(LATENT, norm_eps=1e-5),
    "latent, no stretch": replace(LATENT, rope=Rope(), latent=replace(LATENT.latent, query_rank=None)),  # type: ignore[type-var]
}
OPTIMIZER = {"beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "clip_grad": 0.0}
LEARNERS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 gradients": {"dtype": "bfloat16", "gradient_dtype": "bfloat16"},
    "tp": {"tp": 2},
    "tp, ep": {"tp": 2, "ep": 4},
    "ep, etp": {"tp": 2, "ep": 2, "etp": 2},
    "pp": {"pp": 2},
    "pp, vpp": {"pp": 2, "vpp": 2},
    "stages": {"pp": 2, "stage_layers": "1+3"},
    "cp, dp": {"cp": 2, "dp": 3},
    "recomputed": {"recompute": {"uniform": 1}},
    "recomputed, some parts": {"recompute": {"parts": ["moe_act", "core_attn"]}},
    "recomputed, in vain": {"recompute": {"parts": ["shared_experts", "layernorm", "mla_up_proj", "mlp"]}},
    "recomputed, groups that do not divide": {"pp": 2, "stage_layers": "1+3", "recompute": {"uniform": 2}},
    "latents recomputed": {"recompute": {"parts": ["mla_up_proj", "mlp"]}},
    "cuda, recomputed parts": {
        "device": "cuda",
        "dtype": "bfloat16",
        "recompute": {"parts": ["layernorm", "mla_up_proj", "moe_act"]},
    },
    "cuda, offloaded": {"device": "cuda", "dtype": "bfloat16", "offload": {"optimizer": 0.5}},
    "cuda, recomputed in vain": {"device": "cuda", "dtype": "bfloat16", "recompute": {"parts": ["core_attn"]}},
    "optimizer": {"optimizer": OPTIMIZER},
    "cuda, moments of bfloat16": {
        "device": "cuda",
        "dtype": "bfloat16",
        "layers": "torch",
        "optimizer": {"moments_dtype": "bfloat16"},
    },
    "float32 head": {"dtype": "bfloat16", "head_dtype": "float32"},
    "overlapping": {"dp": 2, "overlap": {"gradients": True, "parameters": True}},
    "deepep": {"device": "cuda", "dtype": "bfloat16", "ep": 2, "dispatcher": "deepep"},
    "hybridep": {
        "device": "cuda",
        "dtype": "bfloat16",
        "ep": 2,
        "dispatcher": "hybridep",
        "padding": {"tokens": "8192"},
    },
    "CUDA graphs": {
        "device": "cuda",
        "dtype": "bfloat16",
        "cuda_graphs": True,
        "padding": {"tokens": "4096,8192", "sequences": 64},
    },
    "padded": {"tp": 2, "cp": 2, "padding": {"tokens": "4096,8192", "sequences": 64}},
    "shared experts overlap": {"ep": 2, "overlap": {"shared_experts": True}},
    "muon": {"dtype": "bfloat16", "dp": 2, "optimizer": {"name": "muon", "muon": {"scale": "original"}}},
    "frozen routers": {"router": {"frozen": True}},
    "moving biases": {"router": {"bias_update_rate": 0.001}},
    "deterministic": {"deterministic": True},
    "batch-invariant": {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True},
    "batch-invariant on a CPU": {"batch_invariant": True, "tp": 4, "head_dtype": "float32", "layers": "torch"},
    "fp8": {"device": "cuda", "dtype": "bfloat16", "fp8": "tensorwise"},
    "fp8, blocks": {
        "device": "cuda",
        "dtype": "bfloat16",
        "fp8": "blockwise",
        "tp": 2,
        "recompute": {"parts": ["moe_act"]},
    },
    "fp8 on a CPU": {"fp8": "mxfp8", "layers": "torch", "tp": 4},
    "fp8 and batches": {"device": "cuda", "dtype": "bfloat16", "fp8": "tensorwise", "batch_invariant": True},
    "balanced": {"router": {"aux_loss": 0.01, "z_loss": 0.001}},
    "cuda": {"device": "cuda", "dtype": "bfloat16"},
    "cuda, cp, float32": {"device": "cuda", "cp": 2},
    "cuda, torch's layers": {"device": "cuda", "dtype": "bfloat16", "layers": "torch"},
    "TransformerEngine's layers": {"device": "cuda", "dtype": "bfloat16", "layers": "transformer_engine"},
    "TransformerEngine's layers on a CPU": {"layers": "transformer_engine"},
}
MEMORY = [  # over a recipe's keys
    *("learner.dtype=float32", "learner.recompute.uniform=null", "learner.recompute.uniform=2"),
    "learner.recompute.uniform=null learner.recompute.parts=moe_act,layernorm",
    *("learner.optimizer.name=muon", "learner.optimizer.name=muon learner.router.frozen=true learner.dtype=float32"),
    *("learner.gradient_dtype=bfloat16", "learner.optimizer.moments_dtype=bfloat16 learner.gradient_dtype=bfloat16"),
    "learner.offload.optimizer=0.25",
    "learner.recompute.uniform=null learner.offload.activations=attention,moe",
    "learner.pp=2 slurm.nodes=2 learner.recompute.uniform=null learner.offload.activations=moe",
    "rollout.server.colocated=true learner.offload.while_sampling=gradients",
    "rollout.server.colocated=true learner.offload.while_sampling=optimizer algorithm=ppo",
    *("learner.router.frozen=true", "learner.head_dtype=float32"),
    *("learner.head_dtype=float32 learner.overlap.gradients=true", "learner.cp=2 learner.dp=1"),
    "learner.fp8=tensorwise algorithm=ppo",
    "learner.fp8=blockwise learner.recompute.uniform=null learner.recompute.parts=moe_act",
    *("learner.pp=2 slurm.nodes=2", "learner.pp=2 learner.vpp=2 slurm.nodes=2"),
    "learner.pp=2 learner.vpp=2 learner.recompute.uniform=null slurm.nodes=2",
    *("learner.tp=2 learner.etp=2 learner.ep=4 learner.dp=4", "learner.max_tokens_per_micro_batch=9001"),
    "algorithm=ppo algorithm.kl.coefficient=0.1",
    "algorithm=ppo algorithm.kl.coefficient=0.1 roles.critic=separate roles.reference=separate",
    *("slurm.gpu_memory_gb=null rollout.server.memory_fraction=null", "rollout=local", "slurm.engines.nodes=1"),
]
REFUSED = [  # over the default run's keys
    *("learner.ep=2 learner.etp=2 learner.dp=3", "learner.layers=transformer_engine learner.cp=2", "learner.vpp=2"),
    *("learner.offload.optimizer=0.5", "learner.offload.while_sampling=optimizer"),
    "learner.offload.activations=mlp",
    "learner.offload.activations=moe learner.device=cuda learner.dtype=bfloat16 learner.fp8=tensorwise "
    "learner.recompute.parts=moe_act learner.layers=a.package:layers learner.dispatcher=deepep learner.ep=2",
    "learner.offload.activations=attention learner.device=cuda learner.recompute.uniform=1",
    "learner.offload.while_sampling=gradients learner.device=cuda",
    *("learner.offload.optimizer=1 learner.device=cuda", "learner.optimizer.name=muon learner.batch_invariant=true"),
    *("learner.lora.rank=8 learner.batch_invariant=true", "learner.optimizer.muon.scale=original"),
    "learner.optimizer.name=muon learner.overlap.gradients=true learner.overlap.parameters=true",
    "learner.optimizer.name=muon learner.offload.optimizer=1 learner.device=cuda learner.dtype=bfloat16",
    *("learner.gradient_dtype=bfloat16", "learner.optimizer.moments_dtype=bfloat16"),
    "learner.optimizer.moments_dtype=bfloat16 learner.offload.optimizer=0.5",
    "learner.optimizer.moments_dtype=bfloat16 learner.optimizer.beta1=0.95 learner.optimizer.beta2=0.999",
    *("learner.ep=1 learner.overlap.gradients=true", "learner.overlap.parameters=true"),
    "learner.overlap.gradients=true learner.overlap.parameters=true learner.layers=a.package:layers",
    "learner.dispatcher=deepep learner.ep=1",
    "learner.dispatcher=hybridep learner.device=cuda learner.dtype=bfloat16 learner.ep=2",
    *("learner.cuda_graphs=true", "learner.padding.tokens=4096,2048", "learner.padding.sequences=3"),
    *("learner.padding.tokens=8192 learner.padding.sequences=1 algorithm=dpo", "learner.padding.tokens=8k"),
    "learner.overlap.shared_experts=true learner.ep=1 learner.recompute.parts=shared_experts",
    "learner.overlap.shared_experts=true learner.dispatcher=deepep learner.device=cuda learner.dtype=bfloat16",
    "learner.recompute.uniform=1 learner.recompute.parts=moe,moe_act",
    *("learner.recompute_layers=true", "learner.pp=2 learner.vpp=2 learner.stage_layers=1+3"),
    "learner.router.frozen=true learner.router.z_loss=0.001",
    "learner.deterministic=true learner.device=cuda learner.dispatcher=deepep learner.dtype=bfloat16 learner.ep=2",
    "learner.fp8=delayed",
    "learner.vpp=2 learner.ep=3 learner.dp=2 learner.layers=transformer_engine learner.cp=2",
    *("learner.padding.tokens=4094,8192 learner.tp=2 learner.cp=2 learner.ep=1", "learner.padding.tokens=64,96"),
    "learner.cuda_graphs=true learner.padding.tokens=8192",
    "learner.cuda_graphs=true learner.padding.tokens=8192 learner.padding.sequences=64 learner.device=cuda "
    "learner.dtype=bfloat16 learner.layers=torch learner.pp=2 learner.cp=2 learner.dp=2 learner.recompute.uniform=1 "
    "learner.recompute.parts=mlp learner.fp8=tensorwise learner.offload.while_sampling=gradients "
    "learner.overlap.gradients=true",
    "learner.cuda_graphs=true learner.padding.tokens=8192 learner.padding.sequences=64 learner.device=cuda "
    "learner.dtype=bfloat16 learner.ep=1 algorithm=ppo",
    *("learner.dispatcher=deepep learner.device=cuda learner.ep=2", "learner.dispatcher=deepep learner.ep=2"),
    "learner.dispatcher=deepep learner.device=cuda learner.dtype=bfloat16 learner.ep=6",
    "learner.dispatcher=hybridep learner.ep=2 learner.padding.tokens=8192",
    "learner.dispatcher=hybridep learner.device=cuda learner.dtype=bfloat16 learner.ep=2 "
    "learner.padding.tokens=4096,8192",
    "learner.optimizer.moments_dtype=bfloat16 learner.optimizer.name=muon learner.device=cuda learner.dtype=bfloat16",
    "learner.draft.train=true learner.lora.rank=4 learner.optimizer.name=muon learner.fp8=blockwise "
    "learner.cuda_graphs=true learner.layers=my_layers:layer",
]


class Stop(Exception):
    """All that is asked for has been seen."""


def recipe(name: str, *keys: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(name, [*RECIPES.get(name, ["model.path=/models/given"]), *keys])
    return config, SHAPES[config.model.name or "tiny"]


def keywords(shape: ModelShape, learner: LearnerSection, *, installed: bool) -> dict[str, Any]:
    """All that megatron's constructors are called with, dtypes and functions by name; or why it is refused."""
    seen: dict[str, Any] = {}

    def record(kind: str) -> Any:
        def made(**given: Any) -> SimpleNamespace:
            seen[kind] = {key: plain(value) for key, value in given.items() if key != "shape"}
            return SimpleNamespace(**{"fp8": None, **given})

        return made

    def stop(*_: object) -> None:
        raise Stop

    def find(name: str, found: Any = importlib.util.find_spec) -> Any:
        return installed or None if name in {"transformer_engine", "flash_attn"} else found(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", find)
        for kind in ("DecoderConfig", "LatentDecoderConfig"):
            patch.setattr(build, kind, record(kind))
        patch.setattr(build, "_check_generation", lambda *_: None)  # no GPU is here
        patch.setattr(trained, "DistributedDataParallelConfig", record("DistributedDataParallelConfig"))
        patch.setattr(optimizer, "OptimizerConfig", record("OptimizerConfig"))
        patch.setattr(optimizer, "overrides", stop)
        patch.setattr("rl_megatron.features.muon.learner.LayerWise", stop)
        try:
            config = build.make_config(shape, learner)
        except ConfigError as error:
            return {"refused": reasons(error)}
        with pytest.raises(Stop):
            trained.MegatronLearner(shape, learner, torch.device("cpu"), config, [], ValueHead())
    return seen


def plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, torch.dtype | Enum):
        return str(value)
    return value.__qualname__ if callable(value) else value


def bytes_held(config: RunConfig, shape: ModelShape) -> list[dict[str, Any]]:
    """Every term of every rank that is looked at."""
    return [
        {"rank": m.rank, "stage": m.stage, "role": m.role, "terms": dict(m.terms)} for m in footprints(config, shape)
    ]


def refusal(*keys: str) -> list[str]:
    """Why the default run with these keys is refused."""
    with pytest.raises(ConfigError) as raised:
        recipe("tiny_cpu", *keys)
    return reasons(raised.value)


def reasons(error: ConfigError) -> list[str]:
    """Lines without a heading above them."""
    return sorted(line.strip() for line in str(error).splitlines() if not line.endswith(":"))


def cases() -> Iterator[tuple[str, Any]]:
    """By name: keywords of every recipe and of every shape and learner, bytes, and refusals."""
    for name in RECIPES:
        config, shape = recipe(name)
        for installed in (False, True):
            there = "there" if installed else "not there"
            yield f"{name}: keywords, TransformerEngine {there}", keywords(shape, config.learner, installed=installed)
        yield f"{name}: bytes", bytes_held(config, shape)
    for keys in MEMORY:
        yield f"qwen3_30b_a3b {keys}: bytes", bytes_held(*recipe(QWEN_30B, *keys.split()))
    for name in ("biases, windows, sinks", "dense", "latent, no stretch", "shared expert, half of a head turns"):
        config = load_config("tiny_cpu", ["learner.ep=1", "learner.pp=2"])
        yield f"{name}: bytes", bytes_held(config, SHAPES[name])
    for keys in REFUSED:
        yield f"tiny_cpu {keys}: refusal", refusal(*keys.split())
    for shape_name, learner_name, installed in given():
        learner = LearnerSection.model_validate(LEARNERS[learner_name])
        there = "there" if installed else "not there"
        yield (
            f"{shape_name}; {learner_name}: keywords, TransformerEngine {there}",
            keywords(SHAPES[shape_name], learner, installed=installed),
        )


def given() -> Iterator[tuple[str, str, bool]]:
    """Every learner with the tiny shape, every shape on CPUs and GPUs, and what is refused of some."""
    for learner, keys in LEARNERS.items():
        yield from (("tiny", learner, installed) for installed in ((False, True) if "layers" in keys else (False,)))
    yield from (("tiny", learner, True) for learner in ("cuda", "cuda, cp, float32"))
    for shape in SHAPES:
        if shape != "tiny":
            yield from ((shape, "defaults", False), (shape, "cuda", True))
    yield from (("dense", learner, False) for learner in ("frozen routers", "moving biases", "balanced"))
    yield from (("tiny", name, True) for name in ("fp8", "fp8, blocks"))
    yield from (("biases, windows, sinks", "fp8", True), ("dense", "fp8 and batches", True))
    yield "latent, no stretch", "fp8, blocks", True
    yield from (("dense", "batch-invariant", installed) for installed in (False, True))
    yield "biases, windows, sinks", "batch-invariant", True
    yield "shared expert, half of a head turns", "moving biases", False
    yield "biases, windows, sinks", "ep, etp", False
    yield "shared expert, half of a head turns", "shared experts overlap", False
    yield from (("latent, no stretch", name, True) for name in ("latents recomputed", "cuda, recomputed parts"))
    yield "latent, no stretch", "cuda, recomputed parts", False
    for shape in ("biases, windows, sinks", "norm over all heads", "latent, other norms"):
        yield shape, "TransformerEngine's layers", True


def text() -> str:
    """The file, a case a line."""
    lines: Sequence[str] = [f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in cases()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    STORED.write_text(text(), encoding="utf-8")
