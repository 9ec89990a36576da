"""A controller at its limit of open files, with real HTTP."""

from __future__ import annotations

import asyncio
import errno
import os
import resource

import pytest

from rl_megatron.errors import EngineError
from rl_megatron.rollout.servers.http import AttemptFailed, OutOfFiles, Server
from rl_megatron.rollout.servers.replicas import Health
from tests.processes.launcher.test_supervisor import LIMIT, bed
from tests.unit.rollout.test_engine_servers import REQUEST, running


async def test_it_ends_the_run_with_advice_and_no_server_counts_as_dead() -> None:
    """It has no connection either for a request or for a health check."""
    with running(1) as fakes:
        async with bed(fakes, []) as it:
            await it.push(4)
            (replica,) = it.engine.replicas.all
            before, replica.server = replica.server, Server(fakes[0].url, token="t", timeout_seconds=LIMIT)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                with pytest.raises(EngineError, match=r"request 'step 1.*ulimit -Hn.* rollout.server.concurrency"):
                    await it.engine.generate(REQUEST)
                assert not replica.suspected.is_set()
                replica.suspect(AttemptFailed("of another cause"))  # its supervisor asks for its health
                with pytest.raises(OutOfFiles, match=r"/health: .*open files"):
                    await it.engine.replicas.some(list)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert replica.health is Health.HEALTHY
            await before.close()


async def test_a_server_that_it_cannot_refit_is_not_dead() -> None:
    with running(1) as fakes:
        async with bed(fakes, []) as it:
            await it.push(4)
            (replica,) = it.engine.replicas.all
            before, replica.server = replica.server, Server(fakes[0].url, token="t", timeout_seconds=LIMIT)
            replica.health = Health.STALE
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                with pytest.raises(OutOfFiles, match=r"open files.*ulimit -Hn"):
                    await asyncio.wait_for(it.supervisor._cannot_serve(replica), LIMIT)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await before.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
async def test_a_restart_without_files_is_not_the_servers_fault(code: int) -> None:
    with running(2) as fakes:
        async with bed(fakes[:1], fakes[1:]) as it:
            await it.push(4)
            it.faults.append(OSError(code, os.strerror(code)))
            it.places[0].why.set_result("killed")
            with pytest.raises(OutOfFiles, match=r"start of replica 0: .*open files.*ulimit -Hn"):
                await it.engine.generate(REQUEST)
