"""Converts a plan to and from JSON, for processes that receive it: lists of a Plan's fields, in their order."""

from __future__ import annotations

from typing import Any

from rl_megatron.errors import WeightError
from rl_megatron.weights.layouts.layout import Slice
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.plans.transfers import Stretch


def to_json(moves: Plan) -> list[Any]:
    """The plan as lists that `from_json` reads."""
    return [
        [b.box, _row(b.wanted), b.layers, b.experts, b.holders, [_row(h) for h in b.held], b.local, b.remote, b.bounds]
        for b in moves.stretches
    ]


def from_json(said: Any) -> Plan:
    """The plan in JSON. Raises WeightError if it is not a plan."""
    try:
        return Plan(stretches=tuple(_stretch(*row) for row in said))
    except (TypeError, ValueError) as error:
        raise WeightError(f"rank 0 sent something that is not a plan of weights: {error}") from error


def _row(one: Slice) -> list[Any]:
    return [one.hf, one.hf_box, one.param, one.shape, one.box]


def _stretch(
    box: Any, wanted: Any, layers: Any, experts: Any, holders: Any, held: Any, local: Any, remote: Any, bounds: Any
) -> Stretch:
    return Stretch(
        box=_box(box),
        wanted=_slice(*wanted),
        layers=_numbers(layers),
        experts=_numbers(experts),
        holders=_numbers(holders),
        held=tuple(_slice(*one) for one in held),
        local=_numbers(local),
        remote=_numbers(remote),
        bounds=_numbers(bounds),
    )


def _slice(hf: Any, hf_box: Any, param: Any, shape: Any, box: Any) -> Slice:
    return Slice(hf=str(hf), hf_box=_box(hf_box), param=str(param), shape=_numbers(shape), box=_box(box))


def _box(said: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(low), int(high)) for low, high in said)


def _numbers(said: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in said)
