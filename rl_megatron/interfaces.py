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
"""Rewards and the values that algorithms compute from them are float32, at most 3.4e38: one beyond this is a fault."""


class RewardFunction(Protocol):
    """Scores completions of one prompt."""

    async def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]
    ) -> Sequence[RewardResult]:
        """Returns one result per completion, in order. ``texts`` are the decoded completions.

        `rewards.scoring.score` fills in each ``error``: a function raises, or gives a total that is not finite.
        """
        ...


class RolloutEngine(Protocol):
    """Samples completions with recorded log-probs and weight versions."""

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Returns ``request.num_completions`` completions. Many calls may be in flight. Raises EngineError."""
        ...

    def partial_completion(self, request_id: str) -> Completion | None:
        """Returns the partial completion of a running request of one completion, as far as it is known here.

        Servers report it when an update or `collect_partials` aborts a request, which then continues. None: nothing is
        known, which is always so for the engine in the learner's processes."""
        ...

    async def collect_partials(self) -> None:
        """Makes all sampled tokens of running requests of one completion known to `partial_completion`; the requests
        then continue.

        The engine in the learner's processes has no running request when this is called.
        """
        ...


class WeightSync(Protocol):
    """Moves the learner's weights into the rollout engine."""

    async def push(self, version: int) -> WeightUpdate:
        """Moves all weights and serves them as ``version``: all or nothing.

        Engine servers pause or abort requests in flight; the engine in the learner's processes allows none.
        """
        ...

    async def export(self, folder: Path) -> None:
        """Writes the learner's weights as a Hugging Face folder, under a new name that is then renamed.
        An existing ``folder`` stays until then."""
        ...


class Scorer(Protocol):
    """A model that scores every position of a batch. Several can be called concurrently, each for several scores."""

    async def score(self, batch: Batch, want: frozenset[Want]) -> Mapping[Want, Scores]:
        """Returns all scores in ``outputs``, from one pass. Routers replay the batch's ``routes``, if any, unless they
        record.

        Raises RLMegatronError for a score that this model cannot compute."""
        ...

    async def free_step(self) -> None:
        """Frees the data of batches that ranks keep for the step's next ones. Called when the step has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """A forward pass of the model of a ``role``, and the scores that it computes for a batch.

    ``replays_routes``: its routers take the batch's ``routes``, if any. ``appends_last_targets``: each sequence has its
    last target as one more input."""

    role: str
    outputs: frozenset[Want]
    replays_routes: bool = False
    appends_last_targets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The scores of a pass, and the seconds of its slowest rank."""

    scores: Mapping[Want, Scores]
    seconds: float


class SharedRanks(Protocol):
    """Models on the same ranks. One request sends them a batch and asks for the scores of all passes over it."""

    @property
    def roles(self) -> Collection[str]:
        """The models' roles."""
        ...

    async def score(self, batch: Batch, passes: Sequence[ForwardPass]) -> Sequence[PassResult]:
        """Runs the passes in this order and returns the result of each. Raises RLMegatronError for a score that a model
        cannot compute."""
        ...


class FrozenModel(Scorer, Protocol):
    """A model that is not trained, sharded like the policy: a reference, a teacher, a reward model."""

    async def load_weights(self, folder: Path) -> None:
        """Loads a Hugging Face folder's weights (a critic: the value layer's only from a reward model)."""
        ...

    async def release_memory(self) -> None:
        """Frees the GPU memory kept for the next computation, for other processes; that computation takes it again."""
        ...


class SaveHandle(Protocol):
    """A save that training need not wait for."""

    async def is_written(self, *, wait: bool = False) -> bool:
        """True if every rank has written its shards, or failed to. With ``wait``, waits until that is so.

        Not collective: no rank waits for another, so a write may take longer than a collective's time limit.
        """
        ...

    async def finalize(self) -> SaveDigests:
        """Waits until everything is synced and returns the writers' digest of each file, by name. Collective:
        `is_written` comes first for all saves that share ranks.

        Raises CheckpointError with the reason if nothing could be written.
        """
        ...


class Learner(FrozenModel, Protocol):
    """A model that is trained, a policy or a critic, and its optimizer, on any number of ranks.

    If micro-batches have ``routes``, its routers take these.
    """

    async def backward(self, batch: Batch, loss: Loss) -> Mapping[str, Metric[float]]:
        """Adds a batch's gradients to those since the last ``step``. Returns ``loss`` and the loss's metrics."""
        ...

    async def step(self, learning_rate: float) -> StepResult | SkippedStep:
        """Makes an optimizer step with the gradients that were added, if they are finite, and drops them."""
        ...

    async def zero_grad(self) -> None:
        """Drops the gradients since the last ``step``; neither weights nor the optimizer change."""
        ...

    async def update_reference(self, rate: float) -> None:
        """Moves the reference on the policy's ranks: (1 - ``rate``) of itself, ``rate`` of the policy's weights."""
        ...

    async def save(self, folder: Path) -> SaveHandle:
        """Writes model and optimizer shards into ``folder`` (which exists), as they are now, and for the policy the
        reference that it leads.

        Returns once training can continue: with ``checkpoint.async_save`` when they are copied, otherwise when written.
        The save before must be durable. Raises CheckpointError with the reason if nothing could be written.
        """
        ...

    async def load(self, folder: Path, files: Mapping[str, Digest]) -> None:
        """Continues bit-equal from ``save``, after the readers have checked every file against ``files``.

        Raises CheckpointError that names each torn, changed or missing file.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """Everything a run needs, as started by a launcher. Models are known by their roles' names."""

    learners: Mapping[str, Learner]
    """``policy``, and ``critic`` if the algorithm has one."""
    frozen_models: Mapping[str, FrozenModel]
    """``reference`` if there is one, and ``teacher_<name>`` of each of ``algorithm.kl.teachers`` that is not the
    policy itself, on ranks or in servers. A step calls them, and frees the data that they hold for it."""
    engine: RolloutEngine
    weight_sync: WeightSync
    reward_models: Mapping[str, FrozenModel] = field(default_factory=dict)
    """``reward_<name>`` of each of ``reward_models``, on separate ranks: rewards call them while engines sample."""
    shared_ranks: Sequence[SharedRanks] = ()
    """Models called by one request, by the ranks that hold them. A model outside them gets separate requests."""
    engine_metrics: Callable[[], Mapping[str, float]] = dict
    """Returns the metrics of the engine's servers; every step calls it once, after its push."""
    gpu_names: Sequence[str] = ()
    """CUDA's name for the GPU of each rank of the policy; empty on CPUs."""
    rank_metrics: Callable[[], Mapping[str, float]] = dict
    """Returns the metrics of the ranks' speed since the last call; every step calls it once, at its end."""

    record_kernels: Callable[[Path], AbstractAsyncContextManager[None]] = lambda folder: nullcontext()
    """Records the kernels of the first rank of each role while its context is open, into a folder."""

    @property
    def policy(self) -> Learner:
        """The learner with the weights that are pushed."""
        return self.learners["policy"]

    @property
    def models(self) -> dict[str, Scorer]:
        """Every model, by its role."""
        return {**self.learners, **self.frozen_models, **self.reward_models}


def ignore_progress(text: str) -> None:
    """Ignores the progress of a start."""


class Launcher(Protocol):
    """Starts the processes of a run and ends them."""

    def start(
        self, config: RunConfig, tell: Callable[[str], None] = ignore_progress
    ) -> AbstractAsyncContextManager[RunComponents]:
        """Enter: processes are up, weights loaded. Exit: all have ended. Raises WorkerFailure with rank and traceback.

        ``tell`` is called with the number of ready ranks; the default ignores it.
        """
        ...
