"""A third party's model family: a package of two files, a module of layers, and a tiny model with its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.family_models import save_model

FAMILY, LAYERS = "own_models.rows:FAMILY", "own_models_layers:skipping"
READER = """
from rl_megatron.models.families.common import decoder_fields, dense_fields, refuse_others
from rl_megatron.models.shape import ModelShape


def read(raw, path):
    refuse_others(raw, path, {"activation": "silu"})
    keys = {**raw, "num_hidden_layers": raw["depth"], "intermediate_size": raw["inner"]}
    return ModelShape(**decoder_fields(keys, path), **dense_fields(keys))
"""
ROWS = """
from dataclasses import replace

from own_models import reader
from rl_megatron.weights.layouts.family import Family
from rl_megatron.weights.layouts.tables.qwen3 import QWEN3

NAMES = {"model.embed_tokens": "tokens", "model.layers.": "blocks.", "self_attn.": "mixer.", "lm_head": "out"}


def renamed(name):
    for theirs, own in NAMES.items():
        name = name.replace(theirs, own)
    return name


def own(row, name):
    def bands(shape, degree):
        return tuple(tuple(replace(p, hf=renamed(p.hf)) for p in band) for band in row.bands(shape, degree))

    return replace(row, name=name, bands=bands)


FAMILY = Family(
    model_types=("own_model",),
    read=reader.read,
    tables={
        "hf": [own(row, renamed(row.name)) for row in QWEN3.tables["hf"]],
        "megatron": [own(row, row.name) for row in QWEN3.tables["megatron"]],
    },
)
"""
LAYER_SPECS = """
from dataclasses import replace

from megatron.core.transformer.transformer_layer import TransformerLayer

from rl_megatron.learner.model.layers import torch_layer_spec


class Skipped(TransformerLayer):
    def forward(self, hidden_states, **_):
        return hidden_states, None


def skipping(shape, layer):
    spec = torch_layer_spec(shape, layer)
    return replace(spec, module=Skipped) if layer == 1 else spec


def nothing(shape, layer):
    return {"layer": layer}
"""
SKIPPED = 1


def write_package(folder: Path) -> None:
    """The family's package and the module of layers, to be found with ``folder`` on the path."""
    package = folder / "own_models"
    package.mkdir()
    (package / "reader.py").write_text(READER)
    (package / "rows.py").write_text(ROWS)
    (folder / "own_models_layers.py").write_text(LAYER_SPECS)


def save_own_model(folder: Path) -> Any:
    """A tiny Qwen3 of transformers', saved in ``folder`` with the family's names and keys."""
    model = save_model("qwen3", folder)
    names = {"model.embed_tokens": "tokens", "model.layers.": "blocks.", "self_attn.": "mixer.", "lm_head": "out"}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_model", "activation": config.pop("hidden_act")}
    config |= {"depth": config.pop("num_hidden_layers"), "inner": config.pop("intermediate_size")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")  # nobody reads it
    return model
