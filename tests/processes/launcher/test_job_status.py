"""Parsing of Slurm's output, recorded from Slurm 24.11.5 and, where noted, from 22.05.8."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.commands.status import describe, job_status
from launcher.hosts.slurm import calls
from launcher.hosts.slurm.script import job_script
from launcher.runs.folder import lock
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.observability.log import Outcome, log_outcome, run_log
from tests.unit.launcher.commands import Said
from tests.unit.launcher.slurm_jobs import config_of
from tests.unit.observability.report_pages import a_run

REPO = Path(__file__).resolve().parents[3]
RECORDED = json.loads((Path(__file__).parent / "golden" / "scontrol.json").read_text())
NO_ACCOUNTS = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


def stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("situation", "job", "text", "over"),  # the JSON that 24.11 gave at the same moment says the same
    [
        ("running", "1", "RUNNING on n[1-2], restart 0", False),  # its comment: a JobState=FAILED NodeList=x Restarts=9
        ("completing", "4", "COMPLETING on n3, restart 0", False),
        ("requeued", "5", "COMPLETING on n3, restart 1", False),
        ("failed", "3", "FAILED (NonZeroExitCode) on n3, restart 0", True),
        ("unavailable", "10", "PENDING (ReqNodeNotAvail,_May_be_reserved_for_other_job), restart 0", False),
        ("held, 22.05", "1", "PENDING (JobHeldUser), restart 0", False),
    ],
)
def test_the_status_is_what_slurm_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: str, job: str, text: str, over: bool
) -> None:
    (tmp_path / "said").write_text("".join(f"{line}\n" for line in RECORDED[situation]))
    stand_in(tmp_path / "scontrol", f"cat {tmp_path}/said")
    stand_in(tmp_path / "sacct", NO_ACCOUNTS)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    logs = [line.partition(" StdOut=")[2].partition(" ")[0] for line in RECORDED[situation]]
    found = job_status(job, Path(logs[0]).parent.parent)  # its jobs/
    assert (found.text, found.over) == (text, over)
    if logs[0]:
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        elsewhere = job_status(job, tmp_path / "another" / "run")
        assert (elsewhere.name, elsewhere.over) == ("GONE", True)


def test_status_reads_the_end_of_metrics_alone(tmp_path: Path) -> None:
    """Weeks are gigabytes: of a file whose first line is broken it tells the last step."""
    (tmp_path / "config.yaml").touch()
    rows = ['{"phase": "rl", "step": 7}', '{"phase": "eval", "step": 5}', '{"phase": "rl", "step": 8']  # torn
    (tmp_path / "metrics.jsonl").write_text("\n".join(["broken", *rows]))
    resume = f"rl-megatron train --config {tmp_path}/config.yaml --resume"
    assert describe(tmp_path) == f"{tmp_path}: not running\nstep 7/{RunConfig().train.steps}\n{resume}"


def test_status_of_a_run_here_has_its_figures_and_whether_it_runs(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: 4}\n")
    rows = [{"reward/mean": 0.1, "eval/accuracy": 0.5}, {"reward/mean": 0.25, "seconds/step": 30.0}]
    with (tmp_path / "metrics.jsonl").open("w") as file, (tmp_path / "lock").open("ab") as held:
        for step, row in enumerate(rows, 1):
            print(json.dumps({"phase": "rl", "step": step, **row}), file=file, flush=True)
        assert lock(held)
        told = describe(tmp_path).splitlines()
        assert told[0].endswith("running")
        assert told[1:] == ["step 1/4 reward=0.1 accuracy=0.5", "step 2/4 reward=0.25 seconds=30 eta=1m00s"]
        print(json.dumps({"phase": "rl", "step": 4}), file=file, flush=True)
    assert describe(tmp_path).splitlines()[::2] == [f"{tmp_path}: done", "step 4/4"]


@pytest.mark.parametrize(
    ("outcome", "steps", "how", "also"),
    [
        ("failed", 3, "failed", ["error: no disk\n  is left", "RESUME"]),
        ("interrupted", 3, "interrupted", ["RESUME"]),
        ("stopped", 3, "stopped", ["RESUME"]),
        ("began", 3, "killed: its process is gone, and log.txt does not say why", ["RESUME"]),
        ("began", 4, "killed: its process is gone, and log.txt does not say why", ["RESUME"]),  # while it exported
        ("finished", 3, "done", []),  # of a number of epochs
        ("finished", 4, "done", []),
    ],
)
def test_status_says_how_a_run_here_ended(
    tmp_path: Path, outcome: Outcome, steps: int, how: str, also: list[str]
) -> None:
    (tmp_path / "config.yaml").write_text("train: {steps: 4}\n")
    (tmp_path / "metrics.jsonl").write_text(f'{{"phase": "rl", "step": {steps}}}\n')
    with run_log(tmp_path, role="controller"):
        log_outcome("began")
        log_outcome(outcome, "no disk\n  is left" if outcome == "failed" else "")
    resume = f"rl-megatron train --config {tmp_path}/config.yaml --resume"
    wanted = [f"{tmp_path}: {how}", f"step {steps}/4", *also]
    assert describe(tmp_path) == "\n".join(wanted).replace("RESUME", resume)


def test_status_has_the_verdicts_that_are_not_good(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", steps=20)
    (folder / "report.html").touch()
    assert describe(folder).splitlines()[-2:] == ["healthy: learning, time", f"report: {folder}/report.html"]
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(21, 41):
            print(json.dumps({"phase": "rl", "step": step, "reward/mean": 0.0, "seconds/step": 1.0}), file=file)
    verdict, page = describe(folder).splitlines()[-2:]
    assert (verdict[:21], page) == ("bad: Reward fell from", f"report: {folder}/report.html")


def test_slurm_that_does_not_answer_is_waited_for_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a command that asks, nor by one that sends; nor does bash read a script for ever."""
    monkeypatch.setattr(calls, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(calls, "SENT_SECONDS", 0.3)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, seconds in {"squeue": 0.2, "sbatch": 0.3}.items():
        stand_in(tmp_path / name, "exec sleep 60")
        with pytest.raises(ConfigError, match=rf"{name} -x: no answer in {seconds} s; sinfo says .*, squeue"):
            calls.call_slurm([name, "-x"])
    stand_in(tmp_path / "bash", "exec sleep 60")
    with pytest.raises(ConfigError, match=r"bash -n has not read the job's script in 0\.2 s"):
        calls.parse_script("true")


def test_the_users_variables_count_where_the_script_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of a job in which the command is given does."""
    of_shell = {"ACCOUNT": "SBATCH", "GRES": "SBATCH"}
    scripts = dict.fromkeys(("PARTITION", "TIMELIMIT", "SIGNAL", "NO_REQUEUE", "WAIT"), "SBATCH")
    monkeypatch.setenv("SBATCH_CLUSTERS", "given")  # of sbatch alone; the other commands must ask there, too
    of_job = {"JOB_ID": "SLURM", "EXPORT_ENV": "SLURM", "CPU_BIND": "SRUN"}
    for name, whose in {**of_shell, **scripts, **of_job}.items():
        monkeypatch.setenv(f"{whose}_{name}", "given")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in(tmp_path / "sbatch", "env")
    script = tmp_path / "job.sbatch"
    script.write_text(job_script(config_of("slurm.partition=x"), folder=tmp_path, python="p", package=REPO))
    given = [line.partition("=")[0] for line in calls.call_slurm(["sbatch"], script).splitlines() if "=given" in line]
    assert sorted(given) == [*sorted(f"{whose}_{name}" for name, whose in of_shell.items()), "SLURM_CLUSTERS"]


@pytest.mark.parametrize("name", ["scontrol", "sacct"])
def test_a_job_is_not_gone_if_slurm_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(calls, "ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in(tmp_path / "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    stand_in(tmp_path / "sacct", NO_ACCOUNTS)
    assert job_status("7", tmp_path).name == "GONE"
    stand_in(tmp_path / name, "exec sleep 60")
    with pytest.raises(ConfigError, match=rf"{name} .* 7.*: no answer in 0\.2 s; sinfo says whether Slurm answers"):
        job_status("7", tmp_path)
    stand_in(tmp_path / name, "echo 'error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(ConfigError, match=rf"{name} .*: error: Unable to contact slurm controller"):
        job_status("7", tmp_path)


def test_a_job_that_prints_elsewhere_is_known_by_its_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of slurm/train.sbatch. Another job of its number, which prints to another file, is not taken for it."""
    written, run = tmp_path / "rl_megatron-7.txt", tmp_path / "runs" / "rl_megatron-7"
    given = f"RUN={run} PYTHON=/nowhere/python TRAIN=() REQUEUES=0 RESTARTS=0 EXCLUDE=''\n"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in(tmp_path / "sacct", NO_ACCOUNTS)
    stand_in(tmp_path / "scontrol", f"echo JobId=7 JobState=RUNNING NodeList=n1 StdOut={written}")
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    for restart in ("0", "1"):
        with written.open("ab") as out:
            script = given + (REPO / "slurm" / "job.sh").read_text()
            subprocess.run(["bash"], input=script.encode(), stdout=out, env=env | {"SLURM_RESTART_COUNT": restart})
        assert job_status("7", run).name == "RUNNING"
        assert describe(run).splitlines()[2] == written.read_text().splitlines()[-1]
    stand_in(tmp_path / "scontrol", f"echo JobId=7 JobState=RUNNING NodeList=n1 StdOut={tmp_path}/other-7.txt")
    assert job_status("7", run).name == "GONE"


@pytest.mark.parametrize(("log", "state"), [("other/out.txt", "RUNNING"), ("runs/mine/jobs/7.txt", "COMPLETED")])
def test_no_ended_job_is_ended_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, state: str) -> None:
    """Another job may have it, which accounting then speaks of, and scancel would end that one."""
    run = tmp_path / "runs" / "mine"
    (run / "jobs").mkdir(parents=True)
    (run / "jobs" / "id").write_text("7\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in(tmp_path / "sacct", f"echo {state}")
    stand_in(tmp_path / "scontrol", f"echo JobId=7 JobState={state} NodeList=n1 Restarts=0 StdOut={tmp_path}/{log}")
    assert "scancel" not in describe(run)
    stand_in(tmp_path / "scontrol", f"echo JobId=7 JobState=PENDING Restarts=1 StdOut={run}/jobs/7.txt")
    copied = shutil.copytree(run, tmp_path / "runs" / "copied")
    assert describe(copied) == f"{copied}: job 7, forgotten by Slurm\nno step yet"
    assert describe(run).splitlines()[-1] == "scancel 7"
    monkeypatch.setenv("SBATCH_CLUSTERS", "gpu1")
    assert describe(run).splitlines()[-1] == "scancel --clusters=gpu1 7"


@pytest.mark.parametrize(("state", "line"), [("RUNNING", "tail -F"), ("FAILED", "less")])
def test_the_status_has_the_line_that_shows_the_newest_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, line: str
) -> None:
    run = tmp_path / "my runs" / "mine"
    for attempt in ("7-2", "7-10", "70-11"):
        (run / "jobs" / attempt).mkdir(parents=True)
        (run / "jobs" / attempt / "controller.txt").touch()
    for name, text in {"id": "7\n", "7.txt": "job 7 starts\n"}.items():
        (run / "jobs" / name).write_text(text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in(tmp_path / "scontrol", f"echo JobId=7 JobState={state} NodeList=n1 Restarts=10")
    said = describe(run).splitlines()
    assert said[2:4] == ["job 7 starts", f"{line} '{run}/jobs/7.txt' '{run}/jobs/7-10/controller.txt'"]
    assert said[4:] == (["scancel 7"] if state == "RUNNING" else [])


def test_a_run_whose_script_was_sent_by_hand_is_known_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once its own job has ended, or after a dry run; not by its name alone, which a run elsewhere may have, too."""
    run = tmp_path / "runs" / "mine"
    (run / "jobs").mkdir(parents=True)
    (run / "job.sbatch").touch()
    job = "JobId=$4 JobState=PENDING Reason=Priority Restarts=0 StdOut"
    stand_in(
        tmp_path / "scontrol",
        f"""case $4 in
            7) echo JobId=7 JobState=$(cat {tmp_path}/state) StdOut={run}/jobs/7.txt ;;
            8) echo {job}={run}/jobs/8.txt ;;
            9) echo {job}={tmp_path}/elsewhere/mine/jobs/9.txt ;;
            10) echo JobId=10 JobState=RUNNING Reason=None ;;
        esac""",
    )
    stand_in(tmp_path / "squeue", f'[ "$2" = --name=mine ] && printf "CLUSTER: gpu1\\n"; cat {tmp_path}/queue')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "queue").write_text("8\n10\n9\n")
    said = Said("status", capsys)(str(run)).splitlines()
    assert (said[0], said[-1]) == (f"{run}: job 8, PENDING (Priority), restart 0", "scancel 8")
    (run / "jobs" / "id").write_text("7\n")
    for state, found in {"COMPLETED": "8", "RUNNING": "7"}.items():
        (tmp_path / "state").write_text(state)
        assert describe(run).startswith(f"{run}: job {found}, ")
    (tmp_path / "queue").write_text("10\n9\n")
    (tmp_path / "state").write_text("COMPLETED")
    assert describe(run) == f"{run}: job 7, COMPLETED, restart 0\nno step yet"
    (run / "jobs" / "id").unlink()
    assert "not a run's folder, and no job was submitted" in Said("status", capsys)(str(run), status=1)
