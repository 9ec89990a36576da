"""Starts a run's ranks on this machine: one process per learner rank, with its shard and an engine replica, and one per
rank of every other role that has its own ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from pathlib import Path

from typing_extensions import override

from launcher.controller.group import serving
from launcher.controller.handle import Failure
from launcher.controller.roles import roles_of
from launcher.hosts.forks import Nursery, fork_all
from launcher.hosts.threads import threads_per_worker
from launcher.processes.environment import inherited
from launcher.processes.scratch import scratch
from launcher.wire.greetings import Setup
from launcher.worker.forking import modules_of
from rl_megatron.config.run import RunConfig
from rl_megatron.interfaces import Launcher, Roles, unheard
from rl_megatron.placement.ranks import ranks_by_role


class LocalLauncher(Launcher):
    """Starts the workers of a run on this machine."""

    def __init__(self, model_folder: Path, run_folder: Path) -> None:
        self._model_folder, self._run_folder = model_folder, run_folder

    @override
    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig, tell: Callable[[str], None] = unheard) -> AsyncIterator[Roles]:
        failure = Failure()
        own = inherited(threads=threads_per_worker(config), device=config.learner.device)
        with scratch() as folder, own:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing here leaves this machine
            counts = ranks_by_role(config)
            before = accumulate(counts.values(), initial=0)
            setups = [
                Setup(
                    config=config.of_role(role),
                    model_folder=self._model_folder.resolve(),
                    run_folder=self._run_folder.resolve(),
                    rendezvous=f"file://{folder}/rendezvous-{role}",
                    role=role,
                    first_device=next(before),
                )
                for role in counts
            ]
            with Nursery(modules_of(config.learner.device)) as forks:
                everyone = [(role, rank) for role, count in counts.items() for rank in range(count)]
                processes = await fork_all(forks, config, everyone)
                teams = [(setup, [p for p in processes if p.role == setup.role]) for setup in setups]
                async with serving(teams, failure, tell=tell) as groups:
                    yield roles_of(groups, config)
