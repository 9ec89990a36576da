"""The configuration on one page (some sections: config_*.py): frozen pydantic, defaults, nothing heavy imported.

A key is `section.name`; YAML under conf/ holds only what differs. Cross-field rules are at the bottom and name
both numbers and the change to make. Reading YAML and `key=value` is config_io.py's work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_megatron.config_algorithm import AlgorithmSection, OptimizerSection
from rl_megatron.config_reward import RewardSection
from rl_megatron.config_slurm import SlurmSection
from rl_megatron.config_types import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from rl_megatron.config_weights import WeightsSection
from rl_megatron.types import ParallelDims


class RunSection(Section):
    """Where a run writes: ``<dir>/<name>/``. Without a name, the config's name and a free number are taken."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Folder name of the run."""
    dir: Path = Path("runs")
    """Where run folders are made."""
    launcher: Literal["local", "slurm"] = "local"
    """local: learner processes on this machine; slurm: on the nodes of the allocation, as ``submit`` sets."""


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
    tiny: TinyModelSection = TinyModelSection()
    cache_dir: Path = Path("runs/.cache")
    """Where the tiny model is kept between runs."""


class ArithmeticData(Section):
    """Made on the spot: sums ``37+08=`` with the answer ``540``, lowest digit first, split by problem."""

    type: Literal["arithmetic"] = "arithmetic"
    digits: Annotated[int, Field(ge=1, le=6)] = 2
    """Digits of the largest addend."""
    num_eval: Positive = 256
    """Held-out problems."""


class FileData(Section):
    """Your own problems: .jsonl or .parquet files, one object a row, field names by config."""

    type: Literal["files"]
    train: Path
    """Problems to train on."""
    eval: Path
    """Held-out problems."""
    prompt_field: str = "question"
    """Field that holds the problem, as text."""
    answer_field: str = "answer"
    """Field that holds the correct answer, as text."""
    rejected_field: str | None = None
    """Field of the training file that holds a worse answer, when given: algorithm=dpo then trains on these pairs alone,
    and nothing is sampled but evaluations."""
    prompt_template: str = "{prompt}"
    """Text around the problem, which replaces {prompt}."""
    chat_template: bool = False
    """Whether to wrap the prompt as a user turn of the tokenizer's chat template."""
    max_eval: Positive | None = None
    """Use only the first so many held-out problems; null uses all."""


class ServerSection(Section):
    """The servers of an engine that is no part of the learner's processes (docs/engines.md)."""

    addresses: str | None = None
    """Running servers to use, ``http://host:port``, several with commas between; null: servers are started here."""
    token_file: Path | None = None
    """File with the token that running servers want; those started here get one of their own."""
    replicas: Positive = 1
    """Servers to start."""
    tp: Positive = 1
    """Tensor-parallel degree of each."""
    options: str | None = None
    """More options of a server's command line, written as in a shell."""
    start_seconds: PositiveFloat = 600.0
    """How long a server may take until it is ready."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a request, or one part of a weight update, may take."""
    retries: NonNegative = 3
    """Attempts after the first, on another replica where there is one, when no connection, no answer or 5xx came."""
    backoff_seconds: PositiveFloat = 0.5
    """Wait before the first retry; it doubles each time."""
    concurrency: Positive = 256
    """Requests in flight at most."""
    weights_dir: Path = Path("/dev/shm")
    """Where weights are handed over: shared memory, or a folder that the servers see too."""
    probe_tolerance: PositiveFloat | None = None
    """Largest difference of a probe's log-probs, in nats, at which new weights are served; null: 1e-3 in float32, 0.25
    in bfloat16."""


class RolloutSection(Section):
    """How a step's completions are sampled."""

    engine: Literal["local", "vllm", "sglang"] = "local"
    """What samples: an engine inside the learner's processes, or servers."""
    python: Path | None = None
    """Interpreter that the engine is installed in; null: the one that trains."""
    prompts_per_step: Positive = 32
    """Prompts of a step."""
    group_size: Positive = 8
    """Completions of each prompt."""
    temperature: PositiveFloat = 1.0
    """Of sampling, and of the learner's log-probs."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest tokens whose probabilities reach this."""
    max_prompt_tokens: Positive = 256
    """Longest prompt."""
    max_new_tokens: Positive = 32
    """Longest completion."""
    on_long_prompt: Literal["fail", "drop"] = "fail"
    """What a longer prompt does: end the run at its start, or be left out."""
    ignore_eos: bool = False
    """Sample ``max_new_tokens`` whatever is sampled (for measurements)."""
    dynamic_sampling: Literal["off", "refill", "drop"] = "off"
    """Groups of equal rewards teach nothing: keep them, sample on until the batch is full, or train on the rest."""
    max_refills: Positive = 8
    """dynamic_sampling=refill: batches sampled for one step at most."""
    slots: Positive = 512
    """Sequences an engine replica decodes at once."""
    server: ServerSection = ServerSection()

    @property
    def served(self) -> bool:
        """Whether servers sample, so that the learner's processes hold no engine."""
        return self.engine != "local"


class LearnerSection(Section):
    """The megatron-core learner. ``etp``, ``dp`` and ``threads`` follow from the others when not given."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu over gloo, cuda over NCCL."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters and activations; the optimizer keeps float32."""
    layers: Literal["auto", "torch", "transformer_engine"] = "auto"
    """auto takes TransformerEngine's where it is installed and device=cuda, else torch's."""
    tp: Positive = 1
    """Tensor-parallel degree, with sequence parallelism where above 1."""
    pp: Positive = 1
    """Pipeline-parallel degree."""
    vpp: Positive = 1
    """Model chunks of each pipeline stage (interleaved schedule)."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: as the stages between, which share the rest equally."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage; null: as the stages between."""
    ep: Positive = 1
    """Expert-parallel degree."""
    etp: Positive | None = None
    """Tensor-parallel degree inside an expert; null: tp where ep=1, else 1."""
    cp: Positive = 1
    """Context-parallel degree."""
    dp: Positive | None = None
    """Data-parallel degree; null: the least that makes room for ep*etp."""
    threads: Positive | None = None
    """CPU threads of each process; null shares the machine's cores out."""
    max_tokens_per_micro_batch: Positive = 8192
    """Positions of a packed micro-batch on one data-parallel rank."""
    vocab_multiple: Positive = 8
    """Vocabulary rows are padded to a multiple of this times tp."""
    logprob_chunk_tokens: Positive = 1024
    """Positions whose logits are held in float32 at once."""
    recompute_layers: bool = False
    """Whether to recompute activations of every layer in the backward pass."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a collective may wait for its ranks."""
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
    """Most supervised steps; 0 leaves the warm start out."""
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
    """Parts of a rollout batch; an optimizer step is made on each."""
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


class EvalSection(Section):
    """Held-out accuracy: the share of prompts whose reward is at least ``success_reward``."""

    every: NonNegative = 10
    """Steps between evaluations; 0: only before the first step and after the last."""
    temperature: NonNegativeFloat = 0.0
    """Of evaluation; 0 is greedy."""
    success_reward: float = 1.0
    """Least reward of a right answer."""


class CheckpointSection(Section):
    """Checkpoints of everything a resume needs. ``every=0``: none but the first and the last."""

    every: NonNegative = 25
    """Steps between checkpoints."""
    keep: Positive = 2
    """Newest checkpoints kept."""


class LogSection(Section):
    """What a run records beside metrics.jsonl."""

    progress: Literal["auto", "live", "plain"] = "auto"
    """Live panel, plain lines, or whichever suits the terminal."""
    samples_per_step: NonNegative = 4
    """Completions written to samples.jsonl a step."""
    tensorboard: bool = True
    """Whether to write TensorBoard files."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether to send metrics to Weights & Biases, or keep them for later."""
    wandb_project: str = "rl_megatron"
    """Its project."""


class RunConfig(Section):
    """One run, whole."""

    seed: NonNegative = 0
    """Of the tiny model, the data, sampling and minibatches."""
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: Annotated[ArithmeticData | FileData, Field(discriminator="type")] = ArithmeticData()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    rollout: RolloutSection = RolloutSection()
    learner: LearnerSection = LearnerSection()
    weights: WeightsSection = WeightsSection()
    warm_start: WarmStartSection = WarmStartSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    slurm: SlurmSection = SlurmSection()

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        problems = [
            *_layout_problems(self.learner),
            *_transport_problems(self),
            *_batch_problems(self),
            *_server_problems(self.rollout),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _layout_problems(learner: LearnerSection) -> list[str]:
    """Layouts that megatron-core 0.16.1 refuses late or gets silently wrong, each with both numbers and the way out."""
    d, out = learner.dims, []
    inner = d.tp * d.cp * d.dp
    if inner % (d.ep * d.etp):
        out.append(
            f"learner: ep*etp = {d.ep}*{d.etp} = {d.ep * d.etp} does not divide "
            f"tp*cp*dp = {d.tp}*{d.cp}*{d.dp} = {inner}; "
            f"leave learner.dp out or set it so that {d.ep * d.etp} divides the product"
        )
    if d.ep == 1 and d.etp != d.tp:
        out.append(
            f"learner.etp={d.etp} with learner.tp={d.tp} and learner.ep=1 lets replicated experts drift apart "
            f"silently; set learner.etp={d.tp} (or leave it out), or learner.ep > 1"
        )
    if d.vpp > 1 and d.pp == 1:
        out.append(f"learner.vpp={d.vpp} needs a pipeline, but learner.pp=1; set learner.vpp=1 or learner.pp >= 2")
    return out


def _transport_problems(c: RunConfig) -> list[str]:
    out, kind, processes = [], c.weights.transport, c.learner.dims.world_size
    if kind == "memory" and processes > 1:
        out.append(
            f"weights.transport=memory copies within one process, but the learner has {processes}; "
            "set weights.transport=shared_memory or process_group"
        )
    needed = {"shared_memory": "cpu", "cuda_ipc": "cuda"}.get(kind, c.learner.device)
    if needed != c.learner.device:
        out.append(
            f"weights.transport={kind} moves memory of {needed}, but learner.device={c.learner.device}; "
            "set weights.transport=process_group"
        )
    if kind in {"shared_memory", "cuda_ipc"} and c.run.launcher == "slurm" and c.slurm.nodes > 1:
        out.append(
            f"weights.transport={kind} stays on one machine, but slurm.nodes={c.slurm.nodes}; "
            "set weights.transport=process_group"
        )
    if c.weights.delta and kind != "process_group":
        out.append(
            f"weights.delta=true saves bytes of a network, but weights.transport={kind}; "
            "set weights.transport=process_group or weights.delta=false"
        )
    return out


def _batch_problems(c: RunConfig) -> list[str]:
    out = []
    completions = c.rollout.prompts_per_step * c.rollout.group_size
    if completions < c.train.minibatches:
        out.append(
            f"train.minibatches={c.train.minibatches} is more than the {completions} completions of a step "
            f"(rollout.prompts_per_step={c.rollout.prompts_per_step} * rollout.group_size={c.rollout.group_size})"
        )
    longest, pairs = c.rollout.max_prompt_tokens + c.rollout.max_new_tokens, c.algorithm.preference_beta is not None
    wanted = 2 * longest if pairs else longest
    if wanted > c.learner.max_tokens_per_micro_batch:
        what = "pair of the longest sequences, 2 * (" if pairs else "longest sequence, ("
        out.append(
            f"learner.max_tokens_per_micro_batch={c.learner.max_tokens_per_micro_batch} is less than the {what}"
            f"rollout.max_prompt_tokens + rollout.max_new_tokens) = {wanted}; raise the first or lower the others"
        )
    if pairs and c.rollout.group_size < 2 and not _offline(c):
        out.append("algorithm.preference_beta wants pairs of a group's completions; set rollout.group_size=2 or more")
    if _offline(c) and not pairs:
        out.append("data.rejected_field makes pairs, which algorithm=dpo trains on; set it, or leave the field out")
    return out


def _server_problems(r: RolloutSection) -> list[str]:
    out = []
    if r.server.addresses and (r.python or r.server.replicas > 1 or r.server.options):
        out.append(
            f"rollout.server.addresses={r.server.addresses} are running servers; rollout.python, "
            "rollout.server.replicas and rollout.server.options are for starting some: leave them out"
        )
    if r.server.token_file and not r.server.addresses:
        out.append("rollout.server.token_file is for rollout.server.addresses; servers started here make a token")
    return out


def _offline(c: RunConfig) -> bool:
    return isinstance(c.data, FileData) and c.data.rejected_field is not None
