"""What a process of the kit does with weights: pushes into the embedded engine, and into another process on the GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_megatron.errors import CorruptionError
from tests.gpu import branch

PROMPTS = ((65, 66, 67), (1, 2, 3, 4, 5, 6, 7))
NEW_TOKENS = 12


def engine_main(rank: int, folder: Path, keys: Mapping[str, Any]) -> None:
    """Push into the embedded engine over a group of one, add up checksums, sample greedily, and flip a bit."""
    learner, device = branch.begin(rank, folder, keys)
    from rl_megatron.engines.local.engine import LocalEngine
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.types import GenerationRequest, SamplingParams
    from rl_megatron.weights.checks.checksums import checksum
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout
    from rl_megatron.weights.plans.plan import plan
    from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging

    shape = branch.SHAPE
    policy = make_policy(shape, learner, device, temperature=0.7)
    branch.fill(policy)
    layout = megatron_layout(shape, learner.dims)
    engine = LocalEngine(shape, slots=4, dtype=torch.float32, device=device, max_length=64)
    moves = plan(layout, replace(hf_layout(shape), dims=learner.dims))
    seen: dict[str, Any] = {}
    for tensor in engine.tensors.values():
        tensor.zero_()
    transport = ProcessGroupTransport(moves, src=dict(policy.tensors), dst=engine.tensors)
    staging = Staging(transport, engine)
    staging.stage(0)
    staging.commit(0)
    seen["process_group"] = {name: checksum(t, tuple(t.shape)) for name, t in engine.tensors.items()}
    seen["on the host"] = {name: checksum(t.cpu(), tuple(t.shape)) for name, t in engine.tensors.items()}
    params = SamplingParams(temperature=0.0, top_p=1.0, max_new_tokens=NEW_TOKENS, stop_token_ids=(257,), seed=3)
    requests = [
        GenerationRequest(id=f"{i}", token_ids=x, num_completions=1, params=params) for i, x in enumerate(PROMPTS)
    ]
    said = engine.generate(requests)
    seen["tokens"] = [list(map(int, group[0].token_ids)) for group in said]
    seen["logprobs"] = [list(map(float, group[0].logprobs)) for group in said]
    name, flipped = max(engine.tensors.items())
    words = flipped.view(torch.int32).view(-1)
    words[-1] = words[-1] ^ 4
    seen["flipped"] = {name: checksum(flipped, tuple(flipped.shape))}
    if device.type != "cpu":  # CPUs verify another way
        seen["refused"] = _flipped_on_the_way(transport)
    branch.end(folder, seen)


def _flipped_on_the_way(transport: Any) -> str:
    """What a push within the process says after a bit flipped between copying and verification."""
    copy = torch._foreach_copy_

    def flipping(to: list[torch.Tensor], frm: list[torch.Tensor]) -> None:
        copy(to, frm)
        to[0].view(torch.int32).bitwise_xor_(4)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", flipping)
        with pytest.raises(CorruptionError) as refused:
            transport.move(2)
    return str(refused.value)


def ipc_main(rank: int, folder: Path, uuid: str) -> None:
    """Two processes on one GPU, of which the second knows it by another name: each version exactly, both dtypes."""
    if rank and uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    torch.set_num_threads(1)
    import torch.distributed as dist

    from rl_megatron.types import ParallelDims
    from tests.distributed import test_transport as base

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    began = time.perf_counter()
    base.check_push(rank, ParallelDims(ep=2, dp=2), 2, torch.float32, base.through_gpu_memory, "cuda")
    base.check_push(rank, ParallelDims(pp=2), 1, torch.bfloat16, base.through_gpu_memory, "cuda")
    dist.barrier()
    _flip(rank)
    if rank == 0:
        (folder / "seconds").write_text(f"{time.perf_counter() - began:.2f}")
    dist.barrier()
    dist.destroy_process_group()


def _flip(rank: int) -> None:
    """A bit flips between the wire and the receiver's tensors: rank 0 refuses the version."""
    from rl_megatron.types import ParallelDims
    from tests.distributed import test_transport as base

    dims = ParallelDims(pp=2)
    src = {name: t.to("cuda") for name, t in base.megatron_tensors(base.hf_tensors(3), dims, rank).items()}
    dst = {} if rank else {name: torch.zeros_like(t, device="cuda") for name, t in base.hf_tensors(3).items()}
    transport: Any = base.through_gpu_memory(base.push_plan(dims, 1), src, dst)
    if rank:
        transport.move(3)
    else:
        unpack = transport.ends.unpack

        def flipping(parcel: Any, version: int) -> None:
            parcel.payload[0] ^= 4
            unpack(parcel, version)

        transport.ends.unpack = flipping
        with pytest.raises(CorruptionError, match="version 3 did not arrive whole"):
            transport.move(3)
    transport.close()
