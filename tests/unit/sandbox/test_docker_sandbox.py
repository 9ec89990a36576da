"""Programs in containers of a real Docker daemon, where there is one; the image is made of this machine's own files."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.config.sections.sandbox import SandboxSection
from rl_megatron.errors import SandboxError
from rl_megatron.sandbox.docker import create_command
from rl_megatron.sandbox.protocol import Limits, Ran, SandboxProgram
from rl_megatron.sandbox.table import Sandbox

LIMITS = Limits(
    seconds=30, cpu_seconds=10, memory_bytes=128 << 20, processes=8, output_bytes=1 << 16, files_bytes=16 << 20
)


def there_is_a_daemon() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, check=False, timeout=60).returncode == 0


with_docker = pytest.mark.skipif(not there_is_a_daemon(), reason="no Docker daemon answers here")


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    name = f"rl-megatron-test:{uuid.uuid4().hex[:12]}"
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}").resolve()
    tools = [Path(shutil.which(tool) or "").resolve() for tool in ("sh", "cp", "timeout")]
    library = Path(sys.base_prefix, "lib", f"python3.{sys.version_info.minor}")
    shared = {
        word
        for one in (python, *tools, *library.glob("lib-dynload/*.so"))
        for word in subprocess.run(["ldd", one], capture_output=True, text=True, check=False).stdout.split()
        if word.startswith("/")
    }
    unneeded = {"test", "site-packages", "idlelib", "ensurepip", "lib2to3", "tkinter", "__pycache__"}

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = set(Path(member.name).parts)
        return None if parts & unneeded or any(part.startswith("config-") for part in parts) else member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in ("box", "given", "tmp", "bin", "lib", "lib64", "usr", "usr/lib"):
            made = tarfile.TarInfo(folder)
            made.type, made.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(made)
        for real, target in [(one, f"bin/{name}") for one, name in zip(tools, ("sh", "cp", "timeout"), strict=True)]:
            tar.add(real, target)
        tar.add(python, "bin/python3")
        tar.add(library, f"usr/lib/{library.name}", filter=chosen)
        for path in shared:
            tar.add(os.path.realpath(path), path[1:] if "/ld-" in path else f"lib/{Path(path).name}")
    environment = ["--change", "ENV PATH=/bin PYTHONHOME=/usr LD_LIBRARY_PATH=/lib"]
    subprocess.run(["docker", "import", *environment, "-", name], input=buffer.getvalue(), check=True, timeout=120)
    yield name
    subprocess.run(["docker", "rmi", "--force", name], check=True, timeout=120)


def ran(image: str, code: str | list[str], *, stdin: str = "", **limits: Any) -> Ran:
    sandbox = Sandbox(SandboxSection(type="docker", image=image))
    return asyncio.run(sandbox.run(code, stdin=stdin, files={"a/b.txt": "b"}, limits=replace(LIMITS, **limits)))


def containers() -> str:
    command = ["docker", "ps", "--all", "--quiet", "--filter", "name=rl-megatron-"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@with_docker
def test_a_program_runs_in_its_folder_and_no_container_is_left(image: str) -> None:
    one = ran(image, "import os, sys; print(input(), open('a/b.txt').read(), os.getcwd(), os.getuid())", stdin="given")
    assert (one.ended, one.exit, one.stdout, one.stderr) == ("done", 0, "given b /box 65534\n", "")
    assert ran(image, ["sh", "-c", "exit 125"]).exit == 125, "not taken for Docker's own"
    assert ran(image, ["no-such-program"]).exit == 127
    assert not containers()


@with_docker
def test_limits_end_it(image: str) -> None:
    assert ran(image, "while True: print('x' * 1000)").ended == "output"
    assert ran(image, "import time; time.sleep(600)", seconds=3.0).ended == "time"
    assert ran(image, "while True: pass", cpu_seconds=1.0).ended == "time"
    assert ran(image, "a = bytearray(b'x') * (1 << 30)").ended == "memory"
    assert ran(image, "import os; os.abort()").ended == "killed"
    forks = "while True:\n  if os.fork() == 0: time.sleep(600)\n  made += 1\nexcept OSError: print(made)"
    code = f"import os, time\nmade = 0\ntry:\n {forks}"
    assert ran(image, code).stdout == f"{LIMITS.processes - 1}\n"
    assert not containers()


@with_docker
def test_it_has_no_network_and_writes_nowhere_else(image: str) -> None:
    code = """
import os, socket
print(socket.if_nameindex())
for path in ("/new", "/given/new", "/bin/sh"):
    try:
        open(path, "w")
    except OSError as error:
        print(error.errno)
print(open("/proc/self/status").read().split("CapEff:")[1].split()[0])
"""
    lines = ran(image, code).stdout.splitlines()
    assert lines == ["[(1, 'lo')]", "30", "30", "30", "0000000000000000"]


@with_docker
def test_an_image_that_is_not_there_is_named() -> None:
    with pytest.raises(SandboxError, match=r"docker create: .*no-such-image"):
        ran("no-such-image:latest", "print(1)")
    assert not containers()


@with_docker
async def test_cancelling_removes_the_container(image: str) -> None:
    async with asyncio.timeout(60):
        sandbox = Sandbox(SandboxSection(type="docker", image=image))
        task = asyncio.create_task(sandbox.run("import time; time.sleep(600)"))
        while not await asyncio.to_thread(containers):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not containers()


def test_a_machine_without_docker_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="there is no program docker here"):
        ran("any", "print(1)")


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """A program ``docker`` that does the given lines of sh for its commands, in the folder."""
    cases = "".join(f"{name}) {lines} ;;\n" for name, lines in commands.items())
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\ncd {folder}\ncase "$1" in\n{cases}esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


async def test_a_container_that_is_being_made_is_removed_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("begun", "go"):
        os.mkfifo(tmp_path / name)
    made = "echo > begun; cat go; echo made >> done"
    stand_in(tmp_path, monkeypatch, create=made, rm="echo removed >> done")
    async with asyncio.timeout(60):
        task = asyncio.create_task(Sandbox(SandboxSection(type="docker", image="x")).run("1"))
        await asyncio.to_thread((tmp_path / "begun").read_bytes)
        task.cancel()
        await asyncio.wait([task], timeout=0.1)  # as long as the removal may take that comes too early
        await asyncio.to_thread((tmp_path / "go").write_bytes, b"")
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (tmp_path / "done").read_text().split() == ["made", "removed"]


def test_why_no_container_was_made_is_said_though_none_can_be_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(tmp_path, monkeypatch, create="echo no such image >&2; exit 1", rm="echo no container >&2; exit 1")
    with pytest.raises(SandboxError, match="docker create: no such image"):
        ran("x", "1")


def test_the_command_of_a_container_has_every_fence() -> None:
    argv = ["python3", "-c", "$(touch /tmp/x); --privileged"]
    program = SandboxProgram(argv=argv)
    command = create_command("name", "the-image", Path("/folder"), program, LIMITS)
    pairs = list(pairwise(command))
    for pair in (
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--user", "65534:65534"),
        ("--pids-limit", "9"),
        ("--memory", str(128 << 20)),
        ("--memory-swap", str(128 << 20)),
        ("--log-driver", "none"),
        ("--pull", "never"),
    ):
        assert pair in pairs
    assert "--read-only" in command
    assert command[command.index("the-image") + 3 :] == ["sh", *argv], "arguments, not shell text"
