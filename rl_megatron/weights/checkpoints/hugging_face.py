"""The tensors of a Hugging Face folder, read block by block, and its files as they are written.

No torch, unless numbers are dequantized on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.boxes import Shape, whole_box
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.mapped import Entry, MappedFile, header_bytes
from rl_megatron.weights.checkpoints.streaming import Copy, Files, Fragment, OnBytes, Sliceable, StreamedTensor, numbers
from rl_megatron.weights.formats.hf_folder import (
    Headers,
    draft_copies,
    model_tensors,
    raise_misfits,
    raise_uncounted,
    read_headers,
)
from rl_megatron.weights.formats.schemes import Quantized
from rl_megatron.weights.layouts.families import hf_layout


def hf_copies(source: Path, shape: ModelShape, dtype: DType | None) -> tuple[list[Copy], Files]:
    """Every tensor of a folder in its stored dtype; quantized ones dequantized to ``dtype`` or config.json's.

    Raises CheckpointError, WeightError or ConfigError naming what is missing, truncated, unknown or misshapen. An
    output matrix that differs from the embedding that it is tied to is an error, too: both are read for that.
    """
    headers = read_headers(source)
    files, copy_of = _reading(source, headers, dtype)
    weights, tied = model_tensors(source, headers.shapes, shape)
    layout = hf_layout(shape)
    raise_uncounted(source, len(weights), layout)
    raise_misfits(str(source), weights, layout.local_shapes(0))
    if tied is not None:
        if not _equal(copy_of(tied.embedding), copy_of(tied.head)):
            tied.refuse(source)
        files.forget()
    return [copy_of(name) for name in weights], files


def own_in_drafts(source: Path, shape: ModelShape, *, whole: bool = True) -> dict[str, str]:
    """Returns draft layers' embeddings and output matrices that differ from the model's, each with the model's name.
    All are read for that, or, without ``whole``, only their first blocks. Neither a conversion nor a run keeps them."""
    if not shape.num_draft_layers:
        return {}
    headers = read_headers(source)
    found = {name: of for name, of in draft_copies(headers.shapes, shape).items() if of in headers.shapes}
    files, copy_of = _reading(source, headers, None)
    own = {}
    for name, of in found.items():
        one, other = copy_of(name), copy_of(of)
        if one.shape != other.shape or not _equal(one, other, whole=whole):
            own[name] = of
        files.forget()
    return own


def _reading(source: Path, headers: Headers, dtype: DType | None) -> tuple[Files, Callable[[str], Copy]]:
    """The files, and what reads a tensor in them by its name."""
    files = Files([source / name for name in dict.fromkeys(name for name, _ in headers.entries.values())])
    homes = {tensor: (entry, files[source / name]) for tensor, (name, entry) in headers.entries.items()}

    def make_copy(name: str) -> Copy:
        if weight := headers.quantized.get(name):
            return _dequantized(name, weight, homes, dtype or weight.scheme.dtype)
        entry, file = homes[name]
        return _stored(name, entry.shape, entry.dtype, partial(entry.view, file))

    return files, make_copy


def _equal(one: Copy, other: Copy, *, whole: bool = True) -> bool:
    """True if two tensors of one shape, or their first blocks, have the same bits; stops at one that differs."""
    pairs = zip(one.blocks(lambda _: None), other.blocks(lambda _: None), strict=False)
    compared = islice(pairs, None if whole else 1)
    return one.dtype is other.dtype and all(np.array_equal(block, same) for block, same in compared)


def _stored(name: str, shape: Shape, dtype: DType, source: Callable[[], Sliceable]) -> Copy:
    box = whole_box(shape)
    return Copy(name=name, shape=shape, dtype=dtype, fragments=(Fragment(box=box, source=source, src_box=box),))


def _dequantized(name: str, weight: Quantized, homes: Mapping[str, tuple[Entry, MappedFile]], dtype: DType) -> Copy:
    from rl_megatron.weights.checkpoints.casting import Dequantized

    def source() -> Dequantized:
        parts = {part: homes[part] for part in (weight.numbers, weight.scales)}
        views = {part: (entry.view(file), entry.dtype) for part, (entry, file) in parts.items()}
        return Dequantized(weight=weight, parts=views, wanted=dtype)

    return _stored(name, weight.shape, dtype, source)


def write_safetensors(file: IO[bytes], tensors: Sequence[StreamedTensor], on_bytes: OnBytes) -> list[dict[str, object]]:
    """Writes one file. Its notes are empty, because its header says where each tensor lies."""
    file.write(header_bytes([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]))
    for tensor in tensors:
        for block in numbers(tensor, on_bytes):
            file.write(block.reshape(-1).view(np.uint8).data)
    return []
