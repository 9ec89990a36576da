"""The ``slurm`` section: a job's resources, its environment, and how often it is restarted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rl_megatron.section import NUMBER, NonNegative, Positive, PositiveFloat, Section

Line = Annotated[str, Field(coerce_numbers_to_str=True, pattern=r"^[^\n\r]*$")]
Word = Annotated[str, Field(coerce_numbers_to_str=True, pattern=r"^[^\s'\"$`\\;&|<>()]+$")]
Features = Annotated[str, Field(coerce_numbers_to_str=True, pattern=r"^[^\s'\"$`\\;<>]+$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=[^\x00-\x1f\x7f]+)?")
_REQUESTS_GPUS = re.compile(r"--(gpus\b|(gres|tres-per-\w+)=(none$|.*\bgpu\b))")
_KEYS = ("nodes", "ntasks_per_node", "cpus_per_task", "time", "account", "partition", "constraint", "exclude")
_SET_BY: Mapping[str, str] = {  # options of sbatch, by the key that sets them, or submit itself
    **{key.replace("_", "-"): f"slurm.{key}" for key in _KEYS},
    **dict.fromkeys(("ntasks", "tasks-per-node"), "slurm.ntasks_per_node"),
    **dict.fromkeys(("requeue", "no-requeue"), "slurm.requeues"),
    **dict.fromkeys(("open-mode", "parsable", "test-only", "wait", "wrap", "help", "usage", "version"), "submit"),
    "mem": "slurm.memory_per_node",
    "signal": "slurm.signal_seconds",
    "job-name": "run.name",
    "output": "run.dir",
    "array": "a submit for each seed",
    "clusters": "the variable SLURM_CLUSTERS",
}


def _split_options(given: object) -> object:
    """Splits a command line's text as a shell does, or as a list: ``[--a=1,--b]``."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    try:
        return shlex.split(re.sub(r",\s*(?=[\"']?--)", " ", text[1:-1]) if text.startswith("[") else text)
    except ValueError as error:
        why = {"why": str(error).lower()}
        raise PydanticCustomError("words", "Input should be options as in a shell: {why}", why) from error


def _check_options(options: tuple[str, ...]) -> tuple[str, ...]:
    for option in options:
        found = _OPTION.fullmatch(option)
        if found is None:
            raise PydanticCustomError(
                "option", "Input should be options of sbatch, each as --name or --name=value, with quotes around spaces"
            )
        for name, key in _SET_BY.items():
            if name.startswith(found[1]):  # sbatch takes abbreviations
                given = {"name": name, "key": key}
                raise PydanticCustomError("of_the_job", "Input should be without --{name}, which {key} sets", given)
    return options


def _check_duration(given: str) -> str:
    if re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", given, re.ASCII) is None:
        raise PydanticCustomError(
            "words", "Input should be a time limit of Slurm, as 240 (minutes), 4:00:00 or 1-12:00:00"
        )
    return given


Duration = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_check_duration)]
Options = Annotated[tuple[str, ...], BeforeValidator(_split_options), AfterValidator(_check_options)]
SignalSeconds = Annotated[int, Field(ge=1, le=65_535), NUMBER]  # limits of sbatch --signal


class SpeedsSection(Section):
    """Speeds by which ``plan`` and ``submit`` estimate pushes and predict steps. They change no run."""

    gpu: str | None = None
    """Kind of the GPUs, by which ``plan`` and ``submit`` predict a step's seconds by phase, as h100, or a YAML file as
    ``rl-megatron scale`` takes (docs/cluster.md), which has the speeds of links and files, too; null: they say only
    what no step can beat, on an H100."""
    mean_tokens: PositiveFloat | None = None
    """Mean length of completions, in tokens, of the predicted step; null: half of rollout.max_new_tokens."""


class EngineNodesSection(Section):
    """Nodes for engine servers alone, which are like the learner's."""

    nodes: NonNegative = 0
    """Number of the servers' nodes, in addition to ``slurm.nodes``; 0: servers share the learner's nodes."""
    container: Word | None = None
    """Image of the container that servers run in, on whatever nodes; null: no container. ``rollout.python`` is an
    interpreter inside the image; ``slurm.container_runtime`` and ``slurm.container_mounts`` hold for it too."""


class SlurmSection(Section):
    """A job of ``rl-megatron submit`` (docs/cluster.md), whose nodes are alike: the learner, the critic, the reference,
    teachers, reward models and the engine servers take theirs in this order. A key that is null leaves the cluster's
    default."""

    nodes: Positive = 1
    """Number of the learner's nodes."""
    ntasks_per_node: Positive | None = None
    """Learner ranks on each node, on its GPUs from the first on, one each; null: one for each GPU, or without GPUs an
    equal share of the ranks."""
    gpus_per_node: NonNegative = 0
    """GPUs of each node; 0: the job requests none. ``slurm.options`` may request them in other ways."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of a GPU, in 1e9 bytes: ``submit`` refuses a run that needs more; null: no check."""
    nvlink_nodes: Positive = 1
    """Number of neighboring nodes that NVLink joins, as the 18 nodes of 4 GPUs in a rack; tensor parallelism may span
    them."""
    speeds: SpeedsSection = SpeedsSection()
    engines: EngineNodesSection = EngineNodesSection()
    cpus_per_task: Positive | None = None
    """CPU cores of each rank. null: the job asks for no number of them, and what runs on a node shares those that the
    job has there."""
    memory_per_node: Word | None = None
    """Memory of each node, as in 500G; 0 is all."""
    time: Duration = "24:00:00"
    """Time limit of one job: minutes, hours:minutes:seconds or days-hours. The next job continues the run."""
    account: Word | None = None
    """Account that the job is charged to."""
    partition: Word | None = None
    """Partition that the job runs in."""
    constraint: Features | None = None
    """Features that the nodes must have."""
    exclude: Word | None = None
    """Nodes that the job must not use."""
    options: Options = ()
    """More options of sbatch, as [--gres=gpu:h100:8,--dependency=afterok:123]. One that requests GPUs
    replaces the request for ``slurm.gpus_per_node``; --gres=none removes it."""
    signal_seconds: SignalSeconds = 300
    """How long before the time limit the run saves a checkpoint and requests the next job; set it longer than a step
    and a checkpoint take. An evaluation does not count, but for the last step's."""
    requeues: NonNegative = 100
    """How many restarts a job may have had to come back after a time limit; Slurm counts those after preemption and
    failures too. Once they are used up the run is saved, and the job fails."""
    restarts: NonNegative = 3
    """Most restarts of a job, without the failed node, after a rank died, from one checkpoint: with each newer one they
    count from 0 again. Other errors end the run."""
    setup: Line | None = None
    """A shell command that the job runs before the run starts, as in: module load cuda && source /opt/site/env.sh; with
    a status other than 0 the job ends. The job's shell runs the text of no other key."""
    environment: Mapping[Variable, Line] = Field(default_factory=dict)
    """Environment variables of the job, by name, set as they are written; slurm.setup may use $X."""
    python: Word | None = None
    """Python interpreter of the job, on every node; null: the one that runs ``submit``. The controller runs in it,
    outside of containers, and needs torch there."""
    container: Word | None = None
    """Image of the container that ranks run in; null: no container. Servers have ``slurm.engines.container``; the
    controller, which starts all of them by srun, is in none (docs/cluster.md)."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """How ranks start in the container: by srun --container-image (pyxis), or by apptainer exec."""
    container_mounts: Word | None = None
    """Folders to mount in containers, as in /data:/data,/home. They must see the run's folder, the one in which
    ``submit`` was called and this package under the same paths as outside."""
    container_python: Word = "python"
    """Python interpreter inside the image."""

    def tasks_per_node(self, ranks: int) -> int:
        """Learner ranks on each node if there are ``ranks`` in all, rounded up."""
        return self.ntasks_per_node or self.gpus_per_node or -(-ranks // self.nodes)

    @property
    def options_request_gpus(self) -> bool:
        """True if ``options`` say which GPUs the job gets."""
        return any(_REQUESTS_GPUS.match(option) for option in self.options)

    def cores(self, ranks: int) -> int | None:
        """Returns the CPU cores of this many learner ranks; None: all that the job has."""
        return None if self.cpus_per_task is None else self.cpus_per_task * ranks

    def container_options(self, image: str | None, folder: Path) -> list[str]:
        """The options of srun that make pyxis start a container of ``image`` in ``folder``; None: no container.

        Without them the image's own folder and variables would win.
        """
        if image is None or self.container_runtime != "pyxis":
            return []
        mounts = [f"--container-mounts={self.container_mounts}"] if self.container_mounts else []
        names = ",".join(sorted({"PYTHONPATH", *self.environment}))
        return [f"--container-image={image}", *mounts, f"--container-workdir={folder}", f"--container-env={names}"]

    def container_prefix(self, image: str | None) -> list[str]:
        """The apptainer command that precedes the one to run in a container of ``image``; None: no container."""
        if image is None or self.container_runtime != "apptainer":
            return []
        binds = [f"--bind={self.container_mounts}"] if self.container_mounts else []
        return ["apptainer", "exec", *(["--nv"] if self.gpus_per_node else []), *binds, image]


def parse_minutes(time: str) -> float:
    """Returns the minutes of a time limit, as Slurm reads 90, 90:00, 1:30:00, 2-12 and 2-12:30:00."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return (int(days) * 24 + hours) * 60 + minutes + seconds / 60
    hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts, 0][:3]
    return hours * 60 + minutes + seconds / 60
