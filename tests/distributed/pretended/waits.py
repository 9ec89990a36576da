"""by calling line, what makes the host wait for a pretended GPU."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

HERE = str(Path(__file__).parent)
REPO = str(Path(__file__).parents[3])
WAITS: Counter[str] = Counter()
"""How often each line waited."""


def count() -> None:
    """Count a wait of the calling line."""
    WAITS[caller()] += 1


def caller() -> str:
    """The innermost line outside of torch and of this folder: ``file:line``, a package's file from its package on."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith((HERE, "<")) and "/site-packages/torch/" not in file:
            return f"{file.split('site-packages/')[-1].removeprefix(REPO + '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
