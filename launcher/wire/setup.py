"""The setup that the controller sends a rank after its imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.placement.names import LEARNER


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker waits for after its imports. Folders are absolute and the same on every node."""

    config: RunConfig
    model_folder: Path
    run_folder: Path
    rendezvous: str  # a torch.distributed init method
    role: str = LEARNER
    first_device: int = 0  # of rank 0; ranks beside each other take one each
    code: Path = field(default_factory=Path.cwd)  # where, beside what is installed, the user's own modules may be
    stacks: Path | None = None  # where they go if this start hangs, as ``workers.serving`` says
