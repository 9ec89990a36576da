"""Runs an engine server in a session of its own, and ends all of its processes when the trainer ends, or the server.

The trainer holds the other end of this process's standard input. It closes however the trainer ends, even by SIGKILL;
the trainer also closes it to end one server. Once the guard has ended, no process of its server holds memory, and no
shared memory is left that they had mapped. Run as ``python engine_guard.py <address> <command...>``; it imports nothing
of this package.

No other user of the node can read a server's files. Its temporary folder, with the sockets of its processes, is its own
and is removed with it. It is in /tmp where the machine's temporary folder has too long a path for sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

SEAT = "RL_MEGATRON_SEAT"
"""A variable with the numbers of the server's GPUs among those that the guard sees; empty: all."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP_SECONDS = 10.0
_TRACKER_SECONDS = 5.0  # part of `_STOP_SECONDS`
_SHARED = Path("/dev/shm")
_LOOK_SECONDS = 0.5  # pause from one look at `_SHARED` to the next
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LONGEST = 107 - len("/engine-12345678/") - 36  # bytes; a socket's path has 107, vLLM's file names are UUIDs
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def main(host: str, command: list[str]) -> int:
    """Runs the server, which listens at ``host`` with its gloo. Returns its exit status once its children are gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # only the closed pipe ends it
    if (interface := find_interface(host)) is not None:  # else gloo resolves the node's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if seat := os.environ.pop(SEAT, ""):
        os.environ[_VISIBLE] = request_fields(seat, os.environ.get(_VISIBLE))
    os.umask(0o077)
    others = {path.name for path in _shared_files()}
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # adopts what outlives the server
    with tempfile.TemporaryDirectory(prefix="engine-", dir=_within(), ignore_cleanup_errors=True) as folder:
        with contextlib.suppress(OSError):  # no locks there
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # like `lock_against_tmpfiles` of scratch.py
        os.environ.update(compiled_folder(lambda: f"{folder}/torch"))
        os.environ["TMPDIR"] = folder
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent, env=dict(os.environ)
        )
        own, ended = set[str](), threading.Event()
        threading.Thread(target=_end_with_trainer, args=(server, own), daemon=True).start()
        looks = threading.Thread(target=_note_shared, args=(own, ended), daemon=True)
        looks.start()
        status = server.wait()
        own |= _mapped()
        _end_the_rest()
        ended.set()
        looks.join()
    for path in _shared_files():
        if path.name in own - others:
            path.unlink(missing_ok=True)
    return status


def _within() -> str:
    """Returns the folder in which the server's temporary folder is made."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > _LONGEST and os.access("/tmp", os.W_OK | os.X_OK) else usual


def request_fields(seat: str, visible: str | None) -> str:
    """Returns the GPUs numbered by ``seat`` as this node names them in CUDA_VISIBLE_DEVICES, which is ``visible``.

    Slurm's numbers there are the node's, but for ``ConstrainDevices=yes``. Exits if they are too few.
    """
    if visible is None:
        return seat
    names = list(filter(None, visible.split(",")))
    numbers = [int(number) for number in seat.split(",")]
    if max(numbers) >= len(names):
        sys.exit(
            f"this server gets GPUs {seat}, counted from 0, of node {os.uname().nodename}, but {_VISIBLE}={visible} "
            f"there names {len(names)}; give the run as many there as its configuration says (in a job "
            "slurm.gpus_per_node)"
        )
    return ",".join(names[number] for number in numbers)


def _shared_files() -> list[Path]:
    """Returns this user's shared memory on this node, without folders, for example of weights."""
    user, found = os.geteuid(), []
    for path in _SHARED.iterdir() if _SHARED.is_dir() else ():
        with contextlib.suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode) and path.lstat().st_uid == user:
                found.append(path)
    return found


def _note_shared(own: set[str], ended: threading.Event) -> None:
    """Adds to ``own`` the names of the server's shared memory while its processes live: killed ones cannot be asked.

    Looks a new file up twice, because it may be there before it is mapped.
    """
    before, last = set[str](), set[str]()
    while not ended.wait(_LOOK_SECONDS):
        there = {path.name for path in _shared_files()}
        if there - before:
            own |= _mapped()
        before, last = last, there


def _mapped() -> set[str]:
    """Returns names of the shared memory that the server's processes have mapped. Killed processes leave it."""
    found = set[str]()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            words = (line.split(maxsplit=5) for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines())
            found |= {
                path.name for path in (Path(word[5]) for word in words if len(word) > 5) if path.parent == _SHARED
            }
    return found


def compiled_folder(otherwise: Callable[[], str]) -> Mapping[str, str]:
    """Returns the variable that names torch's folder of compiled code: the user's value, or a folder in the user's
    cache, made with mode 0700. Each kind of processor has one, as code compiled for one may fail on another. If there
    is no home, or it cannot be written, ``otherwise`` names a folder that no other user can write.

    Torch's default is ``torchinductor_<user>`` in the machine's temporary folder. Torch loads pickles from there, even
    if another user made it, and writes it into the environment where it is imported.
    """
    given = Path(os.environ.get(_COMPILED, ""))
    if given.name and not (given.parent == Path(tempfile.gettempdir()) and given.name.startswith("torchinductor_")):
        return {_COMPILED: str(given)}
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "rl_megatron" / "torch" / _processor()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # fails if the home is read-only, or full
            file.write(b"1")
            os.fsync(file.fileno())
    except (OSError, RuntimeError):
        return {_COMPILED: otherwise()}
    return {_COMPILED: str(folder)}


def _processor() -> str:
    """Returns a digest of the features of this kind of processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    able = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(able.encode()).hexdigest()[:12]


def find_interface(host: str) -> str | None:
    """Returns this node's network interface with the address ``host``, if there is one."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(a.address == host for a in addresses)), None)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # Ray blocks both


def _end_with_trainer(server: subprocess.Popen[bytes], own: set[str]) -> None:
    """Adds the names of the server's shared memory to ``own`` before it ends."""
    while os.read(0, 1):
        pass
    own |= _mapped()
    _signal_all(server, signal.SIGTERM)
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


def _end_the_rest() -> None:
    """Kills what is left of the server, also in sessions of its own, and waits for its end.

    Python's resource trackers end by themselves, after the others, whose shared memory they unlink.
    """
    end, tracked = time.monotonic() + _STOP_SECONDS, time.monotonic() + _TRACKER_SECONDS
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if time.monotonic() > tracked or not any("resource_tracker" in word for word in process.cmdline()):
                    process.kill()
        psutil.wait_procs(left, timeout=0.2)


def _signal_all(server: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(server.pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
