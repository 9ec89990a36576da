"""Balances the load of experts: auxiliary losses, the z-loss, and the update of selection biases.

Letters: t tokens that a rank routes, E experts, k of them a token, N the batch's trained tokens (``num_tokens``).

Only trained (masked-in) tokens count, so padding and prompts do not. Every loss of a layer is a sum of shares over
tokens, each over N. The layers' losses add up.

- balance: ``E / N * sum over tokens and experts of f * p``. ``p`` is the router's probability of an expert (for sigmoid
  scores, its share of a token's scores), and ``f`` the share of choices that fell on it. ``aux_loss`` takes ``f`` over
  the micro-batch (over TP and CP), ``seq_aux_loss`` over the token's sequence. ``global_aux_loss`` takes it over all
  ranks' micro-batches since the last optimizer step, this one included. The loss is 1 for an even load.
- ``z_loss``: ``1 / N * sum over tokens of logsumexp(logits)^2``.

So the weight of a micro-batch or a sequence is its number of tokens. ``seq_aux_loss`` and ``z_loss`` do not depend on
the layout and the split of the batch; the others depend on the split through ``f``. Choices are the best k
probabilities, without selection biases, groups and replay, as in DeepSeek-V3 (arXiv:2412.19437); ``f`` has no gradient.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    get_updated_expert_bias,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from typing_extensions import override

from rl_megatron.errors import RLMegatronError
from rl_megatron.feature import Built, LearnerHooks
from rl_megatron.features.router_balance.feature import BalanceKeys, router_section
from rl_megatron.learner.packed import PackedMicroBatch, local_tokens
from rl_megatron.types import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The tokens of a micro-batch that this rank routes."""

    trained: Tensor  # [t] bool
    segment_ids: Tensor  # [t]
    num_segments: int
    num_tokens: int  # N


class _Balanced:
    """One router: in passes with gradients it adds its losses, and counts the choices of trained tokens."""

    def __init__(self, router: TopKRouter, section: BalanceKeys) -> None:
        self.router, self.coefficients = router, section.losses
        self.now: _Tokens | None = None  # set during a forward pass of a step
        self.later: deque[_Tokens] = deque()  # tokens of passes without gradient, which the backward pass repeats
        experts, device = router.config.num_moe_experts, router.weight.device
        self.chosen = torch.zeros(experts, device=device)  # choices of this rank's tokens since the last step
        self.everywhere = torch.zeros(experts, device=device)  # choices of all ranks; for global_aux_loss
        self.values = torch.zeros(len(self.coefficients), device=device)  # this rank's shares, without coefficients
        self._route: Callable[..., tuple[Tensor, Tensor]] = router.routing
        router.routing = self._routing

    def _routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Stands in for ``router.routing``: [s, b, E] -> probabilities and choices, both [t, E]."""
        tokens = self._tokens()
        if tokens is None:
            return self._route(logits, padding_mask)
        if self.coefficients:
            logits = MoEAuxLossAutoScaler.apply(logits, self._loss(logits.flatten(0, -2), tokens))
        probs, chosen = self._route(logits, padding_mask)
        self.chosen += (chosen.detach() & tokens.trained[:, None]).sum(0)
        return probs, chosen

    def _tokens(self) -> _Tokens | None:
        """Returns the tokens routed now, if gradients are computed. Recomputed passes have the first passes' order."""
        if torch.is_grad_enabled():
            return self.now if self.now is not None or not self.later else self.later.popleft()
        if self.now is not None:
            self.later.append(self.now)
        return None

    def _loss(self, logits: Tensor, tokens: _Tokens) -> Tensor:
        """Returns this rank's share of the layer's losses, times their coefficients."""
        chosen, p = compute_routing_scores_for_aux_loss(
            logits, self.router.topk, self.router.score_function, padding_mask=~tokens.trained
        )
        count = max(tokens.num_tokens, 1)
        parts = []
        for kind in self.coefficients:
            if kind == "z_loss":
                parts.append((logits.logsumexp(-1).square() * tokens.trained).sum() / count)
            else:
                share = self._share(kind, chosen.to(p.dtype), tokens)
                parts.append((share * p).sum() * (p.shape[1] / count))
        losses = torch.stack(parts)
        self.values += losses.detach()
        return losses @ losses.new_tensor(list(self.coefficients.values()))

    def _share(self, kind: str, chosen: Tensor, tokens: _Tokens) -> Tensor:
        """Returns each expert's share of choices, [E], or of those in each token's sequence, [t, E]."""
        if kind == "seq_aux_loss":
            zeros = chosen.new_zeros(tokens.num_segments, chosen.shape[1])
            counts = _summed(zeros.index_add_(0, tokens.segment_ids, chosen), self.router.tp_cp_group)
            return _normalized(counts)[tokens.segment_ids]
        if kind == "aux_loss":
            return _normalized(_summed(chosen.sum(0), self.router.tp_cp_group))
        self.everywhere += _summed(chosen.sum(0), self.router.tp_dp_cp_group)
        return _normalized(self.everywhere)


class Balance(LearnerHooks):
    """The balance of this rank's routers."""

    def __init__(self, built: Built) -> None:
        section = router_section(built.learner)
        self._device = built.device
        self._kinds, self._rate = tuple(section.losses), section.bias_update_rate
        self._layers = len(built.shape.moe_layers)
        self._routers: dict[Any, list[_Balanced]] = {}
        for chunk, model in zip(built.chunks, built.models, strict=True):
            own = [layer.mlp.router for layer in model.decoder.layers if layer.is_moe_layer]
            self._routers[chunk] = [_Balanced(router, section) for router in own]

    @property
    def _all(self) -> list[_Balanced]:
        return [router for routers in self._routers.values() for router in routers]

    @override
    @contextlib.contextmanager
    def around_forward(self, chunk: Any, micro_batch: PackedMicroBatch, num_tokens: int) -> Iterator[None]:
        """Adds the losses of ``chunk`` to the losses of the forward pass within."""
        own, device = local_tokens(len(micro_batch.segment_ids)), micro_batch.segment_ids.device
        tokens = _Tokens(
            trained=micro_batch.columns["mask"][own].to(device),
            segment_ids=micro_batch.segment_ids[own],
            num_segments=micro_batch.num_segments,
            num_tokens=num_tokens,
        )
        for router in self._routers[chunk]:
            router.now = tokens
        try:
            yield
        finally:
            for router in self._routers[chunk]:
                router.now = None

    @override
    @contextlib.contextmanager
    def around_pass(self) -> Iterator[None]:
        """Raises RLMegatronError if routers that the backward passes should have recomputed were not."""
        yield
        if left := sum(len(router.later) for router in self._all):
            raise RLMegatronError(f"{left} routers should have been recomputed with their balance losses, but were not")

    @override
    def clear(self) -> None:
        for router in self._all:
            for counted in (router.chosen, router.everywhere, router.values):
                counted.zero_()

    @override
    def read(self) -> Mapping[str, Metric[float]]:
        """Returns ``moe/<loss>``, without its coefficient, for each loss that has one: the mean over layers."""
        if not self._kinds:
            return {}
        none = torch.zeros(len(self._kinds), device=self._device)  # a stage may have no experts
        total = torch.stack([none, *(router.values for router in self._all)]).sum(0)
        dist.all_reduce(total)
        values = (total / self._layers).tolist()
        return {f"moe/{kind}": Metric(value=value) for kind, value in zip(self._kinds, values, strict=True)}

    @override
    def step(self, learning_rate: float) -> Mapping[str, Metric[float]]:
        """Lowers the biases of experts with more choices than the mean, and raises the others' biases, by the rate."""
        routers = self._all
        if not (self._rate and routers):
            return {}
        biases = torch.stack([router.router.expert_bias for router in routers])
        moved = get_updated_expert_bias(torch.stack([router.chosen for router in routers]), biases, self._rate)
        for router, bias in zip(routers, moved, strict=True):
            router.router.expert_bias.copy_(bias)
        return {}


def _summed(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    return counts


def _normalized(counts: Tensor) -> Tensor:
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)
