"""The calls of a learner rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from launcher.processes.scratch import remove_at_exit
from launcher.runs.folder import mirror_path
from launcher.wire import Setup
from launcher.worker.models import RankModels
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.engines.local.engine import LocalEngine, make_decoder
from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.feature import Encoding, Pushes, load_side, make_compression, make_encoding, make_pushes
from rl_megatron.placement.files import file_writer_ranks
from rl_megatron.types import Completion, GenerationRequest, ParallelDims, WeightUpdate
from rl_megatron.weights.boxes import Shape
from rl_megatron.weights.bytes.bits import stored_dtype
from rl_megatron.weights.checkpoints.safetensors_io import WithDrafts, write_folder
from rl_megatron.weights.checks.reports import (
    ChecksumReport,
    box_checksums,
    checksums_add_up,
    sender_boxes,
    sent_checksums,
)
from rl_megatron.weights.formats.hf_folder import stored
from rl_megatron.weights.layouts.layout import float32_in_files
from rl_megatron.weights.layouts.recorded import Boxes, recorded_layout
from rl_megatron.weights.plans.plan import plan, plan_into_copies
from rl_megatron.weights.routes.engine_ends import Sender
from rl_megatron.weights.routes.group import ProcessGroupTransport, Staging
from rl_megatron.weights.routes.mirror import Mirror, lock_folder, remove_abandoned, wait_until_unlocked
from rl_megatron.weights.routes.rendezvous import Rendezvous, gather_json

if TYPE_CHECKING:
    from torch import Tensor


class LearnerRank(RankModels):
    """The calls of a learner rank. All but ``generate``, ``export``, ``checksums`` and ``verify`` are collective: the
    controller calls every rank."""

    CALLS = (
        *RankModels.CALLS,
        *("generate", "stage", "commit", "sums", "join_engines", "send", "export", "checksums"),
        *("merge", "announce"),
    )

    def __init__(self, setup: Setup, rank: int, store: int | None) -> None:
        from rl_megatron.learner.model.build import torch_dtype

        super().__init__(setup, rank, store)
        config = setup.config
        self._float32 = float32_in_files(self._hf)
        self._dtype = torch_dtype(config.learner.dtype)
        self._encoding = make_encoding(config)
        self._sender: Sender | None = None  # into engine ranks in other processes
        self._ends = ExitStack()
        self._writers = file_writer_ranks(config)
        self._holder = self._make_holder(config, setup.run_folder)
        self.load_weights("policy", setup.model_folder)
        self._connect(config, setup.run_folder)
        pushes = make_pushes(config)
        self._merges = pushes is None
        if pushes is not None:
            self._connect_extra(config, setup.run_folder, pushes)

    def _make_holder(self, config: RunConfig, run_folder: Path) -> LocalEngine | Mirror | None:
        """Makes the target of pushes: the node's mirror file if servers sample, or the job does not; else an engine."""
        section, longest = config.rollout, config.rollout.max_prompt_tokens + config.longest_completion
        if config.fills_files:
            return self._make_mirror(config, run_folder)
        engine = LocalEngine(
            self._shape, slots=section.slots, dtype=self._dtype, device=self._device, max_length=longest
        )
        engine.decode = make_decoder(self._model_folder) if section.stop else None
        return engine

    def _make_mirror(self, config: RunConfig, run_folder: Path) -> Mirror | None:
        """Opens the file that this rank and others of its node write, or returns None. The first writer makes it.

        The controller removes the file on its node. On another node the first writer removes it when it ends. The next
        run on a node removes the files of killed runs.
        """
        path, shapes, float32 = mirror_path(config, run_folder), self._hf.local_shapes(0), self._float32
        group: Sequence[int] = next((group for group in self._writers if self._rank in group), ())
        if group and self._rank == group[0]:
            wait_until_unlocked(path.parent)
            if self._rank or not config.rollout.served:
                self._ends.enter_context(remove_at_exit(path.parent))
            given = (path, shapes, self._dtype, self._model_folder, self._encoding)
            make_mirror(*given, self._ends, float32=float32, writers=len(group))
        gather_json("made", None)
        if not group:
            return None
        place = group.index(self._rank)
        return Mirror(path, shapes, self._dtype, self._encoding, float32=float32, writer=place, writers=len(group))

    def _connect(self, config: RunConfig, run_folder: Path) -> None:
        """Plans the moves from every learner rank to every in-process engine replica, or to the mirror files.

        Readers of a mirror compare it with checksums of the learner's own tensors, so digests on the way are not
        needed. An encoded one, or one cut inside a word, is compared with the checksums of the mirror itself.
        """
        held = self._pushed_tensors
        if config.fills_files:
            transfers = plan_into_copies(self._layout, self._hf, self._writers)
            mine = {transfer.dst_param for transfer in transfers.receives(self._rank)}
            held = {name: tensor for name, tensor in held.items() if name in mine}
        else:
            replicas = replace(self._hf, dims=ParallelDims(dp=self._layout.dims.world_size))
            transfers = plan(self._layout, replicas)
        sources = sender_boxes(self._layout, self._hf)
        self._sources = sources[self._rank]
        self._sealed = (
            config.rollout.served
            and self._encoding is None
            and all(checksums_add_up(one, self._dtype.itemsize) for one in sources)
        )
        transport = ProcessGroupTransport(
            transfers,
            src=self._tensors,
            dst=held,
            bucket_bytes=config.weights.bucket_mb * 2**20,
            verify=not self._sealed,
            compression=make_compression(config),
        )
        self._stagings = {"model": Staging(transport, self._holder)}

    def _connect_extra(self, config: RunConfig, run_folder: Path, pushes: Pushes) -> None:
        """Plans the moves of a feature's parameters from every rank to the first that writes each mirror file."""
        staging, self._announce = load_side(pushes.ends)(
            config,
            self._layout,
            self._hf,
            self._learners["policy"].adapters,
            rank=self._rank,
            writers=[group[:1] for group in self._writers],
            mirror=mirror_path(config, run_folder),
            model=self._model_folder,
        )
        self._stagings["feature"] = staging

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """The learner's parameters by their names in layouts."""
        return dict(self._learners["policy"].tensors)

    @property
    def _pushed_tensors(self) -> dict[str, Tensor]:
        """The Hugging Face tensors that a push writes here."""
        return self._holder.tensors if self._holder is not None else {}

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Returns completions of each request, by this rank's engine replica."""
        return cast("LocalEngine", self._holder).generate(requests)

    def stage(self, version: int, is_extra: bool = False) -> WeightUpdate | CorruptionError:
        """Moves the learner's weights into this rank's engine, which serves nothing until `commit`; or a feature's
        parameters with ``is_extra``, into the ranks that write these.

        Returns a CorruptionError instead of raising it, because the weights can be moved again.
        """
        self._learners["policy"].gather()
        try:
            with self._merged_for_push():
                return self._stagings["feature" if is_extra else "model"].stage(version)
        except CorruptionError as error:
            return error

    def commit(self, version: int, is_extra: bool = False) -> None:
        """Serves the staged weights. Raises SyncError."""
        self._stagings["feature" if is_extra else "model"].commit(version)

    def announce(self, *given: object) -> None:
        """Passes a feature's end the values from its side in the controller about the version that is staged next."""
        self._announce(*given)

    def merge(self, merged: bool) -> None:
        """Sets whether later pushes of the model have a feature's parameters merged into it."""
        self._merges = merged

    def _merged_for_push(self) -> AbstractContextManager[None]:
        return self._learners["policy"].merged() if self._merges else nullcontext()

    def sums(self) -> ChecksumReport:
        """Returns checksums of this rank's boxes of the weights in the mirror."""
        if self._sealed:
            dtypes = self._dtypes_in_files
            with self._merged_for_push():
                return sent_checksums(self._sources, self._tensors, lambda one, box: box.to(dtypes[one.hf]))
        return self._holder.sums() if isinstance(self._holder, Mirror) else ChecksumReport(rows=(), seconds=0.0)

    @cached_property
    def _dtypes_in_files(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor of a mirror file."""
        entries = stored(self._hf.local_shapes(0), stored_dtype(self._dtype), self._encoding, self._float32)
        return {name: getattr(torch, dtype) for name, (dtype, _) in entries.items()}

    def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> SyncError | None:
        """Plans the moves from every learner rank into engine ranks, which hold ``ranks``; collective with them.

        Returns a SyncError if these do not join. Raises the errors of `Sender`.
        """
        learner, hf, sources, encoder = self._layout, self._hf, self._sources, None
        if (encoding := self._encoding) is not None:
            learner, hf = encoding.layout(learner, hf), encoding.layout(hf, hf)
            sources, encoder = (
                sender_boxes(learner, hf)[self._rank],
                encoding.encoder(learner, self._rank, self._tensors),
            )
        if self._sender is not None:
            self._sender.close()
        layouts = learner, recorded_layout(hf, ranks)
        try:
            dtypes = self._dtypes_in_files
            self._sender = Sender(
                rendezvous, self._rank, layouts, self._tensors, sources, dtypes=dtypes, encoder=encoder
            )
        except SyncError as error:
            self._sender = None
            return error
        return None

    def send(self, version: int) -> tuple[WeightUpdate, ChecksumReport] | SyncError:
        """Sends this rank's shards to the engine ranks. Returns a SyncError if these fail."""
        assert self._sender is not None
        self._learners["policy"].gather()
        try:
            with self._merged_for_push():
                return self._sender.send(version)
        except SyncError as error:
            return error

    def export(self, folder: Path) -> None:
        """Writes the version pushed last as a Hugging Face folder, with the draft layers from which the run started, if
        it has not trained them. The chat template of a reward model sets the run's variables."""
        tensors: Mapping[str, Tensor] = self._pushed_tensors
        if self._made_up is None and not self._shape.has_score_head and not self._shape.num_draft_layers:
            tensors = WithDrafts(tensors, self._model_folder, self._dtype, self._config.learner.model)
        variables = self._config.model.template_variables if self._shape.has_score_head else {}
        write_folder(tensors, self._model_folder, folder, variables=variables)

    def checksums(self) -> dict[str, int]:
        """Returns the checksum of each Hugging Face tensor that a push wrote here, as the engine holds it."""
        sums = box_checksums((tensor, tuple(tensor.shape), ()) for tensor in self._pushed_tensors.values())
        return dict(zip(self._pushed_tensors, sums, strict=True))

    def close(self) -> None:
        """Waits for every rank, then leaves the process groups."""
        for staging in self._stagings.values():
            staging.close()
        self._ends.close()
        super().close()


def make_mirror(
    path: Path,
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
    model_folder: Path,
    encoding: Encoding | None,
    ends: ExitStack,
    *,
    float32: Collection[str],
    writers: int = 1,
) -> None:
    """Makes a mirror file with `Mirror.make`. In a node's memory its folder is locked until ``ends`` closes, and the
    neighboring folders of killed runs are removed."""
    Mirror.make(path, shapes, dtype, model_folder / "config.json", encoding, float32=float32, writers=writers)
    if path.is_relative_to(NODE_MEMORY):
        ends.enter_context(lock_folder(path.parent))
        remove_abandoned(path.parent)
