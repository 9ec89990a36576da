"""Starts servers of engines in forks of processes that have done an engine's imports (imported.py).

While `forked_guards` lasts, a trainer in this process starts `_STUB` in place of engine_guard.py. It has guard and
server forked by the process for its engine and environment, which is started when it is asked for first; what is no
server of ours has a guard and an interpreter of its own, as always.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.processes import engine_guard, guards
from rl_megatron.engines import engine_token

_SOCKET, _STUB_FILE = "socket", "guard.py"
_GUARD = str(engine_guard.__file__)
_IMPORTS = {
    "rl_megatron.engines.vllm.server": (
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
    ),
    "rl_megatron.engines.sglang.server": (
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.model_executor.model_runner",
    ),
}
"""What a server of each module imports, of its engine."""
_MESSAGE_BYTES = 1 << 17  # a command and an environment
_READY_SECONDS = 600.0  # for an engine's imports
_OWN = {
    engine_token.VARIABLE,
    guards.MARK,
    "PYTHONPATH",  # its first entry is the run's link to this package
    *("PYTEST_CURRENT_TEST", "MASTER_ADDR", "MASTER_PORT", "VLLM_HOST_IP"),
    *("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_TORCH_PROFILER_DIR"),
}
"""Variables that differ between starts of one engine, and that no import reads."""
_STUB = f"""import json, os, signal, socket, sys

def asked(path, message, files=()):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to:
        to.connect(path)
        socket.send_fds(to, [json.dumps(message).encode()], files)
        return json.loads(to.recv({_MESSAGE_BYTES}) or b'"the process that forks servers has ended"')

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
host, *command = sys.argv[1:]
environment = dict(os.environ)
path, problem = asked(os.path.join(os.path.dirname(__file__), {_SOCKET!r}), [command, environment])
if problem:
    sys.exit(problem)
if path is None:
    os.execv(sys.executable, [sys.executable, {_GUARD!r}, host, *command])
sys.exit(asked(path, [host, command, os.getcwd(), environment], (0, 1, 2)))
"""


@contextlib.contextmanager
def forked_guards() -> Iterator[None]:
    """Have guards that this process starts be forks, with their servers."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    (folder / _STUB_FILE).write_text(_STUB)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(folder / _SOCKET))
        listener.listen()
        answering = threading.Thread(target=_answer, args=(listener, stack, folder), daemon=True)
        answering.start()
        engine_guard.__file__ = str(folder / _STUB_FILE)
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()
            engine_guard.__file__ = _GUARD


def _answer(listener: socket.socket, stack: contextlib.ExitStack, folder: Path) -> None:
    """Tell each guard where it is forked."""
    known, problems = dict[str, str](), dict[str, str]()
    while True:
        try:
            guard, _ = listener.accept()
        except OSError:  # shut down
            return
        with guard:
            command, environment = json.loads(guard.recv(_MESSAGE_BYTES))
            path, problem = None, ""
            if command[1:3] == ["-P", "-m"] and command[3] in _IMPORTS:
                theirs = {name: value for name, value in environment.items() if name not in _OWN}
                theirs["PYTHONPATH"] = os.pathsep.join(environment["PYTHONPATH"].split(os.pathsep)[1:])
                key = json.dumps([command[0], command[3], theirs], sort_keys=True)
                if key not in known:
                    known[key] = str(folder / str(len(known)))
                    problems[key] = stack.enter_context(_imported(command[0], command[3], theirs, Path(known[key])))
                path, problem = known[key], problems[key]
            guard.send(json.dumps([path, problem]).encode())


@contextlib.contextmanager
def _imported(python: str, module: str, environment: Mapping[str, str], path: Path) -> Iterator[str]:
    """A process with the imports of ``module``, which serves forks at ``path``. Yields why it does not; else empty."""
    packages = path.with_name(f"{path.name}.packages")
    packages.mkdir()
    (packages / "rl_megatron").symlink_to(Path(__file__).parents[2] / "rl_megatron")
    whole = os.pathsep.join(filter(None, (str(packages), environment["PYTHONPATH"])))
    command = (python, "-P", str(Path(__file__).with_name("imported.py")), module, _GUARD, str(path), *_IMPORTS[module])
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": whole, "ROOM": " " * 8192},  # where forks write their command lines
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _READY_SECONDS)
        said = process.stdout.readline() if ready else ""
        if said != "ready\n":
            process.kill()
        yield "" if said == "ready\n" else f"no imports of {module} within {_READY_SECONDS:.0f} s; it said {said!r}"
