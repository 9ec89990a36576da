"""Preflight's checks by the plan: compares the bytes that GPUs and nodes need with their memory, and reports the cost
of a job's pushes and checkpoints. A push into processes that cannot map the memory is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import psutil

from launcher.preflight.devices import count_visible_gpus
from launcher.preflight.model_files import fitting_problems, seen_problems, usable_problems
from launcher.preflight.subject import Finding, PreflightContext, fact, note, problem, run_check, unchecked
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB, gigabytes
from rl_megatron.feature import adapter_layouts
from rl_megatron.placement.files import weights_folder
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import make_placement, placeholder_nodes, ranks_by_role
from rl_megatron.rules import as_given
from tools.planner.estimates import estimate
from tools.planner.memory import (
    check_memory,
    copies_bytes,
    file_bytes,
    filled_bytes,
    host_bytes,
    host_memory_keys,
    sent_straight,
)

_UNITS: Mapping[str, int] = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40}  # units of Slurm's --mem


def memory(subject: PreflightContext) -> Iterator[Finding]:
    """Compares the learner's memory with ``slurm.gpu_memory_gb`` and a run's data in a node's memory with that memory.
    Compares the weight file with its file system, if that is this machine's, and checks who reads the file."""
    config = subject.config
    yield from usable_problems(config, here=not subject.for_job)
    if _is_here(subject):
        when = " at the run's end, and when a server is restarted" if sent_straight(config) else ""
        yield from run_check("memory", fitting_problems(config, filled_bytes(config, subject.shape), when))
        yield from seen_problems(config)
    if config.learner.device != "cpu":
        yield from run_check("memory", _on_gpus(subject))
        yield from _on_nodes(subject)


def _on_gpus(subject: PreflightContext) -> Iterator[Finding]:
    """Raises ConfigError if it does not fit."""
    if check_memory(subject.config, subject.shape, _gpus_here(subject)) is None:
        yield unchecked("the memory of the GPUs, because slurm.gpu_memory_gb is not set")


def _on_nodes(subject: PreflightContext) -> Iterator[Finding]:
    parts = [part for part in _parts(subject) if part.size]
    if not parts:
        return
    (has, said), needed = _node(subject), sum(part.size for part in parts)
    if has is None:
        keys = " and ".join(part.keys for part in parts)
        yield unchecked(f"that a node has {needed / GB:.0f} GB of memory for {keys}")
        return
    sums = accumulate(part.size for part in parts)
    if (last := next((number for number, held in enumerate(sums) if held > has), None)) is not None:
        *before, part = parts[: last + 1]
        besides = " and ".join(f"{gigabytes(other.size)[0]} for {other.keys}" for other in before)
        size, room = gigabytes(part.size, has)
        yield problem(
            f"{part.given} needs {size} of a node's memory for {part.what}"
            f"{besides and f' besides {besides}'}, but {said} {room}; take nodes with more memory, or "
            f"{part.remedy}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A need of ``size`` bytes of a node's memory: its ``keys``, as they are ``given``, and ``what`` it is for."""

    size: float
    keys: str
    given: str
    what: str
    remedy: str


def _parts(subject: PreflightContext) -> Iterator[_Part]:
    """Yields the parts in the order in which they must fit."""
    config, shape, folder = subject.config, subject.shape, weights_folder(subject.config)
    more_nodes = "more nodes (slurm.nodes with learner.dp or learner.ep), or"
    yield _Part(
        size=host_bytes(config, shape),
        keys=" and ".join(host_memory_keys(config)),
        given=_given(config),
        what="what the learner keeps off its GPUs",
        remedy=f"{more_nodes} keep less there",
    )
    yield _Part(
        size=file_bytes(config, shape),
        keys=f"weights.folder={folder}",
        given=f"weights.folder={folder}",
        what="the file of weights",
        remedy="set weights.folder to a folder on disk that all nodes see",
    )
    yield _Part(
        size=copies_bytes(config, shape),
        keys="checkpoint.async_save",
        given="checkpoint.async_save=true",
        what="copies of what is saved",
        remedy=f"{more_nodes} set checkpoint.async_save=false: training then waits for each checkpoint",
    )


def _gpus_here(subject: PreflightContext) -> int | None:
    """Counts this machine's GPUs if the run is only on it and they are known and enough for the ranks; else None."""
    if subject.for_job or subject.config.run.launcher != "local":
        return None
    count = count_visible_gpus(subject.environment.get("CUDA_VISIBLE_DEVICES")) or 0
    return count if count >= sum(ranks_by_role(subject.config).values()) else None


def _is_here(subject: PreflightContext) -> bool:
    """True if this machine is one of the run's nodes: the controller is on one, except under Ray."""
    return not subject.for_job and subject.config.run.launcher != "ray"


def _node(subject: PreflightContext) -> tuple[float | None, str]:
    """Returns bytes of a node's memory, None if they are unknown here, and the source of the number in words."""
    config = subject.config
    if _is_here(subject):
        return psutil.virtual_memory().total, "this machine has"
    asked = config.slurm.memory_per_node or ""
    if (found := re.fullmatch(r"(\d+)([KMGT]?)B?", asked.upper())) and int(found[1]):  # 0: all that a node has
        return float(int(found[1]) * _UNITS[found[2]]), f"slurm.memory_per_node={asked} asks for"
    return None, ""


def _given(config: RunConfig) -> str:
    section = config.learner.offload
    texts = [
        f"learner.offload.{key}={as_given(value)}" for key, value in section.model_dump(exclude_defaults=True).items()
    ]
    if (adapters := adapter_layouts(config.learner)) is not None:
        texts.append(adapters.given)
    return " ".join(texts)


def pushes(subject: PreflightContext) -> Iterator[Finding]:
    """Yields facts about a job, and notes. Raises ConfigError if the layout, the ranks or the servers do not fit."""
    config = subject.config
    yield from _movable_segments(subject)
    if not subject.for_job:
        return
    if config.run.launcher == "local":  # `submit` sets it
        config = config.model_copy(update={"run": config.run.model_copy(update={"launcher": "slurm"})})
    make_placement(config, placeholder_nodes(config)[LEARNER])
    found = estimate(config, subject.shape)
    yield from map(fact, found.lines())
    yield from map(note, found.warnings())


def _movable_segments(subject: PreflightContext) -> Iterator[Finding]:
    """Yields a problem if processes would map memory of another's allocator that it may move."""
    config = subject.config
    given = subject.environment
    if config.learner.device == "cpu" or not config.transport.last_hop:
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"\bexpandable_segments\s*:\s*true", given.get(name, ""), re.IGNORECASE):
            yield problem(
                f"{name}={given[name]}: weights.transport=direct maps one process's GPU memory in another, which "
                "torch's expandable segments do not allow; leave expandable_segments out, or set weights.transport=file"
            )
