"""Checks that a model's folder has a draft layer to train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rl_megatron.models.json_files import tensor_names
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.checkpoints.hugging_face import own_in_drafts
from rl_megatron.weights.layouts.tables.drafts import holds_draft


def check_files(folder: Path, shape: ModelShape) -> Iterator[tuple[Literal["problem", "note"], str]]:
    """Yields that the files have no draft layer, or one with its own embedding or output matrix."""
    if not holds_draft(tensor_names(folder)):
        text = "give a folder that has one, as the model is published, or leave it out"
        yield "problem", f"learner.draft.train=true, but no tensor in model.path={folder} is of a draft layer; {text}"
    for name, of in own_in_drafts(folder, shape, whole=False).items():
        yield (
            "note",
            f"model.path={folder}: {name} is no copy of {of}, which the draft layer reads in its place; no run "
            "trains or exports it, and until the layer has learned it proposes other tokens (docs/sft.md)",
        )
