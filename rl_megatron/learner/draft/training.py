"""Trains a draft layer beside the policy: a module, gradient buffers and an optimizer of its own.

The policy's passes leave hidden states behind, detached, of which the draft layer computes its loss and gradient once
the policy's loss is there. So nothing of the policy knows of it: its gradients, their buckets, norm and step are to the
bit those of a run without. Every rank calls each method; ranks of other stages hold an empty module, since megatron's
optimizers reduce norms and count steps over all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner.draft.layer import DraftModel, embedded
from rl_megatron.learner.heads import VocabHead
from rl_megatron.learner.logprobs import head_logprobs
from rl_megatron.learner.model.build import keep_buffers_float32, with_dtypes
from rl_megatron.learner.optimizer import inner_optimizers, make_optimizer
from rl_megatron.learner.packed import PackedMicroBatch
from rl_megatron.learner.routers.balance import freeze_routers
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.table import keywords
from rl_megatron.types import Metric

_ALONE = {"overlap_grad_reduce": False, "overlap_param_gather": False}


class Drafting:
    """The draft layer of one rank's policy, whose chunks are ``models``."""

    def __init__(
        self,
        shape: ModelShape,
        learner: LearnerSection,
        device: torch.device,
        models: Sequence[GPTModel],
        head: VocabHead,
    ) -> None:
        given = keywords(learner, shape)
        self.model = DraftModel(shape, learner)
        config = self.model.config
        if learner.router.frozen and self.model.layer is not None:
            freeze_routers([self.model.layer.transformer_layer])
        if config.bf16:
            self.model.bfloat16()
        keep_buffers_float32([self.model])
        ddp = DistributedDataParallelConfig(**{**with_dtypes(given.ddp), **_ALONE})
        self.chunk = DistributedDataParallel(config, ddp, self.model.to(device))
        self.optimizer = make_optimizer([self.chunk], given)
        self._policy, self._head, self._factor = models, head, learner.draft.learning_rate_factor
        self._embedding = self._room(shape)
        self._stale, self._seen = True, list[Tensor]()
        self._watches = False
        if models[-1].post_process:
            models[-1].decoder.register_forward_hook(self._see)

    def chained(self, policy: MegatronOptimizer) -> MegatronOptimizer:
        """The optimizers of both, as checkpoints and memory know them."""
        return ChainedOptimizer([*inner_optimizers(policy), *inner_optimizers(self.optimizer)])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Passes in it leave their hidden states behind for `add`. The first since a step copies the embedding."""
        if self._stale:
            self._copy_embedding()
        self._stale, self._watches = False, True
        try:
            yield
        finally:
            self._watches = False
            self._seen.clear()

    def add(self, micro_batch: PackedMicroBatch, num_tokens: int) -> Mapping[str, Metric[Tensor]]:
        """Accumulate the gradient of a micro-batch that has passed through the policy; returns this rank's share of
        the loss. On the last stage alone."""
        (hidden,) = self._seen
        self._seen.clear()
        assert micro_batch.next is not None
        with torch.enable_grad():
            logprobs = self.logprobs(hidden, micro_batch)
            loss = -(logprobs * micro_batch.next.mask).sum() / num_tokens
            loss.backward()
        return {"draft/loss": Metric(value=loss.detach(), weight=num_tokens)}

    def logprobs(self, hidden: Tensor, micro_batch: PackedMicroBatch) -> Tensor:
        """[t] of the tokens after the targets, of the distribution that is sampled from, from the decoder's output
        [t / tp, 1, h]."""
        assert micro_batch.next is not None
        assert self.model.layer is not None
        parallel = self.model.config.sequence_parallel
        inputs = embedded(self._embedding_weight, micro_batch.targets, sequence_parallel=parallel).to(hidden.dtype)
        out = self.model.layer(hidden, inputs, micro_batch.attention)
        if parallel:
            out = gather_from_sequence_parallel_region(out)
        weight = _output_weight(self._policy[-1]).detach()
        cut = self._head.cut(len(weight))
        return head_logprobs(out.squeeze(1), weight, micro_batch.next.targets, **cut)[0]

    def clear(self) -> None:
        """Forget gradients, before the first pass since a step."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finalize(self) -> None:
        """Reduce the gradients over ranks."""
        finalize_model_grads([self.chunk])

    def learning_rate(self, policy: float) -> float:
        """The draft layer's learning rate, by the policy's."""
        return policy * self._factor

    def changed(self) -> None:
        """The policy's weights are others now."""
        self._stale = True

    def _see(self, _module: object, _inputs: object, out: Tensor) -> None:
        if self._watches:
            self._seen.append(out.detach())

    @property
    def _embedding_weight(self) -> Tensor:
        """[V / tp, h]."""
        if self._embedding is not None:
            return self._embedding
        first = self._policy[0]
        weight: Tensor = (
            first.embedding.word_embeddings.weight if first.pre_process else _output_weight(self._policy[-1])
        )
        return weight

    def _room(self, shape: ModelShape) -> Tensor | None:
        """For a copy of the embedding, where a last stage has neither it nor an output matrix tied to it."""
        last = self._policy[-1]
        if not last.post_process or self._policy[0].pre_process or shape.tie_embeddings:
            return None
        return torch.empty_like(_output_weight(last).data)

    def _copy_embedding(self) -> None:
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        sends = self._policy[0].pre_process and not self._policy[0].share_embeddings_and_output_weights
        if not sends and self._embedding is None:
            return
        group = parallel_state.get_embedding_group()
        held: Any = self._policy[0].embedding.word_embeddings.weight.data if sends else self._embedding
        dist.broadcast(held, dist.get_process_group_ranks(group)[0], group=group)


def _output_weight(model: Any) -> Tensor:
    """[V / tp, h]; the embedding's if that is tied."""
    tied = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight
