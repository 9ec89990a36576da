"""Makes megatron-core (0.16.1, 0.19.2) run on a machine without CUDA. `install` does nothing where there is CUDA.

Modules under ``megatron.core`` get a forwarding proxy in place of their global name ``torch``; torch itself is not
patched (a global TorchFunctionMode breaks under activation recompute). Each replacement below was shown to be
necessary: without it the named megatron code raises or computes wrong values.

Buffers are exchanged between ranks in place of gloo's collectives: through memory that ranks of one machine share, else
by sends. A loopback connection moves 1.6 GB/s each way while two ranks are busy, and takes their cores to do so.
Letters: D ranks of a group, n elements of a rank's shard.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import platform
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rl_megatron.config.sections.weights import NODE_MEMORY

CPU = torch.device("cpu")
_WANT_CUDA = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")  # megatron tries to import them
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn")


class _Proxy(types.ModuleType):
    """A module's stand-in: overrides first, everything else forwarded (and cached, so later look-ups are as fast)."""

    def __init__(self, target: types.ModuleType, **overrides: Any) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(overrides, _target=target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_target"], name)
        self.__dict__[name] = value
        return value


class _Stream:
    """A CUDA stream or event that does nothing (the all-to-all dispatcher records and waits on them)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _hide_cuda_packages()

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: _Stream()


def _names_cuda(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with ``device="cuda"`` (a literal in schedules, clip_grads and optimizers) read as the CPU."""

    @functools.wraps(factory)
    def build(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return factory(*args, device=CPU if _names_cuda(device) else device, **kwargs)

    return build


def _all_gather_uneven(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """gloo refuses unequal first dimensions (ETP in the all-to-all dispatcher): pad, gather, slice."""
    if len({x.shape for x in outputs}) == 1:
        work: dist.Work | None = dist.all_gather(outputs, tensor, group=group, async_op=async_op)
        return work
    longest = max(len(x) for x in outputs)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(gathered, padded, group=group)
    for output, whole in zip(outputs, gathered, strict=True):
        output.copy_(whole[: len(output)])
    return None


def _fused_all_reduce(own: Callable[..., None], upstream: Callable[..., Any]) -> Callable[..., Any]:
    """`own` of tensors and a group of gloo's, where megatron sums and does not compute meanwhile; else `upstream`.

    Gloo's reduce-scatter copies the whole buffer and all-reduces it, which sends twice as much as is needed, and both
    of its collectives pass through copies if megatron coalesces them.
    """

    @functools.wraps(upstream)
    def call(
        into: torch.Tensor, out_of: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool, **others: Any
    ) -> dist.Work | None:
        sums = others.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        if async_op or not sums or dist.get_backend(group) != "gloo":  # e.g. in a dry run
            work: dist.Work | None = upstream(into, out_of, group=group, async_op=async_op, **others)
            return work
        own(into, out_of, group=group)
        return None

    call.__dict__["upstream"] = upstream
    return call


def _make_torch_proxy() -> _Proxy:
    cuda = _Proxy(
        torch.cuda,
        current_device=lambda: CPU,
        current_stream=lambda *a, **k: _Stream(),
        default_stream=lambda *a, **k: _Stream(),
        stream=lambda *a, **k: contextlib.nullcontext(),
        Stream=_Stream,
        Event=_Stream,
        synchronize=lambda *a, **k: None,
        empty_cache=lambda: None,
        get_rng_state=lambda *a, **k: torch.get_rng_state(),
        set_rng_state=lambda state, *a, **k: torch.set_rng_state(state),
        manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _Proxy(torch, cuda=cuda, distributed=_Proxy(dist, all_gather=_all_gather_uneven), **factories)


class _PretendCuda(TorchFunctionMode):
    """`Tensor.type()` spelled as megatron's optimizers compare it ('torch.cuda.FloatTensor'); `Tensor.cuda()` stays."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(out, str) and not out.startswith("torch.cuda."):
            return out.replace("torch.", "torch.cuda.")
        return out


def _pretending(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _PretendCuda():
            return function(*args, **kwargs)

    return call


def _disable_jit_fuser() -> None:
    """Disables megatron's ``jit_fuser``, which is torch.compile and needs a C++ compiler here.

    Importing its dependencies takes a third of a rank's start, so they are imported only if megatron already was.
    """
    if "megatron.core" in sys.modules:
        from torch import _dynamo

        _dynamo.config.disable = True
        return
    jit = types.ModuleType("megatron.core.jit")
    jit.__dict__["jit_fuser"] = lambda function: function
    sys.modules[jit.__name__] = jit


def _hide_cuda_packages() -> None:
    """Hides these packages: megatron uses what it can import of them, and fails on a partial install."""
    for name in _WANT_CUDA:
        sys.modules[name] = None  # type: ignore[assignment]  # makes Python raise ModuleNotFoundError


def install() -> None:
    """Makes megatron.core import and run here. Call once per process, before megatron is imported."""
    if not torch.cuda.is_available():
        _hide_cuda_packages()
        _disable_jit_fuser()
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 uses the name even without TransformerEngine, on GPUs too
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available():
        return
    keep_freed_memory()
    import megatron.core.dist_checkpointing.strategies.filesystem_async  # 0.19 imports it at the first save
    import megatron.core.dist_checkpointing.strategies.fully_parallel
    import megatron.core.dist_checkpointing.strategies.state_dict_saver  # this too
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.models.common.language_module.language_module as language_module
    import megatron.core.models.gpt
    import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
    import megatron.core.optimizer.optimizer as optimizer
    import megatron.core.pipeline_parallel  # noqa: F401  imported to be given the proxy below
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # "CPU RNG state changed within GPU RNG context"
    to_cpu = token_dispatcher.maybe_move_tensor_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else to_cpu(tensor, as_numpy, record_stream)
    )
    half = optimizer.Float16OptimizerWithFloat16Params
    half.__init__ = _pretending(half.__init__)
    sharded = distributed_optimizer.DistributedOptimizer
    sharded.__init__ = _pretending(sharded.__init__)
    language = language_module.LanguageModule  # copies tied embeddings to the last pipeline stage
    language.setup_embeddings_and_output_layer = _pretending(language.setup_embeddings_and_output_layer)
    for name, own in (("dist_reduce_scatter_func", reduce_scatter), ("dist_all_gather_func", all_gather)):
        found = buffers.__dict__[name]
        buffers.__dict__[name] = _fused_all_reduce(own, getattr(found, "upstream", found))
    proxy = _make_torch_proxy()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "__dict__", {}).get("torch") is torch:
            module.__dict__["torch"] = proxy


SHARED_BYTES = 32 << 20  # shared by a group
_MOST_RANKS = 8  # ranks that share them; with more, a piece would be smaller than the wait for it is worth
_LONGEST_NAME = 64


def reduce_scatter(own: Tensor, buffer: Tensor, *, group: dist.ProcessGroup) -> None:
    """Sums a rank's shard of all ranks' ``buffer`` [D * n] into its ``own`` [n], which may be its shard itself. Every
    rank of the group calls it."""
    shards = buffer.chunk(group.size())
    _put(own, shards[group.rank()])
    if (shared := _shared_by(group)) is not None:
        shared.sum(own, shards, group)
        return
    arriving = {rank: torch.empty_like(own) for rank in _others(group)}
    _send({rank: (shards[rank], shard) for rank, shard in arriving.items()}, group)
    for shard in arriving.values():
        own.add_(shard)


def all_gather(buffer: Tensor, own: Tensor, *, group: dist.ProcessGroup) -> None:
    """Writes each rank's ``own`` [n] into its shard of all ranks' ``buffer`` [D * n], which may be its place already.
    Every rank of the group calls it."""
    shards = buffer.chunk(group.size())
    _put(shards[group.rank()], own)
    if (shared := _shared_by(group)) is not None:
        shared.gather(shards, own, group)
        return
    _send({rank: (own, shards[rank]) for rank in _others(group)}, group)


def _put(into: Tensor, x: Tensor) -> None:
    if into.data_ptr() != x.data_ptr():
        into.copy_(x)


def _others(group: dist.ProcessGroup) -> list[int]:
    """Returns the group's other ranks, each rank beginning with a different one."""
    rank, size = group.rank(), group.size()
    return [(rank + step) % size for step in range(1, size)]


def _send(pairs: dict[int, tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> None:
    """Sends the first tensor of a pair to the rank that it is for, and receives the second from it."""
    calls = []
    for rank, (leaving, arriving) in pairs.items():
        calls.append(dist.P2POp(dist.isend, leaving, group=group, group_peer=rank))
        calls.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=rank))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


class _Shared:
    """Memory of a group's ranks: two halves, in which each has a row of D pieces. While ranks read one half, they may
    already write the other: when all have written it, all have read the one. It does not keep the group alive."""

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        self._halves = torch.frombuffer(memory, dtype=torch.uint8).view(2, size, size, -1)
        self._turn = 0

    def sum(self, own: Tensor, shards: tuple[Tensor, ...], group: dist.ProcessGroup) -> None:
        """Adds the others' shards to ``own``, in the order of `_others`."""
        mine, others = group.rank(), _others(group)
        for part in _parts(own, self._halves[0, 0, 0].nbytes):
            half = self._next()
            for rank in others:
                _as(half[mine, rank], own[part]).copy_(shards[rank][part])
            _meet(group)
            for rank in others:
                own[part] += _as(half[rank, mine], own[part])

    def gather(self, shards: tuple[Tensor, ...], own: Tensor, group: dist.ProcessGroup) -> None:
        """Writes the others' ``own`` into their shards."""
        for part in _parts(own, self._halves[0, 0].nbytes):
            rows = self._next().flatten(1)
            _as(rows[group.rank()], own[part]).copy_(own[part])
            _meet(group)
            for rank in _others(group):
                shards[rank][part] = _as(rows[rank], own[part])

    def _next(self) -> Tensor:
        self._turn = 1 - self._turn
        return self._halves[self._turn]


def _meet(group: dist.ProcessGroup) -> None:
    group.allreduce([torch.zeros(1)]).wait()  # immediate: megatron makes torch's functions put calls off


def _parts(x: Tensor, num_bytes: int) -> Iterator[slice]:
    step = num_bytes // x.element_size()
    return (slice(start, min(start + step, len(x))) for start in range(0, len(x), step))


def _as(memory: Tensor, x: Tensor) -> Tensor:
    """Returns the first bytes of ``memory`` as a tensor like ``x``."""
    return memory[: x.nbytes].view(x.dtype)


_SHARED: WeakKeyDictionary[dist.ProcessGroup, _Shared | None] = WeakKeyDictionary()


def _shared_by(group: dist.ProcessGroup) -> _Shared | None:
    """Returns the memory that a group's ranks share, which its first exchange makes. None for ranks on several
    machines, or without room for it."""
    if group not in _SHARED:
        _SHARED[group] = _make(group) if 1 < group.size() <= _MOST_RANKS else None
    return _SHARED[group]


def _make(group: dist.ProcessGroup) -> _Shared | None:
    """The first rank makes a file, whose name goes once the others have opened it."""
    pieces = 2 * group.size() ** 2
    size = SHARED_BYTES // pieces // 64 * 64 * pieces
    file: IO[bytes] | None = None
    name = ""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there is no room for it
            if group.rank() == 0:
                made = stack.enter_context(tempfile.NamedTemporaryFile(prefix="rl_megatron-", dir=NODE_MEMORY))
                os.posix_fallocate(made.fileno(), 0, size)
                file, name = made.file, Path(made.name).name
        name = _share_name(name, group)
        with contextlib.suppress(OSError):  # it is on another machine
            if group.rank() and name:
                file = stack.enter_context((NODE_MEMORY / name).open("r+b"))
        have = torch.tensor([int(file is not None)])
        group.allreduce([have], dist.ReduceOp.MIN).wait()
        return _Shared(mmap.mmap(file.fileno(), size), group.size()) if file is not None and have.item() else None


def _share_name(name: str, group: dist.ProcessGroup) -> str:
    """Returns the first rank's name."""
    told = torch.zeros(_LONGEST_NAME, dtype=torch.uint8)
    told[: len(name)] = torch.tensor([*name.encode()], dtype=torch.uint8)
    group.broadcast(told, 0).wait()
    return bytes(told.tolist()).rstrip(b"\0").decode()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h's; the largest values it takes are set below
_TRIM_STEPS = 25


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory: returning and faulting in layers' large temporaries costs 8 % of a tiny step."""
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


class Heap:
    """Trims the memory that glibc keeps after `keep_freed_memory`, which steps of different sizes fragment."""

    def __init__(self) -> None:
        self._trim = None if torch.cuda.is_available() else getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._steps = 0

    def step(self) -> None:
        """Returns all free memory to the system at every `_TRIM_STEPS`-th call; the next step faults it in again."""
        self._steps += 1
        if self._trim is not None and self._steps % _TRIM_STEPS == 0:
            self._trim(0)
