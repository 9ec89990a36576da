"""Routing replay: makes this rank's routers take given experts, or records the experts they chose.

megatron-core's RouterReplay does so in one router. This module hands each router its routes: it knows which layers a
rank has (PP, VPP), which tokens of a micro-batch a TP rank routes (sequence parallelism), and when (in each
micro-batch, and again when its layers are recomputed). Expert weights are the router's own scores of the replayed
experts, so the router still learns.

R2 replays the routes of the learner's own pass over the old policy, R3 those of the rollout engine (Zheng et al.,
"Stabilizing Reinforcement Learning with LLMs", arXiv:2512.01374; Ma et al., "Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers", arXiv:2510.11370).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from rl_megatron.data.samples import dense_column
from rl_megatron.errors import RLMegatronError
from rl_megatron.learner.packed import PackedMicroBatch, own_tokens
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Metric, Samples

ROUTES = "routes"
"""The column of routes."""


class _Replay(RouterReplay):
    """Replays one router, and counts the tokens that the router would have sent to other experts."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.learns = False  # whether the forward pass has a backward pass
        self.real = torch.zeros(
            0, dtype=torch.bool, device=device
        )  # [t] which tokens are neither padding nor of a copy
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # tokens replayed; those with other experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """RouterReplay's, and counts replayed tokens and those that the router would have sent to other experts."""
        probs, chosen = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        forward = self.router_replay_action is RouterReplayAction.REPLAY_FORWARD
        if forward and (torch.is_grad_enabled() or not self.learns):  # else a backward pass replays it, from the queue
            self.replay_backward_list.pop()
        if forward and default_compute_topk is not None:
            _, own = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            other = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
            self.counts += torch.stack([self.real.sum(), (other & self.real).sum()])
        return probs, chosen


class Routing:
    """Replays or records in the routers of one rank. ``chunks`` wrap ``models``; the pipeline schedule calls them."""

    def __init__(
        self,
        chunks: Sequence[Any],
        models: Sequence[GPTModel],
        shape: ModelShape,
        device: torch.device,
    ) -> None:
        column = {layer: number for number, layer in enumerate(shape.moe_layers)}
        self._routers: dict[Any, list[tuple[int, _Replay]]] = {chunk: [] for chunk in chunks}
        for chunk, model in zip(chunks, models, strict=True):
            for layer in model.decoder.layers:
                if layer.is_moe_layer:
                    layer.mlp.router.router_replay = replay = _Replay(device)
                    self._routers[chunk].append((column[layer.layer_number - 1], replay))
        self._num_experts, self._device = shape.num_experts, device
        self._dtype = getattr(torch, shape.route_dtype)
        self._size = (len(column), shape.experts_per_token)
        self.layers = tuple(number for routers in self._routers.values() for number, _ in routers)
        """This rank's MoE layers, as indices into all MoE layers; routes to replay have these layers, in this order."""

    def check(self, samples: Samples) -> None:
        """Raises RLMegatronError if this rank cannot replay the routes [N, layers, top_k] of the samples."""
        routes = dense_column(samples.extra, ROUTES)
        assert routes is not None
        if tuple(routes.shape[1:]) != (len(self.layers), self._size[1]):
            raise RLMegatronError(
                f"routes to replay have {routes.shape[1]} MoE layers and {routes.shape[2]} experts a token, but this "
                f"rank has {len(self.layers)} and {self._size[1]}; check that the engine serves the same model"
            )
        if not routes.numel():
            return
        experts = routes.sort(-1).values
        if bool((experts[..., 1:] == experts[..., :-1]).any()) or int(experts.max()) >= self._num_experts:
            raise RLMegatronError(
                f"routes to replay name an expert twice for one token, or an expert outside of 0 to "
                f"{self._num_experts - 1}: the engine did not route by what it returned; set routing_replay "
                "to r2 or off"
            )

    @contextlib.contextmanager
    def replaying(self, chunk: Any, micro_batch: PackedMicroBatch) -> Iterator[None]:
        """Makes the routers of ``chunk`` replay the micro-batch's routes in the forward pass within."""
        routes = dense_column(micro_batch.extra, ROUTES)
        assert routes is not None
        own = own_tokens(len(routes))
        mine, real = routes[own].to(torch.int64), micro_batch.attention.real[own]
        for number, router in self._routers[chunk]:
            router.learns, router.real = torch.is_grad_enabled(), real
            router.set_target_indices(mine[:, self.layers.index(number)])
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for _, router in self._routers[chunk]:  # until the chunk's next forward pass its layers are only recomputed
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    @contextlib.contextmanager
    def recording(self, chunk: Any, micro_batch: PackedMicroBatch) -> Iterator[None]:
        """Records the experts that the routers of ``chunk`` choose within into the micro-batch (`to_record`)."""
        routes = dense_column(micro_batch.extra, ROUTES)
        assert routes is not None
        for _, router in self._routers[chunk]:
            router.set_router_replay_action(RouterReplayAction.RECORD)
        yield
        own = routes[own_tokens(len(routes))]
        for column, router in self._routers[chunk]:
            own[:, column] = router.get_recorded_indices().to(routes.dtype)

    def finish(self) -> None:
        """End replay and recording. Raises RLMegatronError if routes queued for a recompute were not used."""
        left = 0
        for routers in self._routers.values():
            for _, router in routers:
                left += len(router.replay_backward_list)
                router.clear_indices()
                router.clear_router_replay_action()
        if left:
            raise RLMegatronError(f"{left} layers should have been recomputed with replayed routes, but were not")

    def read(self) -> dict[str, Metric[float]]:
        """``moe/rerouted_fraction``: share of (token, layer) whose router would choose other experts; resets it.

        Empty if nothing was replayed since the last read. Every rank calls it; each counts its own tokens and layers.
        """
        counts = self._counts()
        total = torch.stack([torch.zeros(2, dtype=torch.int64, device=self._device), *counts]).sum(0)
        for count in counts:
            count.zero_()
        dist.all_reduce(total)
        replayed, other = total.tolist()
        return {"moe/rerouted_fraction": Metric(value=other / replayed)} if replayed else {}

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Does not count the tokens of the passes within."""
        kept = [count.clone() for count in self._counts()]
        try:
            yield
        finally:
            for count, before in zip(self._counts(), kept, strict=True):
                count.copy_(before)

    def _counts(self) -> list[Tensor]:
        return [router.counts for routers in self._routers.values() for _, router in routers]

    def to_record(self, packed: PackedMicroBatch) -> PackedMicroBatch:
        """``packed`` with zeroed routes [t, MoE layers, top_k], for `recording`."""
        blank = torch.zeros((len(packed.source), *self._size), dtype=self._dtype, device=self._device)
        return replace(packed, extra={**packed.extra, ROUTES: blank})


def gather_recorded(packed: Sequence[PackedMicroBatch], counts: Sequence[int]) -> list[Tensor]:
    """Recorded routes at the samples' positions: [N, MoE layers, top_k] a micro-batch, on the CPU, N from ``counts``.

    Every rank calls it and gets all routes of its DP rank. A rank recorded its own tokens and layers; the rest is 0.
    """
    parts = []
    for micro_batch, count in zip(packed, counts, strict=False):  # a padded pipeline has copies at the end
        routes = dense_column(micro_batch.extra, ROUTES)
        assert routes is not None
        source = micro_batch.source.to(routes.device)
        real = source >= 0
        out = routes.new_zeros((count, *routes.shape[1:]))
        out[source[real]] = routes[real]
        parts.append(out)
    everything = torch.cat(parts)
    whole = everything.view(torch.uint8)  # neither gloo nor NCCL adds int16; where one rank wrote, others add 0
    for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
    return list(everything.cpu().split(list(counts)))
