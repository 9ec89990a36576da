"""Executes a plan between processes of one node through GPU memory that both ends of a pair map: CUDA IPC.

As shared memory in all else: the rings are device memory, and what passes through the socket is their IPC handle. A
GPU's copies are waited for before the other end is told of a slot. Upstream: torch ``multiprocessing/reductions.py``,
whose handles these are, without its pickles.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from rl_megatron.weights.transports.shared_memory import SharedMemoryTransport


class CudaIpcTransport(SharedMemoryTransport):
    """As SharedMemoryTransport, between processes whose tensors are on GPUs of one machine."""

    name, device_type = "cuda_ipc", "cuda"

    def _new_ring(self, num_bytes: int) -> tuple[Tensor, bytes, list[int]]:
        ring = torch.empty(num_bytes, dtype=torch.uint8, device=self.ends.device)
        handle = ring.untyped_storage()._share_cuda_()
        told = [part.hex() if isinstance(part, bytes) else part for part in handle]
        return ring, json.dumps(told).encode(), []

    def _open_ring(self, num_bytes: int, told: bytes, handles: list[int]) -> Tensor:
        parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(told)]
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:num_bytes]
