"""Quantised checkpoints of others, written here number by number, against the values that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import ParallelDims
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.contents import contents
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.checkpoints.verify import verify
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from tests.family_models import save_model
from tests.unit.weights.test_quantise import set_config

FP8 = torch.float8_e4m3fn
# Groups and words end inside the halves of tp=2, and a group is not whole at the end of a row of 200.
SPEC = TinySizes(hidden_size=160, expert_width=200, num_layers=1, num_experts=2, head_dim=40)
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
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(SPEC, tmp_path_factory.mktemp("models"), seed=4)


@pytest.fixture(scope="module", params=KINDS)
def stored(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantised folder, and what it stands for in bfloat16. Experts are quantised, attention is not."""
    torch.manual_seed(1)
    config, store = KINDS[request.param]
    root = tmp_path_factory.mktemp("stored")
    small, wide = {}, {}
    for name, x in load_file(plain / "model.safetensors").items():
        if ".experts." not in name:
            small[name] = wide[name] = x.bfloat16()
            continue
        parts, values = store((x.shape[0], x.shape[1]))
        small |= {name.replace("weight", end): part for end, part in parts.items()}
        wide[name] = values.float().bfloat16()
    for folder, tensors in (("small", small), ("wide", wide)):
        shutil.copytree(plain, root / folder)
        save_file(tensors, root / folder / "model.safetensors", metadata={"format": "pt"})
        set_config(root / folder, dtype="bfloat16")
    set_config(root / "small", quantization_config=config)
    return root / "small", root / "wide"


def test_every_number_is_read_as_what_it_stands_for(stored: tuple[Path, Path], tmp_path: Path) -> None:
    small, wide = stored
    convert.hf_to_megatron(small, tmp_path / "megatron")
    assert list(verify(tmp_path / "megatron", against=wide)) == []
    assert "quantization_config" not in json.loads((tmp_path / "megatron/config.json").read_text())
    assert "scales of quantised weights" in {part.what for part in contents(small).parts}


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
    told = convert.left_out(tmp_path / "small") or ""
    assert told.startswith("vision_tower, mm_projector: only the text model is trained and converted; the new folder")
    assert "beside the model: a tower" in {part.what for part in contents(tmp_path / "small").parts}
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
    with pytest.raises(ConfigError, match=r"config_groups=\[1\]: Input should be an object"):
        HFFolder(tmp_path / "bad")
