"""When a trainer is killed, guard processes end its servers and remove its folders; what a dead process printed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import AF_INET

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from typing_extensions import override

from launcher.build.trained import _FolderWeights, config_for_folder, standalone_engine
from launcher.hosts.sites import server_sites, standalone_sites
from launcher.hosts.slurm.allocation import Allocation
from launcher.processes import engine_guard, scratch
from launcher.processes.environment import variables
from launcher.processes.guards import GuardSpec, ServerSite, StderrTail, last_lines, start_guard
from launcher.servers.supervisor import StartedServer
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.engines.adapter import StartCommand, StartOptions
from rl_megatron.engines.http import Server
from rl_megatron.engines.local.adapter import EmbeddedAdapter
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.checks.reports import checksum, seal_from_reports
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.routes.mirror import lock_folder
from tests.e2e.processes import alive, eventually
from tests.family_models import save_model
from tests.processes.launcher.test_supervisor import FOREIGN, PORT
from tests.unit.launcher.commands import program

SERVER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])
print('up', flush=True)
time.sleep(1000)
"""


LEAVES = """
import subprocess, sys
deaf = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)'
for apart in (False, True):
    child = subprocess.Popen([sys.executable, '-c', deaf], stdout=subprocess.PIPE, start_new_session=apart)
    child.stdout.readline()
    print(child.pid, flush=True)
raise SystemExit(5)
"""


SHARES = """
import mmap, os, signal, sys, time
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
files = [os.open(path, os.O_RDWR | os.O_CREAT) for path in sys.argv[1:3]]
kept = [mmap.mmap(file, 4096) for file in files if not os.truncate(file, 4096)]
if len(sys.argv) > 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def child(pipe):
    memory = SharedMemory(create=True, size=4096)
    pipe.send(memory.name)
    time.sleep(1000)
mine = SharedMemory(create=True, size=4096)
ours, theirs = get_context('fork').Pipe()
get_context('fork').Process(target=child, args=(theirs,)).start()
print(mine.name, ours.recv(), flush=True)
time.sleep(1000)
"""

# A guard that says what its server's processes map, once they map something.
SAYS = """
import sys
from launcher.processes import engine_guard
mapped = engine_guard._mapped
def said():
    if found := mapped():
        print('mapped', *found, flush=True)
    return found
engine_guard._mapped = said
sys.exit(engine_guard.main(sys.argv[1], sys.argv[2:]))
"""


def guard(*command: str) -> subprocess.Popen[str]:
    return started(str(engine_guard.__file__), "127.0.0.1", *command)


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


ASKED = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"


def test_a_server_keeps_compiled_code_where_no_other_user_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path(default_cache_dir())
    assert usual.parent == Path(tempfile.gettempdir())  # which anyone could make
    own, blocked = tmp_path / "own", tmp_path / "file"
    blocked.touch()

    def told(cache: Path, given: Path | None) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if given is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(given))
        assert variables(threads=1, device="cpu").keys() >= {"TORCHINDUCTOR_CACHE_DIR"}  # so do ranks
        process = guard(sys.executable, "-c", ASKED)
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.communicate(timeout=30)
        return folder

    for given in (None, usual):  # torch writes it into the environment where it is imported
        folder = told(tmp_path / "cache", given)
        assert folder.is_relative_to(tmp_path / "cache" / "rl_megatron")
        assert folder.stat().st_mode & 0o077 == 0
        assert variables(threads=1, device="cpu")["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert told(tmp_path / "cache", own) == own
    there = tmp_path / "full" / "rl_megatron" / "torch"
    there.mkdir(parents=True)
    (there / folder.name).symlink_to("/proc/self")  # a folder in which even root makes no file
    for cache in (blocked, tmp_path / "full"):
        spare = told(cache, None)  # goes with the guard
        assert spare.parent.name.startswith("engine-")
        assert not spare.parent.exists()
    rank = "from launcher.processes.environment import variables; "
    rank += "folder = [variables(threads=1, device='cpu')['TORCHINDUCTOR_CACHE_DIR'] for _ in range(2)]; "
    rank += "import os; print(*folder, oct(os.stat(folder[0]).st_mode))"
    done = subprocess.run([sys.executable, "-c", rank], capture_output=True, text=True, check=True)
    first, second, mode = done.stdout.split()
    assert first == second
    assert mode == "0o40700"
    assert not Path(first).exists()


@pytest.mark.parametrize(
    ("visible", "gpus", "seen"),
    [
        ("4,5,6,7", (0, 2), "4,6"),
        ("GPU-5a,MIG-9c", (1,), "MIG-9c"),
        (None, (0, 2), "0,2"),
        ("4,5", (), "4,5"),
        ("4,5", (1, 2), "but CUDA_VISIBLE_DEVICES=4,5 there names 2; give"),
        ("", (0,), "but CUDA_VISIBLE_DEVICES= there names 0; give"),
    ],
)
async def test_servers_see_gpus_by_name(visible: str | None, gpus: tuple[int, ...], seen: str, tmp_path: Path) -> None:
    """Where another user's job may have the first ones."""
    own = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | own
    order = GuardSpec(
        host="127.0.0.1",
        command=("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 7"),
        environment=environment,
        gpus=gpus,
        folder=tmp_path,
        log=tmp_path / "log",
    )
    given = "give" not in seen
    assert await (await start_guard(order)).wait() == f"ended with status {7 if given else 1}"
    told = order.log.read_text().strip()
    assert told == seen if given else seen in told


BINDS = """
import socket, tempfile, uuid
path = f"{tempfile.gettempdir()}/{uuid.uuid4()}"  # as vLLM's get_open_zmq_ipc_path
socket.socket(socket.AF_UNIX).bind(path)
print(path)
"""


@pytest.mark.parametrize(("length", "kept"), [(54, True), (55, False), (70, False), (107, False)])
def test_sockets_have_room_in_the_temporary_folder(length: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the machine's, whose path the guard's folder makes longer, or else in /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        given = Path(short, "x" * (length - len(short) - 1))
        given.mkdir()
        monkeypatch.setenv("TMPDIR", str(given))
        process = guard(sys.executable, "-c", BINDS)
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip()).parent
        assert process.wait(60) == 0
        assert folder.parent == (given if kept else Path("/tmp"))
        assert folder.name.startswith("engine-")
        assert not folder.exists()


SRUN = """#!/bin/sh
# As srun on a cluster that does not renumber a job's devices: the job has others of this node.
while [ "${1#-}" != "$1" ]; do shift; done
CUDA_VISIBLE_DEVICES=2,3,GPU-5a,7 exec "$@"
"""


async def test_a_jobs_servers_get_its_gpus_on_their_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which differ between nodes where Slurm has no ``ConstrainDevices=yes``; ranks have the first of them."""
    program(tmp_path / "srun", SRUN)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    keys = ("rollout=vllm", "rollout.server.tp=2", "rollout.server.replicas=4", "rollout.server.memory_fraction=0.3")
    job = ("run.launcher=slurm", "slurm.nodes=2", "slurm.gpus_per_node=4", "slurm.ntasks_per_node=2")
    config = load_config("tiny_cpu", [*keys, *job, "learner.device=cuda", "learner.dp=4"])
    nodes = ("a1", "127.0.0.2")
    allocation = Allocation(id="7", restart=0, this_node="a1", nodes=nodes, engine_nodes=(), folder=tmp_path)

    async def seen(site: ServerSite) -> tuple[str, str]:
        order = GuardSpec(
            prefix_command=site.prefix_command,
            python=site.python,
            host="127.0.0.1",
            command=("sh", "-c", "echo $CUDA_VISIBLE_DEVICES"),
            environment=dict(os.environ),
            gpus=site.gpus,
            folder=tmp_path,
            log=tmp_path / str(site.server_index),
        )
        assert await (await site.start(order)).wait() == "ended with status 0"
        return site.node, order.log.read_text().strip()

    found = [await seen(site) for (site,) in server_sites(config, allocation)]
    assert found == [(nodes[0], "4,5"), (nodes[0], "6,7"), (nodes[1], "2,3"), (nodes[1], "GPU-5a,7")]


def test_a_server_and_its_children_end_with_the_trainer() -> None:
    process = guard(sys.executable, "-c", SERVER)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2
    process.stdin.close()
    process.wait(30)
    eventually(lambda: not any(alive(p) for p in family), "the server and its child to end", 10)


async def test_a_guard_that_was_killed_leaves_no_child_of_its_server(tmp_path: Path) -> None:
    """On a GPU its memory would be missing to the server that follows."""
    command = [sys.executable, "-u", "-c", SERVER]
    order = GuardSpec(
        host="127.0.0.1", command=command, environment={**os.environ}, folder=tmp_path, log=tmp_path / "log"
    )
    guard = await start_guard(order)
    while "up" not in order.log.read_text():
        await asyncio.sleep(0.01)
    killed = psutil.Process(guard.process.pid)
    family = killed.children(recursive=True)
    assert len(family) == 2
    killed.kill()
    assert await guard.wait() == "ended with status -9"
    left = [process for process in family if alive(process)]
    for process in left:
        process.kill()
    assert not left


@pytest.mark.parametrize("deaf", [False, True])
def test_no_shared_memory_is_left_of_a_server_and_its_children(deaf: bool) -> None:
    """Whoever made it: SGLang's is known to no tracker of multiprocessing's. What was there before is another's."""
    others, bare = (Path(f"/dev/shm/test-{os.getpid()}-{name}") for name in ("others", "bare"))
    others.touch()
    process = guard(sys.executable, "-c", SHARES, str(others), str(bare), *["deaf"] * deaf)
    assert process.stdin is not None
    assert process.stdout is not None
    names = [*process.stdout.readline().split(), bare.name]
    assert len(names) == 3
    assert all(Path("/dev/shm", name).exists() for name in names)
    if deaf:
        psutil.Process(process.pid).children()[0].kill()
    process.stdin.close()
    process.wait(30)
    assert not any(Path("/dev/shm", name).exists() for name in names)
    others.unlink()


def test_no_shared_memory_is_left_where_all_processes_of_a_server_are_killed_at_once() -> None:
    """As by a node that is out of memory. None of them is there any more to say what it had mapped."""
    one, two = (Path(f"/dev/shm/test-{os.getpid()}-{name}") for name in ("one", "two"))
    process = started("-c", SAYS, "127.0.0.1", sys.executable, "-c", SHARES, str(one), str(two))
    assert process.stdout is not None
    limit = threading.Timer(300, process.kill)
    limit.start()
    names, mapped = set[str](), set[str]()
    while not names or not names <= mapped:
        line = process.stdout.readline()
        assert line, "neither the server nor its guard says a thing"
        first, *others = line.split()
        if first == "mapped":
            mapped |= set(others)
        else:
            names = {first, *others, one.name, two.name}
    limit.cancel()
    family = psutil.Process(process.pid).children(recursive=True)
    for member in family:
        member.suspend()  # so that no resource tracker tidies up behind the first that ends
    for member in family:
        member.kill()
    process.wait(30)
    assert not any(Path("/dev/shm", name).exists() for name in names)


def test_a_server_hears_signals_that_its_guard_was_born_deaf_to() -> None:
    """As under Ray, whose processes leave Slurm's signals to ranks."""
    deafened = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); "
    deafened += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    process = started("-c", deafened, str(engine_guard.__file__), "127.0.0.1", sys.executable, "-c", SERVER)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.stdin.close()
    assert process.wait(30) == -signal.SIGTERM % 256


def test_a_server_that_ends_gives_its_status() -> None:
    assert guard(sys.executable, "-c", "import sys; sys.exit(7)").wait(30) == 7


def test_once_the_guard_of_a_dead_server_has_ended_nothing_of_it_is_left() -> None:
    """Not even what it put into a session of its own: it would hold memory of GPUs that the learner takes next."""
    process = guard(sys.executable, "-c", LEAVES)
    assert process.stdout is not None
    left = [int(process.stdout.readline()) for _ in range(2)]
    assert process.wait(60) == 5
    assert not any(psutil.pid_exists(pid) for pid in left)


def test_folders_go_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    other = tmp_path / "weights"
    other.mkdir()
    code = "import sys, pathlib; from launcher.processes.scratch import scratch\n"
    code += "with scratch(pathlib.Path(sys.argv[1])) as folder: print(folder, flush=True); sys.stdin.read()"
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, str(other)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    folder = Path(trainer.stdout.readline().strip())
    assert folder.is_dir()
    trainer.kill()
    trainer.wait(30)
    eventually(lambda: not folder.exists() and not other.exists(), "both folders to go", 10)


def test_the_end_of_a_trainer_waits_no_longer_than_its_limit_for_files_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A large file of weights takes longer than that to go; here the process that removes it is stopped meanwhile."""
    monkeypatch.setattr(scratch, "_STOP_SECONDS", 0.1)
    before = set(psutil.Process().children())
    with scratch.scratch(within=tmp_path) as folder:
        (helper,) = set(psutil.Process().children()) - before
        helper.suspend()
    assert folder.is_dir()
    assert f"after 0.1 s process {helper.pid} still removes {folder}; it goes on by itself" in caplog.text
    helper.resume()
    eventually(lambda: not folder.exists(), "the folder to go", 10)


def test_the_interface_of_an_address_is_this_nodes_own() -> None:
    others = [(name, a.address) for name, found in psutil.net_if_addrs().items() for a in found if a.family == AF_INET]
    assert ("lo", "127.0.0.1") in others
    for name, address in others:
        assert engine_guard.find_interface(address) == name
    assert engine_guard.find_interface("192.0.2.1") is None  # of nobody (RFC 5737)


# The error about a process's death includes what it printed before it died.
def _abort(stderr: int) -> None:
    """As gloo does, from C."""
    os.dup2(stderr, 2)
    os.write(2, b"".join(b"line %d\n" % number for number in range(20)) + b"\nsocket: Too many open files")
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_last_lines_of_a_killed_child_are_kept_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    words = StderrTail("rank 0")
    child = multiprocessing.get_context("fork").Process(target=_abort, args=(words.theirs.fileno(),))
    child.start()
    words.listen()
    child.join()
    assert (
        asyncio.run(words.tail()) == "".join(f"\n  line {n}" for n in range(14, 20)) + "\n  socket: Too many open files"
    )
    assert capfd.readouterr().err.startswith("line 0\nline 1\n")


def test_the_end_of_a_log_is_told_where_it_is_at_hand(tmp_path: Path) -> None:
    (tmp_path / "rank-1.txt").write_text("x" * 100_000 + "\nwhy\n")
    assert last_lines(tmp_path / "rank-1.txt").endswith("\n  why")
    assert last_lines(tmp_path / "rank-2.txt") == ""


async def test_a_long_log_of_a_server_is_not_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "vllm_0.log"
    with log.open("wb") as file:
        file.truncate(8 << 20)  # of days
    command = ["sh", "-c", "echo; seq -f 'line %g' 30; exit 3"]
    order = GuardSpec(host="127.0.0.1", command=command, environment={**os.environ}, folder=tmp_path, log=log)
    guard = await start_guard(order)
    await guard.wait()
    started = StartedServer(guards=[guard], server=Server("http://here", token=None, timeout_seconds=1.0), logs=[log])
    tracemalloc.start()
    try:
        said = await started.wait_for_exit()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert said.splitlines()[0] == f"http://here ended with status 3; {log} ends with:"
    assert said.splitlines()[1:] == [f"  line {number}" for number in range(11, 31)]


# Models that are served side by side, each by a server of the embedded engine and without a learner.
class SaysItsGpus(EmbeddedAdapter):
    """Its servers say which GPUs they see, and answer that they are none."""

    module = "rl_megatron"

    @override
    def command(self, options: StartOptions) -> StartCommand:
        said = "import os; print('GPUs', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
        return StartCommand(
            arguments=(sys.executable, "-c", said + PORT + FOREIGN, "--port", str(options.port)), environment={}
        )


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of this test in the node's memory."""
    with tempfile.TemporaryDirectory(dir=NODE_MEMORY) as folder:
        yield Path(folder)


async def test_models_served_from_one_folder_have_a_file_of_weights_each(tmp_path: Path, memory: Path) -> None:
    """What a killed process left in the node's memory goes; what another still serves stays."""
    config = load_config("tiny_cpu", ["rollout.server.replicas=1", f"weights.folder={memory}"])
    models = [make_tiny_model(TinySizes(), tmp_path / "models", seed) for seed in (0, 1)]
    shape = read_shape(models[0])

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in memory.glob("*/model.safetensors")}

    async def served(model: Path, *beside: Path) -> None:
        before = files()
        async with standalone_engine(config_for_folder(config, model), model, shape, tmp_path / "eval"):
            now = files()
            assert len({*now.values()}) == len(now) == len(before) + 1
            assert before.items() <= now.items()
            if beside:
                await served(*beside)
                assert files() == now
        assert files() == before

    left = memory / "rl_megatron-left"
    left.mkdir()
    with lock_folder(left):
        pass
    (tmp_path / "eval").mkdir()
    await served(*models)
    assert not list(memory.iterdir())


def test_a_selection_bias_is_served_as_the_folder_has_it(tmp_path: Path) -> None:
    """In float32 beside weights in bfloat16, with the checksums of what is served."""
    save_model("hy_v3", tmp_path / "model")
    given, path = load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "w" / "model.safetensors"
    config = load_config("tiny_cpu", ["rollout=vllm", "learner.dtype=bfloat16"])
    with contextlib.ExitStack() as ends:
        weights = _FolderWeights(config, tmp_path / "model", read_shape(tmp_path / "model"), path, ends)
        asyncio.run(weights.push(0))
        sums = seal_from_reports(
            asyncio.run(weights.sums()), {name: tuple(tensor.shape) for name, tensor in given.items()}
        )
    served = load_file(path)
    assert sum(torch.equal(tensor, given[name]) for name, tensor in served.items()) == 3  # a layer with experts each
    assert all(torch.equal(t, given[name]) for name, t in served.items() if name.endswith("mlp.expert_bias"))
    assert sums == {name: checksum(tensor, tuple(tensor.shape)) for name, tensor in served.items()}


async def test_each_server_sees_gpus_of_its_own(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5a,6,7")
    engine = f"rollout.engine={__name__}:{SaysItsGpus.__name__}"
    keys = ("rollout.server.replicas=2", "rollout.server.tp=2", "learner.device=cuda", f"weights.folder={memory}")
    model = make_tiny_model(TinySizes(), tmp_path / "models", seed=0)
    config = config_for_folder(load_config("tiny_cpu", [engine, *keys]), model)
    (tmp_path / "eval").mkdir()
    with pytest.raises(ConfigError, match="answers as no server"):
        async with standalone_engine(config, model, read_shape(model), tmp_path / "eval"):
            pass
    logs = sorted((tmp_path / "eval").glob("*.log"))
    assert [re.findall("^GPUs (.*)$", log.read_text(), re.M) for log in logs] == [["3,GPU-5a"], ["6,7"]]


@pytest.mark.parametrize(
    ("keys", "seen"),
    [
        (("replicas=2",), [(0,), (1,)]),
        (("replicas=2", "tp=2", "nodes=2"), [(0, 1), (2, 3)]),
        (("replicas=5", "memory_fraction=0.5"), [(0,), (1,), (2,), (3,), (0,)]),
        (("tp=2",), [()]),  # its engine takes the first
        (("replicas=5", "memory_fraction=0.6"), "replicas=5 of tp=1 need 5 GPUs, and this machine has 4; lower them, "),
        (("replicas=13",), "or let 4 share a GPU by rollout.server.memory_fraction=0.25"),
        (("replicas=2", "tp=8"), "replicas=2 of tp=8 need 16 GPUs, and this machine has 4; lower them"),
    ],
)
def test_which_gpus_are_a_servers_own(
    keys: tuple[str, ...], seen: Sequence[tuple[int, ...]] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first on, whatever ranks the configuration has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5a,6,7")
    given = ("rollout=vllm", "learner.dp=2", "learner.ep=1")
    given += tuple(f"rollout.server.{key}" for key in keys)
    config = load_config("tiny_cpu", [*given, "learner.device=cuda"])
    if isinstance(seen, str):
        with pytest.raises(ConfigError, match=re.escape(seen.replace("tp=", "rollout.server.tp="))):
            standalone_sites(config)
    else:
        assert [site.gpus for (site,) in standalone_sites(config)] == seen
    assert not any(site.gpus for (site,) in standalone_sites(load_config("tiny_cpu", given)))
