"""The Protocols through which the trainer uses learners, engines, weights and rewards.

The single controller process calls every method; an implementation may be one process or a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rl_megatron.digests import Digest, SaveDigests
from rl_megatron.types import (
    Batch,
    Completion,
    GenerationRequest,
    Loss,
    Metric,
    Prompt,
    RewardResult,
    Scores,
    SkippedStep,
    StepResult,
    Want,
    WeightUpdate,
)

if TYPE_CHECKING:
    from rl_megatron.config.run import RunConfig


LARGEST_REWARD = 1e30
"""Rewards and what algorithms make of them are float32, whose largest number is 3.4e38: one beyond this is a fault."""


class RewardFunction(Protocol):
    """Scores completions of one prompt."""

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[RewardResult]:
        """One answer per completion, in order. ``texts`` are the completions decoded.

        `rewards.scoring.score` fills in each ``error``: a function raises, or gives a total that is not finite.
        """
        ...


class RolloutEngine(Protocol):
    """Samples completions with recorded log-probs and weight versions."""

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """``request.num_completions`` completions. Many calls may be in flight. Raises EngineError."""
        ...

    def so_far(self, request_id: str) -> Completion | None:
        """What a running request of one completion has sampled, as far as it is known here.

        Servers tell it when an update or `interrupt` ends a request, which then goes on. None: nothing is known, as of
        the engine in the learner's processes.
        """
        ...

    async def interrupt(self) -> None:
        """Have `so_far` know all tokens that running requests of one completion have sampled; they go on from these.

        The engine in the learner's processes has none that run while this is called.
        """
        ...


class WeightSync(Protocol):
    """Moves the learner's weights into the rollout engine."""

    async def push(self, version: int) -> WeightUpdate:
        """Move all weights and serve them as ``version``: all or nothing.

        Engine servers pause or abort requests in flight; the engine in the learner's processes allows none.
        """
        ...

    async def export(self, folder: Path) -> None:
        """Write the learner's weights as a Hugging Face folder: a new name, then a rename. A
        folder that ``folder`` names already stays until then."""
        ...


class Scorer(Protocol):
    """A model that says something of every position of a batch. Several may be asked at once, and one many things."""

    async def score(self, batch: Batch, want: frozenset[Want]) -> Mapping[Want, Scores]:
        """All scores in ``want``, in one pass. Routers replay the ``routes`` of the batch, if any, unless they record.

        Raises RLMegatronError for what this model cannot compute.
        """
        ...

    async def forget(self) -> None:
        """Free what the ranks keep of batches for the step's next ones: the step has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """A forward pass of the model of a ``role``, and all that it is to say of a batch.

    ``replays``: its routers take the batch's ``routes``, if any. ``last_tokens``: each sequence has its last target as
    one more input.
    """

    role: str
    want: frozenset[Want]
    replays: bool = False
    last_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What a pass said, and the seconds of its slowest rank."""

    scores: Mapping[Want, Scores]
    seconds: float


class SharedRanks(Protocol):
    """Models on the same ranks. One request brings a batch to these, and asks for the scores of all passes over it."""

    @property
    def roles(self) -> Collection[str]:
        """The models' roles."""
        ...

    async def score(self, batch: Batch, passes: Sequence[ForwardPass]) -> Sequence[PassResult]:
        """What each of the passes says, which are made in this order. Raises RLMegatronError for what a model cannot
        compute."""
        ...


class FrozenModel(Scorer, Protocol):
    """A model that nobody trains, sharded as the policy: a reference, a teacher, a reward model."""

    async def start_from(self, folder: Path) -> None:
        """Take a Hugging Face folder's weights (a critic: the value layer's from a reward model alone)."""
        ...

    async def release(self) -> None:
        """Leave the GPU memory that is kept for the next computation to other processes; that one takes it again."""
        ...


class SaveHandle(Protocol):
    """A save that training need not wait for."""

    async def written(self, *, wait: bool = False) -> bool:
        """Whether every rank has written its shards, or failed to; with ``wait``, once that is so.

        Not collective: no rank waits for another, so a write may take longer than a collective's time limit.
        """
        ...

    async def durable(self) -> SaveDigests:
        """What those who wrote say of each file, by its name, once everything is synced. Collective: of all savings
        that share ranks `written` comes first.

        Raises CheckpointError that says why nothing could be written.
        """
        ...


class Learner(FrozenModel, Protocol):
    """A model that is trained, a policy or a critic, and its optimizer, over however many ranks.

    Where micro-batches have ``routes``, its routers take these.
    """

    async def backward(self, batch: Batch, loss: Loss) -> Mapping[str, Metric[float]]:
        """Add a batch's gradients to those since the last ``step``; ``loss``, and the metrics of the loss."""
        ...

    async def step(self, learning_rate: float) -> StepResult | SkippedStep:
        """Makes an optimizer step with the gradients that were added, if they are finite, and drops them."""
        ...

    async def drop(self) -> None:
        """Drop the gradients since the last ``step``; neither weights nor the optimizer change."""
        ...

    async def lead(self, rate: float) -> None:
        """Make the reference on the policy's ranks (1 - ``rate``) of itself and ``rate`` of the policy's weights."""
        ...

    async def save(self, folder: Path) -> SaveHandle:
        """Write model and optimizer shards into ``folder`` (which exists), as they are now, and of the policy the
        reference that it leads.

        Returns once training may go on: with ``checkpoint.async_save`` when they are copied, else when written.
        The one before must be durable. Raises CheckpointError that says why nothing could be written.
        """
        ...

    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        """Continue bit-equal from ``save``, once those who read have found every file as ``files`` say.

        Raises CheckpointError that names what is torn, changed or missing.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """Everything a run needs, as started by a launcher. Models are known by their roles' names."""

    learners: Mapping[str, Learner]
    """``policy``, and ``critic`` where the algorithm has one."""
    frozen: Mapping[str, FrozenModel]
    """``reference`` where there is one, and ``teacher_<name>`` of each of ``algorithm.kl.teachers`` that is not the
    policy itself, on ranks or behind servers: a step asks them, and frees what they hold of it."""
    engine: RolloutEngine
    weights: WeightSync
    reward_models: Mapping[str, FrozenModel] = field(default_factory=dict)
    """``reward_<name>`` of each of ``reward_models``, on ranks of its own: rewards ask them, while engines sample."""
    together: Sequence[SharedRanks] = ()
    """Models that are asked by one request, by the ranks that hold them; one that is in none is asked by itself."""
    engine_metrics: Callable[[], Mapping[str, float]] = dict
    """What a row of metrics says of the engine's servers; every step calls it once, after its push."""
    gpus: Sequence[str] = ()
    """CUDA's name for the GPU of each rank of the policy; none of CPUs."""
    rank_metrics: Callable[[], Mapping[str, float]] = dict
    """What a row of metrics says of the ranks' speed since the last call; every step calls it once, at its end."""

    record_kernels: Callable[[Path], AbstractAsyncContextManager[None]] = lambda folder: nullcontext()
    """Records the kernels of the first rank of each role while its context is open, into a folder."""

    @property
    def policy(self) -> Learner:
        """The learner whose weights are pushed."""
        return self.learners["policy"]

    @property
    def models(self) -> dict[str, Scorer]:
        """Every model, by its role."""
        return {**self.learners, **self.frozen, **self.reward_models}


def ignore_progress(text: str) -> None:
    """Ignore how far a start is."""


class Launcher(Protocol):
    """Starts the processes of a run and ends them."""

    def start(
        self, config: RunConfig, tell: Callable[[str], None] = ignore_progress
    ) -> AbstractAsyncContextManager[RunComponents]:
        """Enter: processes are up, weights loaded. Exit: all are gone. Raises WorkerFailure with rank and traceback.

        ``tell`` is called with how many ranks are ready; the default ignores it.
        """
        ...
