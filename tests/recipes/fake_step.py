"""One rank's step of training at its real size, without its memory: tensors without data in a world that sends nothing.

It shows that the sizes divide through the whole model, how many bytes each phase holds, and what collectives carry. It
does not show times, what NCCL does, uneven load, or what TransformerEngine's kernels keep: layers are torch's. It
replaces functions in this process for good: code of megatron-core that reads values gets even load and sizes as sent.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_megatron.config.activations import uses_grouped_gemm
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner import cpu
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import LossInputs, LossOutput, Samples
from tests.recipes.dry_run import DryRun
from tests.recipes.meter import Meter

cpu.install()  # before the modules below bind megatron's functions

import megatron.core.distributed.param_and_grad_buffer as buffers  # noqa: E402
import megatron.core.optimizer.clip_grads as clip_grads  # noqa: E402
import megatron.core.pipeline_parallel.p2p_communication as p2p  # noqa: E402
import megatron.core.tensor_parallel.random as random  # noqa: E402
import megatron.core.transformer.moe.token_dispatcher as dispatcher  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402

from rl_megatron.features.draft.feature import draft_section  # noqa: E402
from rl_megatron.features.draft.learner import FEATURE, next_positions  # noqa: E402
from rl_megatron.learner import heads, megatron, optimizer, world  # noqa: E402
from rl_megatron.learner.model import attention, kernels  # noqa: E402
from rl_megatron.learner.model.delta import cut_into_chunks  # noqa: E402
from rl_megatron.learner.packed import PackedMicroBatch, pack_micro_batch  # noqa: E402
from rl_megatron.learner.trained import MegatronLearner  # noqa: E402

_WITHOUT = {"fp8": None, "batch_invariant": False}
"""Keys of kernels that TransformerEngine alone has, as a learner of torch's layers has them."""


class WithoutMicroBatches(MegatronLearner):
    """A learner whose micro-batches are all ``packed``, because packing reads lengths, which these tensors lack."""

    packed: PackedMicroBatch

    def _pack(self, micro_batches: Sequence[Samples]) -> list[PackedMicroBatch]:
        return [self.packed for _ in micro_batches]

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of the parameters, and of the buffers in which gradients are added up."""
        chunks = self._all_chunks
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return sum(p.nbytes for chunk in chunks for p in chunk.parameters()), sum(b.grad_data.nbytes for b in buffers)

    def counted(self, meter: Meter, micro_batches: int, rank: int) -> DryRun:
        """What ``meter``, which has seen everything since before the learner was made, counts of one step."""
        optimizer.create_state(self._chained_optimizer)
        held, (parameters, gradients) = meter.live, self.bytes_held()
        meter.restart()
        nothing: list[Samples] = [None] * micro_batches  # type: ignore[list-item]
        self.backward(nothing, _loss, num_tokens=1, num_sequences=1)
        for hooks in self._hooks:
            hooks.clear()  # a dry run replays no routes that would be counted
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
    divide."""
    at_once = uses_grouped_gemm(learner.model_copy(update={"layers": "torch"}), shape)
    learner = learner.model_copy(update={"device": "cpu", "layers": "torch", **_WITHOUT})
    _join(learner, rank)
    packed = micro_batch(learner, sequence)
    if shape.delta is not None:  # which reads lengths
        packed.attention.chunks = cut_into_chunks(packed.attention.cu_seqlens_q, gap=shape.delta.kernel - 1)
    _install((len(packed.input_ids) // learner.tp, 1, shape.hidden_size), at_once=at_once)
    heads.CPU_CHUNK_BYTES = 1 << 62  # as many positions at once as a GPU takes
    meter = WithoutData()
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        return policy(shape, learner, packed).counted(meter, micro_batches, rank)


def policy(shape: ModelShape, learner: LearnerSection, packed: PackedMicroBatch) -> WithoutMicroBatches:
    """This rank's policy, whose micro-batches are ``packed``. Every rank calls it."""
    megatron.__dict__["MegatronLearner"] = WithoutMicroBatches
    made = megatron.make_policy(shape, learner, torch.device("cpu"), temperature=1.0)
    assert isinstance(made, WithoutMicroBatches)
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
    cp_rank, cpu = parallel_state.get_context_parallel_rank(), torch.device("cpu")
    packed = pack_micro_batch(samples, tp=learner.tp, cp=learner.cp, cp_rank=cp_rank, device=cpu)
    if not draft_section(learner).train:
        return packed
    return replace(packed, extras={FEATURE.name: next_positions(packed, samples)})


def _loss(inputs: LossInputs) -> LossOutput:
    """Of scores, or with an entropy bonus, whose gradient holds a chunk of logits more."""
    each = inputs.advantages * inputs.logprobs + inputs.entropy if inputs.values is None else inputs.values
    return LossOutput(loss=-each.sum() / inputs.num_tokens, metrics={})


def _join(learner: LearnerSection, rank: int) -> None:
    """Makes megatron's groups in a world where every collective returns at once."""
    dist.init_process_group("fake", rank=rank, world_size=learner.dims.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel = partial(
        parallel_state.initialize_model_parallel, create_gloo_process_groups=False
    )
    world.make_groups(learner, seed=0)


class WithoutData(Meter):
    """Counts as a Meter does, within a FakeTensorMode. Every number that the program reads from a tensor is 1."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # two of three calls
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return True if kind is torch.bool else 1.0 if kind.is_floating_point else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def _install(hidden: Sequence[int], *, at_once: bool) -> None:
    """Replaces what reads tensors' values. ``hidden`` is the shape of what pipeline stages send each other. With
    ``at_once`` experts' products are in one call, as on GPUs."""
    dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _even_counts
    others = (None, None) if "align_size" in inspect.signature(dispatcher.permute).parameters else ()  # of padding
    dispatcher.permute, dispatcher.sort_chunks_by_idxs = partial(_permute, others), _sort_chunks
    p2p.P2PCommunicator._communicate_shapes = _sent(p2p.P2PCommunicator._communicate_shapes, list(hidden))
    random.CudaRNGStatesTracker.fork = _unforked
    buffers._coalescing_manager = _one_by_one
    attention.__dict__["faster_attention"] = lambda *_: None
    kernels.__dict__["takes"] = lambda *_: at_once
    clip_grads.l2_norm_impl = optimizer.l2_norm
    dist.__dict__["all_gather_object"] = _all_alike  # which megatron calls on the names of parameters
    optimizer.__dict__["get_megatron_optimizer"] = partial(get_megatron_optimizer, use_gloo_process_groups=False)
    torch.nn.functional.scaled_dot_product_attention = _attention  # type: ignore[assignment]
    torch.nn.Module.bfloat16 = torch.nn.Module.to = _as_it_is  # type: ignore[method-assign,assignment]


def _sent(original: Callable[..., Any], shape: list[int]) -> Callable[..., Any]:
    """Sends shapes as before; each that comes is ``shape``."""

    def communicate(*arguments: Any, **named: Any) -> tuple[list[int], list[int]]:
        original(*arguments, **named)
        return shape, shape

    return communicate


def _even_counts(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """In place of the copy of counts to the host: every expert is sent an equal share."""
    if point != self.cuda_dtoh_point:
        return tokens_per_expert
    rows, ep, tp, local = self.num_out_tokens, self.ep_size, self.tp_size, self.num_local_experts
    to_ranks = _shares(rows, ep)
    self.input_splits = self.output_splits = to_ranks if ep * tp > 1 else None
    self.output_splits_tp = np.array([rows] * tp) if tp > 1 else None
    self.num_global_tokens_per_local_expert = np.stack([_shares(n, local) for _ in range(tp) for n in to_ranks])
    return self.num_global_tokens_per_local_expert.sum(0)


def _shares(total: int, parts: int) -> Any:
    return np.diff(np.linspace(0, total, parts + 1).round().astype(int))


def _permute(
    others: tuple[None, ...], tokens: Tensor, routing_map: Tensor, probs: Tensor, num_out_tokens: int, **_: object
) -> tuple[Tensor | None, ...]:
    """Megatron's, but which rows are chosen is not looked at. It returns ``others`` too."""
    index = torch.zeros(num_out_tokens, dtype=torch.int64, device=tokens.device)
    return tokens.index_select(0, index), probs.T.contiguous().reshape(-1).index_select(0, index), index, *others


def _sort_chunks(
    rows: Tensor, sizes: Any, order: Tensor, probs: Tensor | None = None, **_: object
) -> tuple[Tensor, Tensor | None]:
    """Megatron's, but the order of the chunks, which is a tensor, is not looked at."""
    sizes = sizes.tolist()
    return torch.cat(rows.split(sizes)), None if probs is None else torch.cat(probs.split(sizes))


_on_cpu = torch.nn.functional.scaled_dot_product_attention


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, enable_gqa: bool = False, **named: Any
) -> Tensor:
    """As GPUs' fused kernels, which keep no scores; CPUs' wants heads of queries and values of one width for that. The
    one of GPUs that takes a mask (torch's memory-efficient) takes no grouped queries, and keeps the mask as numbers to
    add: where both are, torch computes and keeps the scores."""
    if attn_mask is not None and enable_gqa:
        return _on_cpu(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **named)
    added = query.new_empty(0) if attn_mask is None else attn_mask.to(query.dtype)
    out: Tensor = _FusedAttention.apply(query, key, value, added)  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
        rows = query.transpose(1, 2)  # kernels lay the output out as their input is
        out = rows.new_empty((*rows.shape[:-1], value.shape[-1])).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, torch.empty_like(query[..., 0], dtype=torch.float32), added)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None


@contextlib.contextmanager
def _unforked(self: Any, *_: object) -> Iterator[None]:
    """Random states are bytes that nothing here has."""
    yield


class _Done:
    """The work of collectives that have returned."""

    def wait(self) -> None:
        """Returns at once."""


@contextlib.contextmanager
def _one_by_one(*_: object, **__: object) -> Iterator[_Done]:
    """Coalesced collectives have no rule for tensors without data."""
    yield _Done()


def _all_alike(out: list[Any], mine: Any, group: object = None) -> None:
    """A pickle has data: the others are taken to say the same, or, of a stage without parameters, one group of dense
    ones."""
    out[:] = [mine or [(None, False)]] * len(out)


def _as_it_is(module: torch.nn.Module, *_: object, **__: object) -> torch.nn.Module:
    """All parameters have their dtype from the start, and a fake one cannot be swapped."""
    return module
