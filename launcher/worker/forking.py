"""Starts the ranks of a machine from one process that has imported for all of them. The ranks are its forks or, if it
cannot fork, plain processes that run the same program."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import psutil

from launcher.processes.environment import gc_disabled

BLOCKED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Blocked in every rank and its parent: a terminal or Slurm sends them to all processes of a run."""
_LEARNER = ("rl_megatron.learner.megatron", "rl_megatron.learner.world")
_OTHERS = (  # they import nearly all that a rank imports until its second step
    *("torch", "torch._dynamo", "launcher.worker.process", "rl_megatron.observability.log"),
    *("rl_megatron.weights.layouts.families", "rl_megatron.weights.layouts.learner", "launcher.runs.folder"),
    *("rl_megatron.weights.routes.group", "rl_megatron.weights.routes.mirror"),
    *("rl_megatron.weights.checks.reports", "rl_megatron.engines.local.engine", "rl_megatron.algorithms.losses"),
    "rl_megatron.weights.checkpoints.safetensors_io",
)
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED, cuda.h


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """A rank's program: ``main(arguments)`` of ``module``. ``files``: this process's descriptors, by the numbers that
    they have in the program."""

    module: str
    arguments: tuple[str, ...]
    files: Mapping[int, int]


def rank_modules(device: str) -> tuple[str, ...]:
    """Returns the modules that all ranks of ``learner.device`` import.

    With flash-attn installed, TransformerEngine queries the GPU's kind at import (its
    attention/dot_product_attention/backends.py). A process that has done so must not fork.
    """
    asks = all(importlib.util.find_spec(name) is not None for name in ("transformer_engine", "flash_attn"))
    return _OTHERS if device != "cpu" and asks else (*_LEARNER, *_OTHERS)


def import_all(modules: Sequence[str]) -> None:
    """Imports before the first fork. Errors are ignored: a rank raises them again, and reports them."""
    signal.pthread_sigmask(signal.SIG_SETMASK, BLOCKED_SIGNALS)
    silence_warnings()
    with gc_disabled():  # ranks' collections skip imported objects, too, so that their pages stay shared
        given = os.environ.get("OPENBLAS_NUM_THREADS")
        os.environ["OPENBLAS_NUM_THREADS"] = given or "1"  # numpy's would start its threads now
        with contextlib.suppress(BaseException):
            importlib.import_module("numpy")
        if given is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        for module in modules:
            with contextlib.suppress(BaseException):
                importlib.import_module(module)


def silence_warnings() -> None:
    """Silences megatron's warnings about missing packages, which `doctor` reports."""
    warnings.filterwarnings("ignore", message=r"(Transformer Engine|Apex).* not installed")


def no_fork_reason() -> str:
    """Returns why this process cannot fork ranks (state that fails in them or would be shared), or an empty string."""
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        return f"the imports started threads: there are {count} (known to Python: {names})"
    if _gpu_in_use():
        return "the imports initialized CUDA"
    if found := psutil.Process().net_connections("inet"):
        return f"the imports opened a socket at {found[0].laddr}"
    if (mask := signal.pthread_sigmask(signal.SIG_BLOCK, ())) != BLOCKED_SIGNALS:
        return f"the imports changed the blocked signals to {sorted(signal.Signals(n).name for n in mask)}"
    return ""


def _gpu_in_use() -> bool:
    """True if this process has called cuInit, through torch or not. Asks the driver only if it is loaded."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    context = ctypes.c_void_p()
    return bool(driver.cuCtxGetCurrent(ctypes.byref(context)) != _NOT_INITIALIZED)


def start(program: RankProgram, hindered: str, close: Iterable[int] = ()) -> int:
    """Starts a rank: a fork, or if that is ``hindered`` a new interpreter. Returns its pid.

    ``close``: descriptors of this process that a fork must not keep.
    """
    if hindered:
        command = [sys.executable, "-P", "-m", program.module, *program.arguments]
        actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in program.files.items()]
        return os.posix_spawn(sys.executable, command, os.environ, file_actions=actions, setsigmask=BLOCKED_SIGNALS)
    for output in (sys.stdout, sys.stderr):
        output.flush()  # otherwise the fork would write it again
    pid = os.fork()
    if pid == 0:
        _run_child(program, close)
    return pid


def _run_child(program: RankProgram, close: Iterable[int]) -> NoReturn:
    code = 1
    try:
        for theirs, ours in program.files.items():
            os.dup2(ours, theirs)
        for descriptor in {*program.files.values(), *close}:
            os.close(descriptor)
        _reseed()
        importlib.import_module(program.module).main(program.arguments)
        code = 0
    except BaseException:  # noqa: BLE001  the process boundary
        traceback.print_exc()
    finally:
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                output.flush()
        os._exit(code)


def _reseed() -> None:
    """Seeds from the system, as a new interpreter does: forks would all draw alike. Python's own does so by itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
