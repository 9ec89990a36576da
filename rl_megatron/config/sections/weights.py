"""The ``weights`` section: how the learner's weights reach the rollout engines."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rl_megatron.section import OwnCode, Positive, Section


class WeightsSection(Section):
    """How the learner's weights reach the rollout engines (docs/weights.md says what each transport is for)."""

    transport: Literal["process_group", "shared_memory", "cuda_ipc", "memory", "disk"] | OwnCode = "process_group"
    """process_group: gloo or NCCL; shared_memory, cuda_ipc: one node; memory: one process; disk: a folder all see.
    ``package.module:name`` is a function of your own that makes a Transport (docs/weights.md). Its code is run."""
    verify: bool = True
    """Whether receivers compare a 64-bit digest of every box that they hold with the sender's. What engine servers
    hold is verified in any case, by checksums of their own (docs/engines.md)."""
    delta: bool = False
    """Whether to send only what changed since the version before; transport=process_group."""
    bucket_mb: Positive = 64
    """Most MiB that a process packs and sends at once; transport=process_group or cuda_ipc."""
    folder: Path | None = None
    """Where transport=disk keeps the newest version; null: ``weights`` in the run's folder."""
