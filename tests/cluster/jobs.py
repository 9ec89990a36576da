"""Jobs on the tests' cluster, driven by the commands that a user has."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.metrics import deterministic
from tests.e2e.processes import Place, alive, eventually

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent
LIMIT = 600.0  # seconds any wait may take
STEPS = 6
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}
Record = list[dict[str, Any]]
TINY = (
    *("learner.threads=1", "learner.ep=2", "log.sinks=[]", "rollout.prompts_per_step=4"),
    *("rollout.group_size=4", "warm_start.steps=2", "warm_start.check_every=2", "warm_start.batch_size=16"),
    *("warm_start.stop_at_accuracy=1", f"train.steps={STEPS}", "checkpoint.every=2", "eval.every=2"),
    *("data.num_eval=16", "reward.function=my_rewards:even"),
    "algorithm.kl.coefficient=0.01",  # so that there is a reference
    f"reward.timeout_seconds={LIMIT}",
)
REWARDS = '''
import os, time
from pathlib import Path
from rl_megatron.observability.files import read_jsonl

RUN = Path("runs", os.environ.get("SLURM_JOB_NAME", "none"))

def even(prompt, completions, texts):
    """Half of what a random model samples gets 1: groups differ, so there is a gradient."""
    for step in map(int, os.environ.get("HOLD", "").split()):
        while made() >= step and not (RUN / f"go_on_{step}").exists():
            time.sleep(0.1)
    return [float(sum(c.token_ids) % 2 == 0) for c in completions]

def made():
    """The last recorded step."""
    rows = read_jsonl(RUN / "metrics.jsonl") if (RUN / "metrics.jsonl").exists() else []
    return max((row["step"] for row in rows if row["phase"] == "rl"), default=-1)

def raising(prompt, completions, texts):
    if prompt.id != "made-up":  # not where it is asked before the run
        raise KeyError("price list")
    return [0.0 for _ in completions]
'''


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The daemons in ``folder``; runs are made in ``work``, which all nodes see. Shared by test processes."""

    folder: Path
    work: Path

    def start(self, *, nodes: int) -> None:
        """Start the daemons unless another test process has."""
        with self.independent_answers("start"):
            if not self.folder.exists():
                (self.work / "my_rewards.py").write_text(REWARDS)
                command = [SCRIPTS / "start.sh", self.folder, str(nodes), REPO, self.work]
                subprocess.run(command, check=True, timeout=LIMIT)

    def stop(self) -> None:
        if self.folder.exists():
            subprocess.run([SCRIPTS / "stop.sh", self.folder], check=True, timeout=LIMIT)

    @contextlib.contextmanager
    def independent_answers(self, what: str) -> Iterator[None]:
        """Let one test process in at a time: at ``what``, as at a partition whose nodes several tests need."""
        self.work.mkdir(exist_ok=True)
        with (self.work / f"{what}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def power_off(self, node: str) -> None:
        """All of its processes are gone from one moment to the next."""
        first = psutil.Process(int((self.folder / "run" / f"{node}.pid").read_text()))
        first.kill()
        eventually(lambda: not alive(first), f"the end of {node}")  # which is behind that of all its processes

    def cable(self, node: str, how: str) -> None:
        """Pull (``down``) or plug (``up``) its network."""
        tag = (self.folder / "run" / "tag").read_text().strip()
        subprocess.run(["ip", "link", "set", f"{tag}-{node.removeprefix('node')}", how], check=True)

    def call(self, *command: str) -> str:
        """Run a command as a user of the cluster; return its output."""
        environment = self.environment()
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.work, env=environment, timeout=LIMIT)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def environment(self) -> dict[str, str]:
        """The environment of a user's commands."""
        own = {"SLURM_CONF": f"{self.folder}/etc/slurm.conf", "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own}

    def program(self, *arguments: str, check: bool = True) -> str:
        """Run rl-megatron, in a fork of a process that has done its imports."""
        run = Place(folder=self.work, cache=self.work, environment=self.environment()).call_in_fork(*arguments)
        assert not check or run.end() == 0, f"{arguments}: {run.text()}"
        return run.text()

    def local(self) -> Record:
        """The records of the same run on this machine, without Slurm; made once."""
        with self.independent_answers("local"):
            run = self.work / "runs" / "local"
            if not run.exists():
                self.program("train", *TINY, "run.name=local")
            return read_record(run)

    def submit(self, name: str, *keys: str, hold: str = "") -> Job:
        """Submit a run with these keys. It waits in the step after each of ``hold`` until the test lets it go on."""
        return self.submit_config("tiny_cpu", name, *TINY, *([f"slurm.environment.HOLD={hold}"] if hold else ()), *keys)

    def submit_config(self, config: str, name: str, *keys: str) -> Job:
        """Submit a run of this configuration with these keys alone."""
        text = self.program("submit", config, "slurm.memory_per_node=3000", "slurm.time=30", f"run.name={name}", *keys)
        found = re.search(r"^job (\d+): ", text, re.MULTILINE)
        assert found, text
        return Job(cluster=self, id=found[1], run=self.work / "runs" / name)

    def plain(self, *keys: str, partition: str) -> Job:
        """Submit slurm/train.sbatch, its lines edited for one task a node."""
        for link, to in (("slurm", REPO / "slurm"), (".venv", Path(sys.prefix))):
            (self.work / link).symlink_to(to)
        text = (REPO / "slurm" / "train.sbatch").read_text()
        config = " ".join(("--config", "tiny_cpu", *TINY, *keys))
        for line, mine in (
            (r"#SBATCH --nodes=1", "#SBATCH --nodes=2"),
            (r"#SBATCH --ntasks-per-node=8 --cpus-per-task=12", "#SBATCH --ntasks-per-node=1"),
            (r"#SBATCH --gpus-per-node=8 --mem=0", "#SBATCH --mem=3000"),
            (r"#SBATCH --partition=batch", f"#SBATCH --partition={partition}"),
            (r"CONFIG=\(.*\)", f"CONFIG=({config})"),
        ):
            text, found = re.subn(f"^{line}$", mine, text, flags=re.MULTILINE)
            assert found == 1, line
        (self.work / "train.sbatch").write_text(text)
        sent = self.call("sbatch", "--parsable", "train.sbatch").strip()
        return Job(cluster=self, id=sent, run=self.work / "runs" / f"rl_megatron-{sent}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A submitted job."""

    cluster: Cluster
    id: str
    run: Path

    def shown(self) -> dict[str, str]:
        """Its fields, as ``scontrol show job`` has them."""
        return dict(re.findall(r"(\S+?)=(\S+)", self.cluster.call("scontrol", "show", "job", "-o", self.id)))

    def state(self) -> str:
        return self.shown()["JobState"]

    def until(self, true: Callable[[], object], what: str, limit: float = LIMIT) -> None:
        """Poll until the condition is true."""
        end = time.monotonic() + limit
        while not true():
            over = time.monotonic() > end or self.state() in ENDED
            assert not over or true(), f"waited {limit} s at most for {what}:\n{self.shown()}\n{self.said()}"
            time.sleep(0.5)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(row["step"] >= step for row in self.record() if row["phase"] == "rl"), f"step {step}")

    def go_on(self, step: int) -> None:
        """Let it continue after this step, where it was held."""
        (self.run / f"go_on_{step}").touch()

    def end(self) -> str:
        """Its last state."""
        self.until(lambda: self.state() in ENDED, "the job's end")
        return self.state()

    def attempts(self) -> list[str]:
        return sorted(path.name for path in (self.run / "jobs").glob(f"{self.id}-*"))

    def ranks(self) -> dict[int, psutil.Process]:
        """Its learner's rank processes, on whatever node; this machine sees them all."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(OSError):
                if output := re.search(r"/rank-(\d+)\.txt$", os.readlink(f"/proc/{process.pid}/fd/1")):
                    found[int(output[1])] = process
        return found

    def processes(self) -> list[psutil.Process]:
        """All that it runs of Python and Ray, on whatever node; not Slurm's own, nor the script's."""
        found, cluster = [], self.cluster.environment()["SLURM_CONF"]
        for process in psutil.process_iter():
            try:
                of = process.environ() if re.search("python|/ray/|ray::", " ".join(process.cmdline()[:1])) else {}
                if (of.get("SLURM_CONF"), of.get("SLURM_JOB_ID")) == (cluster, self.id):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def log(self) -> str:
        """The output of the job's script."""
        path = self.run / "jobs" / f"{self.id}.txt"
        return path.read_text() if path.exists() else ""

    def said(self) -> str:
        """Everything in its folder, for a failed test."""
        return "\n".join(f"== {p}\n{p.read_text(errors='replace')}" for p in sorted(self.run.rglob("jobs/**/*.txt")))

    def record(self) -> Record:
        return read_record(self.run)


def read_record(run: Path) -> Record:
    """Metrics of a run but times: equal runs give equal records, to the bit; a step lost or made twice does not."""
    path = run / "metrics.jsonl"
    return [deterministic(row) for row in read_jsonl(path)] if path.exists() else []
