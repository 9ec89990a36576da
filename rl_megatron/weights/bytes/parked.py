"""Takes tensors out of a GPU's memory and puts them back, by their storages, so that all views of them stay valid.

A storage is resized to 0 bytes, and later to what it was. megatron-core's own ``offload_to_cpu`` instead gives weights
other memory, which its optimizers do not let a checkpoint read, and pages of the host that are not pinned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_ALIGNED = 256
_LEAST = 512  # bytes that are moved: a GPU's allocator gives no less


@dataclass(slots=True)
class _Slabs:
    """Pinned memory of the host, kept for the next time: to pin it takes longer than to copy."""

    size: int  # bytes that are pinned at once
    slabs: list[Tensor] = field(default_factory=list)
    at: int = 0  # the slab that is being filled
    used: int = 0  # its bytes

    def take(self, num_bytes: int, wanted: int) -> Tensor:
        """``num_bytes`` in a row; ``wanted`` more will follow, these included."""
        while self.at < len(self.slabs) and self.used + num_bytes > self.slabs[self.at].numel():
            self.at, self.used = self.at + 1, 0
        if self.at == len(self.slabs):
            size = max(num_bytes, min(wanted, self.size))
            self.slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        taken = self.slabs[self.at][self.used : self.used + num_bytes]
        self.used += -(-num_bytes // _ALIGNED) * _ALIGNED
        return taken

    def clear(self) -> None:
        """All of it is free again."""
        self.at = self.used = 0


@dataclass(frozen=True, slots=True)
class _Gone:
    storage: torch.UntypedStorage
    num_bytes: int
    device: torch.device
    copy: Tensor | None  # in the host's memory


class Parked:
    """What of a model is out of the GPU's memory, by kind."""

    def __init__(self, slab: int) -> None:
        """``slab``: bytes of the host that are pinned at once, a power of two, to which torch would round them up."""
        self._slab = slab
        self._gone: dict[str, dict[int, _Gone]] = {}
        self._slabs: dict[str, _Slabs] = {}

    def leave(self, kind: str, tensors: Iterable[Tensor], *, besides: Iterable[Tensor] = (), kept: bool = True) -> None:
        """Free the GPU's memory of ``tensors`` until ``back(kind)``, but for storages of ``besides``.

        Their values are undefined after that, unless they are ``kept``, in the host's pinned memory. What has left
        already, is in the host's memory, or is smaller than the GPU's allocator gives, stays as it is.
        """
        gone = self._gone.setdefault(kind, {})
        stay = {tensor.untyped_storage()._cdata for tensor in besides}
        leaving: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type != "cpu" and storage._cdata not in stay and storage.nbytes() >= _LEAST:
                leaving[storage._cdata] = storage, tensor.device
        slabs = self._slabs.setdefault(kind, _Slabs(self._slab))
        wanted = sum(-(-storage.nbytes() // _ALIGNED) * _ALIGNED for storage, _ in leaving.values())
        for key, (storage, device) in leaving.items():
            size, copy = storage.nbytes(), None
            if kept:
                copy = slabs.take(size, wanted)
                copy.copy_(_bytes_of(storage, device), non_blocking=True)
            wanted -= -(-size // _ALIGNED) * _ALIGNED
            gone[key] = _Gone(storage, size, device, copy)
        if leaving:
            torch.cuda.synchronize()  # the copies are whole before their sources are others' memory
        for storage, _ in leaving.values():
            storage.resize_(0)

    def back(self, *kinds: str) -> None:
        """Take the GPU's memory again for what left of ``kinds``, and for every kind if none is named."""
        for kind in kinds or tuple(self._gone):
            gone = self._gone.pop(kind, {})
            for one in gone.values():
                one.storage.resize_(one.num_bytes)
                if one.copy is not None:
                    _bytes_of(one.storage, one.device).copy_(one.copy, non_blocking=True)
            if gone:
                torch.cuda.synchronize()  # the next to leave writes over the copies
                self._slabs[kind].clear()

    def on_host(self, tensor: Tensor) -> Tensor:
        """``tensor``, or its copy in the host's memory if it has left."""
        key = tensor.untyped_storage()._cdata
        copy = next((gone[key].copy for gone in self._gone.values() if key in gone), None)
        if copy is None:
            return tensor
        flat = copy.view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), flat.storage_offset() + tensor.storage_offset())


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
