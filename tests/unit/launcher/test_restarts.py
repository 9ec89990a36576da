"""Which restarts of a server count, and the waits before them."""

from __future__ import annotations

import asyncio

import pytest

from launcher.processes import restarts
from rl_megatron.rollout.servers.replicas import Health
from tests.unit.launcher.test_supervisor import LIMIT, REQUEST, bed, run, running


@pytest.mark.parametrize(("calm", "left"), [(0.0, Health.HEALTHY), (3600.0, Health.GONE)])
def test_restarts_before_a_server_ran_for_long_do_not_count(
    calm: float, left: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "CALM_SECONDS", calm)

    async def test() -> None:
        with running(4) as fakes:
            async with bed(fakes[:1], fakes[1:], restarts=2, backoff_seconds=0.001) as it:
                await it.push(4)
                replica = it.engine.replicas.all[0]
                for died in (1, 2, 3):
                    await it.engine.generate(REQUEST)
                    it.places[-1].why.set_result("killed")
                    async with asyncio.timeout(LIMIT):
                        while len(replica.ended) < died or replica.health not in (Health.HEALTHY, Health.GONE):
                            await asyncio.sleep(0.001)
                assert replica.health is left
                assert it.engine.metrics()["engine/restarts"] == (3 if left is Health.HEALTHY else 2)

    run(test)


def test_waits_double_to_a_minute() -> None:
    assert [restarts.wait_before(number, 0.5) for number in (0, 1, 6, 7, 5000)] == [0.5, 1.0, 32.0, 60.0, 60.0]
