"""Linux's calls that fence a process, which Python 3.11 does not have, by the C library."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
NEW_USERS = 0x10000000
_ALL_NAMESPACES = NEW_USERS | 0x20000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
PDEATHSIG, SUBREAPER, NO_NEW_PRIVS, _SECCOMP = 1, 36, 38, 22
# The calls that a program may make, with their numbers on x86-64 and arm64. Left out are memory that no limit counts
# (System V IPC, memfd), what all users share (asynchronous I/O, inotify), and large parts of the kernel.
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
    """This machine does not allow a fence; says which, and why."""


def prctl(option: int, *values: Any) -> None:
    """Raises FenceRefused."""
    if libc.prctl(option, *values, *(0,) * (4 - len(values))):
        raise FenceRefused(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def forbid_calls() -> None:
    """Makes the kernel refuse what `call_filter` refuses. Raises FenceRefused."""
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
    """Returns the seccomp filter that refuses all other calls, new namespaces, and sockets of other families.

    A refused call returns EPERM, or ENOSYS if libraries may try it before an older one. Raises FenceRefused.
    """
    calls, machine = allowed_calls(), _MACHINES[platform.machine()][0]
    load, equal, at_least, has, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x00050000
    refused = [  # call, its argument, a test of it, what it is refused with
        ("clone", 0, has, _ALL_NAMESPACES, errno.EPERM),
        ("mmap", 3, has, 0x40000, errno.ENOMEM),  # huge pages
        ("fcntl", 1, equal, 1031, errno.EPERM),  # the size of a pipe
        ("setsockopt", 2, equal, 7, 0),  # the size of a buffer to send from: stays as it is
        ("setsockopt", 2, equal, 8, 0),  # to receive in
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


def write_file(path: str, text: str) -> None:
    """Raises OSError."""
    with open(path, "w") as file:
        file.write(text)


def read_file(path: str) -> str:
    """Raises OSError."""
    with open(path) as file:
        return file.read()
