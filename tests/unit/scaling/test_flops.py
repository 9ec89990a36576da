"""FLOPs against torch's own count of transformers' models, forward and backward, and against published forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import DeltaNet, ModelShape
from rl_megatron.options.lora import LoraSection
from rl_megatron.options.routers import RouterSection
from rl_megatron.scaling.flops import PASSES, PEAKS, peak_of, seconds_at_peak, training_flops
from rl_megatron.weights.layouts.families import read_shape
from tests.draft_models import WrittenDraft, save_with_drafts
from tests.family_models import save_model

LENGTHS = (7, 16)
FAMILIES = (
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral_window", "mixtral", "glm4_moe", "glm4_moe_air"),
    *("deepseek_v2", "deepseek_v3", "moonlight", "gpt_oss", "minimax_m2", "olmoe", "glm4_moe_lite"),
    *("qwen3_next", "qwen3_5_moe_text", "deepseek_v32", "glm_moe_dsa"),
)

LATE = ("glm4_moe_air", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text", "glm_moe_dsa")
"""Those whose first two layers are not of all their kinds."""


def save_short(name: str, folder: Path) -> Any:
    """Save the model in two layers, if these are of all its kinds."""
    return save_model(name, folder) if name in LATE else save_model(name, folder, num_hidden_layers=2)


def masked_pairs(shape: ModelShape, layer: int, length: int) -> int:
    """(query, key) pairs that causality or a window hides: transformers' eager attention multiplies them all the same,
    and masks."""
    window = shape.windows[layer] if shape.windows else 0
    visible = sum(1 for q in range(length) for k in range(length) if k <= q and (not window or q - k < window))
    return length * length - visible


def of_delta_net(m: DeltaNet, length: int, trained: bool) -> float:
    """The convolution, ``trained`` or frozen, and the rule a position at a time (arXiv:2412.06464, equation 10), which
    three products are."""
    passes = 3 if trained else 2
    return length * (passes * 2 * m.kernel * m.mixed + 3 * 3 * 2 * m.value_heads * m.key_dim * m.value_dim)


def of_indexer(m: ModelShape, length: int) -> float:
    """The forward pass of transformers' indexer, which the learner leaves out: three linears, scores of all pairs, and
    their sum over heads."""
    assert m.indexer is not None
    assert m.latent is not None
    assert m.latent.query_rank is not None
    heads, size = m.indexer.heads, m.indexer.head_dim
    linears = m.latent.query_rank * heads * size + m.hidden_size * (size + heads)
    return 2 * length * (linears + length * heads * (size + 1))


def in_whole_chunks(m: DeltaNet, length: int, trained: bool) -> float:
    """What torch counts of transformers' convolution and rule, which pad sequences to chunks."""
    q, k, v = (torch.rand(1, length, m.value_heads, d, requires_grad=True) for d in (m.key_dim, m.key_dim, m.value_dim))
    g, b = (torch.rand(1, length, m.value_heads, requires_grad=True) for _ in range(2))
    x = torch.rand(1, m.mixed, length, requires_grad=True)
    weight = torch.rand(m.mixed, m.kernel, requires_grad=trained)
    with FlopCounterMode(display=False) as counter:
        causal_conv1d_fn(x, weight).sum().backward()
        torch_chunk_gated_delta_rule(q, k, v, g=-g, beta=b)[0].sum().backward()
    return float(counter.get_total_flops())


def counted(model: Any, shape: ModelShape) -> float:
    """What torch counts in forward and backward of each sequence, without the products that a mask hides."""
    model.set_experts_implementation("eager")
    total, trained = 0.0, model.get_input_embeddings().weight.requires_grad
    for length in LENGTHS:
        ids = torch.randint(3, 61, (1, length), generator=torch.Generator().manual_seed(length))
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        total += counter.get_total_flops()
        widths = shape.head_dim + (shape.latent.value_dim if shape.latent else shape.head_dim)
        hidden = sum(masked_pairs(shape, layer, length) for layer in shape.attention_layers)
        total -= 3 * 2 * hidden * shape.num_heads * widths
        if shape.indexer is not None:
            total -= len(shape.indexer.layers) * of_indexer(shape, length)
        if shape.delta is not None:
            rule, chunks = (of(shape.delta, length, trained) for of in (of_delta_net, in_whole_chunks))
            total += len(shape.delta_layers) * (rule - chunks)
    return total


@pytest.mark.parametrize("name", FAMILIES)
def test_a_training_step_has_the_products_that_torch_counts(name: str, tmp_path: Path) -> None:
    """Rotary angles are left out, which torch counts as products: less than 1 % even of models as small as these."""
    model = save_short(name, tmp_path)
    shape = read_shape(tmp_path)
    wanted = counted(model, shape)
    assert training_flops(shape, LENGTHS) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_frozen_routers_have_no_gradient_of_their_weights(name: str, tmp_path: Path) -> None:
    model = save_short(name, tmp_path)
    routers = [m for n, m in model.named_modules() if n.endswith(("mlp.gate", "mlp.router"))]
    shape = read_shape(tmp_path)
    assert len(routers) == len(shape.moe_layers)
    for router in routers:
        router.requires_grad_(False)
    frozen = LearnerSection(router=RouterSection(frozen=True))
    assert training_flops(shape, LENGTHS, frozen) == pytest.approx(counted(model, shape), rel=1e-12)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_a_draft_layer_that_is_trained_has_the_products_that_torch_counts(name: str, tmp_path: Path) -> None:
    """Its joining linear multiplies one position more there, which is then cut."""
    save_with_drafts(name, tmp_path, num_hidden_layers=2)
    shape, written = read_shape(tmp_path), WrittenDraft(tmp_path)
    written.layer.mlp.experts.config._experts_implementation = "eager"
    wanted, last = 0.0, shape.num_layers - 1
    widths = shape.head_dim + (shape.latent.value_dim if shape.latent else shape.head_dim)
    for length in LENGTHS:
        tokens = torch.randint(3, 61, (length + 2,), generator=torch.Generator().manual_seed(length))
        with FlopCounterMode(display=False) as counter:
            written.logits(tokens).sum().backward()
        with FlopCounterMode(display=False) as before:
            written.model.model(tokens[None, :-1])
        wanted += counter.get_total_flops() - before.get_total_flops()
        wanted -= 3 * 2 * (2 * shape.hidden_size) * shape.hidden_size
        wanted -= 3 * 2 * masked_pairs(shape, last, length) * shape.num_heads * widths
    trained = training_flops(replace(shape, drafts=True), LENGTHS) - training_flops(shape, LENGTHS)
    assert trained == pytest.approx(wanted, rel=1e-12)


def add_adapters(model: Any, lora: LoraSection) -> None:
    """Freeze the model, and add B A x to each linear of attention, of dense layers and of shared experts."""
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _module, _given, out: out.requires_grad_())
    for name, module in model.named_modules():
        target = "attention" if "_attn." in name else "mlp"
        if isinstance(module, torch.nn.Linear) and ".layers." in name and target in lora.targets:
            a = torch.zeros(lora.rank, module.in_features, requires_grad=True)
            b = torch.zeros(module.out_features, lora.rank, requires_grad=True)
            module.register_forward_hook(lambda _module, given, out, a=a, b=b: out + given[0] @ a.T @ b.T)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3", ("attention", "mlp")),
        ("mistral_window", ("mlp",)),
        ("mixtral", ("attention",)),
        ("deepseek_v3", ("attention", "mlp")),
        ("moonlight", ("attention", "mlp")),
        ("qwen3_next", ("attention",)),
    ],
)
def test_adapters_have_their_own_gradients_and_the_frozen_weights_none(name: str, targets: Any, tmp_path: Path) -> None:
    model, lora = save_short(name, tmp_path), LoraSection(rank=3, targets=targets)
    shape = read_shape(tmp_path)
    add_adapters(model, lora)
    found = training_flops(shape, LENGTHS, LearnerSection(lora=lora))
    assert found == pytest.approx(counted(model, shape), rel=1e-12)
    if shape.num_experts:
        experts = LoraSection(rank=3, expert_rank=5, targets=(*targets, "experts"))
        more = training_flops(shape, LENGTHS, LearnerSection(lora=experts))
        of_a_layer = 3 * 2 * sum(LENGTHS) * shape.experts_per_token * 3 * 5 * (shape.hidden_size + shape.expert_width)
        assert more - found == len(shape.moe_layers) * of_a_layer


def gpt(hidden: int, layers: int, vocab: int) -> ModelShape:
    """Four and eight times hidden² of weights in attention and MLP, as a GPT's, whose MLP has two matrices."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "dense_width": 8 * hidden // 3, "vocab_size": vocab}
    heads = {"num_heads": hidden // 64, "num_kv_heads": hidden // 64, "head_dim": 64}
    return replace(NAMED["qwen3-30b-a3b"], **sizes, **heads, num_experts=0)


def test_it_is_megatrons_published_form_of_a_gpt() -> None:
    """arXiv:2104.04473, equation 3: 96 B s l h² (1 + s / 6h + V / 16lh) with every layer computed again; attention
    there multiplies every key, here those before."""
    batch, s, layers, h, vocab = 5, 96, 7, 192, 1000
    shape, lengths = gpt(h, layers, vocab), [s] * batch
    visible = (s + 1) / 2
    published = 96 * batch * s * layers * h**2 * (1 + visible / (6 * h) + vocab / (16 * layers * h))
    again = training_flops(shape, lengths) / PASSES - 2 * batch * s * h * vocab
    assert training_flops(shape, lengths) + again == pytest.approx(published, rel=1e-12)


LLAMA_405B = {"num_layers": 126, "hidden_size": 16384, "num_heads": 128, "num_kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("shape", "gigaflops"),
    [
        (NAMED["deepseek-v3"], 250),
        (replace(NAMED["qwen3-30b-a3b"], **LLAMA_405B, num_experts=0, dense_width=53248, vocab_size=128256), 2448),
    ],
)
def test_a_token_costs_what_deepseek_published(shape: ModelShape, gigaflops: float) -> None:
    """arXiv:2505.09343, table 2: training of a token in sequences of 4,096, without draft layers."""
    assert training_flops(shape, [4096]) / 4096 / 1e9 == pytest.approx(gigaflops, rel=0.0105)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA H800", 989.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("a pretended GPU", None),
    ],
)
def test_a_gpus_peak_by_the_name_that_cuda_gives_it(name: str, tflops: float | None) -> None:
    peak = peak_of(name)
    assert (None if peak is None else peak.bfloat16) == tflops


def test_the_peaks_of_the_same_chip_are_twice_as_high_in_fp8() -> None:
    for peak in PEAKS:
        assert peak.float8 is None or peak.float8 == pytest.approx(2 * peak.bfloat16, rel=2e-3)


def test_a_step_at_the_peak_of_all_gpus_together_takes_these_seconds() -> None:
    shape = NAMED["deepseek-v3"]
    two = seconds_at_peak(shape, ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
    assert two is not None
    assert two([4096] * 3) == pytest.approx(3 * 4096 * 250e9 / (989.5e12 + 312e12), rel=0.01)
    adapters = LearnerSection(lora=LoraSection(rank=4))
    less = seconds_at_peak(shape, ["NVIDIA H200"], adapters)
    assert less is not None
    assert less([4096]) == training_flops(shape, [4096], adapters) / 989.5e12
    assert seconds_at_peak(shape, []) is None
    assert seconds_at_peak(shape, ["NVIDIA H200", "a pretended GPU"]) is None
