"""A study as an array on a real Slurm: a node is lost meanwhile, a cell fails, and all cells end.

Four cells on three nodes; with the environment's STUDY_CELLS=24 it has 24 on eight, six minutes on two cores.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import yaml

from tests.cluster.jobs import LIMIT, TINY, Cluster, read_record
from tools.lab.states import output_path
from tools.lab.study import cells_of, read_study

CELLS = int(os.environ.get("STUDY_CELLS", "4"))
NODES = 8 if CELLS > 4 else 3
PLACES = ("partition=urgent", f"exclude=node[{NODES + 1}-25]") if CELLS > 4 else ("partition=study",)
LOST, FAILS = 2, 1  # the tasks of the first array whose node is lost, and which fails
REWARD = f'''
import os, time
from pathlib import Path

calls = 0
first = "SLURM_RESTART_COUNT" not in os.environ
TASK = int(os.environ.get("SLURM_ARRAY_TASK_ID", -1))

def held(prompt, completions, texts):
    """In its second step, after 8 calls of two evaluations and 4 of a step, task {LOST} waits for its end."""
    global calls
    calls += prompt.id != "made-up"
    if TASK == {FAILS} and not Path("repaired").exists() and calls:
        raise KeyError("price list")
    while TASK == {LOST} and first and calls > 8 and Path("study_holds").exists():
        Path("study_held").touch()
        time.sleep(0.01)
    return [float(sum(c.token_ids) % 2 == 0) for c in completions]
'''
KEYS = (
    *(
        key
        for key in TINY
        if key.partition("=")[0] not in ("learner.ep", "reward.function", "algorithm.kl.coefficient")
    ),
    *("learner.ep=1", "warm_start.steps=0", "train.steps=2", "checkpoint.every=1", "eval.every=0", "data.num_eval=4"),
    *("reward.function=study_rewards:held", "log.samples_per_step=0", "reward.timeout_seconds=600"),
    *(f"slurm.{place}" for place in PLACES),
    *("slurm.time=30", "slurm.memory_per_node=20000"),  # a cell a node
)


def left(cluster: Cluster, array: str) -> str:
    """The tasks that have not ended."""
    return cluster.call("squeue", "-h", "-r", "-j", array, "-o", "%K %T %N %r")


def until(cluster: Cluster, array: str, what: str) -> None:
    end = time.monotonic() + LIMIT
    while left(cluster, array):
        assert time.monotonic() < end, f"{what}: {left(cluster, array)}"
        time.sleep(0.5)


def test_all_cells_of_a_study_end_though_a_node_is_lost_and_one_fails(cluster: Cluster) -> None:
    """50 seconds; the 24 cells six minutes."""
    began = time.monotonic()
    (cluster.work / "study_rewards.py").write_text(REWARD)
    (cluster.work / "study_holds").touch()
    path, runs = cluster.work / "grid.yaml", cluster.work / "runs" / "grid"
    axes = {"loss": ["algorithm=grpo", "algorithm=gspo"]}
    study = {
        "overrides": list(KEYS),
        "axes": axes,
        "seeds": list(range(CELLS // 2)),
        "budget": {"cells_at_once": NODES},
    }
    path.write_text(yaml.safe_dump({**study, "folder": "runs/grid"}))
    said = cluster.program("experiment", "submit", "grid.yaml")
    assert f"{CELLS} cells, --array=0-{CELLS - 1}%{NODES}, each:" in said
    array = re.search(r"^array (\d+): ", said, re.MULTILINE)[1]  # type: ignore[index]
    first = {line.split()[0] for line in left(cluster, array).splitlines() if " PENDING " not in line}
    assert first <= {str(index) for index in range(NODES)}
    cells = cells_of(read_study(path).model_copy(update={"folder": runs}))
    names = [cell.name for cell in cells]
    before = runs / names[LOST] / "checkpoints" / "step_000001"  # which gets its name while the step behind it is held
    end = time.monotonic() + LIMIT
    while not ((cluster.work / "study_held").exists() and before.exists()):
        assert time.monotonic() < end, left(cluster, array)
        time.sleep(0.2)
    node = next(line.split()[2] for line in left(cluster, array).splitlines() if line.startswith(f"{LOST} RUNNING"))
    cluster.power_off(node)
    (cluster.work / "study_holds").unlink()
    until(cluster, array, "the end of the array")
    ended = time.monotonic() - began

    shown = cluster.program("experiment", "status", "grid.yaml")
    assert shown.splitlines()[-1] == f"{CELLS} cells: {CELLS - 1} done, 1 failed"
    assert f"job {array}_{FAILS}: failed with status 1: error: reward 'study_rewards:held' of prompt" in shown
    lost = runs / names[LOST]
    assert sorted(each.name for each in (lost / "jobs").glob(f"{array}_*-*")) == [f"{array}_{LOST}-{i}" for i in (0, 1)]
    second = (lost / "jobs" / f"{array}_{LOST}-1" / "controller.txt").read_text()
    assert "resuming from" in second
    assert "step_000001" in second
    assert node not in left_of(lost, array)[-1]
    assert "COMPLETED on" in cluster.program("status", str(lost))

    (cluster.work / "repaired").touch()
    retried = re.search(
        r"^array (\d+): ", cluster.program("experiment", "submit", "grid.yaml", "--retry"), re.MULTILINE
    )
    until(cluster, retried[1], "the end of the retried cell")  # type: ignore[index]
    shown = cluster.program("experiment", "status", "grid.yaml")
    assert shown.splitlines()[-1] == f"{CELLS} cells: {CELLS} done", shown
    records = [read_record(runs / name) for name in names]
    assert [[row["step"] for row in record] for record in records] == [[0, 1, 2]] * CELLS
    assert len({str(record) for record in records}) == CELLS
    assert not any(output_path(cell).exists() for cell in cells)
    print(f"{CELLS} cells over {NODES} nodes ended in {ended:.0f} s, the retried one in {time.monotonic() - began:.0f}")


def left_of(run: Path, array: str) -> list[str]:
    """The lines of its log that say where an attempt started."""
    text = (run / "jobs" / f"{array}_{LOST}.txt").read_text()
    return [line for line in text.splitlines() if ": starts on " in line]
