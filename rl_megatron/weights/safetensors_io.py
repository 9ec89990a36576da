"""A Hugging Face checkpoint folder, read box by box from memory-mapped files and written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron.durable import publish_folder
from rl_megatron.errors import CheckpointError, WeightError
from rl_megatron.weights.layout import Box, Layout, Shape
from rl_megatron.weights.mapped import DTYPES
from rl_megatron.weights.plan import plan
from rl_megatron.weights.quantize import blocks_of, dequantise, scales_of

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
_MAX_LINES = 20  # of one error message; a wrong folder misses thousands of tensors


class Checkpoint:
    """The tensors of an HF folder, one file or sharded with an index. Making one reads the headers alone.

    Block-scaled float8 weights read as float32. Raises CheckpointError naming every file that is missing or torn,
    WeightError naming every tensor that the index places in a file without it or whose block scales do not fit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / _INDEX
        if not index.is_file() and not (folder / _SINGLE).is_file():
            raise CheckpointError(f"{folder}: neither {_INDEX} nor {_SINGLE} there; give a safetensors checkpoint")
        placed: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        files = sorted(set(placed.values())) or [_SINGLE]
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder}: {_INDEX} names files that are not there: {', '.join(missing)}")
        opened = {name: _open(folder / name) for name in files}
        self._home = {tensor: file for file in opened.values() for tensor in list(file.keys())}
        keys = {name: set(file.keys()) for name, file in opened.items()}
        raise_lines(
            f"{folder}: {_INDEX} does not match its files",
            [f"{file} has no tensor {name}" for name, file in placed.items() if name not in keys[file]],
        )
        slices = {name: file.get_slice(name) for name, file in self._home.items()}
        held = {name: (DTYPES[s.get_dtype()], tuple(s.get_shape())) for name, s in slices.items()}
        self._blocks = blocks_of(folder)
        self._scales, wrong = scales_of(held, self._blocks)
        raise_lines(f"{folder} is not quantised as its config.json says", wrong)
        self._shapes = {name: shape for name, (_, shape) in held.items() if name not in self._scales.values()}

    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor by name, without block scales."""
        return self._shapes

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor, in the file's dtype, on the CPU; only the box is read."""
        piece: Tensor = self._home[name].get_slice(name)[tuple(slice(start, stop) for start, stop in box)]
        if self._blocks is None or name not in self._scales:
            return piece
        scales: Tensor = self._home[self._scales[name]].get_tensor(self._scales[name])
        return dequantise(piece, scales, [start for start, _ in box], self._blocks.edges)


def read_boxes(checkpoint: Checkpoint, hf: Layout, layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors``, rank ``rank`` of ``layout`` by local name, in place; padding becomes zero.

    ``hf`` is the layout of the checkpoint itself. Values are cast to each tensor's dtype. Raises WeightError naming
    every tensor of the checkpoint, then of ``tensors``, that is missing, unknown or misshapen; nothing is written then.
    """
    raise_misfits(f"{checkpoint.folder}", checkpoint.shapes(), hf.local_shapes(0))
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    raise_misfits(f"tensors of rank {rank}", here, layout.local_shapes(rank))
    moves = plan(hf, layout, placement={rank: rank})
    filled: Counter[str] = Counter()
    with torch.no_grad():
        for t in moves.receives(rank):
            piece = checkpoint.read(t.src_param, t.src_box)
            tensors[t.dst_param][tuple(slice(start, stop) for start, stop in t.dst_box)].copy_(piece)
            filled[t.dst_param] += piece.numel()
        for name, tensor in tensors.items():
            if filled[name] < tensor.numel():
                # Padding lies behind the rows that were filled: vocabulary rows are the only ones ever padded.
                tensor.view(-1)[filled[name] :].zero_()


def write_folder(
    tensors: Mapping[str, Tensor], source_folder: Path, out: Path, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write ``tensors`` by HF name as the checkpoint ``out``, whole or not at all, durable when this returns.

    config.json, generation config, tokenizer files and chat template come from ``source_folder``; the config's dtype
    is set to that of ``tensors`` where they have one. A file holds at most ``max_shard_bytes``, or one tensor. Raises
    CheckpointError where ``out`` exists or the source has no config.json.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists; remove it or give another name")
    if not (source_folder / "config.json").is_file():
        raise CheckpointError(f"{source_folder}: no config.json to copy; give the checkpoint that training began from")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed writer left
    partial.mkdir(parents=True)
    try:
        _write_tensors(tensors, partial, max_shard_bytes)
        (partial / "config.json").write_text(config_text(source_folder, {t.dtype for t in tensors.values()}))
        for path in companions(source_folder):
            shutil.copyfile(path, partial / path.name)
        publish_folder(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    free = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > free:
            shards.append([])
            free = max_shard_bytes
        shards[-1].append(name)
        free -= tensor.nbytes
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = _SINGLE if single else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if not single:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def companions(folder: Path) -> set[Path]:
    """Generation config, tokenizer files and chat template beside a checkpoint."""
    return {path for pattern in _COMPANIONS for path in folder.glob(pattern) if path.is_file()}


def config_text(source_folder: Path, dtypes: set[torch.dtype], quantization: Mapping[str, object] | None = None) -> str:
    """The source's config.json, changed only where it would make a reader take the weights for another kind.

    ``quantization`` is the ``quantization_config`` of what is written: None for plain weights.
    """
    text = (source_folder / "config.json").read_text()
    config: dict[str, object] = json.loads(text)
    new = {key: value for key, value in config.items() if key != "quantization_config"}
    key = next((key for key in ("dtype", "torch_dtype") if key in config), None)
    if key is not None and len(dtypes) == 1:
        new[key] = str(*dtypes).removeprefix("torch.")
    if quantization is not None:
        new["quantization_config"] = quantization
    return text if new == config else json.dumps(new, indent=2) + "\n"


def _open(path: Path) -> Any:  # safetensors' class has no types
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is torn or no safetensors file ({error}); fetch or export it again") from error


def raise_misfits(where: str, given: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raises WeightError that names each tensor that is missing, unknown or misshapen."""
    raise_lines(f"{where} do not fit the model", list(_misfits(given, wanted)))


def _misfits(given: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> Iterator[str]:
    for name, shape in wanted.items():
        if name not in given:
            yield f"{name} is missing; it should have shape {shape}"
        elif given[name] != shape:
            yield f"{name} has shape {given[name]}; it should have {shape}"
    for name in given.keys() - wanted.keys():
        yield f"{name} is unknown; the model has no such tensor"


def raise_lines(title: str, lines: list[str]) -> None:
    """Raises WeightError of the ``lines`` under ``title`` where there are any."""
    if lines:
        more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        raise WeightError("\n  ".join([f"{title}:", *lines[:_MAX_LINES], *more]))
