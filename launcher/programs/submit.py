"""A checked configuration becomes a job script in the run's folder, and a job.

Runs on a login node: imports neither torch nor megatron.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from launcher.build.model import starting_shape
from launcher.hosts.slurm.calls import call_slurm, parse_script
from launcher.hosts.slurm.script import PACKAGE, job_script
from launcher.preflight.checks import Preflight, preflight
from launcher.runs.lock import lock
from launcher.runs.name import choose
from rl_megatron.config.beside import separate
from rl_megatron.config.errors import explain_errors
from rl_megatron.config.io import save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.durable import remove_folder, write_atomically
from rl_megatron.errors import ConfigError
from rl_megatron.placement.names import LEARNER, called
from rl_megatron.placement.nodes import made_up_nodes, service_nodes
from rl_megatron.placement.ranks import Placement, placement_of
from rl_megatron.placement.seats import Seat, describe_seats, seats_of
from rl_megatron.scaling.memory import GB, Footprint, check_memory

_LOCK = "submit.lock"
_PREPARED = {"config.yaml", "job.sbatch", "placement.txt", "jobs", _LOCK}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The resources of a configuration: placements on nodes with made-up names, and the fullest GPU, if known."""

    placement: Placement
    separate: tuple[Placement, ...]  # of roles with their own ranks
    seats: tuple[Seat, ...]
    roles: str  # the models that the learner's ranks hold beside the policy
    footprint: Footprint | None
    services: Mapping[str, Sequence[str]]  # the node of each replica

    def describe(self) -> str:
        """Lines to show."""
        others = (other.describe() for other in self.separate)
        lines = list(filter(None, (self.placement.describe(), self.roles, *others, describe_seats(self.seats))))
        lines += [f"service {name}: {', '.join(nodes)}" for name, nodes in self.services.items()]
        if self.footprint is not None:
            held, most = self.footprint.total / GB, self.footprint.largest
            rank = called(self.footprint.role, self.footprint.rank)
            lines.append(f"memory: up to {held:.1f} GB a GPU ({rank}), most of it: {most}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job that is ready to be submitted; the run's folder holds all of it."""

    folder: Path
    script: Path
    checked: Checked
    findings: Preflight


def checked(config: RunConfig) -> Checked:
    """Place all ranks and servers. Raises ConfigError if they do not fit; `preflight` finds all other problems."""
    nodes = made_up_nodes(config)
    placements = [placement_of(config, nodes[role], role) for role in (LEARNER, *separate(config))]
    seats = seats_of(config, nodes[LEARNER], nodes.get("engines", ()))
    fullest = None if config.model.path is None else check_memory(config, starting_shape(config))
    placement, *others = placements
    return Checked(
        placement=placement,
        separate=tuple(others),
        footprint=fullest,
        seats=seats,
        roles=_roles(config),
        services=service_nodes(config, nodes),
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


def taken(folder: Path) -> bool:
    """Whether the folder holds a run; a folder with only an unsubmitted job is free."""
    jobs = folder / "jobs"
    only_prepared = jobs.is_dir() and not any(jobs.iterdir()) and {p.name for p in folder.iterdir()} <= _PREPARED
    return folder.exists() and not only_prepared


def _by_job(folder: Path) -> str:
    script = folder / "job.sbatch"
    return f"sbatch {script} continues it once it has ended, or " if script.is_file() else ""


@contextlib.contextmanager
def prepare(config: RunConfig, config_name: str, *, command: Sequence[str] = ("train",)) -> Iterator[Prepared]:
    """A new run's folder (`choose`) with config.yaml, job.sbatch and placement.txt, which no other submit takes while
    the context is open. Raises ConfigError before it writes any."""
    config = for_slurm(config)
    findings = preflight(config, for_job=True)
    findings.raise_problems()
    found = checked(config)
    held = set[Path]()
    while True:
        named = choose(
            config,
            config_name,
            resume=False,
            taken=lambda path: path in held or taken(path),
            advice=lambda path: _by_job(path) if "train" in command else "",  # no rehearsal goes on
        )
        held.add(own := named.run.dir / str(named.run.name))
        folder = Path.cwd() / own
        script = job_script(named, folder=Path.cwd(), python=sys.executable, package=PACKAGE, command=command)
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        with (folder / _LOCK).open("ab") as file:
            if lock(file) and not taken(folder):  # since it was chosen another may have sent its job
                save_resolved(named, folder / "config.yaml")
                write_atomically(folder / "job.sbatch", script.encode(), private=bool(named.slurm.environment))
                write_atomically(folder / "placement.txt", f"{found.describe()}\n".encode())
                yield Prepared(folder=folder, script=folder / "job.sbatch", checked=found, findings=findings)
                return


def verify_script(prepared: Prepared, *, cluster: bool) -> None:
    """Have bash parse the script, and Slurm check whether the job could ever run.

    Raises ConfigError with their message, after removing the run's folder.
    """
    try:
        parse_script(prepared.script.read_text(encoding="utf-8"))
        if cluster:
            call_slurm(["sbatch", "--test-only"], prepared.script)
    except ConfigError:
        remove_folder(prepared.folder)
        raise


def send(prepared: Prepared) -> str:
    """Submit the job. Returns its id, which is also written to the run's folder."""
    job = call_slurm(["sbatch", "--parsable"], prepared.script).strip().partition(";")[0]
    write_atomically(prepared.folder / "jobs" / "id", f"{job}\n".encode())
    return job
