"""Routing replay: makes this rank's routers take given experts, or records the experts they chose.

megatron-core's RouterReplay does so in one router. This module gives each router its routes. It knows which layers a
rank has (PP, VPP), and which tokens of a micro-batch a TP rank routes (sequence parallelism). It acts in each
micro-batch, and again when its layers are recomputed. Expert weights are the router's own scores of the replayed
experts, so the router still learns.

R2 replays the routes of the learner's own pass over the old policy, R3 the rollout engine's routes (Zheng et al.,
"Stabilizing Reinforcement Learning with LLMs", arXiv:2512.01374; Ma et al., "Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers", arXiv:2510.11370).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor
from typing_extensions import override

from rl_megatron.data.samples import dense_column
from rl_megatron.errors import RLMegatronError
from rl_megatron.feature import Built, LearnerHooks
from rl_megatron.learner.packed import PackedMicroBatch, local_tokens
from rl_megatron.types import Metric, Samples, Want

_ROUTES = "routes"


class _Replay(RouterReplay):
    """Replays one router, and counts the tokens that the router would have sent to other experts."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.learns = False  # True if the forward pass has a backward pass
        self.real: Tensor  # [t] bool, True for tokens that are neither padding nor of a copy
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # tokens replayed; those with other experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Replays like RouterReplay. In passes with a backward pass it counts tokens, and tokens that the router would
        have sent to other experts."""
        probs, chosen = super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        forward = self.router_replay_action is RouterReplayAction.REPLAY_FORWARD
        if forward and (torch.is_grad_enabled() or not self.learns):  # otherwise a backward pass replays it, queued
            self.replay_backward_list.pop()
        if forward and self.learns and default_compute_topk is not None:
            _, own = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            other = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
            self.counts += torch.stack([self.real.sum(), (other & self.real).sum()])
        return probs, chosen


class Routing(LearnerHooks):
    """Replays or records in the routers of one rank."""

    says: frozenset[Want] = frozenset({"routes"})

    def __init__(self, built: Built) -> None:
        shape, self._device = built.shape, built.device
        column = {layer: number for number, layer in enumerate(shape.moe_layers)}
        self._routers: dict[Any, list[tuple[int, _Replay]]] = {chunk: [] for chunk in built.chunks}
        for chunk, model in zip(built.chunks, built.models, strict=True):
            for layer in model.decoder.layers:
                if layer.is_moe_layer:
                    layer.mlp.router.router_replay = replay = _Replay(self._device)
                    self._routers[chunk].append((column[layer.layer_number - 1], replay))
        self._num_experts, self._replayed = shape.num_experts, False
        self._recorded = dict[Tensor, Tensor]()  # [t, MoE layers, top_k] of a packed micro-batch, by its source
        self._dtype = getattr(torch, shape.route_dtype)
        self._size = (len(column), shape.experts_per_token)
        here = [pair for routers in self._routers.values() for pair in routers]
        self._layers = [number for number, _ in here]  # indices into all MoE layers; routes have these, in this order
        self._every = [router for _, router in here]

    @override
    def pack(self, packed: PackedMicroBatch, samples: Samples) -> PackedMicroBatch:
        """Raises RLMegatronError for routes [N, layers, top_k] that this rank's routers cannot replay."""
        if (routes := dense_column(samples.extra, _ROUTES)) is None:
            return packed
        if tuple(routes.shape[1:]) != (len(self._layers), self._size[1]):
            raise RLMegatronError(
                f"routes to replay have {routes.shape[1]} MoE layers and {routes.shape[2]} experts a token, but this "
                f"rank has {len(self._layers)} and {self._size[1]}; check that the engine serves the same model"
            )
        if not routes.numel():
            return packed
        experts = routes.sort(-1).values
        if bool((experts[..., 1:] == experts[..., :-1]).any()) or int(experts.max()) >= self._num_experts:
            raise RLMegatronError(
                f"routes to replay name an expert twice for one token, or an expert outside of 0 to "
                f"{self._num_experts - 1}: the engine did not route by what it returned; set routing_replay "
                "to r2 or off"
            )
        return packed

    @override
    @contextlib.contextmanager
    def around_forward(self, chunk: Any, micro_batch: PackedMicroBatch, num_tokens: int = 0) -> Iterator[None]:
        """Makes the routers of ``chunk`` replay the micro-batch's routes, if any, in the forward pass within."""
        routes = dense_column(micro_batch.extra, _ROUTES)
        if routes is None:
            yield
            return
        self._replayed = True
        own = local_tokens(len(routes))
        mine, real = routes[own].to(torch.int64), micro_batch.attention.is_real[own]
        for number, router in self._routers[chunk]:
            router.learns, router.real = torch.is_grad_enabled(), real
            router.set_target_indices(mine[:, self._layers.index(number)])
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for _, router in self._routers[chunk]:  # layers are only recomputed until the chunk's next forward pass
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    @override
    def around_scored(
        self, chunk: Any, micro_batch: PackedMicroBatch, want: frozenset[Want]
    ) -> contextlib.AbstractContextManager[None]:
        return (self._recording if "routes" in want else self.around_forward)(chunk, micro_batch)

    @contextlib.contextmanager
    def _recording(self, chunk: Any, micro_batch: PackedMicroBatch) -> Iterator[None]:
        """Records the experts that the routers of ``chunk`` choose within."""
        for _, router in self._routers[chunk]:
            router.set_router_replay_action(RouterReplayAction.RECORD)
        yield
        if (routes := self._recorded.get(micro_batch.source)) is None:  # its first chunk here
            routes = torch.zeros((len(micro_batch.source), *self._size), dtype=self._dtype, device=self._device)
            self._recorded[micro_batch.source] = routes
        own = routes[local_tokens(len(routes))]
        for column, router in self._routers[chunk]:
            own[:, column] = router.get_recorded_indices().to(routes.dtype)

    @override
    def around_score(
        self, micro_batches: Sequence[Samples], weights: Mapping[str, Tensor] | None
    ) -> contextlib.AbstractContextManager[None]:
        return self.around_pass()

    @override
    @contextlib.contextmanager
    def around_pass(self) -> Iterator[None]:
        """Ends replay and recording after a pass, also one that fails. Raises RLMegatronError if routes queued for a
        recompute were not used."""
        try:
            yield
            if left := sum(len(router.replay_backward_list) for router in self._every):
                raise RLMegatronError(f"{left} layers should have been recomputed with replayed routes, but were not")
        finally:
            self._recorded.clear()
            for router in self._every:
                router.clear_indices()
                router.clear_router_replay_action()

    @override
    def read(self) -> dict[str, Metric[float]]:
        """Returns ``moe/rerouted_fraction``: the share of (token, layer) that routers would send to other experts.

        Empty if nothing was replayed. Each rank counts its own tokens and layers.
        """
        if not self._replayed:
            return {}
        none = torch.zeros(2, dtype=torch.int64, device=self._device)  # a stage may have no experts
        total = torch.stack([none, *(router.counts for router in self._every)]).sum(0)
        dist.all_reduce(total)
        replayed, other = total.tolist()
        return {"moe/rerouted_fraction": Metric(value=other / replayed)} if replayed else {}

    @override
    def clear(self) -> None:
        self._replayed = False
        for router in self._every:
            router.counts.zero_()

    @override
    def scored(
        self, want: frozenset[Want], packed: Sequence[PackedMicroBatch], micro_batches: Sequence[Samples]
    ) -> Mapping[Want, list[Tensor]]:
        """Returns recorded routes at the samples' positions, [N, MoE layers, top_k] a micro-batch.

        Every rank gets all routes of its DP rank. A rank recorded its own tokens and layers; the rest is 0.
        """
        if "routes" not in want:
            return {}
        parts = []
        for one, samples in zip(packed, micro_batches, strict=False):  # a padded pipeline has copies at the end
            routes = self._recorded[one.source]
            source = one.source.to(routes.device)
            real = source >= 0
            out = routes.new_zeros((len(samples.input_ids), *self._size))
            out[source[real]] = routes[real]
            parts.append(out)
        everything = torch.cat(parts)
        whole = everything.view(torch.uint8)  # neither gloo nor NCCL adds int16; one rank wrote, others add 0
        for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
            if group.size() > 1:
                dist.all_reduce(whole, group=group)
        return {"routes": list(everything.cpu().split([len(samples.input_ids) for samples in micro_batches]))}
