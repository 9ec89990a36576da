from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_megatron.errors import CheckpointError, WeightError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes, write_folder
from rl_megatron.weights.formats.hf_folder import config_text
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from tests.small_models import SMALL_MOE

HF = Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE)
MEGATRON = Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE, dims=ParallelDims(tp=2, ep=2))


def save_with_transformers(folder: Path, tie: bool = False, max_shard_size: str = "4KB") -> Qwen3MoeForCausalLM:
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
        tie_word_embeddings=tie,
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


def test_the_hf_table_is_what_transformers_writes(folder: Path) -> None:
    assert HFFolder(folder).shapes() == HF.local_shapes(0)


def test_a_tied_checkpoint_has_no_head(tmp_path: Path) -> None:
    save_with_transformers(tmp_path, tie=True)
    tied = Layout(table=HF_QWEN3_MOE, shape=replace(SMALL_MOE, tie_embeddings=True))
    assert HFFolder(tmp_path).shapes() == tied.local_shapes(0)


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
def test_a_bad_checkpoint_is_named_exactly(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], message: str
) -> None:
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
    model = AutoModelForCausalLM.from_pretrained(out)
    model.save_pretrained(tmp_path / "again")
    again = file_tensors(tmp_path / "again")
    assert again.keys() == changed.keys()
    assert all(torch.equal(again[name], changed[name]) for name in changed)
    assert os.listdir(out.parent) == ["export"]


def test_variables_of_the_chat_template_are_there_when_the_folder_gets_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_classifier_passes_over_no_token_that_ends_texts(
    tmp_path: Path, pad: int | None, ends: int | list[int] | None, wanted: int | None
) -> None:
    """transformers reads the score at the last token that is not ``pad_token_id``."""
    config = {"architectures": ["LlamaForCausalLM"], "pad_token_id": pad, "eos_token_id": ends}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = json.loads(config_text(tmp_path, set(), scores=True))
    assert made["pad_token_id"] == wanted
    assert made["architectures"] == ["LlamaForSequenceClassification"]
    assert json.loads(config_text(tmp_path, set()))["pad_token_id"] == pad
