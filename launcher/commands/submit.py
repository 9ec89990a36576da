"""``rl-megatron submit``: a checked configuration becomes a job script in the run's folder, and a job.

Runs on a login node: imports neither torch nor megatron.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from launcher.build.model import starting_shape
from launcher.commands.smoke import SUFFIX, smoke_of, watch_smoke
from launcher.commands.status import job_commands
from launcher.hosts.slurm.calls import call_slurm, parse_script
from launcher.hosts.slurm.script import code_folder, job_script, show_code
from launcher.preflight.checks import Preflight, preflight
from launcher.runs.folder import choose, lock
from rl_megatron.config.beside import separate
from rl_megatron.config.errors import explain_errors
from rl_megatron.config.io import load_config, resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.entries import PLANNER, load_own
from rl_megatron.errors import ConfigError
from rl_megatron.files import remove_folder, write_atomically
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import Placement, made_up_nodes, placement_of
from rl_megatron.placement.seats import Seat, describe_seats, seats_of

_LOCK = "submit.lock"
_PREPARED = {"config.yaml", "job.sbatch", "placement.txt", "jobs", "code", _LOCK}


def submit(
    config: Annotated[str, typer.Argument(help="a name under conf/, or a YAML file", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="write and check the script, but do not submit it")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="submit two steps of the run instead, kill them, wait for the resume; status 1 if it fails"
        ),
    ] = False,
) -> None:
    """Train on a Slurm cluster: check the configuration, write the job's script to runs/<name>/ and submit it."""
    if smoke and dry_run:
        raise ConfigError("--smoke submits a job and waits for it, but --dry-run submits none; leave one out")
    loaded, stem = load_config(config, overrides or []), Path(config).stem
    if smoke:
        loaded, stem = smoke_of(for_slurm(loaded)), f"{stem}{SUFFIX}"
    with prepare(loaded, stem) as job:
        print(job.checked.describe(), job.findings.describe(), sep="\n", flush=True)
        verify_script(job, cluster=not dry_run)
        if dry_run:
            print(f"nothing was sent; this sends it: sbatch {job.script}")
            return
        sent = send(job)
        commands = job_commands(job.folder, sent, array=bool(loaded.slurm.array))
        print(f"job {sent}: {job.folder}", *commands, sep="\n", flush=True)
    if smoke and not watch_smoke(loaded, job.folder, sent):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The resources of a configuration: placements on nodes with made-up names, and the fullest GPU, if known."""

    placement: Placement
    separate: tuple[Placement, ...]  # of roles with their own ranks
    seats: tuple[Seat, ...]
    roles: str  # the models that the learner's ranks hold beside the policy
    memory: str  # the line about the fullest GPU, if it is known

    def describe(self) -> str:
        """Lines to show."""
        others = (other.describe() for other in self.separate)
        lines = self.placement.describe(), self.roles, *others, describe_seats(self.seats), self.memory
        return "\n".join(filter(None, lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job that is ready to be submitted; the run's folder holds all of it."""

    folder: Path
    created: bool  # whether the folder is new; else a dry run's, whose job may have been sent by hand
    script: Path
    checked: Checked
    findings: Preflight


def checked(config: RunConfig) -> Checked:
    """Place all ranks and servers. Raises ConfigError if they do not fit; `preflight` finds all other problems."""
    nodes = made_up_nodes(config)
    placements = [placement_of(config, nodes[role], role) for role in (LEARNER, *separate(config))]
    seats = seats_of(config, nodes[LEARNER], nodes.get("engines", ()))
    known = config.model.path is not None
    placement, *others = placements
    return Checked(
        placement=placement,
        separate=tuple(others),
        memory=load_own(PLANNER, "fullest")(config, starting_shape(config)) if known else "",
        seats=seats,
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
    return f"in every rank beside the policy: {', '.join(held)}" if held else ""


def for_slurm(config: RunConfig) -> RunConfig:
    """The configuration as a job's. Raises ConfigError by the rules that involve the launcher."""
    if config.run.launcher == "local":
        config = config.model_copy(update={"run": config.run.model_copy(update={"launcher": "slurm"})})
    try:
        return RunConfig.model_validate(config.model_dump())
    except ValidationError as error:
        raise ConfigError("\n".join(explain_errors(error.errors()))) from error


def unsent(folder: Path) -> bool:
    """Whether the folder holds a dry run alone, whose job may be sent by hand: Slurm writes nothing until it starts."""
    jobs = folder / "jobs"
    return jobs.is_dir() and not any(jobs.iterdir()) and {p.name for p in folder.iterdir()} <= _PREPARED


def _advice(folder: Path) -> str:
    script = folder / "job.sbatch"
    if unsent(folder):
        return f"sbatch {script} sends the job that a dry run of other keys left there, or "
    return f"sbatch {script} continues it once it has ended, or " if script.is_file() else ""


@contextlib.contextmanager
def prepare(config: RunConfig, config_name: str) -> Iterator[Prepared]:
    """A new run's folder (`choose`), or that of a dry run of the same job, with config.yaml, job.sbatch and
    placement.txt, which no other submit takes while the context is open. Raises ConfigError before it writes any."""
    config = for_slurm(config)
    findings = preflight(config, for_job=True)
    findings.raise_problems()
    found = checked(config)
    held = set[Path]()

    def free(path: Path) -> bool:
        return not path.exists() or (unsent(path) and _holds(path, _files(config, path.name)))

    while True:
        named = choose(
            config,
            config_name,
            resume=False,
            taken=lambda path: path in held or not free(path),
            advice=_advice,
        )
        held.add(own := named.run.dir / str(named.run.name))
        folder, files = Path.cwd() / own, _files(config, own.name)
        created = not folder.exists()
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("ab") as file:
            if lock(file) and free(folder):  # since it was chosen another may have sent its job
                show_code(folder)
                for name, data in files.items():
                    write_atomically(folder / name, data, private=config.private)
                write_atomically(folder / "placement.txt", f"{found.describe()}\n".encode())
                script = folder / "job.sbatch"
                yield Prepared(folder=folder, created=created, script=script, checked=found, findings=findings)
                return


def _files(config: RunConfig, name: str) -> dict[str, bytes]:
    """What a run of this name runs, and the job's script."""
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    package = code_folder(Path.cwd() / named.run.dir / name)
    script = job_script(named, folder=Path.cwd(), python=sys.executable, package=package)
    return {"config.yaml": resolved(named), "job.sbatch": script.encode()}


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether no file in the folder differs from these."""
    return all(not (path := folder / name).is_file() or path.read_bytes() == data for name, data in files.items())


def verify_script(prepared: Prepared, *, cluster: bool) -> None:
    """Have bash parse the script, and Slurm check whether the job could ever run.

    Raises ConfigError with their message, after removing the run's folder if `prepare` made it.
    """
    try:
        parse_script(prepared.script.read_text(encoding="utf-8"))
        if cluster:
            call_slurm(["sbatch", "--test-only"], prepared.script)
    except ConfigError as error:
        if prepared.created:
            remove_folder(prepared.folder)
        if "generic resource" not in str(error):
            raise
        raise ConfigError(
            f"{error}; Slurm has no such GPUs here: request a kind that it has, as slurm.options=[--gres=gpu:h100:8], "
            "or, if it knows of no GPUs, none by slurm.options=[--gres=none]"
        ) from error


def send(prepared: Prepared) -> str:
    """Submit the job. Returns its id, which is also written to the run's folder.

    No other submit takes the folder from then on: where sbatch fails or answers too late, Slurm may have the job.
    """
    (prepared.folder / "jobs" / "sent").touch()
    job = call_slurm(["sbatch", "--parsable"], prepared.script).strip().partition(";")[0]
    write_atomically(prepared.folder / "jobs" / "id", f"{job}\n".encode())
    return job
