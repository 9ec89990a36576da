"""Block-scaled float8 checkpoints, ours and others', against loops over blocks and transformers' own quantizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize, replace_with_fp8_linear
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import ParallelDims
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.formats.quantize import block_maxima, dequantize, quantize
from rl_megatron.weights.formats.schemes import BLOCK, is_quantized
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.grouped_query import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from tests.family_models import save_model
from tools.convert.inspection import describe, dropped_tensors
from tools.convert.verify import verify

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


def loop_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Another rounding of the scales than ours: powers of two, as DeepSeek-V3.1 has them."""
    scales = torch.empty(-(-x.shape[0] // 128), -(-x.shape[1] // 128))
    out = torch.empty(x.shape, dtype=FP8)
    for i, j, box in blocks(tuple(x.shape)):
        scales[i, j] = 2.0 ** torch.ceil(torch.log2(x[box].abs().max() / 448))
        out[box] = (x[box] / scales[i, j]).to(FP8)
    return out, scales


def loop_dequantize(x: Tensor, scales: Tensor) -> Tensor:
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
            small[name], small[f"{name}_scale_inv"] = loop_quantize(x)
            wide[name] = loop_dequantize(small[name], small[f"{name}_scale_inv"]).bfloat16()
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
        read = loop_dequantize(written[name], written[f"{name}_scale_inv"])
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
    found = {re.sub(r"experts\.\d+", "experts.N", n) for n, shape in shapes.items() if is_quantized(n, shape)}
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
    weight, scales = quantize(x)
    assert torch.allclose(
        scales[x.unflatten(0, (3, 128)).unflatten(2, (2, 128)).abs().amax((1, 3)) > 0],
        theirs["x.weight_scale_inv"][theirs["x.weight_scale_inv"] < 1],
        rtol=1e-6,
    )
    differ = weight.float() != theirs["x.weight"].float()  # where a last bit of the scale moves a tie
    assert differ.float().mean() < 1e-3
    read = Fp8Dequantize(quantizer)._dequantize_one(weight, scales, torch.float32)
    assert torch.equal(dequantize(weight, scales, (0, 0), (BLOCK, BLOCK)), read)
    assert torch.equal(dequantize(weight[100:300, 60:200], scales, (100, 60), (BLOCK, BLOCK)), read[100:300, 60:200])
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
        save_file({n: t for n, t in tensors(folder).items() if n != name}, folder / "model.safetensors")

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
    layout = Layout(table=HF_QWEN3_MOE, shape=read_shape(folder))
    with pytest.raises(RLMegatronError, match=message):
        read_boxes(HFFolder(folder), layout, layout, 0, {})


def test_float8_for_megatron_is_refused(foreign: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold block scales"):
        convert.hf_to_megatron(foreign[0], tmp_path / "out", dtype=DType.F8_E4M3)


# Quantized checkpoints of others, written here number by number, against the values that they stand for.
# Groups and words end inside the halves of tp=2, and a group is not whole at the end of a row of 200.
SHALLOW = TinySizes(hidden_size=160, expert_width=200, num_layers=1, num_experts=2, head_dim=40)
Stored = tuple[dict[str, Tensor], Tensor]  # tensors by what ends their names; the values they stand for, float64


def scaled(numbers: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    tall = scales.double().repeat_interleave(rows, 0)[: len(numbers)]
    return numbers.double() * tall.repeat_interleave(columns, 1)[:, : numbers.shape[1]]


def draw(kind: torch.dtype, shape: tuple[int, ...], half: int = 128) -> Tensor:
    if kind is FP8:
        return torch.randn(shape).mul(50).to(FP8)
    return torch.randint(-half, half, shape, dtype=torch.int8)


def factors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.rand(shape).add(0.5).mul(2**-8).to(dtype)


def words(numbers: Tensor, bits: int) -> Tensor:
    """compressed-tensors' words: the first number in the lowest bits, each above its value by half of the range."""
    per, out = 32 // bits, []
    for row in numbers.tolist():
        for at in range(0, len(row), per):
            word = sum((x + (1 << (bits - 1))) << (bits * i) for i, x in enumerate(row[at : at + per]))
            out.append(word - (1 << 32) if word >= 1 << 31 else word)
    return torch.tensor(out, dtype=torch.int32).view(len(numbers), -1)


def packed(bits: int, group: int | None) -> Callable[[tuple[int, int]], Stored]:
    def store(shape: tuple[int, int]) -> Stored:
        numbers = draw(torch.int8, shape, 1 << (bits - 1))
        scales = factors(shape[0], -(-shape[1] // group) if group else 1)
        beside = {"weight_shape": torch.tensor(shape), "weight_scale": scales}
        wide = scaled(numbers, scales, 1, group or shape[1])
        return {"weight_packed": words(numbers, bits), **beside}, wide

    return store


def one_by_one(kind: torch.dtype, name: str, edges: tuple[int, int] | str, **more: Tensor) -> Callable[[Any], Stored]:
    def store(shape: tuple[int, int]) -> Stored:
        numbers = draw(kind, shape)
        rows, columns = {"row": (1, shape[1]), "all": shape}.get(edges, edges) if isinstance(edges, str) else edges
        scales = factors(-(-shape[0] // rows), -(-shape[1] // columns), dtype=torch.float32)
        kept = scales.reshape(()) if edges == "all" else scales
        return {"weight": numbers, name: kept, **{end: x.clone() for end, x in more.items()}}, scaled(
            numbers, scales, rows, columns
        )

    return store


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "actorder": None}
KINDS: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int]], Stored]]] = {
    "int4 in groups, as Kimi-K2-Thinking": (compressed("pack-quantized", **INT4), packed(4, 32)),
    "int8 packed": (compressed("pack-quantized", type="int", num_bits=8, strategy="channel"), packed(8, None)),
    "int8 a row": (
        compressed("int-quantized", type="int", num_bits=8, strategy="channel"),
        one_by_one(torch.int8, "weight_scale", "row"),
    ),
    "float8 a row": (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        one_by_one(FP8, "weight_scale", "row"),
    ),
    "float8 a tensor": (
        compressed("naive-quantized", type="float", num_bits=8, strategy="tensor"),
        one_by_one(FP8, "weight_scale", "all", input_scale=torch.ones(1)),
    ),
    "float8 a block": (
        compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[128, 64]),
        one_by_one(FP8, "weight_scale", (128, 64)),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, one_by_one(FP8, "weight_scale", "row")),
    "fp8 a block, as MiniMax-M2": (
        {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
        one_by_one(FP8, "weight_scale_inv", (128, 128)),
    ),
    "fp8 a tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        one_by_one(FP8, "weight_scale_inv", "all", activation_scale=torch.ones(())),
    ),
}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(SHALLOW, tmp_path_factory.mktemp("models"), seed=4)


@pytest.fixture(scope="module", params=KINDS)
def stored(
    request: pytest.FixtureRequest, shallow: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A quantized folder, and what it stands for in bfloat16. Experts are quantized, attention is not."""
    torch.manual_seed(1)
    config, store = KINDS[request.param]
    root = tmp_path_factory.mktemp("stored")
    small, wide = {}, {}
    for name, x in load_file(shallow / "model.safetensors").items():
        if ".experts." not in name:
            small[name] = wide[name] = x.bfloat16()
            continue
        parts, values = store((x.shape[0], x.shape[1]))
        small |= {name.replace("weight", end): part for end, part in parts.items()}
        wide[name] = values.float().bfloat16()
    for folder, tensors in (("small", small), ("wide", wide)):
        shutil.copytree(shallow, root / folder)
        save_file(tensors, root / folder / "model.safetensors", metadata={"format": "pt"})
        set_config(root / folder, dtype="bfloat16")
    set_config(root / "small", quantization_config=config)
    return root / "small", root / "wide"


def test_every_number_is_read_as_what_it_stands_for(stored: tuple[Path, Path], tmp_path: Path) -> None:
    small, wide = stored
    convert.hf_to_megatron(small, tmp_path / "megatron")
    assert list(verify(tmp_path / "megatron", against=wide)) == []
    assert "quantization_config" not in json.loads((tmp_path / "megatron/config.json").read_text())
    assert "scales of quantized weights" in {part.what for part in describe(small).parts}


def test_a_rank_cuts_its_boxes_out_of_words_and_groups(stored: tuple[Path, Path]) -> None:
    small, wide = stored
    shape = read_shape(small)
    ranks = megatron_layout(shape, ParallelDims(tp=2, etp=2))
    for rank in range(2):
        found, wanted = ({n: torch.empty(s) for n, s in ranks.local_shapes(rank).items()} for _ in range(2))
        read_boxes(HFFolder(small), hf_layout(shape), ranks, rank, found)
        read_boxes(HFFolder(wide), hf_layout(shape), ranks, rank, wanted)
        for name in wanted:
            assert torch.equal(found[name].bfloat16().float(), wanted[name]), name


def test_kimi_k25_is_read_as_published_in_int4_beside_a_tower(tmp_path: Path) -> None:
    """Its experts are in words, and ``quantization_config`` is that of the text model."""
    save_model("kimi_k25", tmp_path / "plain", moe_intermediate_size=32)
    held = load_file(tmp_path / "plain" / "model.safetensors")
    small, wide = dict(held), dict(held)
    for name in [name for name in held if ".mlp.experts." in name]:
        rows, columns = held[name].shape
        parts, values = packed(4, 32)((rows, columns))
        small |= {name.replace("weight", end): part for end, part in parts.items()}
        wide[name] = values.float()
        del small[name]
    for folder, tensors in (("small", small), ("wide", wide)):
        shutil.copytree(tmp_path / "plain", tmp_path / folder)
        save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((tmp_path / "plain" / "config.json").read_text())["text_config"]
    set_config(tmp_path / "small", text_config={**text, "quantization_config": compressed("pack-quantized", **INT4)})
    told = dropped_tensors(tmp_path / "small") or ""
    assert told.startswith("vision_tower, mm_projector: only the text model is trained and converted; the new folder")
    assert "beside the model: a tower" in {part.what for part in describe(tmp_path / "small").parts}
    convert.hf_to_megatron(tmp_path / "small", tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "config.json").read_text())["text_config"]
    assert back == text | {"num_nextn_predict_layers": 0}, "it says one, and the folder holds none"
    back, aside = load_file(tmp_path / "back" / "model.safetensors"), ("vision_tower.", "mm_projector.")
    assert back.keys() == {name for name in wide if not name.startswith(aside)}
    assert all(torch.equal(tensor, wide[name]) for name, tensor in back.items())


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss with random experts in mxfp4, each exponent of a bfloat16 among them."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32}
    config = CONFIG_MAPPING["gpt_oss"](**sizes, **heads).to_dict() | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    torch.manual_seed(2)
    tensors = {}
    for name, size in hf_layout(read_shape(folder)).local_shapes(0).items():
        if name.endswith("_proj") and len(size) == 3:
            experts, columns, rows = size
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(1, 252, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            tensors[name] = torch.randn(size).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    set_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder


def test_mxfp4_experts_are_those_of_transformers(gpt_oss: Path, tmp_path: Path) -> None:
    tensors, wide = load_file(gpt_oss / "model.safetensors"), tmp_path / "wide"
    blocks = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    read = {x: convert_moe_packed_tensors(tensors.pop(f"{x}_blocks"), tensors.pop(f"{x}_scales")) for x in blocks}
    shutil.copytree(gpt_oss, wide)
    set_config(wide, quantization_config=None)
    save_file(tensors | read, wide / "model.safetensors")
    assert len(blocks) == 2
    convert.hf_to_megatron(gpt_oss, tmp_path / "megatron")
    assert list(verify(tmp_path / "megatron", against=wide)) == []
    box = ((1, 2), (35, 61), (5, 60))  # neither begins nor ends with a group
    for name in blocks:
        values = read[name][tuple(slice(*edge) for edge in box)]
        assert torch.equal(HFFolder(gpt_oss).read(name, box), values.float())


REFUSED: dict[str, dict[str, Any] | None] = {
    r"quant_method='awq', which is not read; allowed: 'fp8', 'fbgemm_fp8', 'compressed-tensors', 'mxfp4'\. Give an": {
        "quant_method": "awq"
    },
    "quant_method='gptq', which": {"quant_method": "gptq", "bits": 4},
    "quant_method='bitsandbytes', which": {"quant_method": "bitsandbytes"},
    "quant_method='modelopt', which": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "quant_method='of next year', which": {"quant_method": "of next year"},
    "quant_method=None, which": {},
    r"fmt='e5m2', weight_block_size=\[128, 128\], which": {
        "quant_method": "fp8",
        "fmt": "e5m2",
        "weight_block_size": [128, 128],
    },
    "format='nvfp4-pack-quantized', type='float', num_bits=4, strategy='tensor_group', group_size=16": compressed(
        "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
    ),
    "symmetric=False": compressed("pack-quantized", **{**INT4, "symmetric": False}),
    "actorder='group'": compressed("pack-quantized", **{**INT4, "actorder": "group"}),
    "num_bits=3": compressed("pack-quantized", **{**INT4, "num_bits": 3}),
    "strategy='group', symmetric": compressed("pack-quantized", type="int", num_bits=4, strategy="group"),
    "block_structure='128x128'": compressed(
        "float-quantized", type="float", num_bits=8, strategy="block", block_structure="128x128"
    ),
    "a transform_config, which rotates weights": {
        **compressed("pack-quantized", **INT4),
        "transform_config": {"config_groups": {"u": {}}},
    },
    r"weights of 0 kinds \(no config_groups\)": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "weights of 2 kinds .*num_bits=4.*num_bits=8": {
        **compressed("pack-quantized", **INT4),
        "config_groups": {str(bits): {"weights": {**INT4, "num_bits": bits}} for bits in (4, 8)},
    },
    "weight_packed is int32, but config.json has no quantization_config": None,
    "weight_packed is int32, but the quantization_config of config.json describes no such": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    r"weight_scale has shape \(160, 7\); blocks of \(1, 64\) in \(160, 200\) need \(160, 4\)": compressed(
        "pack-quantized", **{**INT4, "group_size": 64}
    ),
}


KIMI = pytest.mark.parametrize("stored", ["int4 in groups, as Kimi-K2-Thinking"], indirect=True)


@KIMI
@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_read_is_refused_by_name(message: str, stored: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(stored[0], folder)
    set_config(folder, quantization_config=REFUSED[message])
    with pytest.raises(RLMegatronError, match=message):
        HFFolder(folder)
    with pytest.raises(RLMegatronError, match=message):
        convert.hf_to_megatron(folder, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@KIMI
def test_a_config_of_another_type_is_told(stored: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(stored[0], tmp_path / "bad")
    set_config(tmp_path / "bad", quantization_config={"quant_method": "compressed-tensors", "config_groups": [1]})
    with pytest.raises(ConfigError, match=r"config_groups=\[1\]: Input should be a valid dictionary"):
        HFFolder(tmp_path / "bad")
