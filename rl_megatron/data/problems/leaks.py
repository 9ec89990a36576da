"""Finds problems that are there twice: in what is trained on, or there and in what is held out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rl_megatron.errors import DataError

logger = logging.getLogger(__name__)

OnLeak = Literal["fail", "drop", "keep"]

_MOST_SHOWN = 20


def problem_hash(*texts: str) -> int:
    """64 bits of a problem, whose texts are equal if they differ in white space alone; of 10 million problems two
    different ones have the same in one of 400,000 data sets."""
    data = "\0".join(" ".join(text.split()) for text in texts).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hashes_of(hashes: Iterable[int]) -> NDArray[np.uint64]:
    """As an array."""
    return np.fromiter(hashes, np.uint64)


def repeated(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows whose hash an earlier row has, ascending, and the first row that has it."""
    _, first, of = np.unique(hashes, return_index=True, return_inverse=True)
    first_of = first[of]
    rows = np.flatnonzero(first_of != np.arange(len(hashes)))
    return rows, first_of[rows]


def leaked(hashes: NDArray[np.uint64], held_out: Mapping[int, str]) -> NDArray[np.int64]:
    """The rows whose hash is held out, ascending."""
    return np.flatnonzero(np.isin(hashes, hashes_of(held_out)))


def rows_to_keep(
    places: Sequence[str],
    hashes: NDArray[np.uint64],
    wholes: NDArray[np.uint64],
    held_out: Mapping[int, str],
    on_leak: OnLeak,
) -> NDArray[np.int64]:
    """The rows to train on: of those with an equal hash in ``wholes`` the first, and as ``on_leak`` says of those whose
    hash in ``hashes`` is held out (its place by its hash).

    Warns with counts of what is dropped or kept. Raises DataError that names each leak by file and line.
    """
    kept = np.ones(len(places), np.bool_)
    rows, firsts = repeated(wholes)
    if len(rows):
        kept[rows] = False
        logger.warning(
            "dropped %d of %d training problems that are there twice; the first is %s, which is %s again",
            *(len(rows), len(places), places[rows[0]], places[firsts[0]]),
        )
    if not len(found := leaked(hashes, held_out)):
        return np.flatnonzero(kept)
    lines = [f"{places[row]}: trained on, but held out in {held_out[int(hashes[row])]}" for row in found[:_MOST_SHOWN]]
    if on_leak == "fail":
        more = len(found) - len(lines)
        raise DataError(
            "\n".join([*lines, *([f"... and {more} more"] if more > 0 else [])])
            + f"\n{len(found)} of {len(places)} training problems are held out too, so evaluations would measure what "
            "was learned by heart; set data.on_leak=drop not to train on them, or keep"
        )
    if on_leak == "drop":
        kept[found] = False
    done = "dropped" if on_leak == "drop" else "kept, by data.on_leak=keep,"
    logger.warning("%s %d of %d training problems that are held out too; %s", done, len(found), len(places), lines[0])
    return np.flatnonzero(kept)
