"""Runs one program behind the fences of bubblewrap, watches its limits, and ends all that it started.

``python -m rl_megatron.sandbox.keeper`` reads the order, a line of JSON, from standard input, which stays open: when it
closes, however the asking process ended, the program is killed. One line of JSON on standard output says how the
program ended.

The keeper stays outside. bubblewrap's first process in the namespaces collects what ends; when it is killed the kernel
kills every process of its namespace, also those that left their session or their parent. Without fences (``fence`` is
empty) the keeper finds the program's processes below itself, which adopts those that left their parents.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_megatron.sandbox import kernel, room

_START_SECONDS = 30.0  # until bubblewrap has made the namespaces
_LOOK_SECONDS = 0.02
_MOST_ENTRIES = 4096  # files and folders of a program
_DESCRIPTOR_BYTES, _SOCKET_BYTES, _MAPPING_BYTES = 1 << 16, 1 << 19, 256  # the kernel keeps at most this for each


def main() -> int:
    """Run the order of standard input, and write how it ended."""
    order = json.loads(_line_of(0))
    kernel.prctl(kernel.SUBREAPER, 1)
    folder = tempfile.mkdtemp(prefix="sandbox-") if not order["fence"] else ""
    try:
        told = _run(order, folder)
    except (kernel.FenceRefused, OSError, subprocess.SubprocessError) as error:
        told = {"refused": str(error)}
    finally:
        _end_all()
        stays = clear_away(folder) if folder else ""
    os.write(1, json.dumps({**told, "stays": stays}).encode())
    return 0


def clear_away(folder: str) -> str:
    """Remove the folder of a program that has ended, whatever rights it took away and however deep its folders lie:
    each is moved up first. Returns why something of it stays, or an empty text."""
    if os.path.islink(folder):
        os.unlink(folder)  # the program put it there, and nothing behind it is the program's
        return ""
    name, folders = secrets.token_hex(8), [folder]
    for one in folders:  # which grows
        with contextlib.suppress(OSError):
            os.chmod(one, 0o700)
            for entry in [*os.scandir(one)]:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)  # else it cannot be moved
                        os.rename(entry.path, moved := f"{folder}/{name}{len(folders)}")
                        folders.append(moved)
                    else:
                        os.unlink(entry.path)
    why = ""
    for one in reversed(folders):
        try:
            os.rmdir(one)
        except FileNotFoundError:
            pass
        except OSError as error:
            why = str(error)
    return why


def _run(order: dict[str, Any], folder: str) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    said, tell = os.pipe()
    hold, release = os.pipe()
    files = {name: base64.b64decode(content) for name, content in order["files"].items()}
    if order["fence"]:
        if os.geteuid() == 0:
            room.enter_users()
        given = {name: _readable(content) for name, content in files.items()}
        passed = (tell, hold, rules := _readable(kernel.call_filter()), *given.values())
        command = room.fenced_command(order, given, rules, tell, hold)
    else:
        passed, command = (), order["argv"]
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def begin() -> None:
        """In the process that becomes bubblewrap, or the program."""
        with contextlib.suppress(OSError):
            kernel.write_file("/proc/self/oom_score_adj", "1000")
        if not order["fence"]:
            kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
            room.set_limits(0, order)
            kernel.forbid_calls()

    try:
        process = subprocess.Popen(
            command,
            stdin=_readable(base64.b64decode(order["stdin"])),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=passed,
            cwd=folder or "/",
            env=room.program_variables(order, folder),
            preexec_fn=begin,
            start_new_session=True,
        )
    except OSError as error:
        if order["fence"]:
            raise
        why = base64.b64encode(f"{command[0]}: {error.strerror}\n".encode()).decode()
        return {"ended": "done", "exit": 127, "stdout": "", "stderr": why, "seconds": 0.0}
    os.close(tell)
    return _Watch(order, process, said, release).until_the_end()


def _readable(content: bytes) -> int:
    """A descriptor of a file in memory that can only be read."""
    one = os.memfd_create("given")
    while content:
        content = content[os.write(one, content) :]
    readable = os.open(f"/proc/self/fd/{one}", os.O_RDONLY)
    os.close(one)
    return readable


class _Watch:
    """What the keeper does while the program runs."""

    def __init__(self, order: dict[str, Any], process: subprocess.Popen[bytes], said: int, release: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._order, self._process, self._said, self._release = order, process, said, release
        self._outputs = (process.stdout.fileno(), process.stderr.fileno())
        self._texts = {one: bytearray() for one in self._outputs}
        self._lines = b""
        self._news: dict[str, Any] = {}
        self._status: int | None = None
        self._cpu: dict[tuple[int, str], tuple[float, float]] = {}  # (pid, start) -> CPU seconds of its own, and added

    def until_the_end(self) -> dict[str, Any]:
        """Returns once the program has ended by itself, or has reached a limit; its processes may still run."""
        began = looked = time.monotonic()
        end = began + _START_SECONDS
        open_ends = {0, self._said, *self._outputs, os.pidfd_open(self._process.pid)}
        ended, started = "", False
        while not ended:
            ready, _, _ = select.select(list(open_ends), [], [], _LOOK_SECONDS)
            for one in ready:
                if one in (0, self._said, *self._outputs) and not self._read(one):
                    open_ends.discard(one)
            self._reap()
            now = time.monotonic()
            if not started and (not self._order["fence"] or "child-pid" in self._news):
                started, began, end = True, now, now + self._order["seconds"]
                if self._order["fence"]:
                    room.set_limits(self._news["child-pid"], self._order)
                    os.write(self._release, b"y")
            if 0 not in open_ends:
                ended = "killed"
            elif self._status is not None:
                ended = "done"
            elif now >= end:
                ended = "time" if started else "start"
            elif sum(map(len, self._texts.values())) > self._order["output_bytes"]:
                ended = "output"
            elif started and now - looked >= _LOOK_SECONDS:
                ended, looked = self._over(now - looked), now
        seconds = time.monotonic() - began
        if ended == "start":
            raise kernel.FenceRefused(f"the program did not start within {_START_SECONDS:g} s")
        if ended == "done":
            _end_all()  # so that the pipes close
            self._drain({*self._outputs, self._said} & open_ends)
        return self._told(ended, seconds)

    def _told(self, ended: str, seconds: float) -> dict[str, Any]:
        status, most = self._status, self._order["output_bytes"]
        texts = [bytes(self._texts[one][:most]) for one in self._outputs]
        if ended == "done" and self._order["fence"]:
            status = self._news.get("exit-code")
            if status is None and texts[1].startswith(b"bwrap: execvp "):
                status = 127  # there is no such program
            elif status is None:
                said = texts[1].decode(errors="replace").strip()
                raise kernel.FenceRefused(f"{said or 'bwrap'} (status {self._status})")
            elif 128 < status <= 128 + signal.NSIG:
                status = 128 - status
        if ended == "done" and sum(map(len, self._texts.values())) > most:
            ended = "output"
        elif ended == "done" and (status is None or status < 0):
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            late = used.ru_utime + used.ru_stime >= self._order["cpu_seconds"] - 0.1
            ended = "time" if status in (-signal.SIGKILL, -signal.SIGXCPU) and late else "killed"
        out, err = (base64.b64encode(text).decode() for text in (texts[0], texts[1][: most - len(texts[0])]))
        exit_status = status if ended == "done" else None
        return {"ended": ended, "exit": exit_status, "stdout": out, "stderr": err, "seconds": seconds}

    def _read(self, one: int) -> bool:
        """Read what has come; False once the other end has closed."""
        got = os.read(one, 1 << 16)
        if one in self._texts:
            self._texts[one] += got
        elif one == self._said:
            *lines, self._lines = (self._lines + got).split(b"\n")
            for line in lines:
                self._news.update(json.loads(line))
        return bool(got)

    def _reap(self) -> None:
        """Collect what has ended."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._process.pid:
                    self._status = os.waitstatus_to_exitcode(found[1])

    def _drain(self, open_ends: set[int]) -> None:
        most = self._order["output_bytes"]
        while open_ends and sum(map(len, self._texts.values())) <= most:
            ready, _, _ = select.select(list(open_ends), [], [], 1.0)
            open_ends -= {one for one in ready if not self._read(one)}
            if not ready:
                return

    def _over(self, passed: float) -> str:
        """Returns the limit that all the program's processes together have reached, or an empty text.

        ``passed``: seconds since the last look.
        """
        first = self._news.get("child-pid")
        pids = list(_below(os.getpid() if first is None else first))
        if len(pids) > self._order["processes"]:
            return "processes"
        if _memory_bytes(pids, first) > self._order["memory_bytes"] or _entries(first) > _MOST_ENTRIES:
            return "memory"
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        counted = ended.ru_utime + ended.ru_stime
        for pid in pids if first is None else [first, *pids]:
            start, share, own, children = _cpu_seconds(pid)
            counted += own + children
            # A process that is seen running for the first time stands for others that came and went unseen.
            added = self._cpu.get((pid, start), (0.0, max(0.0, passed * share - own)))[1]
            self._cpu[pid, start] = own, added
        # The kernel forgets the time of a child whose parent ignores SIGCHLD.
        used = max(counted, sum(map(sum, self._cpu.values())))
        return "time" if used > self._order["cpu_seconds"] else ""


def _end_all() -> None:
    """Kill every process below this one and collect it; those in a namespace die with its process 1."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = list(_below(os.getpid()))
        if not left:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        time.sleep(0.001)


def _below(pid: int) -> Iterator[int]:
    try:
        children = [
            int(child)
            for thread in os.listdir(f"/proc/{pid}/task")
            for child in kernel.read_file(f"/proc/{pid}/task/{thread}/children").split()
        ]
    except OSError:
        return
    for child in children:
        yield child
        yield from _below(child)


def _memory_bytes(pids: list[int], first: int | None) -> int:
    """Sums the memory of the processes, and the kernel's for them. Each shared mapping counts once, used or not."""
    shared: dict[str, int] = {}
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            status = dict(line.split(":", 1) for line in kernel.read_file(f"/proc/{pid}/status").splitlines())
            total += sum(int(status.get(kind, "0").split()[0]) << 10 for kind in ("RssAnon", "RssFile", "VmSwap"))
            total += len(os.listdir(f"/proc/{pid}/fd")) * _DESCRIPTOR_BYTES
            for line in kernel.read_file(f"/proc/{pid}/maps").splitlines():
                total += _MAPPING_BYTES
                span, rights, _, device, inode, *_ = line.split()
                if rights[3] == "s" and device == "00:01":  # anonymous
                    start, end = (int(part, 16) for part in span.split("-"))
                    shared[inode] = max(shared.get(inode, 0), end - start)
    with contextlib.suppress(OSError):  # a fenced program has its own network
        total += int(kernel.read_file(f"/proc/{first}/net/sockstat").split()[2]) * _SOCKET_BYTES
        for kind in ("tcp", "tcp6"):
            for line in kernel.read_file(f"/proc/{first}/net/{kind}").splitlines()[1:]:
                total += sum(int(queue, 16) for queue in line.split()[4].split(":"))
    return total + sum(shared.values())


def _entries(first: int | None) -> int:
    """How many files and folders a fenced program has, each of which takes memory of the kernel."""
    with contextlib.suppress(OSError):
        box = os.statvfs(f"/proc/{first}/root{room.BOX}")
        return box.f_files - box.f_ffree
    return 0


def _cpu_seconds(pid: int) -> tuple[str, float, float, float]:
    """Returns when a process started, its share of a core now, and CPU seconds: its own, those of awaited children."""
    with contextlib.suppress(OSError):
        fields = kernel.read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
        own, children = (sum(map(int, fields[at : at + 2])) / os.sysconf("SC_CLK_TCK") for at in (11, 13))
        ran, waited = map(int, kernel.read_file(f"/proc/{pid}/schedstat").split()[:2])
        return fields[19], ran / (ran + waited + 1) if fields[0] == "R" else 0.0, own, children
    return "", 0.0, 0.0, 0.0


def _line_of(one: int) -> bytes:
    out = bytearray()
    while not out.endswith(b"\n"):
        got = os.read(one, 1 << 20)
        if not got:
            sys.exit(1)
        out += got
    return bytes(out)


if __name__ == "__main__":
    sys.exit(main())
