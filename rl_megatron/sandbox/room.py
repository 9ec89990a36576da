"""What surrounds the program: namespaces, a root in memory, limits; runs in processes forked from the keeper's."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from rl_megatron.sandbox import kernel

BOX = "/box"  # the program's folder and home, where it is fenced
_MOST_FILES = 256
_USER = 1000  # the program's, in its own namespace
_NOBODY = 65534  # who that is outside, if the keeper is root
_DEVICES = ("null", "zero", "full", "random", "urandom")


def start_fenced(order: dict[str, Any], tell: int, inputs: tuple[int, ...]) -> int:
    """Start the process that makes the namespaces and holds process 1 of them; returns its id."""
    (unshared, say_unshared), (mapped, say_mapped) = os.pipe(), os.pipe()
    parent = os.getpid()
    maker = os.fork()
    if maker == 0:
        in_child(lambda: _hold(order, parent, say_unshared, mapped, tell, inputs), tell)
    os.close(say_unshared)
    if os.read(unshared, 1):
        root = os.geteuid() == 0
        users = f"0 0 1\n{_USER} {_NOBODY} 1\n" if root else f"{_USER} {os.geteuid()} 1\n"
        groups = f"0 0 1\n{_USER} {_NOBODY} 1\n" if root else f"{_USER} {os.getegid()} 1\n"
        if not root:
            kernel.write_file(f"/proc/{maker}/setgroups", "deny")
        kernel.write_file(f"/proc/{maker}/gid_map", groups)
        kernel.write_file(f"/proc/{maker}/uid_map", users)
        os.write(say_mapped, b"y")
    return maker


def _hold(order: dict[str, Any], parent: int, say: int, mapped: int, tell: int, inputs: tuple[int, ...]) -> NoReturn:
    if kernel.libc.unshare(kernel.NEW_NAMESPACES):
        raise kernel.FenceRefused(f"the kernel allows no new namespaces: unshare: {os.strerror(ctypes.get_errno())}")
    kernel.tie_to(parent)
    os.write(say, b"y")
    os.read(mapped, 1)
    first = os.fork()
    if first == 0:
        in_child(lambda: start_first(order, "", tell, inputs), tell)
    os.write(tell, json.dumps({"pid": first}).encode() + b"\n")
    for one in (tell, *inputs):
        os.close(one)
    os.waitpid(first, 0)
    os._exit(0)


def start_first(order: dict[str, Any], folder: str, tell: int, inputs: tuple[int, ...]) -> NoReturn:
    """Process 1: the root, the program, and whatever ends."""
    kernel.prctl(kernel.PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of the program, which may be this user, no handler: no signal
    os.setsid()
    with contextlib.suppress(OSError):
        kernel.write_file("/proc/self/oom_score_adj", "1000")
    if order["fenced"]:
        _build_root(order)
    else:
        kernel.prctl(kernel.SUBREAPER, 1)
    box = folder or BOX
    os.chdir(box)
    given = _place_files(order, box)
    program = os.fork()
    if program == 0:
        in_child(lambda: _program(order, box, given, inputs), tell)
    for one in (given, *inputs):
        os.close(one)
    os.write(tell, b'{"started": true}\n')
    ended = 0
    while ended != program:
        ended, status = os.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    news = {"status": os.waitstatus_to_exitcode(status), "cpu": used.ru_utime + used.ru_stime}
    os.write(tell, json.dumps(news).encode() + b"\n")
    os._exit(0)


def _build_root(order: dict[str, Any]) -> None:
    """Make a root in memory that shows ``readable`` alone, read-only, and devices that hold nothing."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    links = [(path, os.readlink(path)) for path in order["readable"] if os.path.islink(path)]
    sources = [
        (path, os.open(path, os.O_PATH))
        for path in (*order["readable"], *(f"/dev/{name}" for name in _DEVICES))
        if not os.path.islink(path)
    ]
    root = "/tmp"  # what is mounted over it is seen in these namespaces alone
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path, one in sources:
        target = root + path
        is_folder = os.path.isdir(f"/proc/self/fd/{one}")
        os.makedirs(target if is_folder else os.path.dirname(target), mode=0o755, exist_ok=True)
        if not is_folder:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(f"/proc/self/fd/{one}", target, "", kernel.MS_BIND | kernel.MS_REC)
        if not path.startswith("/dev/"):
            kernel.set_read_only(target, recursive=True)
        os.close(one)
    for path, aim in links:
        os.makedirs(os.path.dirname(root + path), mode=0o755, exist_ok=True)
        os.symlink(aim, root + path)
    for path in (f"{root}/tmp", f"{root}/dev/shm"):
        os.symlink(BOX, path)
    os.mkdir(root + BOX)
    space = f"size={order['files_bytes']},nr_inodes=4096,mode=700,uid={_USER},gid={_USER}"
    kernel.mount("tmpfs", root + BOX, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, space)
    os.chdir(root)
    if kernel.libc.pivot_root(b".", b".") or kernel.libc.umount2(b".", kernel.MNT_DETACH):
        raise kernel.FenceRefused(f"the root cannot be replaced: {os.strerror(ctypes.get_errno())}")
    os.chdir("/")
    kernel.set_read_only("/", recursive=False)


def _place_files(order: dict[str, Any], box: str) -> int:
    """Write the program's files and its input; returns the input's descriptor."""
    for name, content in order["files"].items():
        path = os.path.join(box, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    given = os.open(os.path.join(box, ".input"), os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    os.unlink(os.path.join(box, ".input"))
    left = base64.b64decode(order["stdin"])
    while left:
        left = left[os.write(given, left) :]
    os.lseek(given, 0, os.SEEK_SET)
    if order["fenced"] and os.geteuid() == 0:
        for folder, _, names in os.walk(box):
            for one in (folder, *(os.path.join(folder, name) for name in names)):
                os.chown(one, _USER, _USER)
    return given


def _program(order: dict[str, Any], box: str, given: int, inputs: tuple[int, ...]) -> NoReturn:
    os.setsid()
    for number, one in enumerate((given, *inputs)):
        os.dup2(one, number)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    seconds = max(1, int(order["cpu_seconds"] + 0.999))
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["files_bytes"]),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if order["fenced"]:  # elsewhere it counts all processes of the user
        ours = 0 if os.geteuid() == 0 else 2  # the maker and process 1 are the same user's
        resource.setrlimit(resource.RLIMIT_NPROC, (order["processes"] + ours,) * 2)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_USER, _USER, _USER)
            os.setresuid(_USER, _USER, _USER)
    kernel.forbid_calls()
    environment = {key: value.replace("{box}", box) for key, value in order["environment"].items()}
    try:
        os.execvpe(order["argv"][0], order["argv"], environment)
    except OSError as error:
        os.write(2, f"{order['argv'][0]}: {error.strerror}\n".encode())
        os._exit(127)


def in_child(work: Callable[[], object], tell: int) -> NoReturn:
    """Do ``work`` in a forked process, which never returns; what it raises is reported."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001  this process has no caller
        said = str(error) if isinstance(error, kernel.FenceRefused) else f"{type(error).__name__}: {error}"
        os.write(tell, json.dumps({"refused": said}).encode() + b"\n")
    os._exit(1)
