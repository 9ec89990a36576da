"""Shards sent straight into engine ranks: where each engine's own loader would have put them, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rl_megatron.errors import EngineError, SyncError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.direct import Direct
from rl_megatron.weights.engine_layout import Boxes, recorded_layout
from rl_megatron.weights.families import hf_layout
from rl_megatron.weights.held import Report, sources_of
from rl_megatron.weights.plan import plan
from rl_megatron.weights.transports.engine_ends import Sender
from rl_megatron.weights.transports.joined import Keeper, Place
from tests.engines.benches import Change, ServedBench, logprobs_of, request, weights_of


class FolderSender:
    """A learner of one rank that is a folder. See direct.Senders."""

    def __init__(self, model: Path) -> None:
        self.hf = hf_layout(ModelShape.from_folder(model))
        self.tensors = {name: torch.zeros_like(t) for name, t in weights_of(model).items()}
        self.least_bytes = 0
        self.dies = False

    async def join_engines(self, place: Place, ranks: Sequence[Boxes]) -> None:
        layout = recorded_layout(self.hf, ranks)
        moves = plan(self.hf, layout, placement={rank: 1 + rank for rank in range(len(ranks))})
        self.least_bytes = 4 * sum(moves.traffic().values())
        sources = sources_of(self.hf, self.hf)[0]
        self._sender = await asyncio.to_thread(Sender, place, 0, moves, self.tensors, sources)

    async def send(self, version: int) -> tuple[WeightUpdate, Sequence[Report]]:
        if self.dies:
            raise SyncError("the learner is gone")
        update, report = await asyncio.to_thread(self._sender.send, version)
        return update, [report]

    def hold(self, folder: Path, change: Change) -> None:
        tensors = weights_of(folder)
        change(tensors)
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)


@contextmanager
def direct(server: ServedBench, sender: FolderSender) -> Iterator[None]:
    """Pushes of the bench go straight; the mirror only tells names and shapes."""
    keeper = Keeper("127.0.0.1", 100.0)
    server.weights._direct = Direct(
        senders=sender, receivers=server.engine, keeper=keeper, path=server.path, learner_ranks=1, backend="gloo"
    )
    try:
        yield
    finally:
        server.weights._direct = None


def test_shards_go_straight_into_engines(server: ServedBench, models: tuple[Path, Path]) -> None:
    """Log-probs are of what was pushed, and no byte more than a rank needs was sent; then through the file again."""
    sender = FolderSender(models[0])
    with direct(server, sender):
        for version, folder in enumerate([models[0], models[1], models[0]], start=1):
            sender.hold(folder, lambda tensors: None)
            server.sync.folder = folder
            update = server.run(server.weights.push(version))
            assert update.num_bytes == sender.least_bytes
            for completion in server.generate(request(n=3))[0]:
                expected = logprobs_of(folder, request().token_ids, completion.token_ids, 1.0)
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
                assert completion.versions == (version, version)
        assert sender.least_bytes == sum(t.nbytes for t in sender.tensors.values()) * len(server.engine.servers)
    server.push(models[1], 5)
    assert server.generate(request())[0][0].versions == (5, 5)


def test_a_server_that_refuses_leaves_no_sender_waiting(
    server: ServedBench, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status 400 to the server's update, a learner that is gone, a bit that flips in the engine's share."""
    sender = FolderSender(models[0])
    adapter, (replica,) = server.engine.adapter, server.engine.servers
    sender.hold(models[0], lambda tensors: None)
    server.sync.folder = models[0]
    with direct(server, sender):
        server.run(server.weights.push(1))
        post = replica.post

        async def refusing(path: str, *arguments: object, **more: object) -> object:
            if path.startswith("/update_weights"):
                raise EngineError(f"{path}: status 400: no")
            return await post(path, *arguments, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(replica, "post", refusing)
        with pytest.raises(SyncError, match="status 400: no"):
            server.run(server.weights.push(2))
        monkeypatch.undo()
        with pytest.raises(EngineError, match="no weights are served"):
            server.generate(request())
        sender.dies = True
        with pytest.raises(SyncError, match="the learner is gone"):
            server.run(server.weights.push(3))
        sender.dies = False
        server.run(server.weights.push(4))
        assert server.generate(request())[0][0].versions == (4, 4)
    assert server.engine.adapter is adapter
