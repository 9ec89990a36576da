"""When a server that ended is started again: of a run's engines and of its services."""

from __future__ import annotations

CALM_SECONDS = 3600.0
"""Of a server that ran for so long the restarts before count no more."""
_MOST_SECONDS = 60.0


def wait_before(restart: int, first: float) -> float:
    """Seconds to wait before a restart, from 0; they double from ``first`` to a minute at most."""
    return min(_MOST_SECONDS, first * 2.0 ** min(restart, 64))
