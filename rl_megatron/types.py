"""Every type that packages pass to each other. Data only: no behavior beyond simple views, no torch import at run time.

Engines return read-only numpy columns; training reads tensors. Letters: P prompts, G group size, S sequences,
N tokens of a ragged batch (all sequences concatenated), D data-parallel ranks, M micro-batches. Log-probs are nats,
float32, of the sampling distribution. A *position* is one (input, target) pair: L tokens have L - 1 positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from rl_megatron.columns import ColumnsByName, HasColumns, LogProbs, Ragged, SampledText, TokenIds, freeze
from rl_megatron.files import ForeignText

if TYPE_CHECKING:
    from torch import Tensor

BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by dtype."""
FinishReason = Literal["stop", "length", "abort"]
StopReason = Literal["done", "length", "turns", "tokens", "seconds", "bad_call", "environment_error", "abandoned"]
"""The cause of a trajectory's end: it was done, a cut turn, a limit, an unreadable call, a fault, or the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Degrees of each mesh axis; rank order is megatron-core's ``tp-cp-ep-dp-pp`` (tp fastest). ``ep * etp`` divides
    ``tp * cp * dp``, because experts are spread inside one pipeline stage."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        """Number of learner processes."""
        return self.tp * self.cp * self.dp * self.pp

    def dp_rank(self, rank: int) -> int:
        """Returns the data-parallel coordinate of a global rank."""
        return rank // (self.tp * self.cp) % self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One example. ``id`` is unique in its data and stable between runs; in a mixture it begins with ``source``."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    answer: str
    question: str = ""  # the question in the data, without templates
    rejected: tuple[str, ...] = ()  # worse answers, in data of pairs
    margin: float = 0.0  # wanted difference between the scores of a pair
    meta: Mapping[str, Any] = field(default_factory=dict)  # all other fields of its row, as JSON has them
    source: str = ""  # name of its source in a mixture
    read_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # tokens of teachers' own prompts, or ANOTHER
    messages: tuple[Mapping[str, Any], ...] = ()  # first messages of an environment, if they are more than ``text``


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of sampling. ``temperature=0`` is greedy. ``seed`` makes each completion repeatable on its own."""

    temperature: float
    top_p: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    router_noise: float = 0.0  # standard deviation of the noise on router logits; servers have none
    top_k: int = 0  # number of most likely tokens to sample from; 0: all
    min_p: float = 0.0  # lowest probability of a sampled token, as a share of the most likely one's
    stop: tuple[str, ...] = ()  # texts: the first token that completes one, special tokens as text, is the last


class NamedVersion(NamedTuple):
    """One of several versions that servers hold. The engine reads its name from ``field`` of a request."""

    name: str
    version: int
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for ``num_completions`` continuations of one prompt, which share its prefill."""

    id: str
    token_ids: tuple[int, ...]
    num_completions: int
    params: SamplingParams
    columns: tuple[str, ...] = ()  # names in `feature.declared_columns` that completions must have
    exact_logprobs: bool = True  # training needs log-probs of the distribution that is sampled from
    partial: Completion | None = None  # partial completion: counts as new tokens, is in the result, may have ended
    prefix_group: str | None = None  # name of the prompt: requests of one group go where its prefix is cached
    start_version: int | None = (
        None  # the version served when it, or its trajectory, began: priorities take older first
    )
    skips_queue: bool = (
        False  # never waits for requests without it (evaluations set it); without a birth it has priority 0
    )
    max_seconds: float | None = None  # seconds in a server, after which a completion is ended as ``length``
    named: NamedVersion | None = None  # version that the server samples with; None: the pushed model


class Span(NamedTuple):
    """The tokens from ``start`` up to the next span were sampled with weights ``version``."""

    start: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion(HasColumns):
    """The tokens that an engine sampled. If a stop token ended them, it is the last of ``token_ids``."""

    token_ids: TokenIds  # [L] int32
    logprobs: LogProbs  # [L] float32, nats
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # starts ascend from 0
    columns: ColumnsByName = field(default_factory=dict)  # the requested ones, see `Column`
    continued: bool = False  # a later request continued it, and did not look for stop texts in earlier tokens

    def __post_init__(self) -> None:
        freeze(self.token_ids, self.logprobs, *self.columns.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """The tokens sampled in one request, or a step of them: their place in a row. The learner trains on all of them."""

    start: int  # its first token in the row; at least 1
    logprobs: LogProbs  # one for each of its tokens
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # counted from its first token
    text: SampledText  # decoded without special tokens
    reward: float | None = None  # its part of the trajectory's reward; None: it has no reward
    number: int = 0  # its place in the order of sampling; turns of equal numbers are in the order of their rows
    state: ForeignText | None = None  # the environment's id of the state that it began from

    def __post_init__(self) -> None:
        freeze(self.logprobs)

    @property
    def stop(self) -> int:
        """The position in the row after its last token."""
        return self.start + len(self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence(HasColumns):
    """One row to train on: context, a turn, context, a turn, …"""

    token_ids: TokenIds  # [L] int32, all of them
    turns: tuple[Turn, ...]  # starts ascend
    columns: ColumnsByName = field(default_factory=dict)  # entries of all tokens but the last

    def __post_init__(self) -> None:
        freeze(self.token_ids, *self.columns.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Trajectory:
    """The rows of one reward: one, or several if a turn's context does not extend the row before it."""

    chains: tuple[TokenSequence, ...]
    reward: float
    stop: StopReason = "done"
    metrics: Mapping[str, float] = field(default_factory=dict)  # the environment's; finite
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # (value, weight) of each of a weighted sum

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of all rows, in the order in which they were sampled."""
        return tuple(sorted((turn for row in self.chains for turn in row.turns), key=lambda turn: turn.number))

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.logprobs) for row in self.chains for turn in row.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A reward's result for one completion. ``total`` is finite unless there is an ``error``."""

    total: float  # the reward; of a weighted sum, the sum
    parts: Mapping[str, float] = field(default_factory=dict)  # values in a weighted sum, by name, without their weights
    steps: tuple[tuple[int, float], ...] = ()  # the end of each in the text, in characters, and its part of the total
    error: ForeignText | None = None  # the reason for a reward that is not finite
    late: bool = False  # the error is that the reward took longer than its time limit
    abstains: bool = False  # the function gave no reward, which is an error unless other parts of a sum gave one
    answer: ForeignText | None = None  # the completion's, equal for equal answers; "": it has no answer; None: unread


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """G trajectories of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    greedy: RolloutGroup | None = None  # one greedy completion of the prompt, if the baseline needs it
    demonstration: RolloutGroup | None = None  # one trajectory from the data, not sampled

    @property
    def rewards(self) -> tuple[float, ...]:
        """The total reward of each trajectory."""
        return tuple(trajectory.reward for trajectory in self.trajectories)


_OF_SEQUENCES = ("extra", "group_of", "trajectory_of", "cu_seqlens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A ragged batch of S sequences, concatenated: packing cuts it, and a micro-batch holds one. CPU tensors."""

    input_ids: Tensor  # [N] int64
    targets: Tensor  # [N] int64, the next token
    mask: Tensor  # [N] bool, True where the target was sampled (or is supervised)
    advantages: Tensor  # [N] float32
    rollout_logprobs: Tensor  # [N] float32, the engine's
    old_logprobs: Tensor  # [N] float32, the policy's as the update starts
    ref_logprobs: Tensor | None = None  # [N] float32, of the frozen reference; this and the rest if needed
    ref_top: Tensor | None = None  # [N, 2, k] float32, its most probable tokens and their log-probs
    old_values: Tensor | None = None  # [N] float32, of the critic at the start of the update
    returns: Tensor | None = None  # [N] float32, the critic's targets where ``mask`` is True
    proximal_share: Tensor | None = None  # [N] float32, the old policy: 0 is the rollout's, 1 the current one
    nll_weights: Tensor | None = None  # [N] float32, weight of -log pi next to the policy loss, over its denominator
    old_kl_weights: Tensor | None = None  # [N] float32, of each token's KL to the old policy (tokens.choose=kl_cov)
    token_weight: Tensor | None = None  # [N] float32, of each token in the loss; None: by the counts of LossInputs
    demonstrated: Tensor | None = None  # [N] bool, the positions of demonstrations, which were not sampled
    turn_of: Tensor | None = None  # [N] int32, number of the turn that sampled the target; 0 if not sampled
    extra: Mapping[str, Tensor | Ragged] = field(default_factory=dict)  # [N, …], the engine's `Column`s by name
    group_of: Tensor | None = None  # [S] int64, each prompt's number; this and the next stay in the controller
    trajectory_of: Tensor | None = None  # [S] int64, from 0, ascending; None: each sequence is a trajectory
    cu_seqlens: Tensor  # [S + 1] int64, starts at 0, ends at N

    @property
    def num_sequences(self) -> int:
        """The number of sequences, S."""
        return len(self.cu_seqlens) - 1

    @property
    def num_trajectories(self) -> int:
        """The number of trajectories."""
        return self.num_sequences if self.trajectory_of is None else len(self.trajectory_of.unique())

    @property
    def columns(self) -> dict[str, Tensor]:
        """Every [N, ...] field that is not None, by name, without ``extra``."""
        return {n: x for n in self.__slots__ if n not in _OF_SEQUENCES and (x := getattr(self, n)) is not None}

    @property
    def every_column(self) -> dict[str, Tensor | Ragged]:
        """``columns`` and ``extra``."""
        return {**self.columns, **self.extra}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The input of a loss: one micro-batch on one rank. T positions, S sequences (some only in part, under CP).

    A policy's loss has a gradient through log-probs and ``entropy``; a critic's only through ``values``, and its
    ``logprobs`` and ``entropy`` are zeros. ``segment_sum`` maps a detached [T] tensor to [S], the sums over each
    sequence and over all ranks that share it; ``turn_sum`` maps it to [T], the sums over each token's turn.
    ``num_tokens`` and ``num_sequences`` are the **global** denominators of the whole (mini)batch.
    """

    logprobs: Tensor  # [T] float32
    entropy: Tensor  # [T] float32, over the whole vocabulary
    old_logprobs: Tensor  # [T] float32
    rollout_logprobs: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    mask: Tensor  # [T] bool
    values: Tensor | None = None  # [T] float32
    top_logprobs: Tensor | None = None  # [T, k] float32 with a gradient, of the tokens of ``ref_top``
    ref_top: Tensor | None = None  # [T, 2, k]
    ref_logprobs: Tensor | None = None  # [T] float32; this and the rest as in Samples
    old_values: Tensor | None = None
    returns: Tensor | None = None
    proximal_share: Tensor | None = None
    nll_weights: Tensor | None = None
    old_kl_weights: Tensor | None = None
    token_weight: Tensor | None = None
    demonstrated: Tensor | None = None
    segment_ids: Tensor  # [T] int64 in [0, S)
    segment_sum: Callable[[Tensor], Tensor]
    turn_sum: Callable[[Tensor], Tensor] | None = None  # present if the samples have ``turn_of``
    num_tokens: int
    num_sequences: int


Over = Literal["sum", "mean", "min", "max"]
V_co = TypeVar("V_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Generic[V_co]):
    """A number, and the rule that reduces several of one name to one.

    Parts of a batch (micro-batches, DP and CP ranks) hold shares of a sum or mean, which add up; of minima and
    maxima the extreme wins. Metrics of optimizer steps reduce in the same way, but means average by ``weight``.
    """

    value: V_co
    reduction: Over = "mean"
    weight: float = 1.0  # count that an optimizer step's mean is over, for the mean of several; 0: left out


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A rank's share of the global loss; the sum of shares over micro-batches, DP and CP ranks is the loss itself."""

    loss: Tensor  # [] float32, already over the global denominator
    metrics: Mapping[str, Metric[Tensor]]  # [] each; alike in all parts of a batch


class Loss(Protocol):
    """A pure, picklable function of one micro-batch, which uses no process group and no configuration."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Returns this rank's share of the loss. Every rank that shares a sequence calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The micro-batches of one optimizer step. M is equal on all data-parallel ranks, as pipelines and EP need.

    Ranks hold rows of ``samples`` and take ``sequences`` of them; ``micro_batches`` are the same in this process.
    """

    samples: Samples  # the whole step's: other batches may have the rest of them
    sequences: tuple[tuple[Tensor, ...], ...]  # [D][M], int64 each: which sequences of the samples they hold
    micro_batches: Sequence[Sequence[Samples]]  # [D][M], each gathered from the samples when it is read
    num_tokens: int  # masked-in targets of the whole batch
    num_sequences: int  # real sequences of the whole batch (padding sequences have no masked-in target)
    spare: int = 1  # positions that an empty micro-batch copies from the start of the samples
    appends_last_targets: bool = False  # each sequence has its last target as one more input


Want = Literal["logprobs", "entropy", "logit_norms", "values", "routes", "logits", "top"]
"""A model's scores of positions: ``logprobs`` of the targets, the ``entropy`` (nats), `logit_norms` of the
targets, and a critic's ``values``, [N] float32 for each micro-batch; ``routes``, the experts that the pass took, [N,
MoE layers, top_k]; ``logits`` at temperature 1 of m masked-in positions, [m, V] float32; ``top``: Samples.ref_top."""
Scores = Sequence[Sequence["Tensor"]]
"""[D][M]: the requested quantity for each of a batch's micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one optimizer step. ``observer_metrics`` are measured by observers since the step before it."""

    grad_norm: float  # its value before clipping
    observer_metrics: Mapping[str, Metric[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMicroBatch:
    """A micro-batch that alone gives a gradient with NaN or infinity, as found by a rank that computed it."""

    data_rank: int
    micro_batch: int  # index in ``Batch.micro_batches[data_rank]``, counted over all ``backward`` of the step
    rank: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """An optimizer step that the learner skipped because its gradient was not finite: no bit of weights and moments
    changed. Without ``culprits``, no micro-batch alone reproduced such a gradient."""

    grad_norm: float
    culprits: tuple[BadMicroBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """One finished weight push, or one process's part in it, which received ``num_bytes`` from other processes."""

    version: int
    num_bytes: int
    seconds: float
    verify_seconds: float = 0.0  # the part of ``seconds`` that digests took
    quantization_error: float | None = None  # the largest relative one of a quantized tensor, by Frobenius norms


class Limited(Protocol):
    """An object with limits of sampling: SamplingParams, and sections of a configuration."""

    @property
    def top_p(self) -> float:
        """The value of SamplingParams; 1: no limit."""
        ...

    @property
    def top_k(self) -> int:
        """The value of SamplingParams; 0: no limit."""
        ...

    @property
    def min_p(self) -> float:
        """The value of SamplingParams; 0: no limit."""
        ...


def token_limits(params: Limited) -> dict[str, float]:
    """Returns the limits that leave tokens out, by name."""
    limits = {"top_p": (params.top_p, 1.0), "top_k": (params.top_k, 0), "min_p": (params.min_p, 0.0)}
    return {name: value for name, (value, unlimited) in limits.items() if value != unlimited}
