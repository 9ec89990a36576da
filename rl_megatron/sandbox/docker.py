"""Runs programs in containers of this machine's Docker daemon, by its command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from rl_megatron.config.sections.sandbox import SandboxSection
from rl_megatron.errors import SandboxError
from rl_megatron.sandbox.protocol import PYTHON, Executor, Limits, ProgramEnd, Ran, SandboxProgram

_ASK_SECONDS = 60.0  # for each command to the daemon but the one that waits for the program
_LATER_SECONDS = 5  # after the limit the container ends itself, though nobody asks it to
_XCPU = 128 + 24


class DockerExecutor(Executor):
    """Each program has a container without a network, rights or a writable image; its folder is in memory."""

    def __init__(self, section: SandboxSection) -> None:
        assert section.image is not None
        self._image = section.image

    @override
    async def execute(self, program: SandboxProgram, limits: Limits) -> Ran:
        name = f"rl-megatron-{secrets.token_hex(8)}"
        with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as outer:
            folder = Path(outer) / "files"  # the container's user may read it, of this machine only ours can enter
            folder.mkdir()
            for file, content in program.files.items():
                path = folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            creating = asyncio.create_task(_asked(create_command(name, self._image, folder, program, limits)))
            try:
                await asyncio.shield(creating)
                ran = await _started(name, program.stdin, limits)
            except BaseException:  # it says why, not what else fails then
                with contextlib.suppress(SandboxError):
                    await asyncio.shield(_removed(name, creating))
                raise
            await asyncio.shield(_removed(name, creating))
            return ran


def create_command(name: str, image: str, folder: Path, program: SandboxProgram, limits: Limits) -> list[str]:
    """The command that makes the container, whose first process copies the files and becomes the program."""
    seconds, cpu = math.ceil(limits.seconds) + _LATER_SECONDS, math.ceil(limits.cpu_seconds)
    return [
        *("docker", "create", "--name", name, "--interactive", "--pull", "never", "--log-driver", "none"),
        *("--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--user", "65534:65534", "--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
        *("--pids-limit", str(limits.processes + 1)),  # timeout is one
        *("--ulimit", f"cpu={cpu}:{cpu + 1}", "--ulimit", f"fsize={limits.files_bytes}", "--ulimit", "core=0"),
        *(
            "--tmpfs",
            f"/box:rw,exec,nosuid,nodev,size={limits.files_bytes},mode=700,uid=65534,gid=65534",
            "--workdir",
            "/box",
        ),
        *("--mount", f"type=bind,source={folder},target=/given,readonly"),
        *("--env", "HOME=/box", "--env", "TMPDIR=/box", "--env", "LANG=C.UTF-8", "--entrypoint", "sh"),
        *(image, "-c", f'cp -R /given/. /box && exec timeout -s KILL {seconds} "$@"', "sh"),
        *(["python3", PYTHON] if program.argv is None else program.argv),
    ]


async def why_no_docker() -> str:
    """The version of the daemon that answers, or why none does."""
    try:
        version = await _asked(["docker", "version", "--format", "{{.Server.Version}}"])
    except SandboxError as error:
        return str(error)
    return f"daemon {version.strip()}"


async def _started(name: str, stdin: bytes, limits: Limits) -> Ran:
    process = await _process(["docker", "start", "--attach", "--interactive", name])
    began, ended = time.monotonic(), "done"
    texts = (bytearray(), bytearray())
    try:
        async with asyncio.timeout(limits.seconds):
            if not await _read_all(process, stdin, texts, limits.output_bytes):
                ended = "output"
            else:
                await process.wait()
    except TimeoutError:
        ended = "time"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    seconds = time.monotonic() - began
    state = json.loads(await _asked(["docker", "inspect", "--format", "{{json .State}}", name]))
    if ended == "done" and (state["Error"] or state["Status"] == "created"):
        raise SandboxError(f"the container {name} did not start: {state['Error'] or texts[1].decode(errors='replace')}")
    how, status = _how(state) if ended == "done" else (ended, None)
    out = bytes(texts[0][: limits.output_bytes])
    err = bytes(texts[1][: limits.output_bytes - len(out)])
    return Ran(
        ended=how,  # type: ignore[arg-type]  # one of ProgramEnd
        exit=status,
        stdout=out.decode(errors="replace"),
        stderr=err.decode(errors="replace"),
        seconds=seconds,
    )


def _how(state: dict[str, Any]) -> tuple[ProgramEnd, int | None]:
    status = state["ExitCode"]
    if state["OOMKilled"] and status:
        return "memory", None
    if status == _XCPU:
        return "time", None
    return ("killed", None) if status > 128 else ("done", status)


async def _read_all(
    process: asyncio.subprocess.Process, stdin: bytes, texts: tuple[bytearray, bytearray], most: int
) -> bool:
    """Write the input and read both outputs to their ends; False once they are longer than ``most`` bytes together."""

    async def write() -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(stdin)
            await process.stdin.drain()
            process.stdin.close()

    async def read(stream: asyncio.StreamReader | None, text: bytearray) -> None:
        assert stream is not None
        while (got := await stream.read(1 << 16)) and sum(map(len, texts)) <= most:
            text += got

    writing = asyncio.create_task(write())
    readers = [asyncio.create_task(read(*one)) for one in zip((process.stdout, process.stderr), texts, strict=True)]
    try:
        left = set(readers)
        while left and sum(map(len, texts)) <= most:
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        return sum(map(len, texts)) <= most
    finally:
        for task in (writing, *readers):
            task.cancel()


async def _removed(name: str, creating: asyncio.Task[str]) -> None:
    """Kill the container with all its processes, and remove it, once the command that makes it has ended."""
    await asyncio.wait([creating])
    await _asked(["docker", "rm", "--force", "--volumes", name])


async def _asked(command: Sequence[str]) -> str:
    """What a command to the daemon prints. Raises SandboxError with what it says if it fails or is late."""
    process = await _process(command)
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            out, err = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise SandboxError(f"docker {command[1]} did not end within {_ASK_SECONDS:g} s") from error
    if process.returncode:
        raise SandboxError(f"docker {command[1]}: {err.decode(errors='replace').strip()[:500]}")
    return out.decode(errors="replace")


async def _process(command: Sequence[str]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            env=dict(os.environ),
        )
    except FileNotFoundError as error:
        raise SandboxError("there is no program docker here; install Docker, or set another sandbox.type") from error
