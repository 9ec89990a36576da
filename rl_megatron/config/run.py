"""The configuration (larger sections have files of their own): frozen pydantic, defaults, nothing heavy imported.

A key is `section.name`; YAML under conf/ holds what differs. Rules over sections are rules.py's, reading is io.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_megatron.config.rules import find_problems
from rl_megatron.config.sections.algorithm import AlgorithmSection
from rl_megatron.config.sections.data import (
    ArithmeticRunData,
    FileRunData,
    HubRunData,
    MixtureData,
    OneSource,
    data_sources,
    source_environments,
    source_name,
)
from rl_megatron.config.sections.eval import EvalSection
from rl_megatron.config.sections.jobs import (
    JOBS,
    CheckpointSection,
    DpoSection,
    JobKind,
    JobName,
    LogSection,
    ProfileSection,
    RewardTrainingSection,
    SftSection,
    WarmStartSection,
    WrittenSection,
)
from rl_megatron.config.sections.learner import LearnerSection, RolesSection
from rl_megatron.config.sections.reward import EnvironmentSection, RankedModelSection, RewardSection, SandboxSection
from rl_megatron.config.sections.rollout import RolloutSection
from rl_megatron.config.sections.slurm import SlurmSection
from rl_megatron.config.sections.weights import FILE, PROCESS_GROUP, TransportKind, WeightsSection
from rl_megatron.feature import adapter_layouts, feature_columns, features, with_features
from rl_megatron.section import EntryName, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

DISK_SECONDS = 3600.0


class RunSection(Section):
    """A run writes to ``<dir>/<name>/``. Without a name, it takes the config's name and a free number."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] | None = None
    """Folder name of the run."""
    dir: Path = Path("runs")
    """Folder that holds the run folders."""
    launcher: Literal["local", "slurm", "ray"] = "local"
    """local: learner processes on this machine; slurm: on the nodes of the allocation (``submit`` sets this); ray: as
    Ray actors on the nodes of the allocation, or on this machine if there is none."""
    watchdog_seconds: PositiveFloat | None = None
    """Time limit without progress for the controller and for a learner process that computes; null: 0.8 of
    learner.timeout_seconds. It is an hour, or this if it is longer, while one reads or writes a model or a checkpoint,
    or a thread of the controller waits for one of its files."""


class TinyModelSection(Section):
    """Sizes of the Qwen3-MoE with random weights that a run without ``model.path`` makes, once, and caches. It has four
    attention heads of 16 over two of keys and values; with servers two of 32, because the engines' CPU kernels support
    none smaller."""

    hidden_size: Positive = 64
    num_layers: Positive = 2
    num_experts: Positive = 8
    experts_per_token: Positive = 2
    expert_width: Positive = 32
    max_position_embeddings: Positive = 1024


_LARGEST = 2**53  # whole numbers up to it are exact in JSON
TemplateVariable = (
    bool
    | Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
    | Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
    | str
)


class ModelSection(Section):
    """The model to train: a Hugging Face folder, or a generated tiny model."""

    path: Path | None = None
    """Hugging Face folder of the initial model; null: the tiny model."""
    name: str | None = None
    """Public model whose sizes ``path`` must have, because the configuration is made for it, as in qwen3-30b-a3b; null:
    any."""
    random_weights: bool = False
    """Whether the run starts from random weights in the sizes of ``path``, whose weights are not read: for a trial."""
    template_variables: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], TemplateVariable] = Field(
        default_factory=dict
    )
    """Variables of the model's chat template, by name, in a run and a reward model's export: enable_thinking: false."""
    tiny: TinyModelSection = TinyModelSection()
    cache_dir: Path = Path("runs/.cache")
    """Folder that caches the tiny model between runs."""


@with_features("train")
class TrainSection(Section):
    """The RL loop, which takes ``epochs`` * ``minibatches`` optimizer steps on each rollout batch."""

    steps: NonNegative = 100
    """Number of rollout batches to train on."""
    minibatches: Positive = 2
    """Number of minibatches of a rollout batch; each is one optimizer step."""
    minibatch_by_group: bool = False
    """Whether all completions of a prompt are in one minibatch; false: completions are shuffled one by one."""
    epochs: Positive = 1
    """Passes over a rollout batch, each with its own split into minibatches."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate after the warm-up."""
    lr_warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    lr_decay: Literal["none", "linear", "cosine"] = "none"
    """Schedule of the learning rate after the warm-up; linear and cosine fall towards train.lr_min."""
    lr_min: NonNegativeFloat = 0.0
    """Learning rate towards which lr_decay falls (Megatron: min_lr); a critic's falls to the same share of its own."""
    max_staleness: NonNegative = 0
    """Most pushes of weights between the first token of a completion and the step that trains on it. Sampling may be so
    many batches ahead of training, and a step waits for groups that would get older; 0 is synchronous."""


class RunConfig(Section):
    """The whole configuration of one run."""

    job: JobName = "rl"
    """Kind of training: reinforcement learning (rl), supervised fine-tuning (sft), direct preference optimization on
    written pairs (dpo), or training of a reward model on such pairs (reward_model)."""
    seed: NonNegative = 0
    """Seed of the tiny model, the data, sampling and minibatches."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: Annotated[ArithmeticRunData | FileRunData | HubRunData | MixtureData, Field(discriminator="type")] = (
        ArithmeticRunData()
    )
    reward: RewardSection = RewardSection()
    environment: EnvironmentSection = EnvironmentSection()
    sandbox: SandboxSection = SandboxSection()
    reward_models: Mapping[EntryName, RankedModelSection] = Field(default_factory=dict)
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    learner: LearnerSection = LearnerSection()
    roles: RolesSection = RolesSection()
    weights: WeightsSection = WeightsSection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    sft: SftSection = SftSection()
    dpo: DpoSection = DpoSection()
    reward_model: RewardTrainingSection = RewardTrainingSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    profile: ProfileSection = ProfileSection()
    slurm: SlurmSection = SlurmSection()

    @property
    def kind(self) -> JobKind:
        """The row of ``job`` in the table of jobs; for job=dpo with single answers, its form for these."""
        kind = JOBS[self.job]
        return replace(kind, rows="labels") if kind.reference and self.dpo.is_unpaired else kind

    @property
    def fills_files(self) -> bool:
        """True if pushes fill a file on each node, which servers read, or an export alone."""
        return self.rollout.served or not self.kind.samples

    @property
    def transport(self) -> TransportKind:
        """The kind of ``weights.transport``: into servers, or between the learner's ranks for engines in these."""
        server, weights, way = self.rollout.server, self.weights, self.weights.transport
        if not self.rollout.served:
            return PROCESS_GROUP
        if way == "auto":
            apart = self.run.launcher != "local" and self.slurm.engines.nodes > 0 and not self.rollout.embedded
            way = "direct" if apart and not weights.delta and weights.folder is None else "file"
        if way == "file":
            return FILE
        if not server.colocated and (self.slurm.engines.nodes > 0 or server.addresses is not None):
            return TransportKind(name="direct", members=True)
        local = self.run.launcher == "local" and self.learner.device != "cpu"  # given enough GPUs
        shares = not local or server.colocated or server.memory_fraction is not None
        return TransportKind(name="direct", members=local, last_hop=shares)

    @property
    def watchdog_seconds(self) -> float:
        """``run.watchdog_seconds``, or its default, which is below the collectives' limit: their errors would name the
        ranks that wait, not the one that they wait for."""
        return self.run.watchdog_seconds or 0.8 * self.learner.timeout_seconds

    @property
    def watchdog_disk_seconds(self) -> float:
        """The limit while a model or a checkpoint is read or written: an hour, or `watchdog_seconds` if longer."""
        return max(DISK_SECONDS, self.watchdog_seconds)

    @property
    def written(self) -> WrittenSection:
        """The section of a job that samples nothing, which has the job's name."""
        sections: Mapping[JobName, WrittenSection] = {
            "sft": self.sft,
            "dpo": self.dpo,
            "reward_model": self.reward_model,
        }
        return sections[self.job]

    @property
    def written_epochs(self) -> float | None:
        """Epochs of written data, which then give the number of steps; None: ``train.steps`` gives it."""
        return None if self.kind.samples else self.written.epochs

    def role_learner(self, role: str) -> LearnerSection:
        """Returns ``learner`` with the layout of the ranks of ``role``."""
        own = self.roles.layouts.get(role)
        return self.learner if own is None else self.learner.model_copy(update=dict(own))

    def for_role(self, role: str) -> RunConfig:
        """Returns the configuration that ranks of ``role`` get: ``learner`` has their layout."""
        return self.model_copy(update={"learner": self.role_learner(role)})

    @property
    def taught_by_average(self) -> bool:
        """True if a teacher is the reference, which a feature moves, and which reads another prompt."""
        moves = any(one.moves_reference(self) for one in features().values())
        return moves and any(one.path is None for one in self.algorithm.kl.teachers.values())

    @property
    def needs_reference(self) -> bool:
        """True if ranks hold a model, frozen or the policy's average, that scores the sequences to train on."""
        own = self.taught_by_average or not self.algorithm.kl.teachers
        sampled = self.kind.samples and self.algorithm.needs_reference and own
        return (self.kind.reference and not self.dpo.reference_free) or sampled

    @property
    def reference_moves(self) -> bool:
        """True if a feature moves the reference's weights, which are then kept in float32 and saved."""
        moves = any(one.moves_reference(self) for one in features().values())
        return moves and self.needs_reference and self.kind.samples

    @property
    def reference(self) -> Path | None:
        """The Hugging Face folder of the reference; None: the model that training starts from."""
        return self.algorithm.kl.reference

    @property
    def reference_is_base(self) -> bool:
        """True if the reference is the policy without its adapters, and so needs no weights of its own."""
        begins = self.reference is None and not self.reference_moves and not self.warm_start.steps
        return begins and "reference" not in self.roles.separate and adapter_layouts(self.learner) is not None

    @property
    def sources(self) -> Mapping[str, OneSource]:
        """Each source of data by the key of its section."""
        return data_sources(self.data)

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of a mixture's sources, in their order; empty for other data."""
        return tuple(self.data.sources) if isinstance(self.data, MixtureData) else ()

    @property
    def source_rewards(self) -> Mapping[str, RewardSection]:
        """The reward of each source of ``data.sources`` that has its own, by the source's name."""
        sources = self.data.sources if isinstance(self.data, MixtureData) else {}
        return {name: source.reward for name, source in sources.items() if source.reward is not None}

    @property
    def own_rewards(self) -> Mapping[str, RewardSection]:
        """The rewards besides ``reward``, by the ``source`` of the prompts that they score: rewards of sources, and of
        sets of problems, which are named by their section, ``eval.sets.<name>``."""
        of_sets = {f"eval.sets.{name}": one.reward for name, one in self.eval.sets.items()}
        return {**self.source_rewards, **{name: own for name, own in of_sets.items() if own is not None}}

    @property
    def environments(self) -> Mapping[str, EnvironmentSection]:
        """The environments that completions are part of, by the key of their section, for training and for sets."""
        of_sets = {f"eval.sets.{name}.environment": one.environment for name, one in self.eval.sets.items()}
        led = {key: one for key, one in of_sets.items() if one is not None and one.function is not None}
        return self.training_environments | led

    @property
    def training_environments(self) -> dict[str, EnvironmentSection]:
        """The environments of training by the key of their section: the run's, and those of a mixture's sources."""
        return source_environments(self.data) | ({"environment": self.environment} if self.environment.function else {})

    @property
    def environments_of_sources(self) -> dict[str, EnvironmentSection]:
        """The environment of each source of data that has one, its own or the run's, by the key of the source."""
        led = self.training_environments
        own = {key: led.get(f"{key}.environment", led.get("environment")) for key in data_sources(self.data)}
        return {key: one for key, one in own.items() if one is not None}

    @property
    def rewards_of_sources(self) -> dict[str, RewardSection]:
        """The reward of each source of data, its own or the run's, by the key of the source."""
        return {key: self.source_rewards.get(source_name(key), self.reward) for key in data_sources(self.data)}

    @property
    def longest_completion(self) -> int:
        """Most tokens after a prompt, in training or in a set of ``eval.sets``."""
        of_sets = (one.max_new_tokens or 0 for one in self.eval.sets.values())
        return max((self.max_sampled, *of_sets, *(one.max_tokens for one in self.environments.values())))

    @property
    def max_sampled(self) -> int:
        """Most tokens after the first prompt of a completion or trajectory to train on; 0 if nothing is sampled."""
        return max(self._max_after_prompt.values()) if self.kind.samples else 0

    @property
    def _max_after_prompt(self) -> dict[str, int]:
        """Most tokens of trajectories and of single completions after a prompt, by the key that sets the limit."""
        led = {f"{key}.max_tokens": one.max_tokens for key, one in self.training_environments.items()}
        return led if "environment.max_tokens" in led else {"rollout.max_new_tokens": self.rollout.max_new_tokens} | led

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and its completion or trajectory."""
        return self.longest_prompt + self.max_sampled

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt; if nothing is sampled, of a whole sequence."""
        return self.rollout.max_prompt_tokens if self.kind.samples else self.written.max_tokens

    @property
    def on_long_prompt(self) -> Literal["fail", "drop"]:
        """The treatment of a longer prompt. A prompt that fills a whole sequence leaves no answer to cut."""
        if self.kind.samples:
            return self.rollout.on_long_prompt
        return "fail" if self.written.on_long == "fail" else "drop"

    @property
    def prompt_limit_keys(self) -> tuple[str, str]:
        """The keys of ``longest_prompt`` and ``on_long_prompt``, for messages."""
        if self.kind.samples:
            return "rollout.max_prompt_tokens", "rollout.on_long_prompt"
        return f"{self.job}.max_tokens", f"{self.job}.on_long"

    @property
    def named_longest(self) -> str:
        """The keys that give ``longest_sequence``, for messages."""
        if not self.kind.samples:
            return f"{self.job}.max_tokens={self.written.max_tokens}"
        lengths = self._max_after_prompt
        after = max(lengths, key=lambda key: lengths[key])
        return f"rollout.max_prompt_tokens={self.rollout.max_prompt_tokens} + {after}={self.max_sampled}"

    @property
    def private(self) -> bool:
        """True if other users must not read the configuration: environment variables of a job may be secrets."""
        return bool(self.slurm.environment)

    @property
    def required_columns(self) -> Mapping[str, str]:
        """The columns that engines must return, each with the key and value that need it."""
        return feature_columns(self)

    @property
    def limits_are_shared(self) -> bool:
        """True if models compute log-probs over the tokens that sampling keeps, as the engine does."""
        sides = (one for one in features().values() if one.logits is not None)
        return any(asks(self) is not None for one in sides for asks in one.asks.values())

    @property
    def one_by_one(self) -> bool:
        """True if servers get each completion of a group as its own request."""
        return self.rollout.served and self.train.max_staleness > 0

    @property
    def max_completions(self) -> int:
        """Most completions of a request to servers: a group, or a problem's samples. Environments request one each."""
        led = bool(self.environment.function) or 0 < len(source_environments(self.data)) == len(self.source_names)
        plain = [e for e in self.eval.sets.values() if not (led if e.environment is None else e.environment.function)]
        return max(1 if self.one_by_one or led else self.rollout.group_size, *(one.samples for one in plain), 1)

    @property
    def completions_per_step(self) -> int:
        """Completions in one batch: sampled ones, or the dataset's answers, with both of a pair."""
        if not self.kind.samples:
            return self.written.batch_size * (2 if self.kind.rows == "pairs" else 1)
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def compared_per_step(self) -> int:
        """Completions in one batch that are compared: `completions_per_step`, and the data's demonstrations."""
        shown = self.kind.samples and self.algorithm.demonstration_gamma is not None
        return self.completions_per_step + shown * self.rollout.prompts_per_step

    @property
    def trained_per_step(self) -> int:
        """Completions of `compared_per_step` to train on: two of each group if the algorithm trains on pairs."""
        pairs = self.kind.samples and self.algorithm.pairs
        return 2 * self.rollout.prompts_per_step if pairs else self.compared_per_step

    @property
    def named_compared(self) -> str:
        """The keys that give ``compared_per_step``, for messages."""
        if not self.kind.samples:
            of_pair = " * 2 of a pair" if self.kind.rows == "pairs" else ""
            return f"{self.job}.batch_size={self.written.batch_size}{of_pair}"
        size = f"rollout.group_size={self.rollout.group_size}"
        if self.algorithm.demonstration_gamma is not None:
            size = f"({size} + 1 demonstration)"
        return f"rollout.prompts_per_step={self.rollout.prompts_per_step} * {size}"

    @property
    def parts_of_minibatches(self) -> tuple[int, str]:
        """The number of indivisible parts that minibatches consist of, and a name with their keys, for messages."""
        if self.train.minibatch_by_group or self.algorithm.pairs:
            prompts, parts = self.rollout.prompts_per_step, "pairs" if self.algorithm.pairs else "whole groups"
            return prompts, f"{parts} of a step (rollout.prompts_per_step={prompts})"
        return self.compared_per_step, f"completions of a step ({self.named_compared})"

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        if problems := find_problems(self):
            raise ValueError("\n".join(problems))
        return self
