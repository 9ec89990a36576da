from __future__ import annotations

import re
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import LatentAttention, ModelShape, Router
from rl_megatron.weights.layout import Layout
from rl_megatron.weights.safetensors_io import Checkpoint
from rl_megatron.weights.tables.deepseek_v3 import HF_DEEPSEEK_V3, MEGATRON_DEEPSEEK_V3
from rl_megatron.weights.tables.qwen3_moe import HF_QWEN3_MOE

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


def test_the_hf_table_is_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent = SHAPE.latent
    assert latent is not None
    config = DeepseekV3Config(
        vocab_size=SHAPE.vocab_size,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.dense_width,
        moe_intermediate_size=SHAPE.expert_width,
        num_hidden_layers=SHAPE.num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_heads,
        n_shared_experts=2,
        n_routed_experts=SHAPE.num_experts,
        num_experts_per_tok=SHAPE.experts_per_token,
        n_group=1,
        topk_group=1,
        kv_lora_rank=latent.kv_rank,
        q_lora_rank=latent.query_rank,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
        qk_nope_head_dim=latent.nope_dim,
        first_k_dense_replace=SHAPE.dense_layers,
        max_position_embeddings=SHAPE.max_positions,
        num_nextn_predict_layers=0,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    assert ModelShape.from_folder(tmp_path, families=("deepseek_v3",)) == SHAPE
    assert Checkpoint(tmp_path).shapes() == Layout(table=HF_DEEPSEEK_V3, shape=SHAPE).local_shapes(0)
    with pytest.raises(ConfigError, match=r"model_type='deepseek_v3' is not supported; allowed: 'qwen3_moe'"):
        ModelShape.from_folder(tmp_path, families=("qwen3_moe",))


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
