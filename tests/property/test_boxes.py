"""The algebra of boxes, against the sets of elements that they stand for."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_megatron.weights.boxes import Box, intersect, shift, volume, whole_box


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(low, high) for low, high in box)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    spans = st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda span: (span[0], span[0] + span[1]))
    dims = draw(st.integers(1, 3))
    return tuple(draw(spans) for _ in range(dims)), tuple(draw(spans) for _ in range(dims))


@given(pairs())
def test_boxes_meet_where_they_share_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    cut = intersect(a, b)
    assert (elements(cut) if cut is not None else set()) == elements(a) & elements(b)
    assert volume(a) == len(elements(a))


@given(pairs(), st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_a_part_holds_the_same_elements_in_the_other_tensor(pair: tuple[Box, Box], start: list[int]) -> None:
    source, other = pair
    cut = intersect(source, other) or source
    target = tuple((at, at + high - low) for at, (low, high) in zip(start, source, strict=False))
    values = np.arange(volume(source)).reshape([high - low for low, high in source])
    here, there = np.full((8,) * len(source), -1), np.full((8,) * len(source), -1)
    here[_slices(source)] = there[_slices(target)] = values
    assert np.array_equal(here[_slices(cut)], there[_slices(shift(cut, source, target))])
    assert here[_slices(whole_box(here.shape))].shape == here.shape


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)
