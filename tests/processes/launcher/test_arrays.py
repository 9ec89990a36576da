"""A study's cells as arrays of Slurm: their scripts, what is refused, and states by Slurm's and the script's words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from launcher.commands.status import states_of
from rl_megatron.config.sections.slurm import minutes_of
from rl_megatron.errors import ConfigError
from rl_megatron.observability.recorder import MetricsWriter
from tests.unit.launcher.commands import status_of
from tools.lab.run import CellArray, alone, arrays_of, checked_for_slurm, send
from tools.lab.states import (
    CellRecord,
    Queued,
    find_states,
    read_record,
    read_task,
    record_path,
    task_log,
    write_record,
)
from tools.lab.study import Cell, Study, cells_of, read_study

ARMS = {"a": ["algorithm=grpo", "algorithm=gspo"]}
WIDE = {"x": ["train.learning_rate=1e-3", {"two nodes": ["train.learning_rate=2e-3", "slurm.nodes=2"]}]}


def study_of(folder: Path, **keys: object) -> Study:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"folder": str(folder / "runs"), "axes": ARMS, "seeds": [0, 1], **keys}))
    return read_study(path)


def sent_as(study: Study) -> list[CellArray]:
    return arrays_of(study, cells_of(study))


def options(array: CellArray) -> dict[str, str]:
    lines = (line.removeprefix("#SBATCH --") for line in array.script.splitlines() if line.startswith("#SBATCH"))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_an_array_has_a_task_for_each_cell_and_bash_finds_it_by_its_index(tmp_path: Path) -> None:
    study = study_of(tmp_path, axes={"a": [{"it's $HOME; a": "algorithm=grpo"}, "algorithm=gspo"]})
    (array,) = sent_as(study)
    assert options(array)["array"] == "0-3"
    assert "\nBUDGETED=" not in array.script
    before, cut, _ = array.script.partition("REQUEUES=")
    assert cut
    for index, cell in enumerate(cells_of(study)):
        environment = {**os.environ, "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": str(index)}
        script = f'{before}\nprintf "%s\\n" "$RUN" "${{TRAIN[@]}}"'
        done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, check=True)
        config = f"{tmp_path}/runs/cells/{cell.name}.yaml"
        assert done.stdout.splitlines() == [str(cell.folder), "--config", config, "log.progress=plain"]
        assert (cell.folder / "jobs" / f"12_{index}.txt").parent.samefile(cell.folder / "jobs")
        assert os.readlink(cell.folder / "jobs" / f"12_{index}.txt") == f"../../jobs/12_{index}.txt"


def test_cells_of_alike_nodes_are_one_array_and_arrays_share_what_may_run_at_once(tmp_path: Path) -> None:
    study = study_of(tmp_path, axes={**ARMS, **WIDE}, seeds=[0, 1, 2], budget={"cells_at_once": 8})
    found = {options(array)["nodes"]: array for array in sent_as(study)}
    assert {nodes: options(array)["array"] for nodes, array in found.items()} == {"1": "0-5%4", "2": "0-5%4"}
    assert {cell.arm.partition(" ")[2] for cell in found["2"].cells} == {"two nodes"}
    levels = [*WIDE["x"], "train.learning_rate=3e-3", "train.learning_rate=4e-3"]
    study = study_of(tmp_path, axes={"x": levels}, budget={"cells_at_once": 4})
    assert [options(array)["array"] for array in sent_as(study)] == ["0-5%3", "0-1%1"]
    study = study_of(tmp_path, axes={**ARMS, **WIDE}, seeds=[0], budget={"cells_at_once": 3})
    assert sorted(options(array)["array"] for array in sent_as(study)) == ["0-1%1", "0-1%2"]
    study = study_of(tmp_path, axes={**ARMS, **WIDE}, budget={"cells_at_once": 1})
    with pytest.raises(ConfigError, match=r"cells_at_once=1, but the cells have 2 shapes .*; raise it to 2 or more"):
        sent_as(study)


def test_a_cell_whose_minutes_are_limited_has_one_job_of_that_time_and_saves_at_its_end(tmp_path: Path) -> None:
    overrides = ["slurm.signal_seconds=90", "slurm.time=1:00:00"]
    (array,) = sent_as(study_of(tmp_path, overrides=overrides, budget={"cell_minutes": 30}))
    assert options(array)["time"] == "32"
    assert "REQUEUES=0 " in array.script
    assert "\nBUDGETED=yes\n" in array.script
    study = study_of(tmp_path, overrides=overrides, budget={"cell_minutes": 59})
    with pytest.raises(ConfigError, match=r"need a job of 61 minutes, but slurm.time=1:00:00; raise slurm.time"):
        sent_as(study)


@pytest.mark.parametrize(
    ("time", "minutes"),  # man sbatch
    [("90", 90), ("90:30", 90.5), ("1:30:00", 90), ("2-12", 3600), ("2-12:30", 3630), ("1-0:30:30", 1470.5)],
)
def test_a_time_limit_is_read_as_slurm_does(time: str, minutes: float) -> None:
    assert minutes_of(time) == minutes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("slurm.array=0-3", "a study's cells are the tasks of its arrays; remove it"),
        ("slurm.ntasks_per_node=3", "3 tasks, but the learner has"),
        ("model.path=/nowhere/model", "/nowhere/model"),
    ],
)
def test_what_cannot_be_a_cells_job_is_refused_with_the_arm(tmp_path: Path, override: str, message: str) -> None:
    study = study_of(tmp_path, overrides=[override])
    with pytest.raises(ConfigError) as error:
        checked_for_slurm(cells_of(study))
    assert message in str(error.value)
    assert str(error.value).startswith("grpo: ")


def test_heterogeneous_cells_are_refused(tmp_path: Path) -> None:
    keys = ["algorithm.kl.coefficient=0.1", "roles.reference=separate", "slurm.heterogeneous=true"]
    study = study_of(tmp_path, overrides=[*keys, "slurm.reference.nodes=1"])
    with pytest.raises(ConfigError, match="Slurm has no arrays of heterogeneous jobs"):
        checked_for_slurm(cells_of(study))


def at(restart: int, text: str) -> str:
    return f"[2026-01-02T03:04:05] job 12_0, restart {restart}: {text}\n"


STARTED = at(0, "starts on node1; output is in /x")
FAILED = at(0, "failed with status 1: error: no price")
STATES = {  # rows recorded of 2, the script's words, Slurm's, whether its time was up: what has become of it
    "waits": (-1, "", "PENDING (JobArrayTaskLimit)", False, "pending"),
    "runs": (1, STARTED, "RUNNING on node1", False, "running"),
    "its last step is made, but it still saves": (2, STARTED, "RUNNING on node1", False, "running"),
    "comes back": (1, STARTED + at(0, "failed: rank 1 died; comes back"), "PENDING (BeginTime)", False, "pending"),
    "done": (2, STARTED + at(0, "done"), None, False, "done"),
    "cancelled after its last step": (2, STARTED, "CANCELLED", False, "done"),
    "failed": (1, STARTED + FAILED, None, False, "failed"),
    "failed in the second attempt": (1, STARTED + at(0, "comes back") + FAILED, None, False, "failed"),
    "failed before its first line": (-1, "module: command not found\n", "FAILED (NonZeroExitCode)", False, "failed"),
    "out of memory": (1, STARTED, "OUT_OF_MEMORY (OutOfMemory)", False, "failed"),
    "its time was up": (1, STARTED + at(0, "done"), None, True, "spent"),
    "cancelled": (1, STARTED, "CANCELLED", False, "stopped"),
    "a node failed, and it was not requeued": (1, STARTED, "NODE_FAIL", False, "lost"),
    "forgotten": (1, STARTED, None, False, "lost"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_cells_state_is_by_its_scripts_last_words_then_by_slurms(tmp_path: Path, case: str) -> None:
    steps, said, slurm, time_was_up, wanted = STATES[case]
    study = study_of(tmp_path, axes={}, seeds=[0], overrides=["train.steps=2"], budget={"cell_minutes": 1})
    (cell,) = cells_of(study)
    attempt = cell.folder / "jobs" / "12_0-0"
    attempt.mkdir(parents=True)
    for step in range(steps + 1):
        MetricsWriter(cell.folder).write({"step": step, "phase": "rl"})
    if time_was_up:
        (attempt / "requeue").touch()
    log = task_log(cell, "12_0")
    log.parent.mkdir()
    log.write_text(said)
    write_record(cell, CellRecord(pid=0, began="", starts=1, seconds=0.0, task="12_0", granted=60.0))
    queue = {"12_0": Queued(word=slurm.split()[0], text=slurm)} if slurm else {}
    (found,) = find_states(study, [cell], queue)
    assert found.state.value == wanted
    assert ("error: no price" in found.reason) == ("price" in said)
    if slurm in {"PENDING (JobArrayTaskLimit)", "OUT_OF_MEMORY (OutOfMemory)", "NODE_FAIL"}:
        assert f"job 12_0: {slurm}" in found.reason
    (unasked,) = find_states(study, [cell])
    if not said.endswith(("done\n", "price\n")) and steps < 2:
        assert (unasked.state.value, "Slurm could not be asked here" in unasked.reason) == ("lost", True)


def test_a_cell_whose_requeues_are_used_up_goes_on_at_the_next_start(tmp_path: Path) -> None:
    study = study_of(tmp_path, axes={}, seeds=[0], overrides=["train.steps=2"])
    (cell,) = cells_of(study)
    log = task_log(cell, "12_0")
    log.parent.mkdir(parents=True)
    log.write_text(STARTED + at(0, "saved, but slurm.requeues=0 are used up; to go on, submit its script again"))
    write_record(cell, CellRecord(pid=0, began="", starts=1, seconds=0.0, task="12_0"))
    assert find_states(study, [cell], {})[0].state.value == "stopped"


def test_a_failed_task_that_was_resumed_by_hand_is_as_far_as_it_came(tmp_path: Path) -> None:
    study = study_of(tmp_path, axes={}, seeds=[0], overrides=["train.steps=2"])
    (cell,) = cells_of(study)
    log = task_log(cell, "12_0")
    log.parent.mkdir(parents=True)
    log.write_text(STARTED + FAILED)
    os.utime(log, (1e9, 1e9))
    write_record(cell, CellRecord(pid=0, began="", starts=1, seconds=0.0, task="12_0"))
    assert find_states(study, [cell])[0].state.value == "failed"
    cell.folder.mkdir()
    for step in range(3):
        MetricsWriter(cell.folder).write({"step": step, "phase": "rl"})
    assert find_states(study, [cell])[0].state.value == "done"


COMMANDS = {
    "sbatch": """#!/bin/sh
case "$*" in *--test-only*) exit 0;; esac
echo "$@" >>sent; job=$((11 + $(grep -c . sent)))
case "$*" in *--hold*) echo "$job is held";; *) echo "$job may start";; esac >>calls
echo "$job"
""",
    "squeue": """#!/bin/sh
[ -e forgotten ] && { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
printf 'CLUSTER: gpu1\\n12_0|RUNNING|%s|node3\\n12_1|PENDING|%s|(%s)\\n12_3|COMPLETED|%s|\\n' \
    ${NAME=runs} $NAME ${REASON=JobArrayTaskLimit} $NAME
""",
    "sacct": """#!/bin/sh
[ -e broken ] && { cat broken >&2; exit 1; }
case "$SLURM_BITSTR_LEN" in 0) all=,14-18:2;; esac
printf '12_2|CANCELLED by 0|runs\\n12_[3,5-7%s%%4]|CANCELLED by 0|%s\\n' "$all" ${NAME=runs}
""",
    "scontrol": """#!/bin/sh
echo "$@, $(ls runs/cells/*.json | wc -l) records" >>calls
""",
    "scancel": """#!/bin/sh
echo "scancel $@" >>calls
""",
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with stand-ins for Slurm's commands."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert status_of("experiment", *arguments, "mine.yaml") == 0
    return capsys.readouterr().out


def test_what_slurm_says_of_tasks_is_read_task_by_task(cluster: Path) -> None:
    tasks = [f"12_{index}" for index in range(5)]
    found = {task: status.text for task, status in states_of(tasks, "runs").items()}
    assert found["12_0"] == "RUNNING on node3"
    assert found["12_1"] == "PENDING (JobArrayTaskLimit)"
    assert found["12_2"] == "CANCELLED by 0", "squeue has forgotten it, sacct has not"
    assert found.keys() == {"12_0", "12_1", "12_2", "12_3"}
    (cluster / "forgotten").touch()
    named = {"12_2", "12_3", "12_5", "12_6", "12_7", "12_14", "12_16", "12_18"}  # a row for those that never started
    assert states_of([f"12_{index}" for index in range(20)], "runs").keys() == named
    assert states_of([], "runs") == {}
    (cluster / "broken").write_text("Slurm accounting storage is disabled")
    assert states_of(tasks, "runs") == {}
    (cluster / "broken").write_text("sacct: error: Connection refused")
    with pytest.raises(ConfigError, match="Connection refused"):
        states_of(tasks, "runs")


def test_an_array_of_another_name_has_only_the_number_of_ours(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "somebodys")
    assert {task: status.name for task, status in states_of([f"12_{i}" for i in range(6)], "runs").items()} == {
        "12_2": "CANCELLED"
    }


def test_an_array_is_held_until_its_cells_name_their_task(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = study_of(cluster)
    cells = cells_of(study)
    cells[1].folder.mkdir(parents=True)
    (cells[1].folder / "jobs").write_text("in the way")
    with pytest.raises(OSError, match="jobs"):
        send(study, sent_as(study))
    assert (cluster / "calls").read_text().splitlines() == ["12 is held", "scancel 12"]
    (cells[1].folder / "jobs").unlink()
    (cluster / "forgotten").touch()
    for cell in cells:
        record_path(cell).unlink(missing_ok=True)
    called(capsys, "submit")
    assert (cluster / "calls").read_text().splitlines()[2:] == ["13 is held", "release 13, 4 records"]
    assert [(cell.folder / "jobs/id").read_text() for cell in cells] == [f"13_{index}\n" for index in range(4)]


def test_a_cell_that_waits_is_known_by_another_label(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = cells_of(study_of(cluster))
    called(capsys, "submit")
    for index in (2, 3):
        task_log(before[index], f"12_{index}").write_text(at(0, "failed with status 1"))
    after = cells_of(study_of(cluster, axes={"a": [{"renamed": "algorithm=grpo"}, "algorithm=gspo"]}))
    assert after[0].arm == "renamed"
    assert [cell.name for cell in after] == [cell.name for cell in before]
    assert "nothing was sent" in called(capsys, "submit")


@pytest.mark.parametrize("reason", ["JobArrayTaskLimit", "JobHeldUser"])
def test_a_cell_that_somebody_holds_is_named(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    """A submit that was killed before it released its array leaves cells that never start by themselves."""
    cells = cells_of(study_of(cluster))
    called(capsys, "submit")
    monkeypatch.setenv("REASON", reason)
    said = [line for line in called(capsys, "submit", "--dry-run").splitlines() if line.startswith("held: ")]
    line = f"held: {cells[1].name}: job 12_1: PENDING ({reason}); after a submit that was ended, scancel it and repeat"
    assert said == ([line] if reason == "JobHeldUser" else [])


def test_cells_with_less_time_left_are_in_the_same_array(cluster: Path) -> None:
    keys = {"overrides": ["slurm.signal_seconds=90", "slurm.time=1:00:00"], "budget": {"cell_minutes": 30}}
    study = study_of(cluster, **keys)
    for cell, seconds in zip(cells_of(study), (1200.0, 600.0, 1200.0, 600.0), strict=True):
        cell.folder.mkdir(parents=True)
        write_record(cell, CellRecord(pid=0, began="", starts=1, seconds=seconds, status=0))
    cells_of(study)[0].folder.rmdir()  # to repeat it: it has all its time
    (array,) = sent_as(study)
    assert (options(array)["array"], options(array)["time"]) == ("0-3", "32")
    send(study, [array])
    assert (cluster / "calls").read_text().splitlines()[1:] == [  # 30 minutes less what was used, and 2 to save
        "update JobId=12_[1,3] TimeLimit=22, 4 records",
        "update JobId=12_[2] TimeLimit=12, 4 records",
        "release 12, 4 records",
    ]


def test_seconds_of_a_task_count_by_its_own_lines_in_any_zone_and_whatever_ended_it(tmp_path: Path) -> None:
    overrides = ["slurm.signal_seconds=60", "slurm.time=1:00:00"]
    study = study_of(tmp_path, axes={}, seeds=[0], overrides=overrides, budget={"cell_minutes": 30})
    (cell,) = cells_of(study)
    lines = [  # 300 seconds, and of the second attempt 240, though the clock was set to another zone meanwhile
        "[2026-01-02T03:00:00+0500] job 12_0, restart 0: starts on n1",
        "[2026-01-02T03:04:00+0500] job 12_0, restart 0: the time limit or preemption is near: the run saves",
        "[2026-01-02T03:05:00+0500] job 12_0, restart 0: preempted; comes back",
        "[2026-01-02T03:06:00+0500] job 12_0, restart 1: starts on n2",
        "[2026-01-01T22:10:00+0000] job 12_0, restart 1: failed with status 1: error",
    ]
    for attempt in ("12_0-0", "12_0-1"):
        (cell.folder / "jobs" / attempt).mkdir(parents=True)
        (cell.folder / "jobs" / attempt / "controller.txt").touch()
    task_log(cell, "12_0").parent.mkdir()
    task_log(cell, "12_0").write_text("\n".join(lines) + "\n")
    write_record(cell, CellRecord(pid=0, began="", starts=1, seconds=60.0, task="12_0", granted=1800.0))
    assert read_task(cell, "12_0").seconds == 540.0
    (array,) = sent_as(study)
    assert options(array)["time"] == "21"  # 30 minutes, less 10, and one to save


def test_the_queue_is_asked_when_no_other_process_can_send(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study_of(cluster)
    asked = []

    def told(cells: Sequence[Cell]) -> dict[str, Queued]:
        with pytest.raises(ConfigError, match="another process runs this study"), alone(read_study(Path("mine.yaml"))):
            pass
        asked.append(len(cells))
        raise ConfigError("enough")

    monkeypatch.setattr("tools.lab.run.queue_of", told)
    assert status_of("experiment", "run", "mine.yaml") == 1
    assert asked == [4]


def test_what_is_in_the_queue_counts_among_those_at_once(tmp_path: Path) -> None:
    study = study_of(tmp_path, seeds=[0, 1, 2, 3], budget={"cells_at_once": 6})
    for queued, throttle in ((0, "%6"), (2, "%4"), (6, "%1"), (20, "%1")):
        (array,) = arrays_of(study, cells_of(study), queued=queued)
        assert options(array)["array"] == f"0-7{throttle}"


def test_submit_sends_undone_cells_and_failed_on_request(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells: list[Cell] = cells_of(study_of(cluster, overrides=["train.steps=2"]))
    assert "#SBATCH --array=0-3\n" in called(capsys, "submit", "--dry-run")
    assert not (cluster / "sent").exists()
    assert "array 12: " in called(capsys, "submit")
    assert [(record.task, record.pid) for cell in cells if (record := read_record(cell))] == [
        (f"12_{index}", 0) for index in range(4)
    ]
    for index, said in ((2, at(0, "done")), (3, STARTED + FAILED)):
        task_log(cells[index], f"12_{index}").write_text(said)
    for step in range(3):
        MetricsWriter(cells[2].folder).write({"step": step, "phase": "rl"})
    shown = called(capsys, "status")
    assert shown.splitlines()[-1] == "4 cells: 1 done, 1 running, 1 pending, 1 failed"
    assert "job 12_1: PENDING (JobArrayTaskLimit)" in shown
    shown = called(capsys, "submit")
    assert f"not sent without --retry: {cells[3].name}: job 12_3: failed with status 1: error: no price" in shown
    assert "nothing was sent" in shown
    shown = called(capsys, "submit", "--retry")
    assert "array 13: " in shown
    assert f"    {cells[3].name}\n)" in (cluster / "runs" / "jobs" / "13.sbatch").read_text()
    assert [record.task for cell in cells if (record := read_record(cell))] == ["12_0", "12_1", "12_2", "13_0"]
    assert (cells[3].folder / "jobs/id").read_text() == "13_0\n"
    assert len((cluster / "sent").read_text().splitlines()) == 2
