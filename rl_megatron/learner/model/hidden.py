"""A policy that stops before its output layer, whose weight the head multiplies (`learner.heads.Float32Head`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


def stop_before_output_layer(chunks: Sequence[GPTModel]) -> None:
    """Make the chunk with an output layer return hidden states [1, t, h], of all tokens on every TP rank.

    The layer keeps its weight under its name. The gradients of the hidden states are summed over TP.
    """
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer.forward = partial(_hidden_states, chunk.output_layer.sequence_parallel)


def _hidden_states(gather: bool, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
    """In place of the layer's forward: [s, b, h] ([s / tp, b, h] to ``gather``) -> ([s, b, h], None)."""
    return gather_from_sequence_parallel_region(hidden) if gather else hidden, None
