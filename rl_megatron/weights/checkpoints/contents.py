"""Describes the contents of a checkpoint folder of either kind from headers and indices, without reading weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rl_megatron.errors import CheckpointError
from rl_megatron.weights.bytes.mapped import MappedFile, read_header
from rl_megatron.weights.checkpoints.kind import is_megatron, total_bytes
from rl_megatron.weights.checkpoints.torch_dist import read_index
from rl_megatron.weights.formats.hf_folder import has_tokenizer, weight_files

_BESIDE = ("_scale_inv", "_scales", "_scale", ".weight_shape")  # a weight that is quantised
_STATE = {  # megatron's optimizer state, by the prefix of its names
    "optimizer.state.param.": "optimizer: float32 weights",
    "optimizer.state.exp_avg_sq.": "optimizer: second moments",
    "optimizer.state.exp_avg.": "optimizer: first moments",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors of one kind and dtype. A stack of layers or experts, as megatron writes them, counts as one."""

    what: str
    dtype: str
    tensors: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """``facts`` are (what, value) pairs to show."""

    kind: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]


def contents(folder: Path) -> Contents:
    """The contents of a Hugging Face folder or a megatron ``torch_dist`` checkpoint.

    Raises CheckpointError if it is torn, ConfigError if it is neither.
    """
    megatron = is_megatron(folder)
    held = _megatron(folder) if megatron else _hugging_face(folder)
    parts: dict[tuple[str, str], tuple[int, int]] = {}
    for what, dtype, shape in held:
        count, parameters = parts.get((what, dtype), (0, 0))
        parts[what, dtype] = count + 1, parameters + prod(shape)
    facts = {**_model(folder), **(_megatron_facts(folder) if megatron else _hugging_face_facts(folder))}
    return Contents(
        kind="megatron torch_dist" if megatron else "Hugging Face",
        facts=(*facts.items(), ("size", f"{total_bytes(folder):,} bytes of weights in all files")),
        parts=tuple(Part(what=w, dtype=d, tensors=n, parameters=p) for (w, d), (n, p) in sorted(parts.items())),
    )


def _hugging_face(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for name in weight_files(folder)[0]:
        for tensor, entry in read_header(MappedFile(folder / name)).items():
            what = "scales of quantised weights" if tensor.endswith(_BESIDE) else _kind(tensor)
            yield what, str(entry.dtype), entry.shape


def _megatron(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    sizes, chunks = read_index(folder)
    dtypes = {chunk.key: str(chunk.dtype) for chunk in chunks}
    for key, size in sizes.items():
        what = next((what for start, what in _STATE.items() if key.startswith(start)), None)
        other = "optimizer: other" if key.startswith("optimizer.") else _kind(key)
        yield what or other, dtypes.get(key, "no chunk"), size


def _kind(name: str) -> str:
    """The part of a model that a tensor belongs to, by either kind's names."""
    if name.startswith("mtp."):
        return "beside the model: draft layers"
    if name.startswith(("model.visual.", "vision_tower.", "mm_projector.")):
        return "beside the model: a tower"
    if ".lora_" in name:
        return "adapters"
    if "expert" in name and "shared" not in name and "bias" not in name.rpartition(".")[2]:
        return "model: experts"
    return (
        "model: embedding and output"
        if "embed" in name or name.startswith(("lm_head", "language_model.lm_head", "output_layer"))
        else ("model: the rest")
    )


def _model(folder: Path) -> Mapping[str, str]:
    """Facts from config.json, of any family."""
    path = folder / "config.json"
    if not path.is_file():
        return {"model": "unknown: there is no config.json"}
    try:
        raw = json.loads(path.read_text())
        raw = {**raw.get("text_config", {}), **raw}
        layers, hidden = raw.get("num_hidden_layers", "?"), raw.get("hidden_size", "?")
        experts = next((raw[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if raw.get(k)), 0)
        return {
            "model": f"{raw.get('model_type')}: {layers} layers, hidden size {hidden}, "
            + (f"{experts} experts" if experts else "no experts")
        }
    except (ValueError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path}: not readable ({error}); fetch it again") from error


def _hugging_face_facts(folder: Path) -> Mapping[str, str]:
    files = weight_files(folder)[0]
    return {"tokenizer": "yes" if has_tokenizer(folder) else "none", "files": str(len(files))}


def _megatron_facts(folder: Path) -> Mapping[str, str]:
    _, chunks = read_index(folder)
    files = {chunk.file for chunk in chunks}
    writers = {file.split("_")[2] for file in files if file.startswith("__")}
    return {
        "tokenizer": "yes" if has_tokenizer(folder) else "none",
        "files": str(len(files)),
        **({"world": f"{len(writers)} ranks wrote it; its weights load at any TP, PP, EP, ETP"} if writers else {}),
    }
