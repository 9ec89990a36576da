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
    first_device: int = 0  # rank 0's; neighbouring ranks on a node take one each
    code: Path = field(default_factory=Path.cwd)  # the folder of the user's own modules
    stacks: Path | None = None  # the folder for stacks if this start hangs
