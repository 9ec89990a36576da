"""Repeatable Gaussian noise for an engine's routers, so that its routes differ from the learner's by a known level.

The number for a token's router logit is a function of its stream, its position, the layer and the expert alone, never
of the rows beside it. Letters: N tokens, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.engines.local.sampling import stream_keys, uniforms

_STREAM = 0x6E6F697365  # "noise": apart from the stream that chooses the tokens
_STEP = 2.0**-24  # between two numbers of `uniforms`, which begin at 0
_PROMPT = -1  # completions of a request share its prompt's keys and values, and so this stream


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterNoise:
    """Noise for the router logits of N tokens; called with a layer's number: [N, E] float32, in logits."""

    keys: Tensor  # [N] int64, the tokens' streams
    positions: Tensor  # [N] int64, in their own sequences
    deviations: Tensor  # [N] float32, standard deviations; 0 is none
    num_layers: int
    num_experts: int

    def __call__(self, layer: int) -> Tensor:
        """Independent normal numbers for each token and expert of the layer, times the token's deviation."""
        first = (self.positions * self.num_layers + layer) * self.num_experts
        counters = first[:, None] + torch.arange(self.num_experts, device=first.device)
        return normal_of(uniforms(self.keys[:, None], counters)).mul_(self.deviations[:, None])


def normal_of(uniform: Tensor) -> Tensor:
    """Normal numbers of float32 multiples of 2**-24 in [0, 1), in their place; all finite, and of 0 and the largest of
    one size."""
    return uniform.mul_(2).add_(_STEP - 1).erfinv_().mul_(math.sqrt(2))  # the sum is exact, and never -1 or 1


def completion_streams(seeds: Tensor, completions: Tensor) -> Tensor:
    """The stream of each completion's last prompt token and of those that it samples: [n] int64 of [n] and [n]."""
    return stream_keys(stream_keys(seeds, completions), torch.full_like(seeds, _STREAM))


def prompt_streams(seeds: Tensor) -> Tensor:
    """The stream of the other tokens of each request's prompt: [n] int64 of [n]."""
    return completion_streams(seeds, torch.full_like(seeds, _PROMPT))
