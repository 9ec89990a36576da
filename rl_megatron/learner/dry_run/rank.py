"""One rank's step of training at its real size, without its memory: tensors without data in a world that sends nothing.

It shows that the sizes divide through the whole model, how many bytes each phase holds, and what collectives carry. It
does not show times, what NCCL does, uneven load, or what TransformerEngine's kernels keep: layers are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner.cpu import patches
from rl_megatron.models.shape import ModelShape
from rl_megatron.options.fusion import FusionSection
from rl_megatron.options.implementation import multiplies_at_once
from rl_megatron.types import DryRun, LossInputs, LossOutput, Samples

patches.install()  # before the modules below bind megatron's functions

from megatron.core import parallel_state  # noqa: E402

from rl_megatron.learner import logprobs, world  # noqa: E402
from rl_megatron.learner.dry_run import even  # noqa: E402
from rl_megatron.learner.dry_run.meter import Meter  # noqa: E402
from rl_megatron.learner.megatron import make_policy_as  # noqa: E402
from rl_megatron.learner.model.delta.chunks import cut_into_chunks  # noqa: E402
from rl_megatron.learner.optimizer import create_state  # noqa: E402
from rl_megatron.learner.packed import PackedMicroBatch, pack_micro_batch, with_next  # noqa: E402
from rl_megatron.learner.trained import MegatronLearner  # noqa: E402

_WITHOUT = {"fp8": None, "batch_invariant": False, "fusion": FusionSection()}
"""Keys of kernels that TransformerEngine alone has, as a learner of torch's layers has them."""


class WithoutMicroBatches(MegatronLearner):
    """A learner whose micro-batches are all ``packed``, because packing reads lengths, which these tensors lack."""

    packed: PackedMicroBatch

    def _pack(self, micro_batches: Sequence[Samples]) -> list[PackedMicroBatch]:
        return [self.packed for _ in micro_batches]

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of the parameters, and of the buffers in which gradients are added up."""
        chunks = self._chunks_of_all
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        parameters = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
        return parameters, sum(b.grad_data.nbytes for b in buffers)

    def counted(self, meter: Meter, micro_batches: int, rank: int) -> DryRun:
        """What ``meter``, which has seen everything since before the learner was made, counts of one step."""
        create_state(self._optimizer_of_all)
        held, (parameters, gradients) = meter.live, self.bytes_held()
        meter.restart()
        nothing: list[Samples] = [None] * micro_batches  # type: ignore[list-item]
        self.backward(nothing, _loss, num_tokens=1, num_sequences=1)
        self._added = [([], add) for _, add in self._added]  # no samples to look for routes in
        self.step(0.0)
        return DryRun(
            rank=rank,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            parameters=parameters,
            gradients=gradients,
            optimizer=held - parameters - gradients,
            passes=meter.peak - held,
            collectives={name: (calls, meter.sent[name]) for name, calls in meter.calls.most_common()},
        )


def dry_run(shape: ModelShape, learner: LearnerSection, rank: int, *, sequence: int, micro_batches: int = 1) -> DryRun:
    """Build ``rank``'s policy and make one step of ``micro_batches`` full ones, of sequences of ``sequence`` tokens.

    This process is of no use for anything else afterwards. Raises what a real rank would raise for sizes that do not
    divide.
    """
    at_once = multiplies_at_once(learner.model_copy(update={"layers": "torch"}), shape)
    learner = learner.model_copy(update={"device": "cpu", "layers": "torch", **_WITHOUT})
    _join(learner, rank)
    packed = micro_batch(learner, sequence)
    if shape.delta is not None:  # which reads lengths
        packed.attention.chunks = cut_into_chunks(packed.attention.cu_seqlens_q, gap=shape.delta.kernel - 1)
    even.install((len(packed.input_ids) // learner.tp, 1, shape.hidden_size), at_once=at_once)
    logprobs.CPU_CHUNK_BYTES = 1 << 62  # as many positions at once as a GPU takes
    meter = even.WithoutData()
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        return policy(shape, learner, packed).counted(meter, micro_batches, rank)


def policy(shape: ModelShape, learner: LearnerSection, packed: PackedMicroBatch) -> WithoutMicroBatches:
    """This rank's policy, whose micro-batches are ``packed``. Every rank calls it."""
    made = make_policy_as(WithoutMicroBatches, shape, learner, torch.device("cpu"), temperature=1.0)
    made.packed = packed
    made.adopt()
    return made


def micro_batch(learner: LearnerSection, sequence: int) -> PackedMicroBatch:
    """This rank's share of a full micro-batch of sequences of ``sequence`` tokens, all alike."""
    tokens = learner.max_tokens_per_micro_batch
    numbers, ids = torch.zeros(tokens), torch.zeros(tokens, dtype=torch.int64)
    samples = Samples(
        input_ids=ids,
        targets=ids,
        mask=torch.ones(tokens, dtype=torch.bool),
        advantages=numbers,
        rollout_logprobs=numbers,
        old_logprobs=numbers,
        cu_seqlens=torch.tensor([*range(0, tokens, min(sequence, tokens)), tokens]),
    )
    cp_rank = parallel_state.get_context_parallel_rank()
    cpu = torch.device("cpu")
    packed = pack_micro_batch(samples, tp=learner.tp, cp=learner.cp, cp_rank=cp_rank, device=cpu)
    return with_next(packed, samples) if learner.draft.train else packed


def _loss(inputs: LossInputs) -> LossOutput:
    """Of scores, or with an entropy bonus, whose gradient holds a chunk of logits more."""
    each = inputs.advantages * inputs.logprobs + inputs.entropy if inputs.values is None else inputs.values
    return LossOutput(loss=-each.sum() / inputs.num_tokens, metrics={})


def _join(learner: LearnerSection, rank: int) -> None:
    """Makes megatron's groups in a world where every collective returns at once."""
    dist.init_process_group("fake", rank=rank, world_size=learner.dims.world_size, store=FakeStore())
    world.make_groups(learner, seed=0, gloo=False)
