"""gpt-oss's experts: fused tensors laid out as in its checkpoints, biases, a clamped gate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from rl_megatron.learner.model.decoder_config import DecoderConfig, device_of

_ALPHA = 1.702  # gate * sigmoid(alpha * gate)


class FusedExperts(MegatronModule):
    """This rank's ``n`` experts: ``gate_up_proj`` [n, h, 2f], gate and up interleaved, ``down_proj`` [n, f, h], biases.

    Replaces megatron's grouped MLP. It does not support expert tensor parallelism.
    """

    def __init__(self, num_local_experts: int, config: DecoderConfig, *, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        self.groups, self.limit = pg_collection, config.shape.clamped_swiglu
        self.recompute = config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        n, h, f = num_local_experts, config.hidden_size, config.shape.expert_width
        sizes = {
            "gate_up_proj": (n, h, 2 * f),
            "gate_up_proj_bias": (n, 2 * f),
            "down_proj": (n, f, h),
            "down_proj_bias": (n, h),
        }
        for name, size in sizes.items():
            parameter = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device_of(config)))
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)  # else norms count rank 0's alone
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens [n, h] sorted by expert -> ([n, h], None), scaled by ``probs`` [n]."""
        compute = partial(self._compute, tokens_per_expert.tolist())
        return (checkpoint(compute, False, x, probs) if self.recompute else compute(x, probs)), None

    def _compute(self, counts: list[int], x: Tensor, probs: Tensor) -> Tensor:
        weights = (self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias)
        out = []
        for rows, prob, fc1, bias1, fc2, bias2 in zip(x.split(counts), probs.split(counts), *weights, strict=True):
            inside = torch.addmm(bias1, rows, fc1)
            gate, up = inside[:, ::2].clamp(max=self.limit), inside[:, 1::2].clamp(-self.limit, self.limit)
            active = (up + 1) * gate * torch.sigmoid(_ALPHA * gate)
            out.append((torch.addmm(bias2, active, fc2) * prob[:, None]).to(x.dtype))
        return torch.cat(out)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Global tensors over all experts, sharded over EP along the experts."""
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
