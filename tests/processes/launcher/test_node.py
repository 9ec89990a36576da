"""The task of a node: it starts the node's ranks as forks, or plainly where it must not fork, and ends as they do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.wire import channel, messages
from launcher.wire.greetings import Call, Hello, Muster
from launcher.worker import forking
from rl_megatron.placement.ranks import shares_of_cores

TOKEN = b"t" * channel.TOKEN_BYTES
NODE = """
from launcher.worker import node
node.modules_of = lambda device: ("planted",)
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
import signal, socket
from launcher.worker import forking
forking.import_all(())
print(forking.hindrance())
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGHUP}})
print(forking.hindrance())
held = socket.create_server(("127.0.0.1", 0))
print(forking.hindrance())
class Driver:
    state = 3  # not initialised
    def cuCtxGetCurrent(self, context):
        return self.state
forking.ctypes.CDLL = lambda *_, **__: Driver()
print(forking.hindrance())
Driver.state = 0
print(forking.hindrance())
{THREAD}
print(forking.hindrance())
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
            task.stdin.write(Muster(call=call, nodes=("a", "b"), ranks_per_node=2, folder=str(folder)).line().decode())
            task.stdin.close()
            yield task
        finally:
            task.kill()


@pytest.mark.parametrize(
    ("planted", "hindered"),
    [(BOUND, ""), (THREAD, "the imports started threads: there are 2 (known to Python: MainThread, planted)")],
    ids=["it may", "it must not"],
)
def test_it_forks_its_ranks_where_it_may_and_ends_with_the_first_that_fails(
    tmp_path: Path, planted: str, hindered: str
) -> None:
    with (
        channel.listen("127.0.0.1", backlog=2) as listener,
        started(tmp_path, planted, listener.getsockname()[1]) as task,
    ):
        listener.settimeout(600)
        streams = [asyncio.run(channel.accept(listener.accept()[0], TOKEN)) for _ in range(2)]
        hellos = sorted((Hello(**json.loads(stream.recv_bytes())) for stream in streams), key=lambda hello: hello.rank)
        assert [(hello.rank, hello.node, hello.hindered) for hello in hellos] == [(n, "b", hindered) for n in (2, 3)]
        ranks = [psutil.Process(hello.pid) for hello in hellos]
        assert [rank.ppid() for rank in ranks] == [task.pid] * 2
        assert ["launcher.worker.remote" in rank.cmdline() for rank in ranks] == [bool(hindered)] * 2
        files = [os.readlink(f"/proc/{ranks[1].pid}/fd/{number}") for number in range(3)]
        assert files == [os.devnull, str(tmp_path / "rank-3.txt"), str(tmp_path / "rank-3.txt")]
        if not hindered:
            assert (tmp_path / "rank-3.txt").read_text() == "cores [2, 3] 3\n"
            said = (messages.unpack(messages.receive(stream)) for stream in streams * 60)
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
    assert found[4] == "the imports initialised CUDA"
    assert last.startswith("the imports started threads: there are 2 ")


def test_with_flash_attention_nothing_that_initialises_cuda_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformer_engine"}
    monkeypatch.setattr(forking.importlib.util, "find_spec", lambda name: name in installed or None)
    whole = forking.modules_of("cpu")
    assert "rl_megatron.learner.megatron" in whole
    assert forking.modules_of("cuda") == whole
    installed.add("flash_attn")
    assert forking.modules_of("cpu") == whole
    assert not any(name.startswith("rl_megatron.learner.") for name in forking.modules_of("cuda"))


def test_a_node_of_another_step_is_named() -> None:
    call = Call(host="h", port=1, token="", seconds=0, threads=1, device="cpu")
    muster = Muster.read(Muster(call=call, nodes=("a", "b"), ranks_per_node=4, folder="/f").line().decode())
    assert [list(muster.ranks_of(node)) for node in "ab"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="this node, c, is none of the step's: a, b"):
        muster.ranks_of("c")


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
