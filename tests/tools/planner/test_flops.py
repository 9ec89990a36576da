"""FLOPs against torch's own count, predictions beside published runs, and what adapters take, by closed forms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from bench import step_time
from bench.scale_points import Prediction, dims_of_point, ordered_pairs, predict_rates, predict_rl_steps, shape_of_point
from bench.step_time import POINTS, Fit, described, fit, left_out, logs, model_rows, usable, without_own_model
from rl_megatron.config.io import load_config
from rl_megatron.config.learner_checks import problems
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection, RouterSection
from rl_megatron.errors import GB, ConfigError
from rl_megatron.features.lora.feature import LoraSection
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import DeltaNet, ModelShape
from rl_megatron.training.flops import PASSES, PEAKS, find_peak, seconds_at_peak, training_flops
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from tests.draft_models import WrittenDraft, save_with_drafts
from tests.family_models import save_model
from tests.unit.launcher.test_memory import QWEN_80GB
from tools.convert.layouts import model_shape
from tools.planner.hardware import FITTED, PRIOR
from tools.planner.memory import check_memory, copies_bytes, footprints, host_bytes, save_cost

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
    model, shape = save_short(name, tmp_path), read_shape(tmp_path)
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
    trained = training_flops(replace(shape, num_draft_layers=True), LENGTHS) - training_flops(shape, LENGTHS)
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
    published = 96 * batch * s * layers * h**2 * (1 + ((s + 1) / 2) / (6 * h) + vocab / (16 * layers * h))
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
        *(("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA H100 80GB HBM3", 989.5)),
        *(("NVIDIA H100 PCIe", 756), ("NVIDIA H800 PCIe", 756), ("NVIDIA H800", 989.5), ("NVIDIA H100 NVL", 835.5)),
        *(("NVIDIA H200", 989.5), ("NVIDIA H200 NVL", 835.5), ("NVIDIA GH200 480GB", 989.5), ("NVIDIA B200", 2250)),
        *(("NVIDIA GB200", 2500), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None)),
        *(("NVIDIA GeForce RTX 4090", None), ("a pretended GPU", None)),
    ],
)
def test_a_gpus_peak_by_the_name_that_cuda_gives_it(name: str, tflops: float | None) -> None:
    peak = find_peak(name)
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


# Predictions beside published runs: the figures that are reached, and the constants that were fitted to them.
RUNS = json.loads(POINTS.read_text())


def test_errors_beside_published_runs_are_these() -> None:
    """Every term of the formulas and of the plan is in one of these numbers, which NVIDIA and others measured."""
    rates = list(predict_rates(RUNS))
    errors = np.array([abs(point.error) for point in rates])
    assert len(errors) == 60
    assert errors.mean() < 0.095
    assert np.median(errors) < 0.075
    assert ordered_pairs(rates) == (38, 38)


def learner_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """Without recomputing attention's core, which keeps no more than its inputs (FlashAttention), or norms, which are
    parts of TransformerEngine's linears."""
    d, layers, recompute = dims_of_point(point), point["shape"]["layers"], point["recompute"] or []
    parts = [name for name in recompute if name not in ("core_attn", "layernorm")]
    each, rest = divmod(layers, d.pp * d.vpp)  # the last chunks have fewer, beside the output layer
    return {
        **{key: getattr(d, key) for key in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")},
        "stage_layers": "+".join(str(each + (i < rest)) for i in range(d.pp * d.vpp)) if rest else None,
        "device": "cuda",
        "dtype": "bfloat16",
        "gradient_dtype": "bfloat16" if point["gradient_dtype"] == "bf16" else "float32",
        "layers": "auto",
        "max_tokens_per_micro_batch": max(2, (point["micro_batch"] or 0) * (point["sequence_tokens"] or 0)),
        "recompute": {"uniform": 1} if recompute == "full" else {"parts": parts},
        "offload": {"optimizer": (point["offload"] or {}).get("optimizer_fraction", 0)},
    }


def planned_bytes(point: Mapping[str, Any]) -> float:
    """Of the fullest GPU, or of the last stage's where the point is logged there. In float8 layers keep inputs of
    products in one byte and the others in two; moments in bfloat16 take half."""
    rollout = {"max_prompt_tokens": 1, "max_new_tokens": 1}  # which must fit into a micro-batch
    config = RunConfig.model_validate({"learner": learner_of(point), "rollout": rollout})
    shares = {"parameters": 1.0, "gradients": 1.0, "optimizer": 1.0, "activations": 1.0, "logits": 1.0}
    if "8" in point["precision"]:
        shares["activations"] = 1.35 / 2
    if point["optimizer_moments"] == "bf16":
        shares["optimizer"] = 8 / 12
    ranks = footprints(config, shape_of_point(point))
    totals = [sum(rank.terms[term] * share for term, share in shares.items()) for rank in ranks]
    return totals[-1] if "last rank" in (point.get("notes") or "") else max(totals)


def test_planned_memory_is_near_published_peaks() -> None:
    known = [point for point in RUNS if point["peak_memory_gb"] and point["shape"].get("vocab")]
    for sparse, count, bar in ((True, 10, 0.03), (False, 2, 0.1)):
        points = [point for point in known if bool(point["shape"]["experts"]) == sparse]
        assert len(points) == count
        assert max(abs(planned_bytes(point) / GB / point["peak_memory_gb"] - 1) for point in points) < bar


def test_the_constants_are_those_of_the_fit_and_so_is_the_error_of_points_left_out() -> None:
    points = usable(RUNS)
    assert asdict(fit(points).constants) == pytest.approx(asdict(FITTED), rel=0.01)
    assert described(left_out(points))["mean"] == pytest.approx(0.112, abs=0.003)


def test_each_model_is_left_out_of_its_fit_and_counts_only_its_own_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    points, fitted = usable(RUNS), list[set[str]]()

    def fit_nothing(kept: Sequence[Mapping[str, Any]]) -> Fit:
        fitted.append({str(point["model"]) for point in kept})
        return Fit(PRIOR, np.zeros(0))

    monkeypatch.setattr(step_time, "fit", fit_nothing)
    found = without_own_model(points)
    assert [found.keys() - kept for kept in fitted] == [{model} for model in found]
    for model, rates in found.items():
        assert rates == [*predict_rates([point for point in points if point["model"] == model], PRIOR)]
    assert sum(map(len, found.values())) == 60
    assert np.expm1(logs(points, PRIOR)) == pytest.approx([rate.error for rate in predict_rates(points, PRIOR)])


def test_a_published_step_of_reinforcement_learning_is_predicted_from_its_layout() -> None:
    """One of Qwen3-30B-A3B on 32 H100 in turns; without its lengths it says too little."""
    point = next(one for one in RUNS if one["model"] == "qwen3-30b-a3b" and one["gpu"] == "h100")
    own = {"mean_tokens": 3000, "samples_per_step": 2048, "train_batch": 512, "engine_tp": 2, "staleness": 0}
    sizes = {"gpus": 32, "tp": 1, "pp": 1, "vpp": 1, "ep": 8, "cp": 1, "etp": 1, "sequence_tokens": 4096}
    step = {**point, **sizes, "kind": "rl", "precision": "bf16", "tokens_per_s_per_gpu": 1100.0, "step_s": 200.0}
    (found,) = predict_rl_steps([{**step, "rl": own}])
    assert 50 < found.predicted < 400
    (later,) = predict_rl_steps([{**step, "rl": {**own, "staleness": 1}}])
    assert later.predicted != found.predicted
    assert list(predict_rl_steps([{**step, "rl": {**own, "mean_tokens": None}}, point])) == []


def test_a_points_model_has_the_sizes_of_its_config() -> None:
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"):
        point = next(point for point in RUNS if point["model"] == name)
        ours, known = shape_of_point(point), model_shape(name)
        assert ours.active_parameters == known.active_parameters
        mine, theirs = ((m.family, len(m.moe_layers), m.num_experts) for m in (ours, known))
        assert mine == theirs


def rate(predicted: float, measured: float, model: str = "m", release: str = "2026.08") -> Prediction:
    return Prediction(name="", group=(model, "h100"), release=release, predicted=predicted, measured=measured)


def test_pairs_count_only_within_a_model_gpu_and_release_and_where_they_lie_apart() -> None:
    assert ordered_pairs([rate(1, 100), rate(2, 120)]) == (1, 1)
    assert ordered_pairs([rate(2, 100), rate(1, 120)]) == (0, 1)
    assert ordered_pairs([rate(2, 100), rate(1, 114)]) == (0, 0)
    assert ordered_pairs([rate(2, 100), rate(1, 120, "other"), rate(1, 120, release="2026.06")]) == (0, 0)
    assert ordered_pairs([rate(1, 100), rate(2, 120), rate(3, 150), rate(0, 150, "other")]) == (3, 3)


def test_rows_have_mean_sizes_of_errors_and_each_models_own_pairs() -> None:
    found = {"a": [rate(1.2, 1, "a"), rate(1.6, 2, "a")], "b": [rate(3, 2, "b"), rate(2, 3, "b")]}
    assert [tuple(row.values()) for row in model_rows("training", found)] == [
        ("training", "a", 2, pytest.approx(0.2), 1, 1),
        ("training", "b", 2, pytest.approx((1 / 2 + 1 / 3) / 2), 0, 1),
        ("training", "all", 4, pytest.approx((0.2 + 0.2 + 1 / 2 + 1 / 3) / 4), 1, 2),
    ]
    figures = {"mean": 0.4 / 3, "median": 0.1, "worst": -0.3, "bias": 0.77 ** (1 / 3) - 1}
    assert described(np.log([1.1, 0.7, 1.0])) == pytest.approx(figures)


# What adapters take of GPUs, of a node and of a disk, by closed forms over the matrices of Qwen3-30B-A3B.
S = NAMED["qwen3-30b-a3b"]
CONF = Path(__file__).parents[3] / "conf"
APART = ("rollout.server.colocated=false", "rollout.server.memory_fraction=0.5", "learner.offload.while_sampling=null")
GIVEN = ("data.train=a.jsonl", "data.eval=b.jsonl", "model.path=/models/given", "algorithm.kl.coefficient=0.01")


def recipe(*keys: str) -> RunConfig:
    return load_config(QWEN_80GB, [*GIVEN, *keys])


def adapters(rank: int, expert_rank: int) -> tuple[int, int]:
    """Parameters of all adapters, of dense linears and of experts."""
    h, q, kv, f = S.hidden_size, S.num_heads * S.head_dim, S.num_kv_heads * S.head_dim, S.expert_width
    attention, expert = [(q, h), (kv, h), (kv, h), (h, q)], [(f, h), (f, h), (h, f)]
    dense, routed = (sum(rows + columns for rows, columns in each) for each in (attention, expert))
    return S.num_layers * rank * dense, S.num_layers * S.num_experts * expert_rank * routed


def dense_of_a_rank(tp: int) -> int:
    """Of queries, keys and values A is whole and B cut, of the output projection A cut and B whole."""
    h, q, kv, r = S.hidden_size, S.num_heads * S.head_dim, S.num_kv_heads * S.head_dim, 32
    return S.num_layers * r * (3 * h + (q + 2 * kv) // tp + q // tp + h)


def test_rows_hold_each_element_of_every_adapter_once() -> None:
    lora, ranks = LoraSection(rank=32), megatron_layout(S)
    shapes = LoraLayouts(lora).file_layout(ranks, hf_layout(S)).local_shapes(0)
    assert sum(map(prod, shapes.values())) == sum(adapters(32, 4))  # 32 / 8 experts of a token
    assert shapes["model.layers.3.mlp.experts.7.down_proj.lora_A.weight"] == (4, S.expert_width)
    assert shapes["model.layers.3.self_attn.k_proj.lora_B.weight"] == (S.num_kv_heads * S.head_dim, 32)
    local = LoraLayouts(lora).on_ranks(ranks).local_shapes(0)
    assert local["decoder.layers.3.self_attention.linear_qkv.lora_A"] == (3 * 32, S.hidden_size)
    assert sum(map(prod, local.values())) == sum(adapters(32, 4))


def test_one_node_of_eight_gpus_of_80_gb_trains_beside_its_servers() -> None:
    """Gradients are 4 bytes a parameter, the optimizer's state 12; frozen weights wait once in the node's memory."""
    config = recipe("learner.lora.rank=32", *APART)
    assert check_memory(config, S).total < 60 * GB
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
        ("learner.lora.rank=8 learner.optimizer.name=muon", None, "Muon needs whole matrices"),
        ("learner.lora.rank=8 learner.overlap.parameters=true", None, "adapters are merged before they are there"),
        ("learner.lora.rank=8 learner.router.aux_loss=0.1", None, "learner.router.aux_loss: routers are frozen"),
        ("learner.lora.rank=8 learner.lora.targets=attention learner.lora.expert_rank=2", None, "without experts"),
        ("learner.lora.rank=8 learner.lora.targets=mlp,mlp", None, "each once"),
        ("learner.lora.rank=8 learner.cuda_graphs=true", None, "a graph has fixed weights"),
        ("learner.lora.rank=8 algorithm=ppo", None, "a second model that is trained whole"),
        ("learner.lora.rank=8 job=reward_model", None, "its score layer starts at 0"),
        ("learner.lora.rank=8", "gpt-oss", "in one tensor per layer"),
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
        ("qwen3-30b-a3b", "mlp", "has no dense layers and no shared experts, so nothing would be trained"),
        ("qwen3-30b-a3b", "mlp,attention", None),
        ("qwen3-30b-a3b", "attention,experts", None),
        ("deepseek-v3", "mlp", None),
        ("deepseek-v3", "experts", None),
        ("dense", "experts", "has no routed experts, so nothing would be trained"),
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
