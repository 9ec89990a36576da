"""Checks every node of a rehearsal, and the links between them, before a run starts there."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.hosts.slurm.allocation import Allocation
from launcher.hosts.slurm.script import cores_of
from launcher.hosts.threads import threads_per_rank
from launcher.processes.last_words import end_of
from launcher.rehearsal.links import open_store
from launcher.rehearsal.messages import Survey
from launcher.wire import channel
from launcher.wire.greetings import this_node
from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import Placement, group_ranks, placement_of

_BYTES_ON_CPUS, _BYTES_ON_GPUS = 2**20, 2**28
_JOIN_SECONDS = 60.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """What the nodes answered, by node, in order; what each failed at; and the kinds of groups that were measured."""

    seconds: float
    answers: Mapping[str, Mapping[str, Any]]
    failures: Mapping[str, Sequence[str]]
    by_process: Mapping[int, str] = field(default_factory=dict)  # the node of each link process

    def links(self) -> list[Mapping[str, Any]]:
        """The answers of all link processes."""
        return [link for answer in self.answers.values() for link in answer.get("links", ())]

    def pairs(self) -> dict[tuple[str, str], float]:
        """Bytes per second between neighbouring nodes, in the slower direction."""
        return {
            (self.by_process[link["process"]], self.by_process[int(other)]): rate
            for link in self.links()
            for other, rate in link.get("pairs", ())
        }

    def groups(self) -> dict[str, dict[tuple[int, ...], float]]:
        """By kind of group, the bytes per second of each group's slowest process."""
        out: dict[str, dict[tuple[int, ...], float]] = {}
        for link in self.links():
            for kind, (ranks, rate) in link.get("groups", {}).items():
                found, group = out.setdefault(kind, {}), tuple(ranks)
                found[group] = min(rate, found.get(group, rate))
        return out


def survey(config: RunConfig, folder: Path, allocation: Allocation | None, limit: float) -> Surveyed:
    """Check all nodes of the allocation, or this machine; answers go to ``folder``. It takes ``limit`` seconds at most.

    Raises ConfigError if the ranks do not fit the nodes.
    """
    began = time.monotonic()
    nodes = {LEARNER: (this_node(),)} if allocation is None else allocation.by_role
    placement = _here(config) if allocation is None else placement_of(config, nodes[LEARNER])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with channel.listen("127.0.0.1" if allocation is None else allocation.address(), backlog=4096) as listener:
        asked = _asked(config, folder, placement, nodes, listener.getsockname())
        store = open_store(listener, asked)
    with (folder / "survey.txt").open("ab") as output, contextlib.ExitStack() as stack:
        running = [stack.enter_context(_running(c, asked, output)) for c in commands(config, placement, allocation)]
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, began + limit - time.monotonic()))
    del store
    return read_answers(asked, folder, seconds=time.monotonic() - began, limit=limit)


def _here(config: RunConfig) -> Placement:
    """All ranks on this machine."""
    dims = config.learner.dims
    return Placement(dims=dims, nodes=(this_node(),), ranks_per_node=dims.world_size)


def _asked(
    config: RunConfig,
    folder: Path,
    placement: Placement,
    nodes: Mapping[str, Sequence[str]],
    store: tuple[str, int],
) -> Survey:
    """The learner's ranks each have a process, other roles' nodes one."""
    others = [node for role, named in nodes.items() if role != LEARNER for node in named]
    groups = [(kind, found) for kind, found in group_ranks(placement.dims).items() if len(found[0]) > 1]
    device = config.learner.device
    disks = [str(folder.resolve())] + ([str(config.weights.folder)] if config.weights.folder is not None else [])
    return Survey(
        nodes=[(node, placement.ranks_per_node) for node in placement.nodes] + [(node, 1) for node in others],
        groups=groups,
        store=store,
        device=device,
        threads=config.learner.threads or threads_per_rank(placement),
        num_bytes=_BYTES_ON_CPUS if device == "cpu" else _BYTES_ON_GPUS,
        seconds=_JOIN_SECONDS,
        answers=str(folder.resolve()),
        disks=disks,
    )


def commands(config: RunConfig, placement: Placement, allocation: Allocation | None) -> list[list[str]]:
    """The commands that read the survey: one here, or one for each role's nodes."""
    slurm = config.slurm
    python = slurm.container_python if slurm.container and allocation is not None else sys.executable
    task = [python, "-P", "-m", "launcher.rehearsal.node"]
    if allocation is None:
        return [task]
    contained = [*slurm.container_options(slurm.container, Path.cwd()), *slurm.container_prefix(slurm.container)]
    cpus = dict.fromkeys(allocation.by_role, slurm.cores(placement.ranks_per_node))
    if allocation.heterogeneous:
        others = (role for role in allocation.by_role if role != LEARNER)
        cpus |= {role: cores_of(config, role, len(allocation.by_role[role])) for role in others}
    return allocation.everywhere([*contained, *task], cpus)


@contextlib.contextmanager
def _running(command: Sequence[str], asked: Survey, output: Any) -> Any:
    """A process that reads the survey; it is ended on leaving."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=dict(os.environ)
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(asked.line())
        process.stdin.close()
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_answers(asked: Survey, folder: Path, *, seconds: float, limit: float) -> Surveyed:
    """Read and remove the nodes' answers in ``folder``, which were waited for for ``seconds``."""
    answers: dict[str, Any] = {}
    failures: dict[str, list[str]] = {}
    for node, _ in asked.nodes:
        file = folder / f"{node}.json"
        if not file.is_file():
            failures[node] = [f"it gave no answer in {min(seconds, limit):.0f} s;{end_of(folder / 'survey.txt')}"]
            continue
        answers[node] = json.loads(file.read_text())
        os.unlink(file)
        wrong = list(answers[node]["problems"])
        if "links" not in answers[node]:
            wrong.append(f"its links were not measured in {limit:.0f} s")
        errors = {link["error"] for link in answers[node].get("links", ()) if "error" in link}
        if wrong := [*wrong, *sorted(errors)]:
            failures[node] = wrong
    by_process = {process: node for node, _ in asked.nodes for process in asked.processes(node)}
    return Surveyed(seconds=seconds, answers=answers, failures=failures, by_process=by_process)
