"""Experts in one tensor a layer, laid out as in checkpoints: gpt-oss's, with biases and a clamped gate; Qwen3.5's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rl_megatron.learner.model import kernels
from rl_megatron.learner.model.attention import DecoderConfig, parameter_device
from rl_megatron.learner.model.kernels import expert_mlp

_ALPHA = 1.702  # gate * sigmoid(alpha * gate)


class BatchedExperts(MegatronModule):
    """This rank's experts in parameters whose first dimension they are. Replaces megatron's grouped MLP. It does not
    support expert tensor parallelism."""

    def __init__(self, config: DecoderConfig, groups: Any, sizes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(config=config)
        self.groups = groups
        self.recompute = config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        for name, size in sizes.items():
            parameter = torch.nn.Parameter(
                torch.empty(size, dtype=config.params_dtype, device=parameter_device(config))
            )
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)  # else norms count rank 0's alone
            self.register_parameter(name, parameter)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns global tensors over all experts, sharded over EP along the experts."""
        state = self.state_dict(prefix="", keep_vars=True)
        out: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=self.groups.ep,
            dp_cp_group=self.groups.expt_dp,
        )
        return out


class FusedExperts(BatchedExperts):
    """gpt-oss's ``n``: ``gate_up_proj`` [n, h, 2f], gate and up interleaved, ``down_proj`` [n, f, h], biases."""

    def __init__(self, num_local_experts: int, config: DecoderConfig, *, pg_collection: Any, **_: Any) -> None:
        n, h, f = num_local_experts, config.hidden_size, config.shape.expert_width
        sizes = {
            "gate_up_proj": (n, h, 2 * f),
            "gate_up_proj_bias": (n, 2 * f),
            "down_proj": (n, f, h),
            "down_proj_bias": (n, h),
        }
        super().__init__(config, pg_collection, sizes)
        self.limit = config.shape.clamped_swiglu

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens [n, h] sorted by expert -> ([n, h], None), scaled by ``probs`` [n]."""
        compute = partial(self._compute, tokens_per_expert.tolist())
        return (checkpoint(compute, False, x, probs) if self.recompute else compute(x, probs)), None

    def _compute(self, counts: list[int], x: Tensor, probs: Tensor) -> Tensor:
        weights = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        if kernels.takes(x, self.gate_up_proj, self.down_proj):
            return self._compute_grouped(counts, x, probs)
        out = []
        for rows, prob, fc1, bias1, fc2, bias2 in zip(x.split(counts), probs.split(counts), *weights, strict=True):
            active = self._gated(torch.addmm(bias1, rows, fc1))
            out.append((torch.addmm(bias2, active, fc2) * prob[:, None]).to(x.dtype))
        return torch.cat(out)

    def _compute_grouped(self, counts: list[int], x: Tensor, probs: Tensor) -> Tensor:
        """Computes what a loop over experts would, on a GPU in calls for all."""
        groups = kernels.make_expert_groups(counts, x)
        own = kernels.own(groups, x)
        active = self._gated(kernels.multiply(x, self.gate_up_proj, groups) + own @ self.gate_up_proj_bias)
        active, own = ((part * probs[:, None]).to(x.dtype) for part in (active, own))
        out: Tensor = kernels.multiply(active, self.down_proj, groups) + own @ self.down_proj_bias
        return out

    def _gated(self, inside: Tensor) -> Tensor:
        gate, up = inside[:, ::2].clamp(max=self.limit), inside[:, 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(_ALPHA * gate)


class StackedExperts(BatchedExperts):
    """Qwen3.5's ``n``: ``gate_up_proj`` [n, 2f, h], gate over up, and ``down_proj`` [n, h, f]."""

    def __init__(self, num_local_experts: int, config: DecoderConfig, *, pg_collection: Any, **_: Any) -> None:
        n, h, f = num_local_experts, config.hidden_size, config.shape.expert_width
        super().__init__(config, pg_collection, {"gate_up_proj": (n, 2 * f, h), "down_proj": (n, h, f)})

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens [n, h] sorted by expert -> ([n, h], None), scaled by ``probs`` [n]."""
        weights = self.gate_up_proj, self.down_proj
        return expert_mlp(x, probs, tokens_per_expert.tolist(), *weights, recompute=self.recompute), None
