"""The jobs of a run, what each reads of the configuration, and the ``sft`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rl_megatron.section import Positive, PositiveFloat, Section

JobName = Literal["rl", "sft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """``samples``: whether engines sample from the policy. ``reads``: the sections and keys that the job reads; None:
    all but ``unread``."""

    samples: bool
    reads: tuple[str, ...] | None = None
    unread: tuple[str, ...] = ()


JOBS: Mapping[JobName, JobKind] = {
    "rl": JobKind(samples=True, unread=("sft", "data.messages_field", "data.tools_field")),
    "sft": JobKind(
        samples=False,
        reads=(
            *("job", "seed", "run", "model", "data", "learner", "sft", "slurm"),
            *("train.steps", "train.learning_rate", "train.lr_warmup_steps", "train.lr_decay", "train.on_nonfinite"),
            *("eval.every", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_every", "checkpoint.async_save"),
            *("log.progress", "log.tensorboard", "log.wandb", "log.wandb_project"),
        ),
        unread=("data.rejected_field", "data.curriculum", "slurm.engines"),
    ),
}
"""The jobs by the value of ``job``."""


class SftSection(Section):
    """Supervised fine-tuning on what somebody wrote (docs/sft.md); ``job=sft`` reads this, and no other job does."""

    batch_size: Positive = 64
    """Rows of the data for an optimizer step."""
    epochs: PositiveFloat | None = None
    """Passes over the data, which say how many steps there are, the last one begun counting whole; null: train.steps
    says so."""
    max_tokens: Positive = 1024
    """Most tokens of a sequence, prompt and answers together."""
    on_long: Literal["fail", "drop", "cut"] = "fail"
    """What to do with a longer sequence: end the run and name it (fail), not train on it (drop), or train on what of
    it fits, without its end (cut). Metrics count the dropped and the cut ones."""
