"""Measure the search of ``rl-megatron scale``: 1.0 T parameters on 4,096 GPUs, beside its bar of 2 s.

    python -m bench.scale [--json FILE]

Prints seconds of processor time, which other work on the machine does not lengthen much, and of the clock.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

from bench.results import parse, write
from tools.planner.scale import parse_request
from tools.planner.search import search

ASKED = ("kimi-k2", "gpus=4096", "gpu=h100", "rollout.prompts_per_step=1024")
BAR = 2.0


def main() -> None:
    """Search in this process, then run the command in one of its own, and print both."""
    args = parse(argparse.ArgumentParser(description=__doc__))
    processor, clock = time.process_time(), time.perf_counter()
    found = search(parse_request(ASKED).wanted)
    rows: list[dict[str, object]] = [
        {
            "what": "search",
            "layouts": found.layouts,
            "planned": found.planned,
            "processor_seconds": round(time.process_time() - processor, 3),
            "clock_seconds": round(time.perf_counter() - clock, 3),
        }
    ]
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "launcher", "scale", *ASKED], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows.append(
        {
            "what": "command",
            "processor_seconds": round(processor, 3),
            "clock_seconds": round(time.perf_counter() - clock, 3),
            "bar": BAR,
        }
    )
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    write(args, rows)


if __name__ == "__main__":
    main()
