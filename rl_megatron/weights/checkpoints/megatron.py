"""The tensors of a ``torch_dist`` checkpoint, whatever layout wrote it, and its files as they are written. No torch.

megatron-core 0.16 writes one model in three ways, by ``metadata`` of ``sharded_state_dict`` and the model's kind:

- layers and experts stacked: ``decoder.layers.mlp.experts.experts.linear_fc1.weight`` [layer, expert, ...];
- each layer by its own (``non_homogeneous_layers``, or layers that differ): ``decoder.layers.3.mlp.…``;
- experts as well, and gate and up of SwiGLU apart (``singleton_local_shards``):
  ``decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w`` and ``…_v``.

Megatron-LM and Megatron-Bridge save their models by it, under these names, several in one folder. This module also
finds which of the two kinds a folder is, and which of these checkpoints is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import IO

from rl_megatron.errors import CheckpointError, ConfigError, WeightError, quote_start
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.boxes import Box, Shape, intersect, shift, volume, whole_box
from rl_megatron.weights.bytes.dtypes import Bits, DType
from rl_megatron.weights.checkpoints.streaming import Copy, Files, Fragment, OnBytes, Sink, StreamedTensor, numbers
from rl_megatron.weights.checkpoints.torch_dist import (
    Chunk,
    read_index,
    read_tensor,
    write_index,
    write_tensor,
)
from rl_megatron.weights.formats.hf_folder import raise_lines, raise_uncounted
from rl_megatron.weights.layouts.families import adapter_folder_hint, find_family, hf_layout, megatron_layout
from rl_megatron.weights.layouts.layout import Layout, shape_as_stored
from rl_megatron.weights.plans.plan import plan

_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM, Megatron-Bridge and slime write it next to checkpoints
_STEP = re.compile(r"\d{1,12}")
_BACKEND = re.compile(r'"sharded_backend": *"(\w+)"')
_HUB_NAME = re.compile(r"^ *hf_model_id: *['\"]?([\w./-]+)", re.MULTILINE)
_SMALL = 1 << 20  # bytes that are read of a small file


def total_bytes(folder: Path) -> int:
    """Bytes of weights in a checkpoint of either kind."""
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.distcp") for path in folder.glob(pattern))


def is_megatron(folder: Path) -> bool:
    """True if the folder is a ``torch_dist`` checkpoint, False if a Hugging Face one. Raises ConfigError if it is of
    neither kind, and CheckpointError if it has shards but no ``.metadata``."""
    if (folder / ".metadata").is_file():
        return True
    if any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder}: it has shards (*.distcp) and no .metadata; copy that file too, which a copy of DIR/* leaves out"
        )
    if (folder / "config.json").is_file():
        return False
    if adapters := adapter_folder_hint(folder):
        raise ConfigError(f"{folder}: {adapters}")
    shards = folder / "learner"  # the weights in a run's checkpoint
    instead = f"; give {shards}" if (shards / ".metadata").is_file() else ""
    raise ConfigError(
        f"{folder}: it has neither .metadata (megatron torch_dist) nor config.json (Hugging Face){instead}"
    )


def newest_checkpoint(folder: Path) -> Path:
    """The folder itself, or the newest checkpoint in a folder where Megatron-LM or Megatron-Bridge saved its own.

    Raises CheckpointError or ConfigError if that is not there, not one, or in a format that is not read.
    """
    chosen = folder if (folder / ".metadata").is_file() else _tracked(folder)
    saved = _head(chosen / "metadata.json")
    backend = _BACKEND.search(saved)
    if backend and backend[1] != "torch_dist":
        raise ConfigError(f"{chosen} is of the format {backend[1]}; save it with --ckpt-format torch_dist")
    if not (chosen / ".metadata").is_file() and any(chosen.glob("mp_rank_*")):
        raise ConfigError(
            f"{chosen} is of the format torch, a file a rank; Megatron-LM writes it again with "
            "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        )
    return chosen


def _tracked(folder: Path) -> Path:
    """Returns the checkpoint that the tracker names, or the only one; the folder itself if it has none."""
    there = sorted(path.name for path in (*folder.glob("iter_*"), *folder.glob("release")) if path.is_dir())
    if not (folder / _TRACKER).is_file():
        if (folder / "config.json").is_file():
            return folder
        if len(there) > 1:
            raise ConfigError(
                f"{folder} has {len(there)} checkpoints and no {_TRACKER}; give one of {', '.join(there)}"
            )
        return folder / there[0] if there else folder
    step = _head(folder / _TRACKER).strip()
    if step != "release" and not _STEP.fullmatch(step):
        raise CheckpointError(
            f"{folder / _TRACKER} says {quote_start(step)}, neither a step nor release; give a checkpoint"
        )
    name = step if step == "release" else f"iter_{int(step):07d}"
    if name not in there:
        raise CheckpointError(f"{folder / _TRACKER} names {name}, which is not there; there are: {', '.join(there)}")
    return folder / name


def _head(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_SMALL)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def must_have_config(folder: Path) -> None:
    """Raises ConfigError if a ``torch_dist`` checkpoint has no config.json, with what run_config.yaml says of it."""
    if (folder / "config.json").is_file():
        return
    hub = _HUB_NAME.search(_head(folder / "run_config.yaml"))
    of = f" of {hub[1]}, as its run_config.yaml says" if hub else ", with the model's config.json and tokenizer"
    raise ConfigError(f"{folder} has no config.json; give --config with the Hugging Face folder{of}")


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_DRAFTED = re.compile(r"^mtp\.layers\.(\d+)\.(transformer_layer\.)?(.*)$")
_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_HALVES = ("_w", "_v")  # the halves of SwiGLU's first matrix: gate, up
_DRAFT = "mtp."
VALUES = "value_layer."
"""Begins the names of a policy's value layer, where it is its own critic."""
VALUE_BIAS = "output_layer.bias"
"""The bias of a critic's output layer; a reward model's has none."""
BESIDE = "beside_"
"""Begins the names of tensors that a run keeps in addition to the model's, for example a moving reference's."""
_STATE = re.compile(rf"(chained_\d+\.)?optimizer\.|{BESIDE}|.*\._extra_state\b")
_FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor that holds a parameter, or its rows from ``first_row`` on."""

    key: str
    leading_index: Shape  # index in the tensor's leading dims, which number layers and experts
    first_row: int = 0
    rows: int | None = None  # None: all


def stacked_place(param: str, shape: ModelShape) -> tuple[str, Shape]:
    """The stacked tensor and leading indices as which we write a parameter with a global name (weights/layouts/tables).

    Layers are stacked if all have the same parts, experts always. Draft layers are not, and are numbered from 0.
    """
    return next(_spellings(param, shape, stacked=shape.uniform))


def _spellings(param: str, shape: ModelShape, *, stacked: bool) -> Iterator[tuple[str, Shape]]:
    """Every tensor and index by which the parameter may be found; first with layers ``stacked``, or not."""
    if found := _DRAFTED.match(param):
        prefixes: list[tuple[str, Shape]] = [(f"mtp.layers.{int(found[1]) - shape.num_layers}.{found[2] or ''}", ())]
        rest = found[3]
    elif found := _LAYER.match(param):
        both: list[tuple[str, Shape]] = [("decoder.layers.", (int(found[1]),)), (f"decoder.layers.{found[1]}.", ())]
        prefixes, rest = both if stacked else both[::-1], found[2]
    else:
        yield param, ()
        return
    expert = _EXPERT.match(rest)
    for prefix, index in prefixes:
        if expert:
            yield f"{prefix}mlp.experts.experts.{expert[1]}.weight", (*index, int(expert[2]))
        else:
            yield prefix + rest, index
    if expert:
        alone = next(prefix for prefix, index in prefixes if not index)
        yield f"{alone}mlp.experts.experts.{expert[2]}.{expert[1]}.weight", ()


def find_tensors(
    source: Path, layout: Layout, sizes: Mapping[str, Shape], dtypes: Mapping[str, DType]
) -> dict[str, tuple[StoredTensor, ...]]:
    """The homes of every parameter of ``layout``'s only rank, among tensors of these global ``sizes`` and ``dtypes``.

    Raises WeightError that names each parameter that is missing, and each tensor that is misshapen, of no float dtype
    or unknown, and for a critic. Optimizer state is left out, and so are draft layers of a model without them, and a
    value layer.
    """
    if sizes.get("output_layer.bias") == (1,):
        raise WeightError(
            f"{source} is a critic's: one value of a token, with a bias, which no class of transformers has; give the "
            f"policy's, {source.parent / 'learner'} in a checkpoint of a run"
        )
    params = layout.local_shapes(0)
    homes = {param: _homes(param, layout.shape, shape, sizes) for param, shape in params.items()}
    missing = sorted({stacked_place(param, layout.shape)[0] for param, found in homes.items() if not found})
    if missing:
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        odd = (
            ""
            if (source / "metadata.json").is_file()
            else ("; it has no metadata.json: only ckpt_format torch_dist is read, not fsdp_dtensor or torch_dcp")
        )
        raise WeightError(
            f"{source} lacks {', '.join(missing[:20])}{more}; its config.json describes another model{odd}"
        )
    wanted = _wanted(homes, params)
    padded = {spec.name for spec in layout.rows() if spec.padded}
    used = {home.key for found in homes.values() for home in found}
    raise_lines(
        f"{source} does not fit the model of its config.json",
        [
            *_misshapen(wanted, sizes, padded, layout.shape.vocab_size),
            *(
                f"{key} is {dtypes[key]}; weights are one of {', '.join(_FLOATS)}"
                for key in sorted(used)
                if dtypes.get(key, DType.F32) not in _FLOATS
            ),
            *(
                f"{key} {sizes[key]} is unknown; the model has no such tensor"
                for key in _unknown(sizes, used, drafts=layout.shape.num_draft_layers)
            ),
        ],
    )
    return homes


def _homes(param: str, model: ModelShape, shape: Shape, sizes: Mapping[str, Shape]) -> tuple[StoredTensor, ...]:
    for key, index in _spellings(param, model, stacked=True):
        if key in sizes:
            return (StoredTensor(key=key, leading_index=index),)
        if all(key + half in sizes for half in _HALVES):
            rows = shape[0] // 2
            return tuple(
                StoredTensor(key=key + half, leading_index=index, first_row=i * rows, rows=rows)
                for i, half in enumerate(_HALVES)
            )
    return ()


def _wanted(homes: Mapping[str, tuple[StoredTensor, ...]], params: Mapping[str, Shape]) -> dict[str, Shape]:
    """The size that each tensor must have: of its stack, then of a parameter in it."""
    out: dict[str, Shape] = {}
    for param, found in homes.items():
        for home in found:
            rows, *others = params[param] or (0,)
            stack = tuple(i + 1 for i in home.leading_index)
            own = (*stack, *((home.rows or rows, *others) if params[param] else ()))
            out[home.key] = tuple(map(max, out.get(home.key, own), own))
    return out


def _misshapen(wanted: Mapping[str, Shape], sizes: Mapping[str, Shape], padded: Set[str], vocab: int) -> Iterator[str]:
    """A line for each tensor of another size. A padded one may have any number of rows above the vocabulary's."""
    for key, want in wanted.items():
        have = sizes[key]
        if key in padded and have[1:] == want[1:] and have[:1] >= (vocab,):
            continue
        if have != want:
            yield f"{key} has shape {have}; it should have {want}"


def _unknown(sizes: Mapping[str, Shape], used: Set[str], *, drafts: bool) -> list[str]:
    left = (key for key in sizes if key not in used and not _STATE.match(key) and not key.startswith(VALUES))
    return sorted(key for key in left if drafts or not key.startswith(_DRAFT))


def has_draft(sizes: Mapping[str, Shape]) -> bool:
    """True if the checkpoint has draft layers, for multi-token prediction."""
    return any(key.startswith(_DRAFT) for key in sizes)


def stored_shape(source: Path, shape: ModelShape) -> ModelShape:
    """``shape`` with experts of one tensor a layer or one by one, as the checkpoint has them. Raises CheckpointError if
    it is torn."""
    if find_family(shape).stacked is None:
        return shape
    return shape_as_stored(replace(shape, stacked_experts=False, stacked_drafts=False), read_index(source)[0])


def stored_files(folder: Path, names: Sequence[str]) -> Files:
    """A checkpoint's files by their names. Raises CheckpointError if some are not there."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: files that should be there are not: {', '.join(missing)}")
    return Files([folder / name for name in names])


def raise_other_model(source: Path, shape: ModelShape, *, of_critic: bool) -> None:
    """Raises like `megatron_copies` for tensors that a model of ``shape`` lacks, needs or has in another size.
    megatron itself loads too few rows of a vocabulary, and leaves the others at 0. ``of_critic``: a model that scores
    has the bias of a critic's values, too."""
    _homes_in(source, megatron_layout(stored_shape(source, shape)), {VALUE_BIAS} if of_critic else ())


def megatron_copies(source: Path, shape: ModelShape) -> tuple[list[Copy], Files]:
    """Every Hugging Face tensor in its stored dtype, assembled from the chunks that hold pieces of it.

    Raises CheckpointError or WeightError naming what is missing, truncated or of another model.
    """
    return copies_between(source, hf_layout(shape), megatron_layout(shape))


def copies_between(source: Path, hf: Layout, megatron: Layout) -> tuple[list[Copy], Files]:
    """The tensors of ``hf`` from a checkpoint of those of ``megatron``, as `megatron_copies`: each of one rank, which
    has the rows in the order of any file. Raises WeightError also where parts of one tensor have several dtypes."""
    homes, chunks = _homes_in(source, megatron)
    depths = {home.key: len(home.leading_index) for found in homes.values() for home in found}
    held = [chunk for chunk in chunks if chunk.key in depths]
    files = stored_files(source, sorted({chunk.file for chunk in held}))
    at: dict[tuple[str, Shape], list[Chunk]] = {}
    for chunk in held:
        for index in _indices(chunk, depths[chunk.key]):
            at.setdefault((chunk.key, index), []).append(chunk)
    fragments: dict[str, list[Fragment]] = {}
    kinds: dict[str, set[DType]] = {}
    for piece in plan(hf, megatron).receives(0):
        for home in homes[piece.dst_param]:
            for chunk in at.get((home.key, home.leading_index), []):
                cut = intersect(piece.dst_box, _box(chunk, home))
                if cut is not None:
                    view = partial(read_tensor, files[source / chunk.file], chunk)
                    fragment = _fragment(cut, chunk, home, piece.dst_box, piece.src_box, view)
                    fragments.setdefault(piece.src_param, []).append(fragment)
                    kinds.setdefault(piece.src_param, set()).add(chunk.dtype)
    wanted = hf.local_shapes(0)
    short = [
        f"{name}: {sum(volume(p.box) for p in fragments.get(name, ()))} of {prod(size)} elements"
        for name, size in wanted.items()
        if sum(volume(p.box) for p in fragments.get(name, ())) != prod(size)
    ]
    if short:
        raise WeightError("\n  ".join([f"{source} does not hold these whole:", *short[:20]]))
    mixed = [f"{name}: {' and '.join(sorted(found))}" for name, found in kinds.items() if len(found) > 1]
    raise_lines(f"{source}: parts of these have several dtypes; save them again in one", mixed)
    tensors = [
        Copy(name=name, shape=size, dtype=min(kinds[name]), fragments=tuple(fragments[name]))
        for name, size in wanted.items()
    ]
    return tensors, files


def _homes_in(
    source: Path, megatron: Layout, skipped: Collection[str] = ()
) -> tuple[dict[str, tuple[StoredTensor, ...]], list[Chunk]]:
    """``skipped``: tensors that are no part of the model."""
    sizes, chunks = read_index(source)
    sizes = {name: size for name, size in sizes.items() if name not in skipped}
    raise_uncounted(source, sum(prod(size) for size in sizes.values()), megatron)
    return find_tensors(source, megatron, sizes, {chunk.key: chunk.dtype for chunk in chunks}), chunks


def _indices(chunk: Chunk, depth: int) -> Iterator[Shape]:
    return product(*(range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)))


def _fragment(cut: Box, chunk: Chunk, home: StoredTensor, box: Box, hf_box: Box, view: Callable[[], Bits]) -> Fragment:
    depth = len(home.leading_index)
    inside = shift(cut, _box(chunk, home), whole_box(chunk.sizes[depth:]))
    lead = tuple(i - o for i, o in zip(home.leading_index, chunk.offsets[:depth], strict=True))
    return Fragment(box=shift(cut, box, hf_box), source=lambda: view()[lead], src_box=inside)


def _box(chunk: Chunk, home: StoredTensor) -> Box:
    """The chunk's box in the parameter; the tensor's leading dims number parameters."""
    depth = len(home.leading_index)
    box = tuple((o, o + s) for o, s in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True))
    return tuple((low + home.first_row, high + home.first_row) for low, high in box[:1]) + box[1:]


def write_chunks(
    file: IO[bytes], tensors: Sequence[StreamedTensor], on_bytes: OnBytes, *, shape: ModelShape
) -> list[dict[str, object]]:
    """Writes one file, and returns notes of where each tensor lies in it."""
    notes: list[dict[str, object]] = []
    for tensor in tensors:
        start = file.tell()
        _, index = stacked_place(tensor.name, shape)
        size = (*(1 for _ in index), *tensor.shape)
        notes.append({"start": start, "length": write_tensor(file, tensor.dtype, size, numbers(tensor, on_bytes))})
    return notes


def index_files(
    folder: Path, sinks: Sequence[Sink], notes: Mapping[str, list[dict[str, object]]], shape: ModelShape
) -> None:
    """Writes the index of the files of ``sinks``, from the notes of `write_chunks`."""
    chunks = [
        _noted_chunk(sink.name, tensor, stacked_place(tensor.name, shape), note)
        for sink in sinks
        for tensor, note in zip(sink.tensors, notes[sink.name], strict=True)
    ]
    write_index(folder, chunks, _global_sizes(chunks))


def _noted_chunk(file: str, tensor: StreamedTensor, place: tuple[str, Shape], note: Mapping[str, object]) -> Chunk:
    key, index = place
    return Chunk(
        key=key,
        offsets=(*index, *(0 for _ in tensor.shape)),
        sizes=(*(1 for _ in index), *tensor.shape),
        dtype=tensor.dtype,
        file=file,
        start=int(str(note["start"])),
        length=int(str(note["length"])),
    )


def _global_sizes(chunks: Sequence[Chunk]) -> dict[str, Shape]:
    out: dict[str, Shape] = {}
    for c in chunks:
        end = tuple(o + s for o, s in zip(c.offsets, c.sizes, strict=True))
        out[c.key] = tuple(map(max, out.get(c.key, end), end))
    return out
