"""The order in which each process receives a plan's layers: one after the other, so that it need not hold them all."""

from __future__ import annotations

from collections import defaultdict

from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.plans.transfers import Transfer


class Turns:
    """The turn in which each process receives each layer; what belongs to no layer comes in turn 0.

    Of processes that receive the same layers each begins with another, so that all pipeline stages, and all replicas
    that have their share of the layers to send, begin at once. Equal on every process.
    """

    def __init__(self, moves: Plan) -> None:
        layers: defaultdict[int, set[int]] = defaultdict(set)
        for some, processes in {(one.layers, one.remote) for one in moves.stretches if one.in_layers}:
            for process in processes:
                layers[process].update(some)
        alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for process in sorted(layers):
            alike[tuple(sorted(layers[process]))].append(process)
        self._places: dict[int, dict[int, int]] = {}  # by process: the place of a layer among its layers
        self._starts: dict[int, int] = {}
        for order, same in alike.items():
            places = {layer: i for i, layer in enumerate(order)}
            for i, process in enumerate(same):
                self._places[process], self._starts[process] = places, len(order) * i // len(same)

    def of(self, moved: Transfer) -> int:
        """The turn of a transfer between processes."""
        if moved.layer is None:
            return 0
        places = self._places[moved.dst_rank]
        return 1 + (places[moved.layer] - self._starts[moved.dst_rank]) % len(places)
