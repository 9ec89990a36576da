"""``torch.cuda``'s graphs on a CPU, for megatron's calls of them: what is captured is noted operation by operation, and
a replay computes it again in the same memory. So a graph knows new inputs only where they were copied into its own.

An operation for which the host would wait raises an error while a graph is captured, as on a GPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SEEN: Counter[str] = Counter()
"""How many captures and replays there were."""
_WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"}


class CUDAGraph:
    """Operations with the tensors that they made; None where they made another thing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.noted: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def register_generator_state(self, state: Any) -> None: ...

    def replay(self) -> None:
        SEEN["replays"] += 1
        with torch.no_grad():
            for operation, given, named, made in self.noted:
                for old, new in zip(made, tree_leaves(operation(*given, **named)), strict=True):
                    if old is not None and old is not new:
                        old.copy_(new)


class Capture(TorchDispatchMode):
    """Notes all operations but those that look at the memory of others."""

    def __init__(self, graph: CUDAGraph, **_: Any) -> None:
        super().__init__()
        self.graph = graph
        SEEN["captures"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func._schema.name.split("::")[1], kwargs or {}
        if name in _WAITING:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        out = func(*args, **named)
        if not any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns):
            kept = [x if isinstance(x, Tensor) else None for x in tree_leaves(out)]
            self.graph.noted.append((func, args, named, kept))
        return out


class Generator:
    """Random numbers of a GPU, which nothing here draws."""

    def manual_seed(self, seed: int) -> None: ...

    def clone_state(self) -> Generator:
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Generator) -> None: ...


def install() -> None:
    """Make this process find them. Call it before megatron is imported; then `install_generators`."""
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph, cuda.graph_pool_handle = CUDAGraph, Capture, lambda: (0, 1)
    cuda.memory_stats = lambda *_: {"allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}
    cuda.get_device_capability, cuda.set_stream = lambda *_: (9, 0), lambda *_: None


def install_generators() -> None:
    """Call it once megatron is imported."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: Generator()
    random._set_cuda_rng_state = lambda *_, **__: None
