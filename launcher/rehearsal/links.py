"""One of the processes that measure links: it stands where a learner rank will, or alone for a node without ranks.

`main` is the program that node.py starts. Standard input is the `Survey`, standard output takes the answer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from launcher.processes.engine_guard import interface_of
from launcher.processes.parent import die_with
from launcher.rehearsal.messages import Survey

if TYPE_CHECKING:
    import socket

    import torch
    import torch.distributed as dist

_REPEATS = 3
_PRODUCTS = {"cpu": (512, 4), "cuda": (8192, 16)}  # sizes and number of matrix products


def open_store(listener: socket.socket, survey: Survey) -> object:
    """The store at which the processes meet, on a listening socket. It listens as long as it is referred to."""
    import torch.distributed as dist

    host, port = survey.store
    limit = timedelta(seconds=survey.seconds)
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch names it in no __all__
        host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def main(arguments: Sequence[str]) -> None:
    """Measure as process ``arguments[0]``, the ``arguments[1]``-th of its node, under the parent ``arguments[2]``."""
    number, local, parent = map(int, arguments)
    die_with(parent)
    with open(0) as line:
        survey = Survey.read(line.readline())
    own = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to the log
    with os.fdopen(own, "w") as answer:
        json.dump(_measured(survey, number, local), answer)


def _measured(survey: Survey, number: int, local: int) -> dict[str, object]:
    """Seconds of the matrix products, bytes per second of each group's operation and of pairs of nodes; or an error."""
    import torch

    torch.set_num_threads(survey.threads)
    out: dict[str, object] = {"process": number}
    try:
        device = _device(survey, local)
        out["flops"] = _flops(device)
        out["time"] = _join(survey, number)
        tensor = torch.ones(survey.num_bytes // 4, device=device)
        out["groups"] = _groups(survey, number, tensor)
        out["pairs"] = _pairs(survey, number, tensor)
    except (RuntimeError, OSError) as error:  # of CUDA, NCCL, gloo, the network
        out["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:400]}"
    return out


def _device(survey: Survey, local: int) -> torch.device:
    import torch

    if survey.device == "cpu":
        return torch.device("cpu")
    device = torch.device(survey.device, local)
    torch.cuda.set_device(device)
    return device


def _flops(device: torch.device) -> float:
    """Floating-point operations per second of a large product, the best of some."""
    import torch

    size, products = _PRODUCTS[device.type]
    factor = torch.ones(size, size, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    product = torch.empty_like(factor)

    def multiply() -> None:
        for _ in range(products):
            torch.mm(factor, factor, out=product)

    return 2.0 * size**3 * products / _best(multiply, device)


def _best(operation: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest repetition, after one that does not count."""
    import torch

    best = float("inf")
    for repeat in range(_REPEATS + 1):
        began = time.perf_counter()
        operation()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best


def _join(survey: Survey, number: int) -> float:
    """Join the others. Returns this node's time, in seconds, at a moment that is the same for all."""
    import socket

    import torch.distributed as dist

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(survey.store)  # sends nothing: only finds the route
        interface = interface_of(str(probe.getsockname()[0]))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface or "lo")
    limit = timedelta(seconds=survey.seconds)
    store = dist.TCPStore(*survey.store, None, False, limit)  # type: ignore[attr-defined]
    backend = "gloo" if survey.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=number, world_size=survey.size, timeout=limit)
    dist.barrier()
    return time.time()


def _groups(survey: Survey, number: int, tensor: torch.Tensor) -> dict[str, list[object]]:
    """By kind, this process's group and its bytes per second: what each process must send for an all-reduce, for ep an
    all-to-all, over its seconds."""
    import torch.distributed as dist

    out: dict[str, list[object]] = {}
    for kind, groups in survey.groups:
        made = [dist.new_group(list(ranks)) for ranks in groups]  # all processes make all groups, in one order
        dist.barrier()
        for ranks, group in zip(groups, made, strict=True):
            if number not in ranks:
                continue
            out[kind] = [list(ranks), _rate(kind, tensor, group)]
        dist.barrier()
    return out


def _rate(kind: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Bytes per second that a process of the group sends."""
    import torch
    import torch.distributed as dist

    count = dist.get_world_size(group)
    part = tensor[: len(tensor) // count * count]
    if kind == "ep":
        other = torch.empty_like(part)
        seconds = _best(lambda: dist.all_to_all_single(other, part, group=group), tensor.device)
        return (count - 1) / count * part.nbytes / seconds
    seconds = _best(lambda: dist.all_reduce(part, op=dist.ReduceOp.MAX, group=group), tensor.device)
    return 2 * (count - 1) / count * part.nbytes / seconds


def _pairs(survey: Survey, number: int, tensor: torch.Tensor) -> list[list[float]]:
    """For each pair that begins here: the other, and bytes per second of the slower direction."""
    import torch.distributed as dist

    out: list[list[float]] = []
    for one, other in survey.pairs():
        if number == one:
            there = _best(lambda to=other: dist.send(tensor, to), tensor.device)  # type: ignore[misc]
            back = _best(lambda to=other: _receive(tensor, to), tensor.device)  # type: ignore[misc]
            out.append([other, tensor.nbytes / max(there, back)])
        elif number == other:
            _best(lambda to=one: _receive(tensor, to), tensor.device)  # type: ignore[misc]
            _best(lambda to=one: dist.send(tensor, to), tensor.device)  # type: ignore[misc]
    dist.barrier()
    return out


def _receive(tensor: torch.Tensor, source: int) -> None:
    import torch.distributed as dist

    dist.recv(tensor, source)
