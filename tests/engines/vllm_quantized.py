"""Our worker extension for a vLLM with float8 weights on CPUs, loaded by a test's server.

vLLM 0.32.0's kernels there need AMX; here torch multiplies by what numbers and scales stand for. Loaders are its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from rl_megatron.engines.vllm.worker import WorkerExtension

__all__ = ["WorkerExtension"]


def _plain(weight: Tensor, scales: Tensor) -> Tensor:
    rows, columns = weight.shape
    return weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]


def _linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    return linear(x, _plain(layer.weight, layer.weight_scale_inv).to(x.dtype), bias)


def _experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    out = torch.zeros(hidden_states.shape)
    for expert in range(len(w1)):
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        both = linear(hidden_states[token].float(), _plain(w1[expert], self.w1_scale[expert]))
        gate, up = both.chunk(2, -1)
        made = linear(silu(gate) * up, _plain(w2[expert], self.w2_scale[expert]))
        out.index_add_(0, token, made * topk_weights[token, choice, None])
    output.copy_(out)


CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
CPUFp8BlockScaledMMKernel.process_weights_after_loading = lambda self, layer: None
CPUFp8BlockScaledMMKernel.apply_weights = _linear
cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
cpu_moe.CPUExpertsFp8.apply = _experts
