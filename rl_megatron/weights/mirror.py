"""Every Hugging Face tensor of a model in one mapped file: how weights reach an engine that is a process of its own.

The file is ``model.safetensors`` of a Hugging Face folder, in shared memory or on a shared disk, so that an engine's
own loader reads it too. Beside it ``model.safetensors.json`` tells which version it holds whole and a checksum of each
tensor, so that a reader knows what it read. Engines import this module: it needs what any engine has.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.durable import write_atomically
from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.weights.dtypes import DType
from rl_megatron.weights.layout import Shape
from rl_megatron.weights.mapped import MappedFile, header_bytes, read_header


class Mirror:
    """The writer's side. What is written into ``tensors`` is in the file; ``serve`` says that it is whole.

    ``config`` is the config.json that the folder of ``path`` gets. The tensors lie in host memory, whatever the learner
    runs on: no GPU has room for a whole model.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, config: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(config, path.with_name("config.json"))
        kind = DType(str(dtype).removeprefix("torch."))
        head = header_bytes([(name, kind, shape) for name, shape in shapes.items()])
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
        self.num_bytes = sum(sizes.values())
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + self.num_bytes)
        flat = torch.from_file(str(path), shared=True, size=len(head) + self.num_bytes, dtype=torch.uint8)
        pieces = flat[len(head) :].split(list(sizes.values()))
        named = zip(shapes.items(), pieces, strict=True)
        self.tensors: dict[str, Tensor] = {name: piece.view(dtype).view(shape) for (name, shape), piece in named}

    def withdraw(self) -> None:
        """The tensors are about to change: nobody may read them until ``serve``."""
        _note(self.path).unlink(missing_ok=True)

    def serve(self, version: int) -> None:
        """The tensors are ``version``'s, all of them."""
        note = {"version": version, "checksums": {name: checksum(t) for name, t in self.tensors.items()}}
        write_atomically(_note(self.path), json.dumps(note).encode())


def read(path: Path, version: int) -> dict[str, Tensor]:
    """Tensors by name, each compared with its checksum.

    Raises SyncError where the file is not ``version``'s, CorruptionError naming a tensor that it lacks or that has
    other bytes than were sealed.
    """
    checksums, tensors = sealed_checksums(path, version), load_file(path)
    for name in checksums.keys() ^ tensors.keys():
        raise CorruptionError(f"{path}, version {version}: {name} is in the file or among its checksums, not in both")
    for name, tensor in tensors.items():
        if checksum(tensor) != checksums[name]:
            raise CorruptionError(f"{path}, version {version}: {name} has other bytes than the learner wrote")
    return tensors


def sealed_checksums(path: Path, version: int) -> dict[str, str]:
    """What `checksum` gives for each tensor of ``version``. Raises SyncError where the file holds another."""
    note = _note(path)
    sealed = json.loads(note.read_text()) if note.is_file() else {"version": None, "checksums": {}}
    if sealed["version"] != version:
        raise SyncError(f"{path} holds version {sealed['version']}, not {version}: its sender died or was overtaken")
    checksums: dict[str, str] = sealed["checksums"]
    return checksums


def shapes(path: Path) -> dict[str, Shape]:
    """Shape of every tensor of the file."""
    return {name: entry.shape for name, entry in read_header(MappedFile(path)).items()}


def checksum(tensor: Tensor) -> str:
    """SHA-1 of a CPU tensor's bytes, against faults; not every engine's environment has xxhash."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha1(flat.numpy().data, usedforsecurity=False).hexdigest()


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
