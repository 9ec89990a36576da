"""A project's folder with packages of our packages' names: ours run, and its own modules are found."""

from __future__ import annotations

import ast
import asyncio
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from launcher.hosts.slurm.script import job_script
from launcher.programs.experiment import run_cells
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.experiments.cells import cells_of
from rl_megatron.experiments.study import read_study

REPO = Path(__file__).resolve().parents[3]
LIMIT = 600.0  # seconds
KEY = "reward.function=its_own:score"
SAID = "error: reward.function='its_own:score': 'score' of its_own is not there; did you mean 'scores'?"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; nothing of ours is imported from it, and of its own a module with a word misspelt."""
    for name in ("launcher", "rl_megatron", "tools"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the project')\n")
    (tmp_path / "its_own.py").write_text("def scores(prompt, completion): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    return tmp_path


def test_a_job_runs_our_code_and_finds_modules_of_the_folder(project: Path) -> None:
    config = load_config("tiny_cpu", ["run.name=run", KEY])
    (project / "runs" / "run").mkdir(parents=True)
    save_resolved(config, project / "runs" / "run" / "config.yaml")
    script = job_script(config, folder=project, python=sys.executable, package=REPO)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    (project / "scontrol").write_text("#!/bin/sh\n")
    (project / "scontrol").chmod(0o755)
    own = {**os.environ, **slurm, "PATH": f"{project}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script, env=own, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout.endswith(f"failed with status 1: {SAID}\n")) == (1, True), done.stdout


def test_a_cell_does(project: Path) -> None:
    (project / "study.yaml").write_text(yaml.safe_dump({"folder": "runs", "seeds": [0], "overrides": [KEY]}))
    study = read_study(Path("study.yaml"))
    (found,) = asyncio.run(run_cells(study, cells_of(study), retry=False, console=Console(file=io.StringIO())))
    assert found.reason == f"status 1: {SAID}"


def test_no_program_of_ours_starts_with_the_current_folder_before_ours() -> None:
    files = [path for room in ("launcher", "rl_megatron", "tools") for path in sorted((REPO / room).rglob("*.py"))]
    lists = [
        node.elts if isinstance(node, ast.List | ast.Tuple) else node.args
        for text in (path.read_text() for path in files)
        if "-m" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.List | ast.Tuple | ast.Call)
    ]
    words = [[node.value if isinstance(node, ast.Constant) else None for node in nodes] for nodes in lists]
    starts = [line for line in words if "-m" in line]
    assert len(starts) > 5  # so that the search finds them
    assert [line for line in starts if line[max(line.index("-m") - 1, 0)] != "-P"] == []
    scripts = "".join((REPO / "slurm" / name).read_text() for name in ("job.sh", "train.sbatch.j2"))
    assert re.findall(r"(\S+) -m launcher", scripts) == ["-P"]
