"""TransformerEngine's classes and torch's layers have the same names, and each loads the other's checkpoints,
which is shown for four families on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.options.implementation import torch_only
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed import te_names
from tests.distributed.pretended import te
from tests.distributed.pretended.ranks import World, run_worlds
from tests.family_models import DENSE, MODELS, save_model

ALONE = (te_names.invariant_main, te_names.fused_main, te_names.fp8_main)
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
        World(main=te_names.rank_main, size=size, arguments=(layout, families[layout], root))
        for layout, size in sizes.items()
    ]
    alone = {**dict.fromkeys(ALONE, 1), te_names.counting_main: 2}
    worlds += [World(main=main, size=size, arguments=(root,)) for main, size in alone.items()]
    run_worlds(worlds, before=te.load)
    sizes["counting"] = 2
    paths = {layout: sorted(Path(root).glob(f"{layout}-[01].json")) for layout in sizes}
    paths |= {name: [root / f"{name}.json"] for name in ("invariant", "fused", "fp8")}
    return {layout: [json.loads(path.read_text()) for path in found] for layout, found in paths.items()}


def one_eps(path: Path) -> None:
    """Gives all norms of latent attention the epsilon of the latents' norms, as published models have it: megatron-core
    has one."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-6}))


@pytest.mark.parametrize("layout", te_names.LAYOUTS)
def test_names_shapes_and_shards_are_the_same(layout: str, seen: Any) -> None:
    for rank in seen[layout]:
        assert len(rank) >= (14 if layout == "one" else 9)
        for family, said in rank.items():
            ours, theirs = (said[layers] for layers in te_names.LAYERS)
            assert (ours["classes"] == theirs["classes"]) is False, family
            assert ours["tensors"] == theirs["tensors"], family
            assert ours["shards"] == theirs["shards"], family


def test_each_loads_the_others_checkpoints(seen: Any) -> None:
    (rank,) = seen["one"]
    carried = {family: said["carried"] for family, said in rank.items() if said["carried"]}
    assert carried == {family: [True, True] for family in te_names.CARRIED}


def test_a_batch_invariant_learner_has_megatrons_products_and_attention_in_one_split(seen: Any) -> None:
    (rank,) = seen["invariant"]
    kernels = {"FLASH": "1", "FUSED": "0", "UNFUSED": "0"}
    assert rank == {"products": ["_te_general_gemm_patched"] * 2, "splits": 1, "kernels": kernels}


def test_a_fused_router_asks_the_kernel_alone_and_its_routes_are_refused(seen: Any) -> None:
    (rank,) = seen["fused"]
    assert rank["asked"] == [[5, 4], "torch.float32", 2, True, None, None, None, "softmax", None]  # of qwen3_moe
    assert rank["permute"]
    assert rank["said"][0] == ""
    assert ["learner.fusion.router=true can be neither replayed nor read" in said for said in rank["said"][1:]] == [
        True
    ] * 2


def test_a_resume_counts_the_steps_of_experts_though_the_first_stage_has_none(seen: Any) -> None:
    """The Adam is TransformerEngine's, which counts steps by group and leaves out groups without parameters."""
    adam = "transformer_engine.pytorch.optimizers.fused_adam"
    for rank in seen["counting"]:
        assert rank["adamw"]["kinds"] == [adam]
        assert rank["muon"]["kinds"] == ["rl_megatron.learner.muon.newton_schulz", adam]
        for one in rank.values():
            assert one["links"] == 2
            assert set(one["steps"]) == {te_names.STEPS_MADE}


def test_float8_has_transformer_engines_recipe_padded_tokens_and_bfloat16_parameters(seen: Any) -> None:
    """And no copies of weights while servers sample."""
    (rank,) = seen["fp8"]
    assert rank["tensorwise"] == ["Float8CurrentScaling", "HYBRID", 0, [], [True, 0]]
    assert rank["blockwise"] == ["Float8BlockScaling", "E4M3", 0, [], [True, 0]]
    assert "learner.fp8=mxfp8: Device compute capability 10.0 or higher required for MXFP8" in rank["mxfp8"]
