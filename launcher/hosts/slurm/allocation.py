"""The Slurm allocation that this process runs in."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.hosts.slurm.calls import call_slurm
from launcher.wire import this_node
from rl_megatron.config.beside import separate
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.errors import ConfigError
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import RankPlacement, cut, extra_role_nodes

_NAME_SECONDS = 60.0  # time until a name server knows a node that a cloud has just created
_LOOK_SECONDS = 1.0
_INHERITED = ("SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK")  # srun would apply the learner's


_OWN = ("env", *(f"--unset={name}" for name in _INHERITED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The allocation that this process runs in."""

    id: str
    restart: int
    this_node: str  # the node of this process
    nodes: tuple[str, ...]  # the learner's
    engine_nodes: tuple[str, ...]  # only for engine servers
    folder: Path  # this attempt's, in the run's folder
    separate: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # nodes only for critic and reference

    @classmethod
    def from_environment(cls, run_folder: Path, config: RunConfig) -> Allocation | None:
        """Reads the environment; None outside a job. Raises ConfigError if it, or scontrol, names no nodes."""
        job, restart = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if job is None:
            return None
        found = cut(_hosts(job), extra_role_nodes(config))
        folder = run_folder / "jobs" / f"{job}-{restart}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(
            id=job,
            restart=restart,
            this_node=this_node(),
            nodes=found[LEARNER],
            engine_nodes=found.get("engines", ()),
            folder=folder,
            separate={role: found[role] for role in separate(config)},
        )

    def ask_requeue(self) -> None:
        """Makes the job's script requeue the job, to resume from a checkpoint."""
        (self.folder / "requeue").touch()

    def blame(self, nodes: Sequence[str]) -> None:
        """Writes the node where a rank died, or did not come up, for the job's script. Names none of several nodes: it
        does not help to leave one out."""
        (self.folder / "failed_node").write_text(f"{nodes[0]}\n" if len(nodes) == 1 else "")

    def address(self) -> str:
        """Returns this node's address for other nodes; loopback if there are none. Raises errors of `find_address`."""
        others = [node for nodes in self.role_nodes.values() for node in nodes if node != self.this_node]
        if not others:
            return "127.0.0.1"
        there = self.find_address(others[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((there, 9))  # sends nothing: only finds the route
            except OSError as error:
                raise ConfigError(
                    f"node {self.this_node} of job {self.id} has no way to {others[0]} ({there}): {error}; fix its "
                    "network, "
                    "or leave one of them out by slurm.exclude"
                ) from error
            return str(probe.getsockname()[0])

    def find_address(self, node: str) -> str:
        """Returns the IPv4 address of another node; asked for a minute, so not on the event loop.

        Raises ConfigError if its name has no address by then.
        """
        end = time.monotonic() + _NAME_SECONDS
        while True:
            try:
                return socket.gethostbyname(node)
            except OSError as error:
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"node {node} of job {self.id} has no address here after {_NAME_SECONDS:g} s: {error}. Nodes "
                        f"reach each other over IPv4, by Slurm's names: have `getent ahostsv4 {node}` find an address "
                        f"on {self.this_node}, by DNS or /etc/hosts"
                    ) from error
            time.sleep(_LOOK_SECONDS)

    @property
    def role_nodes(self) -> dict[str, tuple[str, ...]]:
        """Nodes by role, in the order of the job's."""
        engines = {"engines": self.engine_nodes} if self.engine_nodes else {}
        return {LEARNER: self.nodes, **self.separate, **engines}

    def learner_options(self) -> list[str]:
        """Returns options of srun that keep a step on the learner's nodes, if the job has others."""
        return self._nodelist_options(LEARNER)

    def _nodelist_options(self, role: str) -> list[str]:
        by_role = self.role_nodes
        return [f"--nodelist={','.join(by_role[role])}"] if len(by_role) > 1 else []

    def separate_command(self, command: Sequence[str], role: str) -> list[str]:
        """Returns an srun command for a role with its own nodes, with all their memory and GPUs."""
        return [*_OWN, command[0], *self._nodelist_options(role), "--mem=0", *command[1:]]

    def server_command(self, nodes: Sequence[str], cpus: int | None) -> list[str]:
        """Returns the srun command for each node, with all its memory and GPUs, alongside other steps."""
        return [
            *_OWN,
            "srun",
            *("--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", f"--nodelist={','.join(nodes)}"),
            *(*cores_option(cpus), "--mem=0"),
        ]


def step_command(slurm: SlurmSection, placement: RankPlacement, *, python: str, where: Sequence[str] = ()) -> list[str]:
    """Returns the srun command that runs worker/node.py on every node, in a container if given. Tasks read `Muster`."""
    nodes = len(placement.nodes)
    return [
        "srun",
        *where,
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--job-name={placement.role}",  # the name in `squeue --steps`
        *cores_option(slurm.cores(placement.ranks_per_node)),
        "--kill-on-bad-exit=1",  # a rank that dies before it connects ends the step
        "--label",  # output, which goes to step.txt, with the number of the node
        *slurm.container_options(slurm.container, Path.cwd()),
        *slurm.container_prefix(slurm.container),
        slurm.container_python if slurm.container else python,
        *("-P", "-m", "launcher.worker.node"),
    ]


def rank_command(slurm: SlurmSection, placement: RankPlacement, allocation: Allocation, python: str) -> list[str]:
    """Returns the `step_command` of the ranks of a role on its nodes of the allocation."""
    if placement.role == LEARNER:
        return step_command(slurm, placement, python=python, where=allocation.learner_options())
    return allocation.separate_command(step_command(slurm, placement, python=python), placement.role)


def cores_option(cores: int | None) -> list[str]:
    """Returns the option of srun that gives each task exactly this many cores (it implies --exact). None: without it a
    task has all cores that the job has on its node."""
    return [] if cores is None else [f"--cpus-per-task={cores}"]


def _hosts(job: str) -> tuple[str, ...]:
    variable = "SLURM_JOB_NODELIST"
    if variable not in os.environ:
        raise ConfigError(
            f"job {job}: {variable} is not set here: this is no process of a job that "
            "rl-megatron submit sent; submit it, or set run.launcher=local"
        )
    try:
        return tuple(call_slurm(["scontrol", "show", "hostnames", os.environ[variable]]).split())
    except ConfigError as error:
        raise ConfigError(f"job {job}: its nodes are not known: {error}") from error
