"""Compares the memory that the fullest GPU, and the fullest node, need with the memory that they have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

import psutil

from launcher.preflight.devices import count_visible_gpus
from launcher.preflight.subject import Found, Subject, problem, unchecked
from rl_megatron.config.run import RunConfig
from rl_megatron.placement.ranks import ranks_by_role
from rl_megatron.scaling.host_memory import copies_bytes, host_bytes, why_off_gpus
from rl_megatron.scaling.memory import GB, check_memory

_UNITS: Mapping[str, int] = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40}  # of Slurm's --mem


def check(subject: Subject) -> Iterator[Found]:
    """Compares the learner's memory with ``slurm.gpu_memory_gb``, and what it keeps off its GPUs with a node's.

    Raises ConfigError if it does not fit on a GPU.
    """
    config = subject.config
    if config.learner.device == "cpu":
        return
    if check_memory(config, subject.shape, _gpus_here(subject)) is None:
        yield unchecked("the memory of the GPUs, because slurm.gpu_memory_gb is not set")
    away, copied = host_bytes(config, subject.shape), copies_bytes(config, subject.shape)
    if not (needed := away + copied):
        return
    has, said = _node(subject)
    keys = [*(why_off_gpus(config) if away else ()), *(["checkpoint.async_save"] if copied else [])]
    if has is None:
        yield unchecked(f"that a node has {needed / GB:.0f} GB of memory for {' and '.join(keys)}")
    elif away > has:
        yield problem(
            f"{_given(config)} needs {away / GB:.1f} GB of a node's memory for what the learner keeps off its GPUs, "
            f"but {said} {has / GB:.1f} GB; take nodes with more memory, or more nodes (slurm.nodes with learner.dp or "
            "learner.ep), or keep less there"
        )
    elif needed > has:
        besides = f" besides {away / GB:.1f} GB for {' and '.join(why_off_gpus(config))}" if away else ""
        yield problem(
            f"checkpoint.async_save=true needs {copied / GB:.1f} GB of a node's memory for copies of what is saved"
            f"{besides}, but {said} {has / GB:.1f} GB; take nodes with more memory, or more nodes (slurm.nodes with "
            "learner.dp or learner.ep), or set checkpoint.async_save=false: training then waits for each checkpoint"
        )


def _gpus_here(subject: Subject) -> int | None:
    """GPUs of this machine, if the run is on it alone and they are known and enough for the ranks; else None."""
    if subject.for_job or subject.config.run.launcher != "local":
        return None
    count = count_visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or 0
    return count if count >= sum(ranks_by_role(subject.config).values()) else None


def _node(subject: Subject) -> tuple[float | None, str]:
    """Bytes of a node's memory, None if they are not known here, and who says so."""
    config = subject.config
    if not subject.for_job and config.run.launcher != "ray":  # the controller is on one of the nodes
        return psutil.virtual_memory().total, "this machine has"
    asked = config.slurm.memory_per_node or ""
    if (found := re.fullmatch(r"(\d+)([KMGT]?)B?", asked.upper())) and int(found[1]):  # 0: all that a node has
        return float(int(found[1]) * _UNITS[found[2]]), f"slurm.memory_per_node={asked} asks for"
    return None, ""


def _given(config: RunConfig) -> str:
    section = config.learner.offload
    given = section.model_dump(exclude_defaults=True, exclude={"activations"})
    given |= {f"activations.{part}": "true" for part in section.activations.parts}
    texts = [f"learner.offload.{key}={value}" for key, value in given.items()]
    if (rank := config.learner.lora.rank) is not None:
        texts.append(f"learner.lora.rank={rank}")
    return " ".join(texts)
