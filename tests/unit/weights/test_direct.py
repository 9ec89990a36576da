"""If a push directly into engines fails, the waiting end is cancelled, and the other end's error is raised."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch

from rl_megatron.errors import ConfigError, ReplicasLost, SyncError, WeightError
from rl_megatron.types import WeightUpdate
from rl_megatron.weights.checks.reports import NO_KINDS, Kinds, Report
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.plans.json_form import from_json
from rl_megatron.weights.servers.direct import DirectDelivery
from rl_megatron.weights.servers.file import FileDelivery
from rl_megatron.weights.transports import words
from rl_megatron.weights.transports.joined import Keeper, Member, Rendezvous

LIMIT = 100.0  # seconds, which nobody may wait


@dataclass
class Ends:
    """A learner's rank and a server's; the one that has no error waits for the other."""

    learner: Exception | None = None  # why it does not come
    server: Exception | None = None  # likewise; it dies where neither has an error
    alive: list[str] = field(default_factory=lambda: ["it"])

    async def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> None:
        if self.learner is not None:
            raise self.learner
        if self.server is None:
            self.alive.clear()
        await asyncio.to_thread(Member, rendezvous, 0)

    async def join(self, path: Path, rendezvous: Mapping[str, object], first: Mapping[str, int]) -> None:
        if self.server is not None:
            raise self.server
        if self.learner is None:
            while self.alive:
                await asyncio.sleep(0.01)
            raise SyncError("the server is gone")
        await asyncio.to_thread(Member, Rendezvous(**rendezvous), first["it"])  # type: ignore[arg-type]

    async def send(self, version: int) -> tuple[WeightUpdate, Sequence[Report]]:
        raise AssertionError

    def names(self) -> Sequence[str]:
        return self.alive

    def stale(self, name: str) -> bool:
        return False

    async def boxes(self, path: Path) -> Mapping[str, Sequence[Boxes]]:
        return {"it": [{}]}

    async def load(
        self, path: Path, version: int, *, straight: Collection[str] = (), private: Kinds = NO_KINDS
    ) -> Mapping[str, Sequence[Report]]:
        raise AssertionError


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("learner", WeightError("no plan leads there")),
        ("learner", SyncError("the learner is gone")),
        ("server", SyncError("http://it: status 400")),
        ("server", SyncError("http://it: its reservation was cancelled, and all were")),
    ],
)
def test_the_error_of_the_end_that_does_not_come_is_raised(end: str, why: Exception, tmp_path: Path) -> None:
    """Whatever its text: the other end's is that it was cancelled, with the same text."""
    with pytest.raises(type(why)) as raised:
        asyncio.run(push(Ends(**{end: why}), tmp_path))
    assert raised.value is why


async def push(ends: Ends, folder: Path) -> None:
    keeper = Keeper("127.0.0.1", LIMIT)
    direct = DirectDelivery(
        file=FileDelivery(learner=ends, path=folder, servers=ends),
        learner=ends,
        servers=ends,
        keeper=keeper,
        learner_ranks=1,
        transport="process_group",
        backend="gloo",
    )
    async with asyncio.timeout(LIMIT / 2), direct.sending(1) as deliver:
        await deliver(private=NO_KINDS, meanwhile=lambda: None)


def test_a_server_that_dies_meanwhile_is_no_end(tmp_path: Path) -> None:
    with pytest.raises(ReplicasLost, match="a server died while the learner joined its group"):
        asyncio.run(push(Ends(), tmp_path))


def test_ranks_meet_at_one_address_and_what_comes_there_is_never_unpickled() -> None:
    keeper = Keeper("127.0.0.1", LIMIT)
    rendezvous = keeper.rendezvous(1, transport="process_group", backend="gloo")
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == rendezvous.port] == ["127.0.0.1"]
    with pytest.raises(ConfigError, match=r"weights\.meeting_host=192\.0\.2\.1: .*controller's node"):
        Keeper("192.0.2.1", LIMIT)  # of nobody (RFC 5737)
    member = Member(rendezvous, 0)
    try:
        assert words.tell({"a": [1, None]}, member.group) == {"a": [1, None]}
        assert words.gather(["b"], member.group) == [["b"]]
        with pytest.raises(SyncError, match="rank 3 of the group sent no JSON"):
            words._read(torch.frombuffer(bytearray(pickle.dumps(print)), dtype=torch.uint8), 3)
        with pytest.raises(SyncError, match="announced 1099511627776 bytes"):
            words._checked(2**40)
        with pytest.raises(WeightError, match="is not a plan of weights"):
            from_json([[1, 2]])
    finally:
        member.close()
