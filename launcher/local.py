"""Processes on this machine: one worker per learner rank, each with a rollout engine replica beside the shard, and one
per rank of a role of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from launcher import worker
from launcher.environment import inherited
from launcher.naming import LEARNER, called
from launcher.proxies import roles_of
from launcher.rank_models import Setup
from launcher.scratch import scratch
from launcher.workers import Ending, Failure, serving
from rl_megatron.config import RunConfig
from rl_megatron.interfaces import Roles


class SpawnedRank:
    """A worker that is a child of this process (see RankProcess)."""

    def __init__(self, role: str, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.role, self.rank = role, rank
        self._process: BaseProcess = context.Process(
            target=worker.main, args=(theirs, rank), name=called(role, rank), daemon=False
        )
        with _signals_held_back():
            self._process.start()
        theirs.close()
        self.where = f"pid {self._process.pid}"

    def ending(self, hung_up: threading.Event) -> Ending:
        """See RankProcess; a child's exit says more than the end of its pipe."""
        self._process.join()
        code = self._process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Ending(how=f"{how}; log.txt has what it said", expected=code == 0, killed=code < 0)

    def wake(self) -> None:
        """See RankProcess."""
        assert self._process.pid is not None
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """See RankProcess."""
        self._process.kill()

    def join(self, seconds: float) -> bool:
        """See RankProcess."""
        self._process.join(seconds)
        return not self._process.is_alive()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """What starts here never sees SIGINT and SIGTERM, which a terminal or Slurm sends to every process of a run."""
    resource_tracker.ensure_running()  # else starting it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalLauncher:
    """Starts the workers of a run on this machine. See interfaces.Launcher."""

    def __init__(self, model_folder: Path, run_folder: Path) -> None:
        self._model_folder, self._run_folder = model_folder, run_folder

    @contextlib.asynccontextmanager
    async def start(self, config: RunConfig) -> AsyncIterator[Roles]:
        """See interfaces.Launcher."""
        failure = Failure()
        own = inherited(threads=threads_per_worker(config), device=config.learner.device)
        with scratch() as folder, own:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing here leaves this machine
            count = config.learner.dims.world_size
            setups = [
                Setup(
                    config=config,
                    model_folder=self._model_folder.resolve(),
                    run_folder=self._run_folder.resolve(),
                    rendezvous=f"file://{folder}/rendezvous-{role}",
                    role=role,
                    first_device=number * count,
                )
                for number, role in enumerate((LEARNER, *config.roles.separate))
            ]
            processes: list[SpawnedRank] = []
            try:
                processes += (SpawnedRank(setup.role, rank) for setup in setups for rank in range(count))
            except BaseException:
                for process in processes:
                    process.kill()
                raise
            teams = [(setup, [p for p in processes if p.role == setup.role]) for setup in setups]
            async with serving(teams, failure) as groups:
                yield roles_of(groups, config)


def threads_per_worker(config: RunConfig) -> int:
    """CPU threads of each worker: as configured, else this machine's cores shared out."""
    cores, count = len(os.sched_getaffinity(0)), config.learner.dims.world_size * (1 + len(config.roles.separate))
    return config.learner.threads or max(1, cores // count)
