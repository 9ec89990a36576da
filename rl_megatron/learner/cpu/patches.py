"""Patches megatron-core (0.16.1, 0.19.2) to run on a machine without CUDA. `install` does nothing where there is CUDA.

Modules under ``megatron.core`` get a forwarding proxy in place of their global name ``torch``; torch itself is not
patched (a global TorchFunctionMode breaks under activation recompute). Each replacement below was shown to be
necessary: without it the named megatron code raises or computes wrong values.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from rl_megatron.learner.cpu.exchange import all_gather, reduce_scatter
from rl_megatron.learner.cpu.heap import keep_freed_memory

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
        _hide_what_wants_cuda()

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


def _at_once(own: Callable[..., None], upstream: Callable[..., Any]) -> Callable[..., Any]:
    """`own` of tensors and a group of gloo's, where megatron sums and does not compute meanwhile; else `upstream`.

    Gloo's reduce-scatter copies the whole buffer and all-reduces it, which sends twice as much as is needed, and both
    of its collectives pass through copies if megatron coalesces them.
    """

    @functools.wraps(upstream)
    def call(
        into: torch.Tensor, out_of: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool, **others: Any
    ) -> dist.Work | None:
        sums = others.get("op", dist.ReduceOp.SUM) == dist.ReduceOp.SUM
        if async_op or not sums or dist.get_backend(group) != "gloo":  # such as a dry run's
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


def _fuse_nothing() -> None:
    """Disable megatron's ``jit_fuser``, which is torch.compile and needs a C++ compiler here.

    Importing its dependencies takes a third of a rank's start, so they are imported only if megatron already was.
    """
    if "megatron.core" in sys.modules:
        from torch import _dynamo

        _dynamo.config.disable = True
        return
    jit = types.ModuleType("megatron.core.jit")
    jit.__dict__["jit_fuser"] = lambda function: function
    sys.modules[jit.__name__] = jit


def _hide_what_wants_cuda() -> None:
    """Hide these packages: megatron uses their layers and optimizers if they import, and fails on a partial install."""
    for name in _WANT_CUDA:
        sys.modules[name] = None  # type: ignore[assignment]  # makes Python raise ModuleNotFoundError


def install() -> None:
    """Make megatron.core importable code run here. Call once per process, before megatron is imported."""
    if not torch.cuda.is_available():
        _hide_what_wants_cuda()
        _fuse_nothing()
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 uses the name even without TransformerEngine, on GPUs too
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available():
        return
    keep_freed_memory()
    import megatron.core.dist_checkpointing.strategies.filesystem_async  # which 0.19 imports at the first save
    import megatron.core.dist_checkpointing.strategies.fully_parallel
    import megatron.core.dist_checkpointing.strategies.state_dict_saver  # so too
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
        buffers.__dict__[name] = _at_once(own, getattr(found, "upstream", found))
    proxy = _make_torch_proxy()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "__dict__", {}).get("torch") is torch:
            module.__dict__["torch"] = proxy
