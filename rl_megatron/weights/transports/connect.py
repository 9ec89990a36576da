"""The transport that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rl_megatron.config.sections.weights import WeightsSection
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.transports.commit import Transport
from rl_megatron.weights.transports.cuda_ipc import CudaIpcTransport
from rl_megatron.weights.transports.delta import DeltaTransport
from rl_megatron.weights.transports.disk import DiskTransport
from rl_megatron.weights.transports.memory import MemoryTransport
from rl_megatron.weights.transports.process_group import ProcessGroupTransport
from rl_megatron.weights.transports.shared_memory import SharedMemoryTransport

_MIB = 2**20


def connect(
    section: WeightsSection,
    moves: Plan,
    *,
    src: Mapping[str, Tensor],
    dst: Mapping[str, Tensor],
    folder: Path,
    timeout_seconds: float,
) -> Transport:
    """Collective over the default process group, but for ``memory``, which needs none. Raises as the transports do.

    ``folder`` is where ``disk`` keeps versions unless the section says where. A process group has a time limit of its
    own; ``timeout_seconds`` is that of shared memory and CUDA IPC.
    """
    verify = section.verify
    if section.transport == "memory":
        return MemoryTransport(moves, src=src, dst=dst, verify=verify)
    if section.transport == "shared_memory":
        return SharedMemoryTransport(moves, src=src, dst=dst, timeout_seconds=timeout_seconds, verify=verify)
    if section.transport == "cuda_ipc":
        slot = section.bucket_mb * _MIB
        return CudaIpcTransport(
            moves, src=src, dst=dst, slot_bytes=slot, timeout_seconds=timeout_seconds, verify=verify
        )
    if section.transport == "disk":
        return DiskTransport(moves, src=src, dst=dst, folder=section.folder or folder, verify=verify)
    kind = DeltaTransport if section.delta else ProcessGroupTransport
    return kind(moves, src=src, dst=dst, bucket_bytes=section.bucket_mb * _MIB, verify=verify)
