"""MegatronLearner: what one process of the learner does. Every method is collective: all ranks call it together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.config import LearnerSection
from rl_megatron.errors import RLMegatronError
from rl_megatron.learner import cpu
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Loss, Samples, StepResult

cpu.install()  # before the modules below bind megatron's functions

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module  # noqa: E402

from rl_megatron.learner import checkpoint, world  # noqa: E402
from rl_megatron.learner.forward import VocabHead, reduce_outputs, run_logprobs, run_loss  # noqa: E402
from rl_megatron.learner.load_meter import ExpertLoadMeter  # noqa: E402
from rl_megatron.learner.model import build_chunks, make_config  # noqa: E402
from rl_megatron.learner.naming import global_parameters  # noqa: E402
from rl_megatron.learner.optimizer import make_optimizer  # noqa: E402
from rl_megatron.learner.packed import PackedMicroBatch, pack_micro_batch  # noqa: E402


class MegatronLearner:
    """Model, optimizer and schedule of one rank. Weights are undefined until ``tensors`` are filled and adopted."""

    def __init__(
        self, shape: ModelShape, learner: LearnerSection, *, rank: int, rendezvous: str, temperature: float, seed: int
    ) -> None:
        self._device = world.join(learner, rank=rank, rendezvous=rendezvous, seed=seed)
        self._dims = learner.dims
        config = make_config(shape, learner)
        self._models = build_chunks(shape, learner, config)
        modules = [Float16Module(config, m) for m in self._models] if config.bf16 else self._models
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=learner.optimizer.distributed, grad_reduce_in_fp32=True, bucket_size=None
        )
        self._chunks = [
            DistributedDataParallel(config, ddp, m.to(self._device), disable_bucketing=i > 0)
            for i, m in enumerate(modules)
        ]
        self._optimizer = make_optimizer(self._chunks, learner)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        self._head = VocabHead(temperature=temperature, vocab_size=shape.vocab_size, chunk=learner.logprob_chunk_tokens)
        self._load_meter = ExpertLoadMeter(self._models, shape.num_layers, shape.num_experts, self._device)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's parameters under global names; writing into them changes the model (then call ``adopt``)."""
        return {name: parameter.data for name, parameter in global_parameters(self._models)}

    def adopt(self) -> None:
        """Take over parameters that were written from outside (the optimizer keeps its own float32 copies)."""
        self._optimizer.reload_model_params()

    def compute_logprobs(self, micro_batches: Sequence[Samples]) -> list[Tensor] | None:
        """Log-probs [N] float32 per micro-batch of this DP rank; None off the last stage and off TP/CP rank 0."""
        packed = self._pack(micro_batches)
        results = run_logprobs(self._chunks, packed, self._head)
        if not parallel_state.is_pipeline_last_stage():
            return None
        restored = [
            self._restore(r, p, len(m.input_ids)) for r, p, m in zip(results, packed, micro_batches, strict=False)
        ]
        first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        return restored if first else None

    def train_step(
        self, micro_batches: Sequence[Samples], loss: Loss, learning_rate: float, *, num_tokens: int, num_sequences: int
    ) -> StepResult | None:
        """One optimizer step on this DP rank's micro-batches; the result is on last-stage ranks. Raises on NaN."""
        packed = self._pack(micro_batches)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        outputs = run_loss(self._chunks, packed, self._head, loss, num_tokens=num_tokens, num_sequences=num_sequences)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        _, grad_norm, _ = self._optimizer.step()
        imbalance = self._load_meter.read()
        if not math.isfinite(grad_norm):
            raise RLMegatronError(
                f"gradient norm is {grad_norm} at learning rate {learning_rate}: the update was not finite; "
                "resume from the last checkpoint with a lower learning rate"
            )
        if not parallel_state.is_pipeline_last_stage():
            return None
        value, metrics = reduce_outputs(outputs)
        return StepResult(loss=value, grad_norm=grad_norm, metrics={**metrics, "moe/load_imbalance": imbalance})

    def save(self, folder: Path) -> None:
        """Write this rank's shards into ``folder``."""
        checkpoint.save(folder, self._chunks, self._optimizer)

    def load(self, folder: Path) -> None:
        """Continue from ``save``. Raises CheckpointError."""
        checkpoint.load(folder, self._chunks, self._optimizer)

    def close(self) -> None:
        """Leave the world of process groups."""
        world.leave()

    def _pack(self, micro_batches: Sequence[Samples]) -> list[PackedMicroBatch]:
        """This rank's share of each; interleaved pipelines want a multiple of pp: masked copies of the last fill up."""
        missing = -len(micro_batches) % self._dims.pp if self._dims.vpp > 1 else 0
        masked = replace(micro_batches[-1], mask=torch.zeros_like(micro_batches[-1].mask))
        return [
            pack_micro_batch(
                samples,
                tp=self._dims.tp,
                cp=self._dims.cp,
                cp_rank=parallel_state.get_context_parallel_rank(),
                device=self._device,
            )
            for samples in (*micro_batches, *[masked] * missing)
        ]

    def _restore(self, logprobs: Tensor, packed: PackedMicroBatch, count: int) -> Tensor:
        """This rank's [t] back at the samples' positions [N], joined over CP."""
        out = torch.zeros(count, dtype=torch.float32, device=self._device)
        source = packed.source.to(self._device)
        real = source >= 0
        out[source[real]] = logprobs[real]
        if self._dims.cp > 1:
            dist.all_reduce(out, group=parallel_state.get_context_parallel_group())
        return out.cpu()
