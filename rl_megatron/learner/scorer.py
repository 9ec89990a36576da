"""A model on one rank that scores positions: a frozen reference, and the base class of a learner.

Every method is collective: every rank calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import Tensor

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import RLMegatronError
from rl_megatron.learner.forward import run_scores
from rl_megatron.learner.heads import Head
from rl_megatron.learner.lora.adapters import adapters_of
from rl_megatron.learner.model.build import keep_buffers_float32
from rl_megatron.learner.model.decoder_config import DecoderConfig
from rl_megatron.learner.model.value import ValueParameter
from rl_megatron.learner.naming import global_parameters
from rl_megatron.learner.observers.table import Observers
from rl_megatron.learner.packed import PackedMicroBatch, pack_micro_batch
from rl_megatron.learner.routers.replay import Routing, gather_recorded
from rl_megatron.models.shape import ModelShape, length_problem
from rl_megatron.options.fp8 import rows
from rl_megatron.types import Samples, Want


class MegatronScorer:
    """Model and schedule of one rank. Weights are undefined until the caller fills ``tensors`` and calls ``adopt``.

    ``chunks`` wrap ``models``; the pipeline schedule calls them.
    """

    def __init__(
        self,
        shape: ModelShape,
        learner: LearnerSection,
        device: torch.device,
        models: Sequence[GPTModel],
        head: Head,
        chunks: Sequence[MegatronModule],
    ) -> None:
        self._device, self._dims, self._models, self._head = device, learner.dims, models, head
        self._chunks, self._rows, self._padding = chunks, rows(learner), learner.padding
        self._adapters = [found for model in models if (found := adapters_of(model)) is not None]
        keep_buffers_float32(models)
        self._shape = shape
        self._observers = Observers(models, shape, device)
        self._routing = Routing(chunks, models, shape, device)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's parameters under global names, without a critic's value layer and without `adapters`. After
        writing into them call ``adopt``."""
        found = {name: p.data for name, p in global_parameters(self._models) if not isinstance(p, ValueParameter)}
        return {name: tensor for name, tensor in found.items() if ".lora_" not in name}

    @property
    def value_weight(self) -> Mapping[str, Tensor]:
        """The weight of a critic's value layer under its global name, on the ranks that have it. As `tensors`."""
        every = global_parameters(self._models)
        return {name: p.data for name, p in every if isinstance(p, ValueParameter) and name.endswith(".weight")}

    @property
    def adapters(self) -> Mapping[str, Tensor]:
        """This rank's adapters under global names; empty without ``learner.lora.rank``. As `tensors`."""
        return {name: tensor for one in self._adapters for name, tensor in one.tensors.items()}

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Score with the weights that the adapters stand beside."""
        with contextlib.ExitStack() as stack:
            for one in self._adapters:
                stack.enter_context(one.off())
            yield

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        """Have ``tensors`` hold the weights that passes compute with, adapters merged; then again the frozen ones."""
        with contextlib.ExitStack() as stack:
            for one in self._adapters:
                stack.enter_context(one.merged())
            yield

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The MoE layers of this rank, whose routes it replays, as indices into all MoE layers."""
        return self._routing.layers

    def adopt(self) -> None:
        """Use the parameters that were written into ``tensors``."""

    def score(
        self, micro_batches: Sequence[Samples], want: frozenset[Want], weights: Mapping[str, Tensor] | None = None
    ) -> dict[Want, list[Tensor]] | None:
        """The scores in ``want`` (`types.Want`) of each micro-batch of this DP rank, on the CPU, in one pass.

        None except on TP/CP rank 0 of the last stage. The pass uses ``weights`` in place of the model's ``tensors``.
        Raises RLMegatronError for a score that the model cannot compute.
        """
        if strange := want - self._head.says - {"routes"}:
            raise RLMegatronError(f"this model computes {sorted(self._head.says)} of a position, not {sorted(strange)}")
        packed, records = self._pack(micro_batches), "routes" in want
        if records:
            packed = [replace(p, routes=self._routing.blank(len(p.source))) for p in packed]
        around = self._routing.recording if records else self._routing.replaying
        with self._swapped(weights or {}), self._observers.unseen(), self._routing.unseen(), torch.no_grad():
            results = run_scores(self._chunks, packed, self._head, want, around)
            self._routing.finish()
        found: dict[Want, list[Tensor]] = {}
        if records:
            found["routes"] = gather_recorded(packed, [len(m.input_ids) for m in micro_batches])
        if not parallel_state.is_pipeline_last_stage():
            return None
        for name in want - {"routes"}:
            restore = self._restore_masked_in if name == "logits" else self._restore
            found[name] = [restore(r[name], p, m) for r, p, m in zip(results, packed, micro_batches, strict=False)]
        first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        return found if first else None

    @contextlib.contextmanager
    def _swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Points the parameters to ``weights``, without a copy."""
        own = [(p, p.data, weights[name]) for name, p in global_parameters(self._models) if name in weights]
        try:
            for parameter, _, other in own:
                parameter.data = other
            yield
        finally:
            for parameter, mine, _ in own:
                parameter.data = mine

    def _pack(self, micro_batches: Sequence[Samples]) -> list[PackedMicroBatch]:
        """This rank's share of each. Interleaved pipelines need a multiple of pp: masked copies of the last fill up."""
        for micro_batch in micro_batches:
            self._routing.check(micro_batch.routes)
            longest = int(micro_batch.cu_seqlens.diff().max())
            if self._shape.indexer is not None and (too_long := length_problem(self._shape, "a sequence", longest)):
                raise RLMegatronError(too_long)
        missing = -len(micro_batches) % self._dims.pp if self._dims.vpp > 1 else 0
        masked = replace(micro_batches[-1], mask=torch.zeros_like(micro_batches[-1].mask))
        return [self._packed(samples, copy=samples is masked) for samples in (*micro_batches, *[masked] * missing)]

    def _packed(self, samples: Samples, *, copy: bool) -> PackedMicroBatch:
        return pack_micro_batch(
            samples,
            tp=self._dims.tp,
            cp=self._dims.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            device=self._device,
            copy=copy,
            rows=self._rows,
            sizes=self._padding.sizes,
            sequences=self._padding.sequences,
        )

    def _restore(self, scores: Tensor, packed: PackedMicroBatch, samples: Samples) -> Tensor:
        """Scatters this rank's [t] to the samples' positions [N], and sums over CP."""
        source = packed.source.to(self._device)
        real = source >= 0
        return self._summed(scores[real], source[real], len(samples.input_ids))

    def _restore_masked_in(self, logits: Tensor, packed: PackedMicroBatch, samples: Samples) -> Tensor:
        """Scatters this rank's [masked-in, V] to the samples' masked-in positions, and sums over CP."""
        places = packed.source.to(self._device)[packed.columns["mask"]]
        rows = samples.mask.long().cumsum(0).to(self._device)[places] - 1  # among the masked-in positions
        return self._summed(logits, rows, int(samples.mask.sum()))

    def _summed(self, mine: Tensor, rows: Tensor, count: int) -> Tensor:
        out = mine.new_zeros((count, *mine.shape[1:]), dtype=torch.float32)
        out[rows] = mine
        if self._dims.cp > 1:
            dist.all_reduce(out, group=parallel_state.get_context_parallel_group())
        return out.cpu()


def modules(config: DecoderConfig, models: Sequence[GPTModel]) -> list[MegatronModule]:
    """The models, wrapped as the pipeline schedule calls them."""
    return [Float16Module(config, m) for m in models] if config.bf16 else list(models)
