"""Compares what ranks, servers and the controller need with this machine, without loading torch, or with a job's
nodes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from launcher.preflight.subject import Finding, PreflightContext, note, problem, unchecked
from launcher.processes import limits
from launcher.servers.versions import has_module
from rl_megatron.config.beside import separate
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.slurm import SlurmSection, parse_minutes
from rl_megatron.errors import ConfigError
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import make_placement, placeholder_nodes, ranks_by_role
from rl_megatron.placement.seats import server_placements
from rl_megatron.weights.checks.libraries import torch_folder

_CAPABILITIES: Mapping[str, float] = {"tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0}
"""Recipe of ``learner.fp8`` -> lowest compute capability with kernels (TransformerEngine 2.11, quantization.py)."""
_SECONDS = 4.0  # the limit for the driver's answer
_RANK_BYTES = 2**26  # the least that any rank needs: with tiny_cpu's model 117 MiB were measured


def check(subject: PreflightContext) -> Iterator[Finding]:
    """Yields a problem if this machine has too few GPUs, too little memory for the learner's processes, or too low a
    limit of open files."""
    config = subject.config
    if not subject.for_job and config.kind.samples:
        ranks = sum(ranks_by_role(config).values())
        yield from open_files(config, ranks=ranks, requests=_requests(config), drawn=_max_completions(config))
    given = f"learner.device={config.learner.device}"
    if config.learner.device == "cpu":
        if not subject.for_job and config.run.launcher == "local":
            yield from _processes(config)
        return
    if subject.for_job or config.run.launcher != "local":
        yield unchecked("the GPUs of the job's nodes")
        return
    if torch_is_for_cpus():
        yield problem(
            f"{given}, but the installed torch was built without CUDA; install a build with CUDA, or set "
            "learner.device=cpu (rl-megatron doctor shows the devices)"
        )
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = count_visible_gpus(visible)
    ranks = sum(ranks_by_role(config).values())
    said = "is not set" if visible is None else f"is {visible!r}"
    if count is None:
        yield unchecked("the number of GPUs here: nvidia-smi is missing or does not answer")
    elif count == 0:
        yield problem(
            f"{given}, but no GPU is visible here (CUDA_VISIBLE_DEVICES {said}); run it on a machine with GPUs, or set "
            "learner.device=cpu (rl-megatron doctor shows the devices)"
        )
    elif ranks > count:
        yield problem(
            f"{given} with {_count_ranks(config)}, but {count} GPUs are visible here "
            f"(CUDA_VISIBLE_DEVICES {said}): NCCL needs one GPU per rank; lower learner.tp, cp, dp, pp or ep"
        )
    elif said_of_gpus := _float8_on(config) or _servers_on(subject):
        yield problem(said_of_gpus)


def _processes(config: RunConfig) -> Iterator[Finding]:
    """Compares what a CPU learner's ranks need with this machine's memory, and with its limit of open files."""
    ranks, memory = sum(ranks_by_role(config).values()), psutil.virtual_memory().total
    if ranks * _RANK_BYTES > memory:
        yield problem(
            f"{_count_ranks(config)} are {ranks} processes on this machine of {memory / 2**30:.0f} GiB, "
            f"and each needs at least {_RANK_BYTES >> 20} MiB; lower learner.tp, cp, dp, pp or ep"
        )
    if said := limits.problem_of_ranks(ranks):
        yield problem(said)


def open_files(config: RunConfig, *, ranks: int = 0, requests: int = 0, drawn: int = 0) -> Iterator[Finding]:
    """Compares the files that the controller of sampling has open simultaneously with its limit. It has ``ranks``, in
    training also ``requests`` and the trajectories of ``drawn`` completions, in evaluations trajectories alone."""
    most = max((one.concurrency for one in config.environments.values()), default=0)
    for asked, led in ((requests, min(most, drawn)), (0, most)):
        if (asked or led) and (said := limits.problem_of_controller(ranks, asked, led)):
            yield problem(said)
            return


def _requests(config: RunConfig) -> int:
    """Returns the largest number of training requests in flight at servers, each with its own connection."""
    rollout, led = config.rollout, config.training_environments
    if not rollout.served:
        return 0
    group, drawn = rollout.group_size, _max_completions(config)
    completions = min(rollout.server.max_concurrent_groups * group, drawn, rollout.max_in_flight or drawn)
    if set(led) == {"environment"}:  # a trajectory has one turn in flight
        return min(completions, config.environment.concurrency)
    return completions if config.one_by_one or led else completions // group


def _max_completions(config: RunConfig) -> int:
    """Returns the largest number of concurrent completions of training."""
    return config.completions_per_step * (1 + config.train.max_staleness)


def _count_ranks(config: RunConfig) -> str:
    """Returns the ranks of each role: ``2 learner ranks (tp*cp*dp*pp)``."""
    return " and ".join(f"{count} {role} ranks (tp*cp*dp*pp)" for role, count in ranks_by_role(config).items())


def _float8_on(config: RunConfig) -> str:
    """Returns why the learner cannot multiply in float8 on this machine's GPUs; empty if it can, or need not."""
    if (fp8 := config.learner.fp8) is None or not 0 < (here := _capability()) < _CAPABILITIES[fp8]:
        return ""
    able = " or ".join(name for name, least in _CAPABILITIES.items() if here >= least)
    return (
        f"learner.fp8={fp8} needs GPUs of compute capability {_CAPABILITIES[fp8]:g} or more, but those here have "
        f"{here:g}; {f'set {able}, or ' if able else ''}leave it out"
    )


def _servers_on(subject: PreflightContext) -> str:
    """Returns why the servers cannot serve quantized weights on this machine's GPUs; empty if they can."""
    rollout = subject.config.rollout
    if not rollout.served or rollout.server.addresses or rollout.server.quantization == "none":
        return ""
    from launcher.servers.engines import load_adapter  # imports torch

    adapter, options = load_adapter(rollout.engine, subject.shape), shlex.split(rollout.server.options or "")
    return adapter.gpu_problem(rollout.server.quantization, options, _capability())


def _capability() -> float:
    """Returns the greatest compute capability of this machine's GPUs; 0 if the driver does not report it."""
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=_SECONDS, env=dict(os.environ)).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0.0  # ranks, and the first push, refuse what has no kernels
    return max(map(float, re.findall(r"^\d+\.\d+", told, re.M)), default=0.0)


def torch_is_for_cpus() -> bool:
    """True if torch's record of its build names no CUDA; False if it cannot be read."""
    folder = torch_folder()
    record = folder / "version.py" if folder else None
    return record is not None and record.is_file() and bool(re.search(r"^cuda\b.*= None$", record.read_text(), re.M))


def count_visible_gpus(visible: str | None) -> int | None:
    """Returns how many GPUs a process with this CUDA_VISIBLE_DEVICES sees: those before the first invalid one.

    None if the driver does not report how many there are.
    """
    if visible is not None and not visible.strip():
        return 0
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, env=dict(os.environ)
        )
    except FileNotFoundError:
        return None if Path("/proc/driver/nvidia/gpus").is_dir() else 0
    except (OSError, subprocess.TimeoutExpired):
        return None
    there = len(re.findall(r"^GPU \d+:", done.stdout, re.M))
    if visible is None:
        return there
    count = 0
    for entry in visible.split(","):
        if (entry.strip().isdecimal() and int(entry) >= there) or entry.strip().startswith("-"):
            break
        count += 1
    return count


_READ_BY_BASH = re.compile(r"\$[A-Za-z_{(]|(^|:)~")


def check_nodes(subject: PreflightContext) -> Iterator[Finding]:
    """Yields what does not fit a job's nodes, and idle GPUs. A run without a job has no nodes."""
    if not subject.for_job:
        return
    yield from _controller(subject.config.slurm)
    yield from _variables(subject.config.slurm)
    yield from _time(subject.config.slurm)
    yield from check_node_fit(subject.config)


def check_node_fit(config: RunConfig) -> Iterator[Finding]:
    """Yields problems of a job whose ranks or servers do not fit its nodes, and notes on idle GPUs."""
    slurm = config.slurm
    on_gpus, nodes = config.learner.device != "cpu", placeholder_nodes(config)
    if on_gpus and not slurm.gpus_per_node:
        places = config.rollout.served or slurm.container_runtime == "apptainer"  # both need the number
        yield (problem if places else note)(
            f"learner.device={config.learner.device}, but slurm.gpus_per_node=0: the job requests no GPUs; set it to "
            "the number of GPUs per node, with slurm.options=[--gres=none] if Slurm does not know the GPUs"
        )
    for role in (LEARNER, *separate(config)):
        try:
            make_placement(config, nodes[role], role)
        except ConfigError as error:
            yield problem(str(error))
    yield from _idle(config)


def _controller(slurm: SlurmSection) -> Iterator[Finding]:
    """Yields a problem if the controller's interpreter lacks torch: ranks and servers may be in containers, it is not.

    This process has all that the controller needs, so its own interpreter is not asked.
    """
    if slurm.python is None:
        return
    there = has_module("torch", Path(slurm.python))
    key = f"slurm.python={slurm.python}"
    if there is None:
        yield unchecked(f"torch in {key}, which runs the controller outside of containers")
    elif not there:
        yield problem(
            f"{key}: torch is not installed there, but the controller runs there, outside of containers; install this "
            "package and torch there (docs/cluster.md)"
        )


def _variables(slurm: SlurmSection) -> Iterator[Finding]:
    """Yields a note on each variable with a value that looks like a bash expression. The value may be a secret."""
    for name, value in slurm.environment.items():
        if _READ_BY_BASH.search(value):
            yield note(
                f"slurm.environment.{name} is set literally, with its $ or ~, and replaces the value of "
                f"the job; to let bash expand it, set 'slurm.setup=export {name}=...'"
            )


def _time(slurm: SlurmSection) -> Iterator[Finding]:
    """Yields a note on a job that has no time except for saving. A limit of 0 means no limit."""
    if 0 < 60 * parse_minutes(slurm.time) <= slurm.signal_seconds:
        yield note(
            f"slurm.time={slurm.time} is no longer than slurm.signal_seconds={slurm.signal_seconds}, so Slurm "
            "tells the run to save and restart as soon as it starts; raise slurm.time, or lower slurm.signal_seconds"
        )


def _idle(config: RunConfig) -> Iterator[Finding]:
    """Yields a note on GPUs that are idle while servers sample."""
    nodes, server = placeholder_nodes(config), config.rollout.server
    engines = nodes.get("engines", ())
    seats = server_placements(config, nodes[LEARNER], engines)
    each = config.slurm.gpus_per_node
    used, there = len({(s.node, gpu) for s in seats for gpu in s.gpus}), len(engines or nodes[LEARNER]) * each
    if 0 < used < there:
        whose = "of the servers' own nodes" if engines else "of the learner's nodes, which it shares"
        span = server.span(each)
        fit = len(engines or nodes[LEARNER]) // span * (each // (server.ranks // span))
        yield note(
            f"servers sample on {used} of the {there} GPUs {whose}, and the others are idle; "
            f"rollout.server.replicas={fit} uses {fit * server.ranks}"
        )
