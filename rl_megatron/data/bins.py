"""Fills bins with sequences: each goes, longest first, to the bin with the least work that has room (`packing`).

How many bins there are is searched for, and one try is a pass over all sequences. So the search begins at what no
packing can do without, and takes steps in proportion to the number.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

# Up to an eighth more micro-batches than memory requires are tried until the heaviest is this near the mean.
GOOD_IMBALANCE = 1.01


def fill_bins(
    padded: NDArray[np.int64],
    work: NDArray[np.float64],
    *,
    dp: int,
    budget: int,
    most: int | None,
    ranks: NDArray[np.int64] | None,
) -> tuple[NDArray[np.int64], int]:
    """The bin of each sequence, and the number of bins (a multiple of ``dp``). Sequences come longest first; a bin has
    ``most`` of them. With ``ranks`` a rank's sequences are in its own bins, which are neighbours."""
    most = len(padded) if most is None else most
    groups = [np.arange(len(padded))] if ranks is None else [np.flatnonzero(ranks == d) for d in range(dp)]
    shared = dp // len(groups)  # ranks among which a group's sequences are spread
    sizes = [padded[ids] for ids in groups]
    fewest = max(max(-(-int(each.sum()) // (shared * budget)), -(-len(each) // (shared * most)), 1) for each in sizes)
    needed = max(-(-_needed(each, budget) // shared) for each in sizes)
    columns = [(each.tolist(), work[ids].tolist()) for each, ids in zip(sizes, groups, strict=True)]

    def imbalance(bins: NDArray[np.int64], num_micro: int) -> float:
        return float(np.bincount(bins, work).max() / work.sum()) * dp * num_micro

    def fit(num_micro: int) -> NDArray[np.int64] | None:
        bins = np.empty(len(padded), np.int64)
        for number, (ids, column) in enumerate(zip(groups, columns, strict=True)):
            own = _longest_first(*column, shared * num_micro, budget, most)
            if own is None:
                return None
            bins[ids] = number * shared * num_micro + own
        return bins

    heaviest = 0.0 if ranks is None else max(float(work[ids].sum()) for ids in groups)
    num_micro, best = _first_fit(fit, max(fewest, needed))
    best_imbalance, num_bins = imbalance(best, num_micro), dp * num_micro
    for more in range(num_micro + 1, fewest + fewest // 8 + 1):
        mean = float(work.sum()) / (dp * more)
        # balanced enough, or limited by the longest sequence or the heaviest rank from here on
        if best_imbalance <= max(GOOD_IMBALANCE, float(work[0]) / mean, GOOD_IMBALANCE * heaviest / (more * mean)):
            break
        bins = fit(more)
        if bins is not None and imbalance(bins, more) < best_imbalance:
            best, best_imbalance, num_bins = bins, imbalance(bins, more), dp * more
    return best, num_bins


def _needed(sizes: NDArray[np.int64], budget: int) -> int:
    """Bins that no packing can do without.

    In sequences longer than i of k + 1 parts of a bin count i: those of one bin have less than k + 1 in all, so k at
    most. With k = 1 these are the sequences that are longer than half of a bin.
    """
    return max(-(-int((((k + 1) * sizes - 1) // budget).sum()) // k) for k in range(1, 9))


def _first_fit(fit: Callable[[int], NDArray[np.int64] | None], least: int) -> tuple[int, NDArray[np.int64]]:
    """The lowest number from ``least`` on that fits, and how; what fits also does with one bin more.

    Steps of a 64th, so of one below 128, and then halves of the last.
    """
    below, number = least - 1, least
    while (bins := fit(number)) is None:
        below, number = number, number + max(1, number // 64)
    while number - below > 1:
        middle = (below + number) // 2
        fitting = fit(middle)
        if fitting is None:
            below = middle
        else:
            number, bins = middle, fitting
    return number, bins


def _longest_first(
    sizes: list[int], costs: list[float], num_bins: int, budget: int, most: int
) -> NDArray[np.int64] | None:
    """Assign sequences of falling sizes greedily; None if they do not fit. O((S + bins) log bins).

    A bin without room for this sequence is parked until the sequences are short enough: sizes only fall. One with
    ``most`` sequences is closed.
    """
    left = [most] * num_bins
    open_bins = [(0.0, b, budget) for b in range(num_bins)]  # least work on top
    parked: list[tuple[int, float, int]] = []  # most room on top
    heapify(open_bins)
    out = []
    for size, cost in zip(sizes, costs, strict=True):
        while parked and -parked[0][0] >= size:
            room, total, b = heappop(parked)
            heappush(open_bins, (total, b, -room))
        while open_bins and open_bins[0][2] < size:
            total, b, room = heappop(open_bins)
            heappush(parked, (-room, total, b))
        if not open_bins:
            return None
        total, b, room = open_bins[0]
        left[b] -= 1
        if left[b]:
            heapreplace(open_bins, (total + cost, b, room - size))
        else:
            heappop(open_bins)
        out.append(b)
    return np.array(out, np.int64)
