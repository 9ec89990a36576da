"""Hugging Face folders to megatron ``torch_dist`` checkpoints and back: a gather of byte ranges, file by file.

No model, process group or GPU, and no torch, whose import takes as long as a copy of gigabytes, unless numbers change
on the way. Input is memory-mapped, output leaves in blocks of a MiB, so memory does not grow with the model. Files are
written under a temporary name, synced and renamed; a conversion that was killed goes on with the files that are
missing, and the result gets its own name only when it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from rl_megatron.durable import write_atomically
from rl_megatron.errors import CheckpointError, ConfigError, WeightError
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.boxes import Box, Shape
from rl_megatron.weights.bytes.dtypes import Bits, DType
from rl_megatron.weights.bytes.mapped import Entry, MappedFile, header_bytes, read_header
from rl_megatron.weights.checkpoints.streaming import (
    Copy,
    Files,
    Fragment,
    OnBytes,
    Sink,
    Sliceable,
    Streamed,
    in_files,
    numbers,
    write_files,
)
from rl_megatron.weights.checkpoints.torch_dist import (
    Chunk,
    place_of,
    read_index,
    read_tensor,
    write_index,
    write_tensor,
)
from rl_megatron.weights.formats.block_scales import Blocks, blocks_of, quantization_config, scales_of
from rl_megatron.weights.formats.hf_folder import (
    INDEX,
    companions,
    config_text,
    file_names,
    index_text,
    is_draft,
    raise_lines,
    raise_misfits,
    raise_misplaced,
    raise_uncounted,
    weight_files,
)
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.plan import plan


def hf_to_megatron(
    source: Path,
    out: Path,
    *,
    family: str | None = None,
    dtype: DType | None = None,
    shard_bytes: int = 1 << 30,
    on_bytes: OnBytes = lambda n: None,
) -> None:
    """Write the Hugging Face folder as a ``torch_dist`` checkpoint that loads at any TP, PP, EP and ETP.

    config.json, tokenizer and chat template go along, so that the way back needs nothing else. Raises CheckpointError,
    WeightError or ConfigError naming what is missing, torn, unknown, misshapen or no number; ``out`` is whole or not
    there.
    Block-scaled float8 is dequantised: to ``dtype``, or to that of config.json. ``family`` is one of the user's own,
    as `read_shape` takes it.
    """
    if dtype is DType.F8_E4M3:
        raise ConfigError("dtype=float8_e4m3fn: a megatron checkpoint holds no block scales; give it for Hugging Face")
    shape = read_shape(source, family)
    stored, files = _hf_folder(source, shape, dtype)
    home = {tensor.name: tensor for tensor in stored}
    hf, megatron = _layouts(shape)
    fragments: dict[str, list[Fragment]] = {}
    dtypes: dict[str, DType] = {}
    for piece in plan(hf, megatron).receives(0):
        (whole,) = home[piece.src_param].fragments
        fragment = Fragment(box=piece.dst_box, source=whole.source, src_box=piece.src_box)
        fragments.setdefault(piece.dst_param, []).append(fragment)
        dtypes[piece.dst_param] = home[piece.src_param].dtype
    tensors = [
        Copy(name=name, shape=size, dtype=dtypes[name], fragments=tuple(fragments[name]))
        for name, size in megatron.local_shapes(0).items()
    ]
    sinks = [
        Sink(name=f"__{i}_0.distcp", tensors=tuple(group), write=partial(_write_chunks, stacked=shape.uniform))
        for i, group in enumerate(in_files(tensors, shard_bytes))
    ]

    def finish(folder: Path, notes: Mapping[str, list[dict[str, object]]]) -> None:
        chunks = [
            _noted_chunk(sink.name, tensor, place_of(tensor.name, stacked=shape.uniform), note)
            for sink in sinks
            for tensor, note in zip(sink.tensors, notes[sink.name], strict=True)
        ]
        write_index(folder, chunks, _global_sizes(chunks))
        _copy_companions(source, folder, {dtype} if dtype else set())

    write_files(source, out, sinks, files, on_bytes, finish, options={"dtype": str(dtype), "shard_bytes": shard_bytes})


def megatron_to_hf(
    source: Path,
    out: Path,
    *,
    config: Path | None = None,
    family: str | None = None,
    dtype: DType | None = None,
    shard_bytes: int = 2 * 10**9,
    on_bytes: OnBytes = lambda n: None,
) -> None:
    """Write a ``torch_dist`` checkpoint, saved in whatever layout, as a Hugging Face folder.

    ``config`` is a folder with config.json and tokenizer where the checkpoint holds none. With float8_e4m3fn linear
    layers become block-scaled float8, the others stay as they are stored. Raises as `hf_to_megatron`.
    """
    companion = config or source
    shape = read_shape(companion, family)
    quantise = dtype is DType.F8_E4M3
    plain, files = _megatron_folder(source, shape, None if quantise else dtype)
    tensors = _quantised(plain) if quantise else list(plain)
    groups = in_files(tensors, shard_bytes)
    names = file_names(len(groups))
    sinks = [
        Sink(name=name, tensors=tuple(group), write=_write_safetensors)
        for name, group in zip(names, groups, strict=True)
    ]

    def finish(folder: Path, _: Mapping[str, list[dict[str, object]]]) -> None:
        if len(sinks) > 1:
            weight_map = {tensor.name: sink.name for sink in sinks for tensor in sink.tensors}
            write_atomically(
                folder / INDEX, index_text(weight_map, sum(tensor.num_bytes for tensor in tensors)).encode()
            )
        quantization = quantization_config([(tensor.name, tensor.shape) for tensor in tensors]) if quantise else None
        _copy_companions(companion, folder, {plain[0].dtype}, quantization)

    write_files(source, out, sinks, files, on_bytes, finish, options={"dtype": str(dtype), "shard_bytes": shard_bytes})


def left_out(source: Path, config: Path | None = None, family: str | None = None) -> str | None:
    """What of the model in ``source`` is never converted, as a line to show; None where it has no such tensors.

    ``config`` is a folder with config.json where ``source`` has none. A megatron checkpoint of ours never has any.
    """
    if is_megatron(source):
        return None
    shape = read_shape(config or source, family)
    if not shape.draft_layers:
        return None
    files, placed = weight_files(source)
    names = placed or read_header(MappedFile(source / files[0]))
    held = sorted({name.split(".")[2] for name in names if is_draft(name, shape)}, key=int)
    if not held:
        return None
    layers = ", ".join(f"model.layers.{layer}" for layer in held)
    return f"{layers}: multi-token prediction is not trained and not converted; the new config.json has none"


def hf_tensors(folder: Path, config: Path | None = None, family: str | None = None) -> tuple[list[Copy], Files]:
    """The Hugging Face tensors that a checkpoint of either kind holds, ready to be read block by block.

    ``config`` is a folder with config.json where ``folder`` has none. Raises as `hf_to_megatron`.
    """
    shape = read_shape(config or folder, family)
    return _megatron_folder(folder, shape, None) if is_megatron(folder) else _hf_folder(folder, shape, None)


def _layouts(shape: ModelShape) -> tuple[Layout, Layout]:
    """Hugging Face's names, and megatron's on one rank: the order of rows in its checkpoints, whatever wrote them."""
    return hf_layout(shape), megatron_layout(shape)


def _keeping_dtype(layout: Layout) -> set[str]:
    """Names of what is not cast with the weights."""
    return set(replace(layout, table=[row for row in layout.table if row.keeps_dtype]).local_shapes(0))


def _hf_folder(source: Path, shape: ModelShape, dtype: DType | None) -> tuple[list[Copy], Files]:
    """Every tensor of a folder, its block scales applied, in ``dtype`` or as it is stored."""
    names, placed = weight_files(source)
    files = Files([source / name for name in names])
    entries = {tensor: (name, entry) for name in names for tensor, entry in read_header(files[source / name]).items()}
    raise_misplaced(source, placed, {tensor: name for tensor, (name, _) in entries.items()})
    entries = {tensor: entry for tensor, entry in entries.items() if not is_draft(tensor, shape)}
    blocks = blocks_of(source)
    scales, wrong = scales_of({name: (entry.dtype, entry.shape) for name, (_, entry) in entries.items()}, blocks)
    raise_lines(f"{source} is not quantised as its config.json says", wrong)
    beside = set(scales.values())
    weights = {name: entry for name, (_, entry) in entries.items() if name not in beside}
    raise_uncounted(source, len(weights), hf_layout(shape))
    raise_misfits(str(source), {name: entry.shape for name, entry in weights.items()}, hf_layout(shape).local_shapes(0))
    homes = {tensor: (entry, files[source / name]) for tensor, (name, entry) in entries.items()}
    tensors, exact = [], _keeping_dtype(hf_layout(shape))
    for name in weights:
        if blocks is not None and name in scales:
            tensors.append(_scaled(name, homes[name], homes[scales[name]], blocks, dtype or blocks.dtype))
        else:
            entry, file = homes[name]
            tensor = _stored(name, entry.shape, entry.dtype, partial(entry.view, file))
            tensors.append(tensor if name in exact else _in(dtype, tensor))
    return tensors, files


def _stored(name: str, shape: Shape, dtype: DType, source: Callable[[], Sliceable]) -> Copy:
    box = tuple((0, size) for size in shape)
    return Copy(name=name, shape=shape, dtype=dtype, fragments=(Fragment(box=box, source=source, src_box=box),))


def _in(dtype: DType | None, tensor: Copy) -> Copy:
    if dtype is None or dtype is tensor.dtype:
        return tensor
    from rl_megatron.weights.checkpoints.casting import cast

    return cast(tensor, dtype)


def _scaled(
    name: str, weight: tuple[Entry, MappedFile], scales: tuple[Entry, MappedFile], blocks: Blocks, dtype: DType
) -> Copy:
    from rl_megatron.weights.checkpoints.casting import Scaled

    def source() -> Scaled:
        (numbers, file), (factors, other) = weight, scales
        return Scaled(
            weight=numbers.view(file),
            scales=factors.view(other),
            scale_dtype=factors.dtype,
            edges=blocks.edges,
            wanted=dtype,
        )

    return _stored(name, weight[0].shape, dtype, source)


def _quantised(tensors: Sequence[Copy]) -> list[Streamed]:
    from rl_megatron.weights.checkpoints.casting import quantised

    return [one for tensor in tensors for one in quantised(tensor)]


def _opened(folder: Path, names: Sequence[str]) -> Files:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: files that should be there are not: {', '.join(missing)}")
    return Files([folder / name for name in names])


def _megatron_folder(source: Path, shape: ModelShape, dtype: DType | None) -> tuple[list[Copy], Files]:
    """Every Hugging Face tensor out of the chunks that hold a piece of it, whatever layout wrote them."""
    sizes, chunks = read_index(source)
    files = _opened(source, sorted({c.file for c in chunks}))
    by_key: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_key.setdefault(chunk.key, []).append(chunk)
    hf, megatron = _layouts(shape)
    raise_uncounted(source, sum(prod(size) for size in sizes.values()), megatron)
    places = {param: place_of(param, stacked=shape.uniform) for param in megatron.local_shapes(0)}
    missing = sorted({key for key, _ in places.values()} - by_key.keys())
    if missing:
        raise WeightError(f"{source} lacks {', '.join(missing[:20])}; its config.json tells of another model")
    at: dict[tuple[str, Shape], list[Chunk]] = {}
    for key, held in by_key.items():
        depth = max((len(index) for k, index in places.values() if k == key), default=0)
        for chunk in held:
            for index in _indices(chunk, depth):
                at.setdefault((key, index), []).append(chunk)
    fragments: dict[str, list[Fragment]] = {}
    kinds: dict[str, DType] = {}
    for piece in plan(hf, megatron).receives(0):
        key, index = places[piece.dst_param]
        for chunk in at.get((key, index), []):
            cut = _intersection(chunk, index, piece.dst_box)
            if cut is not None:
                view = partial(read_tensor, files[source / chunk.file], chunk)
                fragment = _fragment(cut, chunk, index, piece.dst_box, piece.src_box, view)
                fragments.setdefault(piece.src_param, []).append(fragment)
                kinds[piece.src_param] = chunk.dtype
    wanted = hf.local_shapes(0)
    short = [
        f"{name}: {sum(_volume(p.box) for p in fragments.get(name, ()))} of {prod(size)} elements"
        for name, size in wanted.items()
        if sum(_volume(p.box) for p in fragments.get(name, ())) != prod(size)
    ]
    if short:
        raise WeightError("\n  ".join([f"{source} does not hold these whole:", *short[:20]]))
    tensors = [
        Copy(name=name, shape=size, dtype=kinds[name], fragments=tuple(fragments[name]))
        for name, size in wanted.items()
    ]
    exact = _keeping_dtype(hf)
    return [tensor if tensor.name in exact else _in(dtype, tensor) for tensor in tensors], files


def _indices(chunk: Chunk, depth: int) -> Iterator[Shape]:
    spans = [range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)]
    out: list[Shape] = [()]
    for span in spans:
        out = [(*index, i) for index in out for i in span]
    yield from out


def _intersection(chunk: Chunk, index: Shape, box: Box) -> Box | None:
    """Where a chunk and a box of the parameter ``index`` meet, in the parameter's coordinates."""
    spans = list(zip(chunk.offsets, chunk.sizes, strict=True))[len(index) :]
    cut = tuple((max(low, o), min(high, o + s)) for (low, high), (o, s) in zip(box, spans, strict=True))
    return cut if all(low < high for low, high in cut) else None


def _fragment(cut: Box, chunk: Chunk, index: Shape, box: Box, hf_box: Box, view: Callable[[], Bits]) -> Fragment:
    depth = len(index)
    inside = tuple((low - o, high - o) for (low, high), o in zip(cut, chunk.offsets[depth:], strict=True))
    there = tuple((low - b[0] + h[0], high - b[0] + h[0]) for (low, high), b, h in zip(cut, box, hf_box, strict=True))
    lead = tuple(i - o for i, o in zip(index, chunk.offsets[:depth], strict=True))
    return Fragment(box=there, source=lambda: view()[lead], src_box=inside)


def _volume(box: Box) -> int:
    return prod(high - low for low, high in box)


def _write_chunks(
    file: IO[bytes], tensors: Sequence[Streamed], on_bytes: OnBytes, *, stacked: bool
) -> list[dict[str, object]]:
    notes: list[dict[str, object]] = []
    for tensor in tensors:
        start = file.tell()
        _, index = place_of(tensor.name, stacked=stacked)
        shape = (*(1 for _ in index), *tensor.shape)
        notes.append({"start": start, "length": write_tensor(file, tensor.dtype, shape, numbers(tensor, on_bytes))})
    return notes


def _write_safetensors(file: IO[bytes], tensors: Sequence[Streamed], on_bytes: OnBytes) -> list[dict[str, object]]:
    file.write(header_bytes([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]))
    for tensor in tensors:
        for block in numbers(tensor, on_bytes):
            file.write(block.reshape(-1).view(np.uint8).data)
    return []


def _noted_chunk(file: str, tensor: Streamed, place: tuple[str, Shape], note: Mapping[str, object]) -> Chunk:
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


def _copy_companions(
    source: Path, folder: Path, dtypes: set[DType], quantization: dict[str, Any] | None = None
) -> None:
    for path in companions(source):
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(config_text(source, {str(dtype) for dtype in dtypes}, quantization))


def total_bytes(folder: Path) -> int:
    """Bytes of weights in a checkpoint of either kind, for a progress display."""
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.distcp") for path in folder.glob(pattern))


def is_megatron(folder: Path) -> bool:
    """Whether the folder is a ``torch_dist`` checkpoint. Raises ConfigError where it is none of the two kinds."""
    if (folder / ".metadata").is_file():
        return True
    if (folder / "config.json").is_file():
        return False
    raise ConfigError(f"{folder}: neither .metadata (megatron torch_dist) nor config.json (Hugging Face) there")
