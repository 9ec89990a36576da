"""Draft layers for the tiny models of `tests.family_models`, under the names of DeepSeek-V3 and GLM-4.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.family_models import save_model


def save_with_drafts(name: str, folder: Path, count: int = 1, **changed: Any) -> dict[str, Tensor]:
    """Save the model with ``count`` draft layers of random weights; returns all of the folder's tensors."""
    save_model(name, folder, **changed)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    tensors = load_file(folder / "model.safetensors")
    layers, size = config["num_hidden_layers"], config["hidden_size"]
    last, draw = f"model.layers.{layers - 1}.", torch.Generator().manual_seed(7)

    def drawn(shape: torch.Size, name: str) -> Tensor:
        mean, spread = (1.0, 0.3) if name.endswith("norm.weight") else (0.0, 0.25)
        return torch.randn(shape, generator=draw) * spread + mean

    alike = {key.removeprefix(last): tensor.shape for key, tensor in tensors.items() if key.startswith(last)}
    own = {f"{x}.weight": torch.Size([size]) for x in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = torch.Size([size, 2 * size])
    for layer in range(layers, layers + count):
        tensors |= {f"model.layers.{layer}.{key}": drawn(shape, key) for key, shape in (alike | own).items()}
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    return tensors
