"""Conversions in forks of a process without torch: killed at every step, or side by side. Prints what is wrong.

python -m tests.unit.weights.conversions kills|parts HF_DIR MEGATRON_DIR FOLDER
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rl_megatron.errors import RLMegatronError
from rl_megatron.weights.checkpoints import convert, streaming
from rl_megatron.weights.checkpoints.streaming import Share

STEPS = ("rename", "replace", "unlink", "fsync", "mkdir", "rmdir")  # of os: all that changes a folder or makes it last
Work = Callable[..., list[int]]


def forked(work: Callable[[], object]) -> int:
    """The process that does ``work``."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except (RLMegatronError, OSError):
        traceback.print_exc()
    finally:
        os._exit(status)


def killed_at(step: int, work: Work) -> None:
    """Do the work in one thread, and SIGKILL this process before its ``step``-th step, a written block among them."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def then(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        counted()
        return original(*arguments, **options)

    for name in STEPS:
        setattr(os, name, partial(then, getattr(os, name)))
    work(on_progress=counted)


def tree(folder: Path) -> dict[str, str]:
    """The digest of every file below the folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def kept(folder: Path) -> dict[str, tuple[int, int]]:
    """The finished files of a conversion that was killed: their inodes and times."""
    names = [path.stem for path in (folder / ".conversion").glob("*.json")]
    found = [folder / name for name in names if (folder / name).is_file()]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def kills(work: Work, whole: dict[str, str], root: Path, steps: range) -> None:
    """Kill at each of the steps, then run the same again."""
    for step in steps:
        out = root / f"killed_{step}"
        _, status = os.waitpid(forked(partial(killed_at, step, partial(work, out=out))), 0)
        if status == 0:
            print(f"whole after {step - 1} steps or fewer")
            return
        if os.WTERMSIG(status) != signal.SIGKILL:
            print(f"step {step}: ended with {status}")
        if out.exists():
            left = {name: digest for name, digest in tree(out).items() if not name.startswith(".conversion/")}
            if left != whole:
                print(f"step {step}: the folder has its name, but holds {sorted(left)}")
            continue
        before = kept(root / f".{out.name}.partial")
        if os.waitpid(forked(partial(work, out=out)), 0)[1] or tree(out) != whole:
            print(f"step {step}: the same command again made {sorted(tree(out)) if out.exists() else 'nothing'}")
            continue
        after = {name: ((out / name).stat().st_ino, (out / name).stat().st_mtime_ns) for name in before}
        if after != before:
            print(f"step {step}: {sorted(before)} were written again")


def parts(work: Work, whole: dict[str, str], root: Path) -> None:
    """Several at once, as many as end at the same time; then one after another, with one that was killed."""
    for count in (2, 3, 5, 9) * 3:
        out = root / f"parts_{count}"
        children = [forked(partial(work, out=out, share=Share(index=i, count=count))) for i in range(count)]
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes) or tree(out) != whole:
            print(f"{count} parts at once: {codes}, {sorted(tree(out)) if out.exists() else 'nothing'}")
        out.rename(root / f"{out.name}_{os.urandom(4).hex()}")
    out = root / "in_turn"
    os.waitpid(forked(partial(killed_at, 12, partial(work, out=out, share=Share(index=0, count=3)))), 0)
    rest = [work(out=out, share=Share(index=i, count=3)) for i in (2, 1)]
    if out.exists() or rest != [[0, 1], [0]]:
        print(f"without the part that was killed: {rest}")
    if work(out=out, share=Share(index=0, count=3)) or tree(out) != whole:
        print("the part that was killed did not complete it")
    if work(out=out, share=Share(index=1, count=3)) or tree(out) != whole:
        print("a part that comes late does not find it complete")


def main() -> None:
    """Both directions."""
    os.sched_getaffinity = lambda _: {0}  # type: ignore[assignment]
    os.fsync = lambda _: None  # type: ignore[assignment] # a killed process loses nothing that it had written
    streaming._FILES_A_CORE = 1
    kind, (hf, megatron, root), stride = sys.argv[1], map(Path, sys.argv[2:5]), sys.argv[5:]
    to_megatron: Work = partial(convert.hf_to_megatron, hf, shard_bytes=6_000)
    to_hf: Work = partial(convert.megatron_to_hf, megatron, shard_bytes=6_000)
    for first, (name, work) in enumerate((("to_megatron", to_megatron), ("to_hf", to_hf)), 1):
        folder = root / name
        work(out=folder / "whole")
        if kind == "kills":
            kills(work, tree(folder / "whole"), folder, range(first, 1000, int(stride[0]) if stride else 4))
        else:
            parts(work, tree(folder / "whole"), folder)


if __name__ == "__main__":
    main()
