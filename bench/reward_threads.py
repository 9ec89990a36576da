"""Measure how long the event loop waits for its turn beside plain rewards that compute in Python.

    python -m bench.reward_threads [--groups 8 64]

The baseline starts a thread for every group at once. A reward here searches texts by a regular expression for a fixed
CPU time. Both ways run in the same process, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from unittest.mock import patch

from bench.results import parse, write
from rl_megatron.rewards import threads

CPU_SECONDS, BEAT = 0.1, 0.001
BAR = 0.1  # seconds: the 95th percentile of a heartbeat's lateness
_NUMBER, _TEXT = re.compile(r"\d+"), "so the answer is 12,345.50 and 17/3 " * 500


def computes() -> None:
    """Search the text again and again."""
    until = time.thread_time() + CPU_SECONDS
    while time.thread_time() < until:
        for _ in _NUMBER.finditer(_TEXT):
            pass


async def beats(groups: int) -> tuple[float, list[float]]:
    """Seconds to score all groups, and how late each heartbeat of the loop was."""
    late, began = [], time.perf_counter()
    scoring = asyncio.gather(*(threads.run_in_daemon_thread(computes) for _ in range(groups)))
    while not scoring.done():
        asleep = time.perf_counter()
        await asyncio.sleep(BEAT)
        late.append(time.perf_counter() - asleep - BEAT)
    await scoring
    return time.perf_counter() - began, sorted(late)


def measure(kind: str, groups: int) -> dict[str, object]:
    """One row."""
    with patch.object(
        threads, "MAX_COMPUTING_THREADS", groups if kind == "all at once" else threads.MAX_COMPUTING_THREADS
    ):
        seconds, late = asyncio.run(beats(groups))
    return {
        "kind": kind,
        "groups": groups,
        "seconds": seconds,
        "late_median_ms": late[len(late) // 2] * 1e3,
        "late_p95_ms": late[int(0.95 * len(late))] * 1e3,
        "late_max_ms": late[-1] * 1e3,
    }


def main() -> None:
    """Print and write a row for each way and number of groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64])
    args = parse(parser)
    rows = []
    for groups in args.groups:
        for kind in ("all at once", "in turns"):
            rows.append(measure(kind, groups))
            print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    print(f"bar: late_p95_ms {BAR * 1e3:g} in turns")
    write(args, rows)


if __name__ == "__main__":
    main()
