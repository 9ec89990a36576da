"""Check that two revisions train alike: the default run's metrics and samples are equal to the bit.

    python -m bench.same_metrics BEFORE [AFTER] [key=value ...] [--json FILE]

Checks out both revisions of this repository (AFTER defaults to the working tree) and starts ``train`` in each,
one after the other, with this interpreter, its packages and the same keys; the default is seed 0 of the default run.
Rows are compared without the fields that depend on the clock. The bar is no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.results import parse, write
from rl_megatron.observability.files import JsonRow, read_jsonl
from rl_megatron.observability.metrics import deterministic, documented

REPO = Path(__file__).resolve().parents[1]
KEYS = ("seed=0", "log.progress=plain", "log.sinks=[]", "run.dir=runs", "run.name=same")


@contextlib.contextmanager
def checked_out(revision: str | None, folder: Path) -> Iterator[Path]:
    """The files of a revision, in their own worktree; None means the working tree."""
    if revision is None:
        yield REPO
        return
    git = ["git", "-C", str(REPO), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), revision], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def record(tree: Path, folder: Path, keys: list[str]) -> tuple[list[JsonRow], list[JsonRow]]:
    """Metrics, without what depends on the clock, and samples of a run of ``tree``'s code."""
    folder.mkdir()
    with (folder / "out.txt").open("wb") as out:
        command = [sys.executable, "-m", "launcher", "train", *KEYS, *keys]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        ended = subprocess.run(command, cwd=folder, stdout=out, stderr=out, env=environment, check=False)
    if ended.returncode:
        raise SystemExit(f"{tree}: status {ended.returncode}\n{(folder / 'out.txt').read_text()[-4000:]}")
    run = folder / "runs" / "same"
    rows = list(read_jsonl(run / "metrics.jsonl"))
    unknown = sorted({name for row in rows for name in row if documented(name) is None})
    if unknown:
        print(f"{tree.name}: not compared, for this version does not have them: {', '.join(unknown)}")
    rows = [deterministic({name: row[name] for name in row if name not in unknown}) for row in rows]
    return rows, list(read_jsonl(run / "samples.jsonl"))


def main() -> int:
    """Run both and print where they differ; exit with status 1 if they do."""
    parser = argparse.ArgumentParser(prog="python -m bench.same_metrics", description=__doc__)
    parser.add_argument("before", metavar="BEFORE", help="a revision of git")
    parser.add_argument("rest", nargs="*", metavar="AFTER|key=value", help="another, and keys of the runs")
    args = parse(parser)
    keys = [word for word in args.rest if "=" in word]
    after = next((word for word in args.rest if "=" not in word), None)
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for name, revision in (("before", args.before), ("after", after)):
            with checked_out(revision, Path(place, f"tree-{name}")) as tree:
                found[name] = record(tree, Path(place, name), keys)
    differences = []
    for what, old, new in zip(("metrics", "samples"), found["before"], found["after"], strict=True):
        if len(old) != len(new):
            differences.append(f"{what}: {len(old)} rows before, {len(new)} after")
        for number, (a, b) in enumerate(zip(old, new, strict=False), start=1):
            names = sorted(name for name in a.keys() | b.keys() if (name in a, a.get(name)) != (name in b, b.get(name)))
            differences += [f"{what}, row {number}: {n} was {a.get(n)!r}, is {b.get(n)!r}" for n in names]
    rows = len(found["before"][0])
    print(f"{rows} rows of metrics, {len(found['before'][1])} of samples: {len(differences)} differences (bar 0)")
    print("\n".join(differences[:20]))
    write(args, [{"rows": rows, "differences": len(differences), "bar": 0}])
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
