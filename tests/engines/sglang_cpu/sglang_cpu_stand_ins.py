"""Lets PyPI's SGLang 0.5.21 run on a CPU: loaded by a .pth file in every process of its environment.

Patches what is imported, when it is imported, so that other programs of the environment pay nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_BOX = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SIZES = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_CONV = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, "
    "SymInt groups, SymInt offset_groups, bool use_mask"
)
_GRAD = "Tensor grad, Tensor rois, "
_OPS = (  # of torchvision 0.28, whose CUDA build does not load here
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_BOX}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward({_GRAD}float spatial_scale, SymInt pooled_height, SymInt pooled_width, {_SIZES}, "
    "int sampling_ratio, bool aligned) -> Tensor",
    f"ps_roi_align({_BOX}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward({_GRAD}Tensor channel_mapping, float spatial_scale, SymInt pooled_height, "
    f"SymInt pooled_width, int sampling_ratio, {_SIZES}) -> Tensor",
    f"roi_pool({_BOX}) -> (Tensor, Tensor)",
    f"_roi_pool_backward({_GRAD}Tensor argmax, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    f"{_SIZES}) -> Tensor",
    f"ps_roi_pool({_BOX}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward({_GRAD}Tensor channel_mapping, float spatial_scale, SymInt pooled_height, "
    f"SymInt pooled_width, {_SIZES}) -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_CONV}) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{_CONV}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_KEPT: list[object] = []  # a library's operators live as long as it does


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    for schema in _OPS:
        library.define(schema)


def _plain_memory(module: ModuleType) -> None:
    """Memory that CUDA need not know of."""

    def allocate(
        dims: Sequence[int],
        dtype: object,
        device: object,
        pin_memory: bool,
        allocator: object,
        registration_granularity_bytes: object = None,
    ) -> object:
        return allocator.allocate(dims, dtype=dtype, device=device)  # type: ignore[attr-defined]

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _nothing_pinned(module: ModuleType) -> None:
    """Adapters and their plain torch kernels pin a few numbers, for which there is no CUDA."""
    import torch

    class Torch(ModuleType):
        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

    def unpinned(make: Callable[..., object]) -> Callable[..., object]:
        return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)

    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign,assignment]
    plain = Torch("torch")
    plain.__dict__.update(zeros=unpinned(torch.zeros), tensor=unpinned(torch.tensor))
    module.__dict__["torch"] = plain


_AFTER = {
    "sglang.srt.mem_cache.pool_host.common": _plain_memory,
    "sglang.srt.lora.layers": _nothing_pinned,
    "sglang.srt.lora.backend.torch_backend": _nothing_pinned,
}


class _Patches(importlib.abc.MetaPathFinder):
    """Before or after an import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision" and not _KEPT:
            _declare_operators()
        if name in _AFTER:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = _then(spec.loader.exec_module, _AFTER[name])  # type: ignore[method-assign]
            return spec
        return None


def _fork(method: str | None, force: bool = False) -> None:
    """In place of ``multiprocessing.set_start_method``: forks have the imports, which take half of a start's CPU time.

    Forks are sound while OpenMP has one thread, as the tests run."""
    _set_start_method("fork", force=force)


def _then(execute: Callable[[ModuleType], None], patch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        execute(module)
        patch(module)

    return run


os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
_set_start_method = multiprocessing.set_start_method
if os.environ.get("OMP_NUM_THREADS") == "1":
    multiprocessing.set_start_method = _fork  # type: ignore[assignment]
sys.meta_path.insert(0, _Patches())
