"""Starts the processes that calibrate this machine, and makes a calibration of what they measure."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from launcher.processes.environment import variables
from launcher.processes.last_words import end_of
from rl_megatron.errors import RLMegatronError
from rl_megatron.options.device import GPU
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.machines.calibration import Calibration, Curves, today

SILENT_SECONDS = 900.0
"""A process that measures says each curve that it has done; one that says nothing for so long hangs."""


def calibrate(*, device: str, ranks: int, threads: int, say: Callable[[str], None]) -> Calibration:
    """Measure one process alone, then ``ranks`` at once, and fit an entry to each. ``say`` takes a line of progress.

    On a CPU a process alone counts its processor time, which suits a machine that does other work too. Raises
    RLMegatronError with the last words of a process that fails.
    """
    from rl_megatron.scaling.machines.fitting import fit_load

    dtype = "float32" if device == "cpu" else "bfloat16"
    loads = []
    for count in dict.fromkeys((1, ranks)):
        asked = {"ranks": count, "device": device, "dtype": dtype, "threads": threads}
        curves = _curves({**asked, "processor": count == 1 and device == "cpu"}, say)
        say(f"{_named(count)}: fitting")
        loads.append(fit_load(curves, device=device, dtype=dtype))
    versions = {name: version(name) for name in ("torch", "megatron-core")}
    return Calibration.model_validate(
        {
            "name": _name(device),
            "date": today(),
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "memory": _memory(device) / (1 if device == GPU else ranks),
            "versions": {"python": platform.python_version(), **versions},
            "alone": loads[0],
            "together": loads[1] if len(loads) > 1 else None,
        }
    )


def _curves(asked: dict[str, Any], say: Callable[[str], None]) -> Curves:
    """What rank 0 measures while all ranks do the same."""
    ranks = asked["ranks"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        shared = {**asked, "rendezvous": f"file://{folder}/rendezvous"}
        running = [stack.enter_context(_running({**shared, "rank": rank}, Path(folder))) for rank in range(ranks)]
        found: Curves | None = None
        for line in _lines(running[0], f"process 0 of {ranks} that calibrates"):
            answer = json.loads(line)
            if "curves" in answer:
                found = Curves.model_validate_json(json.dumps(answer["curves"]))
            else:
                say(f"{_named(ranks)}: {answer['done']}")
        for rank, process in enumerate(running):
            try:
                failed = process.wait(SILENT_SECONDS) != 0
            except subprocess.TimeoutExpired as error:
                raise RLMegatronError(f"process {rank} of {ranks} that calibrates did not end: {error}") from error
            if failed or (rank == 0 and found is None):
                raise RLMegatronError(
                    f"process {rank} of {ranks} that calibrates ended with status {process.returncode};"
                    f"{end_of(Path(folder) / f'rank{rank}.txt')}"
                )
    assert found is not None
    return found


def _lines(process: subprocess.Popen[str], who: str) -> Iterator[str]:
    """What the process says, a line each. Kills one that is silent for `SILENT_SECONDS`, and raises RLMegatronError."""
    silent = threading.Event()

    def end() -> None:
        silent.set()
        process.kill()

    assert process.stdout is not None
    line = "?"
    while line:
        limit = threading.Timer(SILENT_SECONDS, end)
        limit.start()
        line = process.stdout.readline()
        limit.cancel()
        if line:
            yield line
    if silent.is_set():
        raise RLMegatronError(f"{who} said nothing for {SILENT_SECONDS:g} s, and was ended")


@contextlib.contextmanager
def _running(asked: dict[str, Any], folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "launcher.calibration.rank", str(os.getpid())]
    environment = {**os.environ, **variables(threads=asked["threads"], device=asked["device"])}
    with (folder / f"rank{asked['rank']}.txt").open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if asked["rank"] == 0 else subprocess.DEVNULL,
            stderr=errors,
            text=True,
            env=environment,
        )
    try:
        stream: IO[str] | None = process.stdin
        assert stream is not None
        with stream:
            json.dump(asked, stream)
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _named(ranks: int) -> str:
    return "one process" if ranks == 1 else f"{ranks} processes"


def _name(device: str) -> str:
    if device == GPU:
        import torch

        return f"{torch.cuda.get_device_name(0)} in {platform.node()}"
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} in {platform.node()}"


def _memory(device: str) -> float:
    """GB of a GPU, or of the machine."""
    if device == GPU:
        import torch

        return float(torch.cuda.get_device_properties(0).total_memory) / GB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
