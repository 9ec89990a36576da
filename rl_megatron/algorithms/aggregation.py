"""Aggregates per-token losses [T] to one number: each choice gives the weights [T] of the tokens in the global sum.

The weights already contain the global denominators of the whole (mini)batch, so the shares of micro-batches,
data-parallel and context-parallel ranks add up to the loss for any cut. ``lengths`` [S] count each sequence's tokens;
``max_length`` is the fixed length that one of the choices divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from rl_megatron.types import LossInputs

Aggregation = Callable[[LossInputs, Tensor, int], Tensor]
Denominator = Literal["num_tokens", "num_sequences"]


def token_mean(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Every token of the batch weighs the same."""
    return inputs.mask.to(inputs.logprobs.dtype) / max(inputs.num_tokens, 1)


def seq_mean_token_mean(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Every sequence weighs the same, and its tokens share that weight."""
    return seq_mean_token_sum(inputs, lengths) / lengths.clamp(min=1)[inputs.segment_ids]


def seq_mean_token_sum(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Mean over sequences of the sum over their tokens."""
    return inputs.mask.to(inputs.logprobs.dtype) / inputs.num_sequences


def seq_mean_token_sum_norm(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Mean over sequences of the sum over their tokens, over a fixed length (Dr. GRPO, arXiv:2503.20783)."""
    return seq_mean_token_sum(inputs, lengths) / max_length


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}
DENOMINATORS: Mapping[str, Denominator] = {
    "token_mean": "num_tokens",
    "seq_mean_token_mean": "num_sequences",
    "seq_mean_token_sum": "num_sequences",
    "seq_mean_token_sum_norm": "num_sequences",
}
"""The one count of the whole batch that the weights of each choice are over."""
