"""Records in a run's starts.jsonl, a row a start, which code and which versions it ran with, and tells a resume's."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import rl_megatron
from rl_megatron.observability.files import JsonlFile, JsonRow, whole_rows
from rl_megatron.observability.history import STARTS

PACKAGES = (
    *("rl-megatron", "torch", "megatron-core", "transformer-engine", "transformers", "tokenizers", "safetensors"),
    *("numpy", "ray", "vllm", "sglang"),
)
"""The distributions whose versions a row tells, where they are installed."""
_GIT_SECONDS = 10.0


def record_start(run_folder: Path, *, step: int, engine: Path | None) -> list[str]:
    """Append the row of a start from ``step``, and return a line for each version that is not that of the start before,
    after one for each damaged row, which says nothing of it.

    ``engine``: an interpreter of this machine that servers run with, if that is another. Controller's process. Raises
    OSError that names the file.
    """
    path = run_folder / STARTS
    file = JsonlFile(path)
    file.cut_torn()
    damaged = list[str]()
    before = whole_rows(path, damaged.append) if path.is_file() else []
    now: JsonRow = {"step": step, "time": datetime.now(UTC).isoformat(timespec="seconds"), **_versions(engine)}
    file.append([now])
    file.close()
    return [f"{why}; the run goes on without it" for why in damaged] + (_changes(before[-1], now) if before else [])


def _changes(before: JsonRow, now: JsonRow) -> list[str]:
    return [
        f"{name} is {now.get(name, 'not there')}; this run's last start, from step {before['step']}, had "
        f"{before.get(name, 'none')}"
        for name in dict.fromkeys((*before, *now))
        if name not in ("step", "time") and before.get(name) != now.get(name)
    ]


def _versions(engine: Path | None) -> dict[str, str]:
    """By the name of what each is of; an engine's of its own environment, where that is on this machine."""
    found, own = {"python": platform.python_version()}, Path(rl_megatron.__file__).parent
    tracked = _git(own, "ls-files", "__init__.py")  # an installed one may be inside the repository of other code
    commits = {"code/rl_megatron": _commit(own) if tracked else "", "code/here": _commit(Path.cwd())}
    for name, commit in commits.items():
        if commit and commit not in found.values():
            found[name] = commit
    for name in PACKAGES:
        if version := _installed(name, sys.path):
            found[name] = version
    if engine is not None:
        folders = [*map(str, engine.parent.parent.glob("lib/python3.*/site-packages"))]
        for name in PACKAGES:
            if version := _installed(name, folders):
                found[f"engine/{name}"] = version
    return found


def _installed(name: str, folders: list[str]) -> str:
    """The version of a distribution in one of these folders; empty if there is none."""
    return next((one.version for one in importlib.metadata.distributions(name=name, path=folders)), "")


def _commit(folder: Path) -> str:
    """The commit that a folder of a git repository is at, and whether files differ from it; empty where git tells
    none, as where it is not installed, or refuses another user's folder."""
    commit, changed = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    if not commit or changed is None:
        return ""
    return f"{commit}, with changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints of the folder; None where it fails. It takes no lock that a user's git would meet."""
    try:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            env=dict(os.environ),
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
