"""``rl-megatron submit``: a checked configuration becomes a job script in the run's folder, and a job.

With ``--smoke`` the job has two steps, a kill and a resume, and this command prints a page about them. It reads the
files of the run's folder, and calls Slurm. It runs on a login node, and imports neither torch nor megatron.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from launcher.build.model import starting_shape
from launcher.commands.status import Status, job_commands, job_status
from launcher.completion import Overrides, complete_config
from launcher.hosts.sites import describe_steps
from launcher.hosts.slurm.calls import call_slurm, parse_script
from launcher.hosts.slurm.script import code_folder, job_script, show_code
from launcher.preflight.checks import Preflight, preflight
from launcher.preflight.own_code import find_missing_code
from launcher.runs.folder import choose, lock
from rl_megatron.config.beside import separate
from rl_megatron.config.errors import explain_errors
from rl_megatron.config.io import load_config, resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.jobs import LogSection, WarmStartSection
from rl_megatron.entries import PLANNER, load_own
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.files import remove_folder, write_atomically
from rl_megatron.observability.files import STEPS, read_jsonl, text_at_end
from rl_megatron.observability.metrics import PHASE_SECONDS, deterministic
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import RankPlacement, make_placement, placeholder_nodes
from rl_megatron.placement.seats import ServerPlacement, describe_placements, server_placements

_LOCK = "submit.lock"
_PREPARED = {"config.yaml", "job.sbatch", "placement.txt", "jobs", "code", _LOCK}


def submit(
    config: Annotated[
        str,
        typer.Argument(help="a name under conf/, or a YAML file", show_default=False, autocompletion=complete_config),
    ],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write and check the script, but do not submit it")
    ] = False,
    off_cluster: Annotated[
        bool, typer.Option("--elsewhere", help="with --dry-run, off the cluster: skip the checks of its files")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="submit two steps instead, kill them and wait for the resume; status 1 if it fails"
        ),
    ] = False,
) -> None:
    """Train on a Slurm cluster: check the configuration, write the job's script to runs/<name>/ and submit it."""
    if smoke and dry_run:
        raise ConfigError("--smoke submits a job and waits for it, but --dry-run submits none; leave one out")
    if off_cluster and not dry_run:
        raise ConfigError("--elsewhere works only with --dry-run; add it")
    loaded, stem = load_config(config, overrides or [], missing=find_missing_code), Path(config).stem
    if smoke:
        loaded, stem = make_smoke_run(for_slurm(loaded)), f"{stem}{SUFFIX}"
    with prepare(loaded, stem, off_cluster=off_cluster) as job:
        print(job.checked.describe(), job.findings.describe(), sep="\n", flush=True)
        verify_script(job, cluster=not dry_run)
        if dry_run:
            print(f"not submitted; to submit it: sbatch {job.script}")
            return
        sent = send(job)
        commands = job_commands(job.folder, sent)
        print(f"job {sent}: {job.folder}", *commands, sep="\n", flush=True)
    if smoke and not watch_smoke(loaded, job.folder, sent):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob:
    """The resources of a configuration: placements on nodes with made-up names, and the fullest GPU, if known."""

    placement: RankPlacement
    separate: tuple[RankPlacement, ...]  # one for each role with its own ranks
    server_placements: tuple[ServerPlacement, ...]
    roles: str  # the models that the learner's ranks hold besides the policy
    memory: str  # the line about the fullest GPU, if it is known

    def describe(self) -> str:
        """Returns lines to show."""
        others = (other.describe() for other in self.separate)
        lines = self.placement.describe(), self.roles, *others, describe_placements(self.server_placements), self.memory
        return "\n".join(filter(None, lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job that is ready to be submitted; the run's folder holds all of it."""

    folder: Path
    is_new: bool  # the folder is new; otherwise a dry run's, maybe with its job sent by hand
    script: Path
    checked: ResolvedJob
    findings: Preflight


def resolve_job(config: RunConfig, *, off_cluster: bool = False) -> ResolvedJob:
    """Places all ranks and servers. Raises ConfigError if they do not fit; `preflight` finds all other problems.

    ``off_cluster`` as in `PreflightContext`.
    """
    nodes = placeholder_nodes(config)
    placements = [make_placement(config, nodes[role], role) for role in (LEARNER, *separate(config))]
    seats = server_placements(config, nodes[LEARNER], nodes.get("engines", ()))
    known = config.model.path is not None
    placement, *others = placements
    return ResolvedJob(
        placement=placement,
        separate=tuple(others),
        memory=load_own(PLANNER, "fullest")(config, starting_shape(config, off_cluster=off_cluster)) if known else "",
        server_placements=seats,
        roles=_roles(config),
    )


def _roles(config: RunConfig) -> str:
    algorithm = config.algorithm
    named = (
        ("critic", algorithm.needs_critic),
        ("reference", config.needs_reference),
        ("engine", not config.fills_files),
    )
    held = [name for name, needed in named if needed and name not in separate(config)]
    return f"in every rank besides the policy: {', '.join(held)}" if held else ""


def for_slurm(config: RunConfig) -> RunConfig:
    """Returns the configuration as a job's. Raises ConfigError by the rules that involve the launcher."""
    if config.run.launcher == "local":
        config = config.model_copy(update={"run": config.run.model_copy(update={"launcher": "slurm"})})
    try:
        return RunConfig.model_validate(config.model_dump())
    except ValidationError as error:
        raise ConfigError("\n".join(explain_errors(error.errors()))) from error


def find_unsent(folder: Path) -> bool:
    """True if the folder holds a dry run alone, whose job may be sent by hand: Slurm writes nothing until it starts."""
    jobs = folder / "jobs"
    return jobs.is_dir() and not any(jobs.iterdir()) and {p.name for p in folder.iterdir()} <= _PREPARED


def _advice(folder: Path) -> str:
    script = folder / "job.sbatch"
    if find_unsent(folder):
        return f"sbatch {script} submits the job of an earlier dry run with other keys, or "
    return f"sbatch {script} continues it once it has ended, or " if script.is_file() else ""


@contextlib.contextmanager
def prepare(config: RunConfig, config_name: str, *, off_cluster: bool = False) -> Iterator[PreparedJob]:
    """Yields a new run's folder (`choose`), or that of a dry run of the same job, with config.yaml, job.sbatch and
    placement.txt. No other submit takes it while the context is open. Raises ConfigError before it writes any."""
    config = for_slurm(config)
    findings = preflight(config, for_job=True, tries=True, off_cluster=off_cluster)
    findings.raise_problems()
    found = resolve_job(config, off_cluster=off_cluster)
    held = set[Path]()

    def free(path: Path) -> bool:
        return not path.exists() or (find_unsent(path) and _holds(path, _files(config, path.name)))

    while True:
        named = choose(
            config, config_name, resume=False, taken=lambda path: path in held or not free(path), advice=_advice
        )
        held.add(own := named.run.dir / str(named.run.name))
        folder, files = Path.cwd() / own, _files(config, own.name)
        created = not folder.exists()
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("ab") as file:
            if lock(file) and free(folder):  # another process may have sent its job since
                show_code(folder)
                for name, data in files.items():
                    write_atomically(folder / name, data, private=config.private)
                placed = [found.describe(), *([describe_steps(config)] if config.run.launcher == "slurm" else [])]
                write_atomically(folder / "placement.txt", "".join(f"{text}\n" for text in placed).encode())
                script = folder / "job.sbatch"
                yield PreparedJob(folder=folder, is_new=created, script=script, checked=found, findings=findings)
                return


def _files(config: RunConfig, name: str) -> dict[str, bytes]:
    """Returns the resolved configuration of a run of this name, and the job's script, by file name."""
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    package = code_folder(Path.cwd() / named.run.dir / name)
    script = job_script(named, folder=Path.cwd(), python=sys.executable, package=package)
    return {"config.yaml": resolved(named), "job.sbatch": script.encode()}


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """True if no file in the folder differs from these."""
    return all(not (path := folder / name).is_file() or path.read_bytes() == data for name, data in files.items())


def verify_script(prepared: PreparedJob, *, cluster: bool) -> None:
    """Makes bash parse the script, and Slurm check whether the job could ever run.

    Raises ConfigError with their message, after removing the run's folder if `prepare` made it.
    """
    try:
        parse_script(prepared.script.read_text(encoding="utf-8"))
        if cluster:
            call_slurm(["sbatch", "--test-only"], prepared.script)
    except ConfigError as error:
        if prepared.is_new:
            remove_folder(prepared.folder)
        if "generic resource" not in str(error):
            raise
        raise ConfigError(
            f"{error}; Slurm has no such GPUs here: request a type that it has, for example slurm.options="
            "[--gres=gpu:h100:8], or, if it does not know the GPUs, none: slurm.options=[--gres=none]"
        ) from error


def send(prepared: PreparedJob) -> str:
    """Submits the job. Returns its id, which is also written to the run's folder.

    No other submit takes the folder from then on: where sbatch fails or answers too late, Slurm may have the job.
    """
    (prepared.folder / "jobs" / "sent").touch()
    job = call_slurm(["sbatch", "--parsable"], prepared.script).strip().partition(";")[0]
    write_atomically(prepared.folder / "jobs" / "id", f"{job}\n".encode())
    return job


SUFFIX = "-smoke"
_STEPS = 2  # steps that end before the kill
_LAST = 100  # a step that is never reached
_EVALUATED = 8  # problems, before the first step
_LOOK_SECONDS = 1.0
_ASK_EVERY = 5  # looks; Slurm's controller serves many users
_END_SECONDS = 180.0
_PLACED = re.compile(r"(?:[a-z]\S*: )?\d+ ranks on \d+ nodes.*(?:\n  .+)*|^engine \d+: .+", re.MULTILINE)


class NotReachedError(RLMegatronError):
    """A part of the smoke run that did not come about."""


def make_smoke_run(config: RunConfig) -> RunConfig:
    """Returns the run from its first step on, in its own layout, with its own batch, servers and reward. Each step has
    a checkpoint, and little is evaluated. Raises ConfigError if it cannot be."""
    steps, name, values = max(config.train.steps, _LAST), config.run.name, config.model_dump()
    sets = {key: {**dict(one), "every": None} for key, one in config.eval.sets.items()}
    if config.kind.samples:
        first = next(iter(sets), "smoke")
        own = sets.get(first, {})
        limit = min(own.get("limit") or _EVALUATED, _EVALUATED)
        sets = {first: {**own, "limit": limit, "samples": 1, "pass_at": ()}}
    changes: dict[str, dict[str, Any]] = {
        "run": {} if name is None else {"name": f"{name}{SUFFIX}"},
        "train": {"steps": steps},
        "warm_start": WarmStartSection().model_dump(),
        "eval": {"every": 0 if config.eval.mode == "blocking" else steps, "sets": sets},
        "checkpoint": {"every": 1, "keep": 2, "keep_best": 0},
        "log": {"sinks": (), "project": LogSection().project},
        "slurm": {"restarts": max(config.slurm.restarts, 1)},
    }
    for section, changed in changes.items():
        values[section].update(changed)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(["its smoke run is not valid:", *explain_errors(error.errors())])) from error


def watch_smoke(config: RunConfig, folder: Path, job: str) -> bool:
    """Watches the job, kills it, watches it come back, and ends it. Prints each part. Returns True if all passed."""
    watched = SmokeJob(config, folder, job)
    failures = []
    try:
        watched.run()
    except (RLMegatronError, OSError) as error:
        failures.append(str(error))
    finally:
        failures += watched.end()
        print(*(f"FAILED: {each}" for each in failures) if failures else ("all parts passed",), sep="\n", flush=True)
    return not failures


class SmokeJob:
    """A job under watch, by the files of its run's ``folder``."""

    def __init__(self, config: RunConfig, folder: Path, job: str) -> None:
        self._folder, self._job, self._before = folder, job, list[Mapping[str, Any]]()
        self._is_exact = config.learner.device == "cpu" and not config.rollout.served

    def run(self) -> None:
        """Runs the parts. Raises NotReachedError at the first that fails, and ConfigError with Slurm's message."""
        self._wait("in the queue", self._attempt(0).is_dir)
        self._wait("start and first step", lambda: len(self._rows()) > 0)
        self._wait(f"{_STEPS} steps and a checkpoint", lambda: len(self._rows()) >= _STEPS and self._saved() > 0)
        self._show(self._rows())
        self._kill()
        self._wait("kill until the run names the failed node", (self._attempt(0) / "failed_node").exists)
        saved, logged = self._saved(), len(self._log())
        self._wait("back from the queue", self._is_back)
        self._wait("resume and a step", lambda: len(self._again(0)) > 0)
        self._show(self._again(0), logged)
        found = re.search(r"resuming from \S*step_(\d+)", (self._attempt(1) / "controller.txt").read_text())
        if found is None or int(found[1]) != saved:
            where = "the start" if found is None else f"step {int(found[1])}"
            raise NotReachedError(f"it resumed from {where}, but its newest checkpoint is of step {saved}")
        print(f"resumed from the checkpoint of step {saved}, its newest", flush=True)
        self._compare(self._again(saved))

    def end(self) -> list[str]:
        """Ends the job and removes its checkpoints. Returns what failed."""
        try:
            if not job_status(self._job, self._folder).over:
                call_slurm(["scancel", self._job])
            end = time.monotonic() + _END_SECONDS
            while not job_status(self._job, self._folder).over:
                if time.monotonic() > end:
                    raise NotReachedError(f"job {self._job} has not ended in {_END_SECONDS:.0f} s after scancel")
                time.sleep(_LOOK_SECONDS)
            remove_folder(self._folder / "checkpoints")
        except (RLMegatronError, OSError) as error:
            return [f"{error}; end it with scancel {self._job}, and remove {self._folder / 'checkpoints'}"]
        return []

    def _wait(self, what: str, true: Callable[[], bool]) -> None:
        """Looks until it is true, and prints how long that took. Raises NotReachedError if the job ends before."""
        began, looks = time.monotonic(), 0
        while not true():
            time.sleep(_LOOK_SECONDS)
            looks += 1
            if looks % _ASK_EVERY == 0 and (status := self._status()) is not None and status.over and not true():
                said = text_at_end(log) if (log := self._folder / "jobs" / f"{self._job}.txt").is_file() else ""
                last = (said.splitlines() or ["it printed nothing"])[-1]
                raise NotReachedError(f"{what}: job {self._job} ended before: {status.text}; {last}")
        print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)

    def _status(self) -> Status | None:
        """Returns the job's status; None while Slurm does not answer, which it may do a moment later."""
        try:
            return job_status(self._job, self._folder)
        except ConfigError:
            return None

    def _kill(self) -> None:
        """Kills all ranks of the learner, by SIGKILL to its step."""
        self._before = self._rows()
        listed = call_slurm(["squeue", "--steps", f"--job={self._job}", "--noheader", "--format=%i %j"])
        steps = [words[0] for line in listed.splitlines() if (words := line.split())[1:] == [LEARNER]]
        if not steps:
            raise NotReachedError(f"Slurm lists no running step of the learner: {listed.strip() or 'no step at all'}")
        call_slurm(["scancel", "--signal=KILL", *steps])

    def _attempt(self, restart: int) -> Path:
        return self._folder / "jobs" / f"{self._job}-{restart}"

    def _is_back(self) -> bool:
        """Returns whether the second attempt has begun; keeps the rows of the first until then, which it cuts."""
        rows = self._rows()
        if back := self._attempt(1).is_dir():
            return back
        self._before = rows
        return False

    def _rows(self) -> list[Mapping[str, Any]]:
        """Returns the rows of the steps that are recorded now."""
        path = self._folder / "metrics.jsonl"
        rows = read_jsonl(path) if path.is_file() else []
        return [row for row in rows if row["phase"] in STEPS and row["step"]]

    def _again(self, saved: int) -> list[Mapping[str, Any]]:
        """Returns rows of steps after ``saved`` that were made after the resume."""
        return [row for row in self._rows() if row["step"] > saved and row not in self._before]

    def _saved(self) -> int:
        """Returns the step of the newest checkpoint; 0 without one."""
        return max((int(path.name[5:]) for path in (self._folder / "checkpoints").glob("step_[0-9]*")), default=0)

    def _log(self) -> str:
        path = self._folder / "log.txt"
        return path.read_text(errors="replace") if path.is_file() else ""

    def _show(self, rows: Sequence[Mapping[str, Any]], begin: int = 0) -> None:
        """Prints what ran where, from the run's log after ``begin`` characters, and the seconds of steps by phase."""
        placed = (text.replace("\n", "\n  ") for text in _PLACED.findall(self._log()[begin:]))
        print(f"{job_status(self._job, self._folder).text}:", *placed, sep="\n  ")
        for row in rows:
            parts = {phase: float(row.get(f"seconds/{phase}") or 0.0) for phase in PHASE_SECONDS}
            told = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in parts.items() if seconds >= 0.05)
            print(f"  step {row['step']}: {row['seconds/step']:.1f} s ({told})", flush=True)

    def _compare(self, again: Sequence[Mapping[str, Any]]) -> None:
        """Raises NotReachedError if a step that was made twice differs where it may not."""
        then = {row["step"]: deterministic(row) for row in self._before}
        for now in (deterministic(row) for row in again):
            if (before := then.get(now["step"])) is None:
                continue
            unlike = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            if not unlike:
                print(f"step {now['step']} ran twice, with bit-equal results")
            elif self._is_exact:
                raise NotReachedError(f"step {now['step']} ran twice, and differs in {', '.join(unlike)}")
            else:
                print(f"step {now['step']} ran twice, and differs in {len(unlike)} metrics, as GPUs and servers may")
