"""The whole configuration on one page: frozen pydantic, defaults here alone, nothing heavy imported.

A key is `section.name`; YAML under conf/ holds only what differs. Cross-field rules are at the bottom and name
both numbers and the change to make. Reading YAML and `key=value` is config_io.py's work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_megatron.types import ParallelDims

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """Where a run writes: ``<dir>/<name>/``. Without a name, the config's name and a free number are taken."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    dir: Path = Path("runs")


class TinyModelSection(Section):
    """Sizes of the random-weight Qwen3-MoE that is made (once, cached) when ``model.path`` is not set."""

    hidden_size: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 16
    num_experts: Positive = 8
    experts_per_token: Positive = 2
    expert_width: Positive = 32
    max_position_embeddings: Positive = 1024
    tie_embeddings: bool = False


class ModelSection(Section):
    """The model to train: a Hugging Face folder, or a tiny one made on the spot."""

    path: Path | None = None
    tiny: TinyModelSection = TinyModelSection()
    cache_dir: Path = Path("runs/.cache")


class ArithmeticData(Section):
    """Made on the spot: additions ``37+58=`` of two numbers below ``10**digits``, split by problem."""

    type: Literal["arithmetic"] = "arithmetic"
    digits: Annotated[int, Field(ge=1, le=6)] = 2
    num_eval: Positive = 256


class FileData(Section):
    """Your own problems: .jsonl or .parquet files, one object a row, field names by config."""

    type: Literal["files"]
    train: Path
    eval: Path
    prompt_field: str = "question"
    answer_field: str = "answer"
    prompt_template: str = "{prompt}"
    chat_template: bool = False
    max_eval: Positive | None = None


class RewardSection(Section):
    """``function`` is a name of rewards/registry.py or ``package.module:function`` of your own."""

    function: str = "exact_match"
    on_error: Literal["fail", "drop"] | float = "fail"
    timeout_seconds: PositiveFloat = 60.0


class AlgorithmSection(Section):
    """A policy-gradient algorithm is this row of choices (docs/algorithms.md); conf/algorithm/ names the known rows."""

    advantage_mean: Literal["none", "group", "batch"] = "group"
    advantage_std: Literal["none", "group", "batch"] = "group"
    leave_one_out: bool = False
    ratio_level: Literal["token", "sequence"] = "token"
    objective: Literal["clip", "cispo", "reinforce"] = "clip"
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    cap_low: NonNegativeFloat = 0.0
    cap_high: PositiveFloat = 5.0
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    old_logprobs: Literal["learner", "rollout"] = "learner"


class RolloutSection(Section):
    """How a step's completions are sampled."""

    engine: Literal["local"] = "local"
    prompts_per_step: Positive = 32
    group_size: Positive = 8
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_prompt_tokens: Positive = 256
    max_new_tokens: Positive = 32
    on_long_prompt: Literal["fail", "drop"] = "fail"
    slots: Positive = 512


class OptimizerSection(Section):
    """AdamW, as megatron-core's OptimizerConfig takes it."""

    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0
    distributed: bool = True


class LearnerSection(Section):
    """The megatron-core learner. ``etp``, ``dp`` and ``threads`` follow from the others when not given."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1
    ep: Positive = 1
    etp: Positive | None = None
    cp: Positive = 1
    dp: Positive | None = None
    threads: Positive | None = None
    max_tokens_per_micro_batch: Positive = 8192
    vocab_multiple: Positive = 8
    logprob_chunk_tokens: Positive = 1024
    recompute_layers: bool = False
    timeout_seconds: PositiveFloat = 600.0
    optimizer: OptimizerSection = OptimizerSection()

    @property
    def dims(self) -> ParallelDims:
        """All degrees. etp defaults to tp without expert parallelism, else 1; dp to the least that fits ep*etp."""
        etp = self.etp or (self.tp if self.ep == 1 else 1)
        inner = self.tp * self.cp
        dp = self.dp or next(d for d in range(1, self.ep * etp + 1) if inner * d % (self.ep * etp) == 0)
        return ParallelDims(tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=etp, cp=self.cp, dp=dp)


class WarmStartSection(Section):
    """Supervised steps on correct answers by the same learner, before RL; ends early at ``stop_at_accuracy``."""

    steps: NonNegative = 0
    batch_size: Positive = 256
    learning_rate: PositiveFloat = 3e-3
    check_every: Positive = 20
    stop_at_accuracy: Fraction = 1.0


class TrainSection(Section):
    """The RL loop. ``minibatches`` optimizer steps are made on each rollout batch."""

    steps: NonNegative = 100
    minibatches: Positive = 2
    learning_rate: PositiveFloat = 1e-3
    lr_warmup_steps: NonNegative = 0
    lr_decay: Literal["none", "linear", "cosine"] = "none"
    max_staleness: NonNegative = 0


class EvalSection(Section):
    """Held-out accuracy: the share of prompts whose reward is at least ``success_reward``."""

    every: NonNegative = 10
    temperature: NonNegativeFloat = 0.0
    success_reward: float = 1.0


class CheckpointSection(Section):
    """Checkpoints of everything a resume needs. ``every=0``: none but the last (and at Ctrl-C)."""

    every: NonNegative = 25
    keep: Positive = 2


class LogSection(Section):
    """What a run records beside metrics.jsonl."""

    progress: Literal["auto", "live", "plain"] = "auto"
    samples_per_step: NonNegative = 4
    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "rl_megatron"


class RunConfig(Section):
    """One run, whole."""

    seed: NonNegative = 0
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: Annotated[ArithmeticData | FileData, Field(discriminator="type")] = ArithmeticData()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    learner: LearnerSection = LearnerSection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = [*_layout_problems(self.learner), *_batch_problems(self)]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _layout_problems(learner: LearnerSection) -> list[str]:
    """Layouts that megatron-core 0.16.1 refuses late or gets silently wrong, each with both numbers and the way out."""
    d, out = learner.dims, []
    inner = d.tp * d.cp * d.dp
    if inner % (d.ep * d.etp):
        out.append(
            f"learner: ep*etp = {d.ep}*{d.etp} = {d.ep * d.etp} does not divide tp*cp*dp = {d.tp}*{d.cp}*{d.dp} = {inner}; "
            f"leave learner.dp out or set it so that {d.ep * d.etp} divides the product"
        )
    if d.ep == 1 and d.etp != d.tp:
        out.append(
            f"learner.etp={d.etp} with learner.tp={d.tp} and learner.ep=1 lets replicated experts drift apart silently; "
            f"set learner.etp={d.tp} (or leave it out), or learner.ep > 1"
        )
    if d.vpp > 1 and d.pp == 1:
        out.append(f"learner.vpp={d.vpp} needs a pipeline, but learner.pp=1; set learner.vpp=1 or learner.pp >= 2")
    return out


def _batch_problems(c: RunConfig) -> list[str]:
    out = []
    completions = c.rollout.prompts_per_step * c.rollout.group_size
    if completions < c.train.minibatches:
        out.append(
            f"train.minibatches={c.train.minibatches} is more than the {completions} completions of a step "
            f"(rollout.prompts_per_step={c.rollout.prompts_per_step} * rollout.group_size={c.rollout.group_size})"
        )
    longest = c.rollout.max_prompt_tokens + c.rollout.max_new_tokens
    if longest > c.learner.max_tokens_per_micro_batch:
        out.append(
            f"learner.max_tokens_per_micro_batch={c.learner.max_tokens_per_micro_batch} is less than the longest sequence, "
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}; raise the first or lower the others"
        )
    return out
