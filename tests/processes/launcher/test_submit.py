"""Job scripts against golden files (``UPDATE_GOLDEN=1 pytest`` writes them), refusals, and ``submit --smoke``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from launcher.commands import submit
from launcher.commands.submit import make_smoke_run
from launcher.preflight.checks import preflight
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from tests.unit.launcher.commands import program, status_of
from tests.unit.launcher.sites import site
from tests.unit.launcher.slurm_jobs import BIG, CASES, config_of
from tests.unit.launcher.test_memory import QWEN3, QWEN_30B
from tests.unit.launcher.test_memory import RECIPES as LARGE

REPO = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).parent / "golden"
OWN_CRITIC = ("algorithm=ppo", "roles.critic=separate")
CLUSTER = ("slurm.account=lab", "slurm.partition=gpu", "slurm.container=/images/rl.sqsh")
RECIPES = dict.fromkeys(LARGE, CLUSTER)  # what is the user's to give


@pytest.mark.parametrize("case", [*CASES, *RECIPES])
def test_scripts_are_the_golden_ones_and_bash_reads_them(case: str) -> None:
    given = ["run.name=golden", "model.path=/models/given", *RECIPES.get(case, ())]
    config = load_config(case, given) if case in RECIPES else config_of(*CASES[case])
    made = submit.job_script(config, folder=Path("/home/me/work"), python="/venv/bin/python", package=Path("/code"))
    path = GOLDEN / f"{case}.sbatch"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(made)
    assert made == path.read_text()
    subprocess.run(["bash", "-n", path], check=True)


def test_steps_get_the_jobs_variables_however_it_was_submitted(tmp_path: Path) -> None:
    """SBATCH_EXPORT=NONE in the user's shell, say, is for the job: srun would take it for steps too."""
    config = config_of("slurm.environment.NCCL_DEBUG=INFO", "slurm.setup=unset PYTHONPATH")
    made = submit.job_script(config, folder=tmp_path, python="python", package=Path("/c"))
    submitted = {"PATH": os.environ["PATH"], "SLURM_EXPORT_ENV": "NONE"}
    made = made.partition("# One attempt of a run")[0] + "\nenv"
    shown = subprocess.run(["bash"], input=made, capture_output=True, text=True, env=submitted, check=True).stdout
    assert {"PYTHONPATH=/c", "NCCL_DEBUG=INFO"} <= {*shown.splitlines()}
    assert "SLURM_EXPORT_ENV" not in shown


@pytest.mark.parametrize(
    ("module", "setup", "said"),
    [
        ("true", "source site.sh", "begins\n"),
        ("return 3", "source site.sh", "failed: slurm.setup ended with status 3"),
        ("true", "source gone.sh # of the site", "failed: slurm.setup ended with status 1"),
        ("true", "set -e; (exit 3); true", "failed: slurm.setup ended with status 3"),
        ("true", "trap 'echo cleaned' EXIT", "begins\ncleaned\n"),  # its own, as one that removes a scratch folder
    ],
)
def test_a_job_ends_where_a_module_or_its_setup_fails(tmp_path: Path, module: str, setup: str, said: str) -> None:
    config = config_of(f"slurm.setup=module load aws-ofi-nccl && {setup}")
    made = submit.job_script(config, folder=tmp_path, python="python", package=Path("/c"))
    (tmp_path / "site.sh").write_text("OF_THE_SITE=here\n")
    script = f"module() {{ {module}; }}\n{made.partition('# One attempt of a run')[0]}\necho begins"
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith(said)
    assert done.returncode == (not said.startswith("begins\n"))


def test_the_plain_script_is_read_by_bash_and_has_its_options_before_its_commands() -> None:
    path = REPO / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("slurm.nodes=4", "slurm.ntasks_per_node=1"), "4 tasks, but the learner has tp*cp*dp*pp = 1*1*2*1 = 2 ranks"),
        (("learner.device=cuda", "rollout=vllm"), "learner.device=cuda, but slurm.gpus_per_node=0: the job requests"),
        (("slurm.options=--outp=x",), "without --output, which run.dir sets"),
        (("slurm.options=[--comment=x, --no-requeue]",), "without --no-requeue, which slurm.requeues sets"),
        (("slurm.options=--mail-user me",), "each as --name or --name=value"),
        (("slurm.options=-N2",), "each as --name or --name=value"),
        (("slurm.options=--comment=a\nb",), "each as --name or --name=value"),
        (("slurm.options='",), "options as in a shell: no closing quotation"),
        (("slurm.partition=a b",), "slurm.partition='a b'"),
        (("slurm.time=tomorrow",), "slurm.time='tomorrow': must be a time limit of Slurm, as 240 (minutes)"),
        (("slurm.setup=a\nb",), "slurm.setup="),
        (("slurm.signal_seconds=65536",), "slurm.signal_seconds=65536: must be less than or equal to 65535"),
        (("slurm.engines.nodes=1",), "slurm.engines.nodes=1 with rollout.engine=local: this engine samples in"),
        (("slurm.heterogeneous=true",), "slurm.heterogeneous=True: no such key; the nodes of a job are alike"),
        (
            ("rollout=vllm", "slurm.engines.nodes=1", "rollout.server.addresses=http://a:1"),
            "slurm.engines.nodes=1 with rollout.server.addresses=http://a:1: servers are running already",
        ),
        (("slurm.array=0-3",), "slurm.array='0-3': no such key; submit a run for each seed: for s in 0 1 2; do"),
        (("slurm.options=--array=0-3",), "without --array, which a submit for each seed sets"),
        (
            ("run.launcher=ray", "slurm.container=/x.sqsh"),
            "run.launcher=ray with slurm.container=/x.sqsh: the",
        ),
        (
            ("roles.critic=separate",),
            "with algorithm.credit=completion: the algorithm has no critic; set roles.critic=learner",
        ),
        (("roles.reference=separate",), "with algorithm.kl.coefficient=0: the algorithm has no reference"),
        (
            (*BIG, "rollout=vllm", "rollout.server.tp=16", "learner.dp=2"),
            "rollout.server.tp=16 is more than the 8 GPUs of a node",
        ),
        (
            (*BIG, "rollout=vllm", "rollout.server.replicas=5", "rollout.server.tp=4", "slurm.engines.nodes=2"),
            "3 on a node, 12 GPUs of 8; lower them, or set slurm.engines.nodes=3",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_numbers(keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(config_of(*keys), for_job=True).raise_problems()
    assert message in str(caught.value)


def test_a_login_node_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from launcher.__main__ import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "submit", QWEN_30B, *site(tmp_path, QWEN3), "run.name=here"]
    command += ["slurm.nodes=2", "learner.dp=4", "weights.transport=auto", "weights.folder=/fast"]
    command += ["rollout.server.replicas=2", "--dry-run"]
    own = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "note: each push of weights goes through a file in /fast, on a shared file system" in done.stdout
    assert (
        "122.1 GB read from a file in /fast, on a shared file system; one receives up to 61.1 GB: 12.2" in done.stdout
    )
    assert "a checkpoint, every 20 steps: 428.0 GB, up to 428.0 GB by one node" in done.stdout
    assert (
        "not checked: whether vllm accepts the options of the servers: torch cannot be imported here; the tokenizer "
        "and its chat template, because torch is not installed here; the tokens of rows, because" in done.stdout
    )
    assert "16 ranks on 2 nodes, 8 on each" in done.stdout
    assert "tp=4: inside a node" in done.stdout
    assert "memory: up to 88.7 GB a GPU (rank 0), most of it: engine" in done.stdout
    run = tmp_path / "runs" / "here"
    assert {p.name for p in run.iterdir()} == {"config.yaml", "job.sbatch", "jobs", "placement.txt", "submit.lock"}
    assert load_config(str(run / "config.yaml"), []).run.launcher == "slurm"
    assert f"sbatch {run / 'job.sbatch'}" in done.stdout
    placed = (run / "placement.txt").read_text()
    assert "most of it: engine" in placed
    assert "\n  learner: srun --nodes=" in placed


SBATCH = """#!/bin/bash
# Accepts every job. While it says whether the first could run, another submit does all of its own.
case "$*" in
    *--test-only*) mkdir beside && "$PYTHON" -m launcher submit tiny_cpu seed=22 >beside/said 2>&1 ;;
    *) sed -n "s/^RUN=//p" "${@: -1}" >>sent; wc -l <sent ;;
esac
exit 0
"""


def test_two_submits_at_once_have_a_run_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path / "sbatch", SBATCH)
    monkeypatch.chdir(tmp_path)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    assert status_of("submit", "tiny_cpu", "seed=11") == 0
    runs = tmp_path / "runs"
    jobs = runs / "tiny_cpu" / "jobs"
    expected = [f"job 2: {runs / 'tiny_cpu'}", f"tail -F {jobs}/2.txt {jobs}/2-0/controller.txt", "scancel 2"]
    assert capsys.readouterr().out.splitlines()[-3:] == expected
    assert (tmp_path / "beside" / "said").read_text().splitlines()[-3] == f"job 1: {runs / 'tiny_cpu-2'}"
    assert (tmp_path / "sent").read_text().splitlines() == [str(runs / name) for name in ("tiny_cpu-2", "tiny_cpu")]
    for name, seed, job in (("tiny_cpu", 11, "2"), ("tiny_cpu-2", 22, "1")):
        assert load_config(str(runs / name / "config.yaml"), []).seed == seed
        assert (runs / name / "jobs/id").read_text() == f"{job}\n"
    assert status_of("submit", "tiny_cpu", "run.name=tiny_cpu-2") == 1
    assert "tiny_cpu-2 exists; sbatch runs/tiny_cpu-2/job.sbatch continues it once it" in capsys.readouterr().err
    (tmp_path / "runs/local").mkdir()
    assert status_of("submit", "tiny_cpu", "run.name=local") == 1
    assert capsys.readouterr().err.endswith("runs/local exists; take another name\n")


REFUSING = """#!/bin/bash
# Refuses partition typo; of any other job it does not say that Slurm has taken it.
case "$*" in
    *--test-only*) ! grep -q "partition=typo" "${@: -1}" ;;
    *) echo "Socket timed out on send/recv operation" >&2; exit 1 ;;
esac
"""


def test_no_submit_changes_a_folder_whose_job_may_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path / "sbatch", REFUSING)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"

    def submitted(*keys: str, fails: bool = False) -> str:
        assert status_of("submit", "tiny_cpu", *keys) == int(fails)
        said = capsys.readouterr()
        return said.err if fails else said.out.splitlines()[-1].rpartition(" ")[2]

    def seeds() -> dict[str, int]:
        return {path.name: load_config(str(path / "config.yaml"), []).seed for path in runs.iterdir()}

    assert submitted("seed=1", "--dry-run") == submitted("seed=1", "--dry-run") == f"{runs}/tiny_cpu/job.sbatch"
    assert submitted("seed=2", "--dry-run") == f"{runs}/tiny_cpu-2/job.sbatch"
    said = submitted("seed=3", "run.name=tiny_cpu", fails=True)
    assert "sbatch runs/tiny_cpu/job.sbatch submits the job of an earlier dry run with other keys, or" in said
    typo = ("run.name=typo", "seed=4", "slurm.partition=typo")
    assert submitted(*typo, "--dry-run") == f"{runs}/typo/job.sbatch"
    assert "sbatch --test-only" in submitted(*typo, fails=True)
    assert "sbatch --test-only" in submitted("run.name=new", "slurm.partition=typo", fails=True)
    assert "Socket timed out" in submitted("run.name=late", "seed=5", fails=True)
    assert "late exists; sbatch runs/late/job.sbatch continues it" in submitted("run.name=late", "seed=5", fails=True)
    assert "Socket timed out" in submitted("run.name=tiny_cpu-2", "seed=2", fails=True)  # its dry run's keys
    assert seeds() == {"tiny_cpu": 1, "tiny_cpu-2": 2, "typo": 4, "late": 5}


@pytest.mark.parametrize(
    ("options", "requested"),
    [
        ("--gres=gpu:h100:8", "--gres=gpu:h100:8"),
        ('[--mail-user=me@x.org,"--gres=gpu:h100:8"]', "--gres=gpu:h100:8"),
        ("--gpus-per-node=h100:8", "--gpus-per-node=h100:8"),
        ("--tres-per-node=gres/gpu:8", "--tres-per-node=gres/gpu:8"),
        ("--gres=lustre:1", "--gpus-per-node=8"),
        ("--gres=none", None),
    ],
)
def test_gpus_are_requested_in_the_clusters_own_way(options: str, requested: str | None) -> None:
    keys = (*BIG, f"slurm.options={options}")
    made = submit.job_script(config_of(*keys), folder=Path("/work"), python="p", package=Path("/code"))
    asked = [line for line in made.splitlines() if "gpu" in line and line.startswith("#SBATCH")]
    assert asked == ([f"#SBATCH {requested}"] if requested else [])


def test_a_job_of_ranks_alone_may_request_no_gpus() -> None:
    found = preflight(config_of("learner.device=cuda"), for_job=True)
    found.raise_problems()
    assert "slurm.gpus_per_node=0: the job requests no GPUs" in found.describe()


def test_options_are_quoted_as_sbatch_reads_them(tmp_path: Path) -> None:
    for text in (*HOSTILE[1:], "a \\ #b, c"):
        given = config_of().model_dump()
        given["slurm"]["options"] = [f"--comment={text}"]
        made = submit.job_script(RunConfig.model_validate(given), folder=tmp_path, python="p", package=tmp_path)
        (line,) = (line for line in made.splitlines() if "--comment" in line)
        assert shlex.split(line.removeprefix("#SBATCH ")) == [f"--comment={text}"]
        subprocess.run(["bash"], input=made.partition("# One attempt")[0], text=True, cwd=tmp_path, check=True)
    assert not [*tmp_path.rglob("PWNED")]


def test_a_cluster_without_gpus_in_slurm_is_told_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program(tmp_path / "sbatch", "#!/bin/sh\necho 'Invalid generic resource (gres) specification' >&2; exit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with (
        pytest.raises(ConfigError, match=r"or, if it does not know the GPUs, none: slurm.options=\[--gres=none\]"),
        submit.prepare(config_of("learner.device=cuda", "slurm.gpus_per_node=2"), "x") as job,
    ):
        submit.verify_script(job, cluster=True)


HOSTILE = ("a\n>PWNED\n#", "a;>PWNED;", "$(>PWNED)", "`>PWNED`", "a' >PWNED '", 'a" >PWNED "', "a|>PWNED", "a >PWNED")
PLACES = ("folder", "package", "run.dir", "slurm.python", "slurm.environment.X", "slurm.account")
PLACES += ("slurm.exclude", "slurm.memory_per_node", "slurm.partition")


@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_a_name_contains_is_run(tmp_path: Path, place: str) -> None:
    """Whatever a user's text gets to: it is refused, or bash runs the script up to the attempt without running it."""
    taken = []
    for text in HOSTILE:
        folder, package, given = tmp_path, tmp_path, config_of().model_dump()
        if place in ("folder", "package"):
            (tmp_path / text).mkdir()
            folder, package = (tmp_path / text, package) if place == "folder" else (folder, tmp_path / text)
        else:
            *sections, key = place.split(".")
            section = given
            for name in sections:
                section = section[name]
            section[key] = text
        try:
            config = RunConfig.model_validate(given)
            made = submit.job_script(config, folder=folder, python="/venv/bin/python", package=package)
        except (ConfigError, ValidationError):
            continue
        taken.append(text)
        before, cut, _ = made.partition("# One attempt of a run")
        assert cut
        subprocess.run(["bash"], input=before, text=True, cwd=tmp_path, check=True, capture_output=True)
        assert not [*tmp_path.rglob("PWNED")], text
    assert bool(taken) == (place in ("package", "slurm.environment.X")), taken


# ``submit --smoke`` beside a scripted Slurm, whose job writes the files that a run writes.
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
        program(tmp_path / name, f"#!/bin/bash\n{script}\n")
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    for name, value in {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "MODE": "good"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(submit, "_LOOK_SECONDS", 0.02)
    return tmp_path


def test_the_page_says_what_ran_where_and_how_it_went_on(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("submit", "tiny_cpu", "--smoke") == 0
    out = capsys.readouterr().out
    page = out[out.index("scancel 7\n") :].splitlines()
    waits = [line.partition(":")[0] for line in page if line.endswith(" s")]
    assert waits == [
        *("in the queue", "start and first step", "2 steps and a checkpoint"),
        *("kill until the run names the failed node", "back from the queue", "resume and a step"),
    ]
    for restart, node in enumerate(("n1", "n2")):
        at = page.index(f"RUNNING on n[1-2], restart {restart}:")
        assert page[at + 1] == "  2 ranks on 1 nodes, 2 on each"
        assert page[at + 2 : at + 4] == [f"    {node}: ranks 0-1", f"  engine 0: {node}"]
        assert page[at + 4 + (not restart)] == "  step 2: 2.5 s (rollout 2.0)"
    assert page[-3:] == [
        "resumed from the checkpoint of step 1, its newest",
        "step 2 ran twice, with bit-equal results",
        "all parts passed",
    ]
    assert (slurm / "killed").read_text() == "--signal=KILL 7.3\n"
    assert (slurm / "state").read_text() == "CANCELLED\n"
    run = slurm / "runs" / "tiny_cpu-smoke"
    assert load_config(str(run / "config.yaml"), []).checkpoint.every == 1
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("unlike", "step 2 ran twice, and differs in reward/mean"),
        ("over", "it resumed from the start, but its newest checkpoint is of step 1"),
        ("no_step", "Slurm lists no running step of the learner: 7.batch batch\n7.4 critic"),
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
    assert "all parts passed" not in out
    assert (slurm / "state").read_text() == ("FAILED\n" if mode == "ends" else "CANCELLED\n")


def test_it_is_the_run_in_its_layout_from_the_first_step_on() -> None:
    keys = ("run.name=x", "checkpoint.every=7", "slurm.restarts=0", "log.sinks=wandb")
    sets = ("eval.sets.one.limit=4", "eval.sets.one.samples=8", "eval.sets.one.temperature=1", "eval.sets.two.every=5")
    config = load_config("tiny_cpu", [*keys, *sets, "learner.dp=2", "train.lr_decay=cosine"])
    made = make_smoke_run(config)
    assert (made.run.name, made.slurm.restarts, made.checkpoint.every) == ("x-smoke", 1, 1)
    assert (made.learner, made.rollout, made.reward, made.algorithm) == (
        *(config.learner, config.rollout, config.reward, config.algorithm),
    )
    assert (made.warm_start.steps, made.log.sinks) == (0, ())
    assert [(name, one.limit, one.samples, one.every) for name, one in made.eval.sets.items()] == [("one", 4, 1, None)]
    assert make_smoke_run(load_config("tiny_cpu", [])).eval.sets["smoke"].limit == 8


@pytest.mark.parametrize("name", ["sft_tiny", "dpo_tiny", "reward_tiny", "gsm8k_tiny", "qwen3_30b_a3b", "deepseek_v3"])
def test_every_kind_of_run_has_one(name: str) -> None:
    given = ["data.train=train.jsonl", "data.eval=eval.jsonl"] if name == "gsm8k_tiny" else []
    assert make_smoke_run(load_config(name, ["model.path=/given", *given])).checkpoint.keep == 2


def test_what_cannot_be_is_said(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("submit", "tiny_cpu", "--smoke", "--dry-run") == 1
    assert "--smoke submits a job and waits for it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"its smoke run is not valid:\nrun\.name"):
        make_smoke_run(load_config("tiny_cpu", [f"run.name={'x' * 200}"]))


def test_a_dry_run_elsewhere_names_what_only_the_cluster_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = ("model.path=/away/model", "rollout.python=/away/python", "slurm.partition=p", "run.name=x")
    assert status_of("submit", "qwen3_30b_a3b", "--elsewhere", *keys) == 1
    assert "--elsewhere works only with --dry-run" in capsys.readouterr().err
    assert status_of("submit", "qwen3_30b_a3b", "--dry-run", "--elsewhere", *keys) == 0
    said = capsys.readouterr().out
    assert "memory: up to 112.6 GB a GPU" in said
    assert "not checked: model files; data; " in said
    assert (tmp_path / "runs/x/job.sbatch").is_file()
    (tmp_path / "own.py").write_text(
        "def f(completions, answer, **kw):\n    return [c[0]['content'] for c in completions]\n"
    )
    rewards = [f"reward.function=own:{name}" for name in ("f", "g")]
    assert [status_of("submit", "qwen3_30b_a3b", "--dry-run", "--elsewhere", *keys[:-1], one) for one in rewards] == [
        0,
        1,
    ]
    assert "the reward own:f with a row of the data" in capsys.readouterr().out
    assert status_of("submit", "qwen3_30b_a3b", "--dry-run", "--elsewhere", *keys, "model.name=null") == 1
    assert "for the plan, give a folder with the model's config.json, or set model.name to" in capsys.readouterr().err
    assert status_of("submit", "qwen3_30b_a3b", "--dry-run", "--elsewhere", *keys, "learner.tp=3") == 1
