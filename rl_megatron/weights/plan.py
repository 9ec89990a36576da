"""Which box goes from which rank to which: integer arithmetic over two layouts, no torch, the same on every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rl_megatron.errors import WeightError
from rl_megatron.weights.layout import Box, Layout, Shape, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copy ``src_box`` of ``src_param`` on process ``src_rank`` to ``dst_box`` of ``dst_param`` on ``dst_rank``.

    The boxes have one size; the shapes are those of the whole local tensors.
    """

    src_rank: int
    src_param: str
    src_shape: Shape
    src_box: Box
    dst_rank: int
    dst_param: str
    dst_shape: Shape
    dst_box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A box of HF elements that one destination wants and ``holders`` have: (rank, that rank's slice) each."""

    box: Box
    wanted: Slice
    dst_rank: int
    holders: tuple[tuple[int, Slice], ...]


_Source = dict[str, dict[Box, list[tuple[int, Slice]]]]


def plan(src: Layout, dst: Layout, *, placement: Mapping[int, int] | None = None) -> list[Transfer]:
    """The fewest elements between processes that write every element of ``dst`` exactly once.

    Rank r of ``src`` is process r; rank r of ``dst`` lives in process ``placement[r]`` (None: in process r), and ranks
    left out are not planned. R engines with full HF weights are an HF layout with ``dp=R``. A box is taken from its
    own process where that holds it, else from the replica with the fewest elements to send so far. Transfers come in
    ``dst``'s table order. Raises WeightError naming the tensor where ``src`` lacks elements or holds rows in two ways.
    """
    where = placement if placement is not None else {rank: rank for rank in range(dst.dims.world_size)}
    if len(set(where.values())) != len(where):
        raise WeightError(f"placement={dict(where)} puts two destination ranks into one process; give each its own")
    cuts = _cuts(_index(src), dst, where)
    senders = _senders(cuts)
    return [_transfer(cut, *sender) for cut, sender in zip(cuts, senders, strict=True)]


def _index(src: Layout) -> _Source:
    """HF tensor -> its distinct source boxes, which are disjoint, each with all its holders."""
    out: _Source = {}
    for held, ranks in src.holdings():
        boxes = out.setdefault(held.hf, {})
        boxes.setdefault(held.hf_box, []).extend((rank, held) for rank in ranks)
    for hf, boxes in out.items():
        spans = list(boxes)
        for i, box in enumerate(spans):
            other = next((b for b in spans[:i] if _intersect(box, b) is not None), None)
            if other is not None:
                raise WeightError(f"{hf}: the source holds {box} and {other}, which overlap; fix its table")
    return out


def _cuts(source: _Source, dst: Layout, where: Mapping[int, int]) -> list[_Cut]:
    out: list[_Cut] = []
    for wanted, ranks in dst.holdings():
        processes = [where[rank] for rank in ranks if rank in where]
        if not processes:
            continue
        found = 0
        for box, holders in source.get(wanted.hf, {}).items():
            cut = _intersect(box, wanted.hf_box)
            if cut is not None:
                found += _volume(cut)
                held = tuple(holders)
                out.extend(_Cut(box=cut, wanted=wanted, dst_rank=rank, holders=held) for rank in processes)
        if found != _volume(wanted.hf_box):
            raise WeightError(
                f"{wanted.hf}: the source has {found} of the {_volume(wanted.hf_box)} elements of box {wanted.hf_box} "
                f"that {wanted.param} needs; add the tensor to the source's table or drop it from the destination's"
            )
    return out


def _senders(cuts: Sequence[_Cut]) -> list[tuple[int, Slice]]:
    """Who sends each cut. Cuts with the fewest holders, then the largest, choose first: the rest can even out."""
    chosen: dict[int, tuple[int, Slice]] = {}
    load: dict[int, int] = {}
    remote: list[tuple[int, int, int]] = []
    for i, cut in enumerate(cuts):
        local = next((holder for holder in cut.holders if holder[0] == cut.dst_rank), None)
        if local is not None:
            chosen[i] = local
        else:
            remote.append((len(cut.holders), -_volume(cut.box), i))
    for _, negative_volume, i in sorted(remote):
        chosen[i] = min(cuts[i].holders, key=lambda holder: (load.get(holder[0], 0), holder[0]))
        rank = chosen[i][0]
        load[rank] = load.get(rank, 0) - negative_volume
    return [chosen[i] for i in range(len(cuts))]


def _transfer(cut: _Cut, src_rank: int, held: Slice) -> Transfer:
    wanted = cut.wanted
    return Transfer(
        src_rank=src_rank,
        src_param=held.param,
        src_shape=held.shape,
        src_box=_move(cut.box, held.hf_box, held.box),
        dst_rank=cut.dst_rank,
        dst_param=wanted.param,
        dst_shape=wanted.shape,
        dst_box=_move(cut.box, wanted.hf_box, wanted.box),
    )


def _intersect(a: Box, b: Box) -> Box | None:
    cut = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return cut if all(low < high for low, high in cut) else None


def _move(cut: Box, frm: Box, to: Box) -> Box:
    return tuple((low - f[0] + t[0], high - f[0] + t[0]) for (low, high), f, t in zip(cut, frm, to, strict=True))


def _volume(box: Box) -> int:
    return prod(high - low for low, high in box)
