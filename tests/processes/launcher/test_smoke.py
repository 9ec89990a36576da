"""``submit --smoke`` beside a scripted Slurm, whose job writes the files that a run writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launcher.programs import smoke
from launcher.programs.smoke import smoke_of
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from tests.unit.launcher.commands import status_of

SLURM = {
    "sbatch": """case "$*" in *--test-only*) exit 0 ;; esac
echo RUNNING >state
setsid "$PYTHON" job.py "$(dirname "${@: -1}")" >job.txt 2>&1 &
echo 7""",
    "scontrol": """restarts=$(ls -d runs/*/jobs/7-1 | wc -l)
echo "JobId=7 JobState=$(cat state) Reason=None NodeList=n[1-2] Restarts=$restarts" """,
    "squeue": 'echo "7.batch batch"; [ "$MODE" = no_step ] || echo "7.3 learner"; echo "7.4 critic"',
    "scancel": 'case "$*" in 7) echo CANCELLED >state ;; *) echo "$@" >killed ;; esac',
}
JOB = """
import json, os, sys, time
from pathlib import Path

run, mode = Path(sys.argv[1]), os.environ["MODE"]
deadline = time.monotonic() + 30

def wait(name):
    while not Path(name).exists() and Path("state").read_text() == "RUNNING\\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)

def attempt(restart, node, said):
    folder = run / "jobs" / f"7-{restart}"
    folder.mkdir(parents=True)
    (folder / "controller.txt").write_text(said)
    with (run / "log.txt").open("a") as log:
        log.write(f"job 7, restart {restart}: 2 ranks on 1 nodes, 2 on each\\n  {node}: ranks 0-1\\n")
        log.write(f"engine 0: {node}\\nstarts\\n")
    return folder

def made(step, **other):
    row = {"phase": "rl", "step": step, "seconds/step": 2.5, "seconds/rollout": 2.0} | other
    return json.dumps(row | {"loss": step / 2, "memory/peak": time.monotonic()}) + "\\n"

metrics, saved = run / "metrics.jsonl", run / "checkpoints" / "step_000001"
first = attempt(0, "n1", "")
if mode == "ends":
    (run / "jobs" / "7.txt").write_text("failed with status 1: error: no price\\n")
    Path("state").write_text("FAILED\\n")
    sys.exit()
metrics.write_text("".join(map(made, (0, 1, 2))))
saved.mkdir(parents=True)
wait("killed")
(first / "failed_node").write_text("n1\\n")
time.sleep(0.2)
attempt(1, "n2", "" if mode == "over" else f"resuming from {saved}\\n")
time.sleep(0.2)
kept = (0,) if mode == "over" else (0, 1)
metrics.write_text("".join(line for line in metrics.open() if json.loads(line)["step"] in kept))
with metrics.open("a") as file:
    file.write(made(kept[-1] + 1, **({"reward/mean": 0.5} if mode == "unlike" else {})))
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, script in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "MODE": "good"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(smoke, "_LOOK_SECONDS", 0.02)
    return tmp_path


def test_the_page_says_what_ran_where_and_how_it_went_on(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("submit", "tiny_cpu", "--smoke") == 0
    out = capsys.readouterr().out
    page = out[out.index("scancel 7\n") :].splitlines()
    waits = [line.partition(":")[0] for line in page if line.endswith(" s")]
    assert waits == [
        *("in the queue", "start and first step", "2 steps and a checkpoint"),
        *("kill until the run has named a node", "back from the queue", "resume and a step"),
    ]
    for restart, node in enumerate(("n1", "n2")):
        at = page.index(f"RUNNING on n[1-2], restart {restart}:")
        assert page[at + 1 : at + 4] == [
            "  2 ranks on 1 nodes, 2 on each",
            f"    {node}: ranks 0-1",
            f"  engine 0: {node}",
        ]
        assert page[at + 4 + (not restart)] == "  step 2: 2.5 s (rollout 2.0)"
    assert page[-3:] == [
        "resumed from the checkpoint of step 1, its newest",
        "step 2 was made twice, equal to the bit",
        "ok: no part failed",
    ]
    assert (slurm / "killed").read_text() == "--signal=KILL 7.3\n"
    assert (slurm / "state").read_text() == "CANCELLED\n"
    run = slurm / "runs" / "tiny_cpu-smoke"
    assert load_config(str(run / "config.yaml"), []).checkpoint.every == 1
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("unlike", "step 2 was made twice, unlike in reward/mean"),
        ("over", "it went on from its beginning, but its newest checkpoint is of step 1"),
        ("no_step", "Slurm names no step of the learner that runs: 7.batch batch\n7.4 critic"),
        ("ends", "start and first step: job 7 ended before: FAILED on n[1-2], restart 0; failed with status 1: error:"),
    ],
)
def test_a_part_that_fails_is_named_and_the_job_is_ended(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, said: str
) -> None:
    monkeypatch.setenv("MODE", mode)
    assert status_of("submit", "tiny_cpu", "--smoke") == 1
    out = capsys.readouterr().out
    assert f"\nFAILED: {said}" in out
    assert "no part failed" not in out
    assert (slurm / "state").read_text() == ("FAILED\n" if mode == "ends" else "CANCELLED\n")


def test_it_is_the_run_in_its_layout_from_the_first_step_on() -> None:
    keys = ("run.name=x", "checkpoint.every=7", "slurm.array=0-3", "slurm.restarts=0", "log.wandb=online")
    sets = ("eval.sets.one.limit=4", "eval.sets.one.samples=8", "eval.sets.one.temperature=1", "eval.sets.two.every=5")
    config = load_config("tiny_cpu", [*keys, *sets, "learner.dp=2", "train.lr_decay=cosine"])
    made = smoke_of(config)
    assert (made.run.name, made.slurm.array, made.slurm.restarts, made.checkpoint.every) == ("x-smoke", None, 1, 1)
    assert (made.learner, made.rollout, made.reward, made.algorithm) == (
        *(config.learner, config.rollout, config.reward, config.algorithm),
    )
    assert (made.warm_start.steps, made.log.wandb) == (0, "off")
    assert [(name, one.limit, one.samples, one.every) for name, one in made.eval.sets.items()] == [("one", 4, 1, None)]
    assert smoke_of(load_config("tiny_cpu", [])).eval.sets["smoke"].limit == 8


@pytest.mark.parametrize("name", ["sft_tiny", "dpo_tiny", "reward_tiny", "gsm8k_tiny", "qwen3_30b_a3b", "deepseek_v3"])
def test_every_kind_of_run_has_one(name: str) -> None:
    given = ["data.train=train.jsonl", "data.eval=eval.jsonl"] if name == "gsm8k_tiny" else []
    assert smoke_of(load_config(name, ["model.path=/given", *given])).checkpoint.keep == 2


def test_what_cannot_be_is_said(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("submit", "tiny_cpu", "--smoke", "--dry-run") == 1
    assert "--smoke submits a job and waits for it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"its smoke run cannot be:\nrun\.name"):
        smoke_of(load_config("tiny_cpu", [f"run.name={'x' * 200}"]))
