"""Programs that mean harm, in the sandbox of this machine: each is contained, and no process of it is left."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from rl_megatron.agents.threads import start_ticks
from rl_megatron.config.sections.reward import SandboxSection
from rl_megatron.environments import marks
from rl_megatron.errors import SandboxError
from rl_megatron.sandbox import executors as here
from rl_megatron.sandbox import keeper
from rl_megatron.sandbox.executors import Limits, Ran, Sandbox, find_fence_problem
from rl_megatron.sandbox.keeper import clear_away

WHY = asyncio.run(find_fence_problem())
fenced = pytest.mark.skipif(bool(WHY), reason=f"this machine fences nothing: {WHY}")
LIMITS = Limits(
    seconds=10, cpu_seconds=10, memory_bytes=256 << 20, processes=8, output_bytes=1 << 16, files_bytes=16 << 20
)


def ran(code: str | list[str], *, unfenced: bool = False, stdin: str = "", **limits: float) -> Ran:
    sandbox = Sandbox(SandboxSection(allow_unfenced=unfenced))
    if unfenced:
        sandbox._executor._fenced = False  # type: ignore[attr-defined]  # as on a machine without namespaces
    return asyncio.run(sandbox.run(code, stdin=stdin, limits=replace(LIMITS, **limits)))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Neither a child nor, however far below, a process with this one's mark, which tests beside it have not."""
    children = set(psutil.Process().children())
    marks.mark(os.getpid())
    try:
        yield
        left = [
            pid for pid in psutil.pids() if marks.read_mark(pid) == os.getpid() != pid and start_ticks(pid) is not None
        ]
    finally:
        marks.mark(0)
    assert not left
    assert set(psutil.Process().children()) <= children


@fenced
def test_a_program_has_its_input_its_files_and_nothing_of_this_process() -> None:
    os.environ["A_SECRET"] = "s3cret"
    code = "import os, sys; print(sys.stdin.read(), sorted(os.environ), os.getcwd(), os.listdir('.'), os.getuid())"
    one = ran(code, stdin="given")
    assert (one.ended, one.exit, one.stderr) == ("done", 0, "")
    assert one.stdout.startswith("given ['HOME', 'LANG', ")
    assert one.stdout.endswith("] /box ['main.py'] 1000\n")
    assert "SECRET" not in one.stdout
    wrong = ran("import sys; print('a'); sys.exit(3)")
    assert (wrong.ended, wrong.exit, wrong.stdout) == ("done", 3, "a\n")
    assert ran(["sh", "-c", "echo $0 $HOME >&2"]).stderr == "sh /box\n"
    assert ran(["no-such-program"]).exit == 127


@fenced
def test_an_environment_may_be_a_link_and_python_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/var/tmp") as folder:  # a program's /tmp is its own
        link = Path(folder, "environment")
        link.symlink_to(sys.prefix)
        monkeypatch.setattr(sys, "prefix", str(link))
        monkeypatch.setattr(sys, "executable", str(link / "bin" / "python"))
        assert asyncio.run(find_fence_problem()) == ""
        assert ran("print(1)").stdout == "1\n"
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert "/no/python ends as 'done' with status 127" in asyncio.run(find_fence_problem())


@fenced
@pytest.mark.parametrize("unfenced", [False, True])
@pytest.mark.parametrize(
    ("code", "ended", "limits"),
    [
        ("while True: pass", "time", {"cpu_seconds": 0.4}),
        ("import time; time.sleep(60)", "time", {"seconds": 0.4}),
        (
            "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)",
            "time",
            {"seconds": 0.4},
        ),
        ("while True: print('x' * 1000)", "output", {}),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output", {}),
        ("import os; os.abort()", "killed", {}),
        (
            "import os, time\nfor _ in range(4):\n if os.fork() == 0:\n  a = bytearray(b'x') * (100 << 20)\n"
            "  time.sleep(60)\ntime.sleep(60)",
            "memory",
            {},
        ),
    ],
)
def test_limits_end_a_program(code: str, ended: str, limits: dict[str, float], unfenced: bool) -> None:
    one = ran(code, unfenced=unfenced, **limits)
    assert (one.ended, one.exit) == (ended, None)
    assert len(one.stdout) + len(one.stderr) <= LIMITS.output_bytes


@fenced
def test_names_that_are_no_text_do_not_end_the_keeper() -> None:
    named = "import ctypes, mmap, time; ctypes.CDLL(None).prctl(15, b'\\xff'); file = open(b'\\xff', 'w+b'); "
    assert (
        ran(f"{named}file.truncate(9); kept = mmap.mmap(file.fileno(), 9); time.sleep(0.5); print(1)").stdout == "1\n"
    )


@fenced
@pytest.mark.parametrize("unfenced", [False, True])
def test_memory_and_files_that_one_process_asks_for_are_refused_to_it(unfenced: bool) -> None:
    one = ran("bytearray(1 << 30)", unfenced=unfenced)
    assert one.exit == 1
    assert "MemoryError" in one.stderr
    one = ran("f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()", unfenced=unfenced)
    assert one.exit == 1
    assert "OSError" in one.stderr
    assert "No space" in one.stderr or "too large" in one.stderr


@fenced
def test_files_that_are_empty_take_the_kernels_memory() -> None:
    one = ran("n = 0\nwhile True:\n open(str(n), 'w').close()\n n += 1")
    assert (one.ended, one.exit) == ("memory", None)


@fenced
@pytest.mark.parametrize(
    "code",
    [
        "import socket\nfor _ in range(100):\n for end in socket.socketpair():\n  held.append(end)\n  fill(end)",
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\nfor _ in range(100):\n"
        " held += [socket.create_connection(server.getsockname()), server.accept()[0]]\n"
        " for end in held[-2:]:\n  for _ in range(20): fill(end); time.sleep(0.001)",
        "import mmap\nfor number in range(4):\n held.append(mmap.mmap(-1, 20 << 20))\n"
        " for place in range(0, 20 << 20, 4096): held[-1][place] = 1\n"
        " held[-1].madvise(mmap.MADV_DONTNEED)\n if number % 2 and os.fork() == 0: held.clear()\n"
        " elif number % 2: time.sleep(60)",
        "for _ in range(3):\n if os.fork() == 0: break\nfor _ in range(120):\n held.append(os.pipe())",
    ],
    ids=["Unix sockets", "TCP sockets", "shared mappings", "pipes"],
)
def test_memory_that_the_kernel_holds_for_a_program_counts(code: str) -> None:
    begin = """
import os, time
held = []
def fill(end):
    end.setblocking(False)
    try:
        while True: end.send(bytes(65536))
    except BlockingIOError: pass
"""
    one = ran(f"{begin}{code}\ntime.sleep(0.5)\nprint('held')", memory_bytes=64 << 20)
    assert (one.ended, one.exit, one.stdout) == ("memory", None, "")


@fenced
@pytest.mark.parametrize("unfenced", [False, True])
def test_calls_of_no_use_and_other_sockets_are_refused(unfenced: bool) -> None:
    names = ("semget", "shmget", "msgget", "io_setup", "mq_open", "inotify_init1", "io_uring_setup")
    numbers = {"x86_64": (64, 29, 68, 206, 240, 294, 425), "aarch64": (190, 194, 186, 0, 180, 26, 425)}
    code = f"""
import ctypes, errno, mmap, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
for name, number in zip({names}, {numbers[platform.machine()]}):
    answer = libc.syscall(number, 0, 32, 0o1600, 0, 0)
    print(name, answer, errno.errorcode[ctypes.get_errno()])
def tried(call, *given):
    try:
        return call(*given) and "done"
    except OSError as error:
        return errno.errorcode[error.errno]
families = [one for one in range(46) if any(tried(socket.socket, one, kind) == "done" for kind in (1, 2, 5))]
print(families, tried(socket.socket, 2, 1, 132), tried(mmap.mmap, -1, 2 << 20, 0x40022))
signal.pthread_sigmask(signal.SIG_BLOCK, [34])
print(sum(libc.sigqueue(os.getpid(), 34, None) == 0 for _ in range(1000)))
"""
    *lines, families, queued = ran(code, unfenced=unfenced).stdout.splitlines()
    assert lines == [f"{name} -1 {'ENOSYS' if name == 'io_uring_setup' else 'EPERM'}" for name in names]
    assert families == "[1, 2, 10, 16] EPROTONOSUPPORT ENOMEM"
    assert unfenced or queued == "256"


def test_the_numbers_of_calls_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {  # arm64 numbers its calls as the generic header does
        "x86_64": ("x86_64-linux-gnu/asm/unistd_64.h", "EM_X86_64"),
        "aarch64": ("asm-generic/unistd.h", "EM_AARCH64"),
    }
    include = Path("/usr/include")
    if not all((include / header).exists() for header, _ in headers.values()):
        pytest.skip("there are no headers of Linux")
    names = set()
    for machine, (header, elf) in headers.items():
        text = (include / header).read_text().replace("__NR3264_fstatat", "__NR_newfstatat")
        known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\n", text)}
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        calls = keeper.allowed_calls()
        assert calls.pop("fchmodat2") == 452  # since Linux 6.6, newer than the headers
        names |= calls.keys()
        assert calls == {name: known[name] for name in sorted(names & known.keys())}
        assert {"clone", "execve", "futex", "openat", "socket"} <= set(calls)
        (number,) = re.findall(rf"{elf}\s+(\d+)", (include / "linux/elf-em.h").read_text())
        assert struct.unpack_from("HBBI", keeper.call_filter(), 8)[3] == 0xC0000000 | int(number)  # AUDIT_ARCH_…


@fenced
@pytest.mark.parametrize("unfenced", [False, True])
def test_programs_as_models_write_them_run(unfenced: bool) -> None:
    code = """
import asyncio, multiprocessing, os, shutil, signal, sqlite3, subprocess, tempfile, threading
async def served():
    async def answer(reader, writer):
        writer.write(await reader.readline())
        writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"line\\n")
    print(await reader.readline())
    child = await asyncio.create_subprocess_exec("echo", "child", stdout=asyncio.subprocess.PIPE)
    print(await child.communicate())
def squared(number):
    return number * number
if __name__ == "__main__":
    asyncio.run(served())
    with multiprocessing.Pool(2) as pool:
        print(pool.map(squared, range(4)))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(".", folder + "/copy", ignore=shutil.ignore_patterns("tmp*"))
        print(os.listdir(folder + "/copy"))
    database = sqlite3.connect("data.db")
    print(database.execute("select 1").fetchall())
    signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.pause()
    thread = threading.Thread(target=print, args=("thread",))
    thread.start()
    thread.join()
    print(subprocess.check_output("timeout 5 echo a | sort && mkfifo pipe && mv pipe moved", shell=True))
"""
    one = ran(code, unfenced=unfenced)
    lines = ["b'line\\n'", "(b'child\\n', None)", "[0, 1, 4, 9]", "['main.py']", "[(1,)]", "alarm", "thread", "b'a\\n'"]
    assert (one.stdout.splitlines(), one.stderr) == (lines, "")


@fenced
@pytest.mark.parametrize("unfenced", [False, True])
def test_processor_time_of_children_that_nobody_waits_for_counts(unfenced: bool) -> None:
    code = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: print("one", flush=True)
"""
    one = ran(code, unfenced=unfenced, cpu_seconds=0.6, seconds=60)
    assert one.ended == "time"
    assert len(one.stdout.splitlines()) < 12


@fenced
def test_a_fork_bomb_gets_no_more_processes_than_its_limit() -> None:
    code = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made)
"""
    assert ran(code).stdout == f"{LIMITS.processes - 1}\n"
    assert ran("import os\nwhile True:\n try: os.fork()\n except OSError: pass", seconds=0.5).ended in {
        "time",
        "memory",
    }


@fenced
@pytest.mark.parametrize("unfenced", [False, True])
def test_a_grandchild_in_a_session_of_its_own_ends_with_the_program(tmp_path: Path, unfenced: bool) -> None:
    code = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    os._exit(0)
os.wait()
print("left")
"""
    began = time.monotonic()
    assert ran(code, unfenced=unfenced).stdout == "left\n"
    assert time.monotonic() - began < 600
    assert not [
        one for one in psutil.process_iter() if one.status() == psutil.STATUS_SLEEPING and "main.py" in _line(one)
    ]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@fenced
def test_a_program_sees_no_process_no_file_and_no_socket_of_its_machine(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    answers.write_text("42")
    server = socket.create_server(("127.0.0.1", 0))
    hidden = socket.socket(socket.AF_UNIX)
    hidden.bind(f"\0rl-megatron-test-{os.getpid()}")
    hidden.listen()
    code = f"""
import os, socket
def tried(what):
    try:
        return str(what())
    except OSError as error:
        return type(error).__name__
def connected(kind, address):
    one = socket.socket(kind)
    one.settimeout(5)
    return tried(lambda: one.connect(address))
print(tried(lambda: open({str(answers)!r}).read()))
print(tried(lambda: open({str(Path(__file__).resolve())!r}).read()))
print(tried(lambda: os.kill({os.getpid()}, 0)))
print(tried(lambda: open("/proc/{os.getpid()}/environ").read()))
print(tried(lambda: open("/proc/1/environ").read()))
print(connected(socket.AF_INET, {server.getsockname()!r}))
print(connected(socket.AF_UNIX, "\\0rl-megatron-test-{os.getpid()}"))
print(tried(lambda: open("/etc/passwd").read()), tried(lambda: os.listdir("/root/.ssh")))
print(sorted(os.listdir("/dev")), [n for n in range(3, 64) if tried(lambda: os.fstat(n)) != "OSError"])
"""
    try:
        lines = ran(code).stdout.splitlines()
    finally:
        server.close()
        hidden.close()
    assert lines[:2] == ["FileNotFoundError"] * 2
    assert lines[2:5] == ["ProcessLookupError", "FileNotFoundError", "FileNotFoundError"]
    assert lines[5:7] == ["ConnectionRefusedError"] * 2, "its own loopback and names, nobody there"
    assert lines[7] == "FileNotFoundError FileNotFoundError"
    assert lines[8] == "['full', 'null', 'random', 'shm', 'urandom', 'zero'] []"


@fenced
def test_a_program_writes_nothing_outside_and_gets_no_rights() -> None:
    code = f"""
import ctypes, os, shutil
libc = ctypes.CDLL(None, use_errno=True)
def tried(call, *given):
    return ctypes.get_errno() if call(*given) < 0 else 0
for path in ("/new", "/usr/new", "/dev/new", {sys.prefix + "/new"!r}, "/usr/bin/env"):
    try:
        open(path, "w")
        print("wrote", path)
    except OSError as error:
        print(error.errno)
print(tried(libc.unshare, 0x10000000), tried(libc.mount, b"none", b"/box", b"tmpfs", 0, None))
print(tried(libc.ptrace, 16, 1, 0, 0), tried(libc.syscall, 319 if os.uname().machine == "x86_64" else 279, b"a", 0))
print(tried(libc.setuid, 0), tried(libc.chroot, b"/box"), tried(libc.setns, 0, 0))
shutil.rmtree("/box", ignore_errors=True)
print(os.listdir("/box"))
"""
    lines = ran(code).stdout.splitlines()
    assert lines[0] == "30", "the root is read-only, whoever owns it"
    assert set(lines[:5]) <= {"30", "13"}, "read-only, or not permitted"
    assert lines[5:7] == ["1 1", "1 1"]
    assert lines[7] in {"1 1 1", "22 1 1"}, "the namespace has no user 0 where the trainer is not root"
    assert lines[8] == "[]"


@fenced
@pytest.mark.parametrize("unfenced", [False, True])
async def test_cancelling_ends_the_program(unfenced: bool) -> None:
    async with asyncio.timeout(60):
        sandbox = Sandbox(SandboxSection(allow_unfenced=unfenced))
        sandbox._executor._fenced = not unfenced  # type: ignore[attr-defined]
        task = asyncio.create_task(sandbox.run("import time; time.sleep(600)"))
        while not any("main.py" in _line(one) for one in psutil.Process().children(recursive=True)):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@fenced
def test_a_killed_trainer_leaves_no_program(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import asyncio\n"
        "from rl_megatron.config.sections.reward import SandboxSection\n"
        "from rl_megatron.sandbox.executors import Sandbox\n"
        "asyncio.run(Sandbox(SandboxSection()).run('import time; time.sleep(600)'))\n"
    )
    trainer = psutil.Popen([sys.executable, str(script)], stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not (found := [one for one in trainer.children(recursive=True) if "main.py" in _line(one)]):
        assert time.monotonic() < end
        time.sleep(0.01)
    below = trainer.children(recursive=True)
    trainer.kill()
    trainer.communicate()
    gone, left = psutil.wait_procs(below, timeout=20)
    assert found[0] in gone
    assert not left


def test_where_nothing_can_be_fenced_it_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not WHY:  # then in a namespace that allows no further ones
        none = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
        within = ("unshare", "--user", "--map-root-user", "sh", "-c", none, "sh")
        monkeypatch.setattr(here, "_COMMAND", (*within, *here._COMMAND))
    with pytest.raises(SandboxError, match=r"the kernel allows no .*sandbox.allow_unfenced=true"):
        asyncio.run(Sandbox(SandboxSection()).run("print(1)"))
    assert asyncio.run(Sandbox(SandboxSection(allow_unfenced=True)).run("print(1)")).stdout == "1\n"


@fenced
def test_a_program_that_cannot_begin_takes_no_other_ones_fences() -> None:
    sandbox = Sandbox(SandboxSection(allow_unfenced=True))
    with pytest.raises(SandboxError, match="No space left"):
        asyncio.run(sandbox.run("1", files={"a": "x" * (2 << 20)}, limits=replace(LIMITS, files_bytes=1 << 20)))
    assert asyncio.run(sandbox.run("import os; print(os.getcwd())")).stdout == "/box\n"


@fenced
@pytest.mark.parametrize(
    "code",
    [
        "os.makedirs('a/b'); open('a/b/c', 'w').close(); [os.chmod(one, 0) for one in ('a/b', 'a', '.')]",
        "for _ in range(2000): os.mkdir('d'); os.chdir('d')",
        "os.remove('main.py'); os.rmdir(os.getcwd()); os.symlink({kept!r}, {box})",
    ],
)
def test_a_stubborn_folder_goes_but_nothing_linked(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").touch()
    monkeypatch.setattr(here, "_COMMAND", ("unshare", "--user", "--map-user=1000", *here._COMMAND))  # not root
    program = f"import os\nbox = os.getcwd()\nprint(box)\n{code.format(kept=str(tmp_path), box='box')}"
    one = ran(program, unfenced=True)
    assert (one.ended, one.exit, one.stderr) == ("done", 0, "")
    assert Path(one.stdout.strip()).name.startswith("sandbox-")
    assert not os.path.lexists(one.stdout.strip())
    assert (tmp_path / "kept").exists()


def test_what_of_a_folder_stays_is_told() -> None:
    assert "not permitted: '/proc/self/fdinfo'" in clear_away("/proc/self/fdinfo")


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b", ""])
def test_files_outside_of_the_folder_are_refused(name: str) -> None:
    with pytest.raises(SandboxError, match="a relative path"):
        asyncio.run(Sandbox(SandboxSection()).run("", files={name: "x"}))


@fenced
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL", "SIGUSR1"])
def test_signals_to_the_first_process_of_a_room_change_nothing(name: str) -> None:
    """Where the trainer is not root, the program is the same user as that process."""
    program = f"import os, signal; os.kill(1, signal.{name}); print('on')"
    code = f"""
import asyncio
from rl_megatron.config.sections.reward import SandboxSection
from rl_megatron.environments import marks
from rl_megatron.sandbox.executors import Sandbox
print(asyncio.run(Sandbox(SandboxSection()).run({program!r})))
"""
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ended='done', exit=0" in found.stdout, found
    assert "stdout='on" in found.stdout
