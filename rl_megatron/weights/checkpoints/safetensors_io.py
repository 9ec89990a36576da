"""Reads a Hugging Face checkpoint folder box by box from memory-mapped files, and writes one atomically.

In place of a checkpoint's, weights may be random: a function of the seed, a tensor's name and an element's place in it.
So every rank of every layout fills its own boxes, and all hold the same model.
"""

from __future__ import annotations

import math
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron.chat_templates import TemplateValue
from rl_megatron.errors import CheckpointError, WeightError
from rl_megatron.files import add_path_to_errors, publish_folder, remove_folder
from rl_megatron.weights.boxes import Box, Shape, whole_box
from rl_megatron.weights.bytes.bits import all_numbers, raise_overflow, to_tensor
from rl_megatron.weights.checkpoints.convert import converted_shape, hf_tensors
from rl_megatron.weights.checkpoints.streaming import Copy, divide_files, numbers
from rl_megatron.weights.checks.reports import checksum
from rl_megatron.weights.formats.hf_folder import (
    INDEX,
    config_text,
    copy_companions,
    file_names,
    index_text,
    model_tensors,
    raise_misfits,
    raise_uncounted,
    read_headers,
)
from rl_megatron.weights.formats.quantize import read_quantized
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import Layout, keeping_dtype
from rl_megatron.weights.layouts.tables.drafts import holds_draft
from rl_megatron.weights.layouts.tables.rows import SCORE
from rl_megatron.weights.plans.plan import plan


class TensorSource(Protocol):
    """The tensors of a Hugging Face checkpoint, whole or made up."""

    folder: Path

    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor by name, as if nothing was quantized."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor, on the CPU."""
        ...


class HFFolder:
    """The tensors of an HF folder, one file or sharded with an index. The constructor reads only the headers.

    Quantized weights read as float32. Raises CheckpointError that names every missing or torn file. Raises WeightError
    that names every tensor that is not in its file of the index, or has scales that do not fit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._headers = read_headers(folder)
        self._shapes = self._headers.shapes
        homes = {tensor: name for tensor, (name, _) in self._headers.entries.items()}
        opened = {name: _open(folder / name) for name in dict.fromkeys(homes.values())}
        self._home = {tensor: opened[name] for tensor, name in homes.items()}

    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor by name, as if nothing was quantized."""
        return self._shapes

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor, in the file's dtype, on the CPU. Reads only the box."""
        weight = self._headers.quantized.get(name)
        return self._part(name, box) if weight is None else read_quantized(weight, box, self._part)

    def _part(self, name: str, box: Box) -> Tensor:
        file = self._home[name]
        piece: Tensor = file.get_slice(name)[tuple(slice(*edge) for edge in box)] if box else file.get_tensor(name)
        return piece


def read_boxes(source: TensorSource, hf: Layout, layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Fills ``tensors``, those of ``rank`` in ``layout`` by local name, in place; padding becomes zero.

    ``hf`` is the layout of ``source`` itself. Values are cast to each tensor's dtype. Raises WeightError naming
    every tensor of it, then of ``tensors``, that is missing, unknown or misshapen; nothing is written then. It names
    the first tensor that holds NaN or infinite values, or a number too large for its dtype here. It names an output
    matrix that differs from the embedding that it is tied to. Each rank compares the rows that it reads, so that all
    ranks together read the matrix once a replica.
    """
    given, tied = model_tensors(source.folder, source.shapes(), hf.shape)
    raise_uncounted(source.folder, len(given), hf)
    raise_misfits(f"{source.folder}", given, hf.local_shapes(0))
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    raise_misfits(f"tensors of rank {rank}", here, layout.local_shapes(rank))
    moves = plan(hf, layout, placement={rank: rank})
    filled: Counter[str] = Counter()
    with torch.no_grad():
        for t in moves.receives(rank):
            piece = source.read(t.src_param, t.src_box)
            place = tensors[t.dst_param][tuple(slice(start, stop) for start, stop in t.dst_box)]
            if not all_numbers(place.copy_(piece)):
                raise_overflow(f"{source.folder}: {t.src_param}", piece, place.dtype)
                raise WeightError(f"{source.folder}: {t.src_param} holds NaN or infinite values; fetch it again")
            if tied is not None and t.src_param == tied.embedding:
                same = source.read(tied.head, t.src_box)
                if same.dtype != piece.dtype or not torch.equal(same, piece):
                    tied.refuse(source.folder)
            filled[t.dst_param] += piece.numel()
        for name, tensor in tensors.items():
            if filled[name] < tensor.numel():
                # Padding follows the filled rows: only vocabulary rows are ever padded.
                tensor.view(-1)[filled[name] :].zero_()


def checksums(source: HFFolder, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> dict[str, int]:
    """The checksum of each tensor after the cast, which it must have wherever the folder was loaded."""
    return {
        name: checksum(source.read(name, whole_box(shape)).to(dtypes[name]), shape) for name, shape in shapes.items()
    }


class WithDrafts(Mapping[str, Tensor]):
    """``trained`` by Hugging Face's names, then the draft layers that ``start`` holds, a folder of either kind.

    Draft layers are in ``dtype``, but for what keeps its own. They are read each time, so none stays in memory. Raises
    as `hf_tensors`.
    """

    def __init__(
        self, trained: Mapping[str, Tensor], start: Path, dtype: torch.dtype, family: str | None = None
    ) -> None:
        shape = converted_shape(start, family=family)
        self._trained, self._dtype = trained, dtype
        self._drafts: dict[str, Copy] = {}
        if shape.num_draft_layers:
            layout, without = hf_layout(shape), hf_layout(replace(shape, num_draft_layers=False))
            self._exact = keeping_dtype(layout)
            names = layout.local_shapes(0).keys() - without.local_shapes(0).keys()
            found, self._files = hf_tensors(start, family=family)
            self._drafts = {copy.name: copy for copy in found if copy.name in names}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._trained:
            return self._trained[name]
        copy = self._drafts[name]
        blocks = [to_tensor(block.copy(), copy.dtype) for block in numbers(copy, lambda _: None)]
        tensor = torch.cat(blocks).view(copy.shape)
        return tensor if name in self._exact else tensor.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        yield from self._trained
        yield from self._drafts

    def __len__(self) -> int:
        return len(self._trained) + len(self._drafts)


def write_folder(
    tensors: Mapping[str, Tensor],
    source_folder: Path,
    out: Path,
    max_shard_bytes: int = 5 * 10**9,
    *,
    variables: Mapping[str, TemplateValue] | None = None,
) -> None:
    """Writes ``tensors`` by HF name as the checkpoint ``out``, atomically and durably.

    config.json and what `copy_companions` takes, with the ``variables``, come from ``source_folder``. The config's
    dtype is set to that of the ``tensors`` of two dimensions and more, if they share one. A file holds at most
    ``max_shard_bytes``, or one tensor. Others can read the files as the umask says. A folder ``out`` that is there
    stays until the new one is written. Raises CheckpointError if ``out`` is a file or a link, or the source has no
    config.json.
    """
    if out.is_symlink() or out.is_file():
        what = "a link" if out.is_symlink() else "a file"
        raise CheckpointError(f"{out} is {what}, where a folder belongs; remove it")
    if not (source_folder / "config.json").is_file():
        raise CheckpointError(f"{source_folder}: no config.json to copy; give the checkpoint that training began from")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed writer
    partial.mkdir(parents=True)
    try:
        dtypes = _write_tensors(tensors, partial, max_shard_bytes)
        drafts = holds_draft(tensors)
        (partial / "config.json").write_text(config_text(source_folder, dtypes, drafts=drafts, scores=SCORE in tensors))
        copy_companions(source_folder, partial, variables)
        for file in partial.glob("*.safetensors"):  # safetensors 0.8 makes them readable by this user alone
            file.chmod((partial / "config.json").stat().st_mode)
        remove_folder(out)
        publish_folder(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int) -> set[str]:
    """Returns torch's names of the dtypes of matrices; vectors may be wider, as routers' selection biases are."""
    sizes: dict[str, int] = {}
    dtypes: set[str] = set()
    for name, tensor in tensors.items():
        sizes[name] = tensor.nbytes
        if tensor.dim() > 1:
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
    shards = divide_files(sizes, max_shard_bytes, sizes.__getitem__)
    weight_map: dict[str, str] = {}
    for file, names in zip(file_names(len(shards)), shards, strict=True):
        shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
        with add_path_to_errors(folder / file):
            save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        (folder / INDEX).write_text(index_text(weight_map, sum(sizes.values())))
    return dtypes


def _open(path: Path) -> Any:  # safetensors' class has no types
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:  # OSError, ValueError: unreadable and empty files
        raise CheckpointError(
            f"{path} is torn or not a safetensors file ({error}); fetch or export it again"
        ) from error


STD = 0.02
"""Standard deviation of matrices, as Hugging Face's ``initializer_range``; norms are 1, other vectors 0."""
_BAND = 2**22  # elements drawn together
_WORD = 2**32 - 1


class RandomWeights:
    """The tensors of a model folder that has no weights, by ``shapes``. Read as an `HFFolder`."""

    def __init__(self, folder: Path, shapes: Mapping[str, Shape], seed: int) -> None:
        self.folder, self._shapes, self._seed = folder, dict(shapes), seed

    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor by name."""
        return self._shapes

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor, float32, on the CPU."""
        sizes = tuple(stop - start for start, stop in box)
        if len(sizes) < 2:
            return torch.full(sizes, float("norm" in name))
        drawn = torch.empty(math.prod(sizes[:-1]), sizes[-1])
        rows, columns = self._rows(name, box), torch.arange(*box[-1])
        for low in range(0, len(rows), step := max(1, _BAND // sizes[-1])):
            places = rows[low : low + step, None] * self._shapes[name][-1] + columns
            drawn[low : low + step] = _uniform(places, zlib.crc32(name.encode(), self._seed & _WORD))
        return drawn.view(sizes)

    def _rows(self, name: str, box: Box) -> Tensor:
        """The numbers of the box's rows in the tensor, flattened but for its last axis: int64."""
        rows = torch.zeros(1, dtype=torch.int64)
        for size, edge in zip(self._shapes[name][:-1], box[:-1], strict=True):
            rows = (rows[:, None] * size + torch.arange(*edge)).view(-1)
        return rows


def _uniform(places: Tensor, key: int) -> Tensor:
    """Values of mean 0 and deviation `STD` for int64 ``places``: 24 bits of a hash of 32.

    The hash is lowbias32 (github.com/skeeto/hash-prospector) of both halves of a place, in turn.
    """
    word = _mixed(_mixed((places & _WORD) ^ key) ^ (places >> 32))
    return (word >> 8).to(torch.float32).mul_(2.0**-23).sub_(1.0).mul_(STD * math.sqrt(3))


def _mixed(word: Tensor) -> Tensor:
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & _WORD
    return word ^ (word >> 15)
