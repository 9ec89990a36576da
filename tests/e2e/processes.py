"""Real runs of the command line in separate processes, which tests watch, kill and continue."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.metrics import deterministic
from tests.e2e.forked import NODE, PROGRAM, Fork

LIMIT = 600.0  # seconds any wait may take; an idle machine needs a few, one with a load of 30 a minute
TINY = (
    "learner.threads=1",
    "log.sinks=[]",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "warm_start.steps=4",
    "warm_start.check_every=2",
    "warm_start.batch_size=16",
    "warm_start.stop_at_accuracy=1",
    "train.steps=6",
    "checkpoint.every=2",
    "eval.every=2",
)
REWARDS = '''
import json, math, statistics, time
from pathlib import Path

def even(prompt, completions, texts):
    """Half of what a random model samples gets 1: groups differ, so there is a gradient. A test may hold it."""
    while Path("hold").exists() and prompt.id != "made-up":
        Path("holding").touch()
        time.sleep(0.01)
    return [float(sum(c.token_ids) % 2 == 0) for c in completions]

def slow_for_some(prompt, completions, texts):
    """For one prompt in four it takes longer than two steps, whose tokens are then as old as they may be."""
    if prompt.id != "made-up" and sum(prompt.token_ids) % 4 == 0:
        time.sleep(max(1, 3 * step_seconds()))
    return even(prompt, completions, texts)

def step_seconds():
    """The median of the latest five steps: a busy machine's are longer, and so is a step that waits for this."""
    lines = [line for path in Path("runs").glob("*/metrics.jsonl") for line in path.read_text().split("\\n")[:-1]]
    return statistics.median(json.loads(line).get("seconds/step", 0) for line in lines[-5:]) if lines else 0

def raising(prompt, completions, texts):
    """Raise once a test says so."""
    if Path("raise").exists():
        raise KeyError("price list")
    return even(prompt, completions, texts)

def sometimes_nan(prompt, completions, texts):
    rewards = even(prompt, completions, texts)
    return [math.nan] * len(rewards) if len(rewards) > 1 and sum(prompt.token_ids) % 4 == 0 else rewards
'''


PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""An environment in which every x86 processor rounds alike."""


def eventually(true: Callable[[], object], what: str, limit: float = LIMIT, every: float = 0.01) -> None:
    """Poll until the condition is true. After ``limit`` seconds fail and say what was awaited."""
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, f"waited {limit} s for {what}"
        time.sleep(every)


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass(kw_only=True)
class Run:
    """One process of the command line, leader of a session of its own."""

    folder: Path
    process: subprocess.Popen[str] | Fork
    output: Path
    seen: set[psutil.Process] = field(default_factory=set)
    _read: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        """Its learner processes, in the order of their ranks: they are forked from one child of it."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.seen.add(child)
                    if child.name() == NODE or "launcher.worker.node" in child.cmdline():
                        found += child.children()
        self.seen.update(found)
        return sorted(found, key=lambda p: p.pid)

    def until(self, true: Callable[[], object], what: str) -> None:
        """Wait for something that the run does; fail if the run ends first."""

        def now() -> object:
            return true() or self.process.poll() is not None

        eventually(now, what)
        assert true(), f"the run ended ({self.process.returncode}) before {what}:\n{self.text()}"

    def until_row(self, **wanted: object) -> None:
        """Wait for a row of metrics that has these values."""
        self.until(lambda: any(wanted.items() <= row.items() for row in self.rows()), f"row {wanted}")

    def kill(self) -> None:
        """SIGKILL to the controller alone; checks that everything that it started ends with it."""
        self.workers()
        self.process.kill()
        assert self.process.wait(LIMIT) == -signal.SIGKILL, "the run ended before it was killed"
        eventually(lambda: not any(alive(p) for p in self.seen), "orphans to end")

    def killed(self) -> None:
        """Wait until it was killed by what it was started with, and everything that it started has ended."""

        def ended() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen.update(psutil.Process(self.process.pid).children(recursive=True))
            return self.process.poll() is not None

        eventually(ended, "the run to be killed", every=0.2)
        assert self.process.poll() == -signal.SIGKILL, self.text()
        eventually(lambda: not any(alive(p) for p in self.seen), "orphans to end", 30, every=0.02)

    def rows(self) -> list[dict[str, Any]]:
        """Its metrics so far."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        state = path.stat()
        key = (state.st_mtime_ns, state.st_size)
        if key not in self._read:  # else tests that wait for a row would read it all a hundred times a second
            self._read = {key: list(read_jsonl(path))}
        return self._read[key]

    def record(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All that a finished run recorded but times: two equal runs give equal records, to the bit."""
        samples = [json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()]
        return [deterministic(row) for row in self.rows()], samples

    def end(self, limit: float = LIMIT) -> int:
        """Wait for its end; the exit status."""
        return self.process.wait(limit)

    def finish(self) -> Self:
        """Wait for an end without an error."""
        assert self.end() == 0, self.text()
        assert "Traceback" not in self.text()
        return self


@dataclass(kw_only=True)
class Place:
    """A folder to work in: it holds the user's reward module and the runs."""

    folder: Path
    cache: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def copy(self, run: Run, name: str, *, until: int) -> Path:
        """The folder of a run ``name`` that is ``run``, which has ended, killed once it had saved step ``until``."""
        folder = shutil.copytree(run.folder, self.folder / "runs" / name)
        for saved in (*folder.glob("checkpoints/step_*"), *folder.glob("hf_step_*")):
            if int(saved.name[-6:]) > until:
                shutil.rmtree(saved)
        return folder

    def training(self, name: str, *arguments: str, resume: bool = False) -> list[str]:
        """The command line of a tiny run; later arguments overrule earlier ones."""
        data = () if "data=gsm8k" in arguments else ("data.num_eval=16",)
        keys = (*TINY, *data, f"model.cache_dir={self.cache}", f"run.name={name}", *arguments)
        return ["train", *keys, *(["--resume"] if resume else [])]

    def start(self, name: str, *arguments: str, resume: bool = False) -> Run:
        """Start ``rl-megatron train`` on a tiny run (`training`)."""
        return self._start(name, self.training(name, *arguments, resume=resume))

    def fork(
        self,
        name: str,
        *arguments: str,
        resume: bool = False,
        before: Callable[[], None] | None = None,
        in_node: Callable[[], None] | None = None,
    ) -> Run:
        """The same in a fork, for tests whose subject is not how a run starts; see `Fork`."""
        return self._fork(name, self.training(name, *arguments, resume=resume), before, in_node)

    def fork_alone(self, name: str, *arguments: str, resume: bool = False) -> Run:
        """A run of these arguments alone, in a fork."""
        keys = (f"model.cache_dir={self.cache}", f"run.name={name}", *arguments)
        return self._fork(name, ["train", *keys, *(["--resume"] if resume else [])])

    def call(self, *arguments: str) -> Run:
        """Run the given command line to its end."""
        run = self._start("none", list(arguments))
        run.end()
        return run

    def call_in_fork(self, *arguments: str) -> Run:
        """Run the given command line to its end, in a fork."""
        run = self._fork("none", list(arguments))
        run.end()
        return run

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}

    def _output(self) -> Path:
        return self.folder / f"output-{os.getpid()}-{len(self.runs)}.txt"

    def _start(self, name: str, arguments: list[str]) -> Run:
        output = self._output()
        with output.open("w") as file:
            process = subprocess.Popen(
                [str(PROGRAM), *arguments],
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment(),
                text=True,
            )
        return self._add(name, process, output)

    def _fork(
        self,
        name: str,
        arguments: list[str],
        before: Callable[[], None] | None = None,
        in_node: Callable[[], None] | None = None,
    ) -> Run:
        (output := self._output()).touch()
        process = Fork(arguments, self.folder, output, self._environment(), before, in_node)
        return self._add(name, process, output)

    def _add(self, name: str, process: subprocess.Popen[str] | Fork, output: Path) -> Run:
        self.runs.append(Run(folder=self.folder / "runs" / name, process=process, output=output))
        return self.runs[-1]

    def clear(self) -> None:
        """End what a failed test left running."""
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait(LIMIT)
