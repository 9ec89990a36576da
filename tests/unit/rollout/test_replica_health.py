"""Every transition of a replica's health, and the pairs that are not transitions."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any, cast

import pytest

from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.rollout.servers import weights
from rl_megatron.rollout.servers.http import Broken, Server
from rl_megatron.rollout.servers.replicas import Event, Health, Replica, ReplicaSet, after

NEXT = {
    (Health.STALE, Event.REFITTED): Health.HEALTHY,
    (Health.STALE, Event.DIED): Health.DEAD,
    (Health.HEALTHY, Event.REFITTED): Health.HEALTHY,
    (Health.HEALTHY, Event.DIED): Health.DEAD,
    (Health.DEAD, Event.RESTARTED): Health.RESTARTING,
    (Health.DEAD, Event.GIVEN_UP): Health.GONE,
    (Health.RESTARTING, Event.ANSWERED): Health.STALE,
    (Health.RESTARTING, Event.DIED): Health.DEAD,
}


@pytest.mark.parametrize(("health", "event"), list(product(Health, Event)), ids=lambda value: value.name)
def test_each_event_leads_on_or_cannot_happen(health: Health, event: Event) -> None:
    if (health, event) in NEXT:
        assert after(health, event) is NEXT[health, event]
    else:
        with pytest.raises(ValueError, match=f"is {health.value} cannot become"):
            after(health, event)


def test_a_new_server_never_serves_before_it_was_refitted() -> None:
    """Every way to HEALTHY from a death leads over STALE, and only a refit leads from there."""
    assert [pair for pair, health in NEXT.items() if health is Health.HEALTHY and pair[0] is not Health.HEALTHY] == [
        (Health.STALE, Event.REFITTED)
    ]


def test_transitions_are_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (replica,) = ReplicaSet("x", [Server("http://127.0.0.1:1", token=None, timeout_seconds=1.0)]).all
    for event in (Event.REFITTED, Event.DIED, Event.RESTARTED, Event.ANSWERED, Event.REFITTED):
        replica.apply(event, "killed" if event is Event.DIED else "")
    assert [record.getMessage() for record in caplog.records] == [
        "replica 0: STALE -> HEALTHY",
        "replica 0: killed\nHEALTHY -> DEAD",
        "replica 0: DEAD -> RESTARTING",
        "replica 0: RESTARTING -> STALE",
        "replica 0: STALE -> HEALTHY",
    ]


async def test_the_error_of_a_server_is_not_its_successors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One order failed of its death; it is back by the time that the others have carried theirs out."""
    monkeypatch.setattr(weights, "_GRACE_SECONDS", 0.0)
    servers = [Server(f"http://127.0.0.1:{port}", token=None, timeout_seconds=1.0) for port in (1, 2)]
    replicas = ReplicaSet("x", servers)
    died, lives = replicas.all
    of_all = weights.ReplicaWeights(cast("Any", None), replicas, ServerSection(), cast("Any", None))

    async def order(replica: Replica) -> str:
        if replica is died:
            raise Broken("connection reset")
        await asyncio.sleep(0)
        for event in (Event.DIED, Event.RESTARTED):
            died.apply(event, "killed")
        died.server = Server("http://127.0.0.1:3", token=None, timeout_seconds=1.0)
        died.apply(Event.ANSWERED)
        return "loaded"

    assert await of_all.on_each({one: one.server for one in (died, lives)}, "a push", order) == {
        servers[1].url: "loaded"
    }
    assert not died.suspected.is_set()


async def test_an_order_waits_until_the_supervisor_has_found_whether_a_server_that_failed_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine its end is known long after its connections are."""
    monkeypatch.setattr(weights, "_GRACE_SECONDS", 0.0)
    servers = [Server(f"http://127.0.0.1:{port}", token=None, timeout_seconds=1.0) for port in (1, 2)]
    replicas = ReplicaSet("x", servers)
    died, lives = replicas.all
    died.supervised = lives.supervised = True
    of_all = weights.ReplicaWeights(cast("Any", None), replicas, ServerSection(), cast("Any", None))

    async def order(replica: Replica) -> str:
        if replica is died:
            raise Broken("connection reset")
        return "loaded"

    async def supervisor() -> None:
        await died.suspected.wait()
        for _ in range(100):  # turns of the loop
            await asyncio.sleep(0)
        died.apply(Event.DIED, "killed")

    supervising = asyncio.create_task(supervisor())
    told = {one: one.server for one in (died, lives)}
    assert await of_all.on_each(told, "a push", order) == {servers[1].url: "loaded"}
    await supervising
