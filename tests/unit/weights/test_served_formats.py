"""What engine servers read of quantised weights, against loops over blocks and rows, and the learner's own numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_megatron.errors import ConfigError, SyncError
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import ParallelDims
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.reports import sealed_by
from rl_megatron.weights.formats import served as served_formats
from rl_megatron.weights.formats.at_sender import at_sender
from rl_megatron.weights.formats.quantise import dequantise, divide
from rl_megatron.weights.formats.scaled import BLOCKS, with_scales
from rl_megatron.weights.formats.schemes import is_quantised
from rl_megatron.weights.formats.served import FORMATS, stored
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout
from rl_megatron.weights.servers.mirror import Mirror, dtypes, read, seal, shapes
from rl_megatron.weights.servers.probe import Probe, ScoredText
from tests.small_models import SMALL_MOE

LAYER = "model.layers.0."
MATRICES = {
    LAYER + "self_attn.q_proj.weight": (201, 137),  # of an odd number of bytes
    LAYER + "mlp.experts.0.down_proj.weight": (136, 72),
    LAYER + "mlp.experts.1.down_proj.weight": (128, 256),
}
WHOLE = {
    "model.embed_tokens.weight": (40, 136),
    LAYER + "self_attn.q_proj.bias": (201,),
    LAYER + "mlp.gate.weight": (2, 136),
    LAYER + "input_layernorm.weight": (137,),
    "lm_head.weight": (40, 136),
}
SHAPES = MATRICES | WHOLE
LOSES = pytest.mark.parametrize("kind", ["fp8", "int8"])


def mirror_of(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> Mirror:
    """Random numbers of several sizes; a row and a block of zeros, a row of tiny numbers."""
    config = folder / "config.json"
    config.write_text(json.dumps({"torch_dtype": "bfloat16", "architectures": ["A"]}))
    path = folder / "w" / "model.safetensors"
    Mirror.make(path, SHAPES, dtype, config, FORMATS[kind])
    made = Mirror(path, SHAPES, dtype, FORMATS[kind])
    for seed, tensor in enumerate(made.tensors.values()):
        generator = torch.Generator().manual_seed(seed)
        tensor.normal_(std=0.02, generator=generator)
        if tensor.ndim == 2:
            tensor.mul_(torch.logspace(-3, 2, tensor.shape[1]))
    first = made.tensors[LAYER + "self_attn.q_proj.weight"]
    first[128:, :128] = 0.0
    first[7] = 0.0
    first[9] = 1e-39
    return made


@pytest.mark.parametrize("kind", FORMATS)
def test_a_vector_that_engines_hold_in_float32_is_as_the_learner_has_it(tmp_path: Path, kind: str) -> None:
    """Beside weights of every format."""
    bias, path = LAYER + "mlp.gate.e_score_correction_bias", tmp_path / "w" / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    held, own = SHAPES | {bias: (6,)}, 8.0 + 0.001 * torch.arange(6)  # of which bfloat16 has one value
    Mirror.make(path, held, torch.bfloat16, tmp_path / "config.json", FORMATS[kind], float32={bias})
    made = Mirror(path, held, torch.bfloat16, FORMATS[kind], float32={bias})
    for name, tensor in made.tensors.items():
        tensor.copy_(own if name == bias else torch.ones(held[name]))
    made.serve(1)
    assert torch.equal(read(path, 1)[bias], own)
    assert dtypes(path)["lm_head.weight"] == torch.bfloat16


def entries(path: Path) -> dict[str, tuple[str, list[int]]]:
    """As Hugging Face's own reader sees the file."""
    with safe_open(path, "pt") as file:
        return {n: (file.get_slice(n).get_dtype(), file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118


def by_loops(kind: str, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers that a quantised matrix stands for, float32, and the scale of each."""
    factors = torch.empty(weight.shape)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            factors[row, column] = scales[row // 128, column // 128] if kind == "fp8" else scales[row, 0]
    return weight.float() * factors, factors


@LOSES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_servers_read_numbers_within_half_a_step_of_the_learners(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    mirror = mirror_of(tmp_path, kind, dtype)
    mirror.serve(3)
    arrived = read(mirror.path, 3)
    suffix, stands, name_of = {
        "fp8": ("_scale_inv", torch.float8_e4m3fn, "F8_E4M3"),
        "int8": ("_scale", torch.int8, "I8"),
    }[kind]
    assert arrived.keys() == SHAPES.keys() | {name + suffix for name in MATRICES}
    assert all(torch.equal(arrived[name], mirror.tensors[name]) for name in WHOLE)
    worst = {}
    for name, shape in MATRICES.items():
        weight, scales, wanted = arrived[name], arrived[name + suffix], mirror.tensors[name].float()
        edges = {"fp8": (128, 128), "int8": (1, shape[1])}[kind]
        assert entries(mirror.path)[name] == (name_of, list(shape))
        assert entries(mirror.path)[name + suffix] == (
            "F32",
            [-(-n // edge) for n, edge in zip(shape, edges, strict=True)],
        )
        assert weight.dtype == stands == dtypes(mirror.path)[name]
        found, factors = by_loops(kind, weight, scales)
        off = (found - wanted).abs()
        if kind == "fp8":  # below the smallest normal number, 2**-6, steps are of 2**-9
            assert (off <= torch.maximum(wanted.abs() * 2**-4, factors * 2**-10) * (1 + 1e-5)).all()
        else:
            assert (off <= factors / 2 * (1 + 1e-5)).all()
            assert int(weight.min()) >= -127
            assert (weight.abs().amax(1)[wanted.abs().amax(1) > 0] == 127).all()
        worst[name] = float(off.double().norm() / wanted.double().norm())
    error = seal(mirror.path, 3, {}).error
    assert error is not None
    assert error[1] == max(worst, key=worst.__getitem__)
    assert error[0] == pytest.approx(worst[error[1]], rel=1e-5)
    assert 1e-4 < error[0] < 0.06
    zeros = arrived[LAYER + "self_attn.q_proj.weight"].float()[7]
    assert torch.equal(zeros, torch.zeros_like(zeros))


@LOSES
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_weight_that_is_not_finite_is_refused_where_it_is_sent_from(kind: str, value: float) -> None:
    """A block with it would be zeros."""
    hf, name = hf_layout(SMALL_MOE), LAYER + "self_attn.k_proj.weight"
    tensors = {name: torch.ones(shape) for name, shape in hf.local_shapes(0).items()}
    quantiser, _, _ = at_sender(FORMATS[kind], hf, hf, 0, tensors)
    assert quantiser is not None
    quantiser.begin(lambda maxima: None)
    tensors[name][1, 2] = value
    with pytest.raises(SyncError, match=f"{name} has values that are NaN or infinite"):
        quantiser.begin(lambda maxima: None)


@LOSES
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"])
def test_of_delta_nets_what_engines_hold_whole_is_not_quantised(kind: str, family: str) -> None:
    """Convolutions and gates, whose heads have a row each; experts that are one tensor are refused."""
    form = FORMATS[kind]
    assert form is not None
    shape = replace(
        NAMED["qwen3-next-80b-a3b"], family=family, num_layers=4, delta_layers=(0, 1, 2), num_experts=2, drafts=True
    )
    layout = with_scales(megatron_layout(shape, ParallelDims(tp=2)), hf_layout(shape), form.blocks)
    held = {name for rank in range(2) for name in layout.local_shapes(rank) if name.endswith(form.blocks.suffix)}
    shapes = hf_layout(shape).local_shapes(0)
    found = {name for name, (dtype, _) in stored(shapes, DType.BF16, form).items() if dtype == form.dtype}
    assert held == {name + form.blocks.suffix for name in found}
    delta = {"in_proj_qkvz"} if family == "qwen3_next" else {"in_proj_qkv", "in_proj_z"}
    wanted = delta | {"out_proj"} | {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name.split(".")[-2] for name in found} == wanted
    assert {name.split(".")[-2] for name, size in shapes.items() if len(size) > 1 and name not in found} == {
        *({"in_proj_ba"} if family == "qwen3_next" else {"in_proj_b", "in_proj_a"}),
        *("conv1d", "gate", "shared_expert_gate", "embed_tokens", "lm_head", "fc"),
    }
    if family != "qwen3_next":
        stacked = hf_layout(replace(shape, stacked_experts=True)).local_shapes(0)
        with pytest.raises(ConfigError, match=r"experts\.\w+ \[.*\] is not a matrix, and stacked experts"):
            stored(stacked, DType.BF16, form)


def test_engines_that_round_scales_up_to_powers_of_two_change_no_value() -> None:
    """As vLLM with DeepGEMM does (fp8_utils.py), by the numbers that it reads."""
    values = torch.empty(3 * 128, 5 * 128).normal_(generator=torch.Generator().manual_seed(0))
    values *= torch.logspace(-3, 3, 640)
    values[:128, :128] = 0.0
    values[0, 128] = 448.0 * 2**9  # a power of two already
    form, numbers, scales = FORMATS["fp8"], torch.empty(384, 640, dtype=torch.float8_e4m3fn), torch.empty(3, 5)
    assert form is not None
    form.write("a", values, numbers, scales)
    largest = values.unflatten(0, (3, 128)).unflatten(2, (5, 128)).abs().amax((1, 3))
    assert torch.equal(scales, torch.where(largest > 0, 2.0 ** (largest / 448).log2().ceil(), 1.0))
    read = numbers.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    found = read.unflatten(0, (3, 128)).unflatten(2, (5, 128)).abs().amax((1, 3))
    again = (2.0 ** (found.clamp(min=1e-4) / 448).log2().ceil()).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal((read / again).to(torch.float8_e4m3fn).float() * again, read)
    tiny = torch.full((1, 1), 1e-42)  # whose scale would have no exponent of its own
    form.write("a", tiny, numbers[:1, :1], scales[:1, :1])
    assert scales[0, 0] == 2.0**-126


def test_a_matrix_in_bands_is_the_matrix_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_formats, "_BAND", 2 * 128 * 150)
    shape = (4 * 128 + 5, 150)
    values = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(0))
    for kind in filter(None, FORMATS.values()):
        (_, (_, weight_shape)), (_, (_, scale_shape)) = sorted(stored({"a.weight": shape}, DType.BF16, kind).items())
        weight = torch.empty(weight_shape, dtype=getattr(torch, kind.dtype))
        scales = torch.full(scale_shape, torch.nan)
        kind.write("a.weight", values, weight, scales)
        factors = kind.scales(kind.maxima(values, (0, 0), shape))
        numbers = kind.round(divide(values, factors, (0, 0), kind.blocks.edges(shape)))
        assert torch.equal(weight.view(torch.int8), numbers.view(torch.int8))
        assert torch.equal(scales, factors)


@LOSES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_named_and_nothing_is_served(tmp_path: Path, kind: str, bad: float) -> None:
    mirror = mirror_of(tmp_path, kind)
    mirror.serve(1)
    mirror.withdraw()
    mirror.tensors[LAYER + "mlp.experts.1.down_proj.weight"][127, 255] = bad
    with pytest.raises(SyncError, match=r"layers\.0\.mlp\.experts\.1\.down_proj\.weight has values that are NaN"):
        mirror.serve(2)
    with pytest.raises(SyncError, match="holds version None, not 2"):
        read(mirror.path, 2)


@LOSES
def test_the_seal_is_of_the_quantised_bytes(tmp_path: Path, kind: str) -> None:
    mirror = mirror_of(tmp_path, kind)
    for name in (LAYER + "mlp.experts.0.down_proj.weight", LAYER + "self_attn.q_proj.weight" + BLOCKS[kind].suffix):
        mirror.serve(3)
        sealed = sealed_by([mirror.sums()], shapes(mirror.path))
        assert sealed == {n: checksum(t, tuple(t.shape)) for n, t in read(mirror.path, 3).items()}
        mirror._stored[name].view(torch.uint8)[0, 3] ^= 1
        after = sealed_by([mirror.sums()], shapes(mirror.path))
        assert [n for n in sealed if sealed[n] != after[n]] == [name]


def test_config_json_tells_servers_the_format(tmp_path: Path) -> None:
    whole = ["lm_head", "model.embed_tokens", LAYER + "mlp.gate"]
    for kind in ("fp8", "int8"):
        mirror = mirror_of(tmp_path, kind)
        config = json.loads(mirror.path.with_name("config.json").read_text())
        assert (config["torch_dtype"], config["architectures"]) == ("bfloat16", ["A"])
        given = config["quantization_config"]
        if kind == "fp8":
            assert given == {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": whole,
            }
        else:
            assert (given["quant_method"], given["format"], given["ignore"]) == (
                "compressed-tensors",
                "int-quantized",
                whole,
            )
            group = given["config_groups"]["group_0"]
            assert group["weights"] == {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False
            }  # fmt: skip
            assert group["input_activations"]["strategy"] == "token"


def test_stacked_experts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj \[2, 4, 6\] is not a matrix"):
        stored({LAYER + "mlp.experts.gate_up_proj": (2, 4, 6)}, DType.BF16, FORMATS["fp8"])
    assert stored({"experts": (2, 4, 6)}, DType.BF16, None) == {"experts": (DType.BF16, (2, 4, 6))}


@LOSES
def test_the_probe_tolerates_quantised_weights_and_refuses_exchanged_ones(tmp_path: Path, kind: str) -> None:
    """transformers in an engine's place; experts lie stacked there."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(TinySizes(), tmp_path, 0)).eval().float()
    probe = Probe.make(vocab_size=model.config.vocab_size, max_length=16, temperature=1.0, tolerance=1.0)
    text, given = torch.tensor(probe.texts), {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def scores(weights: dict[str, Tensor]) -> list[list[float]]:
        model.load_state_dict(weights)
        with torch.no_grad():
            said = model(text).logits.log_softmax(-1)[:, :-1]
        return [[float(x) for x in row] for row in said.gather(-1, text[:, 1:, None])[..., 0]]

    def quantised(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim == 3:
            return torch.stack([quantised("expert.weight", one) for one in tensor])
        form = FORMATS[kind]
        if form is None or not is_quantised("x." + name, tuple(tensor.shape)):
            return tensor
        shape = tuple(tensor.shape)
        numbers, scales = torch.empty(shape, dtype=getattr(torch, form.dtype)), torch.empty(form.blocks.grid(shape))
        form.write(name, tensor, numbers, scales)
        return dequantise(numbers, scales, (0, 0), form.blocks.edges(shape))

    learner = scores(given)
    weights = {name: quantised(name, tensor) for name, tensor in given.items()}
    said: list[ScoredText] = probe.scored(scores(weights))
    assert scores(weights) != learner
    assert not probe.judge(said, learner, "the learner's")[1]
    exchanged = weights | {"lm_head.weight": weights["lm_head.weight"].roll(1, 0)}
    assert probe.judge(probe.scored(scores(exchanged)), learner, "the learner's")[1]
