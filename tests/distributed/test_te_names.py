"""TransformerEngine's classes and torch's layers have the same names, and each loads the other's checkpoints,
which is shown for four families on one rank."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_megatron.config.activations import torch_only
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.pretended import te
from tests.distributed.pretended.ranks import World, run_worlds
from tests.family_models import DENSE, MODELS, save_model

LAYERS = ("torch", "transformer_engine")
CARRIED = ("qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3")  # biases; experts; dense layers, shared experts; latents
STEPS_MADE = 7
_KERNELS = ("FLASH", "FUSED", "UNFUSED")
LAYOUTS = {"one": {}, "tp2-ep2": {"tp": 2, "ep": 2}}


def rank_main(rank: int, layout: str, families: list[str], root: Path) -> None:
    """Write every family's names; of one rank save some models in each kind of layers, and load them into the other."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.weights.layouts.families import read_shape

    seen: dict[str, Any] = {}
    given = [
        LearnerSection.model_validate({**LAYOUTS[layout], "device": "cuda", "dtype": "bfloat16", "layers": layers})
        for layers in LAYERS
    ]
    device = world.init_process_groups(given[0], rank=rank, rendezvous=f"file://{root}/rendezvous-{layout}", seed=1)
    for family in families:
        shape = read_shape(root / family)
        policies = [make_policy(shape, learner, device, temperature=1.0) for learner in given]
        seen[family] = {layers: named(policy) for layers, policy in zip(LAYERS, policies, strict=True)}
        carried = []
        for source, target in (policies, policies[::-1]) if layout == "one" and family in CARRIED else ():
            g = torch.Generator().manual_seed(len(carried))
            for tensor in source.tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=g))
            source.adopt()
            folder = root / f"{family}-{len(carried)}"
            folder.mkdir()
            source.save(folder)
            target.load(folder)
            theirs = dict(target.tensors)
            carried.append(all(torch.equal(tensor, theirs[name]) for name, tensor in source.tensors.items()))
        seen[family]["carried"] = carried
    (root / f"{layout}-{rank}.json").write_text(json.dumps(seen))
    world.destroy_process_groups()


def invariant_main(rank: int, root: Path) -> None:
    """Build a model of ``learner.batch_invariant``, and write what is in place of what. Triton has no kernels here."""
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.weights.layouts.families import read_shape

    for name in _KERNELS:  # which models of other tests set in this rank's parent
        os.environ.pop(f"NVTE_{name}_ATTN", None)
    for name in ("flash_attn", "flash_attn_interface", "triton", "triton.language"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    language = sys.modules["triton.language"]
    sys.modules["triton"].__dict__.update(
        language=language, jit=lambda *functions, **_: next(iter(functions), _as_it_is)
    )
    language.__dict__["constexpr"] = int
    keys = {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True}
    learner = LearnerSection.model_validate(keys)
    device = world.init_process_groups(learner, rank=rank, rendezvous=f"file://{root}/rendezvous-invariant", seed=1)
    policy = make_policy(read_shape(root / "qwen2"), learner, device, temperature=1.0)
    attention = policy._models[0].decoder.layers[0].self_attention.core_attention
    linears = [sys.modules[f"transformer_engine.pytorch.module.{name}"] for name in ("linear", "layernorm_linear")]
    seen = {
        "products": [module.__dict__["general_gemm"].__name__ for module in linears],
        "splits": attention.num_splits,
        "kernels": {name: os.environ[f"NVTE_{name}_ATTN"] for name in _KERNELS},
    }
    (root / "invariant.json").write_text(json.dumps(seen))
    world.destroy_process_groups()


def fp8_main(rank: int, root: Path) -> None:
    """Build models of ``learner.fp8`` on a GPU of Hopper, and write each one's recipe, tokens, or why it is refused."""
    from megatron.core.fp8_utils import get_fp8_recipe

    from rl_megatron.errors import ConfigError
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.weights.layouts.families import read_shape
    from tests.distributed.ranks import ragged_samples

    torch.version.cuda = "12.9"  # type: ignore[assignment]  # a build for CPUs has none
    keys: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
    device = world.init_process_groups(
        LearnerSection.model_validate(keys), rank=rank, rendezvous=f"file://{root}/fp8", seed=1
    )
    seen: dict[str, Any] = {}
    shape = replace(read_shape(root / "qwen3_moe"), expert_width=32, head_dim=32)
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        parked = {"offload": {"while_sampling": "gradients"}}
        learner = LearnerSection.model_validate({**keys, **parked, "fp8": recipe})
        try:
            policy = make_policy(shape, learner, device, temperature=1.0)
        except ConfigError as error:
            seen[recipe] = str(error)
            continue
        made = get_fp8_recipe(policy._models[0].config)
        (packed,) = policy._pack([ragged_samples(3, torch.Generator().manual_seed(1))])
        kept = [name for name, parameter in policy.tensors.items() if parameter.dtype != torch.bfloat16]
        modules = [module for module in policy._models[0].modules() if hasattr(module, "_fp8_workspaces")]
        for module in modules:
            module._fp8_workspaces["weight"] = torch.zeros(2, dtype=torch.uint8, device=device)
        policy.offload(pushed=True)
        left = [len(modules) > 8, sum(len(module._fp8_workspaces) for module in modules)]
        over = len(packed.input_ids) % learner.float8_rows
        seen[recipe] = [type(made).__name__, made.fp8_format.name, over, kept, left]
    (root / "fp8.json").write_text(json.dumps(seen))
    world.destroy_process_groups()


def _as_it_is(function: Any) -> Any:
    return function


def counting_main(rank: int, root: Path) -> None:
    """TransformerEngine's Adam on a stage of dense layers alone and on one with experts: what a resume counts on."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.learner.optimizer import create_state, inner_optimizers
    from rl_megatron.weights.layouts.families import read_shape

    keys = {"device": "cuda", "dtype": "bfloat16", "pp": 2, "stage_layers": "1+3"}
    shape, said, device = read_shape(root / "glm4_moe"), dict[str, Any](), None
    for name in ("adamw", "muon"):
        learner = LearnerSection.model_validate({**keys, "optimizer": {"name": name}})
        if device is None:
            device = world.init_process_groups(
                learner, rank=rank, rendezvous=f"file://{root}/rendezvous-counting", seed=1
            )
        policy, again = (make_policy(shape, learner, device, temperature=1.0) for _ in range(2))
        create_state(policy._optimizer)
        for one in policy.tensors.values():
            one.zero_()
        for group in groups(policy):  # as its step leaves it, of which the kernel is not here
            group["step"] = STEPS_MADE
        folder = root / f"counted-{name}"
        folder.mkdir(exist_ok=True)
        policy.save(folder)
        again.load(folder)
        links = inner_optimizers(again._optimizer)
        kinds = sorted({type(part.optimizer).__module__ for part in links})
        said[name] = {"kinds": kinds, "steps": [group.get("step") for group in groups(again)], "links": len(links)}
    (root / f"counting-{rank}.json").write_text(json.dumps(said))
    world.destroy_process_groups()


def groups(policy: Any) -> list[dict[str, Any]]:
    """The groups of Adam's optimizers that have parameters."""
    return [group for group in policy._optimizer.param_groups if group["params"] and "betas" in group]


def named(policy: Any) -> dict[str, Any]:
    """Parameters by name, the parts of a checkpoint by key, and the class of the first layer's projection."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    from rl_megatron.learner.checkpoint.state import weights

    state = [weights(chunk) for chunk in policy._trained]
    parts = [part for part in nested_values(state) if isinstance(part, ShardedBase)]
    projection = policy._models[0].decoder.layers[0].self_attention.linear_proj
    return {
        "tensors": {name: (list(t.shape), str(t.dtype)) for name, t in sorted(policy.tensors.items())},
        "shards": sorted(str((p.key, *where(p))) for p in parts),
        "classes": type(projection).__module__.split(".")[0:4],
    }


def where(part: Any) -> tuple[object, ...]:
    return tuple(getattr(part, name, None) for name in ("global_shape", "global_offset", "replica_id"))


ALONE = (invariant_main, fp8_main)
pytestmark = pytest.mark.skipif(not (te.FOLDER / ".installed").exists(), reason="needs `make .venv/te/.installed`")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By layout, what each rank saw of each family that TransformerEngine supports."""
    root = tmp_path_factory.mktemp("te")
    for name in MODELS:
        save_model(name, root / name)
        if "kv_lora_rank" in MODELS[name][1]:
            one_eps(root / name / "config.json")
    able = [name for name in MODELS if torch_only(read_shape(root / name)) is None]
    families = {"one": able, "tp2-ep2": [name for name in able if name not in DENSE]}
    sizes = {"one": 1, "tp2-ep2": 2}
    worlds = [
        World(main=rank_main, size=size, arguments=(layout, families[layout], root)) for layout, size in sizes.items()
    ]
    alone = {**dict.fromkeys(ALONE, 1), counting_main: 2}
    worlds += [World(main=main, size=size, arguments=(root,)) for main, size in alone.items()]
    run_worlds(worlds, before=te.load)
    sizes["counting"] = 2
    paths = {layout: sorted(Path(root).glob(f"{layout}-[01].json")) for layout in sizes}
    paths |= {name: [root / f"{name}.json"] for name in ("invariant", "fp8")}
    return {layout: [json.loads(path.read_text()) for path in found] for layout, found in paths.items()}


def one_eps(path: Path) -> None:
    """Gives all norms of latent attention the epsilon of the latents' norms, as published models have it: megatron-core
    has one."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-6}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_shapes_and_shards_are_the_same(layout: str, seen: Any) -> None:
    for rank in seen[layout]:
        assert len(rank) >= (14 if layout == "one" else 9)
        for family, said in rank.items():
            ours, theirs = (said[layers] for layers in LAYERS)
            assert (ours["classes"] == theirs["classes"]) is False, family
            assert ours["tensors"] == theirs["tensors"], family
            assert ours["shards"] == theirs["shards"], family


def test_each_loads_the_others_checkpoints(seen: Any) -> None:
    (rank,) = seen["one"]
    carried = {family: said["carried"] for family, said in rank.items() if said["carried"]}
    assert carried == {family: [True, True] for family in CARRIED}


def test_a_batch_invariant_learner_has_megatrons_products_and_attention_in_one_split(seen: Any) -> None:
    (rank,) = seen["invariant"]
    kernels = {"FLASH": "1", "FUSED": "0", "UNFUSED": "0"}
    assert rank == {"products": ["_te_general_gemm_patched"] * 2, "splits": 1, "kernels": kernels}


def test_a_resume_counts_the_steps_of_experts_though_the_first_stage_has_none(seen: Any) -> None:
    """The Adam is TransformerEngine's, which counts steps by group and leaves out groups without parameters."""
    adam = "transformer_engine.pytorch.optimizers.fused_adam"
    for rank in seen["counting"]:
        assert rank["adamw"]["kinds"] == [adam]
        assert rank["muon"]["kinds"] == ["rl_megatron.features.muon.learner", adam]
        for one in rank.values():
            assert one["links"] == 2
            assert set(one["steps"]) == {STEPS_MADE}


def test_float8_has_transformer_engines_recipe_padded_tokens_and_bfloat16_parameters(seen: Any) -> None:
    """And no copies of weights while servers sample."""
    (rank,) = seen["fp8"]
    assert rank["tensorwise"] == ["Float8CurrentScaling", "HYBRID", 0, [], [True, 0]]
    assert rank["blockwise"] == ["Float8BlockScaling", "E4M3", 0, [], [True, 0]]
    assert "learner.fp8=mxfp8: Device compute capability 10.0 or higher required for MXFP8" in rank["mxfp8"]
