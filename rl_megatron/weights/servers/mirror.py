"""Every Hugging Face tensor of a model in one mapped file: how weights reach an engine that is a process of its own.

The file is ``model.safetensors`` of a Hugging Face folder, in shared memory or on a shared disk, so that an engine's
own loader reads it too. Beside it ``model.safetensors.json`` tells which version it holds whole, and once it is sealed
a checksum of each tensor. Engines import this module: it needs what any engine has.
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
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.bits import dtype_of
from rl_megatron.weights.bytes.mapped import MappedFile, header_bytes, read_header
from rl_megatron.weights.checks.checksums import checksum
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.formats.hf_folder import config_text
from rl_megatron.weights.formats.served import Format, stored


class Mirror:
    """The writer's side. What is written into ``tensors`` is in the file; ``serve`` says that it is whole.

    ``config`` is the config.json that the folder of ``path`` gets, but for how its own weights are kept. The tensors
    lie in host memory, whatever the learner runs on: no GPU has room for a whole model. With a ``kind`` they are the
    writer's alone, and the file gets them quantised when they are served. Raises SyncError where the folder of ``path``
    is there and is not this user's alone: its name can be foretold.
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
                f"{path.parent}, where weights are handed over: {error.strerror}. Who made it could read and change "
                "them: remove it, or give another place by weights.folder"
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
        """The tensors are about to change: nobody may read them until ``serve``."""
        _note(self.path).unlink(missing_ok=True)

    def serve(self, version: int) -> None:
        """The tensors are ``version``'s, all of them. Raises SyncError naming one that cannot be quantised."""
        note: dict[str, object] = {"version": version}
        if self._kind is not None:
            note["error"] = self._quantise(self._kind)
        write_atomically(_note(self.path), json.dumps(note).encode())

    def sums(self) -> Report:
        """Of what lies here."""
        started = time.perf_counter()
        rows = [("", n, tuple((0, x) for x in t.shape), checksum(t, tuple(t.shape))) for n, t in self._stored.items()]
        return Report(rows=rows, seconds=time.perf_counter() - started)

    def _quantise(self, kind: Format) -> tuple[float, str]:
        """Fill the file; the largest error of a tensor (`Format.write`), and whose it is."""
        errors = [(0.0, "")]
        for name, tensor in self.tensors.items():
            scales = self._stored.get(name + kind.suffix)
            if scales is None:
                self._stored[name].copy_(tensor)
            else:
                errors.append((kind.write(name, tensor, self._stored[name], scales), name))
        return max(errors)


def read(path: Path, version: int) -> dict[str, Tensor]:
    """The tensors by name, mapped. Raises SyncError where the file is not ``version``'s."""
    _noted(path, version)
    return load_file(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What `checksum` gives for each tensor of a version.

    ``error`` is the largest of a quantised tensor (`Format.write`), and its name; None where nothing was quantised.
    """

    checksums: Mapping[str, int]
    error: tuple[float, str] | None = None


def seal(path: Path, version: int, checksums: Mapping[str, int]) -> Seal:
    """Note down what readers of ``version`` must find. Raises SyncError where the file holds another."""
    noted = _noted(path, version) | {"checksums": checksums}
    write_atomically(_note(path), json.dumps(noted).encode())
    return _sealed(noted)


def seal_of(path: Path, version: int) -> Seal:
    """Raises SyncError where the file holds another version, or was not sealed."""
    noted = _noted(path, version)
    if "checksums" not in noted:
        raise SyncError(f"{path}: version {version} was not sealed: its sender died")
    return _sealed(noted)


def _sealed(noted: Mapping[str, Any]) -> Seal:
    error = noted.get("error")
    return Seal(checksums=noted["checksums"], error=None if error is None else (float(error[0]), str(error[1])))


def check(path: Path, version: int) -> None:
    """Raises CorruptionError naming the tensors of the file that have other bytes than were sealed."""
    sealed = seal_of(path, version).checksums
    wrong = [name for name, t in read(path, version).items() if checksum(t, tuple(t.shape)) != sealed.get(name)]
    if wrong:
        raise CorruptionError(f"{path}, version {version}: other bytes than the learner has in {', '.join(wrong)}")


def shapes(path: Path) -> dict[str, Shape]:
    """Shape of every tensor of the file."""
    return {name: entry.shape for name, entry in read_header(MappedFile(path)).items()}


def dtypes(path: Path) -> dict[str, torch.dtype]:
    """Of every tensor of the file."""
    return {name: getattr(torch, entry.dtype) for name, entry in read_header(MappedFile(path)).items()}


def _noted(path: Path, version: int) -> dict[str, Any]:
    note = _note(path)
    noted: dict[str, Any] = json.loads(note.read_text()) if note.is_file() else {"version": None}
    if noted["version"] != version:
        raise SyncError(f"{path} holds version {noted['version']}, not {version}: its sender died or was overtaken")
    return noted


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
