"""Executes a plan between processes of one node through GPU memory that both ends of a pair map: CUDA IPC.

Otherwise like shared memory: the rings are device memory, and the socket carries their IPC handles. A slot is announced
after the GPU has finished its copies. Upstream: torch ``multiprocessing/reductions.py``, with its handles but without
its pickles. A handle holds the sender's number of the GPU, which may differ from the receiver's under another
CUDA_VISIBLE_DEVICES, so the GPU's UUID is sent too, and the receiver substitutes its own number.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from rl_megatron.errors import WeightError
from rl_megatron.weights.transports.shared_memory import Rings, SharedMemoryTransport


class CudaRings(Rings):
    """As Rings, between processes whose tensors are on GPUs of one machine."""

    name, device_type = "cuda_ipc", "cuda"

    def _new_ring(self, num_bytes: int) -> tuple[Tensor, bytes, list[int]]:
        ring = torch.empty(num_bytes, dtype=torch.uint8, device=self.ends.device)
        handle = ring.untyped_storage()._share_cuda_()
        told = [part.hex() if isinstance(part, bytes) else part for part in handle[1:]]
        return ring, json.dumps([uuid_of(handle[0]), *told]).encode(), []

    def _open_ring(self, num_bytes: int, told: bytes, handles: list[int]) -> Tensor:
        uuid, *parts = json.loads(told)
        raw = [bytes.fromhex(part) if isinstance(part, str) else part for part in parts]
        storage = torch.UntypedStorage._new_shared_cuda(_number(uuid), *raw)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:num_bytes]


class CudaIpcTransport(SharedMemoryTransport):
    """As SharedMemoryTransport, between processes whose tensors are on GPUs of one machine."""

    kind = CudaRings


def uuid_of(number: int) -> str:
    """The UUID of the GPU that this process gives a number."""
    return str(torch.cuda.get_device_properties(number).uuid)


def _number(uuid: str) -> int:
    """This process's number of the GPU. Raises WeightError if it does not see the GPU."""
    seen = [uuid_of(number) for number in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise WeightError(
            f"CUDA IPC maps memory of GPU {uuid}, and this process sees {', '.join(seen) or 'none'} "
            "(CUDA_VISIBLE_DEVICES); give both ends the same GPU (rollout.server.colocated=true), or set "
            "weights.transport=file"
        )
    return seen.index(uuid)
