"""Executes a plan through a shared folder, for learner and engines on machines without another link.

A version is a folder ``version_<v>`` of safetensors files, one per sender, which gets its name once every file is
complete and durable. A file holds each box that its rank sends, once for all receivers, and at the end the boxes'
digests; receivers map the files and read their boxes. The newest version is kept; another run needs another folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.durable import publish_folder, remove_folder
from rl_megatron.errors import CheckpointError, SyncError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.bytes.bits import dtype_of, to_tensor
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.hashing import bytes_of, digest
from rl_megatron.weights.bytes.mapped import MappedFile, header_bytes, read_header
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.transports.buckets import BucketPart
from rl_megatron.weights.transports.commit import Transport
from rl_megatron.weights.transports.ends import PlanEnds, handshakes_of, view
from rl_megatron.weights.transports.words import GroupPeers

_DIGESTS = "digests"
_PART_BYTES = 64 * 2**20


class FileTransport(Transport):
    """As ProcessGroupTransport, through ``folder``; the group only synchronises. The constructor is collective."""

    def __init__(
        self,
        moves: Plan,
        *,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        folder: Path,
        verify: bool = True,
    ) -> None:
        self._folder, self._peers = folder, GroupPeers(None)
        self._rank, exchange = self._peers.rank, handshakes_of(self._peers)
        self._ends = PlanEnds(moves, rank=self._rank, src=src, dst=dst, exchange=exchange, verify=verify)
        self._num_bytes = 0
        self._leaving: dict[str, tuple[Tensor, torch.dtype]] = {}  # by name in the file
        self._arriving: dict[int, list[tuple[str, BucketPart]]] = {}  # by sender
        for (sender, receiver), buckets in self._ends.buckets(_PART_BYTES, _PART_BYTES).items():
            parts = [(_name(part, bucket.dtype), part, bucket.dtype) for bucket in buckets for part in bucket.parts]
            if sender == self._rank:
                sent = {name: (view(self._ends.src[p.src_param], p.src_box), dtype) for name, p, dtype in parts}
                self._leaving |= sent
            if receiver == self._rank:
                self._arriving[sender] = [(name, part) for name, part, _ in parts]
                self._num_bytes += sum(bucket.num_bytes for bucket in buckets)

    @override
    def move(self, version: int) -> WeightUpdate:
        """Raises SyncError on every process if one cannot write or read its files."""
        started = time.perf_counter()
        self._ends.begin()
        final = self._folder / f"version_{version:06d}"
        work = final.with_name(f".{final.name}.partial")
        first = self._rank == 0
        self._together(version, lambda: self._clear(work) if first else None)
        self._together(version, lambda: self._write(work) if self._leaving else None)
        self._together(version, lambda: self._publish(work, final) if first else None)
        self._together(version, lambda: self._read(final))
        verified = self._ends.finish(version)
        seconds = time.perf_counter() - started
        return WeightUpdate(version=version, num_bytes=self._num_bytes, seconds=seconds, verify_seconds=verified)

    @override
    def close(self) -> None:
        """Does nothing: the newest version stays on disk."""

    def _together(self, version: int, call: Callable[[], None]) -> None:
        """Call ``call`` and wait for all processes; raises the errors of any process."""
        problem = ""
        try:
            call()
        except (OSError, CheckpointError) as error:
            problem = f"rank {self._rank}: {error}"
        try:
            problems = self._peers.gather(problem)
        except RuntimeError as error:
            raise SyncError(
                f"version {version} is not served: rank {self._rank} waited for the others at {self._folder}; a "
                f"process was lost or is late ({error}). Start it again, connect again and push"
            ) from error
        if any(problems):
            raise SyncError(f"version {version} is not served:\n" + "\n".join(filter(None, problems)))

    def _clear(self, work: Path) -> None:
        """Remove what a killed run left, and make the folder of a version."""
        self._folder.mkdir(exist_ok=True)
        for left in self._folder.glob(".version_*.partial"):
            remove_folder(left)
        work.mkdir()

    def _write(self, work: Path) -> None:
        boxes = self._leaving
        heads = [(name, dtype_of(dtype), tuple(tensor.shape)) for name, (tensor, dtype) in boxes.items()]
        sums = torch.zeros(len(boxes), dtype=torch.uint64)
        with (work / _file_of(self._rank)).open("wb") as file:
            file.write(header_bytes([*heads, (_DIGESTS, DType.I64, (len(boxes),))]))
            for i, (tensor, dtype) in enumerate(boxes.values()):
                data = bytes_of(tensor.to(dtype))
                sums.numpy()[i] = digest(data)
                file.write(data)
            file.write(bytes_of(sums))

    def _publish(self, work: Path, final: Path) -> None:
        older = [path for path in self._folder.glob("version_*") if path != final]
        remove_folder(final)  # of a try that failed
        publish_folder(work, final)
        for path in older:
            remove_folder(path)

    def _read(self, final: Path) -> None:
        for sender, parts in self._arriving.items():
            file = MappedFile(final / _file_of(sender))
            entries = read_header(file)
            sums = entries[_DIGESTS].view(file).view(np.uint64)
            place = {name: i for i, name in enumerate(entries)}
            missing = [name for name, _ in parts if name not in entries]
            if missing:
                raise CheckpointError(f"{file.path} lacks {missing[0]}; its rank has another plan")
            for name, part in parts:
                self._ends.write(
                    part, to_tensor(entries[name].view(file), entries[name].dtype), sender, int(sums[place[name]])
                )


def _file_of(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _name(part: BucketPart, dtype: torch.dtype) -> str:
    box = ",".join(f"{low}:{high}" for low, high in part.src_box)
    return f"{part.src_param}[{box}] {str(dtype).removeprefix('torch.')}"
