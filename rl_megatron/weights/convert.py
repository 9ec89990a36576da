"""Hugging Face folders to megatron ``torch_dist`` checkpoints and back: a gather of byte ranges, file by file.

No model, process group or GPU. Input is memory-mapped, output leaves in blocks of a few MiB, so memory does not grow
with the model. Files are written under a temporary name, synced and renamed; a conversion that was killed goes on with
the files that are missing, and the result gets its own name only when it is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rl_megatron.durable import write_atomically
from rl_megatron.errors import CheckpointError, ConfigError, WeightError
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.families import FAMILIES, hf_layout, megatron_layout
from rl_megatron.weights.layout import Box, Layout, Shape
from rl_megatron.weights.mapped import header_bytes, read_header
from rl_megatron.weights.plan import plan
from rl_megatron.weights.quantize import FP8, Scaled, blocks_of, quantised, quantization_config, scales_of
from rl_megatron.weights.safetensors_io import companions, config_text, raise_lines, raise_misfits
from rl_megatron.weights.streaming import Boxes, Files, Job, Part, Progress, Sink, Streamed, in_files, run
from rl_megatron.weights.torch_dist import Chunk, place_of, read_index, read_tensor, write_index, write_tensor


def hf_to_megatron(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 1 << 30,
    progress: Progress = lambda n: None,
) -> None:
    """Write the Hugging Face folder as a ``torch_dist`` checkpoint that loads at any TP, PP, EP and ETP.

    config.json, tokenizer and chat template go along, so that the way back needs nothing else. Raises CheckpointError,
    WeightError or ConfigError naming what is missing, torn, unknown or misshapen; ``out`` is whole or not there.
    Block-scaled float8 is dequantised: to ``dtype``, or to that of config.json.
    """
    if dtype == FP8:
        raise ConfigError("dtype=float8_e4m3fn: a megatron checkpoint holds no block scales; give it for Hugging Face")
    shape = ModelShape.from_folder(source, families=FAMILIES)
    stored, files = _hf_folder(source, shape)
    home = {job.name: job for job in stored}
    hf, megatron = _layouts(shape)
    parts: dict[str, list[Part]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for piece in plan(hf, megatron).receives(0):
        (whole,) = home[piece.src_param].parts
        part = Part(box=piece.dst_box, source=whole.source, src_box=piece.src_box)
        parts.setdefault(piece.dst_param, []).append(part)
        dtypes[piece.dst_param] = dtype or home[piece.src_param].dtype
    jobs = [
        Job(name=name, shape=size, dtype=dtypes[name], parts=tuple(parts[name]))
        for name, size in megatron.local_shapes(0).items()
    ]
    sinks = [
        Sink(name=f"__{i}_0.distcp", jobs=tuple(group), write=_write_chunks)
        for i, group in enumerate(in_files(jobs, shard_bytes))
    ]

    def finish(folder: Path, notes: Mapping[str, list[dict[str, object]]]) -> None:
        chunks = [
            _noted_chunk(sink.name, job, note)
            for sink in sinks
            for job, note in zip(sink.jobs, notes[sink.name], strict=True)
        ]
        write_index(folder, chunks, _global_sizes(chunks))
        _copy_companions(source, folder, {dtype} if dtype is not None else set())

    run(source, out, sinks, files, progress, finish, options={"dtype": str(dtype), "shard_bytes": shard_bytes})


def megatron_to_hf(
    source: Path,
    out: Path,
    *,
    config: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2 * 10**9,
    progress: Progress = lambda n: None,
) -> None:
    """Write a ``torch_dist`` checkpoint, saved in whatever layout, as a Hugging Face folder.

    ``config`` is a folder with config.json and tokenizer where the checkpoint holds none. With float8_e4m3fn linear
    layers become block-scaled float8, the others stay as they are stored. Raises as `hf_to_megatron`.
    """
    companion = config or source
    shape = ModelShape.from_folder(companion, families=FAMILIES)
    plain, files = _megatron_folder(source, shape, None if dtype == FP8 else dtype)
    jobs: list[Streamed] = [part for job in plain for part in (quantised(job) if dtype == FP8 else [job])]
    groups = in_files(jobs, shard_bytes)
    single = len(groups) == 1
    names = (
        ["model.safetensors"]
        if single
        else [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    )
    sinks = [
        Sink(name=name, jobs=tuple(group), write=_write_safetensors) for name, group in zip(names, groups, strict=True)
    ]

    def finish(folder: Path, _: Mapping[str, list[dict[str, object]]]) -> None:
        if not single:
            weight_map = {job.name: sink.name for sink in sinks for job in sink.jobs}
            index = {"metadata": {"total_size": sum(job.num_bytes for job in jobs)}, "weight_map": weight_map}
            write_atomically(folder / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
        quantization = quantization_config(jobs) if dtype == FP8 else None
        _copy_companions(companion, folder, {plain[0].dtype}, quantization)

    run(source, out, sinks, files, progress, finish, options={"dtype": str(dtype), "shard_bytes": shard_bytes})


def hf_tensors(folder: Path, config: Path | None = None) -> tuple[list[Job], Files]:
    """The Hugging Face tensors that a checkpoint of either kind holds, ready to be read block by block.

    ``config`` is a folder with config.json where ``folder`` has none. Raises as `hf_to_megatron`.
    """
    shape = ModelShape.from_folder(config or folder, families=FAMILIES)
    return _megatron_folder(folder, shape, None) if is_megatron(folder) else _hf_folder(folder, shape)


def _layouts(shape: ModelShape) -> tuple[Layout, Layout]:
    """Hugging Face's names, and megatron's on one rank: the order of rows in its checkpoints, whatever wrote them."""
    return hf_layout(shape), megatron_layout(shape)


def _hf_folder(source: Path, shape: ModelShape) -> tuple[list[Job], Files]:
    index = source / "model.safetensors.index.json"
    placed: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    names = sorted(set(placed.values())) or ["model.safetensors"]
    files = _opened(source, names)
    entries = [(source / n, tensor, entry) for n in names for tensor, entry in read_header(files[source / n]).items()]
    lost = placed.keys() - {name for _, name, _ in entries}
    if lost:
        raise WeightError(f"{index} places tensors that no file holds: {', '.join(sorted(lost)[:20])}")
    blocks = blocks_of(source)
    scales, wrong = scales_of({name: (entry.dtype, entry.shape) for _, name, entry in entries}, blocks)
    raise_lines(f"{source} is not quantised as its config.json says", wrong)
    weights = [(path, name, entry) for path, name, entry in entries if name not in scales.values()]
    wanted = hf_layout(shape).local_shapes(0)
    raise_misfits(str(source), {name: entry.shape for _, name, entry in weights}, wanted)
    views = {name: partial(entry.view, files[path]) for path, name, entry in entries}
    jobs = []
    for _, name, entry in weights:
        if blocks is not None and name in scales:
            pair = partial(_scaled, views[name], views[scales[name]], blocks.edges)
            jobs.append(_stored(name, entry.shape, blocks.dtype, pair))
        else:
            jobs.append(_stored(name, entry.shape, entry.dtype, views[name]))
    return jobs, files


def _scaled(weight: Callable[[], Tensor], scales: Callable[[], Tensor], edges: tuple[int, int]) -> Scaled:
    return Scaled(weight=weight(), scales=scales(), edges=edges)


def _stored(name: str, shape: Shape, dtype: torch.dtype, source: Callable[[], Boxes]) -> Job:
    box = tuple((0, size) for size in shape)
    return Job(name=name, shape=shape, dtype=dtype, parts=(Part(box=box, source=source, src_box=box),))


def _opened(folder: Path, names: Sequence[str]) -> Files:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: files that should be there are not: {', '.join(missing)}")
    return Files([folder / name for name in names])


def _megatron_folder(source: Path, shape: ModelShape, dtype: torch.dtype | None) -> tuple[list[Job], Files]:
    """Every Hugging Face tensor out of the chunks that hold a piece of it, whatever layout wrote them."""
    _, chunks = read_index(source)
    files = _opened(source, sorted({c.file for c in chunks}))
    by_key: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_key.setdefault(chunk.key, []).append(chunk)
    hf, megatron = _layouts(shape)
    places = {param: place_of(param) for param in megatron.local_shapes(0)}
    missing = sorted({key for key, _ in places.values()} - by_key.keys())
    if missing:
        raise WeightError(f"{source} lacks {', '.join(missing[:20])}; its config.json tells of another model")
    at: dict[tuple[str, Shape], list[Chunk]] = {}
    for key, held in by_key.items():
        depth = max((len(index) for k, index in places.values() if k == key), default=0)
        for chunk in held:
            for index in _indices(chunk, depth):
                at.setdefault((key, index), []).append(chunk)
    parts: dict[str, list[Part]] = {}
    kinds: dict[str, torch.dtype] = {}
    for piece in plan(hf, megatron).receives(0):
        key, index = places[piece.dst_param]
        for chunk in at.get((key, index), []):
            cut = _intersection(chunk, index, piece.dst_box)
            if cut is not None:
                view = partial(read_tensor, files[source / chunk.file], chunk)
                part = _part(cut, chunk, index, piece.dst_box, piece.src_box, view)
                parts.setdefault(piece.src_param, []).append(part)
                kinds[piece.src_param] = dtype or chunk.dtype
    wanted = hf.local_shapes(0)
    short = [
        f"{name}: {sum(_volume(p.box) for p in parts.get(name, ()))} of {torch.Size(size).numel()} elements"
        for name, size in wanted.items()
        if sum(_volume(p.box) for p in parts.get(name, ())) != torch.Size(size).numel()
    ]
    if short:
        raise WeightError("\n  ".join([f"{source} does not hold these whole:", *short[:20]]))
    jobs = [Job(name=name, shape=size, dtype=kinds[name], parts=tuple(parts[name])) for name, size in wanted.items()]
    return jobs, files


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


def _part(cut: Box, chunk: Chunk, index: Shape, box: Box, hf_box: Box, view: Callable[[], Tensor]) -> Part:
    depth = len(index)
    inside = tuple((low - o, high - o) for (low, high), o in zip(cut, chunk.offsets[depth:], strict=True))
    there = tuple((low - b[0] + h[0], high - b[0] + h[0]) for (low, high), b, h in zip(cut, box, hf_box, strict=True))
    lead = tuple(i - o for i, o in zip(index, chunk.offsets[:depth], strict=True))
    return Part(box=there, source=lambda: view()[lead], src_box=inside)


def _volume(box: Box) -> int:
    out = 1
    for low, high in box:
        out *= high - low
    return out


def _write_chunks(file: IO[bytes], jobs: Sequence[Streamed], progress: Progress) -> list[dict[str, object]]:
    notes: list[dict[str, object]] = []
    for job in jobs:
        start = file.tell()
        _, index = place_of(job.name)
        shape = (*(1 for _ in index), *job.shape)
        notes.append({"start": start, "length": write_tensor(file, job.dtype, shape, job.blocks(progress))})
    return notes


def _write_safetensors(file: IO[bytes], jobs: Sequence[Streamed], progress: Progress) -> list[dict[str, object]]:
    file.write(header_bytes([(job.name, job.dtype, job.shape) for job in jobs]))
    for job in jobs:
        for block in job.blocks(progress):
            file.write(block.view(-1).view(torch.uint8).numpy().data)
    return []


def _noted_chunk(file: str, job: Streamed, note: Mapping[str, object]) -> Chunk:
    key, index = place_of(job.name)
    return Chunk(
        key=key,
        offsets=(*index, *(0 for _ in job.shape)),
        sizes=(*(1 for _ in index), *job.shape),
        dtype=job.dtype,
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
    source: Path, folder: Path, dtypes: set[torch.dtype], quantization: dict[str, Any] | None = None
) -> None:
    for path in companions(source):
        shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(config_text(source, dtypes, quantization))


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
