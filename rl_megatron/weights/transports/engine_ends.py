"""Shards of the learner straight into engine ranks: both ends of a plan over a group that they joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from rl_megatron.errors import SyncError, WeightError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.held import Report, Source, sent_checksums
from rl_megatron.weights.plan import Plan
from rl_megatron.weights.transports.joined import Member, Place
from rl_megatron.weights.transports.process_group import ProcessGroupTransport

_BUCKET_BYTES = 64 * 2**20


class Sender:
    """A learner rank's end; it answers for ``sources``. Making one is collective; rank 0 tells the others the plan."""

    def __init__(
        self, place: Place, rank: int, moves: Plan, tensors: Mapping[str, Tensor], sources: Sequence[Source]
    ) -> None:
        self._member, self._tensors, self._sources = Member(place, rank), tensors, sources
        dist.broadcast_object_list([moves], src=0, group=self._member.group)
        self._transport = ProcessGroupTransport(
            moves, src=tensors, dst={}, group=self._member.group, bucket_bytes=_BUCKET_BYTES, verify=False
        )

    def send(self, version: int) -> tuple[WeightUpdate, Report]:
        """Once every rank is ready; with the checksums of what was sent. Raises SyncError where a rank was lost.

        This rank has left the group then, so that those who wait for it there hear of it.
        """
        try:
            self._member.meet(version)
            update = self._transport.move(version)
        except SyncError:
            self.close()
            raise
        report = sent_checksums(self._sources, self._tensors, self._transport.ends.dtype_of_last)
        num_bytes = sum(step.send.bucket.num_bytes for step in self._transport.steps if step.send)
        return replace(update, num_bytes=num_bytes, verify_seconds=report.seconds), report

    def close(self) -> None:
        """Leave."""
        self._transport.close()
        self._member.close()


class Receiver:
    """An engine rank's end. ``tensors`` are views of its parameters by Hugging Face name, written in place."""

    def __init__(self, place: Place, rank: int, tensors: Mapping[str, Tensor]) -> None:
        self._member = Member(place, rank)
        told: list[Plan | None] = [None]
        dist.broadcast_object_list(told, src=0, group=self._member.group)
        if told[0] is None:
            raise WeightError("rank 0 of the group told no plan")
        self._transport = ProcessGroupTransport(
            told[0], src={}, dst=tensors, group=self._member.group, bucket_bytes=_BUCKET_BYTES, verify=False
        )

    def receive(self, version: int) -> WeightUpdate:
        """Once every rank is ready. Raises SyncError where one is not or was lost, as `Sender.send`."""
        try:
            self._member.meet(version)
            return self._transport.move(version)
        except SyncError:
            self.close()
            raise

    def close(self) -> None:
        """Leave."""
        self._transport.close()
        self._member.close()


def named(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Views by Hugging Face name. Raises WeightError where a rank holds two boxes of one tensor."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in out:
            raise WeightError(
                f"{name}: this rank of the engine holds two boxes of it; use rollout.server.transport=file"
            )
        out[name] = tensor
    return out
