"""Folders that store more than their model has: a tied model's output matrix, and frequencies of rotary angles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_megatron.errors import WeightError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.checkpoints.verify import verify
from rl_megatron.weights.formats.hf_folder import INDEX, file_names, index_text
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from tests.family_models import save_model

EMBED, HEAD, LOCAL = "model.embed_tokens.weight", "lm_head.weight", "embedding.word_embeddings.weight"
ANGLES = "model.layers.1.self_attn.rotary_emb.inv_freq"
TEXT = torch.arange(24).view(2, 12)
DIMS = ParallelDims(tp=2)


def stored(folder: Path, change: Callable[[Tensor], Tensor], files: int, name: str = "qwen2") -> Path:
    """A tied model with an output matrix, ``change`` of its embedding, that lies in the last of its files."""
    save_model(name, folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert HEAD not in tensors
    parts = [tensors, {HEAD: change(tensors[EMBED].clone()), ANGLES: torch.ones(8)}]
    parts = parts if files == 2 else [parts[0] | parts[1]]
    (folder / "model.safetensors").unlink()
    for file, part in zip(names := file_names(files), parts, strict=True):
        save_file(part, folder / file, {"format": "pt"})
    if files == 2:
        places = {key: file for file, part in zip(names, parts, strict=True) for key in part}
        (folder / INDEX).write_text(index_text(places, 1))
    return folder


def read(folder: Path, rank: int | None = None) -> dict[str, Tensor]:
    """By `read_boxes`: the folder's own tensors, or those of one of two learner ranks."""
    shape = read_shape(folder)
    hf = hf_layout(shape)
    layout = hf if rank is None else megatron_layout(shape, DIMS)
    found = {name: torch.full(size, torch.nan) for name, size in layout.local_shapes(rank or 0).items()}
    read_boxes(HFFolder(folder), hf, layout, rank or 0, found)
    return found


def logits(folder: Path) -> Tensor:
    """Of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found: Tensor = model(TEXT).logits
    return found.detach()


def one_number(at: int) -> Callable[[Tensor], Tensor]:
    def change(weight: Tensor) -> Tensor:
        weight.view(-1)[at] += 1.0
        return weight

    return change


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_copy_of_the_embedding_and_rotary_frequencies_are_left_aside(tmp_path: Path, name: str, files: int) -> None:
    folder = stored(tmp_path / "hf", lambda weight: weight, files, name)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    found = read(folder)
    assert found.keys() == state.keys() - {HEAD}
    assert all(torch.equal(found[key], state[key]) for key in found)
    halves = [read(folder, rank)[LOCAL] for rank in range(DIMS.tp)]
    assert torch.equal(torch.cat(halves)[: len(state[EMBED])], state[EMBED])
    assert list(verify(folder)) == []
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == found.keys()
    assert torch.equal(logits(tmp_path / "back"), logits(folder))


@pytest.mark.parametrize("files", [1, 2])
def test_an_output_matrix_that_differs_is_refused_and_is_one_of_its_own_as_the_error_says(
    tmp_path: Path, files: int
) -> None:
    folder = stored(tmp_path / "hf", one_number(-1), files)
    said = re.escape(f"the stored {HEAD} is no copy of {EMBED}; set tie_word_embeddings=false there")
    for reader in (read, convert.hf_tensors, lambda one: read(one, DIMS.tp - 1)):
        with pytest.raises(WeightError, match=said):
            reader(folder)
    wanted = logits(folder)  # transformers does not tie them then
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    found = read(folder)
    assert torch.equal(found[HEAD], one_number(-1)(found[EMBED].clone()))
    convert.hf_to_megatron(folder, tmp_path / "megatron")
    convert.megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), wanted)


@pytest.mark.parametrize("change", [lambda weight: weight[:-1], lambda weight: weight.double()])
def test_an_output_matrix_of_another_shape_or_dtype_is_no_copy(
    tmp_path: Path, change: Callable[[Tensor], Tensor]
) -> None:
    folder = stored(tmp_path, change, 1)
    for reader in (read, convert.hf_tensors):
        with pytest.raises(WeightError, match="is no copy of"):
            reader(folder)
