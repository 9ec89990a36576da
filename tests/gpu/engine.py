"""What a process of the kit does with weights: pushes into the embedded engine, and into another process on the GPU."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
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
    from rl_megatron.weights.checks.reports import checksum
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
    """Two processes on one GPU, of which the second knows it by another name: each version exactly, both dtypes. A bit
    of the third version flips on its way, and its checksums tell."""
    if rank and uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid
    torch.set_num_threads(1)
    from rl_megatron.weights.boxes import whole_box
    from rl_megatron.weights.checks.places import record
    from rl_megatron.weights.checks.reports import BackgroundChecksums, sender_boxes
    from rl_megatron.weights.layouts.recorded import recorded_layout
    from rl_megatron.weights.routes.engine_ends import Receiver, Sender
    from tests.distributed.test_engine_ends import HF, tensors_of

    began, shapes = time.perf_counter(), HF.local_shapes(0)
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        rendezvous, held = _met(rank, folder, number), {n: torch.zeros(s, device="cuda") for n, s in shapes.items()}
        dtypes = dict.fromkeys(shapes, dtype)
        if rank == 0:
            layouts = HF, recorded_layout(HF, [{name: whole_box(shape) for name, shape in shapes.items()}])
            sender = Sender(rendezvous, 0, layouts, held, sender_boxes(HF, HF)[0], dtypes=dtypes)
            for version in (1, 2, 3):
                for name, tensor in tensors_of(version).items():
                    held[name].copy_(tensor)
                if version == 3:
                    _flip(sender)
                report = sender.send(version)[1]
            torch.save(report, folder / f"sent {number}")
            sender.close()
            continue
        held = {name: tensor.to(dtype) for name, tensor in held.items()}

        def load(tensors: Any, held: dict[str, torch.Tensor] = held) -> None:
            for name, tensor in tensors:
                held[name].copy_(tensor)

        places = record(load, shapes, held, dtypes)
        receiver = Receiver(rendezvous, 1, {one: one.local_slice(held[one.param]) for one in places})
        for version in (1, 2, 3):
            beside = BackgroundChecksums()
            receiver.receive(version, lambda one, beside=beside, held=held: beside.sent(one, held[one.param]))
            equal = {n: torch.equal(held[n].cpu(), t.to(dtype)) for n, t in tensors_of(version).items()}
            assert list(equal.values()).count(False) == (version == 3)
        torch.save(beside.report(), folder / f"came {number}")
        receiver.close()
    if rank == 0:
        (folder / "seconds").write_text(f"{time.perf_counter() - began:.2f}")


def _met(rank: int, folder: Path, number: int) -> Any:
    """The rendezvous that rank 0 keeps."""
    from rl_megatron.weights.routes.rendezvous import Rendezvous, RendezvousStore

    told = folder / f"rendezvous {number}"
    if rank == 0:
        keeper = RendezvousStore("127.0.0.1", 100.0)
        KEEPERS.append(keeper)
        rendezvous = keeper.rendezvous(2, learners=1, backend="nccl")
        told.with_suffix(".new").write_text(json.dumps(asdict(rendezvous)))
        told.with_suffix(".new").rename(told)
    while not told.exists():
        time.sleep(0.01)
    return Rendezvous(**json.loads(told.read_text()))


KEEPERS: list[Any] = []  # who let one go would end its store


def _flip(sender: Any) -> None:
    """A bit flips between the first parcel's packing and the receiver's tensors."""
    ends = sender._transport.ends
    pack = ends.pack

    def flipping(parcel: Any, version: int) -> None:
        pack(parcel, version)
        parcel.payload[0] ^= 4
        ends.pack = pack

    ends.pack = flipping
