"""The table of transports, and the transport of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rl_megatron.config.sections.weights import WeightsSection
from rl_megatron.user_code import load_named
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.transports.commit import Transport
from rl_megatron.weights.transports.cuda_ipc import CudaIpcTransport
from rl_megatron.weights.transports.delta import DeltaTransport
from rl_megatron.weights.transports.file import FileTransport
from rl_megatron.weights.transports.memory import MemoryTransport
from rl_megatron.weights.transports.process_group import ProcessGroupTransport
from rl_megatron.weights.transports.shared_memory import SharedMemoryTransport

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The arguments of a transport in one process: its ends of the plan, and the configuration."""

    section: WeightsSection
    moves: Plan
    src: Mapping[str, Tensor]
    """This rank's source tensors, under the plan's names."""
    dst: Mapping[str, Tensor]
    """This rank's destination tensors, which are written in place."""
    folder: Path
    """The folder for versions, the run's own."""
    timeout_seconds: float
    """The limit of each wait for another process; a process group has its own limit."""


def _process_group(ends: Ends) -> Transport:
    kind = DeltaTransport if ends.section.delta else ProcessGroupTransport
    bucket = ends.section.bucket_mb * _MIB
    return kind(ends.moves, src=ends.src, dst=ends.dst, bucket_bytes=bucket, verify=ends.section.verify)


def _shared_memory(ends: Ends) -> Transport:
    return SharedMemoryTransport(
        ends.moves, src=ends.src, dst=ends.dst, timeout_seconds=ends.timeout_seconds, verify=ends.section.verify
    )


def _cuda_ipc(ends: Ends) -> Transport:
    return CudaIpcTransport(
        ends.moves,
        src=ends.src,
        dst=ends.dst,
        slot_bytes=ends.section.bucket_mb * _MIB,
        timeout_seconds=ends.timeout_seconds,
        verify=ends.section.verify,
    )


def _file(ends: Ends) -> Transport:
    return FileTransport(ends.moves, src=ends.src, dst=ends.dst, folder=ends.folder, verify=ends.section.verify)


def _memory(ends: Ends) -> Transport:
    return MemoryTransport(ends.moves, src=ends.src, dst=ends.dst, verify=ends.section.verify)


TRANSPORTS: Mapping[str, Callable[[Ends], Transport]] = {
    "process_group": _process_group,
    "shared_memory": _shared_memory,
    "cuda_ipc": _cuda_ipc,
    "memory": _memory,
    "file": _file,
}


def make_transport(ends: Ends) -> Transport:
    """The transport of ``section.transport``, which is not auto; one of the user's own is a function of Ends.

    Collective over the default process group, but for ``memory``, which needs none. Raises ConfigError where the user's
    cannot be loaded, and as the transports do.
    """
    name = ends.section.transport
    make = TRANSPORTS.get(name) or load_named(name, "weights.transport", "function", callable)
    transport: Transport = make(ends)
    return transport
