"""The package ``deep_ep`` over gloo, for megatron's calls of it: a token goes once to each rank that has its experts.

Shapes and meanings are those of DeepEP's ``Buffer`` (https://github.com/deepseek-ai/DeepEP, deep_ep/buffer.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Event:
    """No stream, so nothing to wait for."""

    def __init__(self, *_: object) -> None: ...

    def current_stream_wait(self) -> None: ...


class Buffer:
    """Every rank of ``group`` calls each method."""

    def __init__(self, group: dist.ProcessGroup, *_: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, 0, 0

    @staticmethod
    def set_num_sms(count: int) -> None: ...

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 0, get_rdma_buffer_size_hint=lambda *_: 0)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, chosen: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Of ``chosen`` [t, k] experts: tokens by rank, by node and by expert, and whether a token goes to a rank."""
        ranks = self.group.size()
        goes = torch.stack([(chosen // (num_experts // ranks) == rank).any(1) for rank in range(ranks)], 1)
        return goes.sum(0), None, torch.bincount(chosen.flatten(), minlength=num_experts), goes, Event()

    def dispatch(
        self,
        x: Tensor,
        *,
        handle: Any = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Rows [n, h] that other ranks sent here, with the places among this rank's experts (-1: not here)."""
        if handle is not None:
            return self._exchanged([x[rows] for rows in handle[0]])[0], None, None, None, None, Event()
        rows = [column.nonzero()[:, 0] for column in is_token_in_rank.T]
        own = len(num_tokens_per_expert) // self.group.size()
        here = [topk_idx[each] // own == rank for rank, each in enumerate(rows)]
        found, counts = self._exchanged([x[each] for each in rows])
        places = [torch.where(mine, topk_idx[each] % own, -1) for mine, each in zip(here, rows, strict=True)]
        weights = [torch.where(mine, topk_weights[each], 0.0) for mine, each in zip(here, rows, strict=True)]
        got = self._exchanged(places)[0]
        numbers = [int((got == expert).sum()) for expert in range(own)]
        return found, got, self._exchanged(weights)[0], numbers, (rows, counts, len(x)), Event()

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **_: Any) -> tuple[Any, ...]:
        """The sum [t, h] of what the ranks made of each token."""
        return self._summed(x, handle), None if topk_weights is None else self._summed(topk_weights, handle), Event()

    def _summed(self, x: Tensor, handle: Any) -> Tensor:
        rows, counts, total = handle
        back = self._exchanged(x.split(counts))[0].split([len(each) for each in rows])
        out = x.new_zeros(total, *x.shape[1:])
        for each, part in zip(rows, back, strict=True):
            out.index_add_(0, each, part)
        return out

    def _exchanged(self, parts: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Sends the i-th part to the i-th rank; what all ranks sent here, and how many rows each."""
        sizes = torch.tensor([len(part) for part in parts])
        got = torch.empty_like(sizes)
        dist.all_to_all_single(got, sizes, group=self.group)
        counts = got.tolist()
        out = parts[0].new_empty(sum(counts), *parts[0].shape[1:])
        dist.all_to_all_single(out, torch.cat(list(parts)), counts, sizes.tolist(), group=self.group)
        return out, counts


class HybridEPBuffer:
    """DeepEP's of its branch hybrid-ep (deep_ep/hybrid_ep_buffer.py). Every rank of ``group`` calls each method, with
    as many tokens. A handle is the rows [n] of all ranks' tokens, their experts [n], and the tokens of a rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        **_: Any,
    ) -> None:
        self.group, self.width, self.most, self.own = group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        handle: Any = None,
        **given: Any,
    ) -> tuple[Any, ...]:
        """Rows [n, h] that this rank's experts take, expert by expert, with their probabilities [n] and counts."""
        assert given["scaling_factor"] is None
        assert hidden.shape == (self.most, self.width)  # no rank has a buffer for more, or sends less
        if handle is None:
            assert routing_map.dtype == torch.bool
            assert probs.dtype == torch.float32
            assert num_of_experts_per_rank == self.own
            mine = slice(self.group.rank() * self.own, (self.group.rank() + 1) * self.own)
            experts, rows = self._gathered(routing_map)[:, mine].T.nonzero(as_tuple=True)
            handle = (rows, experts + mine.start, routing_map.shape[1])
        rows, experts, _ = handle
        counts = torch.bincount(experts - self.group.rank() * self.own, minlength=self.own)
        weights = None if probs is None else self._gathered(probs)[rows, experts]
        return self._gathered(hidden)[rows], weights, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: Any, probs: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The sum [t, h] of what the ranks made of each token, and its experts' probabilities [t, E]."""
        rows, experts, total = handle
        out = hidden.new_zeros(self.group.size() * self.most, self.width).index_add(0, rows, hidden)
        if probs is None:
            return self._share(out), None
        return self._share(out), self._share(probs.new_zeros(len(out), total).index_put((rows, experts), probs))

    def _gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out

    def _share(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x.chunk(self.group.size())[self.group.rank()]


def install() -> None:
    """Make this process find the package, and megatron, which has been imported, use it."""
    import megatron.core.transformer.moe.fused_a2a as fused
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    for name in ("deep_ep", "deep_ep.utils", "hybrid_ep_cpp"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["deep_ep"].__dict__.update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer)
    sys.modules["deep_ep.utils"].__dict__.update(EventHandle=Event, EventOverlap=Event)
    importlib.reload(fused)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(dispatcher, name, getattr(fused, name))
