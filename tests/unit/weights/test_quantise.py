"""Block-scaled float8 checkpoints, against loops over blocks and transformers' own quantiser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize, replace_with_fp8_linear

from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import ParallelDims
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.checkpoints.verify import verify
from rl_megatron.weights.formats.quantise import block_maxima, dequantise, quantise
from rl_megatron.weights.formats.schemes import BLOCK, is_quantised
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from tests.family_models import save_model

FP8 = torch.float8_e4m3fn
# Blocks end inside tensors, inside a query group and inside the halves of tp=2.
SPEC = TinySizes(hidden_size=160, expert_width=200, num_layers=2, num_experts=2, head_dim=40)
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def blocks(shape: tuple[int, ...]) -> list[tuple[int, int, tuple[slice, slice]]]:
    return [
        (i, j, (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))))
        for i in range(-(-shape[0] // 128))
        for j in range(-(-shape[1] // 128))
    ]


def loop_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Another rounding of the scales than ours: powers of two, as DeepSeek-V3.1 has them."""
    scales = torch.empty(-(-x.shape[0] // 128), -(-x.shape[1] // 128))
    out = torch.empty(x.shape, dtype=FP8)
    for i, j, box in blocks(tuple(x.shape)):
        scales[i, j] = 2.0 ** torch.ceil(torch.log2(x[box].abs().max() / 448))
        out[box] = (x[box] / scales[i, j]).to(FP8)
    return out, scales


def loop_dequantise(x: Tensor, scales: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    for i, j, box in blocks(tuple(x.shape)):
        out[box] = x[box].float() * scales[i, j].float()
    return out


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def set_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(SPEC, tmp_path_factory.mktemp("models"), seed=4)


@pytest.fixture(scope="module")
def foreign(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float8 folder that our writer had no part in, and what it stands for in bfloat16."""
    root = tmp_path_factory.mktemp("foreign")
    fp8, bf16 = root / "fp8", root / "bf16"
    shutil.copytree(plain, fp8)
    shutil.copytree(plain, bf16)
    small, wide = {}, {}
    for name, x in tensors(plain).items():
        if is_linear(name):
            small[name], small[f"{name}_scale_inv"] = loop_quantise(x)
            wide[name] = loop_dequantise(small[name], small[f"{name}_scale_inv"]).bfloat16()
        else:
            small[name] = wide[name] = x.bfloat16()
    save_file(small, fp8 / "model.safetensors", metadata={"format": "pt"})
    save_file(wide, bf16 / "model.safetensors", metadata={"format": "pt"})
    set_config(bf16, dtype="bfloat16")
    set_config(fp8, dtype="bfloat16", quantization_config=CONFIG)
    return fp8, bf16


def test_reading_float8_gives_the_numbers_it_stands_for(foreign: tuple[Path, Path], tmp_path: Path) -> None:
    fp8, bf16 = foreign
    convert.hf_to_megatron(fp8, tmp_path / "megatron", shard_bytes=200_000)
    assert list(verify(tmp_path / "megatron", against=bf16)) == []
    assert list(verify(fp8, against=bf16)) == []
    config = json.loads((tmp_path / "megatron/config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"


def test_a_rank_cuts_its_boxes_out_of_blocks(foreign: tuple[Path, Path]) -> None:
    fp8, bf16 = foreign
    shape = read_shape(fp8)
    hf = Layout(table=HF_QWEN3_MOE, shape=shape)
    ranks = Layout(table=MEGATRON_QWEN3_MOE, shape=shape, dims=ParallelDims(tp=2, etp=2))
    for rank in range(2):
        found, wanted = ({n: torch.empty(s) for n, s in ranks.local_shapes(rank).items()} for _ in range(2))
        read_boxes(HFFolder(fp8), hf, ranks, rank, found)
        read_boxes(HFFolder(bf16), hf, ranks, rank, wanted)
        for name in wanted:
            assert torch.equal(found[name].bfloat16().float(), wanted[name]), name


def test_writing_quantises_linear_layers_alone(plain: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(plain, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "fp8", dtype=DType.F8_E4M3, shard_bytes=300_000)
    written, source = tensors(tmp_path / "fp8"), tensors(plain)
    assert written.keys() == source.keys() | {f"{name}_scale_inv" for name in source if is_linear(name)}
    for name, x in source.items():
        if not is_linear(name):
            assert torch.equal(written[name], x), name
            continue
        assert (written[name].dtype, written[f"{name}_scale_inv"].dtype) == (FP8, torch.float32)
        read = loop_dequantise(written[name], written[f"{name}_scale_inv"])
        for _, _, box in blocks(tuple(x.shape)):  # half of a last place: of three bits, or of the least number
            bound = torch.maximum(x[box].abs() * 2**-4, x[box].abs().max() / 448 * 2**-10)
            assert ((read[box] - x[box]).abs() <= bound * 1.001).all(), name
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    left = ["lm_head", "model.embed_tokens", *(f"model.layers.{i}.mlp.gate" for i in range(2))]
    assert config["quantization_config"] == {**CONFIG, "modules_to_not_convert": left}
    assert config["dtype"] == "float32"
    index = json.loads((tmp_path / "fp8/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in written.values())


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_moe_stacked"])
def test_experts_of_one_tensor_a_layer_stay_plain_for_transformers_too(name: str, tmp_path: Path) -> None:
    """What it makes of the new config.json on a GPU wants the very scales that are written."""
    save_model(name, tmp_path / "hf")
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "fp8", dtype=DType.F8_E4M3)
    told = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    config = AutoConfig.from_pretrained(tmp_path / "fp8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config.get_text_config())
    whole = [module.replace("model.language_model.", "model.") for module in told["modules_to_not_convert"]]
    replace_with_fp8_linear(model, whole, FineGrainedFP8Config(**told), pre_quantized=True)
    wanted = {key for key in model.state_dict() if key.endswith("_scale_inv")}
    written = {key.replace("model.language_model.", "model.") for key in tensors(tmp_path / "fp8")}
    assert wanted == {key for key in written if key.endswith("_scale_inv")}
    assert wanted


PUBLISHED = {  # modules with scales in the checkpoints on the hub
    "deepseek-v3": {
        *(f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        *(
            f"{mlp}{x}_proj"
            for mlp in ("mlp.", "mlp.shared_experts.", "mlp.experts.N.")
            for x in ("gate", "up", "down")
        ),
    },
    "qwen3-30b-a3b": {
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.experts.N.{x}_proj" for x in ("gate", "up", "down")),
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_quantised_is_what_the_published_checkpoints_quantise(name: str) -> None:
    shapes = hf_layout(NAMED[name]).local_shapes(0)
    found = {re.sub(r"experts\.\d+", "experts.N", n) for n, shape in shapes.items() if is_quantised(n, shape)}
    assert {re.sub(r"^model\.layers\.\d+\.(.*)\.weight$", r"\1", n) for n in found} == PUBLISHED[name]


def test_float8_read_and_written_again_is_the_same_to_the_bit(plain: Path, tmp_path: Path) -> None:
    convert.hf_to_megatron(plain, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "fp8", dtype=DType.F8_E4M3)
    convert.hf_to_megatron(tmp_path / "fp8", tmp_path / "read")
    convert.megatron_to_hf(tmp_path / "read", tmp_path / "again", dtype=DType.F8_E4M3)
    first, second = tensors(tmp_path / "fp8"), tensors(tmp_path / "again")
    for name, x in first.items():
        if name.endswith("_scale_inv"):
            assert torch.allclose(second[name], x, rtol=1e-6, atol=0)
        else:
            assert torch.equal(second[name].view(torch.uint8), x.view(torch.uint8)), name


def test_numbers_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    x = torch.randn(384, 256) * torch.logspace(-4, 2, 384)[:, None]
    x[128:256, :128] = 0.0
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(BLOCK, BLOCK), scale_fmt=None))
    theirs = Fp8Quantize(quantizer).convert({"x.weight": x})
    weight, scales = quantise(x)
    assert torch.allclose(
        scales[x.unflatten(0, (3, 128)).unflatten(2, (2, 128)).abs().amax((1, 3)) > 0],
        theirs["x.weight_scale_inv"][theirs["x.weight_scale_inv"] < 1],
        rtol=1e-6,
    )
    differ = weight.float() != theirs["x.weight"].float()  # where a last bit of the scale moves a tie
    assert differ.float().mean() < 1e-3
    read = Fp8Dequantize(quantizer)._dequantize_one(weight, scales, torch.float32)
    assert torch.equal(dequantise(weight, scales, (0, 0), (BLOCK, BLOCK)), read)
    box = dequantise(weight[100:300, 60:200], scales, (100, 60), (BLOCK, BLOCK))
    assert torch.equal(box, read[100:300, 60:200])
    assert torch.equal(read[128:256, :128], torch.zeros(128, 128))


def test_maxima_are_those_of_a_loop_over_the_elements_of_a_box() -> None:
    torch.manual_seed(0)
    for start, size, edges in (((10, 0), (8, 5), (16, 16)), ((0, 3), (2, 4), (1, 8)), ((5, 130), (40, 70), (16, 64))):
        values, largest = torch.randn(size), dict[tuple[int, int], float]()
        for row, column in product(*map(range, size)):
            block = (start[0] + row) // edges[0], (start[1] + column) // edges[1]
            largest[block] = max(largest.get(block, 0.0), abs(values[row, column].item()))
        assert block_maxima(values, start, edges).flatten().tolist() == [largest[block] for block in sorted(largest)]


def drop(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        left = {n: t for n, t in tensors(folder).items() if n != name}
        save_file(left, folder / "model.safetensors")

    return change


def bend(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file({**tensors(folder), name: tensor}, folder / "model.safetensors")


Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.1.down_proj.weight"
SPOILT = {
    f"{Q} is float8_e4m3fn, but there is no {Q}_scale_inv": drop(f"{Q}_scale_inv"),
    rf"{DOWN}_scale_inv has shape \(1, 2\); blocks of \(128, 128\) in \(160, 200\) need \(2, 2\)": bend(
        f"{DOWN}_scale_inv", torch.ones(1, 2)
    ),
    f"{Q} is missing": drop(Q),
    "model.norm.weight_scale_inv is unknown": bend("model.norm.weight_scale_inv", torch.ones(1)),
    "is float8_e4m3fn, but config.json has no quantization_config": lambda folder: set_config(
        folder, quantization_config=None
    ),
}


@pytest.mark.parametrize("message", SPOILT)
def test_scales_that_do_not_fit_are_named(message: str, foreign: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(foreign[0], folder)
    SPOILT[message](folder)
    with pytest.raises(RLMegatronError, match=message):
        convert.hf_to_megatron(folder, tmp_path / "out")
    shape = read_shape(folder)
    layout = Layout(table=HF_QWEN3_MOE, shape=shape)
    with pytest.raises(RLMegatronError, match=message):
        read_boxes(HFFolder(folder), layout, layout, 0, {})


def test_float8_for_megatron_is_refused(foreign: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold block scales"):
        convert.hf_to_megatron(foreign[0], tmp_path / "out", dtype=DType.F8_E4M3)
