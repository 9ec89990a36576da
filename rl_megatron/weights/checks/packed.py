"""Packs a rank's report for its way to the controller: checksums as columns, and what they are of by its digest.

A rank has the same boxes at every push, so it names them to a controller that does not know their digest alone. Engines
import this module: it needs numpy and torch alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Literal, cast

import numpy as np

from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checks.reports import BoxSum, Read, Report

REPORT_FORM = "2"
"""A trainer takes what servers report in this form alone."""

ReportColumn = Literal["rows", "read"]
PlacedBox = tuple[str, str, Box] | tuple[str, Box]
"""A row of a `Report` without its checksum."""


def packed_report(report: Report, known: Collection[str]) -> dict[str, object]:
    """The report as JSON. It names the boxes of a column unless their `digest_of_boxes` is ``known``; ``sums`` are
    of 64 bits, little-endian, in base64."""
    return {
        "rows": _packed("rows", report.rows, known),
        "read": _packed("read", report.read, known),
        "seconds": report.seconds,
        "window": report.window,
    }


@lru_cache(maxsize=16)  # of two columns of two models, before and after kinds are private
def digest_of_boxes(column: ReportColumn, places: tuple[PlacedBox, ...]) -> str:
    """256 bits that name the places of a column, as hexadecimal digits."""
    return hashlib.blake2b(json.dumps([column, places]).encode(), digest_size=32).hexdigest()


def _packed(column: ReportColumn, rows: Sequence[BoxSum] | Sequence[Read], known: Collection[str]) -> dict[str, object]:
    ordered = sorted(rows)  # boxes may arrive in another order at each push
    places = cast(tuple[PlacedBox, ...], tuple(row[:-1] for row in ordered))
    digest, sums = digest_of_boxes(column, places), np.array([row[-1] for row in ordered], "<u8")
    named = {} if digest in known else {"places": places}
    return {"digest": digest, "sums": base64.b64encode(sums.tobytes()).decode(), **named}
