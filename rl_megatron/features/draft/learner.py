"""Trains a draft layer together with the policy: a module with its own gradient buffers and optimizer.

The draft layer computes its loss and gradient from detached hidden states of the policy's passes, once the policy's
loss is computed. So no part of the policy depends on it: its gradients, their buckets, norm and step are to the bit
those of a run without. Every rank calls each method; ranks of other stages hold an empty module, since megatron's
optimizers reduce norms and count steps over all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from typing_extensions import override

from rl_megatron.feature import Built, LearnerHooks
from rl_megatron.features.draft.feature import FEATURE
from rl_megatron.features.draft.layer import DraftHead, embedded
from rl_megatron.learner.heads import VocabHead, head_logprobs
from rl_megatron.learner.keywords import keywords
from rl_megatron.learner.model.build import freeze_routers, restore_float32_buffers, with_dtypes
from rl_megatron.learner.optimizer import gradient_norm, make_optimizer, step
from rl_megatron.learner.packed import PackedMicroBatch
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Metric, Samples

_ALONE = {"overlap_grad_reduce": False, "overlap_param_gather": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTokens:
    """The next position in its sequence for each: the target of the draft layer, and True if it is trained."""

    targets: Tensor  # [t]
    mask: Tensor  # [t] bool


def make_hooks(built: Built) -> DraftTrainer | None:
    """Returns the draft layer of a policy; None for a model without one, like a critic. Every rank calls it."""
    return DraftTrainer(built) if built.shape.num_draft_layers else None


class DraftTrainer(LearnerHooks):
    """The draft layer of one rank's policy."""

    def __init__(self, built: Built) -> None:
        shape, learner, models, head = built.shape, built.learner, built.models, built.head
        assert isinstance(head, VocabHead), "a model that scores has no draft layer"
        given = keywords(learner, shape)
        self.model = DraftHead(shape, learner)
        config = self.model.config
        if learner.router.frozen and self.model.layer is not None:
            freeze_routers([self.model.layer.transformer_layer])
        if config.bf16:
            self.model.bfloat16()
        restore_float32_buffers([self.model])
        ddp = DistributedDataParallelConfig(**{**with_dtypes(given.ddp), **_ALONE})
        self.chunks = [DistributedDataParallel(config, ddp, self.model.to(built.device))]
        self.optimizers = [make_optimizer(self.chunks, given)]
        self._policy, self._head, self._gather = models, head, built.gather
        self._norm = 0.0
        self._embedding = self._room(shape)
        self._stale, self._seen = True, list[Tensor]()
        self._watches = False
        if models[-1].post_process:
            models[-1].decoder.register_forward_hook(self._see)

    @override
    def pack(self, packed: PackedMicroBatch, samples: Samples) -> PackedMicroBatch:
        return replace(packed, extras={**packed.extras, FEATURE.name: next_positions(packed, samples)})

    @override
    @contextlib.contextmanager
    def around_pass(self) -> Iterator[None]:
        """Keeps the hidden states of the passes within for `after_loss`. The first call since a step copies the
        embedding."""
        if self._stale:
            self._gather()
            self._copy_embedding()
        self._stale, self._watches = False, True
        try:
            yield
        finally:
            self._watches = False
            self._seen.clear()

    @override
    def after_loss(self, micro_batch: PackedMicroBatch, num_tokens: int) -> Mapping[str, Metric[Tensor]]:
        """Accumulates the gradient of a micro-batch that has passed through the policy."""
        (hidden,) = self._seen
        self._seen.clear()
        after = micro_batch.extras[FEATURE.name]
        assert isinstance(after, NextTokens)
        with torch.enable_grad():
            logprobs = self._logprobs(hidden, micro_batch, after)
            loss = -(logprobs * after.mask).sum() / num_tokens
            loss.backward()
        return {"draft/loss": Metric(value=loss.detach(), weight=num_tokens)}

    def _logprobs(self, hidden: Tensor, micro_batch: PackedMicroBatch, after: NextTokens) -> Tensor:
        """Returns log-probs [t] of the tokens after the targets, from the decoder's output [t / tp, 1, h]. They are of
        the distribution that is sampled from."""
        assert self.model.layer is not None
        parallel = self.model.config.sequence_parallel
        inputs = embedded(self._embedding_weight, micro_batch.targets, sequence_parallel=parallel).to(hidden.dtype)
        out = self.model.layer(hidden, inputs, micro_batch.attention)
        if parallel:
            out = gather_from_sequence_parallel_region(out)
        weight = _output_weight(self._policy[-1]).detach()
        cut = self._head.cut(len(weight))
        return head_logprobs(out.squeeze(1), weight, after.targets, **cut)[0]

    @override
    def norm(self) -> float:
        self._norm = gradient_norm(self.optimizers[0])
        return self._norm

    @override
    def step(self, learning_rate: float) -> Mapping[str, Metric[float]]:
        step(self.optimizers[0], learning_rate, self._norm)
        return {"draft/grad_norm": Metric(value=self._norm)}

    @override
    def changed(self) -> None:
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
        """Allocates a copy of the embedding, if a last stage has neither it nor an output matrix tied to it."""
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


def next_positions(packed: PackedMicroBatch, samples: Samples) -> NextTokens:
    """Returns the targets of a draft layer for ``packed``, from ``samples``. A sequence's last position has none."""
    device, source = packed.targets.device, packed.source
    count = len(samples.input_ids)
    last = torch.zeros(count, dtype=torch.bool)
    last[samples.cu_seqlens[1:] - 1] = True
    there = (source >= 0) & ~last[source.clamp(min=0)]
    after = (source + 1).where(there, 0)
    targets, mask = samples.targets[after].where(there, 0), samples.mask[after] & there
    return NextTokens(targets=targets.to(device), mask=mask.to(device))


def _output_weight(model: Any) -> Tensor:
    """Returns the output matrix [V / tp, h]; the embedding's if that is tied."""
    tied = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight
