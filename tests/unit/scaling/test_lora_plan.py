"""What adapters take of GPUs, of a node and of a disk, by closed forms over the matrices of Qwen3-30B-A3B."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.options.lora import LoraSection
from rl_megatron.options.table import problems
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.host_memory import copies_bytes, host_bytes
from rl_megatron.scaling.memory import check_memory, footprints
from rl_megatron.scaling.saves import save_cost
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout
from rl_megatron.weights.layouts.lora import hf_adapters, learner_adapters, ranks_of_parts

S = NAMED["qwen3-30b-a3b"]
CONF = Path(__file__).parents[3] / "conf"
APART = ("rollout.server.colocated=false", "rollout.server.memory_fraction=0.5", "learner.offload.while_sampling=null")
GIVEN = ("data.train=a.jsonl", "data.eval=b.jsonl", "model.path=/models/given", "algorithm.kl.coefficient=0.01")


def recipe(*keys: str) -> RunConfig:
    return load_config(str(CONF / "qwen3_30b_a3b_80gb.yaml"), [*GIVEN, *keys])


def adapters(rank: int, expert_rank: int) -> tuple[int, int]:
    """Parameters of all adapters, of dense linears and of experts."""
    h, q, kv, f = S.hidden_size, S.num_heads * S.head_dim, S.num_kv_heads * S.head_dim, S.expert_width
    attention = [(q, h), (kv, h), (kv, h), (h, q)]
    expert = [(f, h), (f, h), (h, f)]
    dense, routed = (sum(rows + columns for rows, columns in each) for each in (attention, expert))
    return S.num_layers * rank * dense, S.num_layers * S.num_experts * expert_rank * routed


def dense_of_a_rank(tp: int) -> int:
    """Of queries, keys and values A is whole and B cut, of the output projection A cut and B whole."""
    h, q, kv, r = S.hidden_size, S.num_heads * S.head_dim, S.num_kv_heads * S.head_dim, 32
    return S.num_layers * r * (3 * h + (q + 2 * kv) // tp + q // tp + h)


def test_rows_hold_each_element_of_every_adapter_once() -> None:
    lora = LoraSection(rank=32)
    ranks = megatron_layout(S)
    hf = hf_adapters(hf_layout(S), ranks_of_parts(ranks, lora))
    shapes = hf.local_shapes(0)
    assert sum(map(prod, shapes.values())) == sum(adapters(32, 4))  # 32 / 8 experts of a token
    assert shapes["model.layers.3.mlp.experts.7.down_proj.lora_A.weight"] == (4, S.expert_width)
    assert shapes["model.layers.3.self_attn.k_proj.lora_B.weight"] == (S.num_kv_heads * S.head_dim, 32)
    local = learner_adapters(ranks, lora).local_shapes(0)
    assert local["decoder.layers.3.self_attention.linear_qkv.lora_A"] == (3 * 32, S.hidden_size)
    assert sum(map(prod, local.values())) == sum(adapters(32, 4))


def test_one_node_of_eight_gpus_of_80_gb_trains_beside_its_servers() -> None:
    """Gradients are 4 bytes a parameter, the optimizer's state 12; frozen weights wait once in the node's memory."""
    config = recipe("learner.lora.rank=32", *APART)
    most = check_memory(config, S)
    assert most is not None
    assert most.total < 60 * GB
    _, experts = adapters(32, 4)
    d = config.learner.dims
    (found,) = [one.terms for one in footprints(config, S) if one.rank == 0]
    assert found["gradients"] == 4 * (dense_of_a_rank(d.tp) + experts / d.ep)
    assert found["optimizer"] == 12 * (dense_of_a_rank(d.tp) / d.dp + experts / d.ep)
    assert found["reference"] == 0
    whole = recipe(*APART)
    with pytest.raises(ConfigError, match="needs"):
        check_memory(whole, S)
    matrices = (
        S.num_layers
        * 2
        * (
            2 * (S.num_heads + S.num_kv_heads) * S.head_dim * S.hidden_size * d.dp
            + S.num_experts * 3 * S.hidden_size * S.expert_width
        )
    )
    assert matrices <= host_bytes(config, S) <= 2 * matrices  # torch pins powers of two
    saved = 14 * (d.tp * dense_of_a_rank(d.tp) + experts)  # bfloat16, and 12 of state
    assert save_cost(config, S).total == saved
    assert saved < copies_bytes(config, S) < 2 * saved  # data-parallel ranks copy their shards, and one what it writes
    assert save_cost(whole, S).total > 5 * saved


@pytest.mark.parametrize(
    ("keys", "shape", "said"),
    [
        ("learner.lora.alpha=16", None, "learner.lora.alpha without learner.lora.rank would have no effect"),
        ("learner.lora.rank=8 learner.optimizer.name=muon", None, "it steps whole matrices"),
        ("learner.lora.rank=8 learner.overlap.parameters=true", None, "adapters are merged before they are there"),
        ("learner.lora.rank=8 learner.router.aux_loss=0.1", None, "learner.router.aux_loss: routers are frozen"),
        ("learner.lora.rank=8 learner.lora.targets=attention learner.lora.expert_rank=2", None, "without experts"),
        ("learner.lora.rank=8 learner.lora.targets=mlp,mlp", None, "each once"),
        ("learner.lora.rank=8 learner.cuda_graphs=true", None, "a graph has fixed weights"),
        ("learner.lora.rank=8 algorithm=ppo", None, "a second model, trained whole"),
        ("learner.lora.rank=8 job=reward_model", None, "its score layer starts at 0"),
        ("learner.lora.rank=8", "gpt-oss", "in one tensor a layer"),
    ],
)
def test_what_adapters_cannot_do_is_refused(keys: str, shape: str | None, said: str) -> None:
    if shape is None:
        with pytest.raises(ConfigError, match=said):
            load_config("tiny_cpu", keys.split())
        return
    stacked = replace(S, expert_bias=True)
    config = load_config("tiny_cpu", keys.split())
    assert any(said in problem for problem in problems(config.learner, stacked))
    (allowed,) = (problem.split("set ")[-1] for problem in problems(config.learner, stacked) if said in problem)
    free = load_config("tiny_cpu", [*keys.split(), allowed])
    assert not any("learner.lora" in problem for problem in problems(free.learner, stacked))


@pytest.mark.parametrize(
    ("shape", "targets", "said"),
    [
        ("qwen3-30b-a3b", "mlp", "has no dense layers and no shared experts, so that nothing would be trained"),
        ("qwen3-30b-a3b", "mlp,attention", None),
        ("qwen3-30b-a3b", "attention,experts", None),
        ("deepseek-v3", "mlp", None),
        ("deepseek-v3", "experts", None),
        ("dense", "experts", "has no routed experts, so that nothing would be trained"),
        ("dense", "attention,mlp", None),
        ("dense", "experts,mlp,attention", None),
    ],
)
def test_targets_that_match_no_matrix_are_refused(shape: str, targets: str, said: str | None) -> None:
    dense = replace(S, num_experts=0, experts_per_token=0, expert_width=0, dense_width=128)
    config = load_config("tiny_cpu", ["learner.lora.rank=8", f"learner.lora.targets={targets}"])
    found = [one for one in problems(config.learner, NAMED.get(shape, dense)) if "learner.lora" in one]
    assert len(found) == (said is not None)
    assert all(said in one for one in found if said)
