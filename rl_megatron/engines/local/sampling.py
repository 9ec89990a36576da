"""Chooses the next token of many sequences at once: temperature, top-p and repeatable random numbers.

Letters: n rows (one sequence each), V vocabulary. Log-probs are nats, float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # splitmix64's constants as signed int64
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of each row. ``greedy`` rows have temperature 1 here: their log-probs are the model's own.

    ``any_greedy`` and ``any_limit`` say whether any row needs that work, so that a step need not read the tensors.
    """

    inverse_temperature: Tensor  # [n, 1] float32
    top_p: Tensor  # [n, 1] float32
    top_k: Tensor  # [n, 1] float32; infinity: no limit
    min_p: Tensor  # [n, 1] float32
    greedy: Tensor  # [n, 1] bool
    any_greedy: bool
    any_limit: bool  # any of top_p, top_k and min_p


def stream_keys(seeds: Tensor, completions: Tensor) -> Tensor:
    """One random stream per (request seed, completion number), both [n] int64 -> [n] int64."""
    return _mix(_mix(seeds * _GOLDEN) + completions * _GOLDEN)


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Number ``counters`` [n] of each stream: float32 in [0, 1) with 24 random bits.

    splitmix64 of Steele, Lea and Flood (2014).
    """
    # In a counter-based stream a token's number depends on its place alone, not on the rest of the batch.
    bits = _mix(keys + (counters + 1) * _GOLDEN) >> 40
    return (bits & 0xFFFFFF).float().mul_(2.0**-24)


def choose_tokens(logits: Tensor, uniform: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Tokens [n] int64 and their log-probs [n] under the distribution that they are drawn from.

    ``logits`` [n, V] float32 are overwritten. Inverse-CDF sampling with ``uniform`` [n] in [0, 1). Greedy rows take
    the most likely token; its log-prob is the model's, at temperature 1.
    """
    probabilities = logits.mul_(rows.inverse_temperature).softmax(-1)
    cumulative = probabilities.cumsum(-1)
    tokens = _invert(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:])
    chosen = probabilities.gather(1, tokens)
    if rows.any_limit:
        cut = (rows.top_k < torch.inf) | (rows.min_p > 0)
        limited = (rows.top_p < 1) | cut
        likely, mass_share = _draw_likely(probabilities, uniform.unsqueeze(1), rows, cut)
        tokens, chosen = torch.where(limited, likely, tokens), torch.where(limited, mass_share, chosen)
    if rows.any_greedy:
        best = logits.argmax(-1, keepdim=True)
        tokens = torch.where(rows.greedy, best, tokens)
        chosen = torch.where(rows.greedy, probabilities.gather(1, best), chosen)
    return tokens.squeeze(1), chosen.squeeze(1).log_()


def _draw_likely(probabilities: Tensor, uniform: Tensor, rows: RowSampling, cut: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the fewest most likely tokens whose mass reaches top_p, renormalised (Holtzman et al., 2020).

    In rows that are ``cut`` [n, 1], of what min_p (arXiv:2407.01082) and top_k leave, renormalised: vLLM's order.
    """
    ordered, token_of_rank = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    left = ordered.where((ordered >= rows.min_p * ordered[:, :1]) & (ranks < rows.top_k), 0.0)
    ordered = torch.where(cut, left / left.sum(-1, keepdim=True), ordered)
    cumulative = ordered.cumsum(-1)
    last = (cumulative < rows.top_p).sum(-1, keepdim=True).clamp_(max=probabilities.shape[1] - 1)
    mass = cumulative.gather(1, last)
    rank = _invert(cumulative, uniform * mass)
    return token_of_rank.gather(1, rank), ordered.gather(1, rank) / mass


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first column whose cumulative mass exceeds ``target``: never one of zero probability; the last for NaN."""
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)


def _mix(z: Tensor) -> Tensor:
    # >> is arithmetic on int64: the masks make it logical.
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


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
