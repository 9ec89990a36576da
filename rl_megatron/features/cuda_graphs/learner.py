"""CUDA graphs of decoder layers (``learner.cuda_graphs``), by megatron-core 0.16.1's ``cuda_graph_impl="local"``.

megatron notes the layers of the first pass with their shapes, captures all at its end, and takes no other shapes from
then on. So `Graphs.warm_up` gives a pass before any other, with a made-up micro-batch of each size of
``learner.padding``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import __version__, parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from typing_extensions import override

from rl_megatron.errors import ConfigError
from rl_megatron.feature import Built, LearnerHooks
from rl_megatron.learner.packed import PackedMicroBatch, pack_micro_batch
from rl_megatron.types import Samples


class Graphs(LearnerHooks):
    """The graphs of a rank's layers. A process has one model's graphs: megatron's record of them is global.

    Raises ConfigError for a megatron-core that makes graphs differently.
    """

    def __init__(self, built: Built) -> None:
        if not hasattr(cuda_graphs, "TensorReusePool"):
            raise ConfigError(
                f"learner.cuda_graphs=true: megatron-core {__version__} captures graphs otherwise than 0.16.1, for "
                "which this was written; install 0.16.1, or leave it out"
            )
        self._layers = [layer for model in built.models for layer in model.decoder.layers]
        self._padding, self._device = built.learner.padding, built.device
        record = cuda_graphs._CudagraphGlobalRecord
        record.cudagraph_created, record.cudagraph_record = False, []
        record.tensor_reuse_pool = _pool()
        for layer in self._layers:
            layer.cudagraph_manager = _manager(layer.config)

    @override
    def warm_up(self) -> Sequence[PackedMicroBatch]:
        """Returns micro-batches of each size, for a pass after which megatron captures all layers."""
        tp, most = parallel_state.get_tensor_model_parallel_world_size(), self._padding.sequences
        return [
            pack_micro_batch(_sample_inputs(size), tp=tp, cp=1, cp_rank=0, device=self._device, sequences=most)
            for size in self._padding.sizes
        ]

    @override
    @contextlib.contextmanager
    def around_score(self, micro_batches: Sequence[Samples], weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Makes layers compute without graphs for other weights, which graphs would not read, and if none `fit`."""
        aside = self._layers if weights or not self.fit(micro_batches) else []
        for layer in aside:
            layer._should_call_local_cudagraph = lambda *_, **__: False
        try:
            yield
        finally:
            for layer in aside:
                del layer._should_call_local_cudagraph

    def fit(self, micro_batches: Sequence[Samples]) -> bool:
        """True if there are graphs for all of them, as for those that `data.packing` makes of a run's batches."""
        longest, most = self._padding.sizes[-1], self._padding.sequences or 0
        return all(m.num_sequences <= most and len(m.input_ids) <= longest for m in micro_batches)


def _sample_inputs(size: int) -> Samples:
    numbers, ids = torch.zeros(size), torch.zeros(size, dtype=torch.int64)
    return Samples(
        input_ids=ids,
        targets=ids,
        mask=torch.ones(size, dtype=torch.bool),
        advantages=numbers,
        rollout_logprobs=numbers,
        old_logprobs=numbers,
        cu_seqlens=torch.tensor([0, size]),
    )


def _pool() -> Any:
    """Returns megatron's pool of static buffers, but it takes no buffer back that a gradient flows through.

    megatron's own pool takes the first layer's input back once its forward pass is captured. It gives the buffer to the
    gradient of the last layer's output. A replayed backward pass then reads that gradient in place of the input. The
    gradients of the first layer's norm and of the embedding are wrong.
    """

    class Pool(cuda_graphs.TensorReusePool):
        def insert(self, tensor: torch.Tensor) -> None:
            if not tensor.requires_grad:
                super().insert(tensor)

    return Pool()


def _manager(config: TransformerConfig) -> Any:
    """Returns megatron's manager of a layer's graphs, but it gives them megatron's own packed parameters: graphs take
    tensors, numbers and text, ours have tuples. The longest sequence is as long as the micro-batch, so it is static."""

    class Manager(cuda_graphs.CudaGraphManager):
        def __call__(self, layer: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
            packed = given["packed_seq_params"]
            ends, longest = packed.cu_seqlens_q, len(packed.positions)
            plain = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
            return super().__call__(layer, args, {**given, "packed_seq_params": plain})

    return Manager(config)
