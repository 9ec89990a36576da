"""Runs one program inside the fences of bubblewrap, watches its limits, and ends all processes that it started.

``python -m rl_megatron.sandbox.keeper`` reads the order, a line of JSON, from standard input, which stays open: when it
closes, for any reason, the program is killed. One line of JSON on standard output reports the end of the program.

The keeper stays outside. bubblewrap's first process in the namespaces collects ended processes. When it is killed, the
kernel kills every process of its namespace, also those that left their session or their parent. Without fences
(``fence`` is empty) the keeper finds the program's processes below itself, and adopts those that left their parents."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import secrets
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
NEW_USERS = 0x10000000
_ALL_NAMESPACES = NEW_USERS | 0x20000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
PDEATHSIG, SUBREAPER, NO_NEW_PRIVS, _SECCOMP = 1, 36, 38, 22
# The calls that a program may make, with their numbers on x86-64 and arm64. Left out are memory that no limit counts
# (System V IPC, memfd), resources that all users share (asynchronous I/O, inotify), and large parts of the kernel.
_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, openat2 437 437, creat 85 -, close 3 57,
close_range 436 436, lseek 8 62, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43,
fstatfs 138 44, access 21 -, faccessat 269 48, faccessat2 439 439, getdents 78 -, getdents64 217 61, getcwd 79 17,
chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, rename 82 -, renameat 264 38, renameat2 316 276,
link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36, readlink 89 -,
readlinkat 267 78, mknod 133 -, mknodat 259 33, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452,
chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, umask 95 166, utime 132 -, utimes 235 -, futimesat 261 -,
utimensat 280 88, truncate 76 45, ftruncate 77 46, fallocate 285 47, fadvise64 221 223, flock 73 32, fsync 74 82,
fdatasync 75 83, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12,
flistxattr 196 13, sendfile 40 71, copy_file_range 326 285, fcntl 72 25, ioctl 16 29, dup 32 23, dup2 33 -, dup3 292 24,
pipe 22 -, pipe2 293 59, eventfd 284 -, eventfd2 290 19, signalfd 282 -, signalfd4 289 74, timerfd_create 283 85,
timerfd_settime 286 86, timerfd_gettime 287 87, select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73,
epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441,
socket 41 198, socketpair 53 199, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, connect 42 203,
getsockname 51 204, getpeername 52 205, setsockopt 54 208, getsockopt 55 209, shutdown 48 210, sendto 44 206,
recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243,
brk 12 214, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, msync 26 227, mincore 27 232,
membarrier 324 283,
clone 56 220, fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, exit 60 93, exit_group 231 94, wait4 61 260,
waitid 247 95, kill 62 129, tkill 200 130, tgkill 234 131, pidfd_open 434 434, pidfd_send_signal 424 424,
set_tid_address 218 96, futex 202 98, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293, arch_prctl 158 -,
prctl 157 167, getpid 39 172, getppid 110 173, gettid 186 178, getpgid 121 155, setpgid 109 154, getpgrp 111 -,
getsid 124 156, setsid 112 157, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148,
getresgid 120 150, getgroups 115 158, setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143,
setresuid 117 147, setresgid 119 149, setgroups 116 159, capget 125 90, capset 126 91, setfsuid 122 151,
setfsgid 123 152, getpriority 140 141, setpriority 141 140, getrlimit 97 163, setrlimit 160 164, prlimit64 302 261,
getrusage 98 165, times 100 153, sysinfo 99 179, uname 63 160, getcpu 309 168, sched_yield 24 124,
sched_getaffinity 204 123, sched_setaffinity 203 122, sched_getparam 143 121, sched_setparam 142 118,
sched_getscheduler 145 120, sched_setscheduler 144 119, sched_getattr 315 275, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, sched_rr_get_interval 148 127, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigqueueinfo 129 138, rt_sigsuspend 130 133,
sigaltstack 131 132, restart_syscall 219 128, pause 34 -,
time 201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, nanosleep 35 101, clock_nanosleep 230 115,
alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create 222 107, timer_settime 223 110, timer_gettime 224 108,
timer_getoverrun 225 109, timer_delete 226 111, getrandom 318 278
"""
_MACHINES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}  # its name in filters, its column in the table
_FAMILIES = (1, 2, 10, 16)  # sockets may be Unix, IPv4, IPv6 or netlink


class FenceRefused(Exception):
    """This machine does not allow a fence; the text names the fence and the reason."""


def prctl(option: int, *values: Any) -> None:
    """Calls prctl. Raises FenceRefused."""
    if libc.prctl(option, *values, *(0,) * (4 - len(values))):
        raise FenceRefused(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def forbid_calls() -> None:
    """Makes the kernel reject the calls that `call_filter` rejects. Raises FenceRefused."""
    rules = call_filter()
    prctl(NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(rules)
    prctl(_SECCOMP, 2, struct.pack("HP", len(rules) // 8, ctypes.addressof(code)))


def allowed_calls() -> dict[str, int]:
    """Returns the numbers on this machine of the system calls that a program may make. Raises FenceRefused."""
    if platform.machine() not in _MACHINES:
        known = ", ".join(_MACHINES)
        raise FenceRefused(f"the system calls of {platform.machine()} are not known here, only those of {known}")
    column = _MACHINES[platform.machine()][1]
    rows = [row.split() for row in _ALLOWED.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def call_filter() -> bytes:
    """Returns the seccomp filter that rejects all other calls, new namespaces, and sockets of other families.

    A rejected call returns EPERM, or ENOSYS if libraries may try it before an older one. Raises FenceRefused.
    """
    calls, machine = allowed_calls(), _MACHINES[platform.machine()][0]
    load, equal, at_least, has, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x00050000
    refused = [  # call, its argument, a test of it, the value compared, the error number
        ("clone", 0, has, _ALL_NAMESPACES, errno.EPERM),
        ("mmap", 3, has, 0x40000, errno.ENOMEM),  # huge pages
        ("fcntl", 1, equal, 1031, errno.EPERM),  # the size of a pipe
        ("setsockopt", 2, equal, 7, 0),  # the size of a send buffer: stays unchanged
        ("setsockopt", 2, equal, 8, 0),  # the size of a receive buffer
        ("socket", 2, at_least, 18, errno.EPROTONOSUPPORT),  # TCP is 6, UDP 17
    ]
    rules = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, kill), (load, 0, 0, 0)]
    for call, argument, test, value, number in refused:
        rules += [(equal, 0, 4, calls[call]), (load, 0, 0, 16 + 8 * argument), (test, 0, 1, value)]
        rules += [(answer, 0, 0, error | number), (load, 0, 0, 0)]
    for call in ("socket", "socketpair"):
        families = [(equal, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
        rules += [(equal, 0, len(families) + 3, calls[call]), (load, 0, 0, 16), *families]
        rules += [(answer, 0, 0, error | errno.EAFNOSUPPORT), (answer, 0, 0, allow)]
    for number in calls.values():
        rules += [(equal, 0, 1, number), (answer, 0, 0, allow)]
    rules += [(at_least, 0, 1, 424), (answer, 0, 0, error | errno.ENOSYS), (answer, 0, 0, error | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


BOX = "/box"  # the folder and home of a fenced program
_USER = "1000"  # the program's user in its own namespace
_NOBODY = 65534  # the same user outside, if the keeper is root
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MOST_FILES = 256
_SPACES = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")


def enter_users() -> None:
    """Puts this process, which is root, into a user namespace that maps the program's user to `_NOBODY` outside.

    Without it the program's user would be root outside, and the kernel does not limit root's number of processes.
    Raises FenceRefused.
    """
    (ready, say), keeper = os.pipe(), os.getpid()
    writer = os.fork()
    if writer == 0:
        try:
            os.read(ready, 1)
            for kind in ("gid_map", "uid_map"):
                Path(f"/proc/{keeper}/{kind}").write_text(f"0 0 1\n{_USER} {_NOBODY} 1\n")
            os._exit(0)
        finally:
            os._exit(1)
    refused = os.strerror(ctypes.get_errno()) if libc.unshare(NEW_USERS) else ""
    os.write(say, b"y")
    _, status = os.waitpid(writer, 0)
    for one in (ready, say):
        os.close(one)
    if refused or status:
        why = refused or f"root cannot have nobody ({_NOBODY}) in a namespace of its own"
        raise FenceRefused(f"the kernel allows no new namespaces: unshare: {why}")


def fenced_command(order: Mapping[str, Any], files: Mapping[str, int], rules: int, tell: int, hold: int) -> list[str]:
    """Returns the command that runs the program in a root in memory, which shows only ``readable``, read-only.

    ``files`` are descriptors of the program's files, ``rules`` is one of its filter of system calls. bubblewrap writes
    lines of JSON to ``tell``, and waits for a byte from ``hold``.
    """
    root = os.geteuid() == 0  # root of its own namespace, so it has the right to become the program's user
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
    """Returns all environment variables of the program."""
    return {key: value.replace("{box}", box) for key, value in order["environment"].items()}


def set_limits(pid: int, order: Mapping[str, Any]) -> None:
    """Sets the limits of a process, which its children inherit; 0 is this process."""
    limits = {
        resource.RLIMIT_CPU: max(1, int(order["cpu_seconds"] + 0.999)),
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_NOFILE: _MOST_FILES + len(order["files"]),
    }
    if not order["fence"]:
        limits[resource.RLIMIT_FSIZE] = order["files_bytes"]
    else:  # unfenced, it counts all processes of the user; process 1 is the same user's, unless that is root
        limits[resource.RLIMIT_NPROC] = order["processes"] + (os.geteuid() != 0)
        limits[resource.RLIMIT_SIGPENDING] = _MOST_FILES  # pending signals and timers, in the kernel's memory
    for kind, value in limits.items():
        hard = resource.prlimit(pid, kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.prlimit(pid, kind, (value, value))


def _folders(paths: Sequence[str], mode: str) -> list[str]:
    """Returns arguments that create the folders above the paths, the upper ones first."""
    above = dict.fromkeys(str(one) for path in paths for one in reversed(PurePosixPath(path).parents))
    return [part for one in above if one not in ("/", BOX) for part in ("--perms", mode, "--dir", one)]


_START_SECONDS = 30.0  # bubblewrap's time to create the namespaces
_LOOK_SECONDS = 0.02
_MOST_ENTRIES = 4096  # files and folders of a program
_DESCRIPTOR_BYTES, _SOCKET_BYTES, _MAPPING_BYTES = 1 << 16, 1 << 19, 256  # the most kernel memory for each


def main() -> int:
    """Runs the order of standard input, and writes a report of its end. Returns the exit status."""
    order = json.loads(_line_of(0))
    prctl(SUBREAPER, 1)
    folder = tempfile.mkdtemp(prefix="sandbox-") if not order["fence"] else ""
    try:
        told = _run(order, folder)
    except (FenceRefused, OSError, subprocess.SubprocessError) as error:
        told = {"refused": str(error)}
    finally:
        _end_all()
        stays = clear_away(folder) if folder else ""
    os.write(1, json.dumps({**told, "stays": stays}).encode())
    return 0


def clear_away(folder: str) -> str:
    """Removes the folder of a program that has ended, with any rights removed and folders of any depth: each is moved
    up first. Returns why something stays, or an empty text."""
    if os.path.islink(folder):
        os.unlink(folder)  # the program made this link, and its target is not the program's
        return ""
    name, folders = secrets.token_hex(8), [folder]
    for one in folders:  # the loop appends to it
        with contextlib.suppress(OSError):
            os.chmod(one, 0o700)
            for entry in [*os.scandir(one)]:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)  # otherwise it cannot be moved
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
            enter_users()
        given = {name: _readable(content) for name, content in files.items()}
        passed = (tell, hold, rules := _readable(call_filter()), *given.values())
        command = fenced_command(order, given, rules, tell, hold)
    else:
        passed, command = (), order["argv"]
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def begin() -> None:
        """Runs in the process that becomes bubblewrap or the program, before it does."""
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        if not order["fence"]:
            prctl(PDEATHSIG, signal.SIGKILL)
            set_limits(0, order)
            forbid_calls()

    try:
        process = subprocess.Popen(
            command,
            stdin=_readable(base64.b64decode(order["stdin"])),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=passed,
            cwd=folder or "/",
            env=program_variables(order, folder),
            preexec_fn=begin,
            start_new_session=True,
        )
    except OSError as error:
        if order["fence"]:
            raise
        why = base64.b64encode(f"{command[0]}: {error.strerror}\n".encode()).decode()
        return {"ended": "done", "exit": 127, "stdout": "", "stderr": why, "seconds": 0.0}
    os.close(tell)
    return _Watch(order, process, said, release).wait_until_end()


def _readable(content: bytes) -> int:
    """Returns a descriptor of a read-only file in memory."""
    one = os.memfd_create("given")
    while content:
        content = content[os.write(one, content) :]
    readable = os.open(f"/proc/self/fd/{one}", os.O_RDONLY)
    os.close(one)
    return readable


class _Watch:
    """The keeper's work while the program runs."""

    def __init__(self, order: dict[str, Any], process: subprocess.Popen[bytes], progress: int, release: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._order, self._process, self._said, self._release = order, process, progress, release
        self._outputs = (process.stdout.fileno(), process.stderr.fileno())
        self._texts = {one: bytearray() for one in self._outputs}
        self._lines = b""
        self._news: dict[str, Any] = {}
        self._status: int | None = None
        self._cpu: dict[tuple[int, str], tuple[float, float]] = {}  # (pid, start) -> CPU seconds: its own, added

    def wait_until_end(self) -> dict[str, Any]:
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
                    set_limits(self._news["child-pid"], self._order)
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
            raise FenceRefused(f"the program did not start within {_START_SECONDS:g} s")
        if ended == "done":
            _end_all()  # ending the others closes the pipes
            self._drain({*self._outputs, self._said} & open_ends)
        return self._report(ended, seconds)

    def _report(self, ended: str, seconds: float) -> dict[str, Any]:
        status, most = self._status, self._order["output_bytes"]
        texts = [bytes(self._texts[one][:most]) for one in self._outputs]
        if ended == "done" and self._order["fence"]:
            status = self._news.get("exit-code")
            if status is None and texts[1].startswith(b"bwrap: execvp "):
                status = 127  # there is no such program
            elif status is None:
                said = texts[1].decode(errors="replace").strip()
                raise FenceRefused(f"{said or 'bwrap'} (status {self._status})")
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
        """Reads available bytes; False once the other end has closed."""
        got = os.read(one, 1 << 16)
        if one in self._texts:
            self._texts[one] += got
        elif one == self._said:
            *lines, self._lines = (self._lines + got).split(b"\n")
            for line in lines:
                self._news.update(json.loads(line))
        return bool(got)

    def _reap(self) -> None:
        """Collects ended processes."""
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
        """Returns the limit that the program's processes together have reached, or an empty text.

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
            # A process that is first seen running also counts for others that started and ended between two looks.
            added = self._cpu.get((pid, start), (0.0, max(0.0, passed * share - own)))[1]
            self._cpu[pid, start] = own, added
        # The kernel drops the time of a child if its parent ignores SIGCHLD.
        used = max(counted, sum(map(sum, self._cpu.values())))
        return "time" if used > self._order["cpu_seconds"] else ""


def _end_all() -> None:
    """Kills every process below this one and collects it; those in a namespace end with its process 1."""
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
            for child in _proc(f"{pid}/task/{thread}/children").split()
        ]
    except OSError:
        return
    for child in children:
        yield child
        yield from _below(child)


def _proc(path: str) -> str:
    """Returns the text of a file below /proc; names that a program chose may not be UTF-8. Raises OSError."""
    return Path("/proc", path).read_text(errors="replace")


def _memory_bytes(pids: list[int], first: int | None) -> int:
    """Sums the memory of the processes, and the kernel's for them. Each shared mapping counts once, used or not."""
    shared: dict[str, int] = {}
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            status = dict(line.split(":", 1) for line in _proc(f"{pid}/status").splitlines())
            total += sum(int(status.get(kind, "0").split()[0]) << 10 for kind in ("RssAnon", "RssFile", "VmSwap"))
            total += len(os.listdir(f"/proc/{pid}/fd")) * _DESCRIPTOR_BYTES
            for line in _proc(f"{pid}/maps").splitlines():
                total += _MAPPING_BYTES
                span, rights, _, device, inode, *_ = line.split()
                if rights[3] == "s" and device == "00:01":  # anonymous
                    start, end = (int(part, 16) for part in span.split("-"))
                    shared[inode] = max(shared.get(inode, 0), end - start)
    with contextlib.suppress(OSError):  # a fenced program has its own network
        total += int(_proc(f"{first}/net/sockstat").split()[2]) * _SOCKET_BYTES
        for kind in ("tcp", "tcp6"):
            for line in _proc(f"{first}/net/{kind}").splitlines()[1:]:
                total += sum(int(queue, 16) for queue in line.split()[4].split(":"))
    return total + sum(shared.values())


def _entries(first: int | None) -> int:
    """Counts the files and folders of a fenced program; each takes memory of the kernel."""
    with contextlib.suppress(OSError):
        box = os.statvfs(f"/proc/{first}/root{BOX}")
        return box.f_files - box.f_ffree
    return 0


def _cpu_seconds(pid: int) -> tuple[str, float, float, float]:
    """Returns when a process started, its share of a core now, and CPU seconds: its own, those of awaited children."""
    with contextlib.suppress(OSError):
        fields = _proc(f"{pid}/stat").rpartition(")")[2].split()
        own, children = (sum(map(int, fields[at : at + 2])) / os.sysconf("SC_CLK_TCK") for at in (11, 13))
        ran, waited = map(int, _proc(f"{pid}/schedstat").split()[:2])
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
