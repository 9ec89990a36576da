"""What a job of an installed wheel has on PYTHONPATH, which other interpreters of the job read too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[3]
STUDY = {"folder": "runs/study", "axes": {"a": ["train.steps=2"]}, "seeds": [0]}
SLURM = '#!/bin/sh\n[ "$1" = --parsable ] && echo 7\nexit 0\n'
TWICE = """from launcher.entry import main
for _ in range(2):  # what is only prepared is prepared again
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""
ASKED = """import importlib.util, sys
print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])
import launcher.entry, rl_megatron.shipped
print(rl_megatron.shipped.shipped("slurm"))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``site-packages`` as the wheel fills it, with another package beside."""
    folder = tmp_path_factory.mktemp("site-packages")
    for name in ("rl_megatron", "launcher", "tools"):
        being_written = shutil.ignore_patterns("*.pyc.*")  # by other tests' processes, and renamed once it is
        shutil.copytree(REPO / name, folder / name, ignore=being_written)  # with what is compiled
    for name in ("conf", "slurm"):
        shutil.copytree(REPO / name, folder / "rl_megatron" / name)
    (folder / "torch_of_the_learner.py").touch()
    return folder


@pytest.mark.parametrize("sent", ["submit tiny_cpu run.name=run --dry-run", "experiment submit study.yaml"])
def test_the_code_of_an_installed_wheel_is_there_without_the_packages_beside(
    packages: Path, tmp_path: Path, sent: str
) -> None:
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    for name in ("sbatch", "scontrol", "squeue", "sacct"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    own = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", TWICE, *sent.split()], cwd=tmp_path, env=own, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (script,) = tmp_path.glob("runs/**/*.sbatch")
    before, cut, _ = script.read_text().partition("\nPYTHON=")
    assert cut
    command = [sys.executable, "-P", "-S", "-c", ASKED, "launcher", "rl_megatron", "tools", "torch_of_the_learner"]
    asked = subprocess.run(
        ["bash", "-c", f'{before}\nexec "$@"', "job", *command],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    found, shipped = asked.stdout.splitlines()
    assert found == "['launcher', 'rl_megatron', 'tools']"
    assert Path(shipped).samefile(packages / "rl_megatron" / "slurm")
