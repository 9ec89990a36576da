"""What the job's script does after an attempt, and on signals, with stand-ins for Slurm's commands and for the run."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.hosts.slurm.allocation import Allocation
from launcher.hosts.slurm.launcher import running_step
from launcher.hosts.slurm.script import job_script
from launcher.processes import engine_guard
from launcher.processes.scratch import scratch
from launcher.runs.folder import claim
from launcher.runs.stop import StopSignal
from rl_megatron.errors import ConfigError
from rl_megatron.observability.progress import Progress
from tests.unit.launcher.commands import program
from tests.unit.launcher.slurm_jobs import config_of

JOB = Path(__file__).resolve().parents[3] / "slurm" / "job.sh"
RUN = """#!/usr/bin/env bash
[ -n "$FAILED$ENDS" ] || touch "$ATTEMPT/requeue"
[ -z "$FAILED" ] || echo "${FAILED#several}" | awk NF >"$ATTEMPT/failed_node"
printf '%s\\n' "$PWD" "${PYTHONPATH%%:*}" >"$RUN/where"
[ -z "$STEP" ] || mkdir -p "$RUN/checkpoints/step_$STEP"
"""
SBATCH = """#!/usr/bin/env bash
# Jobs need $NEED nodes of node1 to node6.
echo "$@" >>"$RUN/tried"
for argument in "$@"; do
    case $argument in --exclude=*) without=${argument#*=} ;; esac
done
[ $((6 - $(tr , '\\n' <<<"$without" | grep -c 'node[1-6]'))) -ge "$NEED" ]
"""
SCONTROL = """#!/usr/bin/env bash
# Refuses requeues, with a line of $RUN/refusals each.
case $2 in
    hostnames) IFS=- read -r first last <<<"$(tr -dc 0-9- <<<"$3")"; seq -f node%g "$first" "${last:-$first}" ;;
    job) echo "JobId=$3 PreemptTime=${PREEMPTED:-None}" ;;
    *) echo "$@" >>"$RUN/asked" ;;
esac
if [ "$1" = requeue ] && [ -s "$RUN/refusals" ]; then
    head -n 1 "$RUN/refusals" >&2
    sed -i 1d "$RUN/refusals"
    exit 1
fi
"""
SRUN = """#!/usr/bin/env bash
while [ "$1" != bash ]; do options+=("$1"); shift; done
echo "${options[@]}" >"$RUN/srun"
SLURM_PROCID=0 exec "$@"
"""
SQUEUE = """#!/usr/bin/env bash
# Says in turn the lines of $LEFT; the third time it does not answer.
echo "$@" >>"$RUN/queue"
at=$(wc -l <"$RUN/queue")
sed -n "${at}p" <<<"$LEFT"
[ "$at" != 3 ]
"""


def attempt(
    folder: Path, restart: int, step: str = "", python: str = "python", script: str = "", **given: str
) -> tuple[int, str, list[str]]:
    """The script's status, its words and what it asked of Slurm's controller, after a run that asks to come back, with
    a checkpoint of ``step``, or whose rank died on the node FAILED (or on several)."""
    commands, run = folder / "commands", folder / "run"
    commands.mkdir(exist_ok=True)
    run.mkdir(exist_ok=True)
    (run / "asked").write_text("")
    programs = {"scontrol": SCONTROL, "sbatch": SBATCH, "sleep": "#!/bin/sh\n", "python": RUN}
    programs |= {"srun": SRUN, "squeue": SQUEUE}
    for name, text in programs.items():
        program(commands / name, text)
    before = f"RUN={run} PYTHON={commands}/{python} TRAIN=() REQUEUES=9 RESTARTS=3 EXCLUDE=node9\n"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart), "SLURM_JOB_NODELIST": "node[1-4]"}
    slurm["SLURMD_NODENAME"] = "node1"
    slurm["RUN"] = str(run)
    own = {"PATH": f"{commands}:{os.environ['PATH']}", "STEP": step, "ATTEMPT": f"{run}/jobs/7-{restart}"}
    environment = os.environ | slurm | own | {"FAILED": "", "ENDS": "", "NEED": "1"} | given
    script = script or before + JOB.read_text()
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, env=environment, timeout=600)
    asked = [line for line in (run / "asked").read_text().splitlines() if not line.startswith("show")]
    return done.returncode, done.stdout + done.stderr, asked


def test_a_run_that_twice_made_no_step_does_not_come_back(tmp_path: Path) -> None:
    steps = ["000002", "", "000004", "", ""]
    done = [attempt(tmp_path, restart, step) for restart, step in enumerate(steps)]
    assert [status for status, _, _ in done] == [0, 0, 0, 0, 1], done
    assert all("saved; comes back" in said for _, said, _ in done[:4])
    assert "twice in a row its time was up before a step was made; raise slurm.time" in done[4][1]
    assert attempt(tmp_path, 5)[0] == 0  # sent again by a person


def test_a_step_counts_where_the_clock_went_back(tmp_path: Path) -> None:
    """More steps are progress whatever the time of their folder says; steps may have seven digits."""
    assert attempt(tmp_path, 0, "999999")[0] == 0
    assert attempt(tmp_path, 1)[0] == 0
    os.utime(tmp_path / "run" / "checkpoints" / "step_999999", (2**32, 2**32))
    assert attempt(tmp_path, 2, "1000000")[0] == 0
    assert attempt(tmp_path, 3)[0] == 0


def test_only_time_limits_in_a_row_and_of_this_job_are_without_a_step(tmp_path: Path) -> None:
    """Preemption is none, nor is what ends otherwise after a checkpoint, nor what an earlier job left."""

    def comes_back(restart: int, step: str = "", **given: str) -> bool:
        status, said, asked = attempt(tmp_path, restart, step, **given)
        return status == 0 and asked[:1] == ["requeue 7"] and "; comes back" in said

    preempted = {"PREEMPTED": "2026-01-02T03:04:05"}
    assert comes_back(0)
    assert comes_back(1, **preempted)
    assert comes_back(2, "000002", FAILED="node5")
    assert comes_back(3)
    assert not comes_back(4)
    (tmp_path / "run" / "jobs" / "stalled").write_text("6\n")
    assert all(comes_back(restart, **preempted) for restart in (5, 6))
    assert comes_back(7)
    assert not comes_back(8)


def test_a_preempted_job_asks_to_come_back_itself(tmp_path: Path) -> None:
    """With PreemptMode=CANCEL Slurm would end it for good. It was asked to stop, not to save for a restart."""
    status, said, asked = attempt(tmp_path, 0, ENDS="well", PREEMPTED="2026-01-02T03:04:05")
    assert (status, asked) == (0, ["requeue 7"]), said
    assert "preempted; comes back" in said


SLOW_START = """
trap() { [ "$BASHPID" = $$ ] || until [ -e "$RUN/waits" ]; do :; done; builtin trap "$@"; }
sleep() { touch "$RUN/waits"; command sleep "$@"; }
"""


def script_of(folder: Path, *keys: str) -> str:
    """The job's script of a run in ``folder``, with the interpreter of `attempt`."""
    config = config_of("run.name=run", f"run.dir={folder}", *keys)
    return job_script(config, folder=folder, python=str(folder / "commands" / "python"), package=folder)


@pytest.mark.parametrize("before", ["", SLOW_START])
def test_a_job_whose_time_is_up_during_its_setup_saves_and_comes_back(tmp_path: Path, before: str) -> None:
    """Also where the signal comes before the controller ignores it: the controller's shell changes no trap before the
    script has asked for the first time."""
    status, said, asked = attempt(tmp_path, 0, script=before + script_of(tmp_path, "slurm.setup=kill -USR1 $$"))
    assert (status, asked) == (0, ["requeue 7"]), said
    assert "the time limit or preemption is near: the run saves" in said


@pytest.mark.parametrize(
    "options",
    [
        *("set -e", "set -euo pipefail", "set -f", "set -C", "set -o posix", "set -k", "set +B", "cd /", "IFS=0"),
        *("shopt -s failglob nullglob", "trap 'exit 9' ERR", "export PYTHONPATH=/site", "alias echo=false; set -m"),
    ],
)
def test_a_setup_that_leaves_options_of_bash_on_changes_nothing(tmp_path: Path, options: str) -> None:
    script = script_of(tmp_path, f"slurm.setup={options}")
    for restart, step in enumerate(("000001", "000002", "000003")):
        status, said, asked = attempt(tmp_path, restart, step, script=script)
        assert (status, asked) == (0, ["requeue 7"]), said
    assert attempt(tmp_path, 3, ENDS="well", script=script)[1].endswith("restart 3: done\n")
    assert (tmp_path / "run" / "where").read_text() == f"{tmp_path}\n{tmp_path}\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"POSIXLY_CORRECT": "1"},
        {"SHELLOPTS": "errexit:noglob:noclobber:nounset:pipefail:posix:keyword"},
        {"BASHOPTS": "failglob:nocasematch:lastpipe"},
        {"BASH_ENV": "site.sh"},
        {"SLURM_TIME_FORMAT": "relative"},
    ],
)
def test_variables_that_change_bash_change_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    (tmp_path / "site.sh").write_text("set -o posix -e; cd /; IFS=1; shopt -s failglob\n")
    script = script_of(tmp_path)
    given = {name: str(tmp_path / text) if name == "BASH_ENV" else text for name, text in variables.items()}
    status, said, asked = attempt(tmp_path, 0, "000001", script=script, **given)
    assert (status, asked) == (0, ["requeue 7"]), said
    assert attempt(tmp_path, 1, ENDS="well", script=script, **given)[1].endswith("restart 1: done\n")


def test_a_job_of_an_earlier_jobs_number_counts_none_of_its_attempts(tmp_path: Path) -> None:
    """Slurm's counter began again. The earlier job saved, and lost as many nodes as it might."""
    assert "saved; comes back" in attempt(tmp_path, 0, "000001")[1]
    assert all("comes back" in attempt(tmp_path, n, FAILED="node5")[1] for n in (1, 2, 3))
    status, said, asked = attempt(tmp_path, 0, ENDS="well")
    assert (status, asked, said[-6:]) == (0, [], " done\n")
    assert all("comes back" in attempt(tmp_path, n, FAILED="node6")[1] for n in (1, 2, 3))
    jobs, every = tmp_path / "run" / "jobs", ["7-0", "7-1", "7-2", "7-3"]
    (earlier,) = jobs.glob("earlier-*")
    assert [sorted(path.name for path in folder.glob("*-?")) for folder in (earlier, jobs)] == [every, every]
    assert (earlier / "7-0" / "requeue").exists()


def test_a_job_of_a_run_that_another_process_runs_takes_nothing_over(tmp_path: Path) -> None:
    """Else status and cancel would speak of it, and no longer of the job that runs."""
    run = tmp_path / "run"
    attempt(tmp_path, 0)
    (run / "jobs" / "id").write_text("6\n")
    (run / "jobs" / "stalled").write_text("6\n")
    before = {path: path.read_bytes() for path in (run / "jobs").rglob("*") if path.is_file()}
    with claim(run, resume=True):
        status, said, asked = attempt(tmp_path, 1, "000002")
    assert (status, asked) == (1, [])
    assert said.endswith(f"job 7, restart 1: failed: another process runs in {run}; wait for its end, or end it\n")
    assert {path: path.read_bytes() for path in (run / "jobs").rglob("*") if path.is_file()} == before
    assert attempt(tmp_path, 1, "000002")[0] == 0
    assert (run / "jobs" / "id").read_text() == "7\n"


def test_a_node_without_the_controllers_interpreter_is_told(tmp_path: Path) -> None:
    status, said, _ = attempt(tmp_path, 0, python="gone")
    assert status == 127
    assert f"status 127: {tmp_path}/commands/gone, in which the controller runs, is not on this node; set slurm" in said


AWAY = "slurm_requeue error: Unable to contact slurm controller (connect failure)"
BUSY = "slurm_requeue error: Socket timed out on send/recv operation"


@pytest.mark.parametrize("failed", ["", "node4"])
def test_a_job_that_slurm_does_not_requeue_at_once_asks_until_it_does(tmp_path: Path, failed: str) -> None:
    """It says why, each cause once in a row."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "refusals").write_text(f"{AWAY}\n{AWAY}\n{BUSY}\n")
    status, said, asked = attempt(tmp_path, 0, "000001", FAILED=failed)
    assert (status, asked[:4]) == (0, ["requeue 7"] * 4)
    assert asked[4:] == (excluding("node4")[1:] if failed else [])
    causes = [line.partition("every 15 s: ")[2] for line in said.splitlines() if "it was not requeued" in line]
    assert causes == [AWAY, BUSY]


@pytest.mark.parametrize("why", ["Invalid job id specified", "Requested operation is presently disabled"])
def test_a_job_that_slurm_will_never_requeue_fails(tmp_path: Path, why: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "refusals").write_text(f"{why}\n" * 2)
    status, said, asked = attempt(tmp_path, 0, "000001")
    assert (status, asked) == (1, ["requeue 7"])
    assert said.splitlines()[-1].endswith(f"failed with status 1: Slurm does not requeue it: {why}")


def test_a_run_that_has_used_up_its_requeues_is_not_done(tmp_path: Path) -> None:
    status, said, asked = attempt(tmp_path, 9, "000001")  # REQUEUES=9
    assert (status, asked) == (1, [])
    assert "saved, but slurm.requeues=9 are used up; to continue, submit its script again" in said.splitlines()[-1]
    status, said, _ = attempt(tmp_path, 11, "000003", ENDS="yes")
    assert (status, said.splitlines()[-1].endswith(": done")) == (0, True)


def excluding(*nodes: str) -> list[str]:
    """What the script asks of Slurm's controller to come back without these and the job's own ``slurm.exclude``."""
    return ["requeue 7", f"update JobId=7 ExcNodeList={','.join((*nodes, 'node9'))}"]


def test_failures_of_the_run_in_an_earlier_job_do_not_count_but_their_nodes_are_left_out(tmp_path: Path) -> None:
    jobs = tmp_path / "run" / "jobs"
    (jobs / "6-0").mkdir(parents=True)
    (jobs / "6-0" / "failed_node").write_text("node6\n")
    (jobs / "failed_nodes").write_text("node6\n" * 4)
    for restart in range(3):
        status, _, asked = attempt(tmp_path, restart, FAILED="node5")
        assert (status, asked) == (0, excluding("node5", "node6"))
    status, said, asked = attempt(tmp_path, 3, FAILED="node5")  # RESTARTS=3
    assert (asked, "comes back" in said) == ([], False)


@pytest.mark.parametrize("done", ["checkpoints/step_000001", "metrics.jsonl"])
def test_a_job_without_several_nodes_comes_back_with_all_once_it_has_made_a_step(tmp_path: Path, done: str) -> None:
    """At a first start the options may be the cause."""
    for folder in (first := tmp_path / "first", tmp_path):
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "metrics.jsonl").touch()
    assert attempt(first, 0, FAILED="several")[2] == []
    if done == "metrics.jsonl":
        (tmp_path / "run" / done).write_text('{"step": 1}\n')
    else:
        (tmp_path / "run" / done).mkdir(parents=True)
    tries = [attempt(tmp_path, restart, FAILED="several") for restart in (1, 2, 3, 4)]
    assert [asked for _, _, asked in tries] == [excluding()] * 3 + [[]], tries  # RESTARTS=3


def test_an_attempt_whose_folder_is_there_and_stays_is_refused(tmp_path: Path) -> None:
    """An earlier job of this number asked to be requeued, and what it left cannot be moved."""
    left = tmp_path / "run" / "jobs" / "7-0"
    left.mkdir(parents=True)
    (left / "requeue").touch()
    (left / "controller.txt").write_text("what it printed\n")
    (tmp_path / "commands").mkdir()
    program(tmp_path / "commands" / "mv", "#!/bin/sh\nexit 1\n")
    status, said, asked = attempt(tmp_path, 0, ENDS="well")
    assert (left / "controller.txt").read_text() == "what it printed\n"  # which job.sh opens for itself
    assert (status, asked) == (1, [])
    assert re.search(r"failed: this attempt has no folder: mkdir: .*7-0.*exists", said)


def test_failures_before_the_newest_checkpoint_do_not_count(tmp_path: Path) -> None:
    """A run of weeks loses more nodes than a job may fail on, and trains in between."""
    steps = ["000001", "", "", "000002", "", "", ""]
    done = [attempt(tmp_path, restart, step, FAILED="node5") for restart, step in enumerate(steps)]
    assert [asked for _, _, asked in done] == [excluding("node5")] * 6 + [[]], done  # RESTARTS=3


def test_the_nodes_that_failed_last_are_left_out_where_not_all_can_be(tmp_path: Path) -> None:
    """A node of weeks ago is used again in place of the one that has just failed."""
    fails = ["node1", "node2", "node3", "node1"]
    done = [
        attempt(tmp_path, restart, f"{restart + 1:06d}", FAILED=node, NEED="4") for restart, node in enumerate(fails)
    ]
    lists = [("node1",), ("node1", "node2"), ("node2", "node3"), ("node1", "node3")]
    assert [asked for _, _, asked in done] == [excluding(*nodes) for nodes in lists]
    assert "; without node1,node2,node3 there are too few nodes; comes back without node2,node3\n" in done[2][1]
    _, _, asked = attempt(tmp_path, 4, "000005", FAILED="node4", NEED="6")
    assert asked == ["requeue 7", "update JobId=7 ExcNodeList=node9"]  # none is spare now


def test_of_many_nodes_that_failed_a_few_questions_find_how_many_can_be_left_out(tmp_path: Path) -> None:
    """A run of months has a long list, and each question may take Slurm a second: it was asked twice a node."""
    jobs, gone = tmp_path / "run" / "jobs", [f"gone{number:03d}" for number in range(200)]
    jobs.mkdir(parents=True)
    (jobs / "failed_nodes").write_text("\n".join([*gone[:70], "node2", *gone[70:]]) + "\n")
    status, said, asked = attempt(tmp_path, 0, FAILED="gone000", NEED="6")
    kept = ["gone000", *gone[70:]]
    assert (status, asked) == (0, excluding(*kept)), said
    assert f"without {','.join([*kept, 'node2'])} there are too few nodes" in said
    assert len((tmp_path / "run" / "tried").read_text().splitlines()) <= 10


# Signals that a scheduler sends, to a process of its own.
CODE = """
import asyncio, os, signal
from pathlib import Path
from launcher.runs.stop import stop_signals
from rl_megatron.observability.progress import Progress

async def main():
    with Progress(1, "plain", "run", run_folder=Path("run")) as progress, stop_signals(progress) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(60):
            await stop.wait()
        assert stop.comes_back
    os.kill(os.getpid(), signal.SIGUSR1)

async def held_up():
    with Progress(1, "plain", "run", run_folder=Path("run")) as progress, stop_signals(progress):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

async def later():
    with Progress(1, "plain", "run", run_folder=Path("run")) as progress, stop_signals(progress) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one waits for the loop")

asyncio.run(main())
for twice in held_up, later:
    try:
        asyncio.run(twice())
    except KeyboardInterrupt:
        print("interrupted")
os.kill(os.getpid(), signal.SIGUSR1)
print("at its end")
"""


def test_signals_stop_a_run_and_the_second_ctrl_c_interrupts_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "SIGUSR1: finishing and saving the current step" in done.stdout
    assert done.stdout.endswith("at its end\n")
    assert done.stdout.count("interrupted\n") == 2  # by the second Ctrl-C, however soon it comes


@pytest.mark.parametrize(
    ("own", "of_ranks", "comes_back", "exports"),
    [
        ("SIGTERM", [], False, True),
        ("SIGINT", ["SIGINT"], False, True),  # Ctrl-C reaches srun, too
        ("SIGUSR1", [], True, False),
        (None, ["SIGTERM"], False, False),  # before preemption
        ("SIGTERM", ["SIGTERM"] * 2, False, False),  # scancel
        ("SIGUSR1", ["SIGTERM"], True, False),
    ],
)
def test_a_run_whose_job_ends_soon_exports_nothing(
    own: str | None, of_ranks: list[str], comes_back: bool, exports: bool, tmp_path: Path
) -> None:
    with Progress(1, "plain", "run", run_folder=tmp_path) as progress:
        stop = StopSignal(progress)
        if own is not None:
            stop.request(own)
        for name in of_ranks:
            stop.forward(name)
    assert (stop.is_set(), stop.comes_back, stop.exports) == (True, comes_back, exports)


# The steps of a job: which nodes each role gets, and the commands that start its tasks there.
@pytest.mark.parametrize(
    ("scontrol", "nodes", "said"),
    [
        (None, "a[1-2]", "job 7: its nodes are not known: scontrol is not installed here"),
        ("echo no slurm.conf >&2; exit 1", "a[1-2]", "job 7: its nodes are not known: .* status 1: no slurm.conf"),
        (None, None, r"job 7: SLURM_JOB_NODELIST is not set here: .*submit it, or set run\.lau"),
    ],
)
def test_a_job_that_does_not_tell_its_nodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str | None, nodes: str | None, said: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("SLURM_RESTART_COUNT", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    if nodes is not None:
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    if scontrol is not None:
        program(tmp_path / "scontrol", f"#!/bin/sh\n{scontrol}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        Allocation.from_environment(tmp_path, config_of())


async def test_a_step_that_does_not_end_is_killed_and_told_with_what_may_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed srun leaves its tasks to Slurm."""
    monkeypatch.setattr("launcher.hosts.slurm.launcher.STOP_SECONDS", 0.05)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as of the processes that are started
    try:
        async with running_step(["sleep", "600"], b"its muster\n", tmp_path) as step:
            pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert step.returncode in (-signal.SIGKILL, None)  # None: the system has not ended it in time
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert told[:2] == [f"srun has not ended in 0.05 s, and gets {how}: sleep 600" for how in ("SIGTERM", "SIGKILL")]
    assert told[-1] == "its step may go on, and keep its GPUs: `squeue --steps` names it, and `scancel` ends it"


# Temporary folders of processes that may run for weeks.
CLEANED = """
import fcntl, os, sys
from pathlib import Path

held = os.open(os.environ["TMPDIR"], os.O_RDONLY)
try:
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    Path(sys.argv[1]).write_text("passed over")
"""


def test_what_removes_old_files_passes_it_over(tmp_path: Path) -> None:
    """systemd-tmpfiles tries to lock each folder and leaves out, with all that is in it, one that is locked."""
    with scratch(within=tmp_path) as folder:
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = True
        else:
            locked = False
        os.close(held)
    assert locked
    assert not folder.exists()


def test_what_removes_old_files_passes_a_servers_folder_over(tmp_path: Path) -> None:
    said = tmp_path / "said"
    guard = [sys.executable, engine_guard.__file__, "127.0.0.1", sys.executable, "-c", CLEANED, said]
    with subprocess.Popen(guard, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 0
    assert said.read_text() == "passed over"
