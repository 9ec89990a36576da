"""A model on one rank that scores positions, as a frozen reference; and one that is trained: ``backward`` accumulates
gradients, ``step`` makes an optimizer step. Every method is collective: every rank calls it."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer.module import Float16Module, MegatronModule
from torch import Tensor

from rl_megatron.config.learner_checks import sparse_problem
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.rows import OwnLayers
from rl_megatron.digests import Digest
from rl_megatron.errors import RLMegatronError
from rl_megatron.feature import Built, LearnerHooks, declared_columns, learner_hooks
from rl_megatron.learner.checkpoint import loading, saving
from rl_megatron.learner.checkpoint.saving import CachedPlan, ShardSave
from rl_megatron.learner.checkpoint.state import ExtraState
from rl_megatron.learner.cpu import Heap
from rl_megatron.learner.forward import nested, reduce_outputs, run_loss, run_scores
from rl_megatron.learner.heads import Head, PolicyAndValueHead, ValueHead, ValueParameter
from rl_megatron.learner.keywords import SLAB, keywords
from rl_megatron.learner.model.attention import DecoderConfig
from rl_megatron.learner.model.build import freeze_routers, restore_float32_buffers, with_dtypes
from rl_megatron.learner.model.offload import Activations
from rl_megatron.learner.observers import Observers
from rl_megatron.learner.optimizer import (
    adopt,
    bucket_groups,
    create_state,
    gradient_norm,
    inner_optimizers,
    make_optimizer,
    optimizer_state,
    step,
    wait_for_gradients,
)
from rl_megatron.learner.packed import PackedMicroBatch, pack_micro_batch
from rl_megatron.learner.parameters import chunk_adapters, global_parameters, swapped
from rl_megatron.models.shape import ModelShape, length_problem
from rl_megatron.observability import activity
from rl_megatron.types import (
    BadMicroBatch,
    Loss,
    LossInputs,
    LossOutput,
    Metric,
    Samples,
    SkippedStep,
    StepResult,
    Want,
)
from rl_megatron.weights.bytes.parked import OffloadedTensors, StagingPool
from rl_megatron.weights.checkpoints.megatron import VALUES, raise_other_model
from rl_megatron.weights.checkpoints.torch_dist import read_index


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
        self._chunks, self._rows, self._padding = chunks, learner.float8_rows, learner.padding
        self._adapters = [found for model in models if (found := chunk_adapters(model)) is not None]
        self._adapter_names = frozenset(self.adapters)
        restore_float32_buffers(models)
        self._shape, self._dense = shape, sparse_problem(learner, shape)
        self._observers = Observers(models, shape, device)
        self._hooks: Sequence[LearnerHooks] = ()  # empty for a frozen model, so it replays nothing

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's parameters under global names, without a critic's value layer and without `adapters`. After
        writing into them call ``adopt``."""
        found = {name: p.data for name, p in global_parameters(self._models) if not isinstance(p, ValueParameter)}
        return {name: tensor for name, tensor in found.items() if name not in self._adapter_names}

    @property
    def value_weight(self) -> Mapping[str, Tensor]:
        """The weight of a critic's value layer under its global name, on the ranks that have it. As `tensors`."""
        every = global_parameters(self._models)
        return {name: p.data for name, p in every if isinstance(p, ValueParameter) and name.endswith(".weight")}

    @property
    def adapters(self) -> Mapping[str, Tensor]:
        """The parameters that a feature has added to this rank's chunks, under global names. As `tensors`."""
        return {name: tensor for one in self._adapters for name, tensor in one.tensors.items()}

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """Context in which scores are of the weights without adapters."""
        return nested(one.off() for one in self._adapters)

    def merged(self) -> AbstractContextManager[None]:
        """Context in which ``tensors`` hold the weights of passes, adapters merged; then the frozen ones again."""
        return nested(one.merged() for one in self._adapters)

    @property
    def column_layers(self) -> OwnLayers:
        """This rank's layers, by the name of each column with entries of layers."""
        own = [layer.layer_number - 1 for model in self._models for layer in model.decoder.layers]
        every = {
            name: list(one.layers(self._shape)) for name, one in declared_columns().items() if one.layers is not None
        }
        return {name: tuple(of.index(layer) for layer in own if layer in of) for name, of in every.items()}

    def adopt(self) -> None:
        """Uses the parameters that were written into ``tensors``."""

    def score(
        self, micro_batches: Sequence[Samples], want: frozenset[Want], weights: Mapping[str, Tensor] | None = None
    ) -> dict[Want, list[Tensor]] | None:
        """Returns the scores in ``want`` (`types.Want`) of each micro-batch of this DP rank, on the CPU, in one pass.

        None except on TP/CP rank 0 of the last stage. The pass uses ``weights`` in place of the model's ``tensors``.
        Raises RLMegatronError for a score that the model cannot compute.
        """
        if strange := want.difference(self._head.outputs, *(hooks.says for hooks in self._hooks)):
            raise RLMegatronError(
                f"this model computes {sorted(self._head.outputs)} of a position, not {sorted(strange)}"
            )
        packed, found = self._pack(micro_batches), dict[Want, list[Tensor]]()
        with swapped(self._models, weights or {}), self._observers.unseen(), torch.no_grad():
            results = run_scores(self._chunks, packed, self._head, want, self._hooks)
        for hooks in self._hooks:
            found |= hooks.scored(want, packed, micro_batches)
        if not parallel_state.is_pipeline_last_stage():
            return None
        for name in want - found.keys():
            restore = self._restore_masked_in if name == "logits" else self._restore
            found[name] = [restore(r[name], p, m) for r, p, m in zip(results, packed, micro_batches, strict=False)]
        first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        return found if first else None

    def _pack(self, micro_batches: Sequence[Samples]) -> list[PackedMicroBatch]:
        """This rank's share of each. Interleaved pipelines need a multiple of pp: masked copies of the last fill up."""
        for micro_batch in micro_batches:
            longest = int(micro_batch.cu_seqlens.diff().max())
            if self._dense and (too_long := length_problem(self._shape, "a sequence", longest, self._dense)):
                raise RLMegatronError(too_long)
        missing = -len(micro_batches) % self._dims.pp if self._dims.vpp > 1 else 0
        masked = replace(micro_batches[-1], mask=torch.zeros_like(micro_batches[-1].mask))
        return [self._packed(samples, copy=samples is masked) for samples in (*micro_batches, *[masked] * missing)]

    def _packed(self, samples: Samples, *, copy: bool) -> PackedMicroBatch:
        packed = pack_micro_batch(
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
        for hooks in self._hooks:
            packed = hooks.pack(packed, samples)
        return packed

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
    """Returns the models, wrapped as the pipeline schedule calls them."""
    return [Float16Module(config, m) for m in models] if config.bf16 else list(models)


Added = tuple[Sequence[Samples], Callable[[Sequence[PackedMicroBatch]], object]]
"""Micro-batches, and the function that accumulates the gradients of micro-batches."""


def nothing(inputs: LossInputs) -> LossOutput:
    """Returns a loss of 0 with gradients of 0."""
    found = inputs.logprobs if inputs.values is None else inputs.values
    return LossOutput(loss=(found * 0.0).sum(), metrics={})


_COPIES = "_fp8_workspaces"  # weights in float8, which a module of TransformerEngine 2.11 keeps between passes


class MegatronLearner(MegatronScorer):
    """A scorer with gradients and an optimizer."""

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
        if learner.router.frozen:
            freeze_routers(layer for model in models for layer in model.decoder.layers)
        ddp = DistributedDataParallelConfig(**with_dtypes(given.ddp))
        self._trained = trained = [
            DistributedDataParallel(config, ddp, m.to(device), disable_bucketing=i > 0)
            for i, m in enumerate(modules(config, models))
        ]
        self._optimizer = make_optimizer(self._trained, given)
        self._heap, self._warm = Heap(), False
        self._added: list[Added] = []  # micro-batches added since the last step
        self._leaving, self._parked, self._staged = learner.offload.leaving, OffloadedTensors(SLAB), StagingPool()
        self._planned = CachedPlan()
        self._activations = Activations(models, learner.offload.activations)
        config.grad_scale_func = self._optimizer.scale_loss
        super().__init__(shape, learner, device, models, head, self._trained)
        built = Built(
            shape=shape, learner=learner, device=device, models=models, chunks=trained, head=head, gather=self.gather
        )
        self._hooks = learner_hooks(built)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The model's tensors, and those of features' own chunks."""
        own = [chunk.module for hooks in self._hooks for chunk in hooks.chunks]
        return {**super().tensors, **{name: p.data for name, p in global_parameters(own)}}

    @property
    def _all_chunks(self) -> list[DistributedDataParallel]:
        """The chunks of the model, and those of features."""
        return [*self._trained, *(chunk for hooks in self._hooks for chunk in hooks.chunks)]

    @property
    def _chained_optimizer(self) -> MegatronOptimizer:
        """The optimizer of the model, chained with those of features."""
        own = [optimizer for hooks in self._hooks for optimizer in hooks.optimizers]
        every = [part for one in (self._optimizer, *own) for part in inner_optimizers(one)]
        return ChainedOptimizer(every) if own else self._optimizer

    def adopt(self) -> None:
        """Uses the parameters that were written into ``tensors``: copies them into the optimizer's float32 weights."""
        self.onload()
        adopt(self._chained_optimizer)
        self._changed()

    def _changed(self) -> None:
        for hooks in self._hooks:
            hooks.changed()

    def starts_from(self, folder: Path, family: str | None) -> None:
        """Tells features which weights the policy takes next, as `LearnerHooks.started`. Raises as `hf_tensors`."""
        for hooks in self._hooks:
            hooks.started(folder, family)

    def gather(self) -> None:
        """Makes ``tensors`` hold the weights of the last step, where megatron leaves it to the next pass to gather
        them."""
        for group in bucket_groups(self._trained) if self._trained[0].use_forward_hook else ():
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)

    def load_weights(self, folder: Path, *, scored: bool = False) -> None:
        """Loads the model of a ``torch_dist`` checkpoint; without its output layer where that is a vocabulary's and
        this model's is not. ``scored``: the checkpoint is a reward model's or a critic's. Raises CheckpointError, or on
        the first rank WeightError as `raise_other_model`."""
        self.onload()
        if dist.get_rank() == 0:
            raise_other_model(folder, self._output_layer_shape(folder, scored=scored), of_critic=scored)
        fresh = {ValueHead: None if scored else "output_layer.", PolicyAndValueHead: VALUES}  # layers that start at 0
        without = fresh.get(type(self._head))
        loading.load_weights(folder, self._all_chunks, without=without)
        self.adopt()

    def _output_layer_shape(self, folder: Path, *, scored: bool) -> ModelShape:
        """This model's sizes, with the output layer of ``folder``, whatever it is, where this model's is a value's."""
        if type(self._head) is not ValueHead:
            return self._shape
        return replace(
            self._shape, has_score_head=scored, tie_embeddings="output_layer.weight" not in read_index(folder)[0]
        )

    def offload(self, *, pushed: bool) -> None:
        """Frees the GPU's memory that nothing needs while servers sample, as ``learner.offload.while_sampling`` says.

        Whatever needs it next takes it again. Weights stay if they are ``pushed``. Gradients that no step has taken yet
        are kept.
        """
        self.gather()  # into the weights' memory, which may leave
        if "gradients" in self._leaving:
            wait_for_gradients(self._trained)  # they are copied below
            chunks = self._all_chunks
            buffers = [one.grad_data for chunk in chunks for one in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            self._parked.offload("gradients", buffers, kept=bool(self._added))
        if self._leaving:
            for module in (module for chunk in self._all_chunks for module in chunk.modules()):
                getattr(module, _COPIES, {}).clear()  # the next pass makes them
        weights = [parameter for chunk in self._all_chunks for parameter in chunk.parameters()]
        if "optimizer" in self._leaving:
            create_state(self._chained_optimizer)  # else a checkpoint would
            self._parked.offload("optimizer", optimizer_state(self._chained_optimizer), besides=weights)
        if "models" in self._leaving and not pushed:
            self._parked.offload("weights", weights)

    def onload(self) -> None:
        """Takes the GPU's memory again for all that `offload` has left."""
        self._parked.onload()

    def score(
        self, micro_batches: Sequence[Samples], want: frozenset[Want], weights: Mapping[str, Tensor] | None = None
    ) -> dict[Want, list[Tensor]] | None:
        """Scores as `MegatronScorer.score`, with the weights back in the GPU's memory."""
        self._parked.onload("weights")
        self._warm_up()
        with nested(hooks.around_score(micro_batches, weights) for hooks in self._hooks):
            return super().score(micro_batches, want, weights)

    def backward(
        self, micro_batches: Sequence[Samples], loss: Loss, *, num_tokens: int, num_sequences: int
    ) -> dict[str, Metric[float]] | None:
        """Accumulates the gradients of this DP rank's micro-batches with those since the last ``step``.

        Returns ``loss`` and its metrics on last-stage ranks, else None. ``step`` all-reduces the gradients once;
        megatron's schedule would do so after each call, and so count the first ones again. Raises as features' passes.
        """
        self._parked.onload("weights", "gradients")
        self._warm_up()
        if not self._added:
            self._clear()
        add = partial(self._add, loss=loss, num_tokens=num_tokens, num_sequences=num_sequences)
        outputs = add(self._pack(micro_batches))
        self._added.append((micro_batches, add))
        return reduce_outputs(outputs) if parallel_state.is_pipeline_last_stage() else None

    def step(self, learning_rate: float) -> StepResult | SkippedStep:
        """Makes an optimizer step with the gradients since the last. If they are not finite, all ranks skip the step.

        Raises RLMegatronError if ``backward`` was not called since the last step.
        """
        added = self._reduced()
        grad_norm = gradient_norm(self._optimizer)
        total = sum((hooks.norm() for hooks in self._hooks), grad_norm)  # not finite if one of them is not
        finite, more = math.isfinite(total), dict[str, Metric[float]]()
        if finite:
            more = self._step(learning_rate, grad_norm)
        observed = self._observed()
        if not finite:
            return SkippedStep(grad_norm=total, culprits=self._find_bad_micro_batches(added))
        return StepResult(grad_norm=grad_norm, observer_metrics=observed | more)

    def zero_grad(self) -> None:
        """Drops the gradients since the last ``step``; weights, moments and the experts' biases keep their bits.

        Raises as ``step``.
        """
        self._reduced()
        self._observed()

    def _reduced(self) -> list[Added]:
        """Reduces the gradients since the last step, and ends the reduction that the last pass may have begun. Returns
        what was added."""
        if not self._added:
            raise RLMegatronError("there is no gradient to step with; call backward before step")
        self.onload()
        added, self._added = self._added, []
        self._heap.step()
        activity.part("optimizer")
        finalize_model_grads(self._trained)
        for hooks in self._hooks:
            if hooks.chunks:
                finalize_model_grads(list(hooks.chunks))
        return added

    def _observed(self) -> dict[str, Metric[float]]:
        """Returns metrics of the passes."""
        self._chained_optimizer.zero_grad()  # frees copies in float32
        activity.part("after the optimizer")
        found = self._observers.read()
        for hooks in reversed(self._hooks):  # the order in rows
            found |= hooks.read()
        return found

    def _step(self, learning_rate: float, grad_norm: float) -> dict[str, Metric[float]]:
        """All optimizers step, or none: they count as many steps. Returns metrics of features."""
        step(self._optimizer, learning_rate, grad_norm)
        metrics: dict[str, Metric[float]] = {}
        for hooks in self._hooks:
            metrics |= hooks.step(learning_rate)
        self._changed()
        return metrics

    def _warm_up(self) -> None:
        """Makes the passes that features ask for before the first one; nothing of them counts."""
        if self._warm:
            return
        self._warm = True
        for packed in filter(None, (hooks.warm_up() for hooks in self._hooks)):
            with self._observers.unseen():
                self._add(packed, loss=nothing, num_tokens=1, num_sequences=1)

    def _clear(self) -> None:
        for chunk in self._all_chunks:
            chunk.zero_grad_buffer()
        self._chained_optimizer.zero_grad()
        for hooks in self._hooks:
            hooks.clear()

    def _add(
        self, packed: Sequence[PackedMicroBatch], *, loss: Loss, num_tokens: int, num_sequences: int
    ) -> list[LossOutput]:
        with nested([self._activations.passing(), *(hooks.around_pass() for hooks in self._hooks)]):
            return run_loss(
                self._trained,
                packed,
                self._head,
                loss,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                hooks=self._hooks,
            )

    @contextlib.contextmanager
    def _held_back(self) -> Iterator[None]:
        """Context in which backward passes do not reduce gradients across ranks."""
        config = self._trained[0].config
        scheduled, config.no_sync_func = config.no_sync_func, None
        try:
            with nested(chunk.no_sync() for chunk in self._trained):
                yield
        finally:
            config.no_sync_func = scheduled

    def _find_bad_micro_batches(self, added: Sequence[Added]) -> tuple[BadMicroBatch, ...]:
        """Returns this rank's micro-batches whose own gradient, before the all-reduce, is not finite.

        Leaves out the gradients of experts that also get tokens of other data ranks.
        """
        found = []
        each = [(micro_batch, add) for micro_batches, add in added for micro_batch in micro_batches]
        for number, (micro_batch, add) in enumerate(each):
            activity.part(f"the gradient is not finite: micro-batch {number + 1} of {len(each)} by itself")
            self._clear()
            with self._held_back(), self._observers.unseen():
                add(self._pack([micro_batch]))
            buffers = [buffer for chunk in self._all_chunks for buffer in chunk.buffers]
            if self._dims.ep == 1:
                buffers += [buffer for chunk in self._all_chunks for buffer in chunk.expert_parallel_buffers]
            if not all(bool(buffer.grad_data.isfinite().all()) for buffer in buffers):
                found.append(number)
        data_rank, rank, node = parallel_state.get_data_parallel_rank(), dist.get_rank(), socket.gethostname()
        return tuple(BadMicroBatch(data_rank=data_rank, micro_batch=m, rank=rank, node=node) for m in found)

    def save(self, folder: Path) -> Mapping[str, Digest]:
        """Writes this rank's shards into ``folder``. Returns its files' digests, by name. Raises CheckpointError.

        State that has left the GPU's memory is written from the host's.
        """
        return self.start_save(folder, in_process=False).finalize().files

    def start_save(self, folder: Path, *, in_process: bool = True, extra: ExtraState | None = None) -> ShardSave:
        """Saves as `save`, but with ``in_process`` returns once the shards are copied in the host's memory: a thread
        writes them. The next one writes over that memory, so this one must be durable before. ``extra`` is saved
        too."""
        self.gather()
        with saving.explained(folder):
            for hooks in self._hooks:
                hooks.saving(folder)
        staged = self._staged if in_process else None
        chunks, optimizer = self._all_chunks, self._chained_optimizer
        values, more = self._parked.host_copy, None
        if extra is not None:
            values, more = lambda tensor: self._parked.host_copy(extra.values(tensor)), extra.state(self._models)
        return saving.save_shards(folder, chunks, optimizer, self._planned, values, staged, more)

    def load(self, folder: Path, extra: ExtraState | None = None) -> None:
        """Loads the shards that ``save`` wrote, and those of ``extra`` into it. Raises CheckpointError, on the first
        rank also for adapters of another model."""
        self.onload()
        for hooks in self._hooks:
            hooks.loading(folder)
        more = None if extra is None else extra.state(self._models)
        read = loading.load(folder, self._all_chunks, self._chained_optimizer, more)
        if extra is not None:
            extra.load(self._models, read, folder)
        self._changed()
