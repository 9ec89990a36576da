"""Shapes rewards, and computes per-token advantages and returns from them: GAE, discounted returns, whitening.

Float64 inside. Letters: n completions, N positions of S sequences, concatenated; ``cu_seqlens`` [S + 1]. All functions
skip positions outside ``mask`` (prompts, tool outputs), whatever their values, and give them 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.algorithms.segments import (
    ROUNDING,
    dense,
    differ,
    discounted_sum,
    segment_range,
    segment_sum,
    sequence_ids,
    whole_sequences,
)


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: float, factor: float = 1.0) -> Tensor:
    """Penalty [n] float32 in [-factor, 0]: -factor·excess/buffer over the last ``buffer`` tokens before ``max_length``.

    DAPO (arXiv:2503.14476), soft overlong punishment; ``lengths`` [n] are of completions. A ``buffer`` below 1 is a
    share of ``max_length``.
    """
    buffer = buffer if buffer >= 1 else buffer * max_length
    excess = lengths.double() - (max_length - buffer)
    return ((-excess / buffer).clamp(-1, 0) * factor).float()


def drop_truncated(mask: Tensor, truncated: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the mask [N] without the sequences whose ``truncated`` [S] is set (DAPO's overlong filter)."""
    return mask & ~truncated[sequence_ids(cu_seqlens)]


def set_unfinished_rewards(rewards: Tensor, finished: Tensor, *, unfinished_reward: float) -> Tensor:
    """Returns the rewards [n] of completions that ended by themselves; the others get ``unfinished_reward``."""
    return torch.where(finished, rewards, unfinished_reward)


def last_token_rewards(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Rewards [S] at the last masked-in position of each sequence, [N]; a sequence without one loses its reward."""

    def final_rewards(part: _Part) -> Tensor:
        out, some = rewards.new_zeros(part.num_kept), part.lengths > 0
        out[part.ends[some]] = rewards[part.sequences][some]
        return out

    return _compute_in_parts(final_rewards, mask, cu_seqlens, rewards.dtype)


def discounted_returns(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, *, gamma: float) -> Tensor:
    """Reward-to-go [N] float32 of rewards [N]; whitened over the batch, it is REINFORCE++ (arXiv:2501.03262)."""
    discount = torch.tensor([gamma], dtype=torch.float64, device=rewards.device)

    def to_go(part: _Part) -> Tensor:
        return discounted_sum(part.kept(rewards, 0), part.lengths, discount, room=part.room[1])

    return _compute_in_parts(to_go, mask, cu_seqlens)


def less_optimal_baseline(
    returns: Tensor, logit_norms: Tensor, mask: Tensor, cu_seqlens: Tensor, *, group_of: Tensor
) -> Tensor:
    """Returns [N] less the optimal token baseline, [N] float32 (arXiv:2602.07078): A_t = G_t - Σ W_t G_t / Σ W_t.

    The sums are over the sequences of the same ``group_of`` [S] that have a t-th masked-in token. W_t is the sum of
    ``logit_norms`` [N] of a sequence's tokens up to that one. Returns that are all equal, as that of a token alone at
    its place, leave exactly 0.
    """
    ids = sequence_ids(cu_seqlens)[mask]
    lengths = segment_sum(torch.ones_like(ids), ids, len(cu_seqlens) - 1)
    forever = torch.ones(1, dtype=torch.float64, device=mask.device)
    weights = discounted_sum(logit_norms[mask].double().flip(0), lengths.flip(0), forever).flip(0)
    places = torch.arange(len(ids), device=mask.device) - (lengths.cumsum(0) - lengths)[ids]
    alike = dense(dense(group_of)[ids] * (int(lengths.max()) + 1) + places)
    kept = returns[mask].double()
    above = torch.where(differ(kept, alike)[alike], kept - segment_range(kept, alike)[0][alike], 0.0)
    least = torch.finfo(torch.float64).tiny  # the gradient is 0 where all weights are
    baseline = segment_sum(weights * above, alike) / segment_sum(weights, alike).clamp(min=least)
    return _scatter(above - baseline[alike], mask)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    next_values: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: Tensor | float,
) -> Tensor:
    """Returns generalized advantages [N] float32 (arXiv:1506.02438); add ``values`` for the critic's targets.

    ``next_values`` [S] is the value after a sequence's last position, used if ``truncated`` [S] bool; a sequence that
    ended by itself has 0 there. ``lam`` is one number, or [S] (VAPO's length-adaptive one).
    """
    after_last = torch.where(truncated, next_values.double(), 0.0)
    discount = gamma * torch.as_tensor(lam, dtype=torch.float64, device=values.device).reshape(-1)

    def advantages(part: _Part) -> Tensor:
        now, some = part.kept(values, 0), part.lengths > 0
        deltas, ends = part.kept(rewards, 1).sub_(now), part.ends[some]
        at_ends = deltas[ends] + gamma * after_last[part.sequences][some]
        deltas[:-1].add_(now[1:], alpha=gamma)
        deltas[ends] = at_ends  # the next position is another sequence's
        decay = discount if len(discount) == 1 else discount[part.sequences]
        return discounted_sum(deltas, part.lengths, decay, room=part.room[2])

    return _compute_in_parts(advantages, mask, cu_seqlens)


def length_adaptive_lambda(mask: Tensor, cu_seqlens: Tensor, *, alpha: float = 0.05) -> Tensor:
    """λ = 1 - 1/(alpha·length) of each sequence's policy, [S], at least 0 (VAPO, arXiv:2504.05118)."""
    lengths = segment_sum(mask.double(), sequence_ids(cu_seqlens), len(cu_seqlens) - 1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Returns values [N] of the whole global batch less their mean, over the std + 1e-8 of what is left, float32; 0
    outside ``mask``.

    Both are over the masked-in positions, the std over n - 1. Values that are all equal up to `ROUNDING` leave exactly
    0. So does a 0 among values with a mean of 0 up to `ROUNDING` of the largest, as after a group's mean.
    """
    kept = values[mask].double()
    if len(kept) > 1 and bool(differ(kept, kept.new_zeros(len(kept), dtype=torch.int64))):
        mean = kept.mean()
        kept = kept - mean * (mean.abs() > ROUNDING * kept.abs().max())
        kept = kept / ((kept.square().sum() / (len(kept) - 1)).sqrt() + 1e-8)
    else:
        kept = torch.zeros_like(kept)
    return _scatter(kept, mask)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the sequences: all their positions if masked-out ones come first in each, else the masked-in ones."""

    sequences: slice
    positions: slice
    inside: Tensor | None  # bool, the positions that are masked in; None where all are
    places: Tensor | None  # theirs, where a gap must be closed; None where positions are taken as they are
    lengths: Tensor  # positions of each sequence, gaps closed
    room: Tensor  # [3, at least as many positions] float64, for columns and results

    @property
    def num_kept(self) -> int:
        return self.positions.stop - self.positions.start if self.places is None else len(self.places)

    @property
    def ends(self) -> Tensor:
        """The last position of each sequence that has one."""
        return self.lengths.cumsum(0) - 1

    def kept(self, column: Tensor, row: int) -> Tensor:
        """Returns this part of ``column`` [N], as float64 in that row of ``room``; 0 where it is masked out."""
        here = column[self.positions]
        if self.places is not None:
            here = here.index_select(0, self.places)
        out = self.room[row, : len(here)].copy_(here)
        if self.inside is not None and self.places is None:
            out.masked_fill_(~self.inside, 0.0)  # a product with garbage would spread it
        return out


def _compute_in_parts(
    compute: Callable[[_Part], Tensor], mask: Tensor, cu_seqlens: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[N]: what ``compute`` makes of the masked-in positions of each part, 0 at the others."""
    out = torch.empty(len(mask), dtype=dtype, device=mask.device)
    cuts = list(whole_sequences(cu_seqlens))
    largest = max((positions.stop - positions.start for _, positions in cuts), default=0)
    room = torch.empty(3, largest, dtype=torch.float64, device=mask.device)
    for sequences, positions in cuts:
        inside, here = mask[positions], out[positions]
        bounds = cu_seqlens[sequences.start : sequences.stop + 1] - positions.start
        if bool(inside.all()):
            here.copy_(compute(_Part(sequences, positions, None, None, bounds.diff(), room)))
        elif not has_gaps(inside, bounds):
            here.copy_(compute(_Part(sequences, positions, inside, None, bounds.diff(), room)))
            here.masked_fill_(~inside, 0.0)
        else:
            places = inside.nonzero().flatten()
            lengths = torch.searchsorted(places, bounds).diff()
            part = _Part(sequences, positions, inside, places, lengths, room)
            here.zero_().scatter_(0, places, compute(part).to(dtype))
    return out


def has_gaps(inside: Tensor, bounds: Tensor) -> bool:
    """True if a masked-out position follows a masked-in one of its sequence: sums from the right would cross it.

    ``inside`` [N] bool; ``bounds`` [S + 1] are where sequences begin and end, 0 and N among them.
    """
    falls = inside.new_zeros(len(inside) + 1)  # entry t is between positions t - 1 and t
    falls[1:-1] = inside[:-1] & ~inside[1:]
    falls[bounds] = False
    return bool(falls.any())


def _scatter(kept: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    out[mask] = kept.float()
    return out
