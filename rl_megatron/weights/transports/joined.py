"""A process group of learner and engine ranks, and their rendezvous before each version; the controller can cancel it.

The controller keeps the store of the rendezvous. Before the group is made, and before each version moves, every rank
reports there that it is ready; if one cannot take part, the controller cancels the rendezvous for all. So no rank
blocks in a send to a server that refuses.
"""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from rl_megatron.errors import ConfigError, SyncError

JOINING = "joining the group"
_LOOK_SECONDS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The address at which ``size`` ranks make a group. ``name`` is unique; ``seconds`` limits every wait.

    ``transport`` is a name that `engine_ends` knows; ``backend`` is the group's. ``turns``: learner and engines take
    turns on the same accelerators, so engines keep no transfer buffers between versions.
    """

    host: str
    port: int
    name: str
    size: int
    seconds: float
    transport: str
    backend: str
    turns: bool


class Keeper:
    """The controller's side; it listens only at ``host``. Raises ConfigError if that is no address of this machine."""

    def __init__(self, host: str, seconds: float) -> None:
        self.host, self._seconds = host, seconds
        limit = timedelta(seconds=seconds)
        try:
            listener = socket.create_server((host, 0), backlog=4096)  # torch's own would listen at all addresses
        except OSError as error:
            raise ConfigError(
                f"weights.meeting_host={host}: {error.strerror}; give an address of the controller's node"
            ) from error
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def rendezvous(self, size: int, *, transport: str, backend: str, turns: bool = False) -> Rendezvous:
        """Make the rendezvous of a new group, under a unique name."""
        return Rendezvous(
            host=self.host,
            port=self._store.port,
            name=f"rl_megatron-{secrets.token_hex(16)}",  # an engine may have been in groups of other trainers
            size=size,
            seconds=self._seconds,
            transport=transport,
            backend=backend,
            turns=turns,
        )

    def cancel(self, rendezvous: Rendezvous, what: str, reason: str) -> None:
        """Cancel ``what`` for all ranks that wait for the others."""
        self._store.set(f"{rendezvous.name}/{what}/cancelled", reason)

    def absent(self, rendezvous: Rendezvous, what: str) -> list[int]:
        """Ranks that have not reported ready for ``what``."""
        return [rank for rank in range(rendezvous.size) if not self._store.check([f"{rendezvous.name}/{what}/{rank}"])]


class Member:
    """Rank ``rank`` of the group. Collective; raises SyncError if not all ranks join in time."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rendezvous, self.rank = rendezvous, rank
        limit = timedelta(seconds=rendezvous.seconds)
        try:
            self._store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=limit)
            self.meet(JOINING)
            # As torch's own new_group does, for ranks that have no default group in common.
            group, _ = distributed_c10d._new_process_group_helper(
                rendezvous.size,
                rank,
                [],
                dist.Backend(rendezvous.backend),
                PrefixStore(rendezvous.name, self._store),
                group_name=distributed_c10d.GroupName(rendezvous.name),
                timeout=limit,
            )
        except (RuntimeError, ValueError) as error:
            raise SyncError(
                f"rank {rank} of {rendezvous.size} learner and engine ranks did not meet the others at "
                f"{rendezvous.host}:{rendezvous.port} in {rendezvous.seconds:g} s: {error}"
            ) from error
        self.group: dist.ProcessGroup | None = group
        distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(rendezvous.size)}

    def meet(self, what: str) -> None:
        """Wait until every rank is ready for ``what``. Raises SyncError if it is cancelled, or some are not in time."""
        at, limit = f"{self.rendezvous.name}/{what}", time.monotonic() + self.rendezvous.seconds
        self._store.set(f"{at}/{self.rank}", "")
        keys = [f"{at}/{rank}" for rank in range(self.rendezvous.size)]
        while not self._store.check(keys):
            if self._store.check([f"{at}/cancelled"]):
                raise SyncError(f"{what} was cancelled: {self._store.get(f'{at}/cancelled').decode()}")
            if time.monotonic() > limit:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise SyncError(
                    f"{what} failed, and nothing is served: rank {self.rank} waited {self.rendezvous.seconds:g} s "
                    f"for ranks {missing} of learner and engines"
                )
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Leave the group, if still in it: ranks that wait for this one see its connection close. Not collective."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None  # whose connections end with the last reference
