"""The adapters of a model on one rank: parameters added to its linears, merged into their weights while a pass runs.

The weight itself is frozen. A module multiplies by W + alpha / rank * B A. It computes this in one product when its
forward pass begins, and again in its backward pass: autograd does not keep the merged weights. That costs the products
of full training, and gives the bits that engines get from a push.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.feature import Built, ChunkAdapters, LearnerHooks
from rl_megatron.features.lora.feature import LoraSection, lora_section
from rl_megatron.features.lora.files import raise_other_base, stored_lora, write_lora
from rl_megatron.features.lora.merging import base_digest
from rl_megatron.features.lora.rows import AdaptedRow, adapted_rows, adapter_name
from rl_megatron.learner.parameters import global_name
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.families import megatron_layout
from rl_megatron.weights.layouts.layout import Layout, coordinates

_EXPERTS = ".experts."


def make_hooks(built: Built) -> LoraHooks:
    """Returns the hooks that record and check the model of the run's checkpoints of adapters. Every rank calls it."""
    return LoraHooks(lora_section(built.learner))


class LoraHooks(LearnerHooks):
    """Records in checkpoints of adapters which model they belong to, on the first rank."""

    def __init__(self, lora: LoraSection) -> None:
        self._lora = lora
        self._base: str | None = None  # `base_digest` of the adapters' model, if known

    @override
    def started(self, folder: Path, family: str | None) -> None:
        """Raises as `hf_tensors`."""
        if dist.get_rank() == 0:
            self._base = base_digest(folder, family)

    @override
    def saving(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            write_lora(folder, self._lora, self._base)

    @override
    def loading(self, folder: Path) -> None:
        if self._base is not None and (held := stored_lora(folder)) is not None:
            raise_other_base(folder, held, self._base, "model.path")


def add_adapters(shape: ModelShape, learner: LearnerSection, models: Sequence[GPTModel]) -> None:
    """Freezes the chunks of this rank's policy, and gives each its adapters, with undefined values."""
    layout, lora = megatron_layout(shape, learner.dims, stages=learner.stages), lora_section(learner)
    at = coordinates(layout.dims, dist.get_rank())
    rows: dict[str, AdaptedRow] = {}
    for one in adapted_rows(layout.rows(), layout.shape, lora):
        for layer, stages in layout.layer_stages(one.base).items():
            for expert in range(layout.shape.num_experts if "{expert}" in one.base.name else 1):
                if at.pp in stages:
                    rows[one.base.name.format(layer=layer, expert=expert)] = one
    masks = {one.base.name: _mask(one, layout, at.index_on(one.base.axis)) for one in rows.values()}
    for model in models:
        Adapters(model, rows, masks, lora)


def _mask(one: AdaptedRow, layout: Layout, chunk: int) -> Tensor | None:
    """Returns ones where a row of a local matrix belongs to a part, [rows, parts]; None if it has one part."""
    if len(one.parts) == 1:
        return None
    held = layout.chunks(one.base)[chunk]
    mask = torch.zeros(held[0].shape[0], len(one.parts))
    for piece in held:
        (first, last), *_ = piece.box
        mask[first:last, one.parts.index(piece.hf)] = 1
    return mask


class Adapters(ChunkAdapters):
    """The adapters of one chunk of the model, on one rank."""

    mark = ".lora_"

    def __init__(
        self, model: GPTModel, rows: Mapping[str, AdaptedRow], masks: Mapping[str, Tensor | None], lora: LoraSection
    ) -> None:
        model.requires_grad_(False)
        self._model, self._base = model, dict[int, Tensor]()
        sites: dict[str, list[Linear]] = {}
        for place, module in model.named_modules():
            weights = [name for name, _ in module.named_parameters(recurse=False)]
            found = {name: one for name in weights if (one := rows.get(global_name(model, f"{place}.{name}")))}
            if found:
                one = next(iter(found.values()))
                linear = Linear(module, tuple(found), one, masks[one.base.name], lora.alpha / one.rank)
                host = place.rpartition(_EXPERTS)[0] + _EXPERTS[:-1] if _EXPERTS in place else place
                sites.setdefault(host, []).append(linear)
        self._sites = [MergedPasses(model.get_submodule(host), linears) for host, linears in sites.items()]
        model.adapters = self
        if model.pre_process:
            model.embedding.register_forward_hook(_with_gradient)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The adapters under global names."""
        return {name: p.data for name, p in self.parameters()}

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Returns (global name, parameter) of each adapter."""
        return ((global_name(self._model, name), p) for name, p in self._parameters())

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Makes passes compute with only the frozen weights."""
        for site in self._sites:
            site.off = True
        try:
            yield
        finally:
            for site in self._sites:
                site.off = False

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Puts the merged weights into the model's own tensors, and the frozen ones back, to the bit. These come from a
        copy in the host's memory that the first call makes."""
        linears = [linear for site in self._sites for linear in site.linears]
        try:
            for linear in linears:
                for weight, merged in zip(linear.weights, linear.merged_now(), strict=True):
                    if id(weight) not in self._base:
                        kept = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda)
                        self._base[id(weight)] = kept.copy_(weight.data)
                    weight.data.copy_(merged)
            yield
        finally:
            for linear in linears:
                for weight in linear.weights:
                    if id(weight) in self._base:
                        weight.data.copy_(self._base[id(weight)])

    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns the chunk's part of a checkpoint: the adapters, under their global names, for any layout."""
        out: dict[str, Any] = {}
        for name, parameter in self._parameters():
            key, expert = global_name(self._model, name), not getattr(parameter, "allreduce", True)
            cut = {} if parameter.cut is None else {key: parameter.cut}
            (shard,) = make_sharded_tensors_for_checkpoint(
                {key: parameter},
                "",
                cut,
                (),
                tp_group=tensor_group(expert=expert),
                dp_cp_group=_data_group(expert),
            ).values()
            halves = ".linear_fc1.lora_B" in name
            out[name] = apply_swiglu_sharded_factory(shard, ()) if halves else shard
        return out

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        return ((name, p) for name, p in self._model.named_parameters() if self.mark in name)


def _with_gradient(_module: object, _inputs: object, out: Tensor) -> Tensor:
    """Gives the frozen embedding's output a gradient: recomputed activations get one only if their input has one."""
    return out.requires_grad_() if torch.is_grad_enabled() and not out.requires_grad else out


def _data_group(expert: bool) -> Any:
    if expert:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def tensor_group(*, expert: bool) -> dist.ProcessGroup:
    """Returns the ranks among which a weight is cut."""
    kind = "expert_tensor_parallel" if expert else "tensor_model_parallel"
    group: dist.ProcessGroup = getattr(parallel_state, f"get_{kind}_group")()
    return group


class Linear:
    """A module's weights [out, in], of one linear or of one an expert, and their adapters, which it gets here."""

    def __init__(
        self, module: torch.nn.Module, names: Sequence[str], row: AdaptedRow, mask: Tensor | None, scale: float
    ) -> None:
        self.module, self.names, self._scale, self._mask = module, tuple(names), scale, mask
        self.weights: list[Any] = [getattr(module, name) for name in names]
        self._expert = "{expert}" in row.base.name
        self._group = tensor_group(expert=self._expert)
        by_rows, cut = row.base.dim == 0, row.base.axis is not None
        shared = self._group.size() > 1 and cut
        self._shared = ("A" if by_rows else "B") if shared else None  # all ranks of the group add to its gradient
        for weight, name in zip(self.weights, names, strict=True):
            rows, columns = weight.shape
            sizes = {"A": (row.rank * len(row.parts), columns), "B": (rows, row.rank)}
            dims = {"A": None if by_rows or not cut else 1, "B": 0 if by_rows and cut else None}
            for which, size in sizes.items():
                self._register(weight, adapter_name(name, which), size, dims[which])

    def _register(self, weight: Any, name: str, size: tuple[int, int], cut: int | None) -> None:
        """Registers a parameter with the attributes by which megatron sums and counts gradients."""
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
        """Returns W + scale * B A of each weight, rounded once, with gradients for A and B."""
        factors = {which: [getattr(self.module, adapter_name(n, which)) for n in self.names] for which in "AB"}
        if self._shared and torch.is_grad_enabled():
            factors[self._shared] = list(_Shared.apply(self._group, *factors[self._shared]))  # type: ignore[no-untyped-call]
        return [
            torch.addmm(weight, self._spread(b), a, alpha=self._scale)
            for weight, a, b in zip(self.weights, factors["A"], factors["B"], strict=True)
        ]

    @torch.no_grad()
    def merged_now(self) -> list[Tensor]:
        """Runs `merge` without gradients."""
        return self.merge()

    def _spread(self, b: Tensor) -> Tensor:
        """Maps [rows, rank] to [rows, parts * rank]: a row multiplies only the A of its own part."""
        if self._mask is None:
            return b
        if self._mask.device != b.device or self._mask.dtype != b.dtype:
            self._mask = self._mask.to(b.device, b.dtype)
        return (self._mask[:, :, None] * b[:, None]).flatten(1)


class _Shared(torch.autograd.Function):
    """Returns each tensor unchanged; in the backward pass sums their gradients over a group, in float32."""

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
    """A placeholder for a merged weight, or a view of one, that autograd would keep."""

    weight: _Pass
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _Pass:
    """One forward pass. Its merged weights are made again when the backward pass reads the first of them. They are
    freed with the last one that autograd keeps for it."""

    def __init__(self, linears: Sequence[Linear], merged: Sequence[Tensor]) -> None:
        self._linears, self._again = linears, list[Tensor]()
        self._numbers = {tensor.untyped_storage().data_ptr(): n for n, tensor in enumerate(merged)}

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """Returns the object that autograd keeps for a tensor."""
        number = self._numbers.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if number is None:
            return tensor
        return _Kept(self, number, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        """Returns the tensor that autograd reads."""
        if isinstance(kept, Tensor):
            return kept
        if not self._again:
            self._again = [weight for linear in self._linears for weight in linear.merged_now()]
        return self._again[kept.number].as_strided(kept.size, kept.stride, kept.offset)


class MergedPasses:
    """A module that computes its passes with merged weights of ``linears``, which are its own or its parts'."""

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
            linear.module.__dict__.update(zip(linear.names, weights, strict=True))  # precede the parameters
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
