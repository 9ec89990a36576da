"""What a feature declares: an addition to training that can be left out, whose name the rest of the code does not know.

A feature of this package is a folder ``features/<name>`` with a ``feature.py`` that holds `FEATURE`. Another package
brings one by an entry point of the group `GROUP`: ``name = "its.module:FEATURE"``. A declaration is data and imports no
torch, so a login node reads it. What acts on a rank is named by text, and is imported only where it runs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType, new_class
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

from rl_megatron.entries import declared, describe_entry, load_entry
from rl_megatron.errors import ConfigError
from rl_megatron.section import Section

if TYPE_CHECKING:
    import numpy as np
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rl_megatron.algorithms.objectives import ClipLimits
    from rl_megatron.columns import Column
    from rl_megatron.config.run import RunConfig
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.config.sections.rollout import ServerSection
    from rl_megatron.engines.adapter import Sampling
    from rl_megatron.engines.http import Server
    from rl_megatron.interfaces import FrozenModel, RunComponents
    from rl_megatron.learner.heads import Head
    from rl_megatron.learner.packed import PackedMicroBatch
    from rl_megatron.models.shape import ModelShape
    from rl_megatron.observability.recorder import Row, Stopwatch
    from rl_megatron.rules import On, Rule
    from rl_megatron.training.scores import ScoredSamples
    from rl_megatron.types import Batch, Completion, GenerationRequest, Metric, RolloutGroup, Samples, Want
    from rl_megatron.weights.boxes import Box, Shape
    from rl_megatron.weights.formats.hf_folder import Stored
    from rl_megatron.weights.layouts.layout import Layout
    from rl_megatron.weights.layouts.learner import Rank, Terms
    from rl_megatron.weights.routes.ends import BoundBucket

S = TypeVar("S", bound=Section)
GROUP = "rl_megatron.features"
_FOLDERS = "rl_megatron.features"
Ask: TypeAlias = "Callable[[frozenset[Want]], Awaitable[Mapping[Want, torch.Tensor]]]"
"""Asks the policy for scores of a batch's samples, [N, ...] each."""
Generate: TypeAlias = "Callable[[GenerationRequest], Awaitable[tuple[Completion, ...]]]"
"""Asks the engine for the completions of a request, each cut at its first stop text. Raises the engine's errors."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart of its row's metric, with a band (+- ``spread``; ``band`` names it) or a peak.

    A metric with ``<name>``, or with ``<k>`` too, makes a chart for each that a run has recorded.
    """

    section: str  # of the report, whose charts are in the order of the rows
    title: str
    _: KW_ONLY
    metric: str = ""  # the table sets it to the row's
    band: str = ""
    spread: str | None = None
    peak: str | None = None
    limits: tuple[float, float] | None = None
    warm_start: bool = False  # the warm start's rows come first, shaded
    hide_constant: bool = False  # no chart for a constant metric
    compared: bool = False  # only if several runs are compared
    first: bool = False  # before all others on the page of one run


MetricTuples = tuple[tuple[str, str, str] | tuple[str, str, str, Curve], ...]
"""Name, unit and meaning of each metric of a subject, and its chart unless another's shows it, or none does."""


def _same(_learner: LearnerSection, shape: ModelShape) -> ModelShape:
    return shape


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype of torch, by its name in torch."""

    name: str


@dataclass(frozen=True, slots=True)
class Attention:
    """Kernels of attention, by their name in megatron-core's AttnBackend."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keywords:
    """Arguments of megatron-core's constructors: ``model`` of TransformerConfig, ``ddp`` of
    DistributedDataParallelConfig, ``optimizer`` of OptimizerConfig; a dtype is a `Dtype`, attention an `Attention`."""

    model: Mapping[str, object] = field(default_factory=dict)
    ddp: Mapping[str, object] = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=dict)


class EngineHooks:
    """A feature's side in the adapter of one kind of engine, in the controller. Methods here do nothing."""

    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Beginnings of options that servers must not have, each with why and what to do."""
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Variables of a server that is started with the feature."""
    counters: ClassVar[tuple[str, ...]] = ()
    """Integer fields of each completion in the engine's answers, for `answered`; 0 where an answer lacks them."""

    def __init__(self, name: str, shape: ModelShape) -> None:
        self.name, self.shape = name, shape

    def given(self, server: Server) -> Any:
        """What a running server reports of the feature, as `described` reads it; falsy: it runs without."""
        return server.features.get(self.name)

    def arguments(self, given: Any, device: str) -> Sequence[str]:
        """The options of a start on ``device``, cpu or an accelerator, where ``given`` is `Serving.given`. Raises
        ConfigError for what the engine cannot do there."""
        return ()

    def problem(self, given: Any, device: str, dp: int) -> str:
        """Why the engine cannot do what is ``given`` for the model on ``device``, with ``dp`` replicas of attention;
        or empty. Asked before a server starts."""
        return ""

    def described(self, settings: Mapping[str, Any]) -> tuple[object, Sequence[str]]:
        """What a server with the engine's ``settings`` runs, as `Serving.given`, and why no run can use it."""
        return None, ()

    def fits(self, found: object, given: object) -> bool:
        """Whether a running server that was ``described`` so fits `Serving.given`."""
        return found == given

    def models(self, server: Server) -> Sequence[str]:
        """Models beside the policy to which a push brings the same file first, as the engine names them."""
        return ()

    def answered(self, server: Server, counts: Sequence[tuple[int, ...]]) -> None:
        """Gets the ``counters`` of a request's completions."""

    async def paused(self, server: Server) -> None:
        """Runs while a push has paused a server, before it loads."""

    def row(self) -> Mapping[str, float]:
        """Metrics since the call before, once a step."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A feature's part in engine servers."""

    given: Callable[[RunConfig], object]
    """What servers are started with; falsy: nothing."""
    engines: Mapping[str, str]
    """By the engine's name, ``package.module:Class`` of its `EngineHooks`."""
    misfit: str = ""
    """Why a server that runs ``{found}`` does not fit ``{given}``, the key with its value; empty if all servers that a
    run may have fit."""
    key: str | None = None
    """The key that asks for it; None: ``given`` names it, with its value."""
    lacks: str | None = None
    """What the adapters of other engines lack and what to do, after "the adapter of <name>"; None: nothing."""
    proposed: Callable[[ServerSection], int] = lambda server: 0
    """For predictions of a step: the tokens that such a server proposes at each step of its rows."""

    def named(self, given: object) -> str:
        """How messages name the key with its value."""
        return str(given) if self.key is None else f"{self.key}={given}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushes:
    """A feature's way of pushes to servers: they get the model once, and versions of its ``adapters`` beside it."""

    asked: Callable[[RunConfig], bool]
    """True for the runs that push so."""
    sync: str
    """``package.module:function`` that makes the `ServedSync` of a run, called by `launcher.servers.pool`."""
    ends: str
    """``package.module:function``, called by `launcher.worker.learner_rank` on every rank, that makes the `Staging` of
    its adapters, and a function that gets, before a version is staged, what ``sync`` sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleModel:
    """A frozen model on ranks of its own."""

    folder: Path
    key: str
    """The key of ``folder``."""
    scores: bool = False
    """True if rewards ask it for scores of texts, while engines sample; else a step asks it for log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """The declaration of a feature. Functions in it take the learner's section and must not import torch."""

    name: str
    active: Callable[[LearnerSection], bool] = lambda _: False
    """True if the configuration turns its side in the learner on."""
    keys: Mapping[str, type[Section]] = field(default_factory=dict)
    """Its keys by the section that gets them, such as ``{"learner": DraftKeys}``."""
    may_change: frozenset[str] = frozenset()
    """Full names of those of its keys that a resumed run may change."""
    rules: Sequence[Rule] = ()
    """What its keys need and exclude, checked as a configuration is loaded, also where the feature is not active."""
    learner_rules: Sequence[Rule] = ()
    """As ``rules``, of keys of the learner alone, which critics and other models have in sections of their own."""
    problems: Callable[[LearnerSection, ModelShape | None], Iterator[str]] = lambda *_: iter(())
    """Why its keys are refused, where no row says it, and what to do. The shape is None before a model is read."""
    megatron: Callable[[LearnerSection, ModelShape], Keywords] = lambda *_: Keywords()
    """Its own keywords for megatron-core. Raises ConfigError if this machine lacks what it needs."""
    memory: Callable[[LearnerSection, ModelShape, Rank, Terms], Terms] = lambda _learner, _shape, _rank, terms: terms
    """The terms of a trained model on a rank with its bytes added, also where it is not active."""
    captures: bool = False
    """True if its side captures CUDA graphs, for which states of random numbers must be tensors. Models without
    gradients are made with its keys at their defaults."""
    work: Callable[[LearnerSection, ModelShape, float], Mapping[str, Any]] = lambda *_: {}
    """What predictions of a step's seconds read of its keys, for sequences of so many tokens in the mean: fields of
    `tools.planner.time.LearnerWork`, with their values."""
    passes: Callable[[RunConfig], float] = lambda _: 0.0
    """For the same: passes of the policy without gradients over a step's rows, as many as its side makes."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """For each of its own terms of ``memory``: what makes it smaller, for messages."""
    check_files: str | None = None
    """``package.module:function`` that gets the folder from which a run starts, whose tensors can be read, and its
    `ModelShape`, and yields a kind (problem or note) and a text for each finding."""
    metrics: MetricTuples = ()
    """Rows of the table of metrics."""
    recorded: Mapping[str, tuple[On, str]] = field(default_factory=dict)
    """By the name of a metric: the condition for a run to record it, and what to do where it does not hold."""
    adapters: str | None = None
    """``package.module:function`` that makes the `AdapterLayouts` of a learner's section where the feature is active:
    of parameters that it adds beside the model's, which alone are trained, and saved by a run."""
    shape: Callable[[LearnerSection, ModelShape], ModelShape] = _same
    """Changes the trained policy's sizes where the feature is active. Raises ConfigError for a family without it."""
    columns: Sequence[Column] = ()
    """What engines return of tokens for its sides to read."""
    asks: Mapping[str, Callable[[RunConfig], str | None]] = field(default_factory=dict)
    """By the name of a column: the key and value for which engines return it; None: they need not."""
    wants: Callable[[RunConfig], frozenset[Want]] = lambda _: frozenset()
    """Scores that it needs of the policy at the start of each step."""
    moves_reference: Callable[[RunConfig], bool] = lambda _: False
    """True if its side in a run's steps moves the weights of the reference, if there is one."""
    roles: Callable[[RunConfig], Mapping[str, RoleModel]] = lambda _: {}
    """Its models on ranks of their own, by their roles."""
    serving: Serving | None = None
    """Its part in engine servers."""
    pushes: Pushes | None = None
    """How it pushes its ``adapters``."""
    optimizer: str = ""
    """For ``learner.optimizer.name`` of the feature's name: ``package.module:function`` that makes the optimizer of a
    rank's chunks from megatron-core's OptimizerConfig and these. Every rank calls it."""
    prepare: str | None = None
    """``package.module:function`` that gets the shape of a policy, the learner's section and this rank's chunks of it,
    before they get gradient buffers, and adds parameters. Every rank calls it."""
    export: str | None = None
    """``package.module:function`` as `exported`, for checkpoints of its own."""
    learner: str | None = None
    """``package.module:function`` that makes the `LearnerHooks` of a rank from `Built`; None leaves a model alone."""
    step: str | None = None
    """``package.module:function`` that makes the `StepHooks` of a run's configuration and `RunComponents`; None:
    none."""
    served: str | None = None
    """``package.module:function`` that makes its models behind servers, by their roles: from a run's configuration, the
    policy's `ModelShape`, what makes the adapter of an engine, and what hears how far it is. It raises EngineError for
    a server that does not answer."""
    sampler: str | None = None
    """``package.module:function`` that makes the `SamplerHooks` of a run's configuration and tokenizer; None: none."""
    encoding: str | None = None
    """``package.module:function`` that makes the `Encoding` of a configuration; None for one that the feature leaves
    alone. Importing the module needs no torch."""
    compression: str | None = None
    """``package.module:function`` that makes the `Compression` of a configuration, for a plan on a rank; None: none."""


class AdapterLayouts(Hashable, Protocol):
    """The places of the parameters that a feature adds beside the model's. Reading it imports no torch."""

    section: ClassVar[str]
    """Its keys: of their rank, of experts' (expert_rank), and of whose matrices have some (targets)."""
    untrained: ClassVar[str]
    """``package.module:Class`` of the `RandomWeights` of their values before the first step."""

    @property
    def given(self) -> str:
        """The key that asks for them, with its value."""
        ...

    def on_ranks(self, learner: Layout) -> Layout:
        """These parameters over the ranks of the ``learner``'s layout, whose rows are the model's."""
        ...

    def in_files(self, learner: Layout, hf: Layout) -> Layout:
        """These parameters as the folders have them that servers load: beside the tensors of ``hf``."""
        ...

    def ranks(self, learner: Layout) -> Mapping[str, int]:
        """The rank of each Hugging Face matrix that has some, by its pattern."""
        ...


class Encoding(Protocol):
    """What engines hold in place of the policy's weights: other numbers, and tensors beside them. Both routes of a push
    bring it, and engines are compared with it."""

    @property
    def tolerance(self) -> float:
        """How far, in nats, an engine's log-probs may be from the learner's, if the run's dtype alone allows less."""
        ...

    def stored(self, entries: Stored) -> Stored:
        """The tensors of the encoded checkpoint, of which ``entries`` are the plain one's. Raises ConfigError for a
        model that cannot be encoded."""
        ...

    def config(self, shapes: Mapping[str, Shape]) -> dict[str, Any]:
        """The ``quantization_config`` of the encoded checkpoint's config.json; ``shapes`` are the plain one's."""
        ...

    def layout(self, layout: Layout, hf: Layout) -> Layout:
        """``layout`` with the tensors that are added. ``hf`` is the plain checkpoint's."""
        ...

    def write(self, name: str, values: Tensor, held: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Writes a plain tensor into those of the encoded checkpoint, ``held``. Returns the squared Frobenius norms of
        the tensor and of what was changed; None if nothing was. Raises SyncError that names a tensor that cannot be
        encoded."""
        ...

    def encoder(self, layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> Encoder:
        """The sender's side on a learner's ``rank``, whose ``tensors``, by local name, training changes in place.
        ``layout`` is the learner's, by `layout`."""
        ...


class Encoder(Protocol):
    """Encodes what one learner rank sends straight into engine ranks, a version at a time."""

    added: Mapping[str, Tensor]
    """Its tensors that ``layout`` adds to the rank's own."""
    changes: Mapping[str, tuple[float, float]]
    """What `Encoding.write` returns by tensor, summed up over the boxes asked for by `encoded` since `begin`."""

    def begin(self, reduce: Callable[[Tensor], object]) -> None:
        """Starts the version that the tensors hold now, and fills ``added``. Every learner rank calls it. ``reduce``
        makes a float32 tensor [n] the elementwise maximum over them, in place. Raises SyncError, on a rank that holds
        it, for a tensor that cannot be encoded."""
        ...

    def pack(self, name: str, param: str, place: Box, out: Tensor) -> bool:
        """Writes the numbers of a box of ``param``, part of tensor ``name``, into ``out``; False: sent as they are."""
        ...

    def encoded(self, name: str, box: Box, values: Tensor) -> Tensor | None:
        """The numbers of a box of a tensor, as engines hold them; None if they are sent as they are."""
        ...

    def check(self, dtype_of: Callable[[str], torch.dtype]) -> None:
        """Raises WeightError for a tensor that engine ranks hold as another dtype than it is sent in."""
        ...


class Compression(Protocol):
    """How parcels travel between the processes of one plan. What arrives is unpacked to the bytes that were packed, and
    digests are of these."""

    def begin(self, gather: Callable[[int], Sequence[int]]) -> None:
        """Starts a version. Every process calls it. ``gather`` returns a number of each, by rank."""
        ...

    def compresses(self, peer: int) -> bool:
        """False if parcels to and from ``peer`` travel as they are in this version. Both ends say the same."""
        ...

    def pack(self, parcel: BoundBucket) -> Tensor | None:
        """The bytes [n] uint8 to send in place of the packed parcel's buffer with its trailer; None: the buffer."""
        ...

    def unpack(self, frame: Tensor, parcel: BoundBucket) -> None:
        """Writes the buffer of the parcel from what `pack` returned."""
        ...

    def finished(self, version: int) -> None:
        """Runs once all of a version has arrived and was verified."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A model that is asked for log-probs in place of the reference."""

    role: str
    """What its scores are known by."""
    model: str
    """The role of the model."""
    part: NDArray[np.int64]
    """The sequences of a batch that it judges."""
    read: Samples | None = None
    """What it reads in place of them, in their order."""
    longest: int = 0
    """The most positions of a sequence that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judges:
    """All that stand in for the reference on one batch."""

    asked: Sequence[Judge]
    columns: Callable[[Mapping[tuple[str, Want], Tensor]], Mapping[str, Tensor]]
    """The samples' ``ref_logprobs`` and ``ref_top`` from what each said, by its role. Runs in a thread."""


class SamplerHooks:
    """A feature's side in the sampler of completions that a reward judges. The methods here do nothing."""

    async def generated(
        self, request: GenerationRequest, generate: Generate, keep: Callable[[Completion], None]
    ) -> tuple[Completion, ...] | None:
        """The completions of a request, which it asks for by ``generate``; a checkpoint has what ``keep`` gets of one
        until then. None: the request is left alone."""
        return None

    async def grouped(
        self, request: GenerationRequest, group: RolloutGroup, completions: Sequence[Completion]
    ) -> RolloutGroup:
        """The scored group of the request's completions."""
        return group


class StepHooks:
    """A feature's side in the controller of a run that trains on groups. The methods here do nothing."""

    def group_row(self, groups: Sequence[RolloutGroup]) -> Row:
        """Metrics of a step's groups, of which there is at least one. Runs in a thread."""
        return {}

    def sampled(self, samples: Samples) -> Samples:
        """The samples that models read, of those that have all columns of the engines. Runs in a thread."""
        return samples

    def judges(self, samples: Samples, groups: Sequence[RolloutGroup]) -> Judges | None:
        """What stands in for the reference on the samples, which are of ``groups``; None: nothing. Runs in a thread."""
        return None

    def scored(self, found: ScoredSamples) -> ScoredSamples:
        """The batch to train on, once it is scored and before credit is assigned. Runs in a thread."""
        return found

    def described(self, found: ScoredSamples) -> Row:
        """Metrics of a scored batch. Runs in a thread, beside the first optimizer step."""
        return {}

    async def limits(self, batch: Batch, watch: Stopwatch) -> ClipLimits | None:
        """The limits of the ratios of a minibatch, right before the policy trains on it; None for the algorithm's."""
        return None

    async def trained(self, found: ScoredSamples, ask: Ask) -> Row:
        """Runs after the optimizer steps of a batch; returns metrics. ``ask``: for scores of its samples by now."""
        return {}

    async def stepped(self, step: int, watch: Stopwatch) -> None:
        """Runs after the optimizer steps of a step, before its push, also if there were none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A trained model on one rank, with its optimizer, before the first pass."""

    shape: ModelShape
    learner: LearnerSection
    device: torch.device
    models: Sequence[GPTModel]
    """This rank's pipeline chunks."""
    chunks: Sequence[DistributedDataParallel]
    """What wraps each of ``models``; the pipeline schedule calls them."""
    head: Head
    gather: Callable[[], None]
    """Gathers the weights of the last step, if the next pass would do it otherwise. Every rank calls it."""


class ChunkAdapters(Protocol):
    """What a feature sets as ``adapters`` of a chunk of the model to which it has added parameters, whose names have
    ``mark``, and in place of a weight's end with _A or _B. The chunk's own are frozen."""

    mark: ClassVar[str]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The added parameters under global names."""
        ...

    def off(self) -> AbstractContextManager[None]:
        """Passes in it compute with the frozen weights alone."""
        ...

    def merged(self) -> AbstractContextManager[None]:
        """A context in which the chunk's own tensors hold the weights that passes compute with."""
        ...

    def sharded_state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the chunk, for any layout."""
        ...


class LearnerHooks:
    """A feature's side in a rank that trains a model. The methods here do nothing. Every rank calls each of them but
    `after_loss`, in the order of `features`."""

    chunks: Sequence[DistributedDataParallel] = ()
    """Modules of the feature's own. They are pushed, saved, cleared and reduced with the model's chunks."""
    optimizers: Sequence[MegatronOptimizer] = ()
    """The optimizers of ``chunks``. They are saved and cleared with the model's."""
    says: frozenset[Want] = frozenset()
    """The scores of positions that `scored` returns."""

    def started(self, folder: Path, family: str | None) -> None:
        """Runs before the policy takes the weights of ``folder``, of either kind; not where a seed makes them.
        ``family`` is ``learner.model``."""

    def saving(self, folder: Path) -> None:
        """Runs before the model's shards are written into ``folder``. Raises OSError."""

    def loading(self, folder: Path) -> None:
        """Runs before the shards that a run wrote are loaded. Raises CheckpointError if they are not this model's."""

    def pack(self, packed: PackedMicroBatch, samples: Samples) -> PackedMicroBatch:
        """Adds what the feature reads of a micro-batch to ``packed.extras``."""
        return packed

    def warm_up(self) -> Sequence[PackedMicroBatch]:
        """Micro-batches of a pass with gradients of 0 that is made before the first, if there are any."""
        return ()

    def around_score(
        self, micro_batches: Sequence[Samples], weights: Mapping[str, Tensor] | None
    ) -> AbstractContextManager[None]:
        """Makes a context for a pass that scores ``micro_batches``, with ``weights``, if given, for the model's."""
        return nullcontext()

    def around_pass(self) -> AbstractContextManager[None]:
        """Makes a context for all micro-batches of one training pass."""
        return nullcontext()

    def around_forward(
        self, chunk: DistributedDataParallel, micro_batch: PackedMicroBatch, num_tokens: int
    ) -> AbstractContextManager[None]:
        """Makes a context for the forward pass of a micro-batch through one of `Built.chunks`. ``num_tokens``: the
        trained tokens of the whole minibatch."""
        return nullcontext()

    def around_scored(
        self, chunk: DistributedDataParallel, micro_batch: PackedMicroBatch, want: frozenset[Want]
    ) -> AbstractContextManager[None]:
        """Makes a context as `around_forward` does, in a pass for the scores in ``want``."""
        return nullcontext()

    def scored(
        self, want: frozenset[Want], packed: Sequence[PackedMicroBatch], micro_batches: Sequence[Samples]
    ) -> Mapping[Want, list[Tensor]]:
        """Runs after a pass for the scores in ``want``, and returns those of them that are its own for each of
        ``micro_batches``, on the CPU. ``packed`` has copies at its end where a pipeline needs more."""
        return {}

    def after_loss(self, micro_batch: PackedMicroBatch, num_tokens: int) -> Mapping[str, Metric[torch.Tensor]]:
        """Runs after the loss of a micro-batch, on the last pipeline stage alone. May accumulate gradients of
        ``chunks``, and nothing of the model's. ``num_tokens``: the trained tokens of the whole minibatch. Returns this
        rank's share of metrics."""
        return {}

    def norm(self) -> float:
        """The L2 norm of the gradients of ``chunks``. If it is not finite, the whole step is skipped."""
        return 0.0

    def step(self, learning_rate: float) -> Mapping[str, Metric[float]]:
        """Makes an optimizer step of ``chunks`` after `norm` and the model's step; returns metrics."""
        return {}

    def read(self) -> Mapping[str, Metric[float]]:
        """Metrics of the passes since the last step, over all ranks, after a step or where none is made."""
        return {}

    def clear(self) -> None:
        """Forgets what passes have counted: before the first pass of a step, and where a pass is made for a test."""

    def changed(self) -> None:
        """Runs after the model's weights were stepped, loaded or replaced."""


@cache
def features() -> Mapping[str, Feature]:
    """All features by name, in the order in which they act: those of this package by their folders' names, then those
    of installed ones.

    Raises ConfigError if an installed one cannot be loaded, is not a `Feature`, or has the name of another.
    """
    own = (one.name for one in pkgutil.iter_modules(importlib.import_module(_FOLDERS).__path__) if one.ispkg)
    found: dict[str, Feature] = {name: load_side(f"{_FOLDERS}.{name}.feature:FEATURE") for name in sorted(own)}
    for entry in declared("feature", GROUP).values():
        feature, said = load_entry("feature", entry), describe_entry("feature", entry)
        if not isinstance(feature, Feature):
            raise ConfigError(f"{said} is a {type(feature).__name__}; it must be a Feature")
        if feature.name != entry.name:
            raise ConfigError(f"{said} has the name {feature.name!r}; give both the same name")
        if entry.name in found:
            raise ConfigError(f"{said} has the name of another feature; rename it, or uninstall one of them")
        found[entry.name] = feature
    return MappingProxyType(found)


def active(learner: LearnerSection) -> tuple[Feature, ...]:
    """The features that the configuration turns on, in the order of `features`. Raises as `features`."""
    return tuple(feature for feature in features().values() if feature.active(learner))


def without_captures(learner: LearnerSection) -> LearnerSection:
    """The section with the keys of features that capture at their defaults."""
    kinds = (one.keys["learner"] for one in features().values() if one.captures)
    return learner.model_copy(update={name: value for kind in kinds for name, value in kind()})


def feature_rules() -> list[Rule]:
    """The rules of all features. Raises as `features`."""
    return [rule for feature in features().values() for rule in feature.rules]


@cache
def declared_columns() -> Mapping[str, Column]:
    """Every declared column, by name. Raises as `features`."""
    return {column.name: column for feature in features().values() for column in feature.columns}


def asked_columns(config: RunConfig) -> dict[str, str]:
    """The columns that engines must return for the run, each with the first key that needs it. Raises as `features`."""
    found: dict[str, str] = {}
    for name, asks in (pair for feature in features().values() for pair in feature.asks.items()):
        if (key := asks(config)) is not None:
            found.setdefault(name, key)
    return found


def wanted(config: RunConfig) -> frozenset[Want]:
    """The scores that features need of the policy at the start of each step. Raises as `features`."""
    found: frozenset[Want] = frozenset()
    return found.union(*(feature.wants(config) for feature in features().values()))


def role_models(config: RunConfig) -> dict[str, RoleModel]:
    """The models of features on ranks of their own by role, those that score texts last. Raises as `features`."""
    found = [pair for feature in features().values() for pair in feature.roles(config).items()]
    return dict(sorted(found, key=lambda pair: pair[1].scores))


def load_side(name: str) -> Any:
    """The object at ``package.module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def adapter_layouts(learner: LearnerSection) -> AdapterLayouts | None:
    """The parameters beside the model's that alone are trained; None: the model is. Raises as `features`."""
    sides = (one.adapters for one in active(learner) if one.adapters is not None)
    return next((load_side(side)(learner) for side in sides), None)


def exported(source: Path, base: Path, out: Path, *, family: str | None, dtype: str) -> bool:
    """Writes the Hugging Face folder ``out`` of a checkpoint that a feature has saved beside the model of ``base``, in
    ``dtype``. False, and nothing is written, for checkpoints of whole models. Raises as `megatron_to_hf`."""
    sides = (one.export for one in features().values() if one.export is not None)
    return any(load_side(side)(source, base, out, family=family, dtype=dtype) for side in sides)


def prepare_chunks(shape: ModelShape, learner: LearnerSection, models: Sequence[GPTModel]) -> None:
    """Has active features add parameters to a policy's chunks. Every rank calls it. Raises as `features`."""
    for side in (one.prepare for one in active(learner) if one.prepare is not None):
        load_side(side)(shape, learner, models)


def learner_hooks(built: Built) -> tuple[LearnerHooks, ...]:
    """The learner sides of all active features for a model. Every rank calls it. Raises as `features`."""
    made = (load_side(one.learner)(built) for one in active(built.learner) if one.learner is not None)
    return tuple(hooks for hooks in made if hooks is not None)


def step_hooks(config: RunConfig, roles: RunComponents) -> tuple[StepHooks, ...]:
    """The controller's sides of all features for a run. Raises as `features`."""
    made = (load_side(one.step)(config, roles) for one in features().values() if one.step is not None)
    return tuple(hooks for hooks in made if hooks is not None)


def sampler_hooks(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[SamplerHooks, ...]:
    """The sides of all features in a run's sampler. Raises as `features`."""
    made = (load_side(one.sampler)(config, tokenizer) for one in features().values() if one.sampler is not None)
    return tuple(hooks for hooks in made if hooks is not None)


async def served_models(
    config: RunConfig, shape: ModelShape, adapter_of: Callable[[str], Sampling], tell: Callable[[str], None]
) -> dict[str, FrozenModel]:
    """The models of features behind servers, by their roles. Raises as `features` and `Feature.served`."""
    found: dict[str, FrozenModel] = {}
    for side in [one.served for one in features().values() if one.served is not None]:
        found |= await load_side(side)(config, shape, adapter_of, tell)
    return found


def engine_hooks(engine: str, shape: ModelShape) -> tuple[EngineHooks, ...]:
    """The engine sides of all features for an engine and its model, active or not. Raises as `features`."""
    sides = ((one.name, one.serving.engines.get(engine)) for one in features().values() if one.serving is not None)
    return tuple(load_side(side)(name, shape) for name, side in sides if side is not None)


def pushes_of(config: RunConfig) -> Pushes | None:
    """A feature's own pushes of a run; None: whole models are pushed. Raises as `features`."""
    found = (one.pushes for one in features().values() if one.pushes is not None)
    return next((one for one in found if one.asked(config)), None)


def encoding_of(config: RunConfig) -> Encoding | None:
    """What engines hold in place of the policy's weights; None: these. Raises as `features`, and ConfigError if several
    features encode them."""
    found: Encoding | None = _only("encoding", config)
    return found


def compression_of(config: RunConfig) -> Compression | None:
    """How parcels of weights travel over a process group. Raises as `features`, and ConfigError for several."""
    found: Compression | None = _only("compression", config)
    return found


def _only(side: str, config: RunConfig) -> Any:
    """The one that some feature makes, if any does."""
    names = {name: where for name, one in features().items() if (where := getattr(one, side)) is not None}
    made = {name: found for name, where in names.items() if (found := load_side(where)(config)) is not None}
    if len(made) > 1:
        raise ConfigError(f"the features {' and '.join(made)} each bring the {side} of weights; turn on one of them")
    return next(iter(made.values()), None)


def given_to_servers(config: RunConfig) -> dict[str, object]:
    """What servers are started with for each feature that has a part in them. Raises as `features`."""
    return {name: one.serving.given(config) for name, one in features().items() if one.serving is not None}


def keys_of(path: str) -> Mapping[str, type[Section]]:
    """The classes of keys that features add to the section at ``path``, by the feature. Raises as `features`."""
    return {name: feature.keys[path] for name, feature in features().items() if path in feature.keys}


def resume_keys() -> Mapping[str, bool]:
    """True for each key of features that a resumed run may change, False for others, by full name."""
    names = (
        (one, f"{path}.{key}")
        for one in features().values()
        for path, kind in one.keys.items()
        for key in kind.model_fields
    )
    return {name: name in one.may_change for one, name in names}


def with_features(path: str) -> Callable[[type[S]], type[S]]:
    """A decorator that adds the keys of features to the section at ``path``, after its own. Raises ConfigError for a
    key that the section has already."""

    def extend(section: type[S]) -> type[S]:
        kinds, seen = keys_of(path), set(section.model_fields)
        for name, keys in kinds.items():
            if twice := seen & keys.model_fields.keys():
                raise ConfigError(f"the feature {name!r} brings {path}.{min(twice)}, which is there already; rename it")
            seen |= keys.model_fields.keys()
        if not kinds:
            return section
        named = {"__module__": section.__module__, "__qualname__": section.__qualname__, "__doc__": section.__doc__}
        made: type[S] = new_class(
            section.__name__, (*reversed([*kinds.values()]), section), exec_body=lambda names: names.update(named)
        )
        return made

    return extend
