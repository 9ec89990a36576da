"""Checks of one node without a GPU of its own: disks, memory, the driver's word on its GPUs, clocks. No torch."""

from __future__ import annotations

import csv
import importlib.metadata
import mmap
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import psutil

_SECONDS = 2.0  # that a disk is written, and read
_MOST_BYTES = 2**30
_BLOCK = 2**22
_DRIVER_SECONDS = 20.0
_GPU = {
    "name": "name",
    "driver": "driver_version",
    "memory_mb": "memory.total",
    "used_mb": "memory.used",
    "clock_mhz": "clocks.sm",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "celsius": "temperature.gpu",
    "throttled": "clocks_throttle_reasons.active",
}
"""What nvidia-smi is asked of each GPU, by our names."""


def describe() -> dict[str, float | int | str]:
    """The node's kernel, cores, memory in bytes, free bytes of /dev/shm, load, and packages' versions."""
    memory = psutil.virtual_memory()
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "megatron-core": importlib.metadata.version("megatron-core"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory.total,
        "memory_free": memory.available,
        "shm_free": shutil.disk_usage("/dev/shm").free,
        "load": os.getloadavg()[0],
    }


def gpus(given: str = "") -> list[dict[str, str]]:
    """What the driver says of each GPU; of those alone that ``given`` names, as ``CUDA_VISIBLE_DEVICES``, if it names
    whole GPUs.

    None if there is no driver. Raises OSError if it does not answer. A cluster whose cgroups leave out no device shows
    those of other jobs to the driver.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    asked = f"--query-gpu={','.join(_GPU.values())}"
    named = all(one.isdecimal() or one.startswith("GPU-") for one in given.split(","))  # not -1, nor parts (MIG)
    own = [f"--id={given}"] if named else []
    try:
        done = subprocess.run(
            ["nvidia-smi", asked, *own, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_DRIVER_SECONDS,
            env=dict(os.environ),
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"nvidia-smi did not answer in {_DRIVER_SECONDS:g} s") from error
    if done.returncode:
        raise OSError(f"nvidia-smi: {(done.stdout + done.stderr).strip()[:300]}")
    rows = [row for row in csv.reader(done.stdout.splitlines()) if row]
    return [dict(zip(_GPU, (field.strip() for field in row), strict=False)) for row in rows]


def disk(folder: Path) -> dict[str, float]:
    """Bytes per second that a new file in ``folder`` is written with, synced, and read with, past the page cache.

    It takes twice `_SECONDS` at most, or a gibibyte, but a block at least. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".rehearsal-{platform.node()}-{os.getpid()}"
    block = mmap.mmap(-1, _BLOCK)  # aligned
    block.write(os.urandom(_BLOCK))
    try:
        written, write = _write(path, block)
        return {"written": written, "write": write, "read": _read(path, block)}
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, block: mmap.mmap) -> tuple[int, float]:
    """Bytes, and bytes per second."""
    began, written = time.monotonic(), 0
    with path.open("wb", buffering=0) as file:
        while not written or (written < _MOST_BYTES and time.monotonic() - began < _SECONDS):
            written += file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return written, written / (time.monotonic() - began)


def _read(path: Path, block: mmap.mmap) -> float:
    """Bytes per second."""
    began, count = time.monotonic(), 0
    with path.open("rb", buffering=0) as file:
        while more := file.readinto(block):
            count += more
            if time.monotonic() - began >= _SECONDS:
                break
    return count / (time.monotonic() - began)
