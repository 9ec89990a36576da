"""The wheel and the source archive: built, installed without the checkout, and tried in an empty folder."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.documents import blocks

REPO = Path(__file__).resolve().parents[2]
SMALL = (
    *("learner.ep=1", "learner.dp=1", "learner.threads=1", "log.sinks=[]", "train.steps=1", "eval.every=1"),
    *("rollout.prompts_per_step=2", "rollout.group_size=2", "warm_start.steps=1", "warm_start.batch_size=4"),
)
LARGEST_WHEEL, LARGEST_SOURCE = 2_000_000, 4_000_000  # bytes; the source archive has tests and docs
SECONDS = 600  # that a command may take


def built(source: Path, kind: str, folder: Path) -> Path:
    """The archive of ``kind`` that the build backend makes of ``source``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=SECONDS)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(REPO, "wheel", tmp_path_factory.mktemp("wheel"))


def installed(wheel: Path, folder: Path) -> Path:
    """``bin`` of an environment with the wheel and the packages beside this pytest, without the checkout. A ``.pth``
    line adds a folder and reads no other ``.pth`` in it: an editable installation is not seen."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=SECONDS)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", f"--python={folder}/bin/python", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=SECONDS)
    return folder / "bin"


def test_the_page_of_installing_is_followed_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    bin_, empty = installed(wheel, tmp_path / "environment"), tmp_path / "empty"
    empty.mkdir()
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*command: str) -> str:
        ended = subprocess.run(
            [str(bin_ / command[0]), *command[1:]],
            cwd=empty,
            env=own | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        return ended.stdout

    packages = bin_.parent / "lib"
    for name in ("rl_megatron", "launcher.entry", "tools.convert.conversion"):
        file = said("python", "-c", f"import {name} as it; print(it.__file__)")
        assert Path(file.strip()).is_relative_to(packages), name
    page = REPO / "docs" / "install.md"
    (reward,) = (b for b in blocks(REPO / "docs" / "quickstart.md", "python") if b.text.startswith("# my_rewards.py"))
    (empty / "my_rewards.py").write_text(reward.text)
    shown = [block.text for block in blocks(page, "sh") if block.mark == "run by tests/e2e/test_wheel.py"]
    answers = {}
    for line in "".join(shown).replace("\\\n", " ").replace("step_000400", "step_000001").splitlines():
        words = shlex.split(line, comments=True)
        small = SMALL if words[:3] == ["rl-megatron", "train", "run.name=first"] else ()
        answers[" ".join(words[:3])] = said(*words, *small)
    assert f"{bin_}/python" in answers["rl-megatron doctor"]
    assert "step 1/1" in answers["rl-megatron train run.name=first"]
    assert "gives 1 for the answer itself" in answers["rl-megatron train reward.function=my_rewards:digits_right"]
    assert "torch_dist" in answers["rl-megatron convert runs/first/hf_step_000001"]
    assert "no problems" in answers["rl-megatron convert converted"]
    (placed,) = blocks(page, "")
    assert answers["rl-megatron submit tiny_cpu"].startswith(placed.text)
    script = (empty / "runs/wide/job.sbatch").read_text()
    assert str(REPO) not in script
    code = empty / "runs/wide/code"
    assert f"PYTHONPATH={code}$" in script
    assert {path.name for path in code.iterdir()} == {"rl_megatron", "launcher", "tools"}
    assert all(path.resolve().is_relative_to(packages) for path in code.iterdir())
    assert (REPO / "slurm" / "job.sh").read_text() in script
    for line, part in {
        "plan qwen3-30b-a3b src=megatron,tp=2 dst=hf,dp=1": "transfers between 2 pairs",
        "scale qwen3-30b-a3b gpus=64 gpu=h100": "rejected: ",
        "convert qwen3-30b-a3b --inspect --layout megatron,tp=2": "29,767,972,864",
        f"experiment run {REPO}/docs/studies/loss_and_rate.yaml --check": "12 cells, 2 at once; nothing is wrong",
        "doctor mismatch --help": "--help",
    }.items():
        assert part in said("rl-megatron", *line.split())
    assert {path.name for path in empty.iterdir()} - {"__pycache__"} == {"converted", "my_rewards.py", "runs"}


def test_the_source_archive_makes_the_same_wheel_and_holds_no_caches(wheel: Path, tmp_path: Path) -> None:
    archive = built(REPO, "sdist", tmp_path / "sdist")
    with tarfile.open(archive) as opened:
        names = [path.partition("/")[2] for path in opened.getnames()]
    shutil.unpack_archive(archive, tmp_path)
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "runs", "build", ".git/"))]
    assert {"Makefile", "constraints.txt", "tests/e2e/test_wheel.py", "slurm/train.sbatch"} < {*names}
    again = built(tmp_path / archive.name.removesuffix(".tar.gz"), "wheel", tmp_path / "again")
    assert wheel.stat().st_size < LARGEST_WHEEL
    assert archive.stat().st_size < LARGEST_SOURCE
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert {file.filename: file.CRC for file in one.infolist()} == {f.filename: f.CRC for f in other.infolist()}
        shipped = {name.removeprefix("rl_megatron/") for name in one.namelist() if not name.endswith(".py")}
    assert {str(path.relative_to(REPO)) for path in (REPO / "conf").rglob("*.yaml")} < shipped
    page = {f"uplot/{name}" for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE")} | {
        "report.html.j2",
        "page.js",
    }
    assert {f"observability/{name}" for name in {"charts.js", *page}} < shipped
