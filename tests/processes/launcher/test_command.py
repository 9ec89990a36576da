"""The command line on a broken system, from folders of the user's and of a wheel, and what it imports."""

from __future__ import annotations

import ast
import asyncio
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import launcher
from launcher.__main__ import app
from launcher.commands import train
from launcher.hosts.slurm.script import job_script
from launcher.runs.folder import claim
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig
from tests.forks import FORKS
from tests.unit.launcher.commands import program
from tests.unit.launcher.sites import site
from tests.unit.launcher.test_memory import QWEN3, QWEN_30B
from tests.unit.launcher.test_plan_command import ASKED
from tools.lab.run import run_cells
from tools.lab.study import read_study, study_cells


def test_a_removed_current_folder_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && exec "$0" -m launcher train --config tiny_cpu --check'
    command = ["sh", "-c", script, sys.executable, gone]
    variables = {**os.environ, "PYTHONPATH": str(Path(launcher.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    said = f"error: the current folder, {gone}, has been removed; change to one that is there\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/n\xff"
    os.mkdir(folder)
    variables = {**os.environ, "PYTHONPATH": str(Path(launcher.__file__).parents[1])}
    command = [sys.executable, "-m", "launcher", "train", "--check"]
    for more, where, said in ((b"log.rich=true", folder, folder), (b"run.dir=\xff", tmp_path, b"run.dir=\xff")):
        done = subprocess.run([*command, more], cwd=where, capture_output=True, env=variables, check=False)
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
        assert f"{said!r}, is not UTF-8".encode() in done.stderr


def test_stacks_on_a_read_only_disk_hide_no_error(tmp_path: Path) -> None:
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    mount = 'mount -o bind,ro "$1" "$1"'
    if subprocess.run([*mounted, mount, "sh", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no user mount")
    (tmp_path / "controller.txt").touch()
    code = "import sys; from pathlib import Path; from launcher.processes import stacks; "
    code += "stacks.remove_empty_files(Path(sys.argv[1]))"
    script = f'{mount}; ! touch "$1/other"; exec "$0" -c "$2" "$1"'
    done = subprocess.run([*mounted, script, sys.executable, tmp_path, code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Read-only file system" in done.stderr  # of touch
    assert os.listdir(tmp_path) == ["controller.txt"]


def start_unnamed(runs: Path, all_chose: Any, all_claimed: Any) -> None:
    """Starts a run that claims its folder when all have chosen a name, and ends when all have claimed one."""
    chosen = []

    async def program(config: RunConfig, *_: object, resume: bool) -> None:
        chosen.append(config.run.name)
        if len(chosen) == 1:
            all_chose.wait(300)
        with claim(config.run.dir / str(config.run.name), resume=resume):
            all_claimed.wait(300)

    train.run_training = program  # type: ignore[assignment]
    try:
        app(["train", f"run.dir={runs}"], standalone_mode=False)
    except BaseException:
        all_claimed.abort()  # the others do not wait for this one
        raise
    assert chosen[0] == "tiny_cpu"


def test_three_processes_that_chose_one_name_have_a_run_each(tmp_path: Path) -> None:
    barriers = FORKS.Barrier(3), FORKS.Barrier(3)
    starts = [FORKS.Process(target=start_unnamed, args=(tmp_path / "runs", *barriers)) for _ in range(3)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert [start.exitcode for start in starts] == [0, 0, 0]
    assert sorted(os.listdir(tmp_path / "runs")) == ["tiny_cpu", "tiny_cpu-2", "tiny_cpu-3"]


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[3])])
    command, own = [sys.executable, "-c", "from launcher.entry import main; main()"], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_command_imports_no_other_and_reads_no_configuration_for_a_job_s_state() -> None:
    code = """
import sys, typer
from launcher.__main__ import app
commands = typer.main.get_command(app).commands
assert {"train", "submit", "status"} <= set(commands)
print(*(name for name in sys.modules if name.startswith("launcher.commands.")))
assert commands["status"].name == "status"
print(*(name for name in sys.modules if name.startswith("launcher.commands.")), "pydantic" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\nlauncher.commands.status False\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("train algorithm=gs", ["algorithm=gspo", "algorithm=gspo_token"]),
        ("train algorithm = gs", ["gspo", "gspo_token"]),  # as bash splits them
        ("train rollout.group", ["rollout.group_size="]),
        ("train --config tiny", ["tiny_cpu"]),
        ("submit tiny", ["tiny_cpu"]),
        ("eval runs/x reward.on_e", ["reward.on_error="]),
    ],
)
def test_keys_groups_and_configurations_are_completed(words: str, completed: list[str]) -> None:
    given = ["rl-megatron", *words.split()]
    variables = {"_RL_MEGATRON_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(given)}
    result = CliRunner().invoke(
        app, prog_name="rl-megatron", env={**variables, "COMP_CWORD": str(len(given) - 1)}, catch_exceptions=False
    )
    assert result.output.split() == completed


# A project's folder with packages of our packages' names: ours run, and its own modules are found.
REPO = Path(__file__).resolve().parents[3]
LIMIT = 600.0  # seconds
KEY = "reward.function=its_own:score"
SAID = "error: reward.function='its_own:score': 'score' of its_own is not there; did you mean 'scores'?"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; nothing of ours is imported from it, and of its own a module with a word misspelled."""
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
    program(project / "scontrol", "#!/bin/sh\n")
    own = {**os.environ, **slurm, "PATH": f"{project}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=script, env=own, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout.endswith(f"failed with status 1: {SAID}\n")) == (1, True), done.stdout


def test_a_cell_does(project: Path) -> None:
    (project / "study.yaml").write_text(yaml.safe_dump({"folder": "runs", "seeds": [0], "overrides": [KEY]}))
    study = read_study(Path("study.yaml"))
    (found,) = asyncio.run(run_cells(study, study_cells(study), retry=False, console=Console(file=io.StringIO())))
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


# What a job of an installed wheel has on PYTHONPATH, which other interpreters of the job read too.
TWICE = """from launcher.entry import main
for _ in range(2):  # what is only prepared is prepared again
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""
FINDS = """import importlib.util, sys
print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])
import launcher.entry, rl_megatron.files
print(rl_megatron.files.shipped("slurm"))
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


def test_a_wheels_code_is_there_without_packages_beside_it(packages: Path, tmp_path: Path) -> None:
    own = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-P", "-c", TWICE, "submit", "tiny_cpu", "run.name=run", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (script,) = tmp_path.glob("runs/**/*.sbatch")
    before, cut, _ = script.read_text().partition("\nPYTHON=")
    assert cut
    command = [sys.executable, "-P", "-S", "-c", FINDS, "launcher", "rl_megatron", "tools", "torch_of_the_learner"]
    command, own = ["bash", "-c", f'{before}\nexec "$@"', "job", *command], {"PATH": os.environ["PATH"]}
    found, shipped = subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == "['launcher', 'rl_megatron', 'tools']"
    assert Path(shipped).samefile(packages / "rl_megatron" / "slurm")


# ``rl-megatron scale`` as a user calls it: terms, reasons, JSON, and a configuration that ``submit`` takes.
def test_a_written_layout_is_a_configuration_that_submit_takes_without_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from launcher.__main__ import main; main(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    written = tmp_path / "mine.yaml"
    commands = (
        ["scale", *ASKED, "--write", str(written)],
        ["submit", str(written), *site(tmp_path, QWEN3), "run.name=here", "--dry-run"],
    )
    texts = []
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", code, *command], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert "on 16 h100, goal=tokens" in texts[0]
    assert "not submitted; to submit it" in texts[1]
    config = load_config(str(tmp_path / "runs" / "here" / "config.yaml"), [])
    assert config.learner.dims.world_size + config.slurm.engines.nodes * 8 == 16
    assert f"learner.ep={config.learner.ep}" in texts[0] or config.learner.ep == 1
    recipe = load_config(QWEN_30B, ["model.path=/models/given"])
    assert config.learner.optimizer == recipe.learner.optimizer
    assert config.train.model_copy(update={"max_staleness": 0}) == recipe.train
