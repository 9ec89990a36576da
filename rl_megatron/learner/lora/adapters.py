"""The adapters of one model chunk: parameters beside its linears' weights, merged into these while a pass runs.

The weight itself is frozen. A module multiplies by W + alpha / rank * B A, computed in one product when its forward
pass begins, and once more in its backward pass: autograd keeps none of the merged weights. That costs the products of
full training, and gives the bits that engines get from a push.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rl_megatron.config.sections.learner import LoraSection
from rl_megatron.learner.lora.merging import Linear, MergedPasses, tensor_group
from rl_megatron.learner.naming import global_name
from rl_megatron.weights.layouts.layout import Layout, coordinates
from rl_megatron.weights.layouts.lora import Adapted, adapted_rows

_EXPERTS = ".experts."


def add_adapters(models: Sequence[GPTModel], layout: Layout, lora: LoraSection, rank: int) -> list[Adapters]:
    """Freeze the chunks of a rank, whose weights are laid out by ``layout``, and give each its adapters, whose values
    are undefined. Call it before DistributedDataParallel."""
    at = coordinates(layout.dims, rank)
    rows: dict[str, Adapted] = {}
    for one in adapted_rows(layout.rows(), layout.shape, lora):
        for layer, stages in layout.layer_stages(one.base).items():
            for expert in range(layout.shape.num_experts if "{expert}" in one.base.name else 1):
                if at.pp in stages:
                    rows[one.base.name.format(layer=layer, expert=expert)] = one
    masks = {one.base.name: _mask(one, layout, at.on(one.base.axis)) for one in rows.values()}
    return [Adapters(model, rows, masks, lora) for model in models]


def adapters_of(model: GPTModel) -> Adapters | None:
    """The adapters that `add_adapters` gave a chunk."""
    found: Adapters | None = getattr(model, "adapters", None)
    return found


def _mask(one: Adapted, layout: Layout, chunk: int) -> Tensor | None:
    """Which part [rows, parts] each row of a local matrix belongs to, as ones; None if it has one part."""
    if len(one.parts) == 1:
        return None
    held = layout.chunks(one.base)[chunk]
    mask = torch.zeros(held[0].shape[0], len(one.parts))
    for piece in held:
        (first, last), *_ = piece.box
        mask[first:last, one.parts.index(piece.hf)] = 1
    return mask


class Adapters:
    """The adapters of one chunk of the model, on one rank."""

    def __init__(
        self, model: GPTModel, rows: Mapping[str, Adapted], masks: Mapping[str, Tensor | None], lora: LoraSection
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
        """(global name, parameter) of each adapter."""
        return ((global_name(self._model, name), p) for name, p in self._parameters())

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen weights alone."""
        for site in self._sites:
            site.off = True
        try:
            yield
        finally:
            for site in self._sites:
                site.off = False

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Put the merged weights into the model's own tensors, and the frozen ones back, to the bit, from a copy in the
        host's memory that the first call makes."""
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
        """What a checkpoint holds of the chunk: the adapters, under their global names, for any layout."""
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
        return ((name, p) for name, p in self._model.named_parameters() if ".lora_" in name)


def _with_gradient(_module: object, _inputs: object, out: Tensor) -> Tensor:
    """Activations that are computed again get gradients only if their input has some, and the embedding is frozen."""
    return out.requires_grad_() if torch.is_grad_enabled() and not out.requires_grad else out


def _data_group(expert: bool) -> Any:
    if expert:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
