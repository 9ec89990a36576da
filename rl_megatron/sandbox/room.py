"""What surrounds the program: the command of bubblewrap that fences it, and the limits of each of its processes."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from rl_megatron.sandbox import kernel

BOX = "/box"  # the program's folder and home, where it is fenced
_USER = "1000"  # the program's, in its own namespace
_NOBODY = 65534  # who that is outside, if the keeper is root
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MOST_FILES = 256
_SPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


def enter_users() -> None:
    """Puts this process, which is root, into a user namespace in which the program can be nobody.

    Without it the program's user would be root outside, for whom the kernel limits no number of processes. Raises
    FenceRefused.
    """
    (ready, say), keeper = os.pipe(), os.getpid()
    writer = os.fork()
    if writer == 0:
        try:
            os.read(ready, 1)
            for kind in ("gid_map", "uid_map"):
                kernel.write_file(f"/proc/{keeper}/{kind}", f"0 0 1\n{_USER} {_NOBODY} 1\n")
            os._exit(0)
        finally:
            os._exit(1)
    refused = os.strerror(ctypes.get_errno()) if kernel.libc.unshare(kernel.NEW_USERS) else ""
    os.write(say, b"y")
    _, status = os.waitpid(writer, 0)
    for one in (ready, say):
        os.close(one)
    if refused or status:
        why = refused or f"root cannot have nobody ({_NOBODY}) in a namespace of its own"
        raise kernel.FenceRefused(f"the kernel allows no new namespaces: unshare: {why}")


def fenced_command(order: Mapping[str, Any], files: Mapping[str, int], rules: int, tell: int, hold: int) -> list[str]:
    """The command that runs the program in a root in memory, which shows ``readable`` alone, read-only.

    ``files`` are descriptors of the program's files, ``rules`` is one of its filter of system calls. bubblewrap writes
    lines of JSON to ``tell``, and waits for a byte from ``hold``.
    """
    root = os.geteuid() == 0  # in a namespace of its own, where it has the right to become the program's user
    rights = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    becomes = ("setpriv", "--reuid", _USER, "--regid", _USER, "--clear-groups")
    command = [order["fence"], *_SPACES, "--die-with-parent", "--new-session"]
    command += rights if root else ("--unshare-user", "--uid", _USER, "--gid", _USER)
    devices = [f"/dev/{name}" for name in _DEVICES]
    command += _folders((*order["readable"], *devices), "0755")
    for path in order["readable"]:
        command += ("--symlink", os.path.realpath(path), path) if os.path.islink(path) else ("--ro-bind", path, path)
    for path in devices:
        command += ("--dev-bind", path, path)
    for path in ("/tmp", "/dev/shm"):
        command += ("--symlink", BOX, path)
    command += ("--perms", "0777" if root else "0700", "--size", str(order["files_bytes"]), "--tmpfs", BOX)
    command += _folders([f"{BOX}/{name}" for name in files], "0777")
    for name, one in files.items():
        command += ("--perms", "0666", "--file", str(one), f"{BOX}/{name}")
    command += ("--remount-ro", "/", "--chdir", BOX, "--clearenv")
    for key, value in program_variables(order, BOX).items():
        command += ("--setenv", key, value)
    command += ("--seccomp", str(rules), "--json-status-fd", str(tell), "--block-fd", str(hold), "--")
    return [*command, *(becomes if root else ()), *order["argv"]]


def program_variables(order: Mapping[str, Any], box: str) -> dict[str, str]:
    """All variables of the program."""
    return {key: value.replace("{box}", box) for key, value in order["environment"].items()}


def set_limits(pid: int, order: Mapping[str, Any]) -> None:
    """Sets the limits of a process, which those that it starts inherit; 0 is this one."""
    limits = {
        resource.RLIMIT_CPU: max(1, int(order["cpu_seconds"] + 0.999)),
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_NOFILE: _MOST_FILES + len(order["files"]),
    }
    if not order["fence"]:
        limits[resource.RLIMIT_FSIZE] = order["files_bytes"]
    else:  # elsewhere it counts all processes of the user; process 1 is the same user's, unless that is root
        limits[resource.RLIMIT_NPROC] = order["processes"] + (os.geteuid() != 0)
        limits[resource.RLIMIT_SIGPENDING] = _MOST_FILES  # signals and timers that wait, in the kernel's memory
    for kind, value in limits.items():
        hard = resource.prlimit(pid, kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.prlimit(pid, kind, (value, value))


def _folders(paths: Sequence[str], mode: str) -> list[str]:
    """Arguments that make the folders above the paths, the upper ones first."""
    above = dict.fromkeys(str(one) for path in paths for one in reversed(PurePosixPath(path).parents))
    return [part for one in above if one not in ("/", BOX) for part in ("--perms", mode, "--dir", one)]
