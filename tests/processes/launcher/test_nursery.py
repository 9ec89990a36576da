"""The process that ranks are forked from: what it imports, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.hosts.forks import ForkedRank, Nursery
from rl_megatron.errors import WorkerDied
from rl_megatron.placement.names import LEARNER
from tests.e2e.processes import eventually


def words_of(process: psutil.Process) -> list[str]:
    """Its command line, which the kernel shows a moment after it has told the parent that the program started."""
    eventually(process.cmdline, f"the command line of process {process.pid}")
    return process.cmdline()


def over(rank: ForkedRank) -> asyncio.Future[Any]:
    """Its process's end; that of its stream says nothing."""
    return rank.over(asyncio.get_running_loop().create_future())


async def test_ranks_end_with_it_and_say_so() -> None:
    with Nursery(["a module that is not there"]) as forks:
        ranks = [await forks.fork(LEARNER, number) for number in (0, 1)]
        processes = [psutil.Process(int(rank.where.removeprefix("pid "))) for rank in ranks]
        (nursery,) = {process.parent() for process in processes}
        assert nursery is not None
        ends = [over(rank) for rank in ranks]
        ranks[0].kill()
        await asyncio.wait_for(ends[0], 600)
        assert not ends[1].done()
        nursery.kill()
        await asyncio.wait_for(ends[1], 600)
        for rank in ranks:
            ending = await rank.ending()
            assert ending.killed
            assert "was killed by signal 9" in ending.how
        assert not psutil.wait_procs(processes, 600)[1]
        with pytest.raises(WorkerDied, match=f"forked from ended with status -{signal.SIGKILL.value}"):
            await forks.fork(LEARNER, 2)


async def test_ranks_are_plain_processes_where_it_must_not_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, name='planted', daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    with Nursery(["threaded"]) as forks:
        ranks = [await forks.fork("critic", number) for number in (0, 1)]
        processes = [psutil.Process(int(rank.where.removeprefix("pid "))) for rank in ranks]
        (nursery,) = {process.parent() for process in processes}
        assert nursery is not None
        assert [words_of(process)[-4:] for process in processes] == [
            ["launcher.worker.process", "critic", str(number), str(nursery.pid)] for number in (0, 1)
        ]
        ranks[1].kill()  # before it has imported all that the other does
        ranks[0].connection.close()  # upon which it ends
        for rank in ranks:
            await asyncio.wait_for(over(rank), 600)
        assert [(await rank.ending()).expected for rank in ranks] == [True, False]
    assert not psutil.wait_procs(processes, 600)[1]
    assert [record.getMessage() for record in caplog.records if record.name == "launcher.hosts.forks"] == [
        "ranks start slower, each with imports of its own: the imports started threads: there are 2 (known to Python: "
        "MainThread, planted)"
    ]


async def test_an_import_that_ends_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fatal.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    said = "the process that ranks are forked from ended with status 3"
    with Nursery(["fatal"]) as forks, pytest.raises(WorkerDied, match=said):
        await forks.fork(LEARNER, 0)
