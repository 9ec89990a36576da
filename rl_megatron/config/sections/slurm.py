"""The ``slurm`` section: a job's resources, its environment, and how often it is restarted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rl_megatron.section import NonNegative, Positive, PositiveFloat, Section

Line = Annotated[str, Field(coerce_numbers_to_str=True, pattern=r"^[^\n\r]*$")]
Word = Annotated[str, Field(coerce_numbers_to_str=True, pattern=r"^[^\s'\"$`\\;&|<>()]+$")]
Features = Annotated[str, Field(coerce_numbers_to_str=True, pattern=r"^[^\s'\"$`\\;<>]+$")]
Modules = Annotated[str, Field(pattern=r"^[\w./+:=@~-]+( +[\w./+:=@~-]+)*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Duration = Annotated[str, Field(coerce_numbers_to_str=True, pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")]


class RoleNodesSection(Section):
    """Nodes for one role alone. All but the number wants ``slurm.heterogeneous``."""

    nodes: NonNegative = 0
    """How many, beside ``slurm.nodes``; 0: as many as those."""
    gpus_per_node: NonNegative | None = None
    """GPUs of each; null: as the learner's nodes."""
    memory_per_node: Word | None = None
    """As in 500G; null: as the learner's nodes."""
    partition: Word | None = None
    """Where they are; null: as the learner's nodes."""
    constraint: Features | None = None
    """Features that they must have; null: as the learner's nodes."""

    @property
    def shaped(self) -> bool:
        """Whether they are asked for in other words than the learner's."""
        return self.model_dump(exclude={"nodes"}) != type(self)().model_dump(exclude={"nodes"})


class EngineNodesSection(RoleNodesSection):
    """Nodes for engine servers alone (rollout=vllm or sglang). All but their number wants ``slurm.heterogeneous``."""

    nodes: NonNegative = 0
    """How many, beside ``slurm.nodes``; 0: servers share the learner's nodes."""
    cpus_per_server: Positive | None = None
    """CPU cores of a server; null: as a learner rank."""


class CriticNodesSection(RoleNodesSection):
    """Nodes of a critic's ranks (roles.critic=separate). All but their number wants ``slurm.heterogeneous``."""


class ReferenceNodesSection(RoleNodesSection):
    """Nodes of a reference's ranks (roles.reference=separate). All but their number wants ``slurm.heterogeneous``."""


class SlurmSection(Section):
    """A job of ``rl-megatron submit`` (slurm/README.md). What is null is the cluster's default."""

    nodes: Positive = 1
    """Nodes of the learner."""
    ntasks_per_node: Positive | None = None
    """Learner ranks on each node; null: as many as GPUs, or without GPUs all ranks shared out over the nodes."""
    gpus_per_node: NonNegative = 0
    """GPUs of each node."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of a GPU, in 1e9 bytes: what would not fit is refused before the job is sent; null: nothing is checked."""
    nvlink_nodes: Positive = 1
    """Neighbouring nodes that NVLink joins, as the 18 of 4 GPUs in a rack; tensor parallelism may span them."""
    engines: EngineNodesSection = EngineNodesSection()
    critic: CriticNodesSection = CriticNodesSection()
    reference: ReferenceNodesSection = ReferenceNodesSection()
    heterogeneous: bool = False
    """Whether each role with nodes of its own is a component of a heterogeneous job; else a job of like nodes is cut:
    the learner's, the critic's, the reference's, the engine servers'."""
    cpus_per_task: Positive | None = None
    """CPU cores of a rank."""
    memory_per_node: Word | None = None
    """As in 500G; 0 is all of a node's."""
    time: Duration = "24:00:00"
    """Limit of one job: minutes, hours:minutes:seconds or days-hours. The run goes on in the next."""
    account: Word | None = None
    """Who pays."""
    partition: Word | None = None
    """Where the job may run."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Features | None = None
    """Features that nodes must have."""
    exclude: Word | None = None
    """Nodes that the job must not use."""
    reservation: Word | None = None
    """Reservation to use."""
    array: Word | None = None
    """As in 0-3: a run for each index, in a folder of its own, and with the index added to the seed."""
    dependency: Word | None = None
    """As in afterok:123."""
    signal_seconds: Positive = 300
    """How long before the time limit the run saves and asks for the next job; longer than a step and a checkpoint."""
    requeues: NonNegative = 100
    """Most restarts of a run after a time limit."""
    restarts: NonNegative = 3
    """Most restarts of a run after a rank died, without its node; other errors end it at once."""
    modules: Modules | None = None
    """Environment modules to load, separated by spaces."""
    setup: Line | None = None
    """A shell command of your own before the run starts, as in: source /opt/site/env.sh. No other key's text is run."""
    environment: Mapping[Variable, Line] = Field(default_factory=dict)
    """Variables of the job."""
    python: Word | None = None
    """The interpreter of the job, on every node; null: the one that submits."""
    container: Word | None = None
    """Image that ranks run in; null: the interpreter itself."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """pyxis: srun's --container-image; apptainer: apptainer exec."""
    container_mounts: Word | None = None
    """As in /data:/data,/home: the run's folder and this package must be seen in it under the same paths."""
    container_python: Word = "python"
    """The interpreter inside the image."""

    def tasks_per_node(self, ranks: int) -> int:
        """Learner ranks on each node, of ``ranks`` in all; too many rather than too few."""
        return self.ntasks_per_node or self.gpus_per_node or -(-ranks // self.nodes)

    @property
    def engine_gpus(self) -> int:
        """GPUs of each node that engine servers run on."""
        return self.gpus_of("engines")

    def alone(self, role: str) -> RoleNodesSection:
        """What is asked for a role's own nodes."""
        section: RoleNodesSection = getattr(self, role)
        return section

    def gpus_of(self, role: str) -> int:
        """GPUs of each of a role's own nodes."""
        given = self.alone(role).gpus_per_node
        return self.gpus_per_node if given is None else given

    def container_options(self) -> list[str]:
        """What pyxis adds to srun."""
        if self.container is None or self.container_runtime != "pyxis":
            return []
        mounts = [f"--container-mounts={self.container_mounts}"] if self.container_mounts else []
        return [f"--container-image={self.container}", *mounts]

    def container_prefix(self) -> list[str]:
        """What apptainer puts before a rank's command."""
        if self.container is None or self.container_runtime != "apptainer":
            return []
        binds = [f"--bind={self.container_mounts}"] if self.container_mounts else []
        return ["apptainer", "exec", *(["--nv"] if self.gpus_per_node else []), *binds, self.container]
