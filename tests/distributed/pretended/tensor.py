"""Tensors that say they are on a GPU and compute on the CPU, and refuse what a GPU's would.

Python sees ``device=cuda:n``, ``is_cuda`` and ``type()`` as of a GPU; C++ sees a CPU tensor, so autograd, gloo and
every kernel work. An operation of tensors of both devices raises, and what makes the host wait for the device is
counted (`waits`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from tests.distributed.pretended import collectives, waits

_COPIES = ("copy_", "_foreach_copy_")
_INTO_AUTOGRAD = {"_engine_run_backward", "custom_backward"}  # torch's call of its engine, and megatron-core's own
_MAY_MIX = {*_COPIES, "_to_copy", "set_", "_has_compatible_shallow_copy_type"}
_NESTED = (tuple, list, dict)
_READ_ON_THE_HOST = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "repeat_interleave"}


class Gpu:
    """The GPU of this process."""

    number = 0
    in_composite = False  # a function of several operations, whose C++ makes tensors on the host here


class OnGpu(Tensor):
    """A tensor of this process's GPU; its memory is the host's."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        return inner if isinstance(inner, OnGpu) else Tensor._make_subclass(cls, inner, inner.requires_grad)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", Gpu.number)

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return Gpu.number

    def __repr__(self, **given: Any) -> str:
        return f"OnGpu({plain(self.detach())!r})"

    def __format__(self, how: str) -> str:
        return format(plain(self.detach()), how)

    def numpy(self, *given: Any, **named: Any) -> Any:
        raise TypeError(f"can't convert cuda device type tensor to numpy: {waits.caller()}")

    __array__ = numpy

    def pin_memory(self, *given: Any, **named: Any) -> Any:
        raise RuntimeError(f"cannot pin '{self.type()}': {waits.caller()}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        waits.count()
        return plain(self.detach()).clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> OnGpu:
        copy = OnGpu(plain(self.detach()).clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def is_pinned(self, *given: Any, **named: Any) -> bool:
        return False

    def record_stream(self, stream: object) -> None:
        pass

    def cuda(self, *given: Any, **named: Any) -> OnGpu:
        return self

    def type(self, dtype: Any = None, **named: Any) -> Any:
        if dtype is None:
            return Tensor.type(self).replace("torch.", "torch.cuda.")
        return self.to(dtype)

    def cpu(self, *given: Any, **named: Any) -> Tensor:
        waits.count()
        return _ToHost.apply(self) if self.requires_grad else plain(self).clone()

    def item(self) -> Any:
        waits.count()
        return plain(self.detach()).item()

    def tolist(self) -> Any:
        waits.count()
        return plain(self.detach()).tolist()

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    __index__ = __int__

    def to(self, *given: Any, **named: Any) -> Tensor:
        device, rest, others = device_among(given, named)
        if device is not None and device.type == "cpu":
            moved = self.cpu()
            return moved.to(*rest, **others) if rest or others else moved
        return Tensor.to(self, *rest, **others) if rest or others else self

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = _tensors_of((*args, *kwargs.values()) if kwargs else args)
        of_host = [tensor for tensor in tensors if not isinstance(tensor, OnGpu)]
        space, name = _name_of(function)
        if space == "c10d":
            collectives.check(name, tensors, of_host)
        elif of_host and name not in _MAY_MIX and not Gpu.in_composite and not _by_autograd():
            refuse_mixed(name, args, of_host)
        refuse_unordered(name, args)
        _count_waits(name, args, tensors)
        undispatched = torch._C._DisableTorchDispatch()  # until it is deleted
        try:
            out = function(*args, **kwargs) if kwargs else function(*args)
        finally:
            del undispatched
        if type(out) is Tensor and not of_host:  # most are
            return OnGpu(out)
        if name in _COPIES and not isinstance(tree_leaves(args[0])[0], OnGpu):
            return out

        def of_gpu(x: Any) -> Any:
            return OnGpu(x) if type(x) is Tensor and not any(x is t for t in of_host) else x

        return tree_map(of_gpu, out) if isinstance(out, _NESTED) else of_gpu(out)


@functools.cache
def _name_of(function: Any) -> tuple[str, str]:
    """Of an operation: its namespace, and its name without the overload's."""
    space, name = str(function).split(".")[:2]
    return space, name


def _tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, those in lists too: most operations have none, and walking a tree is slow."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _NESTED):
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def refuse_mixed(name: str, args: Sequence[Any], of_host: Sequence[Tensor]) -> None:
    """Raises RuntimeError, as CUDA does, for an operation of tensors of both devices.

    Scalars may be on the host, but for fused optimizers; so may indices into a tensor of the GPU.
    """
    bad = [t for t in of_host if t.dim() or name.startswith("_fused_adam")]
    if "index" in name and isinstance(args[0], OnGpu) and len(args) > 1:
        indices = tree_leaves(args[1])
        bad = [t for t in bad if not any(t is index for index in indices)]
    if bad:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in bad)
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {name} at {waits.caller()} got {shapes} of the host"
        )


def refuse_unordered(name: str, args: Sequence[Any]) -> None:
    """Raises RuntimeError, as torch.use_deterministic_algorithms does, for what its documentation lists of GPUs'
    operations that have no deterministic kernel, and a decoder might call."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    unordered = {
        "put_": True,
        "histc": True,
        "nll_loss_forward": True,
        "bincount": len(args) > 1 and args[1] is not None,
        "median": len(args) > 1,  # with indices
        "cumsum": isinstance(args[0], Tensor) and args[0].dtype.is_floating_point,
        "scatter_reduce": any(isinstance(arg, str) and arg == "prod" for arg in args),
    }
    if unordered.get(name if name == "put_" else name.rstrip("_")):
        raise RuntimeError(f"{name}_cuda_kernel does not have a deterministic implementation: {waits.caller()}")


def composite(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose arguments are all on one device, and whose own tensors are not checked."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len({isinstance(tensor, OnGpu) for tensor in tensors}) > 1:
            refuse_mixed(function.__name__, args, [tensor for tensor in tensors if not isinstance(tensor, OnGpu)])
        Gpu.in_composite = True
        try:
            return function(*args, **kwargs)
        finally:
            Gpu.in_composite = False

    return call


def _by_autograd() -> bool:
    """Whether C++ autograd makes the call: its own factories make host tensors here, which on a GPU they would not."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in _INTO_AUTOGRAD


def _count_waits(name: str, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    by_mask = name.startswith("index") and any(t.dtype == torch.bool for t in tensors[1:]) and not _by_autograd()
    if name in _READ_ON_THE_HOST or "unique" in name or by_mask:
        waits.count()
    if name in _COPIES and len(args) > 1:
        to, frm = (next(iter(tree_leaves(side)), None) for side in args[:2])
        if isinstance(frm, OnGpu) and not isinstance(to, OnGpu):
            waits.count()


def plain(tensor: Tensor) -> Tensor:
    """The host's tensor beneath; the same memory."""
    if not isinstance(tensor, OnGpu):
        return tensor
    with no_dispatch():
        return Tensor._make_subclass(Tensor, tensor.detach() if tensor.requires_grad else tensor)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return plain(x.detach()).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return OnGpu(gradient)


class _ToGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return OnGpu(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return plain(gradient).clone()


def to_gpu(tensor: Tensor) -> OnGpu:
    """A copy, as ``tensor.cuda()``."""
    return _ToGpu.apply(tensor) if tensor.requires_grad else OnGpu(tensor.detach().clone())


def is_gpu(device: Any) -> bool:
    """Whether an argument ``device`` means a GPU; so does a number."""
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def device_among(
    given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[torch.device | None, list[Any], dict[str, Any]]:
    """The device that arguments of `Tensor.to` name, and the other arguments, without ``non_blocking``."""
    others = {name: value for name, value in named.items() if name not in ("device", "non_blocking")}
    rest, device = list(given), named.get("device")
    if rest and isinstance(rest[0], Tensor):
        device, rest[0] = rest[0].device, rest[0].dtype
    elif rest and (isinstance(rest[0], str | torch.device) or type(rest[0]) is int):
        device = rest.pop(0)
    rest = [value for value in rest if value is not None and not isinstance(value, bool)]
    if isinstance(device, int):
        device = torch.device("cuda", device)
    return None if device is None else torch.device(device), rest, others
