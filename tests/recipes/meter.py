"""Counts what tensors hold and what collectives carry, in every operation of torch within a ``with``."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS: Mapping[str, str] = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""torch's collectives by the name of their kind; others keep their own."""


class Meter(TorchDispatchMode):
    """Bytes of all storages that operations returned and that still live; real tensors or fake ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes since the start, or since `restart`."""
        self.calls: Counter[str] = Counter()
        """Collectives by kind, since then."""
        self.sent: Counter[str] = Counter()
        """Bytes of their larger side, input or output, by kind, since then."""
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}  # with their bytes

    def restart(self) -> None:
        """Forget the peak and the collectives."""
        self.peak = self.live
        self.calls.clear()
        self.sent.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            kind = _KINDS.get(func._opname, func._opname)
            self.calls[kind] += 1
            self.sent[kind] += max(sum(x.nbytes for x in tree_leaves(side) if isinstance(x, Tensor)) for side in args)
        if isinstance(out, Tensor):
            self._see(out.untyped_storage())
        elif out is not None:
            for x in tree_leaves(out):
                if isinstance(x, Tensor):
                    self._see(x.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            size = storage.nbytes()
            self._alive[key] = size, weakref.ref(storage, lambda _: self._gone(key))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._alive.pop(key)[0]
