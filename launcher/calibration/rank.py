"""One process that calibrates: alone, or as a rank among others of the machine that compute at the same time.

`main` is the program that `asked` starts. Standard input has what is asked, standard output takes a line for each part
that is done, and then what was measured, both as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from launcher.processes.parent import die_with
from rl_megatron.scaling.machines.calibration import Curves, LearnerProbe


def main() -> None:
    """Measure as a child of the process ``sys.argv[1]``."""
    die_with(int(sys.argv[1]))
    asked: dict[str, Any] = json.load(sys.stdin)
    own = os.dup(1)
    os.dup2(2, 1)  # what libraries print goes to the log
    with os.fdopen(own, "w") as answer:
        warnings.simplefilter("ignore")

        def done(part: str) -> None:
            print(json.dumps({"done": part}), file=answer, flush=True)

        found = _measured(asked, done)
        print(json.dumps({"curves": found.model_dump(mode="json")}), file=answer, flush=True)


def _measured(asked: dict[str, Any], done: Any) -> Curves:
    import torch

    from launcher.calibration.kernels import Kernels
    from launcher.calibration.messages import messages
    from launcher.calibration.steps import decoded, probe_layouts, probes
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.learner import world
    from rl_megatron.learner.cpu import patches

    patches.install()  # before megatron's functions are bound

    rank, ranks, kind = asked["rank"], asked["ranks"], asked["device"]
    keys = {"device": kind, "dtype": asked["dtype"], "threads": asked["threads"], "timeout_seconds": 120.0}
    learner = LearnerSection(dp=ranks, **keys)
    torch.set_num_threads(asked["threads"])
    dtype = getattr(torch, asked["dtype"])
    device = world.join(learner, rank=rank, rendezvous=asked["rendezvous"], seed=0)
    done("started")
    resident = _resident() if kind == "cpu" else 0
    kernels = Kernels(device, dtype, processor=asked["processor"])
    parts: dict[str, Any] = {}
    for name in ("products", "grouped", "attention", "memory"):
        parts[name] = getattr(kernels, name)()
        done(name)
    if ranks > 1:
        parts["all_to_all"], parts["all_gather"] = messages(kernels, kind)
        done("messages")
    steps: list[LearnerProbe] = []
    for number, (dp, ep) in enumerate(probe_layouts(ranks)):
        laid_out = LearnerSection(dp=dp, ep=ep, **keys)
        if number:  # another world, for megatron's groups are those of a layout
            world.leave()
            device = world.join(laid_out, rank=rank, rendezvous=f"{asked['rendezvous']}-{number}", seed=0)
        steps += probes(kernels, laid_out, device, rank)
    done("steps of the learner")
    parts["decoded"] = tuple(decoded(kernels, device, dtype))
    done("tokens of the engine")
    world.leave()
    return Curves(ranks=ranks, probes=tuple(steps), process_bytes=resident, **parts)


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    main()
