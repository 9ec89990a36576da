"""The mirror file: all Hugging Face tensors of a model in one mapped file, through which engine servers get weights.

The file is ``model.safetensors`` of a Hugging Face folder, in shared memory or on a shared disk, so that an engine's
own loader can read it. Beside it ``model.safetensors.json`` holds the version and, once sealed, a checksum of each
tensor. Engines import this module: it needs only what any engine's environment has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.durable import private_folder, write_atomically
from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.weights.boxes import Shape, whole_box
from rl_megatron.weights.bytes.bits import dtype_of
from rl_megatron.weights.bytes.mapped import MappedFile, header_bytes, read_header
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.formats.hf_folder import config_text
from rl_megatron.weights.formats.served import Format, stored


class Mirror:
    """The writer's side. ``tensors`` map the file; ``serve`` marks it as complete.

    ``config`` becomes the folder's config.json, except for its own quantisation. The tensors are in host memory,
    whatever the learner runs on: no GPU has room for a whole model. With a ``kind`` they are private to the writer,
    and ``serve`` writes them quantised to the file. Raises SyncError if the folder of ``path`` already exists and other
    users can access it: they can guess its name.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        config: Path,
        kind: Format | None = None,
    ) -> None:
        self.path, self._kind = path, kind
        try:
            private_folder(path.parent)
        except PermissionError as error:
            raise SyncError(
                f"{path.parent}, the folder for weights: {error.strerror}. Whoever made it could read and change "
                "them; remove it, or set weights.folder to another folder"
            ) from error
        text = config_text(config.parent, set(), None if kind is None else kind.config(shapes))
        path.with_name("config.json").write_text(text)
        entries = stored(shapes, dtype_of(dtype), kind)
        head = header_bytes([(name, given, shape) for name, (given, shape) in entries.items()])
        sizes = {name: prod(shape) * given.itemsize for name, (given, shape) in entries.items()}
        self.num_bytes = sum(sizes.values())
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + self.num_bytes)
        flat = torch.from_file(str(path), shared=True, size=len(head) + self.num_bytes, dtype=torch.uint8)
        pieces = flat[len(head) :].split(list(sizes.values()))
        self._stored: dict[str, Tensor] = {
            name: piece.view(getattr(torch, given)).view(shape)
            for (name, (given, shape)), piece in zip(entries.items(), pieces, strict=True)
        }
        self.tensors = self._stored
        if kind is not None:
            self.tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}

    def withdraw(self) -> None:
        """Mark the tensors as changing: readers refuse the file until ``serve``."""
        _note(self.path).unlink(missing_ok=True)

    def serve(self, version: int) -> None:
        """Mark all tensors as ``version``'s. Raises SyncError that names one that cannot be quantised."""
        note: dict[str, object] = {"version": version}
        if self._kind is not None:
            note["error"] = self._quantise(self._kind)
        write_atomically(_note(self.path), json.dumps(note).encode())

    def sums(self) -> Report:
        """Checksums of the writer's tensors."""
        started = time.perf_counter()
        rows = [("", n, whole_box(t.shape), checksum(t, tuple(t.shape))) for n, t in self._stored.items()]
        return Report(rows=rows, seconds=time.perf_counter() - started)

    def _quantise(self, kind: Format) -> tuple[float, str]:
        """Fill the file. Returns the largest error of a tensor (`Format.write`), and its name."""
        errors = [(0.0, "")]
        for name, tensor in self.tensors.items():
            scales = self._stored.get(name + kind.suffix)
            if scales is None:
                self._stored[name].copy_(tensor)
            else:
                errors.append((kind.write(name, tensor, self._stored[name], scales), name))
        return max(errors)


def read(path: Path, version: int) -> dict[str, Tensor]:
    """The mapped tensors by name. Raises SyncError if the file does not hold ``version``."""
    _noted(path, version)
    return load_file(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The checksum of each tensor of a version.

    ``error`` is the largest error of a quantised tensor (`Format.write`), and its name; None if none is quantised.
    """

    checksums: Mapping[str, int]
    error: tuple[float, str] | None = None


def seal(path: Path, version: int, checksums: Mapping[str, int]) -> Seal:
    """Write the checksums that readers of ``version`` must find. Raises SyncError if the file holds another version."""
    noted = _noted(path, version) | {"checksums": checksums}
    write_atomically(_note(path), json.dumps(noted).encode())
    return _sealed(noted)


def seal_of(path: Path, version: int) -> Seal:
    """The seal of ``version``. Raises SyncError if the file holds another version, or is not sealed."""
    noted = _noted(path, version)
    if "checksums" not in noted:
        raise SyncError(f"{path}: version {version} is not sealed, because its sender died")
    return _sealed(noted)


def _sealed(noted: Mapping[str, Any]) -> Seal:
    error = noted.get("error")
    return Seal(checksums=noted["checksums"], error=None if error is None else (float(error[0]), str(error[1])))


def check(path: Path, version: int) -> None:
    """Raises CorruptionError that names the file's tensors whose bytes do not match the seal."""
    sealed = seal_of(path, version).checksums
    wrong = [name for name, t in read(path, version).items() if checksum(t, tuple(t.shape)) != sealed.get(name)]
    if wrong:
        raise CorruptionError(f"{path}, version {version}: its bytes are not the learner's in {', '.join(wrong)}")


def shapes(path: Path) -> dict[str, Shape]:
    """Shape of every tensor of the file."""
    return {name: entry.shape for name, entry in read_header(MappedFile(path)).items()}


def dtypes(path: Path) -> dict[str, torch.dtype]:
    """The dtype of every tensor of the file."""
    return {name: getattr(torch, entry.dtype) for name, entry in read_header(MappedFile(path)).items()}


def _noted(path: Path, version: int) -> dict[str, Any]:
    note = _note(path)
    noted: dict[str, Any] = json.loads(note.read_text()) if note.is_file() else {"version": None}
    if noted["version"] != version:
        raise SyncError(
            f"{path} holds version {noted['version']}, not {version}: its sender died, or a newer push came"
        )
    return noted


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
