"""Finds which ranks of two layouts hold and need each box, and groups layers and experts that move alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rl_megatron.errors import WeightError
from rl_megatron.weights.boxes import Box, intersect, volume
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Slice
from rl_megatron.weights.plans.transfers import Stretch

_Stages = tuple[tuple[int, ...], ...]  # of each source row of one HF tensor: the stages that hold a layer


def stretches_between(src: Layout, dst: Layout, where: Mapping[int, int]) -> list[Stretch]:
    """What every process in ``where`` needs, and which ranks hold it, in ``dst``'s table order, without senders.

    Rank r of ``dst`` is process ``where[r]``. Raises WeightError naming the tensor if ``src`` lacks elements or holds
    overlapping boxes.
    """
    source, target = _Source(src), _Target(dst, where)
    return [stretch for spec in dst.rows() for stretch in _stretches(source, target, spec)]


class _Source:
    """The ranks that hold each box of each HF tensor."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._rows: dict[str, list[ParamSpec]] = {}
        self._boxes: dict[str, dict[Box, list[tuple[int, int, Slice]]]] = {}
        for spec in layout.rows():
            for chunk, slices in enumerate(layout.chunks(spec)):
                for held in slices:
                    rows = self._rows.setdefault(held.hf, [])
                    if spec not in rows:
                        rows.append(spec)
                    boxes = self._boxes.setdefault(held.hf, {})
                    boxes.setdefault(held.hf_box, []).append((rows.index(spec), chunk, held))
        for hf, held_boxes in self._boxes.items():
            _refuse_overlap(hf, list(held_boxes))
        self._stages = {hf: [layout.layer_stages(spec) for spec in rows] for hf, rows in self._rows.items()}
        self._holders: dict[tuple[str, Box, _Stages, int], tuple[tuple[int, ...], tuple[Slice, ...]]] = {}

    def stages(self, hf: str, layer: int) -> _Stages:
        return tuple(stages.get(layer, ()) for stages in self._stages.get(hf, ()))

    def expert_rank(self, hf: str, expert: int) -> int:
        rows = self._rows.get(hf)
        return self._layout.expert_rank(rows[0], expert) if rows else 0

    def boxes(self, hf: str) -> list[Box]:
        return list(self._boxes.get(hf, ()))

    def holders(self, hf: str, box: Box, stages: _Stages, ep: int) -> tuple[tuple[int, ...], tuple[Slice, ...]]:
        """Ranks, ascending, with the slice by which each holds the box."""
        key = hf, box, stages, ep
        if key not in self._holders:
            found: dict[int, Slice] = {}
            for row, chunk, held in self._boxes[hf][box]:
                for stage in stages[row]:
                    for rank in self._layout.ranks(self._rows[hf][row], chunk, stage, ep):
                        found.setdefault(rank, held)
            ranks = tuple(sorted(found))
            self._holders[key] = ranks, tuple(found[rank] for rank in ranks)
        return self._holders[key]


class _Target:
    """The processes that need each chunk of each row."""

    def __init__(self, layout: Layout, where: Mapping[int, int]) -> None:
        self.layout = layout
        self._where = where
        self._processes: dict[tuple[str, int, tuple[int, ...], int], tuple[int, ...]] = {}

    def processes(self, spec: ParamSpec, chunk: int, stages: tuple[int, ...], ep: int) -> tuple[int, ...]:
        key = spec.name, chunk, stages, ep
        if key not in self._processes:
            ranks = [rank for stage in stages for rank in self.layout.ranks(spec, chunk, stage, ep)]
            self._processes[key] = tuple(sorted(self._where[rank] for rank in ranks if rank in self._where))
        return self._processes[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Layers and experts of one chunk that the same ranks hold and the same processes need."""

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    wanting: tuple[int, ...]
    src_stages: _Stages
    src_ep: int


def _groups(source: _Source, target: _Target, spec: ParamSpec, chunk: int, hf: str) -> Iterator[_Group]:
    layers: dict[tuple[tuple[int, ...], _Stages], list[int]] = {}
    for layer, stages in sorted(target.layout.layer_stages(spec).items()):
        layers.setdefault((stages, source.stages(hf, layer)), []).append(layer)
    experts: dict[tuple[int, int], list[int]] = {}
    for expert in range(target.layout.shape.num_experts if "{expert}" in spec.name else 1):
        experts.setdefault((target.layout.expert_rank(spec, expert), source.expert_rank(hf, expert)), []).append(expert)
    for (dst_stages, src_stages), some_layers in layers.items():
        for (dst_ep, src_ep), some_experts in experts.items():
            wanting = target.processes(spec, chunk, dst_stages, dst_ep)
            if wanting:
                yield _Group(
                    layers=tuple(some_layers),
                    experts=tuple(some_experts),
                    wanting=wanting,
                    src_stages=src_stages,
                    src_ep=src_ep,
                )


def _stretches(source: _Source, target: _Target, spec: ParamSpec) -> Iterator[Stretch]:
    for chunk, slices in enumerate(target.layout.chunks(spec)):
        for wanted in slices:
            cuts = [(box, cut) for box in source.boxes(wanted.hf) if (cut := intersect(box, wanted.hf_box))]
            for group in _groups(source, target, spec, chunk, wanted.hf):
                held = [(cut, *source.holders(wanted.hf, box, group.src_stages, group.src_ep)) for box, cut in cuts]
                found = [_stretch(wanted, group, cut, ranks, slices) for cut, ranks, slices in held if ranks]
                _refuse_gap(wanted, group, found)
                yield from found


def _stretch(wanted: Slice, group: _Group, cut: Box, ranks: tuple[int, ...], slices: tuple[Slice, ...]) -> Stretch:
    mine = set(ranks).intersection(group.wanting)
    return Stretch(
        box=cut,
        wanted=wanted,
        layers=group.layers,
        experts=group.experts,
        holders=ranks,
        held=slices,
        local=tuple(sorted(mine)),
        remote=tuple(process for process in group.wanting if process not in mine) if mine else group.wanting,
    )


def _refuse_overlap(hf: str, boxes: Sequence[Box]) -> None:
    for i, box in enumerate(boxes):
        other = next((b for b in boxes[:i] if intersect(box, b) is not None), None)
        if other is not None:
            raise WeightError(f"{hf}: the source holds {box} and {other}, which overlap; fix its table")


def _refuse_gap(wanted: Slice, group: _Group, stretches: Sequence[Stretch]) -> None:
    found, needed = sum(stretch.size for stretch in stretches), volume(wanted.hf_box)
    if found != needed:
        layer, expert = group.layers[0], group.experts[0]
        raise WeightError(
            f"{wanted.hf.format(layer=layer, expert=expert)}: the source has {found} of the {needed} elements of box "
            f"{wanted.hf_box} that {wanted.param.format(layer=layer, expert=expert)} needs; add the tensor to the "
            f"source's table or drop it from the destination's"
        )
