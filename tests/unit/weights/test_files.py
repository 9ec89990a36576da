"""Files of models: safetensors as others read and write them, and torn, flipped and wrongly typed ones."""

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
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rl_megatron.errors import CheckpointError, ConfigError, RLMegatronError, WeightError
from rl_megatron.models.families.fields import ConfigFields
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.types import ParallelDims
from rl_megatron.weights.bytes.bits import to_tensor
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.mapped import MappedFile
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes, write_folder
from rl_megatron.weights.formats.hf_folder import config_text
from rl_megatron.weights.layouts.families import FAMILIES, hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.grouped_query import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from tests.small_models import SMALL_MOE

HF = Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE)
MEGATRON = Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE, dims=ParallelDims(tp=2, ep=2))


def save_with_transformers(folder: Path, max_shard_size: str = "4KB") -> Qwen3MoeForCausalLM:
    """A random model of SMALL_MOE, written by transformers itself, with a tokenizer and a chat template."""
    config = Qwen3MoeConfig(
        vocab_size=SMALL_MOE.vocab_size,
        hidden_size=SMALL_MOE.hidden_size,
        num_hidden_layers=SMALL_MOE.num_layers,
        num_attention_heads=SMALL_MOE.num_heads,
        num_key_value_heads=SMALL_MOE.num_kv_heads,
        head_dim=SMALL_MOE.head_dim,
        num_experts=SMALL_MOE.num_experts,
        num_experts_per_tok=SMALL_MOE.experts_per_token,
        moe_intermediate_size=SMALL_MOE.expert_width,
        max_position_embeddings=SMALL_MOE.max_positions,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms are ones at first: every element should be telling
            parameter.normal_(std=0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    backend = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "model"
    save_with_transformers(path)
    return path


def file_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor, by safetensors' own loader."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def rank_tensors(layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in layout.local_shapes(rank).items()}


@pytest.mark.parametrize("max_shard_size", ["4KB", "1GB"])
def test_reading_cuts_a_ranks_tensors_out_of_the_files(tmp_path: Path, max_shard_size: str) -> None:
    save_with_transformers(tmp_path, max_shard_size=max_shard_size)
    hf, got = file_tensors(tmp_path), rank_tensors(MEGATRON, 1, torch.float64)
    read_boxes(HFFolder(tmp_path), HF, MEGATRON, 1, got)
    p, q = "model.layers.1.", "decoder.layers.1."
    second_group = [hf[p + f"self_attn.{x}_proj.weight"].chunk(2)[1] for x in "qkv"]
    wanted = {
        "embedding.word_embeddings.weight": torch.cat([hf["model.embed_tokens.weight"][16:], torch.zeros(11, 8)]),
        q + "self_attention.linear_qkv.weight": torch.cat(second_group),
        q + "self_attention.linear_proj.weight": hf[p + "self_attn.o_proj.weight"][:, 8:],
        q + "mlp.router.weight": hf[p + "mlp.gate.weight"],
        q + "mlp.experts.linear_fc1.weight3": torch.cat(
            [hf[p + f"mlp.experts.3.{x}_proj.weight"] for x in ("gate", "up")]
        ),
        q + "mlp.experts.linear_fc2.weight2": hf[p + "mlp.experts.2.down_proj.weight"],
    }
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor.double()), name
    assert not any(tensor.isnan().any() for tensor in got.values())


def _remove_shard(folder: Path) -> None:
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


def _tear_shard(folder: Path) -> None:
    path = next(folder.glob("model-00002-of-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-100])


def _rewrite(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    """As one file, changed: without an index."""

    def apply(folder: Path) -> None:
        tensors = file_tensors(folder)
        change(tensors)
        for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
            path.unlink()
        save_file(tensors, folder / "model.safetensors")

    return apply


def _misplace(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))


def _in_two_files(placed: int) -> Callable[[Path], None]:
    """``model.norm.weight`` in another file too; the index places it in the first or the last."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        names = sorted({index["weight_map"][name] for name in ("model.norm.weight", "lm_head.weight")})
        norm = {"model.norm.weight": file_tensors(folder)["model.norm.weight"]}
        for name in names:
            save_file(load_file(folder / name) | norm, folder / name)
        index["weight_map"]["model.norm.weight"] = names[placed]
        path.write_text(json.dumps(index))

    return apply


IN_TWO = r"model\.norm\.weight is in model-00001-of-00003\.safetensors and in model-00003-of-00003\.safetensors"


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_remove_shard, CheckpointError, r"names are missing: model-00002-of-00003\.safetensors"),
        (_tear_shard, CheckpointError, r"model-00002-of-00003\.safetensors is torn"),
        (_misplace, WeightError, r"model-00001-of-00003\.safetensors has no tensor model\.norm\.weight"),
        (_in_two_files(0), WeightError, IN_TWO),
        (_in_two_files(-1), WeightError, IN_TWO),
        (
            _rewrite(lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight")),
            WeightError,
            r"model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is missing; it should have shape \(6, 8\)",
        ),
        (
            _rewrite(lambda t: t.update({"model.norm.weight": torch.zeros(9)})),
            WeightError,
            r"model\.norm\.weight has shape \(9,\); it should have \(8,\)",
        ),
        (
            _rewrite(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)})),
            WeightError,
            r"model\.layers\.0\.self_attn\.q_proj\.bias is unknown",
        ),
    ],
)
def test_faults_are_named(tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], message: str) -> None:
    save_with_transformers(tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=message):
        read_boxes(HFFolder(tmp_path), HF, MEGATRON, 0, rank_tensors(MEGATRON, 0))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        HFFolder(tmp_path)


def test_a_models_own_misfit_is_named_before_anything_is_written(folder: Path) -> None:
    tensors = rank_tensors(MEGATRON, 0)
    tensors["decoder.final_layernorm.weight"] = torch.zeros(7)
    with pytest.raises(WeightError, match=r"rank 0 do not fit(.|\n)*decoder\.final_layernorm\.weight has shape \(7,\)"):
        read_boxes(HFFolder(folder), HF, MEGATRON, 0, tensors)
    assert all(t.isnan().all() for name, t in tensors.items() if name != "decoder.final_layernorm.weight")


@pytest.mark.parametrize("max_shard_bytes", [4000, 10**9])
def test_transformers_reads_what_is_written(folder: Path, tmp_path: Path, max_shard_bytes: int) -> None:
    hf = file_tensors(folder)
    changed = {name: tensor + 1 for name, tensor in hf.items()}
    out = tmp_path / "new" / "export"
    write_folder(changed, folder, out, max_shard_bytes)
    weights = [path for path in out.iterdir() if path.suffix == ".safetensors"]
    assert (len(weights) > 1) == (max_shard_bytes == 4000)
    assert all(path.stat().st_size < max_shard_bytes + 4000 for path in weights)  # headers are not counted
    copied = {path.name for path in folder.iterdir() if "safetensors" not in path.name}
    assert copied >= {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in out.iterdir() if "safetensors" not in path.name} == copied
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
    again = file_tensors(tmp_path / "again")
    assert again.keys() == changed.keys()
    assert all(torch.equal(again[name], changed[name]) for name in changed)
    assert os.listdir(out.parent) == ["export"]


def test_template_variables_are_written_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed after that leaves no folder without them."""
    (folder / "chat_template.jinja").write_text("{{ who }} asks")
    found, rename = dict[Path, str](), Path.rename

    def noting(path: Path, target: Path) -> Path:
        found[target] = (path / "chat_template.jinja").read_text()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noting)
    write_folder(file_tensors(folder), folder, tmp_path / "export", variables={"who": "somebody"})
    assert found == {tmp_path / "export": "{% set who = who if who is defined else 'somebody' %}{{ who }} asks"}


def test_others_can_read_a_model_as_the_umask_says(folder: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_folder(file_tensors(folder), folder, tmp_path / "export", max_shard_bytes=4000)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "export").iterdir()} == {"0o640"}


def test_the_configs_dtype_follows_the_weights(folder: Path, tmp_path: Path) -> None:
    """Of its matrices: a router's selection bias stays float32."""
    tensors = {name: t.bfloat16() for name, t in file_tensors(folder).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    write_folder(tensors, folder, tmp_path / "export")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.bfloat16


def test_a_file_or_a_link_of_the_outputs_name_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to(folder)
    for name, what in (("file", "a file"), ("link", "a link"), ("linked", "a link")):
        with pytest.raises(CheckpointError, match=f"{name} is {what}, where a folder belongs; remove it"):
            write_folder(file_tensors(folder), folder, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "linked"]


def test_a_failed_write_leaves_nothing_and_what_was_there(folder: Path, tmp_path: Path) -> None:
    """A finished run that is resumed has no other export."""
    tensors = file_tensors(folder)
    bad = {**tensors, "model.norm.weight": tensors["model.norm.weight"].to("meta")}  # has no data to write
    with pytest.raises(NotImplementedError):
        write_folder(bad, folder, tmp_path / "export", max_shard_bytes=4000)
    assert not os.listdir(tmp_path)
    write_folder(tensors, folder, tmp_path / "export", max_shard_bytes=4000)
    before = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    with pytest.raises(NotImplementedError):
        write_folder(bad, folder, tmp_path / "export", max_shard_bytes=4000)
    assert {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()} == before
    write_folder(tensors, folder, tmp_path / "export")
    assert [path.name for path in (tmp_path / "export").glob("*.safetensors")] == ["model.safetensors"]
    assert os.listdir(tmp_path) == ["export"]


@pytest.mark.parametrize(
    ("pad", "ends", "wanted"), [(7, 7, None), (7, [5, 7], None), (3, 7, 3), (3, None, 3), (None, None, None)]
)
def test_ends_are_scored(tmp_path: Path, pad: int | None, ends: int | list[int] | None, wanted: int | None) -> None:
    """transformers reads the score at the last token that is not ``pad_token_id``."""
    config = {"architectures": ["LlamaForCausalLM"], "pad_token_id": pad, "eos_token_id": ends}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = json.loads(config_text(tmp_path, set(), scores=True))
    assert made["pad_token_id"] == wanted
    assert made["architectures"] == ["LlamaForSequenceClassification"]
    assert json.loads(config_text(tmp_path, set()))["pad_token_id"] == pad


# Torn, flipped and wrongly typed files of models: each reader gives a short error quickly, or reads on.
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
    checkpoint, tensors = HFFolder(folder), {}
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
def test_sizes_come_first(hf: Path, megatron: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    for i, whole in enumerate((hf, megatron)):
        folder = copy_of(whole, tmp_path / str(i), "config.json")
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | change))
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
        for data in torn((folder / name).read_bytes(), draw, count):
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
def test_weights_of_nan_are_refused_by_name(hf: Path, tmp_path: Path, value: float, dtype: torch.dtype) -> None:
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
def test_a_dtypes_infinities_are_not_broken(hf: Path, tmp_path: Path, dtype: DType, value: float, most: str) -> None:
    folder = copy_of(hf, tmp_path / "large", "config.json")
    (folder / INDEX).unlink()
    tensors = {k: t for f in folder.glob("model-*") for k, t in load_file(f).items()}
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name][3, 5] = -value
    save_file(tensors, folder / "model.safetensors")
    said = re.escape(f"{name} holds a number of size {value:g}, and torch.{dtype} none above ") + most
    with pytest.raises(WeightError, match=said):
        convert.hf_to_megatron(folder, tmp_path / "out", dtype=dtype)
    shape, wanted = read_shape(folder), getattr(torch, dtype)
    here = {n: torch.empty(s, dtype=wanted) for n, s in megatron_layout(shape).local_shapes(0).items()}
    with pytest.raises(WeightError, match=said):
        read_boxes(HFFolder(folder), hf_layout(shape), megatron_layout(shape), 0, here)


@pytest.mark.parametrize("dtype", [d for d in DType if d.name[0] in "FB" and d is not DType.BOOL])
def test_numbers_are_told_from_others_as_torch_does(dtype: DType) -> None:
    width, draw = dtype.itemsize, np.random.default_rng(5)
    shift = 8 * width - 62 if width == 8 else 0
    bits = np.arange(1 << 8 * width) if width <= 2 else draw.integers(0, 1 << 62, 4000) << shift
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
