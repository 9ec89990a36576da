"""Merges the adapters of a linear into its weights, inside of autograd, and forgets the result between the passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from rl_megatron.weights.layouts.lora import Adapted, adapter_name


def tensor_group(*, expert: bool) -> dist.ProcessGroup:
    """The ranks among which a weight is cut."""
    kind = "expert_tensor_parallel" if expert else "tensor_model_parallel"
    group: dist.ProcessGroup = getattr(parallel_state, f"get_{kind}_group")()
    return group


class Linear:
    """A module's weights [out, in], of one linear or of one an expert, and their adapters, which it gets here."""

    def __init__(
        self, module: torch.nn.Module, names: Sequence[str], row: Adapted, mask: Tensor | None, scale: float
    ) -> None:
        self.module, self.names, self._scale, self._mask = module, tuple(names), scale, mask
        self.weights: list[Any] = [getattr(module, name) for name in names]
        self._expert = "{expert}" in row.base.name
        self._group = tensor_group(expert=self._expert)
        by_rows, cut = row.base.dim == 0, row.base.axis is not None
        shared = self._group.size() > 1 and cut
        self._shared = ("A" if by_rows else "B") if shared else None  # whose gradient all ranks of the group add to
        for weight, name in zip(self.weights, names, strict=True):
            rows, columns = weight.shape
            sizes = {"A": (row.rank * len(row.parts), columns), "B": (rows, row.rank)}
            dims = {"A": None if by_rows or not cut else 1, "B": 0 if by_rows and cut else None}
            for which, size in sizes.items():
                self._register(weight, adapter_name(name, which), size, dims[which])

    def _register(self, weight: Any, name: str, size: tuple[int, int], cut: int | None) -> None:
        """Megatron sums and counts gradients by these attributes."""
        parameter: Any = torch.nn.Parameter(torch.empty(size, dtype=weight.dtype, device=weight.device))
        parameter.cut = cut
        if self._expert:
            parameter.allreduce = False
            parameter.shared = cut is None and self._group.rank() > 0  # counted on one of its ranks
        if cut is not None or self._expert:
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, cut or 0, 1
        elif getattr(weight, "sequence_parallel", False):  # a whole weight, by which each rank multiplies its tokens
            parameter.sequence_parallel = True
        self.module.register_parameter(name, parameter)

    def merge(self) -> list[Tensor]:
        """W + scale * B A of each weight, rounded once, with gradients for A and B."""
        factors = {which: [getattr(self.module, adapter_name(n, which)) for n in self.names] for which in "AB"}
        if self._shared and torch.is_grad_enabled():
            factors[self._shared] = list(_Shared.apply(self._group, *factors[self._shared]))  # type: ignore[no-untyped-call]
        return [
            torch.addmm(weight, self._spread(b), a, alpha=self._scale)
            for weight, a, b in zip(self.weights, factors["A"], factors["B"], strict=True)
        ]

    @torch.no_grad()
    def merged_now(self) -> list[Tensor]:
        """`merge` without gradients."""
        return self.merge()

    def _spread(self, b: Tensor) -> Tensor:
        """[rows, rank] -> [rows, parts * rank]: a row multiplies the A of its own part alone."""
        if self._mask is None:
            return b
        if self._mask.device != b.device or self._mask.dtype != b.dtype:
            self._mask = self._mask.to(b.device, b.dtype)
        return (self._mask[:, :, None] * b[:, None]).flatten(1)


class _Shared(torch.autograd.Function):
    """Gives each tensor as it is; in the backward pass adds their gradients up over a group, in float32."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([grad.float().flatten() for grad in grads])
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad).to(grad.dtype) for part, grad in zip(parts, grads, strict=True))


class _Kept(NamedTuple):
    """Stands for a merged weight, or a view of one, that autograd would keep."""

    of: _Pass
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Pass:
    """One forward pass. Its merged weights are made again when the backward pass reads the first, and go with the last
    that autograd keeps for it."""

    def __init__(self, linears: Sequence[Linear], merged: Sequence[Tensor]) -> None:
        self._linears, self._again = linears, list[Tensor]()
        self._numbers = {tensor.untyped_storage().data_ptr(): n for n, tensor in enumerate(merged)}

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """What autograd keeps of a tensor."""
        number = self._numbers.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if number is None:
            return tensor
        return _Kept(self, number, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        """The tensor that autograd reads."""
        if isinstance(kept, Tensor):
            return kept
        if not self._again:
            self._again = [weight for linear in self._linears for weight in linear.merged_now()]
        return self._again[kept.number].as_strided(kept.size, kept.stride, kept.offset)


class MergedPasses:
    """A module in whose passes ``linears``, its own or its parts', have merged weights in place of their own."""

    def __init__(self, host: torch.nn.Module, linears: Sequence[Linear]) -> None:
        self.linears, self.off = linears, False
        self._hooks: saved_tensors_hooks | None = None
        host.register_forward_pre_hook(self._begin)
        host.register_forward_hook(self._end, always_call=True)

    def _begin(self, *_: object) -> None:
        if self.off:
            return
        merged = [linear.merge() for linear in self.linears]
        for linear, weights in zip(self.linears, merged, strict=True):
            linear.module.__dict__.update(zip(linear.names, weights, strict=True))  # found before the parameters
        if torch.is_grad_enabled():
            one = _Pass(self.linears, [weight for weights in merged for weight in weights])
            self._hooks = saved_tensors_hooks(one.pack, one.unpack)
            self._hooks.__enter__()

    def _end(self, *_: object) -> None:
        for linear in self.linears:
            for name in linear.names:
                linear.module.__dict__.pop(name, None)
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None
