"""The indexer of sparse attention (`shape.Indexer`), held as it was read. Names are megatron-core's (``dsa.py``)."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_megatron.learner.model.decoder_config import device_of
from rl_megatron.models.shape import ModelShape


class _Tensors(torch.nn.Module):
    """Buffers by name."""

    def __init__(self, config: TransformerConfig, **sizes: tuple[int, ...]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_buffer(name, torch.empty(size, dtype=config.params_dtype, device=device_of(config)))


class HeldIndexer(torch.nn.Module):
    """Projections of queries, of keys, and of a weight for each head, and the keys' norm. Nothing computes with it."""

    def __init__(self, config: TransformerConfig, shape: ModelShape) -> None:
        super().__init__()
        assert shape.indexer is not None
        assert shape.latent is not None
        assert shape.latent.query_rank is not None
        heads, size = shape.indexer.heads, shape.indexer.head_dim
        self.linear_wq_b = _Tensors(config, weight=(heads * size, shape.latent.query_rank))
        self.linear_wk = _Tensors(config, weight=(size, shape.hidden_size))
        self.k_norm = _Tensors(config, weight=(size,), bias=(size,))
        self.linear_weights_proj = _Tensors(config, weight=(heads, shape.hidden_size))

    def keep_float32(self) -> None:
        """Restore float32 where published models have it."""
        self.k_norm.float()
        self.linear_weights_proj.float()
