"""``rl-megatron scale --calibrate``: measures this machine and writes its hardware entry."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from rich.console import Console

from launcher.calibration.asked import calibrate
from rl_megatron.errors import ConfigError
from rl_megatron.options.device import GPU
from rl_megatron.scaling.machines.calibration import MachineLoad, write_calibration


def calibrate_into(path: Path, *, device: str, ranks: int, threads: int) -> None:
    """Measure, with a line of progress for each part, and write ``path``. Raises ConfigError for an unknown device, and
    for a file that could not be written."""
    if device not in ("cpu", GPU):
        raise ConfigError(f"--device {device}: must be cpu or cuda")
    if path.suffix != ".json" or not path.parent.is_dir():
        raise ConfigError(f"--calibrate {path}: give a file NAME.json in a folder that is there")
    console, began = Console(markup=False), time.perf_counter()

    def say(line: str) -> None:
        console.print(f"{time.perf_counter() - began:6.1f} s  {line}", soft_wrap=True, markup=False, highlight=False)

    found = calibrate(device=device, ranks=ranks, threads=threads, say=say)
    write_calibration(path, found)
    console.print(found.name, soft_wrap=True, markup=False)
    for load in (found.alone, found.together):
        if load is not None:
            console.print(_line(load), soft_wrap=True, markup=False, highlight=False)
    console.print(
        f"written: {path}; "
        f"rl-megatron scale --check runs/NAME --machine {shlex.quote(str(path))} compares a run with it",
        soft_wrap=True,
    )


def _line(load: MachineLoad) -> str:
    e, ranks = load.entry, load.curves.ranks
    links = f", messages {e.link:.2f} GB/s and {e.latency * 1e3:.2f} ms a layer" if ranks > 1 else ""
    return (
        f"  {ranks} process{'es' * (ranks > 1)}: products {e.flops / 1e9:,.0f} GFLOP/s, "
        f"memory {e.memory_rate:.1f} GB/s, a layer's launches {e.host * 1e3:.2f} ms{links}"
    )
