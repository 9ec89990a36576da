"""Trace the way of a sample, or of a weight box, through the files in a real run of one step.

    python -m bench.walk [--of sample|box] [--tree FOLDER] [--json FILE] [key=value ...]

Starts ``train`` of the code in ``--tree`` (default: here; any revision's worktree works) for one step of one prompt:
the embedded engine, a megatron learner over gloo, and two ranks if a box is traced. In every process a hook
(`bench.walk_hook`) records, in order, each file of rl_megatron/ and launcher/ with a function that takes or returns the
sample: a prompt, request, completion, turn, row, trajectory, group, batch, samples, packed micro-batch, or a loss's
inputs, also inside tuples, lists and mappings. Bare tensors (activations, log-probs) are not followed, and a view that
an object of data has of itself is no stop. Of a box: tensors, and objects of classes of rl_megatron/weights, from the
planning of the first push to its end, in the controller and in rank 0.

Printed are the stops in order (repeats as one), by file and by room (folder), and their numbers beside the bars: 24
files, each room entered once. A step goes through the learner twice: the old policy is asked, then trained. Boxes are
planned and packed in loops over all of them, so of these each file is printed where it is first entered.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from bench.results import parse, write

REPO = Path(__file__).resolve().parents[1]
KEYS = (
    *("run.dir=runs", "run.name=walk", "log.progress=plain", "log.sinks=[]", "warm_start.steps=0"),
    *("train.steps=1", "rollout.prompts_per_step=1", "rollout.group_size=4", "train.minibatches=1"),
    *("data.num_eval=1", "learner.threads=1"),
)
RANKS = {"sample": "learner.ep=1", "box": "learner.ep=2"}
FILES_BAR, ENTRIES_BAR = 24, 1
SECONDS = 900.0  # the limit for a run
VOCABULARY = ("rl_megatron/types.py",)  # what crosses rooms: no stop


class Stop(NamedTuple):
    """A file that held the sample or box, and which of its functions did."""

    time: int
    process: int
    rank: int | None
    file: str
    function: str
    event: str  # call, which took it, or return
    requests: list[str]


def watched(tree: Path, of: str, keys: Sequence[str]) -> list[Stop]:
    """All stops of a run of ``tree``'s code, in order of time."""
    with tempfile.TemporaryDirectory() as place:
        hook, out, run = (Path(place, name) for name in ("hook", "out", "run"))
        for folder in (hook, out, run):
            folder.mkdir()
        shutil.copy(REPO / "bench" / "walk_hook.py", hook / "sitecustomize.py")
        told = {"WALK_TREE": str(tree), "WALK_OUT": str(out), "WALK_OF": of, "PYTHONPATH": f"{hook}:{tree}"}
        command = [sys.executable, "-m", "launcher", "train", *KEYS, RANKS[of], *keys]
        environment = {**os.environ, **told, "PYTHONDONTWRITEBYTECODE": "1"}
        piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ended = subprocess.run(command, cwd=run, env=environment, check=False, timeout=SECONDS, **piped)
        if ended.returncode:
            raise SystemExit(f"{tree}: status {ended.returncode}\n{ended.stdout[-4000:]}")
        found = [Stop(*json.loads(line)) for path in out.iterdir() for line in path.read_text().splitlines()]
    return sorted(stop for stop in found if stop.file not in VOCABULARY)


def of_the_step(stops: Sequence[Stop]) -> list[Stop]:
    """The stops from taking the prompt to the end of the step, without evaluations."""
    asked = next(i for i, stop in enumerate(stops) if any(r.startswith("step 1") for r in stop.requests))
    first = max(i for i in range(asked) if stops[i].file == "rl_megatron/data/problems/pool.py")
    ends = (i for i in range(asked, len(stops)) if any(r.startswith("evaluation") for r in stops[i].requests))
    end = next(ends, len(stops))
    while end < len(stops) and stops[end - 1].file.endswith(("sampler.py", "evaluation.py")):  # evaluation's prompts
        end -= 1
    return list(stops[first:end])


def of_the_push(stops: Sequence[Stop]) -> list[Stop]:
    """The stops after rank 0 has read the model (which plans as well) up to the end of the first push."""
    mine = [stop for stop in stops if stop.rank in (None, 0)]
    connected = next(i for i, stop in enumerate(mine) if stop.file.endswith(("/connect.py", "/rendezvous.py")))
    read = max(i for i in range(connected) if mine[i].file.endswith("/safetensors_io.py"))
    ends = (i for i, stop in enumerate(mine) if (stop.rank, stop.function, stop.event) == (None, "push", "return"))
    return mine[read + 1 : 1 + next(i for i in ends if i > connected)]


def collapsed(names: Sequence[str]) -> list[str]:
    """Replace each run of equal neighbors by one."""
    return [name for name, _ in groupby(names)]


def shown(stops: Sequence[str]) -> str:
    """Wrap into lines of at most 110 characters."""
    lines = [""]
    for stop in stops:
        word = f"{stop} → "
        if len(lines[-1]) + len(word) > 110:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines).removesuffix(" → ")


def main() -> None:
    """Print the walk and its figures beside the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=tuple(RANKS), default="sample")
    parser.add_argument("--tree", type=Path, default=REPO, help="the files of another revision")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="keys of the run")
    args = parse(parser)
    stops = watched(args.tree.resolve(), args.of, args.keys)
    walk = of_the_step(stops) if args.of == "sample" else of_the_push(stops)
    files = collapsed([stop.file.removesuffix(".py") for stop in walk])
    if args.of == "box":
        files = list(dict.fromkeys(files))
    rooms = collapsed([str(Path(file).parent) for file in files])
    distinct, entries = sorted(set(files)), Counter(rooms)
    print(f"by file:\n{shown(files)}\n\nby room:\n{shown(rooms)}\n")
    for file in distinct:
        functions = sorted({stop.function for stop in walk if stop.file == f"{file}.py"})
        print(f"{files.count(file):3} x {file}: {', '.join(functions)}")
    print("\n| room | entered | files |\n|---|---|---|")
    for room, count in sorted(entries.items()):
        print(f"| {room} | {count} | {sum(str(Path(file).parent) == room for file in distinct)} |")
    print(f"\n{len(distinct)} files (bar {FILES_BAR}), {len(files)} stops; {len(entries)} rooms, ", end="")
    print(f"entered {sum(entries.values())} times, the most {max(entries.values())} (bar {ENTRIES_BAR} each)")
    figures = {"files": len(distinct), "bar": FILES_BAR, "stops": len(files), "rooms": dict(entries)}
    write(args, [{"of": args.of, "tree": str(args.tree), **figures, "walk": files}])


if __name__ == "__main__":
    main()
