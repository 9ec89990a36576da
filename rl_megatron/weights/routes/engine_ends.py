"""Sends the learner's shards directly to engine ranks: both ends of a plan, between ranks that met."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.errors import SyncError, WeightError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.boxes import volume
from rl_megatron.weights.checks.places import ParameterBox
from rl_megatron.weights.checks.reports import ChecksumReport, SenderBox, narrowed, sent_checksums
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.plan import Plan, from_json, plan_into, to_json
from rl_megatron.weights.routes.ends import Bucket, PlanEndpoint
from rl_megatron.weights.routes.group import Transport
from rl_megatron.weights.routes.last_hop import LearnerEnd, MemberEnd, make_local_end
from rl_megatron.weights.routes.rendezvous import Rendezvous, RendezvousMember

if TYPE_CHECKING:
    from rl_megatron.feature import Encoder

_BUCKET_BYTES = 64 * 2**20
_SLOT_BYTES = 2**20  # two such slots of host memory stay in the cores' shared cache


class _Transport(Transport, Protocol):
    """A transport of one plan, and this process's ends of it."""

    ends: PlanEndpoint


Layouts = tuple[Layout, Layout]
"""The learner's, and the engine ranks' together."""


class _End:
    """This rank's end of a plan, which it makes with the others once all have met. A rank that cannot leaves them.

    Only the learner's ranks know the ``layouts``; rank 0 sends the plan to the others.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, layouts: Layouts | None, tensors: Mapping[str, Tensor]
    ) -> None:
        self._member = member = RendezvousMember(rendezvous, rank, tensors.values())
        try:
            moves = plan_into(*layouts, member.receivers) if layouts else None
            told = member.broadcast(to_json(moves) if moves and rank == 0 else None)
            self._transport = self._make_endpoint(moves or from_json(told), tensors)
        except BaseException:
            member.close()
            raise

    def _make_endpoint(self, moves: Plan, tensors: Mapping[str, Tensor]) -> _Transport:
        member, rank, learners = self._member, self._member.rank, self._member.rendezvous.num_learner_ranks
        if rank < learners:
            return LearnerEnd(moves, src=tensors, member=member, bytes_into=self._bytes_into)
        make = MemberEnd if rank in member.grouped else make_local_end
        return make(moves, dst=tensors, member=member, bytes_into=self._bytes_into)

    def _bytes_into(self, process: int) -> int:
        """The most bytes of a bucket into an engine rank's process."""
        on_gpu = self._member.places[process].gpu != ""
        return _BUCKET_BYTES if on_gpu or process in self._member.grouped else _SLOT_BYTES

    def close(self) -> None:
        """Closes the transport, then leaves the group: ranks that wait for this one see its connection close."""
        self._transport.close()
        self._member.close()


@contextmanager
def one_thread() -> Iterator[None]:
    """OpenMP's threads spin between the small copies of a move, on cores that the other end needs: 20 times slower."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def all_reduce_max(tensor: Tensor) -> None:
    """Makes a tensor the elementwise maximum over the default process group's ranks, in place. Collective."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX)


class Sender(_End):
    """A learner rank's end, which checksums ``sources``. The constructor is collective; rank 0 sends the plan.

    ``dtypes`` are those of the tensors in files that engines load in place of what is sent.

    With an ``encoder`` engines get what it encodes, and what it adds, which are rows of the learner's layout. Raises
    WeightError if there is no plan for ``layouts``, ConfigError if an engine rank cannot be reached.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        layouts: Layouts,
        tensors: Mapping[str, Tensor],
        sources: Sequence[SenderBox],
        *,
        dtypes: Mapping[str, torch.dtype],
        encoder: Encoder | None = None,
    ) -> None:
        self._sources, self._dtypes, self._encoder = sources, dtypes, encoder
        self._tensors = {**tensors, **(encoder.added if encoder else {})}
        super().__init__(rendezvous, rank, layouts, self._tensors)
        if encoder is not None:
            encoder.check(self._transport.ends.dtype_received)
            self._transport.ends.encoder = encoder

    def send(self, version: int) -> tuple[WeightUpdate, ChecksumReport]:
        """Sends the shards once every rank is ready. Returns their checksums too.

        Raises SyncError if a rank was lost, or this one has values that cannot be encoded.

        On an error this rank leaves the group, so that ranks that wait for it fail immediately. A thread computes
        checksums meanwhile; ``verify_seconds`` is the wait for it.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as thread:
            try:
                if self._encoder is not None:
                    self._encoder.begin(all_reduce_max)
                summing = thread.submit(sent_checksums, self._sources, self._tensors, self._sent)
                self._member.barrier(f"version {version}")
                with one_thread():
                    update = self._transport.move(version)
            except SyncError:
                self.close()
                raise
            moved = time.perf_counter()
            report = summing.result()
            waited = time.perf_counter() - moved
        if self._encoder is not None:
            report = replace(report, changes=self._encoder.changes)
        return replace(update, num_bytes=self._transport.ends.bytes_sent.total(), verify_seconds=waited), report

    def _sent(self, one: SenderBox, box: Tensor) -> Tensor:
        """Returns the values that engines checksum for a box that they receive."""
        encoded = self._encoder.encoded(one.hf, one.box, box) if self._encoder else None
        if encoded is not None:
            return encoded
        return narrowed(box.to(self._transport.ends.dtype_received(one.hf)), self._dtypes[one.hf])


class Receiver(_End):
    """An engine rank's end. It writes ``boxes`` where they are in memory.

    Raises WeightError if a rank holds two boxes of one tensor.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, boxes: Mapping[ParameterBox, Tensor]) -> None:
        self._held, self._left = _index_boxes(boxes), dict[str, int]()
        self._coming: Callable[[int, Sequence[ParameterBox]], None]
        self._whole: Callable[[ParameterBox], None]
        super().__init__(rendezvous, rank, None, {name: boxes[one] for name, one in self._held.items()})
        self._transport.ends.arriving, self._transport.ends.arrived = self._arriving, self._arrived

    def receive(
        self,
        version: int,
        whole: Callable[[ParameterBox], None],
        coming: Callable[[int, Sequence[ParameterBox]], None] = lambda turn, held: None,
    ) -> WeightUpdate:
        """Receives the shards once every rank is ready; calls ``whole`` with each box whose parts have all arrived.

        Before, ``coming`` is called with a turn (`LayerOrder`) and boxes with parts that are about to arrive; all of
        earlier turns have arrived. Raises SyncError if a rank is not ready or was lost, like `send`."""
        self._left = {name: volume(one.box) for name, one in self._held.items()}
        self._coming, self._whole = coming, whole
        try:
            self._member.barrier(f"version {version}")
            return self._transport.move(version)
        except SyncError:
            self.close()
            raise

    def _arriving(self, bucket: Bucket) -> None:
        self._coming(
            bucket.layer_position, [self._held[name] for name in dict.fromkeys(p.dst_param for p in bucket.parts)]
        )

    def _arrived(self, bucket: Bucket) -> None:
        """Counts the parts of a bucket that was unpacked."""
        for part in bucket.parts:
            self._left[part.dst_param] -= part.num_elements
            if not self._left[part.dst_param]:
                self._whole(self._held[part.dst_param])


def _index_boxes(held: Iterable[ParameterBox]) -> dict[str, ParameterBox]:
    """The boxes by Hugging Face name. Raises WeightError where a rank holds two boxes of one tensor."""
    out: dict[str, ParameterBox] = {}
    for one in held:
        if one.hf in out:
            raise WeightError(f"{one.hf}: this rank of the engine holds two boxes of it; use weights.transport=file")
        out[one.hf] = one
    return out
