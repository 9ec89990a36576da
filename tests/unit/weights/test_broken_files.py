"""Torn, flipped and wrongly typed files of models: each reader gives a short error quickly, or reads on."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from rl_megatron.errors import CheckpointError, ConfigError, RLMegatronError, WeightError
from rl_megatron.models.families.fields import ConfigFields
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.bytes.bits import to_tensor
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.mapped import MappedFile
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import FAMILIES, hf_layout, megatron_layout, read_shape

INDEX = "model.safetensors.index.json"
SPEC = TinySizes(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=2)
VALUES = (None, "text", "", [], [None], {}, {"a": []}, -1, 0, 1.5, True, 10**12, 10**40, float("nan"), "x" * 9_000)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files, so that there is an index."""
    folder = tmp_path_factory.mktemp("whole")
    convert.hf_to_megatron(make_tiny_model(SPEC, folder / "models", seed=2), folder / "megatron")
    convert.megatron_to_hf(folder / "megatron", folder / "hf", shard_bytes=20_000)
    assert (folder / "hf" / INDEX).is_file()
    return folder / "hf"


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    return hf.parent / "megatron"


def read_hf(folder: Path) -> None:
    """As a learner's rank does."""
    shape = read_shape(folder)
    hf, mine = hf_layout(shape), megatron_layout(shape)
    checkpoint = HFFolder(folder)
    tensors = {}
    if len(checkpoint.shapes()) * 2 > hf.num_parameters(0):  # else refused before any is made
        tensors = {name: torch.empty(size) for name, size in mine.local_shapes(0).items() if np.prod(size) < 1e7}
    read_boxes(checkpoint, hf, mine, 0, tensors)


def read_streamed(folder: Path) -> None:
    """As the converter does."""
    tensors, _ = convert.hf_tensors(folder)
    for tensor in tensors:
        for _ in tensor.blocks(lambda n: None):
            pass


def outcome(read: Callable[[Path], None], folder: Path) -> str:
    """What is said, which is never long; nothing where all is read."""
    said = ""
    try:
        read(folder)
    except RLMegatronError as error:
        said = str(error)
    assert len(said) < 5000
    return said


def torn(data: bytes, draw: random.Random, count: int) -> Iterator[bytes]:
    """Cut, with a flipped bit, with zeros, with something before it, and nothing."""
    yield b""
    yield b"\xef\xbb\xbf" + data
    yield bytes(len(data))
    for _ in range(count):
        at = draw.randrange(len(data))
        yield data[:at]
        flipped = bytearray(data)
        flipped[at] ^= 1 << draw.randrange(8)
        yield bytes(flipped)
        flipped[at : at + 8] = draw.randbytes(8)
        yield bytes(flipped)


def copy_of(folder: Path, out: Path, name: str) -> Path:
    """The folder by links, but for one file that may be changed."""
    shutil.copytree(folder, out, copy_function=os.link)
    data = (out / name).read_bytes()
    (out / name).unlink()
    (out / name).write_bytes(data)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_with_any_value_anywhere_is_a_model_or_told(family: str, tmp_path: Path) -> None:
    kind = {"kimi_k2": "deepseek_v3"}.get(family, family)
    config = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict() | {"model_type": family}, default=str))
    path = tmp_path / "config.json"
    for key in config.keys() & ConfigFields.model_fields:
        for value in (*VALUES, ...):
            changed = {k: v for k, v in config.items() if k != key} | ({} if value is ... else {key: value})
            path.write_text(json.dumps(changed))
            outcome(read_shape, tmp_path)


@pytest.mark.parametrize(
    "content", [b"[]", b"7", b"null", b"[" * 100_000, b'{"model_type": [1]}', b"\xff\xfe{\x00}\x00"]
)
def test_a_config_that_is_no_object_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: Input should be less than or equal to 10000"),
        ({"num_experts": 10**12, "num_local_experts": None}, "num_experts=1000000000000: Input should be less than"),
        ({"num_hidden_layers": None}, "no num_hidden_layers; fetch the file again"),
        ({"hidden_size": "16"}, "hidden_size='16': Input should be a valid integer"),
        ({"num_key_value_heads": 3}, "3 key and value heads do not divide 2 attention heads"),
    ],
)
def test_sizes_are_compared_before_rows_are_listed(
    hf: Path, megatron: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for i, whole in enumerate((hf, megatron)):
        folder = copy_of(whole, tmp_path / str(i), "config.json")
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
        assert message in outcome(read_streamed, folder)


def test_a_config_of_thousands_of_tensors_more_is_not_listed(hf: Path, tmp_path: Path) -> None:
    folder = copy_of(hf, tmp_path / "deep", "config.json")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10_000}
    (folder / "config.json").write_text(json.dumps(config))
    for read in (read_hf, read_streamed):
        assert f"{folder} has 18 tensors, but its config.json describes 150003" in outcome(read, folder)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00002-of-00003.safetensors"])
def test_a_torn_hugging_face_folder_is_told(hf: Path, tmp_path: Path, name: str) -> None:
    folder, draw = copy_of(hf, tmp_path / "torn", name), random.Random(1)
    whole = (folder / name).read_bytes()
    header = whole[: 8 + int.from_bytes(whole[:8], "little")] if name.endswith("safetensors") else whole
    for part in torn(header, draw, 12):
        (folder / name).write_bytes(part + whole[len(header) :])
        outcome(read_hf, folder)
        outcome(read_streamed, folder)
    for data in (b"", whole[:-3]):
        (folder / name).write_bytes(data)
        assert outcome(read_hf, folder)
        assert outcome(read_streamed, folder)


@pytest.mark.parametrize(
    "weight_map",
    [None, [], 7, {}, {"a": 1}, {"a": "../moved.safetensors"}, {"a": "/etc/passwd"}, {"a": "x" * 5000}, {"a": "\0"}],
)
def test_an_index_names_files_of_its_folder_alone(hf: Path, tmp_path: Path, weight_map: Any) -> None:
    folder = copy_of(hf, tmp_path / "moved", INDEX)
    (folder.parent / "moved.safetensors").write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    whole = json.loads((folder / INDEX).read_text())["weight_map"]
    wanted = whole | weight_map if isinstance(weight_map, dict) and weight_map else weight_map
    (folder / INDEX).write_text(json.dumps({"weight_map": wanted}))
    for read in (read_hf, read_streamed):
        assert INDEX in outcome(read, folder)


def test_two_sets_of_weights_are_refused(hf: Path, tmp_path: Path) -> None:
    """transformers reads the one, engines the other."""
    folder = copy_of(hf, tmp_path / "two", INDEX)
    (folder / "model.safetensors").write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    for read in (read_hf, read_streamed):
        assert "it has two sets of weights" in outcome(read, folder)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": "text", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, None]},
        {"dtype": 7, "shape": [2], "data_offsets": [0, 8]},
        [],
        "text",
    ],
)
def test_a_header_of_another_shape_is_told(hf: Path, tmp_path: Path, tensor: Any) -> None:
    folder = copy_of(hf, tmp_path / "header", "config.json")
    (folder / INDEX).unlink()
    header = json.dumps({"model.norm.weight": tensor}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    for read in (read_hf, read_streamed):
        assert "C64" in (said := outcome(read, folder)) or "torn or not a safetensors file" in said


def test_a_torn_megatron_folder_is_told(megatron: Path, tmp_path: Path) -> None:
    draw = random.Random(3)
    for name, count in ((".metadata", 60), ("__0_0.distcp", 20)):
        folder = copy_of(megatron, tmp_path / name, name)
        whole = (folder / name).read_bytes()
        for data in torn(whole, draw, count):
            (folder / name).write_bytes(data)
            outcome(read_streamed, folder)
        (folder / name).write_bytes(b"")
        assert outcome(read_streamed, folder)


def test_a_pickle_that_asks_for_gigabytes_is_refused(megatron: Path, tmp_path: Path) -> None:
    folder = copy_of(megatron, tmp_path / "large", ".metadata")
    path = folder / ".metadata"
    path.write_bytes(b"\x80\x02}" + pickle.LONG_BINPUT + (2**32 - 1).to_bytes(4, "little") + b".")
    assert "slot 4294967295 in 9 bytes" in outcome(read_streamed, folder)
    path.write_bytes(b"\x80\x05" + pickle.BYTEARRAY8 + (2**40).to_bytes(8, "little") + b".")
    assert f"{path} is torn" in outcome(read_streamed, folder)


def test_a_megatron_folder_reads_files_of_its_own_alone(megatron: Path, tmp_path: Path) -> None:
    folder = copy_of(megatron, tmp_path / "inside", ".metadata")
    path = folder / ".metadata"
    (tmp_path / "__0_0.dis").write_bytes((folder / "__0_0.distcp").read_bytes())
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../__0_0.dis"))
    assert "'../__0_0.dis', which is not in the folder" in outcome(read_streamed, folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_no_numbers_are_refused_by_name(
    hf: Path, tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    folder = copy_of(hf, tmp_path / "nan", "config.json")
    (folder / INDEX).unlink()
    tensors = {k: t.to(dtype) for f in folder.glob("model-*") for k, t in load_file(f).items()}
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError, match=r"linear_fc1\.weight1 holds NaN or infinite values"):
        convert.hf_to_megatron(folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(WeightError, match=rf"{name} holds NaN or infinite values"):
        read_hf(folder)


@pytest.mark.parametrize(
    ("dtype", "value", "most"), [(DType.F16, 1e5, "65504"), (DType.BF16, 3.4e38, r"3\.38953e\+38")]
)
def test_numbers_that_another_dtype_cannot_hold_are_not_called_broken(
    hf: Path, tmp_path: Path, dtype: DType, value: float, most: str
) -> None:
    folder = copy_of(hf, tmp_path / "large", "config.json")
    (folder / INDEX).unlink()
    tensors = {k: t for f in folder.glob("model-*") for k, t in load_file(f).items()}
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name][3, 5] = -value
    save_file(tensors, folder / "model.safetensors")
    said = re.escape(f"{name} holds a number of size {value:g}, and torch.{dtype} none above ") + most
    with pytest.raises(WeightError, match=said):
        convert.hf_to_megatron(folder, tmp_path / "out", dtype=dtype)
    shape = read_shape(folder)
    wanted = getattr(torch, dtype)
    here = {n: torch.empty(s, dtype=wanted) for n, s in megatron_layout(shape).local_shapes(0).items()}
    with pytest.raises(WeightError, match=said):
        read_boxes(HFFolder(folder), hf_layout(shape), megatron_layout(shape), 0, here)


@pytest.mark.parametrize("dtype", [d for d in DType if d.name[0] in "FB" and d is not DType.BOOL])
def test_numbers_are_told_from_others_as_torch_does(dtype: DType) -> None:
    width = dtype.itemsize
    draw = np.random.default_rng(5)
    bits = (
        np.arange(1 << 8 * width)
        if width <= 2
        else draw.integers(0, 1 << 62, 4000) << (8 * width - 62 if width == 8 else 0)
    )
    for value in bits.astype(dtype.bits)[:: max(1, len(bits) // 4000)]:
        one = np.array([value], dtype.bits)
        assert dtype.all_numbers(one) == bool(to_tensor(one, dtype).double().isfinite().all())


def test_mapped_files_keep_no_descriptor_and_go_with_their_last_view(tmp_path: Path) -> None:
    """A checkpoint has thousands of files, and a process may usually open 1,024."""
    path = tmp_path / "mapped"
    path.write_bytes(bytes(range(256)))

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    files = [MappedFile(path) for _ in range(20)]
    assert maps() == 20
    assert not [link for link in Path("/proc/self/fd").iterdir() if link.resolve() == path]
    view = files[3].array(DType.F8_E4M3, (4,), 8)[1:].view(np.uint8)
    del files
    assert view.tolist() == [9, 10, 11]
    assert maps() == 1
    del view
    assert maps() == 0


def test_an_empty_or_unreadable_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="empty is empty, perhaps after a full disk"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="gone cannot be read: No such file"):
        MappedFile(tmp_path / "gone")
