"""Print the machine before every benchmark, and write its rows to ``--json FILE`` after it.

Figures from one kind of processor do not hold on another: matrix products, the copies between them and their ratio all
depend on the instruction set, so every figure comes with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

_ISA = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "sve",
)  # those that the kernels of torch's CPU build ask for


def machine() -> dict[str, object]:
    """The processor, which of ``_ISA`` it has, its cores here, torch's version, and the load of the last minute."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "processor": fields.get("model name") or platform.machine(),
        "isa": [flag for flag in _ISA if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "torch": version("torch"),
        "load": round(os.getloadavg()[0], 2),
    }


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, including ``--json FILE``, and print the machine."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, with the machine they are of")
    args = parser.parse_intermixed_args()
    here = machine()
    isa = " ".join(map(str, here["isa"])) if isinstance(here["isa"], list) else ""
    print(f"{here['processor']} ({isa}), {here['cores']} cores, torch {here['torch']}, load {here['load']}", flush=True)
    return args


def write(args: argparse.Namespace, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the machine, the other arguments and the rows to ``--json``."""
    if args.json:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        args.json.write_text(
            json.dumps({"machine": machine(), "options": options, "rows": rows}, indent=1, default=str)
        )
