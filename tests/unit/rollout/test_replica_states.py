"""Every transition of a replica's states, and the pairs that are none."""

from __future__ import annotations

from itertools import product

import pytest

from rl_megatron.rollout.servers.http import Server
from rl_megatron.rollout.servers.replicas import Event, ReplicaSet, State, after

NEXT = {
    (State.STALE, Event.REFITTED): State.HEALTHY,
    (State.STALE, Event.DIED): State.DEAD,
    (State.HEALTHY, Event.REFITTED): State.HEALTHY,
    (State.HEALTHY, Event.DIED): State.DEAD,
    (State.DEAD, Event.RESTARTED): State.RESTARTING,
    (State.DEAD, Event.GIVEN_UP): State.GONE,
    (State.RESTARTING, Event.ANSWERED): State.STALE,
    (State.RESTARTING, Event.DIED): State.DEAD,
}


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)), ids=lambda value: value.name)
def test_each_event_leads_on_or_cannot_happen(state: State, event: Event) -> None:
    if (state, event) in NEXT:
        assert after(state, event) is NEXT[state, event]
    else:
        with pytest.raises(ValueError, match=f"is {state.value} cannot become"):
            after(state, event)


def test_a_new_server_never_serves_before_it_was_refitted() -> None:
    """Every way to HEALTHY from a death leads over STALE, and only a refit leads from there."""
    assert [pair for pair, state in NEXT.items() if state is State.HEALTHY and pair[0] is not State.HEALTHY] == [
        (State.STALE, Event.REFITTED)
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
