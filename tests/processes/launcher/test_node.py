"""The process that starts the ranks of a node, as its forks, or plainly where it must not fork."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from launcher import wire
from launcher.controller.arrivals import arrivals
from launcher.controller.group import RankProcess
from launcher.hosts import local
from launcher.hosts.local import LocalLauncher
from launcher.processes.environment import missing_order_variables
from launcher.processes.scratch import remove_at_exit
from launcher.wire import Call, Hello, Muster, Setup
from launcher.worker import forking
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError, WorkerFailure
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import shares_of_cores
from tests.e2e.processes import eventually
from tests.forks import FORKS

TOKEN = b"t" * wire.TOKEN_BYTES
NODE = """
from launcher.worker import node
node.rank_modules = lambda device: ("planted",)
node.main()
"""
BOUND = """
import os, signal
os.kill(os.getpid(), signal.SIGTERM)  # as Slurm does before preemption
os.sched_getaffinity = lambda _: {0, 1, 2, 3}
os.environ["SLURM_CPU_BIND_TYPE"] = "mask_cpu:"
os.sched_setaffinity = lambda _, cpus: print("cores", cpus, os.environ["SLURM_PROCID"], flush=True)
"""
THREAD = "import threading; threading.Thread(target=threading.Event().wait, name='planted', daemon=True).start()"
HINDRANCES = f"""
import signal, socket, sys
from launcher.worker import forking, node
assert "numpy" not in sys.modules  # only `import_all` keeps it from starting threads
forking.import_all(())
print(forking.no_fork_reason())
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGHUP}})
print(forking.no_fork_reason())
held = socket.create_server(("127.0.0.1", 0))
print(forking.no_fork_reason())
class Driver:
    state = 3  # not initialized
    def cuCtxGetCurrent(self, context):
        return self.state
forking.ctypes.CDLL = lambda *_, **__: Driver()
print(forking.no_fork_reason())
Driver.state = 0
print(forking.no_fork_reason())
{THREAD}
print(forking.no_fork_reason())
"""


@contextlib.contextmanager
def started(folder: Path, planted: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """The task of node "b", the second of two with two ranks each, which imports a module."""
    (folder / "planted.py").write_text(planted)
    path = os.pathsep.join((str(folder), str(Path(__file__).parents[3])))
    call = Call(host="127.0.0.1", port=port, token=TOKEN.hex(), seconds=60, threads=2, device="cpu")
    task = subprocess.Popen(
        [sys.executable, "-c", NODE],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "SLURMD_NODENAME": "b", "SLURM_PROCID": "1"},
        text=True,
    )
    with task:
        try:
            assert task.stdin is not None
            task.stdin.write(
                Muster(call=call, nodes=("a", "b"), ranks_per_node={LEARNER: 2}, folder=str(folder)).line().decode()
            )
            task.stdin.close()
            yield task
        finally:
            task.kill()


@pytest.mark.parametrize(
    ("planted", "hindered"),
    [(BOUND, ""), (THREAD, "the imports started threads: there are 2 (known to Python: MainThread, planted)")],
    ids=["it may", "it must not"],
)
def test_it_forks_its_ranks_and_ends_with_the_first_that_fails(tmp_path: Path, planted: str, hindered: str) -> None:
    with wire.listen("127.0.0.1", backlog=2) as listener, started(tmp_path, planted, listener.getsockname()[1]) as task:
        listener.settimeout(600)
        streams = [asyncio.run(wire.accept(listener.accept()[0], TOKEN)) for _ in range(2)]
        hellos = sorted((Hello(**json.loads(stream.recv_bytes())) for stream in streams), key=lambda hello: hello.rank)
        assert [(hello.rank, hello.node, hello.hindered) for hello in hellos] == [(n, "b", hindered) for n in (2, 3)]
        ranks = [psutil.Process(hello.pid) for hello in hellos]
        assert [rank.ppid() for rank in ranks] == [task.pid] * 2
        assert ["launcher.worker.process" in rank.cmdline() for rank in ranks] == [bool(hindered)] * 2
        files = [os.readlink(f"/proc/{ranks[1].pid}/fd/{number}") for number in range(3)]
        assert files == [os.devnull, str(tmp_path / "rank-3.txt"), str(tmp_path / "rank-3.txt")]
        if not hindered:
            assert (tmp_path / "rank-3.txt").read_text() == "cores [2, 3] 3\n"
            said = (wire.unpack(wire.receive(stream)) for stream in streams * 60)
            assert next(value for status, value, *_ in said if status == "signal") == "SIGTERM"
        ranks[1].kill()
        assert task.wait(600) == 128 + signal.SIGKILL
        assert not psutil.wait_procs(ranks, 600)[1]
        assert task.stderr is not None
        assert "rank 3 on b was killed by signal 9\n" in task.stderr.read()


def test_what_forbids_a_fork_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", HINDRANCES], capture_output=True, text=True, check=True)
    *found, last = done.stdout.splitlines()
    assert found[0] == ""
    assert found[1] == "the imports changed the blocked signals to ['SIGHUP', 'SIGINT', 'SIGTERM']"
    assert found[2].startswith("the imports opened a socket at addr(ip='127.0.0.1', port=")
    assert found[3] == found[2]  # a driver that is loaded, but that nobody has asked
    assert found[4] == "the imports initialized CUDA"
    assert last.startswith("the imports started threads: there are 2 ")


def test_with_flash_attention_nothing_that_initialises_cuda_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformer_engine"}
    monkeypatch.setattr(forking.importlib.util, "find_spec", lambda name: name in installed or None)
    whole = forking.rank_modules("cpu")
    assert "rl_megatron.learner.megatron" in whole
    assert forking.rank_modules("cuda") == whole
    installed.add("flash_attn")
    assert forking.rank_modules("cpu") == whole
    assert not any(name.startswith("rl_megatron.learner.") for name in forking.rank_modules("cuda"))


def test_a_node_of_another_step_is_named() -> None:
    call = Call(host="h", port=1, token="", seconds=0, threads=1, device="cpu")
    muster = Muster.read(
        Muster(call=call, nodes=("a", "b"), ranks_per_node={LEARNER: 2, "critic": 1}, folder="/f").line().decode()
    )
    expected = [[(LEARNER, 0), (LEARNER, 1), ("critic", 0)], [(LEARNER, 2), (LEARNER, 3), ("critic", 1)]]
    assert [muster.node_ranks(node) for node in "ab"] == expected
    with pytest.raises(ValueError, match="this node, c, is none of the step's: a, b"):
        muster.node_ranks("c")


def test_ranks_share_the_cores_of_their_node_evenly() -> None:
    two_packages = {cpu: (cpu // 4 % 2, cpu % 4) for cpu in range(16)}  # threads of a core are 8 apart
    assert shares_of_cores(two_packages, 4) == [[0, 8, 1, 9], [2, 10, 3, 11], [4, 12, 5, 13], [6, 14, 7, 15]]
    draw = random.Random(3)
    for _ in range(200):
        cpus = {cpu: (draw.randrange(2), draw.randrange(9)) for cpu in draw.sample(range(64), draw.randrange(1, 40))}
        ranks = draw.randrange(1, 9)
        shares, cores = shares_of_cores(cpus, ranks), [{cpus[cpu] for cpu in s} for s in shares_of_cores(cpus, ranks)]
        if len(set(cpus.values())) < ranks:
            assert shares == [[]] * ranks
            continue
        assert sorted(cpu for share in shares for cpu in share) == sorted(cpus)
        assert sum(map(len, cores)) == len(set(cpus.values()))  # no core is of two ranks
        assert max(map(len, cores)) - min(map(len, cores)) <= 1


# The child of the controller on its own machine, whose ranks' stderr the controller reads.
@contextlib.asynccontextmanager
async def child(
    folder: Path, planted: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[list[RankProcess], psutil.Process]]:
    """Ranks that have connected, and the process that started them, which imports a module; nothing is called."""
    (folder / "planted.py").write_text(planted)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    monkeypatch.setattr(local, "_PROGRAM", ("-P", "-c", NODE))
    config = load_config("tiny_cpu", ["learner.ep=1", "learner.dp=2", "learner.threads=1"])
    with wire.listen("127.0.0.1", backlog=2) as listener:
        port = listener.getsockname()[1]
        call = Call(host="127.0.0.1", port=port, token=TOKEN.hex(), seconds=600, threads=1, device="cpu")
        async with LocalLauncher(folder, folder)._begin(config, call) as started:
            ranks = await arrivals(listener, call, started)
            (node,) = {psutil.Process(rank.pid).parent() for rank in ranks}
            assert node is not None
            yield ranks, node


async def test_it_says_how_each_rank_ended_and_outlives_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a rank that ended, its peers may still save. The kernel ends the ranks with it."""
    async with child(tmp_path, "", monkeypatch) as (ranks, node):
        processes = [psutil.Process(rank.pid) for rank in ranks]
        assert [rank.where for rank in ranks] == [f"pid {process.pid}" for process in processes]
        assert "launcher.worker.process" not in processes[0].cmdline()
        processes[0].kill()
        assert not psutil.wait_procs(processes[:1], 600)[1]
        assert await ranks[0].ending() == ("was killed by signal 9; log.txt has its output", True)
        processes[1].suspend()
        await ranks[1].wake()
        assert processes[1].status() != psutil.STATUS_STOPPED
        assert node.is_running()
        node.kill()
        assert not psutil.wait_procs(processes, 600)[1]
        said = "hung up: it was killed, crashed or lost its node; log.txt has its output"
        assert (await ranks[1].ending())[0] == said
    assert "\0" not in capfd.readouterr().err


async def test_ranks_are_plain_processes_where_it_must_not_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with child(tmp_path, THREAD, monkeypatch) as (ranks, node):
        processes = [psutil.Process(rank.pid) for rank in ranks]
        assert [words_of(process)[-3:] for process in processes] == [
            ["launcher.worker.process", str(number), str(node.pid)] for number in (0, 1)
        ]
        pipes = [len([file for file in open_files(process) if file.startswith("pipe:")]) for process in processes]
        assert pipes == [1, 1]  # its own stderr
        ranks[0].kill()
        assert not psutil.wait_procs(processes[:1], 600)[1]
        how, killed = await ranks[0].ending()
        assert how in [f"ended with exit code {code}; log.txt has its output" for code in (0, 1)]
        assert not killed
    assert not psutil.wait_procs(processes, 600)[1]
    assert [record.getMessage() for record in caplog.records] == [
        f"ranks on {ranks[0].node} start slower, each with imports of its own: the imports started threads: there are "
        "2 (known to Python: MainThread, planted)"
    ]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line, which the kernel shows a moment after it has told the parent that the program started."""
    eventually(process.cmdline, f"the command line of process {process.pid}")
    return process.cmdline()


def open_files(process: psutil.Process) -> list[str]:
    """What its descriptors are of."""
    return [os.readlink(f"/proc/{process.pid}/fd/{name}") for name in os.listdir(f"/proc/{process.pid}/fd")]


async def test_an_import_that_ends_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "the process that forks the ranks ended with status 3 before rank 0, 1 on .* connected; their output"
    with pytest.raises(WorkerFailure, match=said):
        async with child(tmp_path, "import os\nos._exit(3)\n", monkeypatch):
            pass


# The variables and the mode in which a rank of ``learner.deterministic=true`` computes.
NAMES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
LAYERS = """
import json, os, torch
def layers(shape, layer):
    names = {names}
    raise RuntimeError(json.dumps([[os.environ.get(name) for name in names],
                                   torch.are_deterministic_algorithms_enabled()]))
"""


def test_users_values_stay_if_they_are_of_one_order_and_others_are_refused() -> None:
    assert list(missing_order_variables({})) == list(NAMES)
    assert "NCCL_ALGO" not in missing_order_variables({"NCCL_ALGO": "Tree"})
    with pytest.raises(ConfigError, match=r"NVTE_ALLOW_NONDETERMINISTIC_ALGO=1 in the ranks' environment: only with"):
        missing_order_variables({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"})


def rank_main(connection: Connection, folder: Path) -> None:
    from launcher.worker.process import reporting_errors, run_worker

    for name in NAMES:
        os.environ.pop(name, None)
    sys.path.append(str(folder))
    with reporting_errors(connection):
        run_worker(connection, 0)


@pytest.mark.parametrize(("keys", "mode"), [((), False), (("learner.deterministic=true",), True)])
def test_a_rank_has_them_when_it_builds_its_model(keys: tuple[str, ...], mode: bool, tmp_path: Path) -> None:
    (tmp_path / "seen_by_layers.py").write_text(LAYERS.format(names=NAMES))
    config = load_config("tiny_cpu", ["learner.ep=1", "learner.layers=seen_by_layers:layers", *keys])
    model = make_tiny_model(TinySizes.of(config.model.tiny), tmp_path / "model", seed=1)
    ours, theirs = Pipe()
    rank = FORKS.Process(target=rank_main, args=(theirs, tmp_path))
    rank.start()
    theirs.close()
    setup = Setup(config=config, model_folder=model, run_folder=tmp_path, rendezvous=f"file://{tmp_path}/rendezvous")
    wire.send(ours, wire.pack(setup))
    status, said, *_ = wire.unpack(wire.receive(ours))
    rank.join()
    assert status == "raised", said
    values = [":4096:8", "Ring", "0"] if mode else [None, None, None]
    assert json.loads(said.splitlines()[0].removeprefix("RuntimeError: ")) == [values, mode]


# Processes start while another thread of the controller sets environment variables, as imports of libraries do.
@pytest.fixture
def moving() -> Iterator[None]:
    """A thread that adds variables all the time, so that the C library moves them. Without ``env`` one start in three
    failed with EFAULT ("Bad address")."""
    ended, names = threading.Event(), [f"RL_MEGATRON_TEST_{n}" for n in range(3000)]

    def add() -> None:
        while not ended.is_set():
            for name in names:
                os.environ[name] = "x" * 50
            for name in names:
                del os.environ[name]

    thread = threading.Thread(target=add)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.usefixtures("moving")
def test_a_process_starts_while_variables_move() -> None:
    for _ in range(30):
        with remove_at_exit():
            pass
