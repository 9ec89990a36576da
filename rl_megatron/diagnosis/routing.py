"""How far the learner's routers choose other experts than the engine's, and what of the gap that explains.

Letters: N positions, n of them sampled, L layers with experts, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.algorithms.mismatch import expert_means
from rl_megatron.diagnosis.observation import Observation, shown

_LEAST_TOKENS = 8
_CONSPICUOUS = 4.0  # times the mean gap of the other tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingGap:
    """Gaps of tokens with and without another choice of experts, at them or before them in their sequence."""

    share: float  # of positions at which some router chose otherwise
    without: Tensor  # gaps of tokens before any other choice
    with_: Tensor
    replayed: Tensor  # gaps of all tokens where the learner takes the engine's experts

    @property
    def shown(self) -> str:
        """In words."""
        text = f"{100 * self.share:.2g} % of positions have other experts"
        if len(self.without):
            text += f"; before any such: {shown(self.without)}"
        if len(self.with_):
            text += f"; from one on: {shown(self.with_)}; with the engine's experts: {shown(self.replayed)}"
        return text


def routing_gap(observation: Observation) -> RoutingGap | None:
    """None where the routes of one side are not known."""
    engine, learner, replayed = observation.samples.routes, observation.learner_routes, observation.replayed
    if engine is None or learner is None or replayed is None:
        return None
    other = (engine.sort(-1).values != learner.to(engine.dtype).sort(-1).values).flatten(1).any(1)
    bounds, mask = observation.samples.cu_seqlens, observation.samples.mask
    counted = torch.cat([torch.zeros(1, dtype=torch.int64), other.long().cumsum(0)])
    before = counted[bounds[:-1]].repeat_interleave(bounds.diff())
    touched = (counted[1:] > before)[mask]
    gaps = observation.gaps
    return RoutingGap(
        share=float(other.double().mean()),
        without=gaps[~touched],
        with_=gaps[touched],
        replayed=(observation.engine.double() - replayed.double())[mask],
    )


def suspected_expert(gaps: Tensor, routes: Tensor | None) -> str:
    """The expert whose tokens differ far more than all others', in words; empty where none stands out.

    ``gaps`` [n] of tokens after one-token prompts: in longer ones attention takes a fault to all tokens after it.
    """
    if routes is None:
        return ""
    absolute = gaps.abs()
    means, counts = expert_means(absolute, routes)
    means = means.masked_fill(counts < _LEAST_TOKENS, -1.0)
    layer, expert = divmod(int(means.argmax()), means.shape[1])
    through = (routes[:, layer] == expert).any(1)
    rest = float(absolute[~through].mean()) if bool((~through).any()) else 0.0
    if means[layer, expert] < _CONSPICUOUS * rest:
        return ""
    return (
        f"behind one token, those through expert {expert} of MoE layer {layer} differ by "
        f"{float(means[layer, expert]):.2g} nats on average, all others by {rest:.2g}"
    )
