"""Draft layers, for multi-token prediction, in tables and conversions."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_megatron.errors import CheckpointError, WeightError
from rl_megatron.features.lora.merging import merge_adapters
from rl_megatron.models.named import NAMED
from rl_megatron.types import ParallelDims
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, WithDrafts, read_boxes
from rl_megatron.weights.checkpoints.streaming import Share
from rl_megatron.weights.checkpoints.torch_dist import read_index
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.routes.mirror import Mirror
from tests.draft_models import COPIES, save_with_drafts, save_with_qwens_draft
from tests.family_models import save_model
from tests.saved_adapters import save_adapters
from tools.convert.inspection import describe, dropped_tensors
from tools.convert.verify import verify

EXACT = ("e_score_correction_bias", "expert_bias", "indexer.k_norm", "weights_proj")  # in float32 whatever the rest is


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe", "deepseek_v32", "hy_v3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("drafts") / "hf"
    return folder, save_with_drafts(request.param, folder, count=2)


def test_a_conversion_carries_all_but_copies_to_the_bit(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, tensors = saved
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = load_file(tmp_path / "back/model.safetensors")
    copies = {name for name in tensors if name.startswith("model.layers.") and name.endswith(COPIES)}
    assert len(copies) == (2 if read_shape(folder).family == "hy_v3" else 4)
    assert back.keys() == tensors.keys() - copies
    assert all(torch.equal(back[name], tensors[name]) for name in back)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 2
    assert dropped_tensors(folder) is None
    assert dropped_tensors(tmp_path / "megatron") is None


def test_a_matrix_that_is_no_copy_is_named_in_both_cases(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, tensors = saved
    copies = sorted(name for name in tensors if name.startswith("model.layers.") and name.endswith(COPIES))
    own, other = copies[0], "model.embed_tokens.weight" if "embed" in copies[0] else "lm_head.weight"
    shutil.copytree(folder, tmp_path / "hf")
    save_file({**tensors, own: tensors[own] + 1}, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    said = f"{own} is no copy of {other}, which the draft layer reads in its place"
    assert dropped_tensors(tmp_path / "hf") == said
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    (line,) = verify(tmp_path / "megatron", against=tmp_path / "hf")
    assert line == f"{tmp_path / 'hf'}: {said}; it is not compared"
    assert not [*verify(folder, against=folder)]
    assert not [*verify(tmp_path / "hf")]


@pytest.mark.parametrize(
    ("name", "stacked", "left"),
    [
        ("qwen3_next", False, None),
        ("qwen3_5_moe_text", False, None),
        ("qwen3_5_moe_stacked", False, "model.visual: only the text model"),
        ("qwen3_5_moe_stacked", True, "model.visual: only the text model"),
    ],
)
def test_qwens_is_carried_to_the_bit(name: str, stacked: bool, left: str | None, tmp_path: Path) -> None:
    """Qwen3.5 is published with the decoder's experts in one tensor and the draft layer's one by one, Qwen3.6 with both
    in one; each comes back as it was."""
    folder = tmp_path / "hf"
    tensors = save_with_qwens_draft(name, folder, stacked=stacked)
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == {key for key in tensors if not key.startswith("model.visual.")}
    assert all(torch.equal(back[key], tensors[key]) for key in back)
    assert read_shape(tmp_path / "megatron") == read_shape(folder)
    told = dropped_tensors(folder)
    assert told is None if left is None else (told or "").startswith(left)
    assert [dict(describe(tmp_path / k).facts)["draft layers"] for k in ("hf", "megatron")] == ["mtp.layers.0"] * 2


def test_a_folder_of_qwens_without_one_has_none_after_a_conversion(tmp_path: Path) -> None:
    """Its config.json says so where it says it at all."""
    save_model("qwen3_5_moe", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    told = json.loads(path.read_text())
    told["text_config"]["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(told))
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert json.loads((tmp_path / "megatron/config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 0
    assert not convert.converted_shape(tmp_path / "megatron").num_draft_layers


def test_megatron_finds_each_where_its_layers_save_it(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Keys of megatron-core 0.16's MultiTokenPredictionBlock, read by torch: layers from 0 on, experts stacked."""
    folder, tensors = saved
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    sizes, _ = read_index(tmp_path / "megatron")
    state: dict[str, Any] = {key: torch.empty(size) for key, size in sizes.items() if key.startswith("mtp.")}
    dcp.load(state, checkpoint_id=str(tmp_path / "megatron"), no_dist=True)
    final = "final_layernorm.weight" if read_shape(folder).family == "hy_v3" else "shared_head.norm.weight"
    for draft in range(2):
        here, there = f"model.layers.{4 + draft}.", f"mtp.layers.{draft}."
        assert torch.equal(state[there + "eh_proj.weight"], tensors[here + "eh_proj.weight"])
        assert torch.equal(state[there + "final_layernorm.weight"], tensors[here + final])
        fused = state[there + "transformer_layer.mlp.experts.experts.linear_fc1.weight"]
        parts = [tensors[f"{here}mlp.experts.3.{x}_proj.weight"] for x in ("gate", "up")]
        assert torch.equal(fused[3], torch.cat(parts))


def test_names_are_mbridges() -> None:
    """mbridge's rules know one draft layer, behind DeepSeek-V3's 61."""
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    bridge = object.__new__(DeepseekV3Bridge)  # its rules alone
    bridge.config = SimpleNamespace(mtp_num_layers=1, num_layers=61)
    shape = replace(NAMED["deepseek-v3"], num_draft_layers=True)
    assert list(shape.drafted) == [61]
    layout = megatron_layout(shape)
    drafts = [spec for spec in layout.rows() if spec.name.startswith("mtp.")]
    assert len(drafts) == 19
    for spec in drafts:
        name = spec.name.replace("{layer}", "0").replace("{expert}", "5")
        ours = {held.hf.format(layer=61, expert=5) for held in layout.first_chunk(spec)}
        assert set(bridge._weight_name_mapping_mcore_to_hf(name)) == ours, name


def test_they_are_on_the_last_stage_and_cut_like_the_last_layer() -> None:
    shape = replace(NAMED["deepseek-v3"], num_draft_layers=True)
    dims = ParallelDims(tp=2, pp=4, dp=2, ep=4)
    stages = (15, 15, 15, 16)
    layout = megatron_layout(shape, dims, stages=stages)
    without = megatron_layout(replace(shape, num_draft_layers=False), dims, stages=stages)
    assert layout.local_shapes(0) == without.local_shapes(0)
    held = layout.local_shapes(15)
    more = held.keys() - without.local_shapes(15).keys()
    prefix = "mtp.layers.61.transformer_layer."
    assert more
    assert all(name.startswith("mtp.layers.61.") for name in more)
    for name in more:
        if name.startswith(prefix):
            assert held[name] == held["decoder.layers.60." + name.removeprefix(prefix)], name
    assert held["mtp.layers.61.eh_proj.weight"] == (7168 // 2, 2 * 7168)


def test_without_them_a_folder_is_read_and_losses_named(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, tensors = saved
    shape = read_shape(folder)
    found = {name: torch.empty(size) for name, size in hf_layout(shape).local_shapes(0).items()}
    read_boxes(HFFolder(folder), hf_layout(shape), hf_layout(shape), 0, found)
    assert found.keys() == {name for name in tensors if not name.startswith(("model.layers.4", "model.layers.5"))}
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/config.json").write_text((folder / "config.json").read_text())
    kept = {name: tensor for name, tensor in tensors.items() if name != "model.layers.5.eh_proj.weight"}
    save_file(kept, tmp_path / "torn/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"model\.layers\.5\.eh_proj\.weight is missing"):
        convert.hf_to_megatron(tmp_path / "torn", tmp_path / "out")


def test_those_of_a_family_without_rows_are_left_out_and_told(tmp_path: Path) -> None:
    save_model("minimax_m2", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    more = {"model.layers.4.whatever.weight": torch.ones(2)}
    save_file(tensors | more, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_mtp": True, "num_mtp_modules": 1}))
    assert "model.layers.4: draft layers of this family" in (dropped_tensors(tmp_path / "hf") or "")
    convert.hf_to_megatron(tmp_path / "hf", tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert load_file(tmp_path / "back/model.safetensors").keys() == tensors.keys()
    assert json.loads((tmp_path / "back/config.json").read_text())["num_mtp_modules"] == 0
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_mtp_modules": 0}))
    with pytest.raises(WeightError, match=r"model\.layers\.4\.\S+ is unknown"):
        convert.hf_to_megatron(tmp_path / "hf", tmp_path / "other")


def test_a_comparison_says_whose_were_left_out(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, tensors = saved
    shutil.copytree(folder, tmp_path / "without")
    drafts = {name for name in tensors if name.startswith(("model.layers.4.", "model.layers.5."))}
    kept = {name: tensor for name, tensor in tensors.items() if name not in drafts}
    save_file(kept, tmp_path / "without/model.safetensors", metadata={"format": "pt"})
    convert.hf_to_megatron(tmp_path / "without", tmp_path / "megatron")
    drafts = {name for name in drafts if not name.endswith(COPIES)}
    for without in (tmp_path / "without", tmp_path / "megatron"):
        lines = {f"{name} is only in {folder}; {without} was made without draft layers" for name in drafts}
        assert set(verify(folder, against=without)) == set(verify(without, against=folder)) == lines


def test_an_export_reads_them_from_either_kind_of_folder(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, tensors = saved
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    trained = {"lm_head.weight": torch.zeros(2)}
    for start in (folder, tmp_path / "megatron"):
        exported = WithDrafts(trained, start, torch.bfloat16)
        assert next(iter(exported)) == "lm_head.weight"
        assert len(exported) == len([*exported]) > 40
        for name, tensor in list(exported.items())[1:]:
            exact = any(part in name for part in EXACT)
            assert torch.equal(tensor, tensors[name] if exact else tensors[name].bfloat16()), name
    save_model("glm4_moe", tmp_path / "plain")
    assert [*WithDrafts(trained, tmp_path / "plain", torch.bfloat16)] == ["lm_head.weight"]


def test_a_merge_of_adapters_has_those_of_the_base(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Adapters of ones add ``alpha`` to each number of the decoder's matrices that have them, and to no other."""
    folder, tensors = saved
    shape = read_shape(folder)
    merge_adapters(save_adapters(tmp_path / "adapters", shape), folder, tmp_path / "merged")
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "plain")
    merged, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "plain"))
    assert merged.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(merged[name], plain[name])}
    for name in changed:  # on one processor they differ in the last bit of 8
        torch.testing.assert_close(merged[name], tensors[name] + 8, rtol=0, atol=1e-6)
    assert {int(name.split(".")[2]) for name in changed} == set(range(shape.num_layers))
    assert json.loads((tmp_path / "merged/config.json").read_text())["num_nextn_predict_layers"] == 2


def test_a_merge_is_continued_only_with_its_own_adapters(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """Those of a later step may have the path of those that it began with."""
    folder, path = saved[0], tmp_path / "adapters"
    begun = partial(merge_adapters, base=folder, out=tmp_path / "merged", shard_bytes=100_000)
    assert begun(save_adapters(path, read_shape(folder)), share=Share(index=0, count=2)) == [1]
    path.rename(tmp_path / "earlier")
    with pytest.raises(CheckpointError, match="holds a conversion with another adapters"):
        begun(save_adapters(path, read_shape(folder)), share=Share(index=1, count=2))
    assert begun(tmp_path / "earlier", share=Share(index=1, count=2)) == []


def test_a_merge_of_adapters_that_change_is_refused(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    adapters = save_adapters(tmp_path / "adapters", read_shape(saved[0]))
    file = next(adapters.glob("*.distcp"))
    with pytest.raises(CheckpointError, match=f"the source changed while it was read: {file}: "):
        merge_adapters(adapters, saved[0], tmp_path / "merged", on_progress=lambda *_: os.utime(file, (0, 0)))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("drafts", [False, True])
def test_a_mirrors_config_says_it(drafts: bool, saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """vLLM skips tensors of draft layers by this number, and refuses them as unknown where it is 0."""
    shape = replace(read_shape(saved[0]), num_draft_layers=drafts)
    path = tmp_path / "private" / "weights"
    Mirror.make(path, hf_layout(shape).local_shapes(0), torch.float32, saved[0] / "config.json", None, writers=1)
    assert json.loads((path.parent / "config.json").read_text())["num_nextn_predict_layers"] == (2 if drafts else 0)
