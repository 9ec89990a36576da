"""Every transition of a replica's health, and the pairs that are not transitions."""

from __future__ import annotations

from itertools import product

import pytest

from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.servers.replicas import Event, Health, ReplicaSet, after

NEXT = {
    (Health.STALE, Event.REFITTED): Health.HEALTHY,
    (Health.STALE, Event.DIED): Health.DEAD,
    (Health.HEALTHY, Event.REFITTED): Health.HEALTHY,
    (Health.HEALTHY, Event.DIED): Health.DEAD,
    (Health.DEAD, Event.RESTARTED): Health.RESTARTING,
    (Health.DEAD, Event.GIVEN_UP): Health.GONE,
    (Health.RESTARTING, Event.ANSWERED): Health.STALE,
    (Health.RESTARTING, Event.DIED): Health.DEAD,
    (Health.HEALTHY, Event.DROPPED): Health.LEAVING,
    (Health.STALE, Event.DROPPED): Health.LEAVING,
    (Health.LEAVING, Event.DIED): Health.GONE,  # no new server is started for it
    **{(health, Event.DROPPED): Health.GONE for health in (Health.DEAD, Health.RESTARTING, Health.GONE)},
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
