"""Plans moves into whole copies of a model, each of which the processes of a node write together. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.groups import stretches_between
from rl_megatron.weights.plans.plan import SMALLEST_CUT, Plan, dealt
from rl_megatron.weights.plans.transfers import Stretch


def plan_into_copies(src: Layout, dst: Layout, writers: Sequence[Sequence[int]]) -> Plan:
    """The plan into a copy of ``dst``, a layout of one rank, for each group of ``writers``, which are ranks of ``src``.

    A box's rows are shared out over the writers of a group that hold it and so copy them, or, if none does, over all
    of the group: then they come from the holder with the fewest elements to send. So a group receives what no writer of
    it holds, once. A rank is in one group at most. Raises WeightError as `plan` does.
    """
    drafts: list[Stretch] = []
    for stretch in stretches_between(src, dst, {0: 0}):
        drafts += _shared_out(stretch, writers, turn=len(drafts))
    return dealt(drafts, src.dims.world_size)


def _shared_out(stretch: Stretch, writers: Sequence[Sequence[int]], turn: int) -> Iterator[Stretch]:
    """The stretch cut along dim 0, each part into one writer of every group; small ones go to writers in turn."""
    held = [[rank for rank in group if rank in stretch.holders] for group in writers]
    (start, stop), *rest = stretch.box
    most = max(len(mine or group) for mine, group in zip(held, writers, strict=True))
    parts = max(1, min(most, stop - start, stretch.size // SMALLEST_CUT))
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    for i, (low, high) in enumerate(pairwise(edges), start=turn):
        yield replace(
            stretch,
            box=((low, high), *rest),
            local=tuple(sorted(mine[i % len(mine)] for mine in held if mine)),
            remote=tuple(sorted(group[i % len(group)] for mine, group in zip(held, writers, strict=True) if not mine)),
        )
