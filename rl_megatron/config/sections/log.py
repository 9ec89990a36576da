"""The ``log`` and ``profile`` sections: what a run shows, and what it records beside metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_megatron.section import LISTED, NonNegative, Positive, Section


class LogSection(Section):
    """What a run shows, and what it records besides metrics.jsonl."""

    progress: Literal["auto", "live", "plain"] = "auto"
    """Show progress as a live panel, as plain lines, or as whichever suits the terminal (auto)."""
    samples_per_step: NonNegative = 4
    """Number of groups per step of which completions are written to samples.jsonl."""
    samples_per_group: Positive = 4
    """How many completions of each of them, to read beside one another; a group has ``rollout.group_size``."""
    tensorboard: bool = True
    """Whether to write TensorBoard files. Where the disk refuses them, a warning says so and the run goes on without,
    until a resume."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Send metrics to Weights & Biases (online), or store them to send later (offline). Where
    that fails, or takes no row for half a minute, a warning says so and the run goes on without, until a resume."""
    wandb_project: str = "rl_megatron"
    """Project at Weights & Biases."""


class ProfileSection(Section):
    """Kernels and operators of chosen steps, by torch's profiler (docs/running.md)."""

    steps: Annotated[tuple[Positive, ...], LISTED] = ()
    """Steps to profile, as a list or text as 3,4."""
    ranks: Annotated[tuple[NonNegative, ...], LISTED, Field(min_length=1)] = (0,)
    """Ranks of each role to profile."""
    memory: bool = False
    """Record where a rank's GPU memory was allocated, and write that as a snapshot where it runs out."""
