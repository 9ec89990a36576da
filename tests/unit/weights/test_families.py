"""Tables of all families against what transformers saves, and readers of config.json against transformers' own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV32Config,
    GlmMoeDsaConfig,
    HYV3Config,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from typing_extensions import override

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.models.families.common import REFUSED
from rl_megatron.models.families.fields import ConfigFields
from rl_megatron.models.json_files import Fields
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape, Router
from rl_megatron.types import ParallelDims
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.formats.hf_folder import is_draft
from rl_megatron.weights.formats.schemes import read_scheme
from rl_megatron.weights.layouts import families
from rl_megatron.weights.layouts.families import FAMILIES, find_family, hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.learner import elements, trained_elements
from rl_megatron.weights.plans.plan import plan
from tests.family_models import MODELS, save_model
from tools.convert.inspection import describe, dropped_tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for name in MODELS:
        save_model(name, root / name)
    return root


def changed(folder: Path, out: Path, **values: Any) -> Path:
    """The folder's config.json alone with other values; None removes a key."""
    out.mkdir()
    raw = json.loads((folder / "config.json").read_text()) | values
    (out / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return out


def test_every_family_is_tested_and_no_model_type_is_of_two() -> None:
    assert FAMILIES.keys() == {kind for kind, _ in MODELS.values()} | {"kimi_k2"}  # saved as deepseek_v3
    assert sorted(FAMILIES) == sorted(name for family in families._ALL for name in family.model_types)


@pytest.mark.parametrize("name", MODELS)
def test_the_hf_table_is_what_transformers_saves(name: str, saved: Path) -> None:
    shape = read_shape(saved / name)
    named = {key: size for key, size in HFFolder(saved / name).shapes().items() if not is_draft(key, shape)}
    assert named == hf_layout(shape).local_shapes(0)


@pytest.mark.parametrize("name", MODELS)
def test_the_planner_counts_every_parameter_that_transformers_saves(name: str, saved: Path) -> None:
    """But an indexer's float32 ones and the bias for the choice of experts, which are small."""
    shape = read_shape(saved / name)
    small = ("expert_bias", "e_score_correction_bias", "weights_proj.weight")
    small += ("indexer.k_norm.weight", "indexer.k_norm.bias")
    files = {key: size for key, size in HFFolder(saved / name).shapes().items() if not is_draft(key, shape)}
    wanted = sum(prod(size) for key, size in files.items() if not key.endswith(small))
    assert elements(replace(megatron_layout(shape), vocab_multiple=1), 0).both == wanted


def test_the_named_qwen3_next_is_that_of_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = Qwen3NextConfig(rope_parameters=rope, max_position_embeddings=262144)
    config.save_pretrained(tmp_path)
    named = NAMED["qwen3-next-80b-a3b"]
    assert read_shape(tmp_path) == named
    with torch.device("meta"):
        wanted = sum(p.numel() for p in Qwen3NextForCausalLM(config).parameters())
    assert elements(megatron_layout(named), 0).both == wanted == 79_674_391_296


def test_the_named_hunyuan_3_is_that_of_transformers(tmp_path: Path) -> None:
    config = HYV3Config()
    config.save_pretrained(tmp_path)
    named = NAMED["hunyuan-3"]
    assert read_shape(tmp_path) == named
    with torch.device("meta"):
        wanted = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert elements(megatron_layout(named), 0).both == wanted


@pytest.mark.parametrize(
    ("name", "kind", "rope"),
    [
        (
            "deepseek-v3.2",
            DeepseekV32Config,
            {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32}
            | {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4},
        ),
        ("glm-5", GlmMoeDsaConfig, {"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_named_models_with_indexers_are_correct(name: str, kind: Any, rope: dict[str, Any], tmp_path: Path) -> None:
    """An indexer's norm and weights of heads are held in float32 and counted nowhere: 0.02 % of a layer's bytes."""
    config = kind(rope_parameters=rope)
    config.save_pretrained(tmp_path)
    named = NAMED[name]
    assert read_shape(tmp_path) == replace(named, draft_layers=0)
    with torch.device("meta"):
        sizes = {key: p.numel() for key, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    wanted = sum(size for key, size in sizes.items() if ".k_norm." not in key and "weights_proj" not in key)
    layout, run = megatron_layout(named), RunConfig()
    assert elements(layout, 0).both == wanted
    frozen = sum(size for key, size in sizes.items() if ".indexer.w" in key and "weights_proj" not in key)
    assert elements(layout, 0).both - trained_elements(run, layout)[0].both == frozen > 5e8
    adapted = RunConfig.model_validate({"learner": {"lora": {"rank": 4}}})
    assert not any("indexer" in row.name for row in LoraLayouts(adapted.learner.lora).on_ranks(layout).rows())


@pytest.mark.parametrize(
    ("spelling", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"indexer_types": ["full", "full", "full", "shared", "shared", "shared"]}, (0, 1, 2)),
        ({"index_topk_pattern": "FFSFSS"}, (0, 1, 3)),
        ({"index_topk_freq": 3}, (0, 1, 4)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, (0, 1, 2, 4)),
    ],
)
def test_glm_5_names_indexers(spelling: dict[str, Any], layers: tuple[int, ...], saved: Path, tmp_path: Path) -> None:
    """As transformers' class derives them."""
    given = {"num_hidden_layers": 6, "mlp_layer_types": ["dense"] + ["sparse"] * 5, "indexer_types": None, **spelling}
    shape = read_shape(changed(saved / "glm_moe_dsa", tmp_path / "other", **given))
    kinds = GlmMoeDsaConfig(num_hidden_layers=6, **spelling).indexer_types
    assert shape.indexer.layers == layers == tuple(n for n, kind in enumerate(kinds) if kind == "full")


def test_a_tower_beside_a_text_model_is_said(saved: Path, tmp_path: Path) -> None:
    folder = saved / "qwen3_5_moe_stacked"
    assert read_shape(folder).stacked_experts
    assert not read_shape(saved / "qwen3_5_moe").stacked_experts
    told = "model.visual: only the text model is trained and converted; the new folder has no tower"
    assert dropped_tensors(folder) == dropped_tensors(saved / "qwen3_5_moe") == told
    assert dropped_tensors(saved / "qwen3_next") is None
    assert any(name.startswith("model.visual.") for name in HFFolder(folder).shapes())
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    assert read_shape(tmp_path / "megatron") == read_shape(folder)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert "beside the model: a tower" in {part.what for part in describe(folder).parts}
    assert "stacked_experts" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in HFFolder(tmp_path / "back").shapes()


@pytest.mark.parametrize("family", sorted({kind for kind, _ in MODELS.values()}))
def test_no_row_is_without_a_model(family: str, saved: Path) -> None:
    shapes = [read_shape(saved / name) for name, (kind, _) in MODELS.items() if kind == family]
    for table in FAMILIES[family].tables.values():
        used = set()
        for shape, tied, scores, drafts, pp in product(shapes, *[(False, True)] * 3, (1, 2)):
            known = replace(shape, tie_embeddings=tied, has_score_head=scores, num_draft_layers=drafts, draft_layers=1)
            layout = Layout(table=table, shape=known, dims=ParallelDims(pp=pp))
            used |= {id(row) for row in layout.rows() if layout.layer_stages(row)}
        assert [row.name for row in table if id(row) not in used] == []


def test_a_dense_model_has_nothing_for_ep_to_spread(saved: Path) -> None:
    shape = read_shape(saved / "llama")
    with pytest.raises(ConfigError, match="ep = 2: the model has no experts; use ep=1"):
        megatron_layout(shape, ParallelDims(ep=2, dp=2))


def test_fused_experts_are_spread_along_their_first_dim(saved: Path) -> None:
    shape = read_shape(saved / "gpt_oss")
    layout, name = megatron_layout(shape, ParallelDims(ep=2, dp=2)), "decoder.layers.1.mlp.experts.down_proj"
    moves = [t for t in plan(hf_layout(shape), layout, placement={1: 1}).receives(1) if t.dst_param == name]
    assert [(t.src_box, t.dst_box) for t in moves] == [(((2, 4), (0, 48), (0, 32)), ((0, 2), (0, 48), (0, 32)))]


def test_engines_get_their_stacks(saved: Path) -> None:
    """By hand for GLM-4.5, tp=2: biases, dense and shared MLPs and experts, each part cut by itself."""
    shape = read_shape(saved / "glm4_moe")
    hf = load_file(saved / "glm4_moe" / "model.safetensors")
    dims = ParallelDims(tp=2, etp=2)
    engine = Layout(table=find_family(shape).tables["engine"], shape=shape, dims=dims)
    for rank in range(2):
        got = {name: torch.full(size, float("nan")) for name, size in engine.local_shapes(rank).items()}
        for t in plan(hf_layout(shape), engine, placement={rank: rank}).receives(rank):
            piece = hf[t.src_param][tuple(slice(*span) for span in t.src_box)]
            got[t.dst_param][tuple(slice(*span) for span in t.dst_box)] = piece

        def halves(pattern: str, *parts: str, dim: int = 0, rank: int = rank) -> Tensor:
            return torch.cat([hf[pattern.format(part)].chunk(2, dim)[rank] for part in parts], dim)

        layer = "model.layers.2."
        wanted = {
            layer + "self_attn.qkv_proj.bias": halves(layer + "self_attn.{}_proj.bias", *"qkv"),
            layer + "self_attn.qkv_proj.weight": halves(layer + "self_attn.{}_proj.weight", *"qkv"),
            "model.layers.0.mlp.gate_up_proj.weight": halves("model.layers.0.mlp.{}_proj.weight", "gate", "up"),
            layer + "mlp.shared_experts.gate_up_proj.weight": halves(
                layer + "mlp.shared_experts.{}_proj.weight", "gate", "up"
            ),
            layer + "mlp.experts.w13_weight.3": halves(layer + "mlp.experts.3.{}_proj.weight", "gate", "up"),
            layer + "mlp.experts.w2_weight.3": halves(layer + "mlp.experts.3.{}_proj.weight", "down", dim=1),
            layer + "mlp.gate.e_score_correction_bias": hf[layer + "mlp.gate.e_score_correction_bias"],
        }
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name


def test_transformers_4_wrote_ropes_otherwise(saved: Path, tmp_path: Path) -> None:
    new = json.loads((saved / "llama" / "config.json").read_text())["rope_parameters"]
    scaling = {key: value for key, value in new.items() if key != "rope_theta"}
    old = changed(
        saved / "llama", tmp_path / "old", rope_parameters=None, rope_theta=new["rope_theta"], rope_scaling=scaling
    )
    assert read_shape(old) == read_shape(saved / "llama")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported; allowed: False"),
        ("llama", {"attention_bias": True}, "attention_bias=True is not supported; allowed: False"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported; allowed: "),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; allowed: 1.0"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; allowed: 1.0"),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.7}},
            "mscale_all_dim is not supported with rope_type='linear'; allowed: with 'yarn'",
        ),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported; allowed: True"),
        ("mistral", {"sliding_window": 8, "use_sliding_window": False}, "use_sliding_window=False is not supported"),
        ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; allowed: 'silu'"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 4}, "layer_types=.* is not supported; allowed: 'full_att"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; allowed: 'sigmoid'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported; allowed: None"),
        ("olmoe", {"attention_bias": True}, "attention_bias=True is not supported; allowed: False"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types=.* 'dense' for the first"),
        ("glm4_moe_lite", {"first_k_dense_replace": 1}, "mlp_layer_types=.* with first_k_dense_replace=1 is not"),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave=False is not supported; allowed: True"),
        ("glm4_moe_lite", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported; allowed: True"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "layer_types=.* allowed: 'linear_attention' or '"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "layer_types=.* for each of 4 layers"),
        ("qwen3_next", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported; allowed: \[\]"),
        ("qwen3_next", {"linear_num_value_heads": 6}, "4 key heads of delta nets do not divide their 6 value heads"),
        ("glm_moe_dsa", {"indexer_types": ["full", "short"] * 2}, "indexer_types=.* allowed: 'full' or 'shared' for"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"] * 2}, "the first layer has no indexer; its indexer_types"),
        ("deepseek_v32", {"q_lora_rank": None}, "no q_lora_rank; fetch the file again"),
        ("hy_v3", {"route_norm": False}, "route_norm=False is not supported; allowed: True"),
        ("hy_v3", {"qk_norm": False}, "qk_norm=False is not supported; allowed: True"),
        ("hy_v3", {"num_shared_experts": 0}, "num_shared_experts=0: Input should be greater than or equal to 1"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0: Input should be greater than or equal to 1"),
        ("kimi_k25", {"text_config": None}, "no text_config; fetch the file again"),
        ("glm4_moe", {"model_type": "nemotron_h"}, "model_type='nemotron_h' is not supported: its mamba layers are"),
        ("glm4_moe", {"model_type": "ernie4_5_moe"}, "'ernie4_5_moe' is not supported: its routers add a bias to soft"),
        ("glm4_moe", {"model_type": "granitemoe"}, "'granitemoe' is not supported: factors of its config.json"),
        ("glm4_moe", {"model_type": "glm5"}, "model_type='glm5' is not supported; allowed: 'qwen2', 'qwen3'"),
    ],
)
def test_the_rest_is_refused(name: str, values: dict[str, Any], message: str, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shape(changed(saved / name, tmp_path / "other", **values))


@pytest.mark.parametrize("flag", ["norm_topk_prob", "rope_interleave"])
def test_a_null_flag_is_false(flag: str, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((saved / "deepseek_v3/config.json").read_text()) | {flag: None})
    )
    with pytest.raises(ConfigError, match=f"{flag}=None is not supported; allowed: True"):
        read_shape(tmp_path)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_family_that_is_not_computed_here_is_refused_by_name_with_its_reason(kind: str, tmp_path: Path) -> None:
    """Whatever types its own config.json has for keys that are read of other families."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"model_type={kind!r} is not supported: {REFUSED[kind]}")):
        read_shape(tmp_path)


def test_public_configs_have_the_fields_that_matter() -> None:
    """MiniMax-M2's and GLM-4.5's own spelling (their config.json on the hub), which transformers rewrites."""
    path = Path("config.json")
    common = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    common |= {"vocab_size": 99, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "num_experts_per_tok": 2}
    minimax = FAMILIES["minimax_m2"].read(
        {**common, "model_type": "minimax_m2", "head_dim": 32, "rotary_dim": 16, "num_local_experts": 4}
        | {"intermediate_size": 8, "rope_theta": 5e6, "use_mtp": True, "num_mtp_modules": 3},
        path,
    )
    assert (minimax.rotary_dim, minimax.draft_layers, minimax.rope_theta) == (16, 3, 5e6)
    assert minimax.router == Router(score="sigmoid", selection_bias=True)
    glm = FAMILIES["glm4_moe"].read(
        {**common, "model_type": "glm4_moe", "head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1}
        | {"moe_intermediate_size": 8, "intermediate_size": 16, "first_k_dense_replace": 1, "attention_bias": True}
        | {"num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "use_qk_norm": False, "rope_theta": 1e6},
        path,
    )
    assert (glm.rotary_dim, glm.draft_layers, glm.qk_norm, glm.qkv_bias) == (16, 1, None, True)
    assert (glm.router.scaling, glm.moe_layers) == (2.5, range(1, 4))


def test_hunyuan_3_has_two_spellings(saved: Path, tmp_path: Path) -> None:
    """The published one, which vLLM reads, and transformers'."""
    published = {"expert_hidden_dim": 24, "first_k_dense_replace": 1, "route_norm": True, "qk_norm": True}
    aside = {"moe_intermediate_size": None, "mlp_layer_types": None}
    folder = changed(saved / "hy_v3", tmp_path / "published", **published, **aside, num_nextn_predict_layers=1)
    assert read_shape(folder) == replace(read_shape(saved / "hy_v3"), draft_layers=1)


@pytest.mark.parametrize(
    ("spelling", "sparse"),
    [
        ({"first_k_dense_replace": 2, "num_nextn_predict_layers": 1}, range(2, 4)),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"]}, range(3, 4)),
        ({"mlp_layer_types": ["sparse"] * 4}, range(4)),
        ({}, range(1, 4)),
    ],
)
def test_glm_flash_says_in_two_ways_which_layers_are_dense(spelling: dict[str, Any], sparse: range) -> None:
    """With the sizes of a head of GLM-4.7-Flash's own config.json; what is missing is as in transformers' class."""
    shape = FAMILIES["glm4_moe_lite"].read(
        {"model_type": "glm4_moe_lite", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 20}
        | {"vocab_size": 99, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "num_experts_per_tok": 4}
        | {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
        | {"n_routed_experts": 64, "moe_intermediate_size": 8, "intermediate_size": 16, "rope_theta": 1e6}
        | {"partial_rotary_factor": 1.0, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, **spelling},
        Path("config.json"),
    )
    assert (shape.moe_layers, shape.shared_width, shape.head_dim, shape.rotary_dim) == (sparse, 8, 256, 64)
    assert shape.router == Router(score="sigmoid", selection_bias=True, scaling=1.8)
    assert shape.draft_layers == spelling.get("num_nextn_predict_layers", 0)


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("minimax_m2", ("e_score_correction_bias",)),
        ("glm_moe_dsa", ("e_score_correction_bias", "k_norm.weight", "k_norm.bias", "weights_proj.weight")),
    ],
)
def test_a_cast_leaves_float32_buffers_alone(family: str, kept: tuple[str, ...], saved: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(saved / family, tmp_path / "megatron", dtype=DType.BF16)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back", dtype=DType.F16)
    original, back = (load_file(x / "model.safetensors") for x in (saved / family, tmp_path / "back"))
    for name, tensor in back.items():
        if name.endswith(kept):
            assert torch.equal(tensor, original[name])
        else:
            assert tensor.dtype == torch.float16


# A key that a family's config.json lacks is what transformers' configuration class of that family makes of it.
_OWN: Mapping[str, Mapping[str, Any]] = {  # where a class's own defaults are no model
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128},
}
_CLASSES = {"kimi_k2": "deepseek_v3"}
_OLDER: Mapping[str, Any] = {  # spellings of transformers 4
    "rope_theta": 2e4,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
}


def shape_of(config: Mapping[str, Any], folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config))
    return replace(read_shape(folder), draft_layers=0)  # of the key alone, as fields.py says


def trimmed(config: dict[str, Any], keys: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Without each of ``keys`` and each part of the ropes' and the text model's, or with null for it."""
    paths: list[tuple[str, ...]] = [(key,) for key in config if key in keys]
    paths += [(key, part) for key in ("rope_parameters", "text_config") for part in config.get(key) or ()]
    for *above, last in paths:
        for null in (False, True):
            changed = deepcopy(config)
            inner = changed[above[0]] if above else changed
            if null:
                inner[last] = None
            else:
                del inner[last]
            yield ".".join((*above, f"{last}={'null' if null else 'missing'}")), changed


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_lacks_is_as_transformers_has_it_or_refused(family: str, tmp_path: Path) -> None:
    kind = CONFIG_MAPPING[_CLASSES.get(family, family)]
    full = json.loads(json.dumps(kind(**_OWN.get(family, {})).to_dict() | {"model_type": family}, default=str))
    older = {} if "text_config" in full else {**full, "rope_parameters": None, **_OLDER}
    found, compared = {}, 0
    for config, keys in ((full, ConfigFields.model_fields.keys() - {"model_type"}), (older, _OLDER)):
        for name, less in trimmed(config, keys):
            try:
                known = kind.from_dict(deepcopy(less)).to_dict() | {"model_type": family}
                wanted = shape_of(json.loads(json.dumps(known, default=str)), tmp_path)
            except (
                ConfigError,
                StrictDataclassError,
                ArithmeticError,
                KeyError,
                TypeError,
            ):  # transformers has no such model, or this package
                continue
            try:
                read = shape_of(less, tmp_path)
            except ConfigError:
                continue
            compared += 1
            if read != wanted:
                found[name] = (read, wanted)
    assert not found
    assert compared > 10


class Asked(Fields):
    """A config that notes which keys its reader asks for."""

    keys_read: set[str] = set()  # noqa: RUF012 (of all copies)

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", MODELS)
def test_a_key_that_the_family_does_not_read_may_have_any_value(name: str, saved: Path, tmp_path: Path) -> None:
    """As Qwen3-Coder has ``shared_expert_intermediate_size: 0``."""
    config = json.loads((saved / name / "config.json").read_text())
    wanted = read_shape(saved / name)
    (tmp_path / "model.safetensors").symlink_to(saved / name / "model.safetensors")
    Asked.keys_read.clear()
    FAMILIES[config["model_type"]].read(Asked(config, tmp_path, ConfigFields), tmp_path)
    read = Asked.keys_read | {"architectures", "quantization_config", "stacked_experts", "stacked_drafts"}
    others = sorted(ConfigFields.model_fields.keys() - read)
    assert len(others) > 20
    for value in (0, -1, None, 0.5, 1 << 40, "other", [], {"factor": -1}, True):
        (tmp_path / "config.json").write_text(json.dumps(config | dict.fromkeys(others, value)))
        assert read_shape(tmp_path) == wanted
        assert read_scheme(tmp_path) is None
        assert describe(tmp_path).parts == describe(saved / name).parts


def test_keys_of_other_kinds_of_ropes_and_quantisations_may_have_any_value(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "llama_linear" / "config.json").read_text())
    rope = {**config["rope_parameters"], "beta_fast": -1, "low_freq_factor": "x", "original_max_position_embeddings": 0}
    quantized = {"quant_method": "fp8", "weight_block_size": [16, 16], "config_groups": 0, "transform_config": -1}
    config |= {"rope_parameters": rope, "quantization_config": quantized}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path) == read_shape(saved / "llama_linear")
    scheme = read_scheme(tmp_path)
    assert scheme is not None
    assert scheme.edges == (16, 16)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "moonlight"])
def test_megatrons_tensors_are_those_that_mbridge_makes(name: str, saved: Path) -> None:
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    shape, folder = read_shape(saved / name), saved / name
    bridge = object.__new__(DeepseekV3Bridge)  # its rules alone: they need neither model nor process groups
    bridge.dtype = bridge.make_vocab_size_divisible_by = None
    layout, hf = replace(megatron_layout(shape), vocab_multiple=1), load_file(folder / "model.safetensors")
    ours = {name: torch.full(size, torch.nan) for name, size in layout.local_shapes(0).items()}
    read_boxes(HFFolder(folder), hf_layout(shape), layout, 0, ours)
    used: set[str] = set()
    for key, tensor in ours.items():
        sources = bridge._weight_name_mapping_mcore_to_hf(key)
        used.update(sources)
        assert torch.equal(tensor, bridge._weight_to_mcore_format(key, [hf[source] for source in sources])), key
    assert used == hf.keys()
