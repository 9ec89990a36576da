"""Environment variables of a rank's process, which must be set before it loads torch. Ties a process to its parent, and
counts the CPU threads of a rank.

Imports without garbage collection: torch and megatron create a million objects, and hardly any garbage.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping

from launcher.processes.engine_guard import compiled_folder
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.placement.ranks import RankPlacement, ranks_by_role

# oneDNN, and torch's layer over it, cache so many compiled kernels, one per shape: 1,024 by default, of some 0.4 MB
# each, which ragged micro-batches fill within a thousand steps. A step needs fewer than these.
_KEPT_KERNELS = "128"


def variables(*, threads: int, device: str) -> Mapping[str, str]:
    """Returns variables for a rank of ``learner.device`` with this many CPU threads. A CPU rank sees no GPU, and caches
    few kernels unless the user sets a number. For other ranks torch counts GPUs without initializing CUDA, so that the
    process that has imported torch may fork. Silences torch's profiler unless the user sets its log level."""
    out = {"OMP_NUM_THREADS": str(threads), "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")}
    out |= compiled_folder(lambda: _own_folder().name)
    if device == "cpu":
        out["CUDA_VISIBLE_DEVICES"] = ""
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            out[name] = os.environ.get(name, _KEPT_KERNELS)
    else:
        out["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return out


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for this process and those that it starts; it is removed as this one ends."""
    return tempfile.TemporaryDirectory(prefix="rl_megatron-torch-", ignore_cleanup_errors=True)


_ONE_ORDER: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),  # torch.use_deterministic_algorithms
    "NCCL_ALGO": ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS"),  # Megatron-LM's --deterministic-mode
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),  # TransformerEngine's attention
}


def missing_order_variables(given: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables of ``learner.deterministic=true`` that an environment lacks. cuBLAS, NCCL and
    TransformerEngine read them when they are first used. Raises ConfigError for other values in it."""
    for name, allowed in _ONE_ORDER.items():
        if name in given and given[name] not in allowed:
            raise ConfigError(
                f"learner.deterministic=true, but {name}={given[name]} in the ranks' environment: only with "
                f"{' or '.join(allowed)} are sums made in one order; unset it, or set one of them"
            )
    return {name: allowed[0] for name, allowed in _ONE_ORDER.items() if name not in given}


@contextlib.contextmanager
def inherited(*, threads: int, device: str) -> Iterator[None]:
    """Sets variables of this process that processes started within inherit."""
    new = variables(threads=threads, device=device)
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disables garbage collection within. Objects that exist at the end stay, so that later collections skip them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when ``parent``, its own, dies. Exits immediately if that is dead already."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Becomes the parent of descendants whose own parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def threads_per_worker(config: RunConfig) -> int:
    """Returns the number of CPU threads of each worker, by default an equal share of this machine's cores."""
    cores, count = len(os.sched_getaffinity(0)), sum(ranks_by_role(config).values())
    return config.learner.threads or max(1, cores // count)


def threads_per_rank(placement: RankPlacement) -> int:
    """Returns the number of CPU threads of a rank: those of a task of the job, or a share of this node's cores."""
    given = os.environ.get("SLURM_CPUS_PER_TASK")
    return int(given) if given else max(1, len(os.sched_getaffinity(0)) // placement.ranks_per_node)
