"""Finds duplicate problems: among those to train on, or of held-out ones.

A problem leaks if the policy is asked a held-out one. Two to train on are equal if their reward reads the same, too
(`ProblemKey`). Texts are equal if they differ in white space alone. Rows with an equal 64-bit hash are compared again
by 128 bits of BLAKE2b, which are computed of these rows alone. So two different texts of one hash are both kept.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_megatron.errors import DataError

logger = logging.getLogger(__name__)

OnLeak = Literal["fail", "drop", "keep"]

_MOST_SHOWN = 20
_AT_ONCE = 1 << 20  # rows that are looked up in one call


class ProblemKey(NamedTuple):
    """The parts that equal problems have in common, besides what the policy is asked."""

    answers: bool = True
    fields: tuple[str, ...] | None = ()  # other fields of their rows; None: all of them
    hashed: int = 1  # texts in the 64 bits: of what is asked (1), and of the answer (2)


ASKED = ProblemKey(answers=False)
ANSWERED = ProblemKey(hashed=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemTexts:
    """Texts of problems by their row, without a difference of white space."""

    size: int
    place: Callable[[int], str]  # returns the problem's place, for errors
    hashes: Callable[[], NDArray[np.int64]]  # 64 bits of each text, or of a part of it; others in another process
    digests: Callable[[NDArray[np.int64]], NDArray[np.uint64]]  # 128 bits of the texts of ascending rows: [R, 2]


def normalize_whitespace(*texts: str) -> str:
    """Joins the texts of a problem, with all white space as one blank."""
    return "\0".join(" ".join(text.split()) for text in texts)


def hash_texts(texts: Iterable[str]) -> NDArray[np.int64]:
    """Returns 64 bits of each text."""
    return np.fromiter(map(hash, texts), np.int64)


def digest_texts(texts: Iterable[str]) -> NDArray[np.uint64]:
    """Returns 128 bits of each text: [R, 2]."""
    data = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    return np.frombuffer(data, np.uint64).reshape(-1, 2)


def find_duplicates(texts: ProblemTexts, hashes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows with a text that an earlier row has, ascending, and the first row that has it."""
    suspects = _rows_of_equal_hash(hashes)
    digests = texts.digests(suspects)
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal ones stay ascending
    ordered = digests[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    rows, firsts = suspects[order[~is_first]], suspects[order[starts[~is_first]]]
    ascending = np.argsort(rows)
    return rows[ascending], firsts[ascending]


def _rows_of_equal_hash(hashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the rows with a hash that another row has too, ascending."""
    order = np.argsort(hashes)
    ordered = hashes[order]
    same = ordered[1:] == ordered[:-1]
    shared = np.zeros(len(hashes), np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    return np.sort(order[shared])


def find_leaks(
    texts: ProblemTexts, hashes: NDArray[np.int64], held_out: Mapping[str, ProblemTexts]
) -> tuple[NDArray[np.int64], list[str]]:
    """Returns the rows with a held-out text, ascending, and where. Warns of rows that share only its 64 bits."""
    there: dict[bytes, str] = {}
    for key, theirs in held_out.items():
        for row, digest in enumerate(theirs.digests(np.arange(theirs.size))):
            there[digest.tobytes()] = f"{theirs.place(row)} ({key})"
    wanted = np.sort(np.concatenate([np.zeros(0, np.int64), *(theirs.hashes() for theirs in held_out.values())]))
    found = list[NDArray[np.int64]]()
    for start in range(0, len(hashes) if len(wanted) else 0, _AT_ONCE):
        part = hashes[start : start + _AT_ONCE]
        nearest = wanted[np.minimum(np.searchsorted(wanted, part), len(wanted) - 1)]
        found.append(start + np.flatnonzero(nearest == part))
    suspects = np.concatenate([np.zeros(0, np.int64), *found])
    places = [there.get(digest.tobytes()) for digest in texts.digests(suspects)]
    rows = [row for row, place in zip(suspects.tolist(), places, strict=True) if place is not None]
    if near := len(suspects) - len(rows):
        logger.warning(
            "%d of %d training problems have the text of a held-out one but another context; first: %s",
            *(near, texts.size, texts.place(int(suspects[places.index(None)]))),
        )
    return np.array(rows, np.int64), [place for place in places if place is not None]


def rows_to_keep(
    texts: ProblemTexts, wholes: ProblemTexts, held_out: Mapping[str, ProblemTexts], on_leak: OnLeak
) -> NDArray[np.bool_]:
    """Returns a mask of the rows to train on: the first of those with equal ``wholes``. ``on_leak`` decides about rows
    with a text that is held out (by the key of its section).

    Warns with counts of what is dropped or kept. Raises DataError that names each leak by file and line.
    """
    kept = np.ones(texts.size, np.bool_)
    hashes = texts.hashes()
    rows, firsts = find_duplicates(wholes, wholes.hashes())
    if len(rows):
        kept[rows] = False
        logger.warning(
            "dropped %d of %d training problems, which are duplicates; the first is %s, a copy of %s",
            *(len(rows), texts.size, texts.place(int(rows[0])), texts.place(int(firsts[0]))),
        )
    found, places = find_leaks(texts, hashes, held_out)
    if not len(found):
        return kept
    if on_leak == "fail":
        raise DataError(leak_error(texts, found, places))
    if on_leak == "drop":
        kept[found] = False
    done = "dropped" if on_leak == "drop" else "kept, by data.on_leak=keep,"
    first = _line(texts, found[0], places[0])
    logger.warning("%s %d of %d training problems that are held out too; %s", done, len(found), texts.size, first)
    return kept


def leak_error(texts: ProblemTexts, found: NDArray[np.int64], places: Sequence[str]) -> str:
    """Returns the error of `find_leaks` rows: each by file and line, and what to set."""
    lines = [_line(texts, row, place) for row, place in zip(found[:_MOST_SHOWN], places, strict=False)]
    more = len(found) - len(lines)
    return (
        "\n".join([*lines, *([f"... and {more} more"] if more > 0 else [])])
        + f"\n{len(found)} of {texts.size} training problems are held out too, so evaluations would measure what "
        "was learned by heart; set data.on_leak=drop not to train on them, or keep, "
        "with which a run that trains on them already can be resumed"
    )


def _line(texts: ProblemTexts, row: np.int64, place: str) -> str:
    return f"{texts.place(int(row))}: trained on, but held out in {place}"


def listed_texts(places: Sequence[str], texts: Iterable[str], hashed: Iterable[str] | None = None) -> ProblemTexts:
    """Returns texts that are in memory; ``hashed``: the part of each that its 64 bits are of; None: the text."""
    texts = list(texts) if hashed is None else texts
    hashes, digests = hash_texts(texts if hashed is None else hashed), digest_texts(texts)
    return ProblemTexts(
        size=len(places), place=places.__getitem__, hashes=lambda: hashes, digests=lambda rows: digests[rows]
    )


def texts_for(texts: ProblemTexts, purpose: str) -> ProblemTexts:
    """Returns the texts, equal to none for another ``purpose``."""
    return replace(
        texts,
        hashes=lambda: texts.hashes() ^ hash_texts([purpose]),
        digests=lambda rows: texts.digests(rows) ^ digest_texts([purpose]),
    )


def joined_texts(parts: Sequence[ProblemTexts]) -> ProblemTexts:
    """Returns texts of several sources, one after the other."""
    starts = np.cumsum([0, *(part.size for part in parts)])

    def place(row: int) -> str:
        part = int(np.searchsorted(starts, row, "right")) - 1
        return parts[part].place(row - int(starts[part]))

    def hashes() -> NDArray[np.int64]:
        return parts[0].hashes() if len(parts) == 1 else np.concatenate([part.hashes() for part in parts])

    def digests(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        cuts = np.searchsorted(rows, starts)
        own = zip(parts, starts.tolist(), cuts, cuts[1:], strict=False)
        return np.concatenate([part.digests(rows[low:high] - start) for part, start, low, high in own])

    return ProblemTexts(size=int(starts[-1]), place=place, hashes=hashes, digests=digests)
