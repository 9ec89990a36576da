"""Sends the learner's shards directly to engine ranks: both ends of a plan, over a group that they joined."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rl_megatron.errors import SyncError, WeightError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.checks.places import Held
from rl_megatron.weights.checks.reports import Report
from rl_megatron.weights.checks.sources import Source, sent_checksums
from rl_megatron.weights.plans.json_form import from_json, to_json
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.transports import words
from rl_megatron.weights.transports.buckets import Bucket
from rl_megatron.weights.transports.commit import Transport
from rl_megatron.weights.transports.cuda_ipc import CudaIpcTransport
from rl_megatron.weights.transports.ends import PlanEnds
from rl_megatron.weights.transports.joined import Member, Rendezvous
from rl_megatron.weights.transports.process_group import ProcessGroupTransport
from rl_megatron.weights.transports.shared_memory import SharedMemoryTransport

_BUCKET_BYTES = 64 * 2**20
_SLOT_BYTES = 2**20  # of host memory: two stay in the cores' shared cache


class _Transport(Transport, Protocol):
    """A transport of one plan, and this process's ends of it."""

    ends: PlanEnds


def _process_group(rendezvous: Rendezvous, moves: Plan, **ends: Any) -> _Transport:
    return ProcessGroupTransport(moves, **ends, bucket_bytes=_BUCKET_BYTES)


def _shared_memory(rendezvous: Rendezvous, moves: Plan, **ends: Any) -> _Transport:
    return SharedMemoryTransport(moves, **ends, slot_bytes=_SLOT_BYTES, timeout_seconds=rendezvous.seconds)


def _cuda_ipc(rendezvous: Rendezvous, moves: Plan, **ends: Any) -> _Transport:
    return CudaIpcTransport(moves, **ends, slot_bytes=_BUCKET_BYTES, timeout_seconds=rendezvous.seconds)


TRANSPORTS: Mapping[str, Callable[..., _Transport]] = {
    "process_group": _process_group,
    "shared_memory": _shared_memory,
    "cuda_ipc": _cuda_ipc,
}
"""Those of `TRANSPORT_KINDS` that are ``direct``."""


@contextmanager
def one_thread() -> Iterator[None]:
    """OpenMP's threads spin between the small copies of a move, on cores that the other end needs: 20 times slower."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


class Sender:
    """A learner rank's end, which checksums ``sources``. The constructor is collective; rank 0 sends the plan."""

    def __init__(
        self, rendezvous: Rendezvous, rank: int, moves: Plan, tensors: Mapping[str, Tensor], sources: Sequence[Source]
    ) -> None:
        self._member, self._tensors, self._sources = Member(rendezvous, rank), tensors, sources
        words.tell(to_json(moves), self._member.group)
        make = TRANSPORTS[rendezvous.transport]
        self._transport = make(rendezvous, moves, src=tensors, dst={}, group=self._member.group, verify=False)

    def send(self, version: int) -> tuple[WeightUpdate, Report]:
        """Send the shards once every rank is ready. Returns their checksums too. Raises SyncError if a rank was lost.

        On an error this rank leaves the group, so that ranks that wait for it fail at once. A thread computes
        checksums meanwhile; ``verify_seconds`` is the wait for it.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as thread:
            dtype_of = self._transport.ends.dtype_of_last
            summing = thread.submit(sent_checksums, self._sources, self._tensors, dtype_of)
            try:
                self._member.meet(f"version {version}")
                with one_thread():
                    update = self._transport.move(version)
            except SyncError:
                self.close()
                raise
            moved = time.perf_counter()
            report = summing.result()
            waited = time.perf_counter() - moved
        return replace(update, num_bytes=self._transport.ends.bytes_sent.total(), verify_seconds=waited), report

    def close(self) -> None:
        """Leave."""
        self._transport.close()
        self._member.close()


class Receiver:
    """An engine rank's end. It writes the ``held`` boxes in place, into ``params``.

    Raises WeightError if a rank holds two boxes of one tensor.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, held: Sequence[Held], params: Mapping[str, Tensor]) -> None:
        self._held = _by_name(held)
        self._member = Member(rendezvous, rank)
        moves = from_json(words.tell(None, self._member.group))
        tensors = {name: one.of(params[one.param]) for name, one in self._held.items()}
        make = TRANSPORTS[rendezvous.transport]
        self._transport = make(rendezvous, moves, src={}, dst=tensors, group=self._member.group, verify=False)
        self._transport.ends.arrived = self._arrivals = _Arrivals(tensors)

    def receive(self, version: int, whole: Callable[[Held], None]) -> WeightUpdate:
        """Receive the shards once every rank is ready; calls ``whole`` with each box whose parts have all arrived.

        Raises SyncError if a rank is not ready or was lost, as `send`.
        """
        self._arrivals.begin(lambda name: whole(self._held[name]))
        try:
            self._member.meet(f"version {version}")
            return self._transport.move(version)
        except SyncError:
            self.close()
            raise

    def close(self) -> None:
        """Leave."""
        self._transport.close()
        self._member.close()


class _Arrivals:
    """Calls ``whole`` with the name of each of a rank's tensors once its last part has arrived, in any order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self._left: dict[str, int] = {}
        self._whole: Callable[[str], None]

    def begin(self, whole: Callable[[str], None]) -> None:
        """Starts a new version: no tensor of it has arrived."""
        self._left, self._whole = dict(self._sizes), whole

    def __call__(self, bucket: Bucket) -> None:
        """Counts the parts of a bucket that was unpacked."""
        for part in bucket.parts:
            self._left[part.dst_param] -= part.num_elements
            if not self._left[part.dst_param]:
                self._whole(part.dst_param)


def _by_name(held: Sequence[Held]) -> dict[str, Held]:
    """By Hugging Face name. Raises WeightError where a rank holds two boxes of one tensor."""
    out: dict[str, Held] = {}
    for one in held:
        if one.hf in out:
            raise WeightError(f"{one.hf}: this rank of the engine holds two boxes of it; use weights.transport=file")
        out[one.hf] = one
    return out
