"""Repairs speculative sampling in vLLM 0.32.0 on CPUs; runs inside its workers.

Its stand-in for a Triton kernel fills a copy of the result that the caller made (utils/cpu_triton_utils.py,
``_expand_kernel_impl``), so the temperature of each proposed token is whatever was in memory: tokens were drawn from
logits divided by that, and log-probs were -9999 or of another distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


def repair() -> None:
    """Have the sampler read each request's own temperature, top_p and top_k. Once a process."""
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expanded


def expanded(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """``x`` [requests], each as often as its request has proposed tokens [num_tokens], ``replace_from`` replaced.

    ``cu_num_tokens`` [requests] are running sums of these.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
