"""Writes reference.json, the CPU's numbers that a GPU must find: ``python -m tests.gpu.reference``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.distributed.ranks import run_ranks
from tests.gpu import branch, engine

FILE = Path(__file__).with_name("reference.json")
CPU = {"device": "cpu"}
STORED = {
    "policy": ("logprobs", "routes", "logits", "inputs", "steps"),
    "critic": ("values", "steps"),
    "engine": ("tokens", "logprobs"),
}


def rounded(value: Any) -> Any:
    """Nine digits, which float32 needs."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def computed(folder: Path) -> dict[str, Any]:
    """The policy's and the critic's numbers on this machine's CPU."""
    out = {}
    mains = {"policy": branch.policy_main, "critic": branch.critic_main, "engine": engine.engine_main}
    for name, main in mains.items():
        (folder / name).mkdir()
        run_ranks(main, 1, folder / name, CPU)
        seen = json.loads((folder / name / "seen.json").read_text())
        out[name] = rounded({part: value for part, value in seen.items() if part in STORED[name]})
    return out


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(computed(Path(folder))) + "\n")


if __name__ == "__main__":
    main()
