from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import LatentAttention, ModelShape, Router
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.deepseek_v3 import HF_DEEPSEEK_V3, MEGATRON_DEEPSEEK_V3
from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE

SHAPE = ModelShape(
    num_layers=3,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=4,
    head_dim=6,
    num_experts=4,
    experts_per_token=2,
    expert_width=8,
    vocab_size=21,
    rope_theta=1e4,
    norm_eps=1e-6,
    normalize_top_k=True,
    tie_embeddings=False,
    max_positions=64,
    latent=LatentAttention(query_rank=10, kv_rank=12, nope_dim=4, rope_dim=2, value_dim=5),
    dense_layers=1,
    dense_width=24,
    shared_width=16,
    family="deepseek_v3",
    router=Router(score="sigmoid", selection_bias=True, scaling=2.5),
    qk_norm=None,
)


V2_LITE = replace(
    SHAPE,
    family="deepseek_v2",
    normalize_top_k=False,
    latent=LatentAttention(query_rank=None, kv_rank=12, nope_dim=4, rope_dim=2, value_dim=5),
    router=Router(),
)


def save_with_transformers(shape: ModelShape, folder: Path) -> None:
    """A random model of ``shape``, written by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    latent = shape.latent
    assert latent is not None
    v2: Mapping[str, Any] = {"topk_method": "greedy", "norm_topk_prob": False}
    v3: Mapping[str, Any] = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.dense_width,
        moe_intermediate_size=shape.expert_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        n_shared_experts=2,
        n_routed_experts=shape.num_experts,
        num_experts_per_tok=shape.experts_per_token,
        kv_lora_rank=latent.kv_rank,
        q_lora_rank=latent.query_rank,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
        qk_nope_head_dim=latent.nope_dim,
        first_k_dense_replace=shape.dense_layers,
        max_position_embeddings=shape.max_positions,
        **(v2 if shape.family == "deepseek_v2" else v3),
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if key in model.state_dict():
                value.normal_()
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=[SHAPE, V2_LITE], ids=["v3", "v2-lite"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelShape, Path]:
    folder = tmp_path_factory.mktemp("deepseek")
    save_with_transformers(request.param, folder)
    return request.param, folder


def test_the_hf_table_is_what_transformers_writes(saved: tuple[ModelShape, Path]) -> None:
    shape, folder = saved
    assert read_shape(folder) == shape
    assert HFFolder(folder).shapes() == hf_layout(shape).local_shapes(0)


def test_megatrons_tensors_are_those_that_mbridge_makes(saved: tuple[ModelShape, Path]) -> None:
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    shape, folder = saved
    bridge = object.__new__(DeepseekV3Bridge)  # its rules alone: they need neither model nor process groups
    bridge.dtype = bridge.make_vocab_size_divisible_by = None
    layout, hf = replace(megatron_layout(shape), vocab_multiple=1), load_file(folder / "model.safetensors")
    ours = {name: torch.full(size, torch.nan) for name, size in layout.local_shapes(0).items()}
    read_boxes(HFFolder(folder), hf_layout(shape), layout, 0, ours)
    used: set[str] = set()
    for name, tensor in ours.items():
        sources = bridge._weight_name_mapping_mcore_to_hf(name)
        used.update(sources)
        assert torch.equal(tensor, bridge._weight_to_mcore_format(name, [hf[source] for source in sources])), name
    assert used == hf.keys()


def megatrons_own_shapes() -> dict[str, tuple[int, ...]]:
    """Parameters of the GPTModel that megatron-core itself builds, by the names that they have without TE."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    latent = SHAPE.latent
    assert latent is not None
    config = MLATransformerConfig(
        num_layers=SHAPE.num_layers,
        hidden_size=SHAPE.hidden_size,
        num_attention_heads=SHAPE.num_heads,
        ffn_hidden_size=SHAPE.dense_width,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_head_dim=latent.nope_dim,
        qk_pos_emb_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
        rope_type="rope",
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        num_moe_experts=SHAPE.num_experts,
        moe_ffn_hidden_size=SHAPE.expert_width,
        moe_shared_expert_intermediate_size=SHAPE.shared_width,
        moe_layer_freq=[0, 1, 1],
        moe_router_topk=SHAPE.experts_per_token,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        use_cpu_initialization=True,
    )
    parallel_state.initialize_model_parallel()
    try:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        for layer in spec.layer_specs:  # the torch attention has no parameters, and takes no latent head sizes
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
        model = GPTModel(
            config,
            spec,
            vocab_size=24,  # 21 padded to a multiple of 8
            max_sequence_length=SHAPE.max_positions,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
    finally:
        parallel_state.destroy_model_parallel()
    tensors = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith("expert_bias"))]
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def test_the_megatron_table_is_what_megatron_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its local spec has no TransformerEngine: the norms that TE fuses into the next projection stand by themselves."""
    from megatron.core.transformer import multi_latent_attention

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where the rotary frequencies are made
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)  # true where even its stand-in is missing
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        own = megatrons_own_shapes()
    finally:
        dist.destroy_process_group()
    spelled = {}
    for name, shape in own.items():
        fused = name.replace("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight")
        fused = fused.replace("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight")
        fused = re.sub(r"(layers\.0)\.pre_mlp_layernorm\.weight", r"\1.mlp.linear_fc1.layer_norm_weight", fused)
        fused = re.sub(r"local_experts\.(\d+)\.(linear_fc[12])\.weight", r"\2.weight\1", fused)
        spelled[fused] = shape
    assert spelled == Layout(table=MEGATRON_DEEPSEEK_V3, shape=SHAPE).local_shapes(0)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1), ("deepseek-v3", 671.0), ("kimi-k2", 1026.4)],
)
def test_named_shapes_have_their_published_size(name: str, billions: float) -> None:
    table = HF_DEEPSEEK_V3 if NAMED[name].latent else HF_QWEN3_MOE
    sizes = Layout(table=table, shape=NAMED[name]).local_shapes(0).values()
    assert sum(prod(size) for size in sizes) / 1e9 == pytest.approx(billions, abs=0.06)
