"""The declaration of a feature: an optional addition to training that the rest of the code does not know by name.

A feature of this package is a folder ``features/<name>`` with a ``feature.py`` that holds `FEATURE`. Another package
brings one by an entry point of the group `GROUP`: ``name = "its.module:FEATURE"``. A declaration is data and imports no
torch, so a login node reads it. Code that acts on a rank is named by text, and is imported only on the rank.
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
"""Requests scores of a batch's samples from the policy, [N, ...] each."""
Generate: TypeAlias = "Callable[[GenerationRequest], Awaitable[tuple[Completion, ...]]]"
"""Returns the engine's completions of a request, each cut at its first stop text. Raises the engine's errors."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A chart of its row's metric, with a band (+- ``spread``; ``band`` names it) or with dotted ``others``.

    A metric with ``<name>``, or with ``<k>`` too, makes a chart for each that a run has recorded.
    """

    section: str  # section of the report; its charts are in the order of the rows
    title: str
    _: KW_ONLY
    metric: str = ""  # the table sets it to the row's
    band: str = ""
    spread: str | None = None
    others: tuple[str, ...] = ()  # metrics that are dotted lines in the chart of one run
    limits: tuple[float, float] | None = None
    warm_start: bool = False  # the warm start's rows come first, shaded
    compared: bool = False  # only if several runs are compared


MetricTuples = tuple[tuple[str, str, str] | tuple[str, str, str, Curve], ...]
"""Name, unit and meaning of each metric of a subject, and its chart, unless another metric's chart or none shows it."""


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
    """Beginnings of options that servers must not have, each with the reason and the fix."""
    environment: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Environment variables of a server that is started with the feature."""
    counters: ClassVar[tuple[str, ...]] = ()
    """Integer fields of each completion in the engine's responses, for `answered`; 0 if a response lacks them."""
    resends: ClassVar[bool] = False
    """True if a push aborts requests at servers that run it, where others compute keys and values again."""

    def __init__(self, name: str, shape: ModelShape) -> None:
        self.name, self.shape = name, shape

    def given(self, server: Server) -> Any:
        """Returns a running server's setting of the feature, as read by `described`; falsy: it runs without."""
        return server.features.get(self.name)

    def arguments(self, given: Any, device: str) -> Sequence[str]:
        """Returns the options of a start on ``device``, cpu or an accelerator; ``given`` is `Serving.given`. Raises
        ConfigError if the engine cannot do that there."""
        return ()

    def problem(self, given: Any, device: str, dp: int) -> str:
        """Returns why the engine cannot serve the model as ``given`` on ``device``, with ``dp`` replicas of attention,
        or an empty string. Called before a server starts."""
        return ""

    def described(self, settings: Mapping[str, Any]) -> tuple[object, Sequence[str]]:
        """Returns the `Serving.given` of a server with these ``settings``, and the reasons why no run can use it."""
        return None, ()

    def fits(self, found: object, given: object) -> bool:
        """True if a running server fits `Serving.given`; ``found`` is from `described`."""
        return found == given

    def models(self, server: Server) -> Sequence[str]:
        """Returns the engine's names of other models that a push sends the policy's file to, before the policy."""
        return ()

    def answered(self, server: Server, counts: Sequence[tuple[int, ...]]) -> None:
        """Receives the ``counters`` of a request's completions."""

    async def paused(self, server: Server) -> None:
        """Runs while a push has paused a server, before it loads."""

    def row(self) -> Mapping[str, float]:
        """Returns metrics since the call before. Called once a step."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A feature's part in engine servers."""

    given: Callable[[RunConfig], object]
    """The setting that servers are started with; falsy: none."""
    engines: Mapping[str, str]
    """``package.module:Class`` of its `EngineHooks`, by the engine's name."""
    misfit: str = ""
    """The reason why a server that runs ``{found}`` does not fit ``{given}``, the key with its value. Empty if all
    servers that a run may have fit."""
    key: str | None = None
    """The key that turns it on; None: ``given`` names it, with its value."""
    lacks: str | None = None
    """The lack of other engines' adapters and the fix, to follow "the adapter of <name>"; None: they lack nothing."""
    proposed: Callable[[ServerSection], int] = lambda server: 0
    """For predictions of a step: the tokens that such a server proposes at each step of its rows."""

    def named(self, given: object) -> str:
        """Returns the key with its value, for messages."""
        return str(given) if self.key is None else f"{self.key}={given}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushes:
    """A feature's pushes to servers: they get the model once, and then only versions of its ``adapters``."""

    is_used: Callable[[RunConfig], bool]
    """True for the runs that push so."""
    sync: str
    """``package.module:function`` that makes the `ServedSync` of a run, called by `launcher.servers.pool`."""
    ends: str
    """``package.module:function`` that makes the `Staging` of its adapters, and a function that gets the message of
    ``sync`` before a version is staged. `launcher.worker.learner_rank` calls it on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleModel:
    """A frozen model on separate ranks."""

    folder: Path
    key: str
    """The key of ``folder``."""
    scores: bool = False
    """True if it scores texts for rewards, while engines sample; False if it returns log-probs to a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """The declaration of a feature. Functions in it take the learner's section and must not import torch."""

    name: str
    active: Callable[[LearnerSection], bool] = lambda _: False
    """True if the configuration turns its side in the learner on."""
    keys: Mapping[str, type[Section]] = field(default_factory=dict)
    """Its keys by the section that gets them, such as ``{"learner": DraftKeys}``."""
    may_change: frozenset[str] = frozenset()
    """Full names of its keys that a resumed run may change."""
    rules: Sequence[Rule] = ()
    """Needs and exclusions of its keys, checked as a configuration is loaded, also if the feature is not active."""
    learner_rules: Sequence[Rule] = ()
    """Like ``rules``, for keys of the learner only, which critics and other models have in their own sections."""
    problems: Callable[[LearnerSection, ModelShape | None], Iterator[str]] = lambda *_: iter(())
    """Errors of its keys that no rule covers, each with the fix. The shape is None before a model is read."""
    megatron: Callable[[LearnerSection, ModelShape], Keywords] = lambda *_: Keywords()
    """Its own keywords for megatron-core. Raises ConfigError if this machine lacks what it needs."""
    memory: Callable[[LearnerSection, ModelShape, Rank, Terms], Terms] = lambda _learner, _shape, _rank, terms: terms
    """The terms of a trained model on a rank with its bytes added, also if it is not active."""
    captures: bool = False
    """True if its side captures CUDA graphs, for which states of random numbers must be tensors. Models without
    gradients are made with its keys at their defaults."""
    work: Callable[[LearnerSection, ModelShape, float], Mapping[str, Any]] = lambda *_: {}
    """Values of fields of `tools.planner.time.LearnerWork`, for predictions of a step's seconds. The number is the mean
    length of sequences in tokens."""
    passes: Callable[[RunConfig], float] = lambda _: 0.0
    """Also for predictions: the number of its passes of the policy without gradients over a step's rows."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """A change that makes each of its terms of ``memory`` smaller, for messages."""
    check_files: str | None = None
    """``package.module:function`` that yields a kind (problem or note) and a text for each finding. It gets the folder
    from which a run starts, with readable tensors, and its `ModelShape`."""
    metrics: MetricTuples = ()
    """Rows of the table of metrics."""
    recorded: Mapping[str, tuple[On, str]] = field(default_factory=dict)
    """Metric -> the condition for a run to record it, and the fix if it does not hold."""
    adapters: str | None = None
    """``package.module:function`` that makes the `AdapterLayouts` of a learner's section if the feature is active:
    layouts of parameters that it adds to the model. A run trains and saves only these."""
    shape: Callable[[LearnerSection, ModelShape], ModelShape] = _same
    """Changes the trained policy's sizes if the feature is active. Raises ConfigError for a family without it."""
    columns: Sequence[Column] = ()
    """Columns that engines return for its sides to read."""
    asks: Mapping[str, Callable[[RunConfig], str | None]] = field(default_factory=dict)
    """Column -> the key and value for which engines return it; None: they need not."""
    wants: Callable[[RunConfig], frozenset[Want]] = lambda _: frozenset()
    """Scores that it needs from the policy at the start of each step."""
    moves_reference: Callable[[RunConfig], bool] = lambda _: False
    """True if its side in a run's steps moves the weights of the reference, if there is one."""
    roles: Callable[[RunConfig], Mapping[str, RoleModel]] = lambda _: {}
    """Its models on separate ranks, by role."""
    serving: Serving | None = None
    """Its part in engine servers."""
    pushes: Pushes | None = None
    """The pushes of its ``adapters``."""
    optimizer: str = ""
    """For ``learner.optimizer.name`` of the feature's name: ``package.module:function`` that makes the optimizer of a
    rank's chunks from megatron-core's OptimizerConfig and these. Every rank calls it."""
    prepare: str | None = None
    """``package.module:function`` that gets the shape of a policy, the learner's section and this rank's chunks of it,
    before they get gradient buffers, and adds parameters. Every rank calls it."""
    export: str | None = None
    """``package.module:function`` like `exported`, for its own checkpoints."""
    logits: str | None = None
    """``package.module:function`` that gets a packed micro-batch and a TP rank's range of the vocabulary, and returns
    the `learner.heads.Kept` tokens of its logits, or None. Policies, references and teachers on ranks call it."""
    learner: str | None = None
    """``package.module:function`` that makes the `LearnerHooks` of a rank from `Built`; None leaves a model alone."""
    step: str | None = None
    """``package.module:function`` that makes the `StepHooks` of a configuration and `RunComponents`; None: none."""
    served: str | None = None
    """``package.module:function`` that makes its models in servers, by role. It gets a run's configuration, the
    policy's `ModelShape`, the maker of adapters, and a callback for progress. Raises EngineError for no answer."""
    sampler: str | None = None
    """``package.module:function`` that makes the `SamplerHooks` of a run's configuration and tokenizer; None: none."""
    encoding: str | None = None
    """``package.module:function`` that makes the `Encoding` of a configuration; None for one that the feature leaves
    alone. Importing the module needs no torch."""
    compression: str | None = None
    """``package.module:function`` that makes the `Compression` of a configuration, for a plan on a rank; None: none."""


class AdapterLayouts(Hashable, Protocol):
    """The layouts of the parameters that a feature adds to the model. Reading it imports no torch."""

    section: ClassVar[str]
    """Its keys: their rank, the experts' rank (expert_rank), and the matrices that have some (targets)."""
    untrained: ClassVar[str]
    """``package.module:Class`` of the `RandomWeights` of their values before the first step."""

    @property
    def given(self) -> str:
        """The key that turns them on, with its value."""
        ...

    def on_ranks(self, learner: Layout) -> Layout:
        """Returns these parameters' layout over the ranks of the ``learner``'s layout, which has the model's rows."""
        ...

    def file_layout(self, learner: Layout, hf: Layout) -> Layout:
        """Returns these parameters' layout in the folders that servers load, next to the tensors of ``hf``."""
        ...

    def ranks(self, learner: Layout) -> Mapping[str, int]:
        """Returns the rank of each Hugging Face matrix that has some, by its pattern."""
        ...


class Encoding(Protocol):
    """The form in which engines hold the policy's weights: other numbers, and additional tensors. Both routes of a push
    send this form, and engines are compared with it."""

    @property
    def tolerance(self) -> float:
        """The allowed difference in nats of an engine's log-probs to the learner's, if the run's dtype allows less."""
        ...

    def stored(self, entries: Stored) -> Stored:
        """Returns the tensors of the encoded checkpoint; ``entries`` are the plain one's. Raises ConfigError for a
        model that cannot be encoded."""
        ...

    def config(self, shapes: Mapping[str, Shape]) -> dict[str, Any]:
        """Returns ``quantization_config`` of the encoded checkpoint's config.json; ``shapes`` are the plain one's."""
        ...

    def layout(self, layout: Layout, hf: Layout) -> Layout:
        """Returns ``layout`` with the added tensors. ``hf`` is the plain checkpoint's."""
        ...

    def write(self, name: str, values: Tensor, held: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Writes a plain tensor into the encoded checkpoint's, ``held``. Returns the squared Frobenius norms of
        the tensor and of its change by the encoding; None if nothing changed. Raises SyncError that names a tensor that
        cannot be encoded."""
        ...

    def encoder(self, layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> Encoder:
        """Returns the sender's side on a learner's ``rank``. Training changes the rank's ``tensors``, by local name, in
        place. ``layout`` is the learner's, by `layout`."""
        ...


class Encoder(Protocol):
    """Encodes the weights that one learner rank sends straight into engine ranks, a version at a time."""

    added: Mapping[str, Tensor]
    """Its tensors that ``layout`` adds to the rank's own."""
    changes: Mapping[str, tuple[float, float]]
    """Results of `Encoding.write` by tensor, summed over the boxes that `encoded` returned since `begin`."""

    def begin(self, reduce: Callable[[Tensor], object]) -> None:
        """Starts the version that the tensors hold now, and fills ``added``. Every learner rank calls it. ``reduce``
        makes a float32 tensor [n] the elementwise maximum over them, in place. Raises SyncError, on a rank that holds
        it, for a tensor that cannot be encoded."""
        ...

    def pack(self, name: str, param: str, place: Box, out: Tensor) -> bool:
        """Writes the numbers of a box of ``param``, part of tensor ``name``, into ``out``; False: sent as they are."""
        ...

    def encoded(self, name: str, box: Box, values: Tensor) -> Tensor | None:
        """Returns the numbers of a box of a tensor, as engines hold them; None if they are sent as they are."""
        ...

    def check(self, dtype_of: Callable[[str], torch.dtype]) -> None:
        """Raises WeightError for a tensor that engine ranks hold as another dtype than it is sent in."""
        ...


class Compression(Protocol):
    """The form of parcels between the processes of one plan. The receiver unpacks the bytes that were packed; digests
    are of these bytes."""

    def begin(self, gather: Callable[[int], Sequence[int]]) -> None:
        """Starts a version. Every process calls it. ``gather`` returns a number of each, by rank."""
        ...

    def compresses(self, peer: int) -> bool:
        """False if parcels to and from ``peer`` travel as they are in this version. Both ends return the same."""
        ...

    def pack(self, parcel: BoundBucket) -> Tensor | None:
        """Returns the bytes [n] uint8 to send in place of the packed parcel's buffer and trailer; None: the buffer."""
        ...

    def unpack(self, frame: Tensor, parcel: BoundBucket) -> None:
        """Writes the buffer of the parcel from the bytes of `pack`."""
        ...

    def finished(self, version: int) -> None:
        """Runs once all of a version has arrived and was verified."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A model that returns log-probs in place of the reference."""

    role: str
    """The name of its scores."""
    model: str
    """The role of the model."""
    part: NDArray[np.int64]
    """The sequences of a batch that it scores."""
    read: Samples | None = None
    """The samples that it reads in place of them, in their order."""
    longest: int = 0
    """The most positions of a sequence that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judges:
    """All models that replace the reference on one batch."""

    judges: Sequence[Judge]
    columns: Callable[[Mapping[tuple[str, Want], Tensor]], Mapping[str, Tensor]]
    """Returns the samples' ``ref_logprobs`` and ``ref_top`` from each model's scores, by role. Runs in a thread."""


class SamplerHooks:
    """A feature's side in the sampler of completions that a reward scores. The methods here do nothing."""

    async def generated(
        self, request: GenerationRequest, generate: Generate, keep: Callable[[Completion], None]
    ) -> tuple[Completion, ...] | None:
        """Returns the completions of a request, sampled by ``generate``. A checkpoint holds the partial completion that
        ``keep`` gets until then. None: the request is left alone."""
        return None

    async def grouped(
        self, request: GenerationRequest, group: RolloutGroup, completions: Sequence[Completion]
    ) -> RolloutGroup:
        """Returns the scored group of the request's completions."""
        return group


class StepHooks:
    """A feature's side in the controller of a run that trains on groups. The methods here do nothing."""

    def group_row(self, groups: Sequence[RolloutGroup]) -> Row:
        """Returns metrics of a step's groups; there is at least one group. Runs in a thread."""
        return {}

    def sampled(self, samples: Samples) -> Samples:
        """Returns the samples that models read, from those with all columns of the engines. Runs in a thread."""
        return samples

    def judges(self, samples: Samples, groups: Sequence[RolloutGroup]) -> Judges | None:
        """Returns the models that replace the reference on the samples of ``groups``, if any. Runs in a thread."""
        return None

    def scored(self, found: ScoredSamples) -> ScoredSamples:
        """Returns the batch to train on, once it is scored and before credit is assigned. Runs in a thread."""
        return found

    def described(self, found: ScoredSamples) -> Row:
        """Returns metrics of a scored batch. Runs in a thread, during the first optimizer step."""
        return {}

    async def limits(self, batch: Batch, watch: Stopwatch) -> ClipLimits | None:
        """Returns the limits of a minibatch's ratios, right before the policy trains on it; None: the algorithm's."""
        return None

    async def trained(self, found: ScoredSamples, ask: Ask) -> Row:
        """Runs after the optimizer steps of a batch; returns metrics. ``ask`` returns current scores of its samples."""
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
    """The wrapper of each of ``models``; the pipeline schedule calls them."""
    head: Head
    gather: Callable[[], None]
    """Gathers the weights of the last step if the next pass would otherwise do it. Every rank calls it."""


class ChunkAdapters(Protocol):
    """The ``adapters`` that a feature sets on a chunk of the model to which it has added parameters. Their names have
    ``mark``, and end with _A or _B in place of a weight's end. The chunk's own parameters are frozen."""

    mark: ClassVar[str]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The added parameters under global names."""
        ...

    def off(self) -> AbstractContextManager[None]:
        """Returns a context in which passes compute with only the frozen weights."""
        ...

    def merged(self) -> AbstractContextManager[None]:
        """Returns a context in which the chunk's own tensors hold the weights that passes compute with."""
        ...

    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns the chunk's part of a checkpoint, for any layout."""
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
        """Runs before the policy takes ``folder``'s weights; not for those of a seed. ``family``: ``learner.model``."""

    def saving(self, folder: Path) -> None:
        """Runs before the model's shards are written into ``folder``. Raises OSError."""

    def loading(self, folder: Path) -> None:
        """Runs before the shards that a run wrote are loaded. Raises CheckpointError if they are not this model's."""

    def pack(self, packed: PackedMicroBatch, samples: Samples) -> PackedMicroBatch:
        """Adds what the feature reads of a micro-batch to ``packed.extras``."""
        return packed

    def warm_up(self) -> Sequence[PackedMicroBatch]:
        """Returns micro-batches of a pass with gradients of 0 that runs before the first pass, if there are any."""
        return ()

    def around_score(
        self, micro_batches: Sequence[Samples], weights: Mapping[str, Tensor] | None
    ) -> AbstractContextManager[None]:
        """Makes a context for a pass that scores ``micro_batches``, with ``weights``, if any, in the model's place."""
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
        """Runs after a pass for the scores in ``want``, and returns its own scores among them for each of
        ``micro_batches``, on the CPU. ``packed`` has copies at its end if a pipeline needs more."""
        return {}

    def after_loss(self, micro_batch: PackedMicroBatch, num_tokens: int) -> Mapping[str, Metric[torch.Tensor]]:
        """Runs after the loss of a micro-batch, on the last pipeline stage only. May accumulate gradients of
        ``chunks``, but not of the model. ``num_tokens``: the trained tokens of the whole minibatch. Returns this
        rank's share of metrics."""
        return {}

    def norm(self) -> float:
        """Returns the L2 norm of the gradients of ``chunks``. If it is not finite, the whole step is skipped."""
        return 0.0

    def step(self, learning_rate: float) -> Mapping[str, Metric[float]]:
        """Makes an optimizer step of ``chunks`` after `norm` and the model's step; returns metrics."""
        return {}

    def read(self) -> Mapping[str, Metric[float]]:
        """Returns metrics of the passes since the last step, over all ranks. Runs after a step or in its place."""
        return {}

    def clear(self) -> None:
        """Resets the counts of passes: before the first pass of a step, and around a pass made for a test."""

    def changed(self) -> None:
        """Runs after the model's weights were stepped, loaded or replaced."""


@cache
def features() -> Mapping[str, Feature]:
    """Returns all features by name, in the order in which they act: this package's by their folders' names, then
    installed ones.

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
    """Returns the features that the configuration turns on, in the order of `features`. Raises as `features`."""
    return tuple(feature for feature in features().values() if feature.active(learner))


def drop_captures(learner: LearnerSection) -> LearnerSection:
    """Returns the section with the keys of features that capture at their defaults."""
    kinds = (one.keys["learner"] for one in features().values() if one.captures)
    return learner.model_copy(update={name: value for kind in kinds for name, value in kind()})


def feature_rules() -> list[Rule]:
    """Returns the rules of all features. Raises as `features`."""
    return [rule for feature in features().values() for rule in feature.rules]


@cache
def declared_columns() -> Mapping[str, Column]:
    """Returns every declared column, by name. Raises as `features`."""
    return {column.name: column for feature in features().values() for column in feature.columns}


def feature_columns(config: RunConfig) -> dict[str, str]:
    """Returns the columns that engines must return, each with the first key that needs it. Raises as `features`."""
    found: dict[str, str] = {}
    for name, asks in (pair for feature in features().values() for pair in feature.asks.items()):
        if (key := asks(config)) is not None:
            found.setdefault(name, key)
    return found


def wanted(config: RunConfig) -> frozenset[Want]:
    """Returns the scores that features need from the policy at the start of each step. Raises as `features`."""
    found: frozenset[Want] = frozenset()
    return found.union(*(feature.wants(config) for feature in features().values()))


def role_models(config: RunConfig) -> dict[str, RoleModel]:
    """Returns the models of features on separate ranks, by role, those that score texts last. Raises as `features`."""
    found = [pair for feature in features().values() for pair in feature.roles(config).items()]
    return dict(sorted(found, key=lambda pair: pair[1].scores))


def load_side(name: str) -> Any:
    """Loads the object at ``package.module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def adapter_layouts(learner: LearnerSection) -> AdapterLayouts | None:
    """Returns the added parameters that are trained in place of the model; None: the model is. Raises as `features`."""
    sides = (one.adapters for one in active(learner) if one.adapters is not None)
    return next((load_side(side)(learner) for side in sides), None)


def exported(source: Path, base: Path, out: Path, *, family: str | None, dtype: str) -> bool:
    """Writes the Hugging Face folder ``out`` of a feature's own checkpoint and the model of ``base``, in ``dtype``.
    Returns False, and writes nothing, for checkpoints of whole models. Raises as `megatron_to_hf`."""
    sides = (one.export for one in features().values() if one.export is not None)
    return any(load_side(side)(source, base, out, family=family, dtype=dtype) for side in sides)


def prepare_chunks(shape: ModelShape, learner: LearnerSection, models: Sequence[GPTModel]) -> None:
    """Adds the parameters of active features to a policy's chunks. Every rank calls it. Raises as `features`."""
    for side in (one.prepare for one in active(learner) if one.prepare is not None):
        load_side(side)(shape, learner, models)


def learner_hooks(built: Built) -> tuple[LearnerHooks, ...]:
    """Returns the learner sides of all active features for a model. Every rank calls it. Raises as `features`."""
    made = (load_side(one.learner)(built) for one in active(built.learner) if one.learner is not None)
    return tuple(hooks for hooks in made if hooks is not None)


def step_hooks(config: RunConfig, roles: RunComponents) -> tuple[StepHooks, ...]:
    """Returns the controller's sides of all features for a run. Raises as `features`."""
    made = (load_side(one.step)(config, roles) for one in features().values() if one.step is not None)
    return tuple(hooks for hooks in made if hooks is not None)


def sampler_hooks(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[SamplerHooks, ...]:
    """Returns the sides of all features in a run's sampler. Raises as `features`."""
    made = (load_side(one.sampler)(config, tokenizer) for one in features().values() if one.sampler is not None)
    return tuple(hooks for hooks in made if hooks is not None)


async def served_models(
    config: RunConfig, shape: ModelShape, adapter_of: Callable[[str], Sampling], tell: Callable[[str], None]
) -> dict[str, FrozenModel]:
    """Returns the models of features in servers, by role. Raises as `features` and `Feature.served`."""
    found: dict[str, FrozenModel] = {}
    for side in [one.served for one in features().values() if one.served is not None]:
        found |= await load_side(side)(config, shape, adapter_of, tell)
    return found


def engine_hooks(engine: str, shape: ModelShape) -> tuple[EngineHooks, ...]:
    """Returns the engine sides of all features for an engine and its model, active or not. Raises as `features`."""
    sides = ((one.name, one.serving.engines.get(engine)) for one in features().values() if one.serving is not None)
    return tuple(load_side(side)(name, shape) for name, side in sides if side is not None)


def make_pushes(config: RunConfig) -> Pushes | None:
    """Returns a feature's own pushes of a run; None: whole models are pushed. Raises as `features`."""
    found = (one.pushes for one in features().values() if one.pushes is not None)
    return next((one for one in found if one.is_used(config)), None)


def make_encoding(config: RunConfig) -> Encoding | None:
    """Returns the encoding of the policy's weights in engines; None: they are not encoded. Raises as `features`, and
    ConfigError if several features encode them."""
    found: Encoding | None = _only("encoding", config)
    return found


def make_compression(config: RunConfig) -> Compression | None:
    """Returns the compression of parcels of weights, if any. Raises as `features`, and ConfigError for several."""
    found: Compression | None = _only("compression", config)
    return found


def _only(side: str, config: RunConfig) -> Any:
    """Returns the one that some feature makes, if any does."""
    names = {name: where for name, one in features().items() if (where := getattr(one, side)) is not None}
    made = {name: found for name, where in names.items() if (found := load_side(where)(config)) is not None}
    if len(made) > 1:
        raise ConfigError(f"the features {' and '.join(made)} each bring the {side} of weights; turn on one of them")
    return next(iter(made.values()), None)


def given_to_servers(config: RunConfig) -> dict[str, object]:
    """Returns the servers' setting of each feature that has a part in them. Raises as `features`."""
    return {name: one.serving.given(config) for name, one in features().items() if one.serving is not None}


def section_keys(path: str) -> Mapping[str, type[Section]]:
    """Returns the classes of keys that features add to the section at ``path``, by feature. Raises as `features`."""
    return {name: feature.keys[path] for name, feature in features().items() if path in feature.keys}


def resume_keys() -> Mapping[str, bool]:
    """Maps the full name of each key of features to True if a resumed run may change it, otherwise False."""
    names = (
        (one, f"{path}.{key}")
        for one in features().values()
        for path, kind in one.keys.items()
        for key in kind.model_fields
    )
    return {name: name in one.may_change for one, name in names}


def with_features(path: str) -> Callable[[type[S]], type[S]]:
    """Returns a decorator that adds the keys of features to the section at ``path``, after its own. Raises ConfigError
    for a key that the section already has."""

    def extend(section: type[S]) -> type[S]:
        kinds, seen = section_keys(path), set(section.model_fields)
        for name, keys in kinds.items():
            if twice := seen & keys.model_fields.keys():
                raise ConfigError(f"the feature {name!r} brings {path}.{min(twice)}, which is there already; rename it")
            seen |= keys.model_fields.keys()
        if not kinds:
            return section
        named = {"__module__": section.__module__, "__qualname__": section.__qualname__, "__doc__": section.__doc__}
        extended: type[S] = new_class(
            section.__name__, (*reversed([*kinds.values()]), section), exec_body=lambda names: names.update(named)
        )
        return extended

    return extend
