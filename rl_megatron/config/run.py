"""The configuration (larger sections have files of their own): frozen pydantic, defaults, nothing heavy imported.

A key is `section.name`; YAML under conf/ holds only what differs. Rules over several sections are checks.py's. Reading
YAML and `key=value` is io.py's work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_megatron.config.checks import problems_of
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.config.sections.data import ArithmeticData, FileData
from rl_megatron.config.sections.learner import LearnerSection, RolesSection
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.config.sections.weights import TransportKind, WeightsSection
from rl_megatron.section import Finite, Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class RunSection(Section):
    """Where a run writes: ``<dir>/<name>/``. Without a name, the config's name and a free number are taken."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] | None = None
    """Folder name of the run."""
    dir: Path = Path("runs")
    """Folder in which run folders are made."""
    launcher: Literal["local", "slurm", "ray"] = "local"
    """local: learner processes on this machine; slurm: on the nodes of the allocation, as ``submit`` sets; ray: as
    Ray actors on the nodes of the allocation, or without one on this machine."""
    watchdog_seconds: PositiveFloat | None = None
    """How long a learner process may make no progress in what it computes, and the controller stand still; null: 0.8 of
    learner.timeout_seconds."""
    watchdog_disk_seconds: PositiveFloat = 3600.0
    """The same while a learner process reads or writes a model or a checkpoint."""


class TinyModelSection(Section):
    """Sizes of the random-weight Qwen3-MoE that is made (once, cached) when ``model.path`` is not set."""

    hidden_size: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive | None = None
    """Null: 16; where servers sample 32, in half as many heads (engines' CPU kernels have none smaller)."""
    num_experts: Positive = 8
    experts_per_token: Positive = 2
    expert_width: Positive = 32
    max_position_embeddings: Positive = 1024
    tie_embeddings: bool = False


class ModelSection(Section):
    """The model to train: a Hugging Face folder, or a tiny one made on the spot."""

    path: Path | None = None
    """Hugging Face folder of the model to start from; null makes the tiny one."""
    name: str | None = None
    """The public model that ``path`` must hold, for whose sizes the configuration is made, as in qwen3-30b-a3b."""
    tiny: TinyModelSection = TinyModelSection()
    cache_dir: Path = Path("runs/.cache")
    """Folder that keeps the tiny model between runs."""


class WarmStartSection(Section):
    """Supervised steps on correct answers by the same learner, before RL; ends early at ``stop_at_accuracy``."""

    steps: NonNegative = 0
    """Most supervised steps; 0: no warm start."""
    batch_size: Positive = 256
    """Problems of a supervised step."""
    learning_rate: PositiveFloat = 3e-3
    """Constant rate of the supervised steps."""
    check_every: Positive = 20
    """Supervised steps between evaluations."""
    stop_at_accuracy: Fraction = 1.0
    """Held-out accuracy that ends the warm start."""


class TrainSection(Section):
    """The RL loop. ``epochs`` * ``minibatches`` optimizer steps are made on each rollout batch."""

    steps: NonNegative = 100
    """Rollout batches to train on."""
    minibatches: Positive = 2
    """Parts of a rollout batch, each for one optimizer step."""
    epochs: Positive = 1
    """Passes over a rollout batch, each with minibatches of its own."""
    learning_rate: PositiveFloat = 1e-3
    """Rate after the warm-up."""
    lr_warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    lr_decay: Literal["none", "linear", "cosine"] = "none"
    """Shape after the warm-up; linear and cosine fall towards 0."""
    max_staleness: NonNegative = 0
    """Rollout batches sampled ahead of the one trained on; 0 is synchronous."""
    on_nonfinite: Annotated[str, Field(pattern=r"^(fail|skip:[1-9][0-9]{0,5})$")] = "skip:3"
    """What a gradient with NaN or infinity does. skip:n: that optimizer step is left out, and the run ends where more
    than n in a row were: one strange batch costs a step, broken weights or data end the run soon; fail: at once. No bit
    of weights and optimizer changes either way."""

    @property
    def most_skipped(self) -> int:
        """Optimizer steps in a row that may be left out."""
        return int(self.on_nonfinite.removeprefix("skip:").replace("fail", "0"))


class EvalSection(Section):
    """Held-out accuracy: the share of prompts whose reward is at least ``success_reward``."""

    every: NonNegative = 10
    """Steps between evaluations; 0: only before the first step and after the last."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of evaluation; 0 is greedy."""
    success_reward: Finite = 1.0
    """Lowest reward of a right answer."""


class CheckpointSection(Section):
    """Checkpoints of everything a resume needs. ``every=0``: one after a warm start, and the last."""

    every: NonNegative = 25
    """Steps between checkpoints."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""


class LogSection(Section):
    """What a run records beside metrics.jsonl."""

    progress: Literal["auto", "live", "plain"] = "auto"
    """Live panel, plain lines, or whichever suits the terminal."""
    samples_per_step: NonNegative = 4
    """Completions written to samples.jsonl a step."""
    tensorboard: bool = True
    """Whether to write TensorBoard files."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether to send metrics to Weights & Biases, or store them for later."""
    wandb_project: str = "rl_megatron"
    """Project at Weights & Biases."""


class RunConfig(Section):
    """One run, whole."""

    seed: NonNegative = 0
    """Seed of the tiny model, the data, sampling and minibatches."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: Annotated[ArithmeticData | FileData, Field(discriminator="type")] = ArithmeticData()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    learner: LearnerSection = LearnerSection()
    roles: RolesSection = RolesSection()
    weights: WeightsSection = WeightsSection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    slurm: SlurmSection = SlurmSection()

    @property
    def transport(self) -> TransportKind:
        """Of ``weights.transport``, auto being one for servers and another for an engine in the learner's processes."""
        return self.weights.kind(served=self.rollout.served)

    @property
    def watchdog_seconds(self) -> float:
        """``run.watchdog_seconds``, or its default: before a collective's limit, whose errors name those that wait."""
        return self.run.watchdog_seconds or 0.8 * self.learner.timeout_seconds

    @property
    def offline(self) -> bool:
        """Whether the data brings the pairs that are trained on, so that nothing is sampled for training."""
        return isinstance(self.data, FileData) and self.data.rejected_field is not None

    @property
    def completions_per_step(self) -> int:
        """Completions that one batch has: sampled ones, or two of each of a file's pairs."""
        return self.rollout.prompts_per_step * (2 if self.offline else self.rollout.group_size)

    @property
    def named_completions(self) -> str:
        """``completions_per_step`` by the keys that give it, for messages."""
        each = "2 of a pair (data.rejected_field)" if self.offline else f"rollout.group_size={self.rollout.group_size}"
        return f"rollout.prompts_per_step={self.rollout.prompts_per_step} * {each}"

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = problems_of(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self
