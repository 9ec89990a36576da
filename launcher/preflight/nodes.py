"""Compares a job's ranks and servers with its nodes and their GPUs, and looks at its controller's interpreter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from launcher.preflight.subject import Found, Subject, note, problem, unchecked
from launcher.servers.versions import has_module
from rl_megatron.config.beside import separate
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.slurm import SlurmSection, minutes_of
from rl_megatron.errors import ConfigError
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import made_up_nodes, placement_of
from rl_megatron.placement.seats import seats_of

_READ_BY_BASH = re.compile(r"\$[A-Za-z_{(]|(^|:)~")


def check(subject: Subject) -> Iterator[Found]:
    """Yields what does not fit a job's nodes, and idle GPUs. A run without a job has no nodes."""
    if not subject.for_job:
        return
    yield from _controller(subject.config.slurm)
    yield from _variables(subject.config.slurm)
    yield from _time(subject.config.slurm)
    yield from beside_nodes(subject.config)


def beside_nodes(config: RunConfig) -> Iterator[Found]:
    """Yields problems of a job whose ranks or servers do not fit its nodes, and notes on idle GPUs."""
    slurm = config.slurm
    on_gpus, nodes = config.learner.device != "cpu", made_up_nodes(config)
    if on_gpus and not slurm.gpus_per_node:
        places = config.rollout.served or slurm.container_runtime == "apptainer"  # both need the number
        yield (problem if places else note)(
            f"learner.device={config.learner.device}, but slurm.gpus_per_node=0: the job requests no GPUs; set it to "
            "the GPUs of a node, with slurm.options=[--gres=none] if Slurm itself knows of no GPUs"
        )
    if on_gpus and nodes.get("engines") and not slurm.engine_gpus:
        yield problem("slurm.engines.gpus_per_node=0: its servers need GPUs; set it to the GPUs of a node")
    for role in (LEARNER, *separate(config)):
        try:
            placement_of(config, nodes[role], role)
        except ConfigError as error:
            yield problem(str(error))
    yield from _idle(config)


def _controller(slurm: SlurmSection) -> Iterator[Found]:
    """Yields a problem if the controller's interpreter lacks torch: ranks and servers may be in containers, it is not.

    This process has all that the controller needs, so its own interpreter is not asked.
    """
    if slurm.python is None:
        return
    there = has_module("torch", Path(slurm.python))
    key = f"slurm.python={slurm.python}"
    if there is None:
        yield unchecked(f"torch in {key}, in which the controller runs, outside of containers")
    elif not there:
        yield problem(
            f"{key}: torch is not installed there, and the controller runs in it, outside of containers; install this "
            "package and torch there (slurm/README.md)"
        )


def _variables(slurm: SlurmSection) -> Iterator[Found]:
    """Yields a note on each variable that looks as if bash read its value, which may be a secret."""
    for name, value in slurm.environment.items():
        if _READ_BY_BASH.search(value):
            yield note(
                f"slurm.environment.{name} is set as it is written, with its $ or ~, in place of what the "
                f"job had; if bash is to read it, give it as 'slurm.setup=export {name}=...'"
            )


def _time(slurm: SlurmSection) -> Iterator[Found]:
    """Yields a note on a job whose time is all for saving; a limit of 0 is none."""
    if 0 < 60 * minutes_of(slurm.time) <= slurm.signal_seconds:
        yield note(
            f"slurm.time={slurm.time} is no longer than slurm.signal_seconds={slurm.signal_seconds}: the run is asked "
            "to save and come back as soon as it starts; raise slurm.time, or lower slurm.signal_seconds"
        )


def _idle(config: RunConfig) -> Iterator[Found]:
    """Yields a note on GPUs that are idle while servers sample."""
    nodes, server = made_up_nodes(config), config.rollout.server
    engines = nodes.get("engines", ())
    seats = seats_of(config, nodes[LEARNER], engines)
    each = config.slurm.engine_gpus if engines else config.slurm.gpus_per_node
    used, there = len({(s.node, gpu) for s in seats for gpu in s.gpus}), len(engines or nodes[LEARNER]) * each
    if 0 < used < there:
        whose = "of the servers' own nodes" if engines else "of the learner's nodes, which it shares"
        span = server.span(each)
        fit = len(engines or nodes[LEARNER]) // span * (each // (server.ranks // span))
        yield note(
            f"servers sample on {used} of the {there} GPUs {whose}, and the others are idle meanwhile; "
            f"rollout.server.replicas={fit} uses {fit * server.ranks}"
        )
