"""What one process does for a policy, a critic or a frozen policy. Every method is collective: all ranks call it."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.digests import Digest
from rl_megatron.learner import cpu
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability import activity
from rl_megatron.options.table import keywords
from rl_megatron.types import Culprit, Loss, LossOutput, Samples, SkippedStep, StepResult

cpu.install()  # before the modules below bind megatron's functions

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.transformer.module import Float16Module, MegatronModule  # noqa: E402

from rl_megatron.learner import checkpoint  # noqa: E402
from rl_megatron.learner.forward import run_loss, run_scores  # noqa: E402
from rl_megatron.learner.heads import Head, LogitsHead, ValueHead, VocabHead  # noqa: E402
from rl_megatron.learner.model.build import (  # noqa: E402
    build_chunks,
    keep_selection_biases_float32,
    make_config,
    with_dtypes,
)
from rl_megatron.learner.model.decoder_config import DecoderConfig  # noqa: E402
from rl_megatron.learner.model.value import ValueParameter, put_value_layer  # noqa: E402
from rl_megatron.learner.naming import global_parameters  # noqa: E402
from rl_megatron.learner.observers.experts import ExpertLoadMeter  # noqa: E402
from rl_megatron.learner.optimizer import make_optimizer, step  # noqa: E402
from rl_megatron.learner.packed import PackedMicroBatch, pack_micro_batch  # noqa: E402
from rl_megatron.learner.reduce import reduce_outputs  # noqa: E402
from rl_megatron.learner.replay import Routing, gather_recorded  # noqa: E402


def make_policy(
    shape: ModelShape, learner: LearnerSection, device: torch.device, *, temperature: float
) -> MegatronLearner:
    """The learner of a policy on this rank of the world that `world.join` entered. Every rank calls it."""
    config = make_config(shape, learner)
    head = _vocab_head(shape, learner, temperature)
    return MegatronLearner(shape, learner, device, config, build_chunks(shape, learner, config), head)


def make_frozen(
    shape: ModelShape, learner: LearnerSection, device: torch.device, *, temperature: float
) -> MegatronScorer:
    """As `make_policy`, without gradients and optimizer."""
    config = make_config(shape, learner)
    models = build_chunks(shape, learner, config)
    chunks = [module.to(device).requires_grad_(False) for module in _modules(config, models)]
    return MegatronScorer(shape, learner, device, models, _vocab_head(shape, learner, temperature), chunks)


def make_critic(shape: ModelShape, learner: LearnerSection, device: torch.device) -> MegatronLearner:
    """As `make_policy`, with a value in the place of the logits; the value layer starts at 0."""
    untied = replace(shape, tie_embeddings=False)
    config = make_config(untied, learner)
    chunks = build_chunks(untied, learner, config)
    put_value_layer(chunks, config)
    return MegatronLearner(untied, learner, device, config, chunks, ValueHead())


class MegatronScorer:
    """Model and schedule of one rank. Weights are undefined until ``tensors`` are filled and adopted.

    ``chunks`` are as the pipeline schedule calls them, around ``models``.
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
        self._vocab_size = shape.vocab_size
        self._chunks = chunks
        keep_selection_biases_float32(models)
        self._load_meter = ExpertLoadMeter(models, shape.num_layers, shape.num_experts, device)
        self._routing = Routing(chunks, models, shape, device, recomputes=learner.recompute_layers)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's parameters under global names, but for a critic's value layer; writing into them changes the
        model (then call ``adopt``)."""
        return {name: p.data for name, p in global_parameters(self._models) if not isinstance(p, ValueParameter)}

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Of which MoE layers this rank wants routes to replay, by their numbers among the model's."""
        return self._routing.layers

    def adopt(self) -> None:
        """Take over parameters that were written from outside."""

    def score(
        self, micro_batches: Sequence[Samples], weights: Mapping[str, Tensor] | None = None
    ) -> list[Tensor] | None:
        """Log-probs of the targets, or a critic's values, [N] float32 per micro-batch of this DP rank.

        None off the last stage and off TP/CP rank 0. ``weights`` stand for the model's own ``tensors`` during the pass.
        """
        packed = self._pack(micro_batches)
        with self._swapped(weights or {}), torch.no_grad():
            results = run_scores(self._chunks, packed, self._head, self._routing.replaying)
            self._routing.finish()
        return self._restored(results, packed, micro_batches)

    def score_with_routes(self, micro_batches: Sequence[Samples]) -> tuple[list[Tensor], list[Tensor]] | None:
        """As ``score``, and the routes that the pass took, [N, MoE layers, top_k] per micro-batch."""
        packed = [replace(p, routes=self._routing.blank(len(p.source))) for p in self._pack(micro_batches)]
        with torch.no_grad():
            results = run_scores(self._chunks, packed, self._head, self._routing.recording)
            self._routing.finish()
        routes = gather_recorded(packed, [len(m.input_ids) for m in micro_batches])
        scores = self._restored(results, packed, micro_batches)
        return None if scores is None else (scores, routes)

    def _restored(
        self, results: Sequence[Tensor], packed: Sequence[PackedMicroBatch], micro_batches: Sequence[Samples]
    ) -> list[Tensor] | None:
        """What the last stage said, at the samples' positions; None but on the rank that answers for its DP rank."""
        self._load_meter.reset()
        self._routing.reset()
        if not parallel_state.is_pipeline_last_stage():
            return None
        restored = [
            self._restore(r, p, len(m.input_ids)) for r, p, m in zip(results, packed, micro_batches, strict=False)
        ]
        first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        return restored if first else None

    def logits(self, micro_batches: Sequence[Samples]) -> list[Tensor] | None:
        """A policy's logits at temperature 1, [m, V] float32 of the m masked-in positions of each micro-batch.

        None off the last stage and off TP/CP rank 0.
        """
        packed = self._pack(micro_batches)
        with torch.no_grad():
            head = LogitsHead(vocab_size=self._vocab_size)
            results = run_scores(self._chunks, packed, head, self._routing.replaying)
            self._routing.finish()
        self._load_meter.reset()
        self._routing.reset()
        if not parallel_state.is_pipeline_last_stage():
            return None
        restored = []
        for result, mine, samples in zip(results, packed, micro_batches, strict=False):
            places = mine.source.to(self._device)[mine.columns["mask"]]
            rows = samples.mask.long().cumsum(0).to(self._device)[places] - 1  # among the masked-in positions
            out = result.new_zeros(int(samples.mask.sum()), result.shape[1])
            out[rows] = result
            if self._dims.cp > 1:
                dist.all_reduce(out, group=parallel_state.get_context_parallel_group())
            restored.append(out.cpu())
        first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        return restored if first else None

    @contextlib.contextmanager
    def _swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The parameters point to other memory meanwhile: nothing is copied."""
        own = [(p, p.data, weights[name]) for name, p in global_parameters(self._models) if name in weights]
        try:
            for parameter, _, other in own:
                parameter.data = other
            yield
        finally:
            for parameter, mine, _ in own:
                parameter.data = mine

    def _pack(self, micro_batches: Sequence[Samples]) -> list[PackedMicroBatch]:
        """This rank's share of each; interleaved pipelines want a multiple of pp: masked copies of the last fill up."""
        for micro_batch in micro_batches:
            self._routing.check(micro_batch.routes)
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


class MegatronLearner(MegatronScorer):
    """A scorer that is trained: with gradients and an optimizer."""

    def __init__(
        self,
        shape: ModelShape,
        learner: LearnerSection,
        device: torch.device,
        config: DecoderConfig,
        models: Sequence[GPTModel],
        head: Head,
    ) -> None:
        given = keywords(learner, shape)
        ddp = DistributedDataParallelConfig(**with_dtypes(given.ddp))
        self._trained = [
            DistributedDataParallel(config, ddp, m.to(device), disable_bucketing=i > 0)
            for i, m in enumerate(_modules(config, models))
        ]
        self._config, self._optimizer = config, make_optimizer(self._trained, given)
        self._heap = cpu.Heap()
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        super().__init__(shape, learner, device, models, head, self._trained)

    def adopt(self) -> None:
        """Take over parameters that were written from outside (the optimizer keeps its own float32 copies)."""
        self._optimizer.reload_model_params()

    def load_weights(self, folder: Path) -> None:
        """Start from a ``torch_dist`` checkpoint's model, all but a critic's value layer. Raises CheckpointError."""
        is_critic = isinstance(self._head, ValueHead)
        checkpoint.load_weights(folder, self._trained, without="output_layer." if is_critic else None)
        self.adopt()

    def train_step(
        self, micro_batches: Sequence[Samples], loss: Loss, learning_rate: float, *, num_tokens: int, num_sequences: int
    ) -> StepResult | SkippedStep | None:
        """One optimizer step on this DP rank's micro-batches; the result is on last-stage ranks.

        Where the gradient is not finite, all ranks skip the step and say so.
        """
        self._heap.step()
        run = partial(self._gradients, loss=loss, num_tokens=num_tokens, num_sequences=num_sequences)
        packed = self._pack(micro_batches)
        outputs = run(packed)
        activity.part("optimizer")
        grad_norm = step(self._optimizer, learning_rate)
        activity.part("after the optimizer")
        balance = self._load_meter.read() | (self._routing.read() if packed[0].routes is not None else {})
        if not math.isfinite(grad_norm):
            return SkippedStep(grad_norm=grad_norm, culprits=self._culprits(micro_batches, run))
        if not parallel_state.is_pipeline_last_stage():
            return None
        total = reduce_outputs(outputs)
        metrics = {**total.metrics, **balance}
        return StepResult(loss=total.loss, grad_norm=grad_norm, metrics=metrics, histograms=total.histograms)

    def _gradients(
        self, packed: Sequence[PackedMicroBatch], *, loss: Loss, num_tokens: int, num_sequences: int
    ) -> list[LossOutput]:
        for chunk in self._trained:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        outputs = run_loss(
            self._trained,
            packed,
            self._head,
            loss,
            self._routing.replaying,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
        )
        self._routing.finish()
        return outputs

    def _culprits(
        self, micro_batches: Sequence[Samples], run: Callable[[Sequence[PackedMicroBatch]], object]
    ) -> tuple[Culprit, ...]:
        """Those of this rank's that give a gradient which is not finite by themselves, not added up over ranks.

        Experts' gradients are left out: tokens of other ranks are in them.
        """
        found, finalize = [], self._config.finalize_model_grads_func
        self._config.finalize_model_grads_func = None
        for number, micro_batch in enumerate(micro_batches):
            activity.part(f"the gradient is not finite: micro-batch {number + 1} of {len(micro_batches)} by itself")
            run(self._pack([micro_batch]))
            buffers = [buffer.grad_data for chunk in self._trained for buffer in chunk.buffers]
            if not all(bool(buffer.isfinite().all()) for buffer in buffers):
                found.append(number)
        self._config.finalize_model_grads_func = finalize
        self._load_meter.reset()
        self._routing.reset()
        data_rank, rank, node = parallel_state.get_data_parallel_rank(), dist.get_rank(), socket.gethostname()
        return tuple(Culprit(data_rank=data_rank, micro_batch=m, rank=rank, node=node) for m in found)

    def save(self, folder: Path) -> dict[str, Digest]:
        """Write this rank's shards into ``folder``; what it wrote there, by name. Raises CheckpointError."""
        return checkpoint.save(folder, self._trained, self._optimizer)

    def load(self, folder: Path) -> None:
        """Continue from ``save``. Raises CheckpointError."""
        checkpoint.load(folder, self._trained, self._optimizer)


def _modules(config: DecoderConfig, models: Sequence[GPTModel]) -> list[MegatronModule]:
    return [Float16Module(config, m) for m in models] if config.bf16 else list(models)


def _vocab_head(shape: ModelShape, learner: LearnerSection, temperature: float) -> VocabHead:
    return VocabHead(temperature=temperature, vocab_size=shape.vocab_size, chunk=learner.logprob_chunk_tokens)
