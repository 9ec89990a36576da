"""Aggregates per-token losses [T] to one number: each choice gives the weights [T] of the tokens in the global sum.

The weights already contain the global denominators of the whole (mini)batch, so the shares of micro-batches,
data-parallel and context-parallel ranks add up to the loss for any cut. ``lengths`` [S] count each sequence's tokens;
``max_length`` is the fixed length that one of the choices divides by. What is averaged over is a trajectory, or a
prompt: where that is several sequences, the controller computes the weights (``token_weight``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_megatron.algorithms.ratios import required
from rl_megatron.algorithms.segments import dense, segment_sum, sequence_ids
from rl_megatron.types import LossInputs, Samples

Aggregation = Callable[[LossInputs, Tensor, int], Tensor]


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


def prompt_mean(inputs: LossInputs, lengths: Tensor, max_length: int = 0) -> Tensor:
    """Every prompt weighs the same, and the tokens of all its trajectories share that weight (arXiv:2510.13786)."""
    return required(inputs.token_weight, "token_weight")


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "prompt_mean": prompt_mean,
}


def loss_weights(name: str, inputs: LossInputs, lengths: Tensor, max_length: int) -> Tensor:
    """Weights [T] of the tokens in the global sum, of inputs already ``masked``: the controller's, if it gave some."""
    return AGGREGATIONS[name](inputs, lengths, max_length) if inputs.token_weight is None else inputs.token_weight


def units_of(samples: Samples, name: str) -> Tensor | None:
    """What the choice averages over, of each sequence, [S]; None where sequences or tokens are that already."""
    return {"token_mean": None, "prompt_mean": samples.group_of}.get(name, samples.trajectory_of)


def token_weight(samples: Samples, name: str, *, max_length: int, part: Tensor | None = None) -> Tensor | None:
    """The column ``token_weight`` [N] of a batch of the sequences ``part``, all by default; 0 at those of others.

    None where the learner's own counts give the weights.
    """
    units = units_of(samples, name)
    if units is None:
        return None
    part = torch.arange(len(units)) if part is None else part
    ids = dense(units[part])
    of_positions = sequence_ids(samples.cu_seqlens)
    tokens = segment_sum(samples.mask.double(), of_positions, samples.num_sequences)[part]
    each = {
        "seq_mean_token_sum": torch.ones_like(tokens),
        "seq_mean_token_sum_norm": torch.full_like(tokens, 1 / max_length),
    }.get(name, 1 / segment_sum(tokens, ids).clamp(min=1)[ids])
    of_sequences = torch.zeros(samples.num_sequences, dtype=torch.float64)
    of_sequences[part] = each / (int(ids.max()) + 1)
    return of_sequences.float()[of_positions] * samples.mask
