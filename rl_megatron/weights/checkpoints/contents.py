"""Describes the contents of a checkpoint folder of either kind from headers and indices, without reading weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rl_megatron.errors import CheckpointError
from rl_megatron.models.json_files import JsonFields, read_json
from rl_megatron.weights.bytes.mapped import MappedFile, read_header
from rl_megatron.weights.checkpoints.kind import is_megatron, total_bytes
from rl_megatron.weights.checkpoints.megatron_names import BESIDE, VALUES
from rl_megatron.weights.checkpoints.torch_dist import read_index
from rl_megatron.weights.formats.hf_folder import has_tokenizer, weight_files

_BESIDE = ("_scale_inv", "_scales", "_scale", ".weight_shape")  # a weight that is quantised
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of peft
_PEFT = re.compile(r"\.(\w+)\.(lora_\w+)(\.weight)?$")  # linear, matrix
_LAYER = re.compile(r"^(mtp\.|model\.|model\.language_model\.)layers\.(\d+)\.")
_DRAFTS = "model: draft layers"
_Held = tuple[str, str, str, tuple[int, ...]]  # name, part, dtype, shape
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


class _AdapterFields(JsonFields):
    peft_type: str
    base_model_name_or_path: str | None = None
    r: int | None = None
    lora_alpha: float | None = None


def contents(folder: Path) -> Contents:
    """The contents of a Hugging Face folder, a megatron ``torch_dist`` checkpoint, or a folder of peft's adapters.

    Raises CheckpointError if it is torn, ConfigError if it is none of these.
    """
    if (folder / _ADAPTER).is_file():
        return _adapters(folder)
    megatron, config = is_megatron(folder), _config(folder)
    layers = num if isinstance(num := config.get("num_hidden_layers"), int) else None
    held = list(_megatron(folder, layers) if megatron else _hugging_face(folder, layers))
    facts = {**_model(config), **(_megatron_facts(folder) if megatron else _hugging_face_facts(folder))}
    drafts = sorted({draft for name, *_ in held if (draft := _draft_of(name, layers)) is not None})
    if drafts:
        facts["draft layers"] = ", ".join(drafts)
    parts = [(what, dtype, shape) for _, what, dtype, shape in held]
    return _told("megatron torch_dist" if megatron else "Hugging Face", folder, facts, parts)


def _told(
    kind: str, folder: Path, facts: Mapping[str, str], held: Sequence[tuple[str, str, tuple[int, ...]]]
) -> Contents:
    parts: dict[tuple[str, str], tuple[int, int]] = {}
    for what, dtype, shape in held:
        count, parameters = parts.get((what, dtype), (0, 0))
        parts[what, dtype] = count + 1, parameters + prod(shape)
    return Contents(
        kind=kind,
        facts=(*facts.items(), ("size", f"{total_bytes(folder):,} bytes of weights in all files")),
        parts=tuple(Part(what=w, dtype=d, tensors=n, parameters=p) for (w, d), (n, p) in sorted(parts.items())),
    )


def _adapters(folder: Path) -> Contents:
    """Low-rank adapters (arXiv:2106.09685) as peft writes them."""
    told = read_json(folder / _ADAPTER, _AdapterFields, CheckpointError)
    if not (folder / _ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{folder}: {_ADAPTER} is there, and {_ADAPTER_WEIGHTS} is not; fetch it again")
    entries = read_header(MappedFile(folder / _ADAPTER_WEIGHTS))
    named = {name: _PEFT.search(name) for name in entries}
    linears = sorted({match[1] for match in named.values() if match})
    facts = {
        "base model": told.base_model_name_or_path or "not named",
        "rank and alpha": f"{told.r} and {told.lora_alpha:g}" if told.r and told.lora_alpha else "not given",
        "linears": ", ".join(linears) or "none",
    }
    held = [
        (f"adapter: {match[2]}" if (match := named[name]) else "adapter: other", str(entry.dtype), entry.shape)
        for name, entry in entries.items()
    ]
    return _told(f"adapters ({told.peft_type}, peft)", folder, facts, held)


def _hugging_face(folder: Path, layers: int | None) -> Iterator[_Held]:
    for name in weight_files(folder)[0]:
        for tensor, entry in read_header(MappedFile(folder / name)).items():
            what = "scales of quantised weights" if tensor.endswith(_BESIDE) else _kind(tensor, layers)
            yield tensor, what, str(entry.dtype), entry.shape


def _megatron(folder: Path, layers: int | None) -> Iterator[_Held]:
    sizes, chunks = read_index(folder)
    dtypes = {chunk.key: str(chunk.dtype) for chunk in chunks}
    for key, size in sizes.items():
        what = next((what for start, what in _STATE.items() if key.startswith(start)), None)
        other = "optimizer: other" if key.startswith("optimizer.") else _kind(key, layers)
        yield key, what or other, dtypes.get(key, "no chunk"), size


def _kind(name: str, layers: int | None) -> str:
    """The part of a model that a tensor belongs to, by either kind's names; the decoder has so many ``layers``."""
    if name.startswith(BESIDE):
        return "beside the model: a reference that follows it"
    if _draft_of(name, layers) is not None or name.startswith("mtp."):
        return _DRAFTS
    if name.startswith(("model.visual.", "vision_tower.", "mm_projector.")):
        return "beside the model: a tower"
    if ".lora_" in name:
        return "adapters"
    if name.startswith(VALUES):
        return "beside the model: a value layer"
    if "expert" in name and "shared" not in name and "bias" not in name.rpartition(".")[2]:
        return "model: experts"
    return (
        "model: embedding and output"
        if "embed" in name or name.startswith(("lm_head", "language_model.lm_head", "output_layer"))
        else ("model: the rest")
    )


def _draft_of(name: str, layers: int | None) -> str | None:
    """The name of the draft layer, for multi-token prediction, that a tensor belongs to."""
    found = _LAYER.match(name)
    if found is None or not (found[1] == "mtp." or (layers is not None and int(found[2]) >= layers)):
        return None
    return found[0].removesuffix(".")


def _config(folder: Path) -> Mapping[str, Any]:
    """The keys of config.json, with those of a text model in it first; none if there is no such file."""
    path = folder / "config.json"
    raw = (read_json(path, JsonFields, CheckpointError).model_extra or {}) if path.is_file() else {}
    text = raw.get("text_config")
    return {**raw, **text, "model_type": raw.get("model_type")} if isinstance(text, dict) else raw


def _model(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Facts from config.json, of any family."""
    if not config:
        return {"model": "unknown: there is no config.json"}
    layers, hidden = config.get("num_hidden_layers", "?"), config.get("hidden_size", "?")
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((f"{config[key]} experts" for key in keys if config.get(key)), "no experts")
    return {"model": f"{config.get('model_type')}: {layers} layers, hidden size {hidden}, {experts}"}


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
