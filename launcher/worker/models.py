"""The models that one rank holds, by role. All calls but ``is_written`` and ``verify`` are collective: every rank of
the world makes them.

The roles are "policy" and "critic", which are trained, "reference", and those of teachers and reward models. The
learner's ranks hold all roles that do not have their own ranks.

Records the kernels and operators of a rank's own process, by torch's profiler.

Reports a rank's memory when it runs out: the plan's terms, torch's allocations, and a snapshot.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from launcher.wire import Setup
from rl_megatron import digests
from rl_megatron.config.beside import frozen_folders, separate
from rl_megatron.config.run import RunConfig
from rl_megatron.data.rows import RankRows
from rl_megatron.data.samples import micro_batch_for_pass
from rl_megatron.digests import Digest, SaveDigests
from rl_megatron.entries import PLANNER, load_own
from rl_megatron.errors import GB, RLMegatronError, WeightError
from rl_megatron.feature import adapter_layouts, load_side
from rl_megatron.files import add_path_to_errors, make_inside
from rl_megatron.interfaces import ForwardPass
from rl_megatron.learner.keywords import SLAB
from rl_megatron.observability import timeline
from rl_megatron.observability.timeline import FOLDER, Recorded
from rl_megatron.placement.names import LEARNER, file_stem
from rl_megatron.types import Loss, Metric, Samples, SkippedStep, StepResult, Want
from rl_megatron.weights.bytes.moving_average import MovingAverage
from rl_megatron.weights.bytes.parked import OffloadedTensors
from rl_megatron.weights.checkpoints.megatron import is_megatron
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, RandomWeights, TensorSource, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.layouts.learner import job_shape, learner_layout, role_shape

if TYPE_CHECKING:
    from torch import Tensor
    from torch.profiler import profile

    from rl_megatron.data.rows import OwnLayers, Share
    from rl_megatron.learner.checkpoint.saving import ShardSave
    from rl_megatron.learner.checkpoint.state import ExtraState
    from rl_megatron.learner.trained import MegatronLearner, MegatronScorer
    from rl_megatron.weights.layouts.layout import Layout


class Recording:
    """One recording at a time. All its calls come from the thread that computes."""

    def __init__(self) -> None:
        self._profiler: profile | None = None

    def begin(self) -> None:
        """Records from now on. Raises RLMegatronError if a recording is running."""
        from torch.profiler import ProfilerActivity, profile

        if self._profiler is not None:
            raise RLMegatronError("this rank records kernels already")
        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._profiler.start()

    def end(self, file: Path) -> Recorded | str:
        """Writes the records since `begin` into ``file``, compressed. Returns why they cannot be written, if so.

        Raises RLMegatronError if there is no recording.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise RLMegatronError("this rank records no kernels")
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # records the ends of launched kernels, too
        profiler.stop()
        try:
            with add_path_to_errors(file):
                make_inside(file.parent)
                file.touch(mode=0o600)
                profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:  # torch's for a disk that is full
            return f"{file}: {error}"
        return Recorded(file=file, monotonic=timeline.now(), wall=time.time_ns())


M = TypeVar("M")


class RankModels:
    """The models of a rank of ``setup.role``, and the world of its ranks."""

    CALLS: tuple[str, ...] = (
        *("load_weights", "release_memory", "score", "column_layers", "backward", "free_step", "step", "zero_grad"),
        "update_reference",
        *("save", "is_written", "finalize", "verify", "load", "begin_kernels", "end_kernels", "close"),
    )

    def __init__(self, setup: Setup, rank: int, store: int | None) -> None:
        """``store``: see ``world.join``."""
        from rl_megatron.learner import world

        self._config = config = setup.config
        self._rank, self._model_folder, self._leave = rank, setup.model_folder, world.destroy_process_groups
        self._made_up = config.seed if config.model.random_weights else None
        policy = job_shape(config, read_shape(setup.model_folder, config.learner.model))
        self._shape, self._vocab_size = role_shape(config, policy, setup.role, setup.code), policy.vocab_size
        self._device = world.init_process_groups(
            config.learner,
            rank=rank,
            rendezvous=setup.rendezvous,
            seed=config.seed,
            store=store,
            gpu=setup.gpu_index(rank),
        )
        if config.profile.memory:
            remember()
        self._relay, self._rows = world.Relay(config.learner, rank), RankRows()
        self._learners = self._make_learners(config, setup.role)
        self._scorers: dict[str, MegatronScorer] = {**self._learners, **self._make_frozen(config, setup.role)}
        self._reference: dict[str, Tensor] = {}  # weights that replace the policy's when it scores as the reference
        self._average: MovingAverage | None = None  # the policy's; its tensors are the reference's, if that follows
        self._leaving, self._parked = config.learner.offload.leaving, OffloadedTensors(SLAB)
        self._saves_apart = config.checkpoint.async_save
        self._saving: dict[str, ShardSave] = {}  # saves that are not written yet, by role
        self._shares_gpus = setup.role == LEARNER  # servers may be on its GPU; separate roles have their own nodes
        self._kernels = Recording()
        self._hf = hf_layout(self._shape)
        self._layout = learner_layout(config, self._shape)

    @property
    def gpu(self) -> str | None:
        """CUDA's name for this rank's GPU; None on a CPU."""
        return None if self._device.type == "cpu" else torch.cuda.get_device_name(self._device)

    @property
    def peak(self) -> int:
        """The most bytes held since the start: of a GPU by torch's allocator, or of a CPU's resident memory."""
        if self._device.type == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(torch.cuda.max_memory_reserved(self._device))

    def _make_learners(self, config: RunConfig, role: str) -> dict[str, MegatronLearner]:
        from rl_megatron.learner.megatron import make_critic, make_policy

        made = {}
        if role == LEARNER:
            made["policy"] = make_policy(
                self._shape,
                config.learner,
                self._device,
                temperature=config.rollout.temperature,
                top_k=config.algorithm.kl.top_k,
                valued=config.algorithm.is_own_critic,
            )
        if role == ("critic" if "critic" in separate(config) else LEARNER) and config.algorithm.needs_critic:
            made["critic"] = make_critic(self._shape, config.learner, self._device)
        return made

    def _make_frozen(self, config: RunConfig, role: str) -> dict[str, MegatronScorer]:
        from rl_megatron.learner.megatron import make_frozen

        if role not in frozen_folders(config):
            return {}
        made = make_frozen(
            self._shape,
            config.learner,
            self._device,
            temperature=config.rollout.temperature,
            top_k=config.algorithm.kl.top_k,
            top_below=self._vocab_size,
        )
        return {role: made}

    def load_weights(self, role: str, folder: Path) -> None:
        """Loads this rank's part of a model from a Hugging Face folder, or from a megatron checkpoint. A critic's
        checkpoint has no config.json.

        Raises errors of ``read_boxes``, or CheckpointError. A reference is read from a Hugging Face folder, unless it
        is the policy without its adapters, which start again with the policy.
        """
        if role == "reference" and role not in self._scorers and self._config.reference_is_base:
            return
        if role in self._learners:
            self._learners[role].onload()
            self._start_adapters(role)
        random = self._made_up is not None and folder == self._model_folder
        if role == "policy" and self._config.model.path is not None and not random:
            self._learner(role).starts_from(folder, self._config.learner.model)
        if role == "critic" and not (folder / "config.json").is_file():
            self._learner(role).load_weights(folder, scored=True)
            return
        hf, layout = self._checkpoint_layouts(role, folder)
        if not random and role in self._learners and is_megatron(folder):
            self._learner(role).load_weights(folder, scored=hf.shape.has_score_head)
            return
        tensors = dict(self._scorer(role).tensors)
        if role == "critic" and hf.shape.has_score_head:
            tensors |= self._learner(role).value_weight
        if self._shape.has_score_head and not hf.shape.has_score_head:
            tensors.pop("output_layer.weight", None)  # a score layer starts at 0
        if role not in self._scorers:
            tensors = self._hold_reference(layout)
        like = next(iter(tensors.values()))
        shapes = layout.local_shapes(self._rank).items()  # a critic has no output layer: these values are dropped
        unused = {name: like.new_empty(shape) for name, shape in shapes if name not in tensors}
        if beyond := sorted(unused.keys() - {"output_layer.weight"}):
            raise WeightError(
                f"{folder}: the {role} has no tensor for {len(beyond)} of its tensors, as {beyond[0]!r}; give a model "
                "of the policy's sizes"
            )
        source: TensorSource = (
            RandomWeights(folder, hf.local_shapes(0), self._made_up or 0) if random else HFFolder(folder)
        )
        read_boxes(source, hf, layout, self._rank, tensors | unused)
        if tensors is self._reference and self._average is not None:
            self._average.restart()
        self._scorer(role).adopt()

    def _hold_reference(self, layout: Layout) -> dict[str, Tensor]:
        """Returns memory for the weights of a reference on the policy's ranks, the same at each call."""
        self._parked.onload("reference")
        if not self._reference:
            names = layout.local_shapes(self._rank)
            like = {name: tensor for name, tensor in self._scorer("reference").tensors.items() if name in names}
            if self._config.reference_moves:
                self._average = MovingAverage(like)
                self._reference = self._average.tensors
            else:
                self._reference = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        return self._reference

    def _start_adapters(self, role: str) -> None:
        """Gives the adapters of a role their first values; `_scorer`'s ``adopt`` takes them with the weights."""
        adapters, tensors = adapter_layouts(self._config.learner), self._learner(role).adapters
        if adapters is None or not tensors:
            return
        hf, layout = adapters.file_layout(self._layout, self._hf), adapters.on_ranks(self._layout)
        source = load_side(adapters.untrained)(self._model_folder, hf.local_shapes(0), self._config.seed)
        read_boxes(source, hf, layout, self._rank, tensors)

    def _checkpoint_layouts(self, role: str, folder: Path) -> tuple[Layout, Layout]:
        """Returns layouts of the folder and over the ranks. A reward model or a critic may start from a policy,
        whose output layer it drops, or from a reward model. The policy alone has draft layers."""
        if self._shape.has_score_head or role == "critic":
            known = read_shape(folder, self._config.learner.model)
        elif self._shape.num_draft_layers and role != "policy":
            known = replace(self._shape, num_draft_layers=False)
        else:
            return self._hf, self._layout
        return hf_layout(known), learner_layout(self._config, known)

    def release_memory(self) -> None:
        """Frees the device memory that torch's allocator caches, and on the learner's ranks the state named by
        ``learner.offload.while_sampling``. `score`, `backward` and `step` allocate again what they need."""
        for role, learner in self._learners.items() if self._shares_gpus else ():
            learner.offload(pushed=role == "policy")
        if self._shares_gpus and "models" in self._leaving:
            rest = () if self._average is None else self._average.rest.values()
            self._parked.offload("reference", (*self._reference.values(), *rest))
        torch.cuda.empty_cache()

    def _scorer(self, role: str) -> MegatronScorer:
        """Returns the model that scores for a role; for a reference on the policy's ranks it is the policy.

        Raises RLMegatronError for a role without a model here; so does ``_learner``.
        """
        beside = role == "reference" and role not in self._scorers
        return _held(self._scorers, "policy" if beside else role)

    def _learner(self, role: str) -> MegatronLearner:
        return _held(self._learners, role)

    def _local_rows(self, role: str, share: Share | None) -> tuple[Samples, ...]:
        """Returns the micro-batches of a pass. The controller sends a data-parallel rank's share to its first rank."""
        layers = self._scorer(role).column_layers
        return self._rows.micro_batches(self._relay.receive(share, layers), layers)

    def free_step(self) -> None:
        """Frees the columns of a step. Not collective."""
        self._rows.forget()

    def score(
        self, passes: Sequence[ForwardPass], share: Share | None
    ) -> list[tuple[dict[Want, list[Tensor]] | None, float]]:
        """Returns for each pass its outputs for each micro-batch, and the seconds that it took. The outputs are None
        except on the rank that reports for its DP rank."""
        replaying = [one.role for one in passes if one.replays_routes] or [passes[0].role]
        micro_batches = self._local_rows(replaying[0], share)
        answers = []
        for one in passes:
            began = time.perf_counter()
            seen = [
                micro_batch_for_pass(m, replays=one.replays_routes, last_tokens=one.appends_last_targets)
                for m in micro_batches
            ]
            answers.append((self._score_role(one.role, seen, one.outputs), time.perf_counter() - began))
        return answers

    def _score_role(
        self, role: str, micro_batches: Sequence[Samples], want: frozenset[Want]
    ) -> dict[Want, list[Tensor]] | None:
        if role == "reference":
            self._parked.onload("reference")
        if role in self._scorers:
            return self._scorer(role).score(micro_batches, want)
        policy = self._scorer(role)
        with policy.adapters_disabled():
            return policy.score(micro_batches, want, self._reference)

    def column_layers(self, role: str) -> OwnLayers:
        """Returns this rank's layers, by the name of each column with entries of layers."""
        return self._scorer(role).column_layers

    def backward(
        self, role: str, share: Share | None, loss: Loss, num_tokens: int, num_sequences: int
    ) -> dict[str, Metric[float]] | None:
        """Accumulates the micro-batches' gradients. Returns ``loss`` and its metrics on last-stage ranks."""
        learner = self._learner(role)
        return learner.backward(self._local_rows(role, share), loss, num_tokens=num_tokens, num_sequences=num_sequences)

    def step(self, role: str, learning_rate: float) -> StepResult | SkippedStep:
        """Makes an optimizer step with the accumulated gradients. Raises RLMegatronError if there are none."""
        return self._learner(role).step(learning_rate)

    def zero_grad(self, role: str) -> None:
        """Drops the accumulated gradients. Raises RLMegatronError if there are none."""
        self._learner(role).zero_grad()

    def update_reference(self, rate: float) -> None:
        """Sets the reference on the policy's ranks to (1 - ``rate``) of itself plus ``rate`` of the policy's weights,
        with adapters merged."""
        assert self._average is not None, "the reference follows, and has weights"
        policy = self._learner("policy")
        policy.gather()
        self._parked.onload("reference")
        with policy.merged():
            self._average.move(policy.tensors, rate)

    def _extra_state(self, role: str) -> ExtraState | None:
        """Returns what a checkpoint of the role holds in addition to its model. The policy's holds the reference that
        follows it, if it has weights."""
        from rl_megatron.learner.checkpoint.state import ExtraState

        if role != "policy" or self._average is None:
            return None
        held = {"reference": self._average.tensors, "reference_rest": self._average.rest}
        return ExtraState(
            tensors={name: tensors for name, tensors in held.items() if tensors}, values=self._parked.host_copy
        )

    def save(self, role: str, folder: Path) -> None:
        """Writes this rank's shards, or with ``checkpoint.async_save`` begins to. Raises CheckpointError."""
        learner, beside = self._learner(role), self._extra_state(role)
        self._saving[role] = learner.start_save(folder, in_process=self._saves_apart, extra=beside)

    def is_written(self, role: str, wait: bool) -> bool:
        """True if this rank's part of the save is written, or could not be. With ``wait``, waits until then."""
        if wait:
            self._saving[role].wait()
        return self._saving[role].is_written

    def finalize(self, role: str) -> SaveDigests:
        """Finishes the save with the other ranks. Raises CheckpointError."""
        return self._saving.pop(role).finalize()

    def verify(self, folder: Path, files: Mapping[str, Digest]) -> list[str]:
        """Returns problems of a checkpoint's files; this rank reads a share of them. See digests.mismatches."""
        return digests.mismatches(folder, files, read=True)

    def load(self, role: str, folder: Path) -> None:
        """Loads a saved state. Raises CheckpointError."""
        from rl_megatron.learner.checkpoint.state import has_extra_state

        if role == "policy" and self._config.reference_moves and has_extra_state(folder):  # a warm start's holds none
            self._hold_reference(self._checkpoint_layouts("reference", self._model_folder)[1])
        self._learner(role).load(folder, self._extra_state(role))

    def begin_kernels(self) -> None:
        """Records this rank's kernels from now on. Not collective."""
        self._kernels.begin()

    def end_kernels(self, file: Path) -> Recorded | str:
        """Writes the records since `begin_kernels`. Returns why they cannot be written, if so. Not collective."""
        return self._kernels.end(file)

    def close(self) -> None:
        """Waits for every rank, then leaves the process groups."""
        self._leave()


def _held(models: Mapping[str, M], role: str) -> M:
    if role not in models:
        raise RLMegatronError(f"this rank holds no {role!r} for this call; it holds {', '.join(models)}")
    return models[role]


_OOM_MESSAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_ENTRIES = 200_000  # allocations and frees that are remembered, the latest


def remember() -> None:
    """Makes torch record where memory is allocated from now on, for `memory_report`."""
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)


@contextmanager
def with_memory_notes(setup: Setup, rank: int) -> Iterator[None]:
    """Adds `memory_report` of this rank as notes to an error inside that says that the GPU's memory is full."""
    try:
        yield
    except RuntimeError as error:
        for line in memory_report(setup, rank) if is_out_of_memory(error) else ():
            error.add_note(line)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """True if a GPU's memory is full: torch's own error, or the messages of libraries that allocate without torch.

    These are NCCL's ``Cuda failure 2 'out of memory'`` in a DistBackendError, CUDA's ``CUDA error: out of memory`` and
    cuBLAS's status. Torch's message about full host memory has none of them.
    """
    words = isinstance(error, RuntimeError) and any(text in str(error) for text in _OOM_MESSAGES)
    return words or isinstance(error, torch.OutOfMemoryError)


def memory_report(setup: Setup, rank: int) -> Iterator[str]:
    """Yields the plan of this rank's GPU, then the memory that torch holds now; a snapshot with ``profile.memory``.

    Nothing is raised: the rank has an error already.
    """
    config, role = setup.config, setup.role
    try:
        shape = job_shape(config, read_shape(setup.model_folder, config.learner.model))
        yield from load_own(PLANNER, "rank")(config, shape, role, rank)
    except RLMegatronError as error:
        yield f"there is no plan of its GPU beside: {error}"
    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        yield (
            f"now: {torch.cuda.memory_allocated() / GB:.1f} GB allocated of {held / GB:.1f} that torch holds, "
            f"{torch.cuda.max_memory_allocated() / GB:.1f} at most; {(whole - free - held) / GB:.1f} by others and "
            f"outside of torch, of {whole / GB:.1f}"
        )
    if config.profile.memory:
        yield _snapshot(setup.run_folder / FOLDER / f"out_of_memory_{file_stem(role, rank)}.pickle")
    else:
        yield "profile.memory=true writes a snapshot of what was allocated where, for pytorch.org/memory_viz"


def _snapshot(path: Path) -> str:
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f"no snapshot: {path}: {error}"
    return f"a snapshot of what was allocated where, for pytorch.org/memory_viz: {path}"
