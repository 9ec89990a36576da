"""Shows the contents of a checkpoint folder of either kind, and of each rank of a layout. Reads no weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launcher.build.model import starting_shape
from rl_megatron.config.io import load_config
from rl_megatron.errors import CheckpointError, ConfigError, download_hint
from rl_megatron.files import parse
from rl_megatron.models.json_files import JsonFields, read_json, tensor_names
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.bytes.mapped import MappedFile, read_header
from rl_megatron.weights.checkpoints.convert import converted_shape, not_the_decoders
from rl_megatron.weights.checkpoints.hugging_face import own_in_drafts
from rl_megatron.weights.checkpoints.megatron import (
    BESIDE,
    VALUES,
    has_draft,
    is_megatron,
    newest_checkpoint,
    stored_files,
    total_bytes,
)
from rl_megatron.weights.checkpoints.torch_dist import read_index, read_tensor
from rl_megatron.weights.formats.hf_folder import has_tokenizer, is_cache_scale, weight_files
from rl_megatron.weights.layouts.layout import Layout, coordinates
from tools.convert.layouts import closest_name, model_shape, parse_layout

_BESIDE = ("_scale_inv", "_scales", "_scale", ".weight_shape")  # suffixes of tensors that belong to a quantized weight
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's files
_PEFT = re.compile(r"\.(\w+)\.(lora_\w+)(\.weight)?$")  # linear, matrix
_LAYER = re.compile(r"^(mtp\.|model\.|model\.language_model\.)layers\.(\d+)\.")
_DRAFTS = "model: draft layers"
_NO_DRAFTS = "draft layers of this family are neither trained nor converted; the new config.json has none"
_EMBEDDING = "embedding.word_embeddings.weight"
_Held = tuple[str, str, str, tuple[int, ...]]  # name, part, dtype, shape
_STATE = {  # megatron's optimizer state, by the prefix of its names
    "optimizer.state.param.": "optimizer: float32 weights",
    "optimizer.state.exp_avg_sq.": "optimizer: second moments",
    "optimizer.state.exp_avg.": "optimizer: first moments",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors of one kind and dtype. A stack of layers or experts, as in megatron's files, counts as one."""

    what: str
    dtype: str
    tensors: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a checkpoint; ``facts`` are (label, value) pairs to show."""

    kind: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]


class _AdapterFields(JsonFields):
    peft_type: str
    base_model_name_or_path: str | None = None
    r: int | None = None
    lora_alpha: float | None = None


def found(folder: Path) -> Path:
    """Returns the checkpoint at ``folder``: the folder, or the newest that Megatron-LM or Megatron-Bridge saved there.

    Raises ConfigError if there is no folder, and like `newest_checkpoint`.
    """
    if not folder.is_dir():
        hub = download_hint(folder)
        raise ConfigError(f"{folder}: no such folder; give a Hugging Face or a megatron torch_dist checkpoint{hub}")
    return newest_checkpoint(folder)


def show(folder: Path) -> None:
    """Prints the contents of a checkpoint of either kind, of one of a run's, or of the newest in a run's folder.

    Raises RLMegatronError; for the name of a model too, which needs ``--layout``.
    """
    if not folder.is_dir() and (near := " (a known model)" if str(folder) in NAMED else closest_name(str(folder))):
        raise ConfigError(
            f"{folder}{near}: no such folder; give a Hugging Face folder, a megatron checkpoint or a run's folder, or "
            f"add --layout megatron,tp=2, which also takes the name of a known model{download_hint(folder)}"
        )
    place, step = _checkpoint(found(folder))
    contents = describe(place)
    console = Console(markup=False)
    console.print(f"{place}: {contents.kind}{step}", soft_wrap=True, highlight=False)
    for what, value in contents.facts:
        console.print(f"  {what}: {value}", soft_wrap=True, highlight=False)
    console.print(_table(contents))


def _checkpoint(folder: Path) -> tuple[Path, str]:
    """Returns the folder of the shards, and a text with their step."""
    from rl_megatron.training.checkpoints import latest  # imports torch

    place = latest(folder / "checkpoints") or folder
    state = place / "trainer.json"
    if not state.is_file():
        return place, ""
    try:
        told = parse(state.read_text())
        warm, step = told.get("warm_start_step"), told["step"]
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise CheckpointError(f"{state}: not readable ({error})") from error
    return place / "learner", f", of step {step}" if warm is None else f", of step {warm} of the warm start"


def _table(contents: Contents) -> Table:
    table = Table("part", "dtype", "tensors", "parameters")
    for column in table.columns[2:]:
        column.justify = "right"
    for part in contents.parts:
        table.add_row(part.what, part.dtype, f"{part.tensors:,}", f"{part.parameters:,}")
    return table


def describe(folder: Path) -> Contents:
    """Reads the contents of a Hugging Face folder, a megatron ``torch_dist`` checkpoint, or peft's adapters.

    Raises CheckpointError if the folder is torn, ConfigError if it has another format.
    """
    if (folder / _ADAPTER).is_file():
        return _adapters(folder)
    megatron, config = is_megatron(folder), _config(folder) or _run_model(folder)
    layers = num if isinstance(num := config.get("num_hidden_layers"), int) else None
    held = list(_megatron(folder, layers) if megatron else _hugging_face(folder, layers))
    facts = {**_model(config), **(_megatron_facts(folder) if megatron else _hugging_face_facts(folder))}
    facts["tokenizer"] = config.get("_tokenizer", facts["tokenizer"])
    drafts = sorted({draft for name, *_ in held if (draft := _draft_of(name, layers)) is not None})
    if drafts:
        facts["draft layers"] = ", ".join(drafts)
    parts = [(what, dtype, shape) for _, what, dtype, shape in held]
    return _describe("megatron torch_dist" if megatron else "Hugging Face", folder, facts, parts)


def _describe(
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
    """Reads the contents of a folder of peft's low-rank adapters (arXiv:2106.09685)."""
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
    return _describe(f"adapters ({told.peft_type}, peft)", folder, facts, held)


def _hugging_face(folder: Path, layers: int | None) -> Iterator[_Held]:
    for name in weight_files(folder)[0]:
        for tensor, entry in read_header(MappedFile(folder / name)).items():
            what = "scales of quantized weights" if tensor.endswith(_BESIDE) else _kind(tensor, layers)
            yield tensor, what, str(entry.dtype), entry.shape


def _megatron(folder: Path, layers: int | None) -> Iterator[_Held]:
    sizes, chunks = read_index(folder)
    dtypes = {chunk.key: str(chunk.dtype) for chunk in chunks}
    for key, size in sizes.items():
        what = next((what for start, what in _STATE.items() if key.startswith(start)), None)
        other = "optimizer: other" if key.startswith("optimizer.") else _kind(key, layers)
        yield key, what or other, dtypes.get(key, "no chunk"), size


def _kind(name: str, layers: int | None) -> str:
    """Names the part of a model that a tensor belongs to, by either kind's names; the decoder has ``layers``."""
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
    """Returns the name of the draft layer (multi-token prediction) that a tensor belongs to, or None."""
    match = _LAYER.match(name)
    if match is None or not (match[1] == "mtp." or (layers is not None and int(match[2]) >= layers)):
        return None
    return match[0].removesuffix(".")


def _config(folder: Path) -> Mapping[str, Any]:
    """Returns the keys of config.json, overridden by those of a text model in it; empty without such a file."""
    path = folder / "config.json"
    raw = (read_json(path, JsonFields, CheckpointError).model_extra or {}) if path.is_file() else {}
    text = raw.get("text_config")
    return {**raw, **text, "model_type": raw.get("model_type")} if isinstance(text, dict) else raw


def _run_model(folder: Path) -> Mapping[str, Any]:
    """Returns sizes by their keys in config.json if ``folder`` has the shards of a run with a known model."""
    file = folder.absolute().parent.parent.parent / "config.yaml"
    if folder.name != "learner" or not file.is_file():
        return {}
    try:
        shape = starting_shape(run := load_config(str(file), []))
    except ConfigError:  # the model's folder is not on this machine
        return {}
    sizes = {"num_hidden_layers": shape.num_layers, "hidden_size": shape.hidden_size, "num_experts": shape.num_experts}
    return {**sizes, "model_type": shape.family, "_tokenizer": f"from {run.model.path or 'the tiny model'}"}


def _model(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns facts from config.json, of any family."""
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


def show_layout(model: str, layout: str, *, rank: int | None = None, family: str | None = None) -> None:
    """Prints the layout, or the parameters of one rank. Raises RLMegatronError."""
    made = parse_layout("layout", layout, model_shape(model, family))
    if rank is not None and rank >= made.dims.world_size:
        raise ConfigError(f"--rank {rank}: the layout {layout} has {made.dims.world_size} ranks, from 0 on")
    shown = _parameters(made, rank) if rank is not None else _ranks(made, f"{model}: {layout}")
    Console(markup=False).print(shown)


def _ranks(layout: Layout, title: str) -> Table:
    """Returns a table with a line per rank: its place, layers, number of parameters and, if there are any, experts."""
    shape, dims = layout.shape, layout.dims
    places, kinds = (("tp", "pp", "ep", "etp"), ("experts",)) if shape.num_experts else (("tp", "pp"), ())
    table = Table("rank", *places, "layers", *kinds, "parameters", "of all", title=title)
    whole = sum(prod(s) for s in Layout(table=layout.table, shape=shape).local_shapes(0).values())
    for rank in range(dims.world_size):
        at, held = coordinates(dims, rank), sum(prod(s) for s in layout.local_shapes(rank).values())
        per = shape.num_experts // dims.ep
        experts = [f"{at.ep * per}–{(at.ep + 1) * per - 1}"] * len(kinds)
        place = (rank, *(getattr(at, name) for name in places))
        table.add_row(*map(str, place), _layers(layout, at.pp), *experts, f"{held:,}", f"{held / whole:.1%}")
    return table


def _parameters(layout: Layout, rank: int) -> Table:
    """Returns a table of every parameter of one rank with its shape."""
    table = Table("parameter", "shape", title=f"rank {rank} of {layout.dims.world_size}")
    for name, shape in layout.local_shapes(rank).items():
        table.add_row(name, " × ".join(map(str, shape)))
    return table


def _layers(layout: Layout, stage: int) -> str:
    """Returns ``0–11``, or several such ranges under VPP."""
    rows = [spec for spec in layout.rows() if "{layer}" in spec.name]  # a single row may lack some layers
    held = sorted({n for spec in rows for n, stages in layout.layer_stages(spec).items() if stage in stages})
    starts = [layer for layer in held if layer - 1 not in held]
    ends = [layer for layer in held if layer + 1 not in held]
    return ", ".join(f"{a}–{b}" if a != b else f"{a}" for a, b in zip(starts, ends, strict=True))


def dropped_tensors(source: Path, config: Path | None = None, family: str | None = None) -> str | None:
    """Returns a line about tensors in ``source`` that are never converted; None if there are none.

    ``config`` is a folder with config.json if ``source`` has none.
    """
    shape = converted_shape(source, config, family)
    lines = _left_of_shards(source, shape) if is_megatron(source) else _left_of_folder(source, shape)
    return "; ".join(lines) or None


def dropped_draft_matrices(source: Path, shape: ModelShape) -> list[str]:
    """Returns a line for each matrix of a draft layer in a Hugging Face folder that is not a copy of the model's."""
    found = own_in_drafts(source, shape)
    return [f"{name} is no copy of {of}, which the draft layer reads in its place" for name, of in found.items()]


def _left_of_shards(source: Path, shape: ModelShape) -> Iterator[str]:
    """Yields lines about tensors that are not converted. This project's padding rows are 0; others are counted."""
    sizes, chunks = read_index(source)
    if any(name.startswith(VALUES) for name in sizes):
        yield f"{VALUES.removesuffix('.')}: a policy's own critic; the new folder has the policy alone"
    vocab, count = shape.vocab_size, 0
    for chunk in chunks:
        if chunk.key == _EMBEDDING and (kept := max(vocab - chunk.offsets[0], 0)) < chunk.sizes[0]:
            file = stored_files(source, [chunk.file])[source / chunk.file]
            count += int(read_tensor(file, chunk)[kept:].any(axis=1).sum())
    if count:
        yield (
            f"{_EMBEDDING}: {count} of its {sizes[_EMBEDDING][0]} rows are not 0 and beyond vocab_size={vocab}; the "
            "new folder lacks them. If they are tokens, not padding, set vocab_size in config.json to keep them"
        )
    if not shape.num_draft_layers and has_draft(sizes):
        yield f"mtp: {_NO_DRAFTS}"


def _left_of_folder(source: Path, shape: ModelShape) -> Iterator[str]:
    beside, drafts = not_the_decoders(source, shape)
    if found := [*beside, *(() if shape.num_draft_layers else drafts)]:
        no_tower = "only the text model is trained and converted; the new folder has no tower"
        yield f"{', '.join(found)}: {no_tower if beside else _NO_DRAFTS}"
    yield from dropped_draft_matrices(source, shape)
    if scales := sorted({name.rpartition(".")[2] for name in tensor_names(source) if is_cache_scale(name)}):
        yield f"{', '.join(scales)}: scales of a quantized KV cache; the new folder has none"
