"""Runs one program behind the fences of Linux's namespaces, watches its limits, and ends all that it started.

``python -m rl_megatron.sandbox.keeper`` reads the order, a line of JSON, from standard input, which stays open: when it
closes, however the asking process ended, the program is killed. One line of JSON on standard output says how the
program ended.

The keeper stays outside. Its child makes the namespaces (user, mount, process, network, IPC and host name), and that
one's child is process 1 of them: it builds a read-only root in memory, starts the program as a user without rights, and
collects what ends. When process 1 is killed the kernel kills every process of its namespace, also those that left their
session or their parent. Without fences (``fenced`` false) the keeper finds the program's processes below itself, which
adopts those that left their parents.
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
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from rl_megatron.sandbox import kernel, room

_START_SECONDS = 30.0  # until process 1 has built its root
_LOOK_SECONDS = 0.02


def main() -> int:
    """Run the order of standard input, and write how it ended."""
    order = json.loads(_line_of(0))
    kernel.prctl(kernel.SUBREAPER, 1)
    folder = tempfile.mkdtemp(prefix="sandbox-") if not order["fenced"] else ""
    try:
        told = _run(order, folder)
    except (kernel.FenceRefused, OSError) as error:
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
    said, tell = os.pipe()
    outputs, inputs = zip(os.pipe(), os.pipe(), strict=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    maker = os.fork() if not order["fenced"] else room.start_fenced(order, tell, inputs)
    if maker == 0:
        room.in_child(lambda: room.start_first(order, folder, tell, inputs), tell)
    for one in (tell, *inputs):
        os.close(one)
    return _Watch(order, maker, said, outputs).until_the_end()


class _Watch:
    """What the keeper does while the program runs."""

    def __init__(self, order: dict[str, Any], maker: int, said: int, outputs: tuple[int, ...]) -> None:
        self._order, self._maker, self._said, self._outputs = order, maker, said, outputs
        self._texts = {one: bytearray() for one in outputs}
        self._lines = b""
        self._news: dict[str, Any] = {}

    def until_the_end(self) -> dict[str, Any]:
        """Returns once the program has ended by itself, or has reached a limit; its processes may still run."""
        began = time.monotonic()
        end = began + _START_SECONDS
        open_ends = {0, self._said, *self._outputs}
        ended, started, looked = "", False, began
        while not ended:
            ready, _, _ = select.select(list(open_ends), [], [], _LOOK_SECONDS)
            for one in ready:
                if not self._read(one):
                    open_ends.discard(one)
            now = time.monotonic()
            if "refused" in self._news:
                raise kernel.FenceRefused(self._news["refused"])
            if "started" in self._news and not started:
                started, began, end = True, now, now + self._order["seconds"]
            if 0 not in open_ends:
                ended = "killed"
            elif self._said not in open_ends or "status" in self._news:
                ended = "done"
            elif now >= end:
                ended = "time" if started else "start"
            elif sum(map(len, self._texts.values())) > self._order["output_bytes"]:
                ended = "output"
            elif started and now - looked >= _LOOK_SECONDS:
                ended, looked = self._over(), now
        seconds = time.monotonic() - began
        if ended == "start":
            raise kernel.FenceRefused(f"the program did not start within {_START_SECONDS:g} s")
        if ended == "done":
            _end_all()  # so that the pipes close
            self._drain(open_ends - {0, self._said})
        return self._told(ended, seconds)

    def _told(self, ended: str, seconds: float) -> dict[str, Any]:
        status, most = self._news.get("status"), self._order["output_bytes"]
        if ended == "done" and sum(map(len, self._texts.values())) > most:
            ended = "output"
        elif ended == "done" and (status is None or status < 0):
            late = self._news.get("cpu", 0.0) >= self._order["cpu_seconds"] - 0.1
            ended = "time" if status in (-signal.SIGKILL, -signal.SIGXCPU) and late else "killed"
        texts = [bytes(self._texts[one][:most]) for one in self._outputs]
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

    def _drain(self, open_ends: set[int]) -> None:
        most = self._order["output_bytes"]
        while open_ends and sum(map(len, self._texts.values())) <= most:
            ready, _, _ = select.select(list(open_ends), [], [], 1.0)
            open_ends -= {one for one in ready if not self._read(one)}
            if not ready:
                return

    def _over(self) -> str:
        """The limit of all the program's processes together that is reached; empty if none is."""
        first = self._news.get("pid", self._maker)
        pids = list(_below(first))
        if len(pids) > self._order["processes"]:
            return "processes"
        if sum(map(_resident_bytes, pids)) > self._order["memory_bytes"]:
            return "memory"
        return "time" if sum(map(_cpu_seconds, [first, *pids])) > self._order["cpu_seconds"] else ""


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


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(kernel.read_file(f"/proc/{pid}/statm").split()[1]) * resource.getpagesize()
    return 0


def _cpu_seconds(pid: int) -> float:
    """What it and its children that have ended took."""
    with contextlib.suppress(OSError):
        ticks = kernel.read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[11:15]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0


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
