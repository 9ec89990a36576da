"""NCCL's rules for collectives of pretended GPUs; gloo carries them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from tests.distributed.pretended import waits

DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""NCCL's; not int16, nor the other unsigned integers."""
CALLS: list[str] = []
"""The collectives of GPUs' tensors of this process, in order."""


def check(name: str, tensors: Sequence[Tensor], of_host: Sequence[Tensor]) -> None:
    """Raises RuntimeError for a call of GPUs' tensors that NCCL refuses."""
    CALLS.append(name)
    if of_host:
        raise RuntimeError(f"{name} has tensors of the host among those of GPUs: {waits.caller()}")
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise RuntimeError(f"{name} of {tensor.dtype}, which NCCL does not know: {waits.caller()}")
        with no_dispatch():
            dense = tensor.is_contiguous()
        if not dense:
            raise RuntimeError(
                f"{name}: Tensors must be contiguous, not {tuple(tensor.shape)} with strides {tensor.stride()}: "
                f"{waits.caller()}"
            )


def install() -> None:
    """Groups over gloo, whatever backend they are made with."""
    init, new_group = dist.init_process_group, dist.new_group

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *given: Any, **named: Any) -> None:
        named.pop("device_id", None)
        init("gloo", *given, **named)

    @functools.wraps(new_group)
    def make_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *given: Any, **named: Any) -> Any:
        return new_group(ranks, timeout, "gloo", *given, **{**named, "pg_options": None})

    gather = dist.all_gather

    @functools.wraps(gather)
    def all_gather(outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return gather(outputs, tensor, group=group, async_op=async_op)
        for rank, output in enumerate(outputs):  # as NCCL gathers tensors of unlike shapes, which gloo does not
            if rank == dist.get_rank(group):
                output.copy_(tensor)
            dist.broadcast(output, group=group, group_src=rank)
        return None

    dist.init_process_group, dist.new_group, dist.all_gather = init_process_group, make_group, all_gather
