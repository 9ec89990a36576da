"""The calls of a learner rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.wire.setup import Setup
from launcher.worker.models import RankModels
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import CorruptionError, SyncError
from rl_megatron.types import Completion, GenerationRequest, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor

    from rl_megatron.rollout.local.engine import LocalEngine
    from rl_megatron.weights.checks.reports import Report
    from rl_megatron.weights.layouts.recorded import Boxes
    from rl_megatron.weights.servers.mirror import Mirror
    from rl_megatron.weights.transports.engine_ends import Sender
    from rl_megatron.weights.transports.joined import Rendezvous


class Worker(RankModels):
    """The calls of a learner rank. All but ``generate``, ``export``, ``checksums`` and ``verify`` are collective: the
    controller calls every rank."""

    CALLS = (
        *RankModels.CALLS,
        *("generate", "stage", "commit", "sums", "join_engines", "send", "export", "checksums"),
    )

    def __init__(self, setup: Setup, rank: int, store: int | None) -> None:
        from rl_megatron.learner.model.build import torch_dtype

        super().__init__(setup, rank, store)
        config = setup.config
        self._dtype = torch_dtype(config.learner.dtype)
        self._sender: Sender | None = None  # into engine ranks in other processes
        self._holder = self._make_holder(config, setup.run_folder)
        self.start_from("policy", setup.model_folder)
        self._connect(config, setup.run_folder / "weights")

    def _make_holder(self, config: RunConfig, run_folder: Path) -> LocalEngine | Mirror | None:
        """The target of pushes: this rank's engine or, if servers sample, the mirror file, on rank 0 alone."""
        from launcher.runs.folder import mirror_path
        from rl_megatron.rollout.local.engine import LocalEngine
        from rl_megatron.weights.formats.served import FORMATS
        from rl_megatron.weights.servers.mirror import Mirror

        section = config.rollout
        if not section.served:
            longest = section.max_prompt_tokens + section.max_new_tokens
            return LocalEngine(
                self._shape, slots=section.slots, dtype=self._dtype, device=self._device, max_length=longest
            )
        if self._rank:
            return None
        path, shapes = mirror_path(config, run_folder), self._hf.local_shapes(0)
        kind = FORMATS[section.server.quantization]
        return Mirror(path, shapes, self._dtype, self._model_folder / "config.json", kind)

    def _connect(self, config: RunConfig, folder: Path) -> None:
        """Plan the moves from every learner rank to every in-process engine replica, or to rank 0's mirror.

        Readers of a mirror compare it with checksums of the learner's own tensors, so digests on the way are not
        needed. A quantised one, or one cut inside a word, is compared with the checksums of the mirror itself.
        """
        from rl_megatron.types import ParallelDims
        from rl_megatron.weights.checks.sources import add_up, sources_of
        from rl_megatron.weights.formats.served import FORMATS
        from rl_megatron.weights.plans.plan import plan
        from rl_megatron.weights.transports.commit import Staging
        from rl_megatron.weights.transports.connect import Ends, make_transport

        holders = 1 if config.rollout.served else self._layout.dims.world_size
        replicas = replace(self._hf, dims=ParallelDims(dp=holders))
        transfers = plan(self._layout, replicas)
        tensors = dict(self._learners["policy"].tensors)
        sources = sources_of(self._layout, self._hf)
        quantised = FORMATS[config.rollout.server.quantization] is not None
        self._sources = sources[self._rank]
        self._sealed = (
            config.rollout.served and not quantised and all(add_up(one, self._dtype.itemsize) for one in sources)
        )
        section = config.weights.filling(served=config.rollout.served)
        ends = Ends(
            section=section.model_copy(update={"verify": section.verify and not self._sealed}),
            moves=transfers,
            src=tensors,
            dst=self._held,
            folder=folder,
            timeout_seconds=config.learner.timeout_seconds,
        )
        self._staging = Staging(make_transport(ends), self._holder)

    @property
    def _held(self) -> dict[str, Tensor]:
        """The Hugging Face tensors that a push writes here."""
        return self._holder.tensors if self._holder is not None else {}

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of each request, by this rank's engine replica."""
        from rl_megatron.rollout.local.engine import LocalEngine

        assert isinstance(self._holder, LocalEngine)
        return self._holder.generate(requests)

    def stage(self, version: int) -> WeightUpdate | CorruptionError:
        """Move the learner's weights into this rank's engine, which serves nothing until `commit`.

        Returns a CorruptionError instead of raising it, because the weights can be moved again.
        """
        try:
            return self._staging.stage(version)
        except CorruptionError as error:
            return error

    def commit(self, version: int) -> None:
        """Serve the staged weights."""
        self._staging.commit(version)

    def sums(self) -> Report:
        """Checksums of this rank's boxes of the weights in the mirror."""
        from rl_megatron.weights.checks.reports import Report
        from rl_megatron.weights.checks.sources import sent_checksums
        from rl_megatron.weights.servers.mirror import Mirror

        if self._sealed:
            return sent_checksums(self._sources, self._learners["policy"].tensors, lambda _: self._dtype)
        return self._holder.sums() if isinstance(self._holder, Mirror) else Report(rows=(), seconds=0.0)

    def join_engines(self, rendezvous: Rendezvous, ranks: Sequence[Boxes]) -> SyncError | None:
        """Plan the moves from every learner rank into engine ranks, which hold ``ranks``; collective with them.

        Returns a SyncError if these do not join. Raises WeightError if there is no plan for them.
        """
        from rl_megatron.weights.layouts.recorded import recorded_layout
        from rl_megatron.weights.plans.plan import plan
        from rl_megatron.weights.transports.engine_ends import Sender

        first = self._layout.dims.world_size
        placement = {rank: first + rank for rank in range(len(ranks))}
        moves = plan(self._layout, recorded_layout(self._hf, ranks), placement=placement)
        if self._sender is not None:
            self._sender.close()
        tensors = dict(self._learners["policy"].tensors)
        try:
            self._sender = Sender(rendezvous, self._rank, moves, tensors, self._sources)
        except SyncError as error:
            self._sender = None
            return error
        return None

    def send(self, version: int) -> tuple[WeightUpdate, Report] | SyncError:
        """Send this rank's shards to the engine ranks. Returns a SyncError if these fail."""
        assert self._sender is not None
        try:
            return self._sender.send(version)
        except SyncError as error:
            return error

    def export(self, folder: Path) -> None:
        """Write the version pushed last as a Hugging Face folder."""
        from rl_megatron.weights.checkpoints.safetensors_io import write_folder

        write_folder(self._held, self._model_folder, folder)

    def checksums(self) -> dict[str, int]:
        """The checksum of each Hugging Face tensor that a push wrote here, as the engine holds it."""
        from rl_megatron.weights.checks.checksums import checksum

        return {name: checksum(tensor, tuple(tensor.shape)) for name, tensor in self._held.items()}

    def close(self) -> None:
        """Wait for every rank, then leave the process groups."""
        self._staging.close()
        super().close()
