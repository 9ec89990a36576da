"""Adapters go with the model that they were trained beside, and with no other of its sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_megatron.errors import CheckpointError
from rl_megatron.weights.adapters.base import base_digest
from rl_megatron.weights.adapters.merging import merge_adapters
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.megatron import held_lora
from rl_megatron.weights.layouts.families import read_shape
from tests.draft_models import save_with_drafts
from tests.family_models import save_model
from tests.saved_adapters import save_adapters
from tools.conversion import run


def changed(source: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A copy of the folder with other numbers."""
    folder.mkdir()
    tensors = {name: change(name, tensor) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gpt_oss", "qwen3_5_moe_stacked"])
def test_a_copy_has_the_same_digest_in_other_files_dtypes_or_either_kind(name: str, tmp_path: Path) -> None:
    save_model(name, source := tmp_path / "hf")
    convert.hf_to_megatron(source, tmp_path / "megatron", shard_bytes=30_000)
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "half", dtype=DType.BF16, shard_bytes=20_000)
    wanted = base_digest(source)
    assert base_digest(tmp_path / "megatron") == base_digest(tmp_path / "half") == wanted


def test_draft_layers_are_no_part_of_it(tmp_path: Path) -> None:
    save_with_drafts("deepseek_v3", source := tmp_path / "hf")
    draft = f"model.layers.{read_shape(source).num_layers}."
    other = changed(source, tmp_path / "other", lambda name, tensor: tensor + 1 if name.startswith(draft) else tensor)
    assert base_digest(other) == base_digest(source)


@pytest.mark.parametrize("kind", ["q_proj", "down_proj", "embed_tokens", "layernorm"])
def test_a_model_of_the_same_sizes_is_refused_for_a_merge(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model("qwen3_moe", source := tmp_path / "hf")
    other = changed(source, tmp_path / "other", lambda name, tensor: tensor * 1.02 if kind in name else tensor)
    shape, digest = read_shape(source), base_digest(source)
    adapters, older = (save_adapters(tmp_path / "new", shape, digest), save_adapters(tmp_path / "older", shape))
    merge_adapters(adapters, source, tmp_path / "merged")
    with pytest.raises(CheckpointError, match=rf"new holds adapters of another model than {other}: .* {digest}, and"):
        merge_adapters(adapters, other, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    run(older, tmp_path / "taken", config=other, merge=True)
    assert "does not say beside which model its adapters were trained" in capsys.readouterr().err


def test_a_model_of_the_same_sizes_is_refused_for_the_folder_of_peft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of configuration and tokenizer alone is taken, with a note: there is nothing to compare."""
    save_model("qwen3_moe", source := tmp_path / "hf")
    other = changed(source, tmp_path / "other", lambda name, tensor: tensor * 1.02 if "q_proj" in name else tensor)
    (bare := tmp_path / "bare").mkdir()
    (bare / "config.json").write_text((source / "config.json").read_text())
    adapters = save_adapters(tmp_path / "adapters", read_shape(source), base_digest(source))
    run(adapters, tmp_path / "taken", config=source)
    assert "note" not in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=f"adapters holds adapters of another model than {other}: "):
        run(adapters, tmp_path / "refused", config=other)
    assert not (tmp_path / "refused").exists()
    run(adapters, tmp_path / "noted", config=bare)
    assert f"note: {bare} has no weights to compare with" in capsys.readouterr().err


def test_a_checkpoint_of_an_older_version_is_read(tmp_path: Path) -> None:
    tmp_path.joinpath("lora.json").write_text('{"rank":4,"expert_rank":null,"alpha":8.0,"targets":["attention"]}')
    held = held_lora(tmp_path)
    assert held is not None
    assert (held.rank, held.base) == (4, None)
