"""The setup that the controller sends a rank after its imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import LEARNER


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The setup of a worker. Folders are absolute and the same on every node."""

    config: RunConfig
    model_folder: Path
    run_folder: Path
    rendezvous: str  # a torch.distributed init method
    role: str = LEARNER
    first_device: int = 0  # on each node its first rank's; neighbouring ranks take one each
    ranks_per_node: int | None = None  # None: all are on one
    code: Path = field(default_factory=Path.cwd)  # the folder of the user's own modules
    stacks: Path | None = None  # the folder for stacks if this start hangs

    def gpu_of(self, rank: int) -> int:
        """The number of the rank's GPU among those of its node."""
        return self.first_device + (rank if self.ranks_per_node is None else rank % self.ranks_per_node)
