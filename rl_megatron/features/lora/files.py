"""Checkpoints of adapters, and their conversion to the folder that peft and engines load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.feature import load_side
from rl_megatron.features.lora.feature import LoraSection
from rl_megatron.features.lora.rows import WITH_EXPERTS, LoraLayouts
from rl_megatron.files import write_atomically
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.checkpoints.convert import convert_options
from rl_megatron.weights.checkpoints.hugging_face import write_safetensors
from rl_megatron.weights.checkpoints.megatron import copies_between, is_megatron
from rl_megatron.weights.checkpoints.streaming import Copy, Files, OnProgress, Share, Sink, write_files
from rl_megatron.weights.formats.hf_folder import INDEX, PREFIX, SINGLE
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape

_KEYS = "lora.json"  # next to the shards of a checkpoint that holds only adapters


class HeldLora(LoraSection):
    """The adapters that a checkpoint holds."""

    base: str | None = None
    """`base_digest` of the model that they belong to; None in older checkpoints, and for a model that a seed
    makes."""


def write_lora(folder: Path, lora: LoraSection, base: str | None = None) -> None:
    """Records next to the shards in ``folder`` that they are adapters, with their settings and their model."""
    write_atomically(folder / _KEYS, HeldLora(**lora.model_dump(), base=base).model_dump_json().encode())


def stored_lora(folder: Path) -> HeldLora | None:
    """Reads the settings of adapters that a checkpoint holds in place of a model. Raises CheckpointError."""
    path = folder / _KEYS
    if not path.is_file():
        return None
    try:
        return HeldLora.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}; use another checkpoint") from error


def adapter_copies(source: Path, shape: ModelShape, lora: LoraSection) -> tuple[dict[str, Copy], Files]:
    """Returns a checkpoint's adapters by peft's names, without its prefix. Raises as `megatron_copies`."""
    ranks = megatron_layout(shape)
    hf = LoraLayouts(lora).file_layout(ranks, hf_layout(shape))
    tensors, files = copies_between(source, hf, LoraLayouts(lora).on_ranks(ranks))
    return {tensor.name: tensor for tensor in tensors}, files


def raise_other_base(source: Path, held: HeldLora, base: str, where: str) -> None:
    """Raises CheckpointError if the adapters of ``source`` were trained on a model with another digest than ``base``,
    the digest of ``where``. Older checkpoints have none."""
    if held.base not in (None, base):
        raise CheckpointError(
            f"{source} holds adapters of another model than {where}: they were trained with weights of digest "
            f"{held.base}, and that model's digest is {base}; give the model that training began from"
        )


def adapters_to_peft(
    source: Path,
    out: Path,
    *,
    config: Path,
    family: str | None = None,
    on_progress: OnProgress = lambda n, total: None,
    share: Share | None = None,
) -> list[int]:
    """Writes the adapters of a run's checkpoint as the folder that peft loads, in their stored dtype.

    ``config`` is the folder of the model that they belong to; if it has weights, they are compared. Returns and
    raises as `megatron_to_hf`, and as `raise_other_base`.
    """
    lora, shape = stored_lora(source), read_shape(config, family)
    if lora is None:
        raise ConfigError(f"{source} holds a whole model; there are no adapters to write")
    if unknown_base_reason(source, config) is None:
        base_digest = load_side("rl_megatron.features.lora.merging:base_digest")  # imports torch
        raise_other_base(source, lora, base_digest(config, family), str(config))
    tensors, files = adapter_copies(source, shape, lora)
    named = tuple(replace(tensor, name=PREFIX + name) for name, tensor in tensors.items())
    told = json.dumps(LoraLayouts(lora).described(shape, config), indent=2) + "\n"

    def finish(folder: Path, _: Mapping[str, list[dict[str, object]]]) -> None:
        write_atomically(folder / "adapter_config.json", told.encode())

    sink = Sink(name="adapter_model.safetensors", tensors=named, write=write_safetensors)
    options = convert_options(config, family, None, 0)
    return write_files(
        source, out, [sink], files, on_progress, finish, companion=config, options=options, share=share or Share()
    )


def unknown_base_reason(source: Path, base: Path) -> str | None:
    """Returns why it is unknown whether the adapters of ``source`` were trained on the model of ``base``, or None if it
    can be known."""
    lora = stored_lora(source)
    if lora is None or lora.base is None:
        return f"{source} does not say with which model its adapters were trained"
    if is_megatron(base) or any((base / name).is_file() for name in (INDEX, SINGLE)):
        return None
    return f"{base} has no weights to compare with those that the adapters of {source} were trained with"


def peft_skips_note(source: Path, config: Path, family: str | None) -> str | None:
    """Returns a line about adapters of ``source`` that peft leaves out, for the model of ``config``; None if it takes
    all."""
    lora, shape = stored_lora(source), read_shape(config, family)
    if lora is None or shape.family in WITH_EXPERTS:
        return None
    if not any("{expert}" in part for part in LoraLayouts(lora).ranks(megatron_layout(shape))):
        return None
    return (
        f"peft 0.21 leaves out the adapters of routed experts of model_type={shape.family!r}, without an error; "
        "--merge makes a model with all of them"
    )
