"""A stand-in for a learner that sends shards straight into engine ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from rl_megatron.errors import SyncError
from rl_megatron.features.quantize.encoding import ENCODINGS
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.checks.reports import ChecksumReport, sender_boxes
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.layouts.recorded import Boxes, recorded_layout
from rl_megatron.weights.plans.plan import plan
from rl_megatron.weights.routes import rendezvous
from rl_megatron.weights.routes.delivery import DirectDelivery
from rl_megatron.weights.routes.engine_ends import Sender
from rl_megatron.weights.routes.mirror import dtypes
from rl_megatron.weights.routes.rendezvous import Rendezvous, RendezvousStore
from tests.engines.benches import Change, ServedBench, weights_of


class FolderSender:
    """A learner of one rank that is a folder: delivery.LearnerRanks."""

    def __init__(self, model: Path, quantization: str = "none") -> None:
        hf = hf_layout(read_shape(model))
        self.tensors = {name: torch.zeros_like(t) for name, t in weights_of(model).items()}
        self.dtypes: Mapping[str, torch.dtype] = {}  # in the file that the servers load in place of what is sent
        encoding = ENCODINGS[quantization]
        self.hf = hf if encoding is None else encoding.layout(hf, hf)
        self._encoder = None if encoding is None else encoding.encoder(self.hf, 0, self.tensors)
        self.least_bytes = 0
        self.dies = False
        self.before: Callable[[], None] = lambda: None
        self.before_joining: Callable[[], None] = lambda: None
        self.flipped = ""  # a tensor that arrives otherwise than it was sent

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        layout = recorded_layout(self.hf, ranks)
        moves = plan(self.hf, layout, placement={rank: 1 + rank for rank in range(len(ranks))})
        self.least_bytes = 4 * sum(moves.traffic().values())
        sources, layouts = sender_boxes(self.hf, self.hf)[0], (self.hf, layout)
        self.before_joining()
        self._sender = await asyncio.to_thread(
            Sender, rendezvous, 0, layouts, self.tensors, sources, dtypes=self.dtypes, encoder=self._encoder
        )

    async def send(self, version: int) -> tuple[WeightUpdate, Sequence[ChecksumReport]]:
        self.before()
        if self.dies:
            raise SyncError("the learner is gone")
        update, report = await asyncio.to_thread(self._sender.send, version)
        rows = [(param, hf, box, sum_ ^ (hf == self.flipped)) for param, hf, box, sum_ in report.rows]
        return update, [replace(report, rows=rows)]

    def hold(self, folder: Path, change: Change) -> None:
        tensors = weights_of(folder)
        change(tensors)
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)


@contextmanager
def direct(server: ServedBench, sender: FolderSender, *, beside: bool = False) -> Iterator[None]:
    """The bench pushes straight into engine ranks; the mirror only gives names, shapes and dtypes.

    The sender pretends that they are on another node, unless they are to be ``beside`` it.
    """
    before, sender.dtypes, own_place = server.weights._delivery, dtypes(server.path), rendezvous.own_place
    if not beside:
        rendezvous.own_place = lambda tensors: own_place(tensors)._replace(node="another")
    server.weights._delivery = DirectDelivery(
        file=server.file(server.engine),
        learner=sender,
        servers=server.engine.weights,
        keeper=RendezvousStore("127.0.0.1", 100.0),
        learner_ranks=1,
        backend="gloo",
    )
    try:
        yield
    finally:
        server.weights._delivery, rendezvous.own_place = before, own_place
