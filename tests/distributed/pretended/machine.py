"""A machine with pretended GPUs: `install` patches torch in this process, before megatron is imported."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.distributed.pretended import collectives
from tests.distributed.pretended.tensor import Gpu, OnGpu, composite, device_among, is_gpu, plain, to_gpu

GPUS = 8
BYTES = 141 * 10**9
_MAKE = (
    *("zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "linspace", "eye", "empty_strided"),
    *("rand", "randn", "randint", "randperm"),
)
_MAKE_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
_MAKE_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
_TENSOR_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def install() -> None:
    """From now on ``device="cuda"`` makes tensors `OnGpu`, and groups are made over gloo."""
    import torch._dynamo  # looks up what is patched below

    torch.set_num_threads(1)
    _install_cuda()
    for name in _MAKE:
        setattr(torch, name, _making(getattr(torch, name)))
    for owner, names in ((torch, _MAKE_LIKE), (Tensor, _MAKE_NEW)):
        for name in names:
            setattr(owner, name, _making_like(getattr(owner, name)))
    _install_moves()
    _install_modules()
    _install_shared_memory()
    attention = torch.nn.functional.scaled_dot_product_attention  # with causal masks of its own
    torch.nn.functional.scaled_dot_product_attention = composite(attention)
    collectives.install()
    jit = types.ModuleType("megatron.core.jit")  # torch.compile of a GPU's code
    jit.__dict__.update(
        jit_fuser=lambda function: function,
        noop_decorator=lambda function: function,
        enable_jit_fuser=lambda: None,
        disable_jit_fuser=lambda: None,
    )
    sys.modules[jit.__name__] = jit


_thread = threading.local()


def refuse_another_gpus_thread(device: torch.device) -> None:
    """Raises RuntimeError in a thread whose current GPU is another: CUDA may open a context there."""
    if getattr(_thread, "gpu", 0) != device.index:
        raise RuntimeError(f"a wait for {device} in a thread that has not called torch.cuda.set_device")


class Stream:
    """A stream or event without work."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *given: Any, **named: Any) -> None:
        self.device = torch.device("cuda", Gpu.number)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        refuse_another_gpus_thread(self.device)

    def elapsed_time(self, other: Stream) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Callable[..., Stream]:
        return lambda *given, **named: Stream()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Generator:
    """A GPU's random numbers, which nothing here draws."""

    def __init__(self) -> None:
        self._state = torch.zeros(16, dtype=torch.uint8)

    def get_state(self) -> Tensor:
        return self._state

    def set_state(self, state: Tensor) -> None:
        self._state = state

    def clone_state(self) -> Generator:
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: Generator) -> None:
        pass

    def manual_seed(self, seed: int) -> Generator:
        return self

    def initial_seed(self) -> int:
        return 0


def _nothing(*given: Any, **named: Any) -> None:
    pass


def _no_state(*given: Any, **named: Any) -> Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    Gpu.number = _thread.gpu = Gpu.number if index is None else index


def _properties(*given: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name="a pretended GPU",
        uuid=f"GPU-{given[0] if given else Gpu.number}",
        total_memory=BYTES,
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        gcnArchName="",
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
    )


def _install_cuda() -> None:
    cuda, around = torch.cuda, lambda *given, **named: contextlib.nullcontext()
    patches: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *given, **named: True),
        **dict.fromkeys(("_lazy_init", "init", "synchronize", "empty_cache", "ipc_collect"), _nothing),
        **dict.fromkeys(
            ("manual_seed", "manual_seed_all", "set_rng_state", "reset_peak_memory_stats", "set_sync_debug_mode"),
            _nothing,
        ),
        **dict.fromkeys(("Stream", "Event"), Stream),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *given, **named: Stream()),
        **dict.fromkeys(("stream", "device"), around),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda *given, **named: 0),
        "device_count": lambda: GPUS,
        "current_device": lambda: Gpu.number,
        "set_device": _set_device,
        "get_device_capability": lambda *given: (9, 0),
        "get_device_properties": _properties,
        "get_device_name": lambda *given: _properties().name,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *given: 0, cudaHostUnregister=lambda *given: 0),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *given: (BYTES, BYTES),
        "get_rng_state": _no_state,
        "default_generators": tuple(Generator() for _ in range(GPUS)),
    }
    for name, value in patches.items():
        setattr(cuda, name, value)
    torch.accelerator.current_accelerator = lambda check_available=False: None  # a torch for GPUs would ask its driver
    cuda.random.get_rng_state, cuda.random.set_rng_state = _no_state, _nothing
    for name, dtype in _TENSOR_TYPES.items():
        setattr(cuda, name, _TensorType(name, (), {"tensor_dtype": dtype}))


class _TensorType(type):
    """torch.cuda.FloatTensor and others: `isinstance` asks them, and they make tensors."""

    tensor_dtype: torch.dtype

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, OnGpu) and x.dtype == cls.tensor_dtype

    def __call__(cls, data: Any = ()) -> OnGpu:
        return OnGpu(
            torch.empty(data, dtype=cls.tensor_dtype)
            if isinstance(data, int)
            else torch.tensor(data, dtype=cls.tensor_dtype)
        )


def _making(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``make`` that takes ``device=cuda``."""

    @functools.wraps(make)
    def made(*given: Any, device: Any = None, **named: Any) -> Tensor:
        named.pop("pin_memory", None)
        if not is_gpu(device):
            return make(*given, **named) if device is None else make(*given, device=device, **named)
        out = make(*map(plain, given), **named)
        return OnGpu(out.detach()).requires_grad_() if out.requires_grad else OnGpu(out)

    return made


def _making_like(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``make``, whose first argument has the device unless another is named."""

    @functools.wraps(make)
    def made(like: Tensor, *given: Any, device: Any = None, **named: Any) -> Tensor:
        named.pop("pin_memory", None)
        out = make(like, *given, **named)
        there = isinstance(like, OnGpu) if device is None else is_gpu(device)
        return OnGpu(out) if there else plain(out)

    return made


def _install_moves() -> None:
    move = Tensor.to

    def to(self: Tensor, *given: Any, **named: Any) -> Tensor:
        device, rest, others = device_among(given, named)
        if isinstance(self, OnGpu) or not is_gpu(device):
            return move(self, *given, **named)
        return to_gpu(move(self, *rest, **others) if rest or others else self)

    Tensor.to = to
    Tensor.cuda = lambda self, *given, **named: to(self, "cuda")
    Tensor.pin_memory = lambda self, *given, **named: self


@functools.cache
def _on_gpu(kind: type) -> type:
    """A kind of parameters on a GPU."""
    return type(kind.__name__, (OnGpu, kind), {})


def _install_modules() -> None:
    """Module.to makes new parameters for another device, which keep the old ones' class and attributes."""
    alike, apply = torch._has_compatible_shallow_copy_type, torch.nn.Module._apply

    def _apply(self: torch.nn.Module, function: Any, recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(function)
        before = dict(self._parameters)
        out = apply(self, function, False)
        for name, old in before.items():
            new = self._parameters[name]
            if new is not None and new is not old:
                new.__dict__.update({key: value for key, value in old.__dict__.items() if key != "_is_param"})
                if type(old) is not torch.nn.Parameter:
                    new.__class__ = _on_gpu(type(old))
        return out

    torch.nn.Module._apply = _apply
    torch._has_compatible_shallow_copy_type = lambda a, b: isinstance(a, OnGpu) == isinstance(b, OnGpu) and alike(a, b)


def _install_shared_memory() -> None:
    """CUDA IPC: a handle is the GPU's number, a file of this process and its size."""
    device = torch.UntypedStorage.device

    def share(self: torch.UntypedStorage) -> tuple[int, bytes, int]:
        descriptor, size = self._share_fd_cpu_()
        return Gpu.number, f"/proc/{os.getpid()}/fd/{descriptor}".encode(), size

    def open_shared(number: int, path: bytes, size: int) -> torch.UntypedStorage:
        storage = torch.UntypedStorage._new_shared_fd_cpu(os.open(path, os.O_RDWR), size)
        storage.on_gpu = True
        return storage

    torch.UntypedStorage._share_cuda_ = share
    torch.UntypedStorage._new_shared_cuda = staticmethod(open_shared)
    torch.UntypedStorage.device = property(
        lambda self: torch.device("cuda", Gpu.number) if getattr(self, "on_gpu", False) else device.__get__(self)
    )
