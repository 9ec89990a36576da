"""The jobs of a run, the keys that each reads, and the sections of jobs that train on written text.

The ``checkpoint`` section: when a run saves itself, and what it keeps.

The ``log`` and ``profile`` sections: what a run shows, and what it records besides metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rl_megatron.config.sections.algorithm import UNPAIRED, PreferenceSection
from rl_megatron.section import LISTED, Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

JobName = Literal["rl", "sft", "dpo", "reward_model"]
RowsOf = Literal["answers", "pairs", "labels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """``samples``: whether engines sample from the policy. ``rows``: what a row of its data is: one of ``answers``; one
    of ``pairs``, a better and a worse answer, which are trained on side by side; or one of ``labels``, an answer and
    whether that is desirable, as with ``dpo.loss=kto``. ``scores``: whether its model gives a text a score in place of
    log-probs. ``reference``: whether it may compare with a frozen model. ``reads``: the sections and keys that the job
    reads; None: all but ``unread``."""

    samples: bool = False
    rows: RowsOf = "answers"
    scores: bool = False
    reference: bool = False
    reads: tuple[str, ...] | None = None
    unread: tuple[str, ...] = ()


_WRITTEN = (
    *("job", "seed", "run", "model", "data", "learner", "slurm"),
    *("train.steps", "train.learning_rate", "train.lr_warmup_steps", "train.lr_decay", "train.lr_min"),
    *("eval.every", "checkpoint.every", "checkpoint.keep", "checkpoint.async_save"),
    *("log.progress", "log.sinks", "log.project"),
    *("profile.steps", "profile.memory"),
)
_UNREAD = ("data.curriculum", "data.fields.demonstration", "slurm.engines")
JOBS: Mapping[JobName, JobKind] = {
    "rl": JobKind(
        samples=True,
        unread=(
            *("sft", "dpo", "reward_model"),
            *("data.fields.messages", "data.fields.tools", "data.fields.context"),
            *("data.fields.rejected", "data.fields.margin"),
        ),
    ),
    "sft": JobKind(reads=(*_WRITTEN, "sft"), unread=(*_UNREAD, "data.fields.rejected", "data.fields.margin")),
    "dpo": JobKind(
        rows="pairs",
        reference=True,
        reads=(*_WRITTEN, "dpo", "algorithm.kl.reference", "roles.reference", "roles.layouts"),
        unread=(*_UNREAD, "data.fields.margin"),
    ),
    "reward_model": JobKind(
        rows="pairs", scores=True, reads=(*_WRITTEN, "reward_model"), unread=(*_UNREAD, "learner.head_dtype")
    ),
}
"""The jobs by the value of ``job``."""


class WarmStartSection(Section):
    """Supervised steps on correct answers with the same learner before RL; they end early at ``stop_at_accuracy``."""

    steps: NonNegative = 0
    """Most supervised steps; 0 means no warm start."""
    batch_size: Positive = 256
    """Problems per supervised step."""
    learning_rate: PositiveFloat = 3e-3
    """Constant learning rate of the supervised steps."""
    check_every: Positive = 20
    """Supervised steps between evaluations."""
    stop_at_accuracy: Fraction = 1.0
    """Held-out accuracy that ends the warm start; a model that has it before the first step makes none."""


class WrittenSection(Section):
    """Keys of every job on written text."""

    batch_size: Positive = 64
    """Rows of the data for an optimizer step."""
    epochs: PositiveFloat | None = None
    """Passes over the data, of a mixture over as many rows as all sources have (docs/data.md), which say how many
    steps there are, the last one begun counting whole; null: train.steps says so."""
    max_tokens: Positive = 1024
    """Most tokens of a sequence, prompt and answers together."""
    on_long: Literal["fail", "drop", "cut"] = "fail"
    """What to do with a longer sequence: end the run and name it (fail), not train on its row (drop), or train on what
    of it fits, without its end (cut). Metrics count the dropped and the cut ones."""
    on_refused: Literal["fail", "drop"] = "fail"
    """What to do with a row that gives no sequence, because its messages have no known form, the chat template rejects
    them or no token ends a turn (docs/sft.md): end the run and name it (fail), or not train on it (drop), and count
    it."""


class SftSection(WrittenSection):
    """Supervised fine-tuning on written text (docs/sft.md); ``job=sft`` reads this, and no other job does."""


class PairsSection(WrittenSection):
    """Keys of jobs on pairs of answers."""

    on_long: Literal["fail", "drop"] = "fail"
    """What to do with a longer sequence: end the run and name it (fail), or not train on its row (drop). Metrics count
    the dropped ones."""


class DpoSection(PreferenceSection, PairsSection):
    """Preference optimization on written pairs (docs/sft.md); ``job=dpo`` reads this, and no other job does."""

    key: ClassVar[str] = "dpo"
    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference: with loss=dpo that of a pair is -log sigmoid(beta * margin), and margin is
    the better answer's log pi/ref less the worse one's; with loss=orpo the weight of the odds ratio's loss."""
    desirable_weight: PositiveFloat = 1.0
    """loss=kto: weight of rows with the label true."""
    undesirable_weight: PositiveFloat = 1.0
    """loss=kto: weight of rows with the label false."""

    @property
    def is_unpaired(self) -> bool:
        """True if rows are single answers with a label."""
        return self.loss in UNPAIRED


class RewardTrainingSection(PairsSection):
    """Training of a reward model (docs/sft.md); ``job=reward_model`` reads this, and no other job does."""

    centring: NonNegativeFloat = 0.0
    """Weight in the loss of the mean over pairs of the squared sum of both scores, which keeps them around 0
    (arXiv:2312.09244); 0.01 is common."""


CHECKPOINT = re.compile(r"(warm_start|step)_(\d{6,})")
"""The names of checkpoints in a run's ``checkpoints`` folder, whose other files are the user's."""


class CheckpointSection(Section):
    """Checkpoints of everything that a resume needs. ``every=0``: only after a warm start and after the last step."""

    every: NonNegative = 25
    """Steps between checkpoints."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_best: NonNegative = 0
    """Number of further checkpoints to keep, of the highest ``eval/accuracy``, of equal ones the later; ``every`` is
    then a multiple of eval.every. After a resume that measures it otherwise, as on another set, this many of each way
    of measuring are kept."""
    async_save: bool = True
    """Whether training continues while a checkpoint is written: it waits until the state is copied in the host's
    memory, which a rank keeps for the next one. A kill leaves the checkpoint before; a stop, the run's end and the next
    checkpoint wait for the pending one. false: training waits until it is written, and no copy is held."""


SinkName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*(:.*)?$")]
_LOCAL_SINKS = ("tensorboard", "prometheus", "webhook")


def _check_sinks(sinks: tuple[str, ...]) -> tuple[str, ...]:
    names = [one.partition(":")[0] for one in sinks]
    for name in names:
        if names.count(name) > 1:
            raise PydanticCustomError("sinks", "Input should be different sinks, not {name} twice", {"name": name})
    return sinks


class LogSection(Section):
    """Display of a run's progress, and records besides metrics.jsonl."""

    progress: Literal["auto", "live", "plain"] = "auto"
    """Show progress as a live panel, as plain lines, or as whichever suits the terminal (auto)."""
    samples_per_step: NonNegative = 4
    """Number of groups per step with completions in samples.jsonl, the first four of each."""
    sinks: Annotated[tuple[SinkName, ...], LISTED, AfterValidator(_check_sinks)] = ("tensorboard",)
    """The sinks that get metrics, too (docs/cluster.md), as a list or text such as tensorboard,wandb. The sink
    wandb:offline stores metrics to send later. A sink that fails or hangs does not end the run."""
    project: str = "rl_megatron"
    """Project at Weights & Biases, and experiment at MLflow."""

    @property
    def names_project(self) -> bool:
        """True if a sink reads ``project``: each may, but those that are local."""
        return any(one.partition(":")[0] not in _LOCAL_SINKS for one in self.sinks)


class ProfileSection(Section):
    """Kernels and operators of chosen steps, by torch's profiler (docs/troubleshooting.md)."""

    steps: Annotated[tuple[Positive, ...], LISTED] = ()
    """Steps to profile, on the first rank of each role, as a list or text as 3,4."""
    memory: bool = False
    """Record where a rank's GPU memory was allocated, and write that as a snapshot where it runs out."""
